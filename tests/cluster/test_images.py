"""What is in the images, and what is not; and that they run as `restricted` pods."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tests.support.cluster.images import ROOMS, Images
from tests.support.cluster.pods import Namespace, container, named, pod

UNCHECKED_HASH = (0b01).to_bytes(4, "little")
"""Bytes 4 to 8 of bytecode that is taken as it is, whatever the source's time and content (PEP 552)."""
TOOLS = ("wheel", "hatchling", "uv")
PROGRAMS = ("gcc", "cc", "make", "git")


def buildah(*arguments: str) -> str:
    return subprocess.run(
        ["buildah", *arguments], capture_output=True, text=True, timeout=300, check=True
    ).stdout.strip()


@dataclass(frozen=True)
class Opened:
    """An image, and its files as a folder of this machine."""

    name: str
    root: Path
    config: dict[str, Any]
    layers: list[str]
    history: str

    @property
    def site(self) -> Path:
        return next((self.root / "opt/tandem/lib").glob("python3*")) / "site-packages"

    def holds(self, path: str) -> bool:
        return (self.root / path).exists()


@pytest.fixture(scope="module")
def opened(images: Images) -> Iterator[dict[str, Opened]]:
    """All images."""
    containers = []
    found = {}
    try:
        for field in fields(images):
            image = getattr(images, field.name)
            containers.append(buildah("from", "--pull-never", image))
            whole = json.loads(buildah("inspect", "--type=image", image))["OCIv1"]
            found[field.name] = Opened(
                name=field.name,
                root=Path(buildah("mount", containers[-1])),
                config=whole["config"],
                layers=whole["rootfs"]["diff_ids"],
                history=json.dumps(whole["history"]),
            )
        yield found
    finally:
        for container_id in containers:
            buildah("rm", container_id)


@pytest.fixture(params=ROOMS)
def image(request: pytest.FixtureRequest, opened: dict[str, Opened]) -> Opened:
    return opened[request.param]


def size(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def test_the_operator_is_small_and_has_no_torch(opened: dict[str, Opened]) -> None:
    operator = opened["operator"]
    assert size(operator.root) < 330e6
    absent = ("torch", "torchvision", "numpy", "nvidia", "triton", "tandem_trainer", "tandem_evaluator")
    assert not [name for name in absent if (operator.site / name).exists()]
    assert (operator.site / "tandem_coordinator").is_dir()


def test_each_image_holds_the_code_of_its_own_processes_alone(image: Opened) -> None:
    ours = {path.name for path in image.site.glob("tandem*") if "." not in path.name}
    assert ours == {"tandem", *(f"tandem_{room}" for room in ROOMS[image.name] if room != "core")}
    assert not [name for name in ("rich", "typer", "matplotlib") if (image.site / name).exists()]
    assert not (image.root / "opt/tandem/bin/tandem").exists()


def test_trainer_and_evaluator_share_all_layers_but_the_last(opened: dict[str, Opened]) -> None:
    trainer, evaluator = opened["trainer"].layers, opened["evaluator"].layers
    assert trainer[:-1] == evaluator[:-1]
    assert trainer[-1] != evaluator[-1]
    assert len(trainer) > 3


def test_they_are_started_by_tini_as_a_user_whose_number_is_known(image: Opened) -> None:
    assert image.config["User"] == "65532:65532"
    assert image.config["Entrypoint"] == ["tini", "--"]
    assert image.config["Cmd"][:2] == ["python", "-m"]
    assert "tandem:x:65532:65532:" in (image.root / "etc/passwd").read_text()


def test_they_say_what_they_are_and_of_which_state(image: Opened) -> None:
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in image.config["Labels"].items()}
    assert labels["title"] == f"tandem-{image.name}"
    assert labels["version"] == "0.1.0"
    assert len(labels["revision"].removesuffix("-modified")) == 40
    assert labels["description"]


def test_they_list_what_is_installed_in_them(image: Opened) -> None:
    listed = json.loads((image.root / "opt/tandem/sbom.cdx.json").read_text())
    told = {(part["name"], part["version"]) for part in listed["components"] if part["purl"].startswith("pkg:pypi/")}
    assert told == {(one.name, one.version) for one in metadata.distributions(path=[str(image.site)])}
    assert any(part["purl"].startswith("pkg:deb/debian/tini@0.19.") for part in listed["components"])
    assert listed["metadata"]["component"]["name"] == f"tandem-{image.name}"


def test_what_built_them_is_not_in_them(image: Opened) -> None:
    assert not [name for name in TOOLS if (image.site / name).exists()]
    # It installs the requirements.txt of a job's code.
    assert (image.site / "pip").exists() == (image.name in ("trainer", "evaluator"))
    folders = ("usr/bin", "usr/local/bin", "opt/tandem/bin")
    assert not [name for name in PROGRAMS if any(image.holds(f"{folder}/{name}") for folder in folders)]
    assert not [name for name in ("pip", "source", "requirements", "overlay", "root/.cache") if image.holds(name)]
    assert not list((image.root / "tmp").iterdir())


def test_no_secret_and_no_setting_of_the_builder_is_left(image: Opened) -> None:
    assert not image.holds("run/pip.conf")
    assert not image.holds("etc/pip.conf")
    told = json.dumps(image.config) + image.history
    assert "ca-certificates" not in told
    variables = {line.partition("=")[0] for line in image.config["Env"]}
    assert variables == {"PATH", "HOME", "TMPDIR", "USER", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}


def test_nothing_is_compiled_at_a_start(image: Opened) -> None:
    """A pod cannot write bytecode: what has none is compiled at every start, which costs torch some seconds."""
    modules = ["tandem/job/resource.py", "pydantic/main.py"]
    if image.name == "operator":
        modules += ["aiohttp/web.py"]
    else:
        modules += [
            "torch/__init__.py",
            "torch/_dynamo/eval_frame.py",
            "numpy/__init__.py",
            "tandem_trainer/agent/torchrun.py",
        ]
    for module in modules:
        path = image.site / module
        compiled = list((path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc"))
        assert compiled, module
        assert compiled[0].read_bytes()[4:8] == UNCHECKED_HASH, module


def outcome(namespace: Namespace, name: str, image: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a pod of this image."""
    namespace.create(named("Pod", name, spec=pod([container("main", image, *arguments)])))
    return namespace.result(name, seconds=300.0)


def test_the_coordinator_runs_from_the_operator_image(namespace: Namespace, images: Images) -> None:
    code, text = outcome(namespace, "coordinator", images.operator, "python", "-m", "tandem_coordinator", "--help")
    assert (code, "--job FILE" in text) == (0, True)


def test_the_operator_runs_and_so_do_the_classes_that_are_there_in_compiled_form_alone(
    namespace: Namespace, images: Images, opened: dict[str, Opened]
) -> None:
    code, text = outcome(namespace, "operator", images.operator, "python", "-m", "tandem_operator", "--help")
    assert (code, "--namespace" in text) == (0, True), text
    models = opened["operator"].site / "kubernetes/aio/client/models"
    assert (models / "v1_pod.pyc").exists()
    assert not (models / "v1_pod.py").exists()
    program = "from kubernetes.aio import client; print(client.V1Pod(kind='Pod').to_dict()['kind'], client.CoreV1Api)"
    code, text = outcome(namespace, "classes", images.operator, "python", "-c", program)
    assert (code, text.startswith("Pod <class")) == (0, True), text


PROBE = """
import json, os, pathlib, sys
def refused(path):
    try:
        pathlib.Path(path).write_text("")
    except OSError as error:
        return error.strerror
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "first": open("/proc/1/comm").read().strip(),
    "capabilities": int(status["CapEff"], 16),
    "seccomp": int(status["Seccomp"]),
    "writable": [path for path in ("x", sys.prefix + "/x", "/var/x", "/tmp/x", "/dev/shm/x") if not refused(path)],
    "home": os.path.expanduser("~"),
    "groups": os.getgroups(),
}))
"""


@pytest.mark.parametrize("name", ROOMS)
def test_their_processes_can_write_nowhere_but_where_they_should(
    namespace: Namespace, images: Images, name: str
) -> None:
    code, text = outcome(namespace, f"probe-{name}", getattr(images, name), "python", "-c", PROBE)
    assert code == 0, text
    assert json.loads(text) == {
        "user": [65532, 65532],
        "first": "tini",
        "capabilities": 0,
        "seccomp": 2,
        "writable": ["/tmp/x", "/dev/shm/x"],
        "home": "/tmp",
        "groups": [65532],
    }


@pytest.mark.parametrize(
    ("name", "arguments", "code", "words"),
    [
        ("trainer", ("python", "-m", "tandem_trainer.agent"), 1, "usage: python -P -m tandem_trainer.agent"),
        ("evaluator", (), ExitCode.USAGE, "TANDEM_RUN_DIR and TANDEM_REPLICA must be set"),
    ],
)
def test_started_without_a_job_they_say_what_is_missing(
    namespace: Namespace, images: Images, name: str, arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, text = outcome(namespace, f"alone-{name}", getattr(images, name), *arguments)
    assert (found, words in text) == (code, True), text
