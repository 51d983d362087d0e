"""Builds the images with Docker or buildah, whichever is installed: `make images`, or `python3 images/build.py --help`.

Arguments after `--` are passed to the builder. Needs nothing but Python: a machine that builds images may have no
.venv.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ("operator", "trainer", "evaluator")


def main(arguments: Sequence[str]) -> int:
    """Build the images. Returns 1 with a message if there is no builder, or the builder's own exit code."""
    if "--" in arguments:
        separator = list(arguments).index("--")
        arguments, builder_args = arguments[:separator], list(arguments[separator + 1 :])
    else:
        builder_args = []
    options = _options(arguments)
    builder = options.builder or _builder()
    if builder is None:
        print("make images: no builder; install Docker and start it, or install buildah", file=sys.stderr)
        return 1
    if builder == "docker" and "," in options.platforms and not options.push:
        print("make images: Docker cannot keep images of several platforms; add PUSH=1 to push them", file=sys.stderr)
        return 1
    # buildah reports the digest of this machine's platform alone.
    if not (builder == "buildah" and options.platforms):
        options.base_image = pinned(builder, options.base_image or default_base())
    for image in options.images or IMAGES:
        name = f"{options.registry}tandem-{image}:{options.tag}"
        print(f"building {name}", flush=True)
        for command in commands(builder, image, name, options, builder_args):
            # Only BuildKit supports build secrets; older versions of Docker have to be told to use it.
            code = subprocess.run(command, cwd=ROOT, env={**os.environ, "DOCKER_BUILDKIT": "1"}).returncode
            if code != 0:
                print(f"make images: {builder} could not build {name}", file=sys.stderr)
                return code
    return 0


def commands(
    builder: str, image: str, name: str, options: argparse.Namespace, builder_args: list[str]
) -> list[list[str]]:
    """Commands, in this order, that build one image and push it if requested."""
    build_args = [f"--file=images/{image}.Dockerfile", *_arguments(image, options), *_labels(options), *builder_args]
    platforms = [f"--platform={options.platforms}"] if options.platforms else []
    if builder == "docker":
        build_command = ["buildx", "build", *platforms, "--push"] if "," in options.platforms else ["build", *platforms]
        push = [["docker", "push", name]] if options.push and "," not in options.platforms else []
        return [["docker", *build_command, *build_args, f"--tag={name}", "."], *push]
    build = ["buildah", "bud", "--layers", "--force-rm", *build_args]
    if "," in options.platforms:
        push = [["buildah", "manifest", "push", "--all", name, f"docker://{name}"]] if options.push else []
        return [[*build, *platforms, f"--manifest={name}", "."], *push]
    return [[*build, *platforms, f"--tag={name}", "."], *([["buildah", "push", name]] if options.push else [])]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="images/build.py", description="Build the images.", epilog=__doc__)
    parser.add_argument(
        "images", nargs="*", choices=[[], *IMAGES], help="images to build (default: all)", metavar="IMAGE"
    )
    parser.add_argument(
        "--builder", choices=("docker", "buildah"), help="builder to use (default: an installed one, Docker first)"
    )
    parser.add_argument("--tag", default=version(), help="tag of the images (default: the version, %(default)s)")
    parser.add_argument("--registry", default="", help="registry prefix of their names, with a trailing slash")
    parser.add_argument("--base-image", default="", help="a Debian with Python 3.11 or newer")
    parser.add_argument("--torch-index", default="", help="package index of torch")
    parser.add_argument(
        "--cpu-only", default="", help="1 removes the parts of a CUDA build of torch that a CPU never loads"
    )
    parser.add_argument("--platforms", default="", help="such as linux/amd64,linux/arm64 (default: this machine's)")
    parser.add_argument(
        "--pip-conf", default="", help="pip's configuration, used while building and stored in no image"
    )
    parser.add_argument("--source", default="", help="URL of the sources, for the label")
    parser.add_argument("--push", default="", help="1 pushes the images")
    return parser.parse_args(arguments)


def _arguments(image: str, options: argparse.Namespace) -> list[str]:
    build_args = {"BASE_IMAGE": options.base_image}
    if image != "operator":
        build_args |= {"TORCH_INDEX": options.torch_index, "CPU_ONLY": options.cpu_only}
    secret = [f"--secret=id=pip.conf,src={options.pip_conf}"] if options.pip_conf else []
    return [*(f"--build-arg={name}={value}" for name, value in build_args.items() if value), *secret]


def _labels(options: argparse.Namespace) -> list[str]:
    labels = {"version": version(), "revision": revision(), "source": options.source}
    name, _, digest = options.base_image.partition("@")
    if digest:
        labels |= {"base.name": name, "base.digest": digest}
    return [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items() if value]


def default_base() -> str:
    """The base image that the Dockerfiles name."""
    text = (ROOT / "images" / "operator.Dockerfile").read_text()
    return next(line.partition("=")[2] for line in text.splitlines() if line.startswith("ARG BASE_IMAGE="))


def pinned(builder: str, base: str) -> str:
    """Pin a base image by its digest: a tag may move while the images are built, and afterwards nobody could tell what
    they contain. An image with a digest, or a local one without any, is returned unchanged."""
    if "@" in base or base.partition("/")[0] == "localhost":
        return base
    pulled = subprocess.run([builder, "pull", "-q", base], capture_output=True, text=True)
    inspect = ["docker", "image", "inspect", "--format={{index .RepoDigests 0}}", base]
    if builder == "buildah":
        inspect = ["buildah", "inspect", "--type=image", "--format={{.FromImageDigest}}", base]
    output = subprocess.run(inspect, capture_output=True, text=True).stdout.strip()
    digest = output[output.find("sha256:") :]
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        reason = pulled.stderr.strip().splitlines()[-1:] or ["it has no digest"]
        print(f"make images: {base} is pinned by its tag only ({reason[0]})", file=sys.stderr)
        return base
    return f"{base}@{digest}"


def version() -> str:
    """Version of the distribution."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@cache
def revision() -> str:
    """The commit that is built; `…-modified` if the work tree has changes, empty without a repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    described = [git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-modified"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _builder() -> str | None:
    # Docker is often installed without a running daemon, and then builds nothing.
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "info"], capture_output=True, timeout=60).returncode == 0:
        return "docker"
    return "buildah" if shutil.which("buildah") else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
