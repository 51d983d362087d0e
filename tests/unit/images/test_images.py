"""What builds the images: which commands, and what goes into which layer."""

import json
import platform
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.processes.distribution import NAME
from tests.support import ROOT

IMAGES = ROOT / "images"
NAMES = ("operator", "trainer", "evaluator")
BUILD: dict[str, Any] = runpy.run_path(str(IMAGES / "build.py"))


def options(**given: str) -> SimpleNamespace:
    names = ("base_image", "torch_index", "cpu_only", "platforms", "pip_conf", "source", "push")
    return SimpleNamespace(**(dict.fromkeys(names, "") | given))


def commands(builder: str, image: str = "trainer", more: tuple[str, ...] = (), **given: str) -> list[str]:
    return [" ".join(one) for one in BUILD["commands"](builder, image, "tandem-x:1", options(**given), list(more))]


def layers(name: str) -> str:
    text = (IMAGES / f"{name}.Dockerfile").read_text()
    return text.partition("the same, so that both images share these layers.\n")[2].partition(
        "# End of the shared layers"
    )[0]


def test_trainer_and_evaluator_are_built_by_the_same_lines_up_to_the_code() -> None:
    assert layers("trainer") == layers("evaluator")
    assert layers("trainer").count("RUN --mount=type=secret") == 2


@pytest.mark.parametrize("name", NAMES)
def test_no_file_says_where_packages_come_from_or_for_which_processor(name: str) -> None:
    text = (IMAGES / f"{name}.Dockerfile").read_text() + (IMAGES / "install.sh").read_text()
    for word in ("http", "x86", "amd64", "python3.11/"):
        assert word not in text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_copied_is_let_through(name: str) -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in (IMAGES / f"{name}.Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from" not in line:
            for path in line.split()[1:-1]:
                assert (ROOT / path).exists(), path
                assert path in let_through or str(Path(path).parent / f"*{Path(path).suffix}") in let_through, path


def test_docker_and_buildah_build_from_the_same_arguments() -> None:
    given = {"base_image": "debian-python:1", "torch_index": "index/cpu", "pip_conf": "pip.conf"}
    for builder, start in {"docker": "docker build ", "buildah": "buildah bud "}.items():
        (command,) = commands(builder, **given)
        assert command.startswith(start)
        assert "--file=images/trainer.Dockerfile" in command
        assert "--build-arg=BASE_IMAGE=debian-python:1 --build-arg=TORCH_INDEX=index/cpu" in command
        assert "--secret=id=pip.conf,src=pip.conf" in command
        assert command.endswith("--tag=tandem-x:1 .")
        assert "org.opencontainers.image.version=0.1.0" in command


def test_what_is_not_given_is_left_to_the_files() -> None:
    (command,) = commands("docker")
    assert "--build-arg" not in command
    assert "--platform" not in command
    assert "--secret" not in command
    assert "image.source" not in command


def test_the_operator_knows_no_torch() -> None:
    (command,) = commands("docker", "operator", torch_index="index/cpu", cpu_only="1")
    assert "--build-arg" not in command


def test_several_platforms_are_one_name() -> None:
    several = "linux/amd64,linux/arm64"
    assert commands("docker", platforms=several, push="1")[0].startswith(
        f"docker buildx build --platform={several} --push "
    )
    build, push = commands("buildah", platforms=several, push="1")
    assert build.endswith(f"--platform={several} --manifest=tandem-x:1 .")
    assert push == "buildah manifest push --all tandem-x:1 docker://tandem-x:1"


def test_only_what_is_asked_for_is_pushed() -> None:
    assert commands("docker", push="1")[1:] == ["docker push tandem-x:1"]
    assert commands("buildah", push="1")[1:] == ["buildah push tandem-x:1"]
    assert len(commands("docker")) == len(commands("buildah")) == 1


def test_what_the_caller_adds_reaches_the_builder() -> None:
    assert " --volume=/a:/a " in commands("buildah", more=("--volume=/a:/a",))[0]


def test_requirements_are_split_into_torch_and_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    requirements: dict[str, Any] = runpy.run_path(str(IMAGES / "requirements.py"))
    requirements["main"]("evaluator", tmp_path)
    torch, rest, pins, others = (
        (tmp_path / name).read_text().splitlines()
        for name in ("torch.txt", "rest.txt", "constraints.txt", "constraints-without-cuda.txt")
    )
    assert [line.partition(">")[0] for line in torch] == ["torch", "torchvision"]
    assert any(line.startswith("pydantic") for line in rest)
    assert any(line.startswith("scikit-learn") for line in rest)
    assert not [line for line in rest if line.startswith("torch")]
    assert pins == (ROOT / "constraints.txt").read_text().splitlines()
    gone = set(pins) - set(others)
    assert {line.partition("==")[0] for line in gone} >= {"triton", "cuda-bindings", "nvidia-cublas"}
    assert {"torch", "nvidia-ml-py", "numpy"} <= {line.partition("==")[0] for line in others}
    requirements["main"]("operator", tmp_path)
    assert (tmp_path / "torch.txt").read_text() == ""
    assert (tmp_path / "torch.txt").stat().st_mtime == 0


def compile_all(folder: Path, *prefix: Path) -> str:
    command = [sys.executable, str(IMAGES / "bytecode.py"), str(folder), *map(str, prefix)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_what_is_not_compiled_yet_is_compiled_once_whatever_its_time(tmp_path: Path) -> None:
    folder = tmp_path / "overlay" / "lib"
    folder.mkdir(parents=True)
    (folder / "sound.py").write_text("def where():\n    raise KeyError\n")
    (folder / "of_another_python.py").write_text("print 'hello'\n")
    assert compile_all(folder, tmp_path / "overlay") == "compiled 1 of 2 modules\n"
    (compiled,) = (folder / "__pycache__").glob("*.pyc")
    content = compiled.read_bytes()
    assert content[4:8] == b"\x01\0\0\0", "the source is not looked at any more (PEP 552)"
    assert b"/lib/sound.py" in content
    assert str(tmp_path).encode() not in content
    assert compile_all(folder, tmp_path / "overlay") == "compiled 0 of 1 modules\n"
    assert compiled.read_bytes() == content


def test_only_large_libraries_that_were_not_loaded_are_removed(tmp_path: Path) -> None:
    unused = runpy.run_path(str(IMAGES / "cpu_only.py"))["unused"]
    sizes = {"nvidia/a/loaded.so": 2, "nvidia/a/not_loaded.so": 2, "nvidia/a/small.so": 0, "torch/not_loaded.so": 2}
    for name, mebibytes in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(mebibytes << 20))
    unused.__globals__["SITE"] = tmp_path
    found = [str(path.relative_to(tmp_path)) for path in unused({tmp_path / "nvidia/a/loaded.so"})]
    assert found == ["nvidia/a/not_loaded.so"]


def installed(site: Path, name: str, version: str, **fields: str) -> None:
    """Put the metadata of a package into a folder, as pip would."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = {"Metadata-Version": "2.4", "Name": name, "Version": version}
    lines |= {key.replace("_", "-"): value for key, value in fields.items()}
    (folder / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))


STATUS = """Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1+b3

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1:2
"""


def test_an_image_lists_what_is_installed_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbom: dict[str, Any] = runpy.run_path(str(IMAGES / "sbom.py"))
    site, overlay, root = tmp_path / "site", tmp_path / "overlay", tmp_path / "root"
    own = overlay / site.relative_to("/")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(site))
    installed(site, "torch", "2.15.0+cpu", License="BSD-3-Clause")
    installed(site, "Typing_Extensions", "4.1", License_Expression="PSF-2.0")
    installed(own, NAME, "0.1.0", License="a whole text " * 20)
    installed(own, "pip", "26.1")
    (overlay / "opt/tandem").mkdir(parents=True)
    (root / "var/lib/dpkg").mkdir(parents=True)
    (root / "var/lib/dpkg/status").write_text(STATUS)
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    sbom["main"]("tandem-trainer", overlay, root)
    text = (overlay / sbom["FILE"]).read_text()
    found = json.loads(text)
    assert found["metadata"]["component"]["name"] == "tandem-trainer"
    assert found["metadata"]["component"]["version"] == "0.1.0"
    assert {component["purl"]: component.get("licenses") for component in found["components"]} == {
        "pkg:pypi/torch@2.15.0%2Bcpu": [{"license": {"name": "BSD-3-Clause"}}],
        "pkg:pypi/typing-extensions@4.1": [{"expression": "PSF-2.0"}],
        f"pkg:pypi/{NAME}@0.1.0": None,
        "pkg:pypi/pip@26.1": None,
        f"pkg:generic/python@{platform.python_version()}": None,
        "pkg:deb/debian/tini@0.19.0-1%2Bb3?arch=amd64&distro=debian-12": None,
    }
    sbom["main"]("tandem-trainer", overlay, root)
    assert (overlay / sbom["FILE"]).read_text() == text, "the same content is the same layer"


@pytest.mark.parametrize("name", NAMES)
def test_the_list_is_made_in_the_image_after_all_is_installed(name: str) -> None:
    code = (IMAGES / f"{name}.Dockerfile").read_text().partition(" AS code\n")[2].partition("\nFROM ")[0]
    assert code.endswith(f"bin/python /source/sbom.py tandem-{name} /overlay\n")


DIGEST = "sha256:" + "0123456789abcdef" * 4


def builder(folder: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker and a buildah that answer so when they are asked about an image."""
    for name in ("docker", "buildah"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\ncase "$*" in *inspect*) echo "{says}";; *) echo no network >&2; exit 1;; esac\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.parametrize(("name", "says"), [("docker", f"python@{DIGEST}"), ("buildah", DIGEST)])
def test_a_base_is_used_by_its_digest_and_told_in_the_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    builder(tmp_path, says, monkeypatch)
    base = BUILD["pinned"](name, "python:3.11-slim")
    assert base == f"python:3.11-slim@{DIGEST}"
    (command, *_) = commands(name, base_image=base)
    assert f"--build-arg=BASE_IMAGE={base} " in command
    assert "--label=org.opencontainers.image.base.name=python:3.11-slim" in command
    assert f"--label=org.opencontainers.image.base.digest={DIGEST}" in command


def test_a_base_without_a_digest_is_told_and_used_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builder(tmp_path, "", monkeypatch)
    assert BUILD["pinned"]("docker", "python:3.11-slim") == "python:3.11-slim"
    assert "by its tag only (no network)" in capsys.readouterr().err
    for given in ("localhost/mine:1", f"python@{DIGEST}"):
        assert BUILD["pinned"]("docker", given) == given


def test_the_base_that_the_dockerfiles_name_is_the_one_that_is_looked_up() -> None:
    for name in NAMES:
        assert f"ARG BASE_IMAGE={BUILD['default_base']()}\n" in (IMAGES / f"{name}.Dockerfile").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_tini_is_of_one_version(name: str) -> None:
    assert "'tini=0.19.*'" in (IMAGES / f"{name}.Dockerfile").read_text()
