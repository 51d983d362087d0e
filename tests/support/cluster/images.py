"""The images of `images/`, built for tests and brought to the cluster: one place for their names.

An image's tag is a hash of all that goes into it, so what is there is never built again, and a test never runs with an
image of other sources. On a machine without wheels for CPUs, what a CPU does not load is removed from torch (CPU_ONLY).

`python -m tests.support.cluster.images` does by hand what tests do, and prints the names.

With TANDEM_IMAGES set, say to `registry.example/team/tandem-{name}:1.2`, nothing is built: the cluster pulls those.
"""

import configparser
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT
from tests.support.cluster.machine import ClusterError, prerequisites
from tests.support.cluster.machine import images as registry
from tests.support.cluster.machine.places import CACHE, KUBECONFIG, REGISTRY

GIVEN = "TANDEM_IMAGES"
ROOMS = {
    "operator": ("core", "coordinator", "operator"),
    "trainer": ("core", "trainer", "evaluator"),
    "evaluator": ("core", "trainer", "evaluator"),
}
"""Which folders of code each image holds."""
SCRIPTS = ("images/build.py", "images/requirements.py", "images/install.sh", "images/bytecode.py", "images/sbom.py")
INGREDIENTS = (".dockerignore", "README.md", "constraints.txt", "pyproject.toml", *SCRIPTS)
"""What goes into all of them, beside their Dockerfile."""
PACKAGES = ("python3", "python3-venv", "ca-certificates", "tini")
SUITE = "bookworm"
NOT_NEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
BASE = "localhost/tandem-test-base"
CERTIFICATES = Path("/etc/ssl/certs")
LOG = ROOT / "runs" / "images"
ISOLATION = {"BUILDAH_ISOLATION": "chroot"}
"""Without the right to make namespaces, which most containers lack, nothing else works."""
PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout", "cert")
PROGRESS_SECONDS = 15.0
BUILD_SECONDS = 1800.0
SERVER = """FROM {base}
COPY constraints.txt /
RUN --mount=type=secret,id=pip.conf,target=/run/pip.conf python3 -m venv /venv \\
    && PIP_CONFIG_FILE=/run/pip.conf /venv/bin/pip install -q --no-cache-dir -c /constraints.txt mlflow
ENV PATH=/venv/bin:$PATH
USER 65532:65532
"""
"""An image with MLflow's server. MLflow's own is in a registry that tests do not need to reach."""
KEPT = 3
"""Tags of one image that stay; older ones are removed when a new one is built."""
LIBRARIES = ("accelerate", "debugpy", "lightning", "peft", "transformers", "trl")
"""What users build into an image of their own, from the trainer's (`docs/images.md`)."""


@dataclass(frozen=True)
class Images:
    """Names under which the nodes pull them."""

    operator: str
    trainer: str
    evaluator: str


def provide() -> Images:
    """Have the cluster's nodes find the images: build what is not there, and push it.

    Raises:
        ClusterError: one cannot be built; the message says what is missing, or where the builder's log is.
        OSError: one cannot be pushed.
    """
    if given := os.environ.get(GIVEN):
        return Images(**{name: given.format(name=name) for name in ROOMS})
    if os.environ.get("KUBECONFIG", str(KUBECONFIG)) != str(KUBECONFIG):
        raise ClusterError(
            "the cluster in KUBECONFIG cannot pull images from this machine: push them with "
            f"`make images REGISTRY=… PUSH=1`, and set {GIVEN}=REGISTRY/tandem-{{name}}:TAG"
        )
    images = build_all()
    registry.load(*vars(images).values())
    return images


def build_all() -> Images:
    """Build what is not there, so that only pushing is left.

    Raises:
        ClusterError: one cannot be built.
    """
    with _alone():
        return Images(**{name: build(name) for name in ROOMS})


def build(name: str) -> str:
    """Build one image if it is not there, with progress on standard output. Returns its name.

    Raises:
        ClusterError: it cannot be built.
    """
    prerequisites.prepare()
    while not _is_there(image := f"{REGISTRY}/tandem-{name}:{(tag := digest(name))}"):
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as configuration:
            configuration.write(_pip_configuration())
            configuration.flush()
            _watched(_command(name, tag, configuration.name), f"tandem-{name}", ISOLATION)
        if digest(name) != tag:
            # Somebody has edited meanwhile: what was built may be neither the one state nor the other.
            _buildah("rmi", image)
    _forget_old(f"{REGISTRY}/tandem-{name}")
    return image


def _command(name: str, tag: str, configuration: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "images" / "build.py"), name, "--builder=buildah"),
        *(f"--tag={tag}", f"--registry={REGISTRY}/", f"--base-image={_base()}", f"--pip-conf={configuration}"),
        *(f"--torch-index={os.environ.get('TORCH_INDEX', '')}", f"--cpu-only={_cpu_only()}"),
        *("--", f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"),
    ]


def digest(name: str) -> str:
    """Changes with everything that goes into an image."""
    found = hashlib.sha256(repr((_recipe(), os.environ.get("TORCH_INDEX"))).encode())
    paths = [ROOT / path for path in (*INGREDIENTS, f"images/{name}.Dockerfile")]
    if name != "operator":
        paths.append(ROOT / "images" / "cpu_only.py")
    for room in ROOMS[name]:
        inside = (ROOT / room).rglob("*")
        paths += sorted(path for path in inside if path.is_file() and "__pycache__" not in path.parts)
    for path in paths:
        found.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def provide_libraries(images: Images) -> str:
    """Have the nodes find an image of a user's own: that of the trainer, with LIBRARIES. Returns its name.

    Raises:
        ClusterError: it cannot be made.
        OSError: it cannot be pushed.
    """
    if given := os.environ.get(GIVEN):
        return given.format(name="libraries")
    image = build_libraries(images)
    registry.load(image)
    return image


def build_libraries(images: Images) -> str:
    """Build it if it is not there. LIBRARIES come from the environment of the tests, as they are there.

    Raises:
        ClusterError: it cannot be made.
    """
    found = list(_with_requirements(LIBRARIES))
    what = f"{images.trainer} {sorted(f'{one.name}=={one.version}' for one in found)}"
    repository = f"{REGISTRY}/tandem-libraries"
    image = f"{repository}:{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    with _alone():
        if not _is_there(image):
            print("building tandem-libraries (only once)", flush=True)
            container = _buildah("from", "--pull-never", images.trainer)
            try:
                root = Path(_buildah("mount", container))
                (site,) = root.glob("opt/tandem/lib/python3*/site-packages")
                for one in found:
                    _copy(one, site)
                _buildah("commit", "-q", container, image)
            finally:
                _buildah("rm", container)
            _forget_old(repository)
    return image


def provide_mlflow() -> str:
    """Have the nodes find an image with MLflow, in the version of `constraints.txt`. Returns its name.

    Raises:
        ClusterError: it cannot be built.
        OSError: it cannot be pushed.
    """
    if given := os.environ.get(GIVEN):
        return given.format(name="mlflow")
    prerequisites.prepare()
    repository, constraints = f"{REGISTRY}/mlflow", ROOT / "constraints.txt"
    with _alone():
        text = SERVER.format(base=_base())
        image = f"{repository}:{hashlib.sha256(text.encode() + constraints.read_bytes()).hexdigest()[:16]}"
        if not _is_there(image):
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(constraints, folder)
                (Path(folder) / "Dockerfile").write_text(text)
                (Path(folder) / "pip.conf").write_text(_pip_configuration())
                secret = f"--secret=id=pip.conf,src={folder}/pip.conf"
                certificates = f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"
                _watched(["buildah", "bud", f"--tag={image}", secret, certificates, folder], "mlflow", ISOLATION)
            _forget_old(repository)
    registry.load(image)
    return image


def _with_requirements(names: Iterable[str]) -> Iterator[metadata.Distribution]:
    """Packages of this environment, and all that they require but torch, which is in the image."""
    left = [Requirement(name) for name in names]
    seen: set[tuple[str, str]] = set()
    given: set[str] = set()
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if name in ("torch", "torchvision"):
            continue
        found = metadata.distribution(name)
        if name not in given:
            given.add(name)
            yield found
        for extra in ("", *one.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                needed = [Requirement(line) for line in found.requires or ()]
                left += [more for more in needed if more.marker is None or more.marker.evaluate({"extra": extra})]


def _copy(package: metadata.Distribution, site: Path) -> None:
    """Put the modules of a package where the image has none, with their bytecode: a pod could not write it."""
    for file in package.files or ():
        source, target = Path(str(file.locate())), site / str(file)
        if ".." in file.parts or "__pycache__" in file.parts or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # With its time, by which Python knows whether bytecode is of it.
        shutil.copy2(source, target)
        compiled = Path(importlib.util.cache_from_source(str(source))) if source.suffix == ".py" else None
        if compiled is not None and compiled.exists():
            (target.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copy2(compiled, target.parent / "__pycache__")


def _cpu_only() -> str:
    return "" if os.environ.get("TORCH_INDEX") else "1"


def _recipe() -> str:
    return os.environ.get("BASE_IMAGE") or f"{SUITE} {' '.join(PACKAGES)}"


def _base() -> str:
    """A small Debian with Python: the one that is given, or one made here, from Debian's own packages."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    image = f"{BASE}:{hashlib.sha256(_recipe().encode()).hexdigest()[:16]}"
    if not _is_there(image):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "root"
            including = f"--include={','.join(PACKAGES)}"
            _watched(["debootstrap", "--variant=minbase", including, SUITE, str(root)], "tandem-test-base")
            for name in NOT_NEEDED:
                shutil.rmtree(root / name)
            container = _buildah("from", "scratch")
            try:
                _buildah("add", "-q", container, str(root), "/")
                _buildah("commit", "-q", container, image)
            finally:
                _buildah("rm", container)
    return image


def _pip_configuration() -> str:
    """pip's settings on this machine, as far as they mean something inside of a build."""
    files = ["/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf", os.environ.get("PIP_CONFIG_FILE", "")]
    read = configparser.RawConfigParser()
    read.read(Path(name).expanduser() for name in files if name)
    settings = {name: read.get("global", name, fallback="") for name in PIP_SETTINGS}
    for name in PIP_SETTINGS:
        settings[name] = os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or settings[name]
    return "".join(["[global]\n", *(f"{name} = {value}\n" for name, value in settings.items() if value)])


def _watched(command: list[str], name: str, environment: dict[str, str] | None = None) -> None:
    """Run a builder, and say every now and then how far it is."""
    LOG.mkdir(parents=True, exist_ok=True)
    log = LOG / f"{name}.log"
    started = shown = time.monotonic()
    print(f"building {name} (only once)", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        )
    try:
        while (code := process.poll()) is None:
            time.sleep(0.2)
            now = time.monotonic()
            if now - started > BUILD_SECONDS:
                raise ClusterError(f"building {name} took more than {BUILD_SECONDS:.0f} s; see {log.relative_to(ROOT)}")
            if now - shown >= PROGRESS_SECONDS:
                shown = now
                print(f"building {name}: {now - started:.0f} s, {_newest_step(log)}", flush=True)
    finally:
        process.kill()
        process.wait()
    if code != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise ClusterError(f"building {name} failed; {log.relative_to(ROOT)} ends with\n{last}")
    print(f"built {name} in {time.monotonic() - started:.0f} s", flush=True)


def _newest_step(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if " STEP " in line] or lines
    return re.sub(r" --mount=\S+", "", steps[-1])[:80] if steps else "starting"


def _is_there(image: str) -> bool:
    return (
        subprocess.run(["buildah", "inspect", "--type=image", image], capture_output=True, timeout=60).returncode == 0
    )


def _forget_old(repository: str) -> None:
    """Keep a disk from filling with the images of every state that the code once had. Layers that others use stay."""
    listed = _buildah("images", "--format", "{{.CreatedAtRaw}} {{.Tag}}", "--filter", f"reference={repository}")
    tags = [line.rpartition(" ")[2] for line in sorted(listed.splitlines(), reverse=True)]
    for tag in [tag for tag in tags if re.fullmatch(r"[0-9a-f]{16}", tag)][KEPT:]:
        # One that somebody is looking into stays for this time.
        subprocess.run(["buildah", "rmi", f"{repository}:{tag}"], capture_output=True, timeout=600)


def _buildah(*arguments: str) -> str:
    result = subprocess.run(["buildah", *arguments], capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise ClusterError(f"buildah {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.strip()


@contextmanager
def _alone() -> Iterator[None]:
    """Two runs would build the same image twice."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for one in vars(provide()).values():
        print(one)
