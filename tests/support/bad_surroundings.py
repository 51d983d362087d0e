"""Jobs whose manifest is right and that cannot run where they are: what lacks, and what is to be said of it."""

import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.architectures import shapes
from tandem.datasets import FILES
from tests.support.manifests import TASK, Manifest, manifest

IMAGES, LABELS = FILES["train"]
TEST_IMAGES, TEST_LABELS = FILES["test"]
BYTES, FLOATS = 0x08, 0x0D


@dataclass(frozen=True)
class BadSurroundings:
    """One case. `job` makes what there is in an empty folder, the current one, and returns the manifest.

    To be looked at without root's rights (tests/support/rights.py): what nobody may read, root may."""

    name: str
    job: Callable[[Path], Manifest]
    field: str
    """Which field the message is about."""
    words: str
    """What it says, as a regular expression."""
    suggestion: str = ""
    needs_no_gpu: bool = False
    """It is nothing bad on a machine with a GPU."""


def idx(*sizes: int, kind: int = BYTES, content: bytes | None = None) -> bytes:
    """A file of the IDX format; zeros where nothing else is said."""
    count = 1
    for size in sizes:
        count *= size
    return struct.pack(f">HBB{len(sizes)}I", 0, kind, len(sizes), *sizes) + (
        bytes(count) if content is None else content
    )


def safetensors(**tensors: tuple[int, ...]) -> bytes:
    """A file of float32 zeros, of these shapes."""
    entries, at = {}, 0
    for name, shape in tensors.items():
        count = 4
        for size in shape:
            count *= size
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def weights(model: str = "cnn", size: int = 8) -> bytes:
    """The weights of a built-in model."""
    return safetensors(**shapes(model, 1, size, 10))


def whole_mnist(folder: Path, count: int = 20, size: int = 28) -> None:
    """Data without a fault, in `data`."""
    (folder / "data").mkdir(exist_ok=True)
    for name in (IMAGES, TEST_IMAGES):
        (folder / "data" / name).write_bytes(idx(count, size, size))
    for name in (LABELS, TEST_LABELS):
        (folder / "data" / name).write_bytes(idx(count))


def written(folder: Path, files: dict[str, str | bytes], executable: bool = False) -> None:
    """Files by name."""
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
    return manifest("case", trainer=TASK | {"config": {"data": {"name": "digits"}, **config}})


def _task(spec: Manifest | None = None, variables: list[Manifest] | None = None, **config: Any) -> Any:
    trainer = {"task": "image-classification", "config": {"data": {"name": "digits"}, **config}}
    return lambda folder: manifest("case", trainer=trainer | ({"env": variables} if variables else {}), **(spec or {}))


def _own_task(name: str) -> Any:
    return lambda folder: manifest("case", trainer={"task": name})


def _mnist(change: Callable[[Path], object], data: Manifest | None = None, **config: Any) -> Any:
    """A job on MNIST's files, of which `change` spoils something."""

    def job(folder: Path) -> Manifest:
        whole_mnist(folder)
        change(folder / "data")
        here = {"name": "mnist", "path": "data", "download": False, **(data or {})}
        return manifest("case", trainer={"task": "image-classification", "config": {"data": here, **config}})

    return job


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
        for images, labels in FILES.values():
            (data / images).write_bytes(idx(*sizes))
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


_FIRST = "spec.trainer.command[0]"
_SECOND = "spec.trainer.command[1]"
_PATH = "spec.trainer.config.data.path"
_WEIGHTS = "spec.trainer.config.initialWeights"
_SECRET = {"name": "NO_SUCH_VARIABLE_HERE", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
_THIRD = "spec.trainer.command[2]"
_SCRIPT = "import os\n"

CASES = (
    # The user's own command
    BadSurroundings("script-missing", _command("python", "train.py"), _SECOND, "there is no file train.py in /"),
    BadSurroundings(
        "script-misspelt", _command("python", "tain.py", train__py=_SCRIPT), _SECOND, "no file tain", "train.py"
    ),
    BadSurroundings(
        "script-in-args", _command("python", args=("train.py",)), "spec.trainer.args[0]", "no file train.py"
    ),
    BadSurroundings("script-without-python", _command("train.py"), _FIRST, "there is no file train.py"),
    BadSurroundings(
        "script-after-options", _command("python", "-u", "-X", "dev", "a.py"), "spec.trainer.command[4]", "a.py"
    ),
    BadSurroundings("script-is-a-folder", _folder("train.py", "python", "train.py"), _SECOND, "train.py is a folder"),
    BadSurroundings("folder-without-main", _folder("train", "python", "-u", "train"), _THIRD, "__main__.py"),
    BadSurroundings("script-below-a-file", _command("python", "a/b.py", a=""), _SECOND, "there is no file a/b.py"),
    BadSurroundings(
        "script-does-not-compile", _command("python", "a.py", a__py="x = 1\nif x\n"), _SECOND, "a.py, line 2"
    ),
    BadSurroundings("script-with-zeros", _command("python", "a.py", a__py=b"x\0"), _SECOND, "null bytes"),
    BadSurroundings(
        "script-linked-to-nothing", _linked("a.py", "gone.py"), _SECOND, "a link to gone.py, which does not exist"
    ),
    BadSurroundings("script-linked-in-circles", _linked("a.py", "a.py"), _SECOND, "symbolic links|a link to"),
    BadSurroundings(
        "script-unreadable",
        _forbidden("a.py", _command("python", "a.py", a__py=_SCRIPT)),
        _SECOND,
        "a.py cannot be read: Permission denied",
    ),
    BadSurroundings("script-name-too-long", _command("python", "a" * 300 + ".py"), _SECOND, "too long"),
    BadSurroundings("home-not-expanded", _command("python", "~/train.py"), _SECOND, "~ is not expanded"),
    BadSurroundings("variable-not-expanded", _command("python", "$HOME/train.py"), _SECOND, "no shell runs this"),
    BadSurroundings("module-missing", _command("python", "-m", "no_such"), _THIRD, "no module no_such"),
    BadSurroundings("task-missing", _own_task("no_such:A"), "spec.trainer.task", "finds no module no_such"),
    BadSurroundings(
        "parameter-of-causal-lm",
        lambda path: manifest("case", trainer={"task": "causal-lm", "parameters": {"width": 30}}),
        "spec.trainer.parameters",
        "width must be a multiple of twice",
    ),
    BadSurroundings("task-in-a-module", _own_task("json.decoder.a:A"), "spec.trainer.task", "json.decoder is a module"),
    BadSurroundings("module-is-a-file", _command("python", "-m", "a.py", a__py=""), _THIRD, "not a package", "a"),
    BadSurroundings("module-is-a-path", _command("python", "-m", "./a"), _THIRD, "is not a module name"),
    BadSurroundings("module-in-a-module", _command("python", "-m", "a.b", a__py=""), _THIRD, "not a package"),
    BadSurroundings(
        "package-without-main",
        _command("python", "-m", "pack", **{"pack/__init__.py": ""}),
        _THIRD,
        "without a __main__.py",
    ),
    BadSurroundings("module-unnamed", _command("python", "-m"), _SECOND, "-m needs the name"),
    BadSurroundings(
        "program-missing", _command("no-such-program"), _FIRST, "no program no-such-program in the folders of PATH"
    ),
    BadSurroundings(
        "program-here", _command("start", start="#!/bin/sh\n", executable=True), _FIRST, "./start", "./start"
    ),
    BadSurroundings("program-not-executable", _command("./start", start="#!/bin/sh\n"), _FIRST, "chmod \\+x"),
    BadSurroundings("program-is-a-folder", _folder("bin", "./bin"), _FIRST, "is a folder"),
    BadSurroundings(
        "no-interpreter", _command("./a", a="#!/no/such\n", executable=True), _FIRST, "interpreter /no/such"
    ),
    BadSurroundings(
        "no-interpreter-by-env",
        _command("./a", a="#!/usr/bin/env nosuch\n", executable=True),
        _FIRST,
        "no folder of PATH",
    ),
    BadSurroundings(
        "windows-line-ends", _command("./a", a="#!/bin/sh\r\ntrue\r\n", executable=True), _FIRST, "Windows line endings"
    ),
    BadSurroundings("shell-script-missing", _command("bash", "run.sh"), _SECOND, "there is no file run.sh"),
    BadSurroundings(
        "secret-not-set", _task(variables=[_SECRET]), "spec.trainer.env[0].name", "set NO_SUCH_VARIABLE_HERE"
    ),
    # Data
    BadSurroundings("data-folder-missing", _mnist(lambda _: None, {"path": "dat"}), _PATH, "there is no folder dat"),
    BadSurroundings(
        "home-of-nobody", _mnist(lambda _: None, {"path": "~nobody-here/data"}), _PATH, "no user nobody-here"
    ),
    BadSurroundings("data-is-a-file", _mnist(_file_in_its_place), _PATH, "data is a file"),
    BadSurroundings("data-missing", _mnist(_emptied), _PATH, "lacks the training data"),
    BadSurroundings(
        "data-folder-unreadable",
        _forbidden("data", _mnist(lambda _: None)),
        _PATH,
        "data cannot be read: Permission denied",
    ),
    BadSurroundings(
        "images-unreadable",
        _forbidden(f"data/{IMAGES}", _mnist(lambda _: None)),
        _PATH,
        f"{IMAGES} cannot be read as an IDX file: Permission denied$",
    ),
    BadSurroundings("labels-missing", _mnist(lambda data: (data / LABELS).unlink()), _PATH, f"training data: {LABELS}"),
    BadSurroundings(
        "test-data-missing", _mnist(lambda data: (data / TEST_IMAGES).unlink()), _PATH, "test data.*evaluators"
    ),
    BadSurroundings(
        "data-not-downloadable",
        _mnist(_file_in_its_place, {"path": "data/in", "download": True}),
        _PATH,
        "cannot be downloaded",
    ),
    BadSurroundings(
        "data-is-garbage", _mnist(_with(IMAGES, b"garbage, and more")), _PATH, "not an IDX file of unsigned bytes"
    ),
    BadSurroundings("data-is-empty", _mnist(_with(LABELS, b"")), _PATH, "ends before its header"),
    BadSurroundings("data-of-floats", _mnist(_with(IMAGES, idx(20, 28, 28, kind=FLOATS))), _PATH, "unsigned bytes"),
    BadSurroundings(
        "data-too-large", _mnist(_with(IMAGES, idx(2**31, 28, 28, content=b""))), _PATH, "more than this reads"
    ),
    BadSurroundings(
        "images-cut-short", _mnist(_with(IMAGES, idx(20, 28, 28)[:-1])), _PATH, "cut short: 15,679 of 15,680"
    ),
    BadSurroundings("labels-cut-short", _mnist(_with(TEST_LABELS, idx(20)[:-5])), _PATH, "cut short: 15 of 20"),
    BadSurroundings("no-gzip", _mnist(_compressed(IMAGES, b"garbage")), _PATH, "Not a gzipped file"),
    BadSurroundings(
        "gzip-cut-short", _mnist(_compressed(IMAGES, gzip.compress(idx(20, 28, 28))[:-30])), _PATH, "ended before"
    ),
    BadSurroundings(
        "gzip-damaged",
        _mnist(_compressed(LABELS, _damaged(idx(20, content=bytes(range(10)) * 2)))),
        _PATH,
        "Error -3|CRC",
    ),
    BadSurroundings(
        "label-out-of-range",
        _mnist(_with(LABELS, idx(20, content=bytes(19) + b"\x0a"))),
        _PATH,
        "the label 10; labels are 0 to 9",
    ),
    BadSurroundings(
        "test-label-out-of-range", _mnist(_with(TEST_LABELS, idx(20, content=b"\xff" * 20))), _PATH, "the label 255"
    ),
    BadSurroundings("more-images-than-labels", _mnist(_counted(20, 19)), _PATH, "20 images and 19 labels"),
    BadSurroundings("no-images", _mnist(_counted(0, 0)), _PATH, "holds no images"),
    BadSurroundings("colour-images", _mnist(_with(IMAGES, idx(20, 28, 28, 3))), _PATH, "not images and labels"),
    BadSurroundings("images-not-square", _mnist(_sized(20, 28, 20)), _PATH, "28×20 pixels"),
    BadSurroundings("images-too-small", _mnist(_sized(20, 5, 5)), "spec.trainer.config.model", "at least 6×6"),
    BadSurroundings(
        "slice-past-the-data",
        _mnist(lambda _: None, {"end": 21}),
        "spec.trainer.config.data.end",
        "20 training samples",
    ),
    BadSurroundings(
        "slice-after-the-data",
        _mnist(lambda _: None, {"start": 20}),
        "spec.trainer.config.data.start",
        "no slice 20:20",
    ),
    BadSurroundings(
        "slice-of-what-is-held-out",
        _mnist(lambda _: None, {"end": 20, "validation": 0.5}),
        "spec.trainer.config.data.end",
        "10 training samples",
    ),
    BadSurroundings(
        "validation-of-nothing",
        _mnist(lambda _: None, {"validation": 0.01}),
        "spec.trainer.config.data.validation",
        "leaves nothing to validate",
    ),
    BadSurroundings(
        "batch-larger-than-data",
        _mnist(lambda _: None, dropLast=True),
        "spec.trainer.config.globalBatchSize",
        "64, and there are 20",
    ),
    # Weights
    BadSurroundings("weights-missing", _initial(None), _WEIGHTS, "there is no file w.safetensors"),
    BadSurroundings(
        "weights-unreadable",
        _forbidden("w.safetensors", _initial(weights())),
        _WEIGHTS,
        "w.safetensors cannot be read: Permission denied",
    ),
    BadSurroundings(
        "weights-in-a-folder", _folder_of_weights, _WEIGHTS, "step is no run directory, no checkpoint, and no folder"
    ),
    BadSurroundings("weights-of-no-run", _run_without_checkpoints, _WEIGHTS, "first has no checkpoint that counts"),
    BadSurroundings("weights-of-pickle", _initial(b"\x80\x04" + bytes(100), "w.pkl"), _WEIGHTS, "a file of pickle"),
    BadSurroundings("weights-not-fetched", _initial(b"version https://git-lfs"), _WEIGHTS, "Git LFS"),
    BadSurroundings("weights-empty", _initial(b""), _WEIGHTS, "it has 0 bytes"),
    BadSurroundings("weights-garbage", _initial(b"\xff" * 100), _WEIGHTS, "no safetensors file: a header of"),
    BadSurroundings("weights-without-json", _initial(struct.pack("<Q", 4) + b"{{{{"), _WEIGHTS, "no safetensors file"),
    BadSurroundings("weights-cut-short", _initial(weights()[:-8]), _WEIGHTS, "ends after the file"),
    BadSurroundings(
        "weights-of-another-model", _initial(weights("baby-cnn")), _WEIGHTS, "model cnn on images of 8×8: it lacks"
    ),
    BadSurroundings(
        "weights-of-another-size", _initial(weights(size=28)), _WEIGHTS, r"classifier.0.weight is \[128, 9216\] there"
    ),
    BadSurroundings(
        "weights-with-more", _initial(safetensors(**shapes("cnn", 1, 8, 10), extra=(2,))), _WEIGHTS, "extra too many"
    ),
    # The machine
    BadSurroundings(
        "float16-on-a-cpu",
        _task(precision="float16"),
        "spec.trainer.config.precision",
        "needs a GPU",
        needs_no_gpu=True,
    ),
    BadSurroundings(
        "ten-thousand-replicas", _task({"workers": {"replicas": 10_000}}), "spec.workers.replicas", "of memory at least"
    ),
    BadSurroundings(
        "evaluators-without-end",
        _task({"evaluators": {"replicas": 1000, "processesPerReplica": 256}}),
        "spec.evaluators.replicas",
        "256,000 evaluator processes",
    ),
    BadSurroundings(
        "data-larger-than-memory",
        _task(data={"name": "synthetic", "samples": 10**12}),
        "spec.trainer.config.data.samples",
        "the data takes",
    ),
    BadSurroundings(
        "no-compiler",
        _task(compile=True, variables=[{"name": "PATH", "value": "/nowhere"}]),
        "spec.trainer.config.compile",
        "compiler",
        needs_no_gpu=True,
    ),
    BadSurroundings("run-directory-forbidden", _runs_may_not_be_entered, "", "Permission denied|may not be"),
    BadSurroundings("run-directory-below-a-file", _runs_is_a_file, "", "is a file; a folder is needed"),
)
