"""Jobs whose manifest is right and that cannot run where they are: what lacks, and what is to be said of it."""

import gzip
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.job.architectures import shapes
from tandem.job.datasets import FILES
from tests.support.manifests import Manifest, images, manifest

IMAGES, LABELS = FILES["train"]
TEST_IMAGES, TEST_LABELS = FILES["test"]
BYTES, FLOATS = 0x08, 0x0D


@dataclass(frozen=True)
class BadSurroundings:
    """One case. `job` makes what there is in an empty folder, the current one, and returns the manifest.

    To be looked at without root's rights (tests/support/rights.py): what nobody may read, root may."""

    name: str
    job: Callable[[Path], Manifest]
    words: str
    """What the message says, as a regular expression."""
    suggestion: str = ""
    field: str = ""
    """The field that the message is about."""
    needs_no_gpu: bool = False
    """It is nothing bad on a machine with a GPU."""


def idx(*sizes: int, kind: int = BYTES, content: bytes | None = None) -> bytes:
    """A file of the IDX format; zeros where nothing else is said."""
    data = bytes(math.prod(sizes)) if content is None else content
    return struct.pack(f">HBB{len(sizes)}I", 0, kind, len(sizes), *sizes) + data


def safetensors(**tensors: tuple[int, ...]) -> bytes:
    """A file of float32 zeros, of these shapes."""
    entries, at = {}, 0
    for name, shape in tensors.items():
        end = at + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def weights(model: str = "cnn", size: int = 8) -> bytes:
    return safetensors(**shapes(model, 1, size, 10))


def whole_mnist(folder: Path, count: int = 20, size: int = 28) -> None:
    """Data without a fault, in `data`."""
    (folder / "data").mkdir(exist_ok=True)
    for name in (IMAGES, TEST_IMAGES):
        (folder / "data" / name).write_bytes(idx(count, size, size))
    for name in (LABELS, TEST_LABELS):
        (folder / "data" / name).write_bytes(idx(count))


def written(folder: Path, files: dict[str, str | bytes], executable: bool = False) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o755 if executable else 0o644)


def _command(*words: str, args: tuple[str, ...] = (), executable: bool = False, **files: str | bytes) -> Any:
    """A job of one's own command, among files whose names have __ for a dot."""

    def job(folder: Path) -> Manifest:
        written(folder, {name.replace("__", "."): content for name, content in files.items()}, executable)
        return manifest("case", trainer={"command": list(words), **({"args": list(args)} if args else {})})

    return job


def _linked(name: str, to: str) -> Any:
    def job(folder: Path) -> Manifest:
        (folder / name).symlink_to(to)
        return manifest("case", trainer={"command": ["python", name]})

    return job


def _folder(name: str, *words: str) -> Any:
    def job(folder: Path) -> Manifest:
        (folder / name).mkdir()
        return manifest("case", trainer={"command": list(words)})

    return job


def _digits(**config: Any) -> Manifest:
    return manifest("case", trainer=images({"data": {"name": "digits"}, **config}))


def _task(spec: Manifest | None = None, variables: list[Manifest] | None = None, **config: Any) -> Any:
    trainer = images({"data": {"name": "digits"}, **config})
    return lambda folder: manifest("case", trainer=trainer | ({"env": variables} if variables else {}), **(spec or {}))


def _own_task(name: str) -> Any:
    return lambda folder: manifest("case", trainer={"task": name})


def _mnist(change: Callable[[Path], object], data: Manifest | None = None, **config: Any) -> Any:
    """A job on MNIST's files, of which `change` spoils something."""

    def job(folder: Path) -> Manifest:
        whole_mnist(folder)
        change(folder / "data")
        here = {"name": "mnist", "path": "data", "download": False, **(data or {})}
        return manifest("case", trainer=images({"data": here, **config}))

    return job


def _whole(data: Path) -> None:
    """Nothing is spoilt."""


def _with(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda data: (data / name).write_bytes(content)


def _compressed(name: str, content: bytes) -> Callable[[Path], object]:
    def change(data: Path) -> None:
        (data / name).unlink()
        (data / f"{name}.gz").write_bytes(content)

    return change


def _emptied(data: Path) -> None:
    for path in data.iterdir():
        path.unlink()


def _file_in_its_place(data: Path) -> None:
    _emptied(data)
    data.rmdir()
    data.write_bytes(b"")


def _counted(images: int, labels: int) -> Callable[[Path], object]:
    def change(data: Path) -> None:
        (data / IMAGES).write_bytes(idx(images, 28, 28))
        (data / LABELS).write_bytes(idx(labels))

    return change


def _sized(*sizes: int) -> Callable[[Path], object]:
    def change(data: Path) -> None:
        for samples, labels in FILES.values():
            (data / samples).write_bytes(idx(*sizes))
            (data / labels).write_bytes(idx(sizes[0]))

    return change


def _initial(content: bytes | None, name: str = "w.safetensors", **config: Any) -> Any:
    def job(folder: Path) -> Manifest:
        if content is not None:
            written(folder, {name: content})
        return _digits(initialWeights=name, **config)

    return job


def _folder_of_weights(folder: Path) -> Manifest:
    written(folder, {"step/weights.safetensors": weights()})
    return _digits(initialWeights="step")


def _run_without_checkpoints(folder: Path) -> Manifest:
    (folder / "first/checkpoints").mkdir(parents=True)
    return _digits(initialWeights="first")


def _runs_is_a_file(folder: Path) -> Manifest:
    written(folder, {"runs": ""})
    return _digits()


def _runs_may_not_be_entered(folder: Path) -> Manifest:
    (folder / "runs").mkdir(0)
    return _digits()


def _forbidden(name: str, job: Any) -> Any:
    """The same, with a file or folder that nobody may read."""

    def made(folder: Path) -> Manifest:
        found: Manifest = job(folder)
        (folder / name).chmod(0)
        return found

    return made


def _damaged(content: bytes) -> bytes:
    packed = bytearray(gzip.compress(content))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


_SECRET = {"name": "NO_SUCH_VARIABLE_HERE", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
_SCRIPT = "import os\n"


def _at(field: str) -> Callable[..., BadSurroundings]:
    """Cases about one field of the spec."""
    return partial(BadSurroundings, field=f"spec.{field}")


_first, _second, _third = (_at(f"trainer.command[{index}]") for index in range(3))
_path, _weights = _at("trainer.parameters.data.path"), _at("trainer.loop.initialWeights")

CASES = (
    # The user's own command
    _second("script-missing", _command("python", "train.py"), "there is no file train.py in /"),
    _second("script-misspelt", _command("python", "tain.py", train__py=_SCRIPT), "no file tain", "train.py"),
    _at("trainer.args[0]")("script-in-args", _command("python", args=("train.py",)), "no file train.py"),
    _first("script-without-python", _command("train.py"), "there is no file train.py"),
    _at("trainer.command[4]")("script-after-options", _command("python", "-u", "-X", "dev", "a.py"), "a.py"),
    _second("script-is-a-folder", _folder("train.py", "python", "train.py"), "train.py is a folder"),
    _third("folder-without-main", _folder("train", "python", "-u", "train"), "__main__.py"),
    _second("script-below-a-file", _command("python", "a/b.py", a=""), "there is no file a/b.py"),
    _second("script-does-not-compile", _command("python", "a.py", a__py="x = 1\nif x\n"), "a.py, line 2"),
    _second("script-with-zeros", _command("python", "a.py", a__py=b"x\0"), "null bytes"),
    _second("script-linked-to-nothing", _linked("a.py", "gone.py"), "a link to gone.py, which does not exist"),
    _second("script-linked-in-circles", _linked("a.py", "a.py"), "symbolic links|a link to"),
    _second(
        "script-unreadable",
        _forbidden("a.py", _command("python", "a.py", a__py=_SCRIPT)),
        "a.py cannot be read: Permission denied",
    ),
    _second("script-name-too-long", _command("python", "a" * 300 + ".py"), "too long"),
    _second("home-not-expanded", _command("python", "~/train.py"), "~ is not expanded"),
    _second("variable-not-expanded", _command("python", "$HOME/train.py"), "no shell runs this"),
    _third("module-missing", _command("python", "-m", "no_such"), "no module no_such"),
    _at("trainer.task")("task-missing", _own_task("no_such:A"), "finds no module no_such"),
    _at("trainer.parameters.pretrained")(
        "model-folder-missing",
        lambda path: manifest("case", trainer={"task": "causal-lm", "parameters": {"pretrained": "./model"}}),
        "there is no folder ./model",
    ),
    _at("trainer.task")("task-in-a-module", _own_task("json.decoder.a:A"), "json.decoder is a module"),
    _third("module-is-a-file", _command("python", "-m", "a.py", a__py=""), "not a package", "a"),
    _third("module-is-a-path", _command("python", "-m", "./a"), "is not a module name"),
    _third("module-in-a-module", _command("python", "-m", "a.b", a__py=""), "not a package"),
    _third(
        "package-without-main", _command("python", "-m", "pack", **{"pack/__init__.py": ""}), "without a __main__.py"
    ),
    _second("module-unnamed", _command("python", "-m"), "-m needs the name"),
    _first("program-missing", _command("no-such-program"), "no program no-such-program in the folders of PATH"),
    _first("program-here", _command("start", start="#!/bin/sh\n", executable=True), "./start", "./start"),
    _first("program-not-executable", _command("./start", start="#!/bin/sh\n"), "chmod \\+x"),
    _first("program-is-a-folder", _folder("bin", "./bin"), "is a folder"),
    _first("no-interpreter", _command("./a", a="#!/no/such\n", executable=True), "interpreter /no/such"),
    _first("no-interpreter-by-env", _command("./a", a="#!/usr/bin/env nosuch\n", executable=True), "no folder of PATH"),
    _first("windows-line-ends", _command("./a", a="#!/bin/sh\r\ntrue\r\n", executable=True), "Windows line endings"),
    _second("shell-script-missing", _command("bash", "run.sh"), "there is no file run.sh"),
    _at("trainer.env[0].name")("secret-not-set", _task(variables=[_SECRET]), "set NO_SUCH_VARIABLE_HERE"),
    # Data
    _path("data-folder-missing", _mnist(_whole, {"path": "dat"}), "there is no folder dat"),
    _path("home-of-nobody", _mnist(_whole, {"path": "~nobody-here/data"}), "no user nobody-here"),
    _path("data-is-a-file", _mnist(_file_in_its_place), "data is a file"),
    _path("data-missing", _mnist(_emptied), "lacks the training data"),
    _path("data-folder-unreadable", _forbidden("data", _mnist(_whole)), "data cannot be read: Permission denied"),
    _path(
        "images-unreadable",
        _forbidden(f"data/{IMAGES}", _mnist(_whole)),
        f"{IMAGES} cannot be read as an IDX file: Permission denied$",
    ),
    _path("labels-missing", _mnist(lambda data: (data / LABELS).unlink()), f"training data: {LABELS}"),
    _path("test-data-missing", _mnist(lambda data: (data / TEST_IMAGES).unlink()), "test data.*evaluators"),
    _path(
        "data-not-downloadable",
        _mnist(_file_in_its_place, {"path": "data/in", "download": True}),
        "cannot be downloaded",
    ),
    _path("data-is-garbage", _mnist(_with(IMAGES, b"garbage, and more")), "not an IDX file of unsigned bytes"),
    _path("data-is-empty", _mnist(_with(LABELS, b"")), "ends before its header"),
    _path("data-of-floats", _mnist(_with(IMAGES, idx(20, 28, 28, kind=FLOATS))), "unsigned bytes"),
    _path("data-too-large", _mnist(_with(IMAGES, idx(2**31, 28, 28, content=b""))), "more than the maximum"),
    _path("images-cut-short", _mnist(_with(IMAGES, idx(20, 28, 28)[:-1])), "cut short: 15,679 of 15,680"),
    _path("labels-cut-short", _mnist(_with(TEST_LABELS, idx(20)[:-5])), "cut short: 15 of 20"),
    _path("no-gzip", _mnist(_compressed(IMAGES, b"garbage")), "Not a gzipped file"),
    _path("gzip-cut-short", _mnist(_compressed(IMAGES, gzip.compress(idx(20, 28, 28))[:-30])), "ended before"),
    _path("gzip-damaged", _mnist(_compressed(LABELS, _damaged(idx(20, content=bytes(range(10)) * 2)))), "Error -3|CRC"),
    _path(
        "label-out-of-range",
        _mnist(_with(LABELS, idx(20, content=bytes(19) + b"\x0a"))),
        "the label 10; labels are 0 to 9",
    ),
    _path("test-label-out-of-range", _mnist(_with(TEST_LABELS, idx(20, content=b"\xff" * 20))), "the label 255"),
    _path("more-images-than-labels", _mnist(_counted(20, 19)), "20 images and 19 labels"),
    _path("no-images", _mnist(_counted(0, 0)), "holds no images"),
    _path("colour-images", _mnist(_with(IMAGES, idx(20, 28, 28, 3))), "not images and labels"),
    _path("images-not-square", _mnist(_sized(20, 28, 20)), "28×20 pixels"),
    _at("trainer.parameters.model")("images-too-small", _mnist(_sized(20, 5, 5)), "at least 6×6"),
    _at("trainer.parameters.data.end")("slice-past-the-data", _mnist(_whole, {"end": 21}), "20 training samples"),
    _at("trainer.parameters.data.start")("slice-after-the-data", _mnist(_whole, {"start": 20}), "no slice 20:20"),
    _at("trainer.parameters.data.end")(
        "slice-of-what-is-held-out", _mnist(_whole, {"end": 20, "validation": 0.5}), "10 training samples"
    ),
    _at("trainer.parameters.data.validation")(
        "validation-of-nothing", _mnist(_whole, {"validation": 0.01}), "leaves nothing to validate"
    ),
    _at("trainer.loop.globalBatchSize")(
        "batch-larger-than-data", _mnist(_whole, dropLast=True), "64, and there are 20"
    ),
    # Weights
    _weights("weights-missing", _initial(None), "there is no file w.safetensors"),
    _weights(
        "weights-unreadable",
        _forbidden("w.safetensors", _initial(weights())),
        "w.safetensors cannot be read: Permission denied",
    ),
    _weights("weights-in-a-folder", _folder_of_weights, "step is no run directory, no checkpoint, and no folder"),
    _weights("weights-of-no-run", _run_without_checkpoints, "first has no checkpoint that counts"),
    _weights("weights-of-pickle", _initial(b"\x80\x04" + bytes(100), "w.pkl"), "a file of pickle"),
    _weights("weights-not-fetched", _initial(b"version https://git-lfs"), "Git LFS"),
    _weights("weights-empty", _initial(b""), "it has 0 bytes"),
    _weights("weights-garbage", _initial(b"\xff" * 100), "no safetensors file: a header of"),
    _weights("weights-without-json", _initial(struct.pack("<Q", 4) + b"{{{{"), "no safetensors file"),
    _weights("weights-cut-short", _initial(weights()[:-8]), "ends after the file"),
    _weights("weights-of-another-model", _initial(weights("baby-cnn")), "model cnn on images of 8×8: it lacks"),
    _weights("weights-of-another-size", _initial(weights(size=28)), r"classifier.0.weight is \[128, 9216\] there"),
    _weights("weights-with-more", _initial(safetensors(**shapes("cnn", 1, 8, 10), extra=(2,))), "extra too many"),
    # The machine
    _at("trainer.loop.precision")("float16-on-a-cpu", _task(precision="float16"), "needs a GPU", needs_no_gpu=True),
    _at("workers.replicas")("ten-thousand-replicas", _task({"workers": {"replicas": 10_000}}), "of memory at least"),
    _at("evaluators.replicas")(
        "evaluators-without-end",
        _task({"evaluators": {"replicas": 1000, "processesPerReplica": 256}}),
        "256,000 evaluator processes",
    ),
    _at("trainer.parameters.data.samples")(
        "data-larger-than-memory", _task(data={"name": "synthetic", "samples": 10**12}), "the data takes"
    ),
    _at("trainer.loop.compile")(
        "no-compiler",
        _task(compile=True, variables=[{"name": "PATH", "value": "/nowhere"}]),
        "compiler",
        needs_no_gpu=True,
    ),
    BadSurroundings("run-directory-forbidden", _runs_may_not_be_entered, "Permission denied|may not be"),
    BadSurroundings("run-directory-below-a-file", _runs_is_a_file, "is a file; a folder is needed"),
)
