"""A verified copy of a checkpoint's weights elsewhere: a safetensors file, a state_dict of torch, or a folder of both.

Names, the lease, and the rename are decided here; the weights themselves are read, cast and written by
`tandem_trainer.export` in a process of its own, because that needs torch and core does not have it. The copy is written
beside its target under a temporary name and renamed when it is complete and synced, so nobody ever finds half of it.

While the copy is made, a lease keeps retention from deleting the checkpoint. A disk that takes no lease (mounted
read-only, say) is not refused: every byte is compared with its checksum, so the copy is right or is not made.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tandem import lease
from tandem.checkpoints.columns import plain
from tandem.checkpoints.entry import Entry, Inventory
from tandem.checkpoints.naming import Fields
from tandem.durable import encode, read_json_or_none, sync_folder, temporary_beside
from tandem.job import DistributedTrainingJob
from tandem.manifest import WEIGHTS, Broken, Manifest
from tandem.mistake import UserError
from tandem.report.words import size
from tandem.rundir import FOLDERS

MODEL = "model.safetensors"
CONFIG = "config.json"
MARGIN = 2**20
"""Bytes that a copy may take beyond its tensors: headers, names, a folder."""


class Format(StrEnum):
    """What the copy is."""

    SAFETENSORS = "safetensors"
    STATE_DICT = "state-dict"
    FOLDER = "folder"


class Dtype(StrEnum):
    """What floating-point tensors are cast to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


SUFFIXES = {Format.SAFETENSORS: ".safetensors", Format.STATE_DICT: ".pt", Format.FOLDER: ""}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    """Where."""
    size: int
    """Bytes."""
    tensors: int
    """Tensors in it."""
    parameters: int
    """Their elements."""
    dtypes: tuple[str, ...]
    """Their types."""
    note: str = ""
    """What the user should know."""


def fields(entry: Entry, manifest: Manifest, inventory: Inventory) -> Fields:
    """What a name's pattern may use; None for what is not known of this checkpoint."""
    metrics = {metric: entry.metrics.get(metric) for metric in ("loss", "accuracy", "macroF1")}
    return {
        "job": inventory.job.metadata.name if inventory.job else None,
        "name": entry.name,
        "step": entry.step,
        "epoch": manifest.data.epoch if manifest.data else None,
        "generation": manifest.generation,
        **metrics,
        **{metric: value for metric, value in entry.metrics.items() if metric not in metrics},
    }


def target(to: Path, form: Format, name: str | None, default: str, rundir: Path) -> Path:
    """Where the copy goes.

    Args:
        to: what the user wrote.
        name: what the pattern gave; then `to` is the folder that it goes into.
        default: the name inside `to` where that is a folder and the copy is a file.

    Raises:
        UserError: it cannot go there.
    """
    if name is not None:
        if to.exists() and not to.is_dir():
            raise UserError(f"--to {to} is a file; with --name it is the folder that the copy goes into")
        found = to / (name if name.endswith(SUFFIXES[form]) else name + SUFFIXES[form])
    elif form is not Format.FOLDER and to.is_dir():
        found = to / (default + SUFFIXES[form])
    else:
        found = to
    if any(found.resolve().is_relative_to((rundir / folder).resolve()) for folder in FOLDERS):
        raise UserError(f"{found} is among the run's own files; give another --to")
    return found


def refuse_to_overwrite(path: Path, form: Format, force: bool) -> None:
    """
    Raises:
        UserError: something is there, and must not or cannot be replaced.
    """
    if not (path.exists() or path.is_symlink()):
        return
    if not force:
        raise UserError(f"{path} is already there; --force replaces it")
    if form is Format.FOLDER:
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
        if names - {MODEL, CONFIG}:
            some = ", ".join(sorted(names - {MODEL, CONFIG})[:3])
            raise UserError(f"{path} is no exported folder (it holds {some}), and --force replaces nothing else")
    elif not path.is_file():
        raise UserError(f"{path} is not a file, and --force replaces nothing else")


def export(
    inventory: Inventory, entry: Entry, manifest: Manifest, path: Path, form: Format, dtype: Dtype | None, force: bool
) -> Exported:
    """Write the copy.

    Raises:
        UserError: torch is missing, the checkpoint is damaged or gone, or the target cannot be written.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("tandem checkpoints export needs torch; install it with: pip install 'tandem[trainer]'")
    refuse_to_overwrite(path, form, force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _need_space(path, manifest)
        aside = temporary_beside(path)
        try:
            return _written(inventory, entry, manifest, path, aside, form, dtype, force)
        finally:
            with suppress(FileNotFoundError):
                shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def config(entry: Entry, manifest: Manifest, job: DistributedTrainingJob | None, rundir: Path) -> dict[str, Any]:
    """config.json of an exported folder: enough to find the checkpoint again and to build its model."""
    found: dict[str, Any] = {"model_type": "tandem", "checkpoint": entry.name, "step": manifest.step}
    found |= {"generation": manifest.generation, "versions": manifest.versions, "metrics": dict(entry.metrics)}
    found |= {"epoch": manifest.data.epoch} if manifest.data else {}
    if job is None:
        return found
    found["job"] = job.metadata.name
    if job.spec.trainer.task is None:
        return found | {"command": job.spec.trainer.command}
    settings = job.spec.trainer.settings
    found |= {"task": job.spec.trainer.task, "architectures": [settings.model], "model": settings.model}
    found["data"] = {name: value for name, value in settings.data.dump().items() if name != "download"}
    found["precision"] = settings.precision
    classes = _classes(rundir, manifest)
    return found | ({"num_labels": classes} if classes else {})


def _written(
    inventory: Inventory,
    entry: Entry,
    manifest: Manifest,
    path: Path,
    aside: Path,
    form: Format,
    dtype: Dtype | None,
    force: bool,
) -> Exported:
    rundir = inventory.rundir
    file = aside
    if form is Format.FOLDER:
        aside.mkdir()
        file = aside / MODEL
    with _leased(rundir.leases / f"export-{entry.name}-{lease.default_holder()}.json") as held:
        answer = _converted(rundir.checkpoint(entry.name), manifest, file, form, dtype, held)
    if form is Format.FOLDER:
        (aside / CONFIG).write_bytes(
            encode(config(entry, manifest, inventory.job, rundir.path) | {"torch_dtype": answer["dtypes"][0]})
        )
        _sync(aside / CONFIG)
        sync_folder(aside)
    _sync(file)
    refuse_to_overwrite(path, form, force)
    if form is Format.FOLDER and path.exists():
        _replace_folder(aside, path)
    else:
        aside.replace(path)
    sync_folder(path.parent)
    note = "" if held else "no lease could be taken, so the checkpoint could have been deleted meanwhile; it was not"
    written = (path / MODEL if form is Format.FOLDER else path).stat().st_size
    return Exported(path, written, answer["tensors"], answer["parameters"], tuple(answer["dtypes"]), note)


def _converted(
    folder: Path, manifest: Manifest, file: Path, form: Format, dtype: Dtype | None, held: lease.Lease | None
) -> dict[str, Any]:
    """Have the weights written; what was written."""
    command = [sys.executable, "-m", "tandem_trainer.export", "--checkpoint", str(folder), "--digest", manifest.digest]
    command += ["--to", str(file), "--form", "state-dict" if form is Format.STATE_DICT else "safetensors"]
    command += ["--dtype", dtype] if dtype else []
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while True:
            try:
                output, errors = process.communicate(timeout=lease.SECONDS / 3)
                break
            except subprocess.TimeoutExpired:
                if held is not None:
                    with suppress(OSError):  # tried again in a moment
                        held.renew()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    answer = _answer(output)
    if "refused" in answer:
        raise UserError(answer["refused"])
    if process.returncode != 0 or "tensors" not in answer:
        raise UserError(f"the weights of {folder.name} could not be written: {_why(process.returncode, errors)}")
    return answer


def _answer(output: str) -> dict[str, Any]:
    with suppress(ValueError, IndexError):
        found = json.loads(output.splitlines()[-1])
        if isinstance(found, dict):
            return found
    return {}


def _why(code: int, errors: str) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed, perhaps for want of memory; it needs twice the size of the weights"
    last = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
    return last[0]


@contextmanager
def _leased(path: Path) -> Iterator[lease.Lease | None]:
    try:
        held = lease.acquire(path)
    except OSError:
        held = None
    try:
        yield held
    finally:
        if held is not None:
            with suppress(OSError):  # it ends by itself
                held.release()


def _need_space(path: Path, manifest: Manifest) -> None:
    try:
        needed = manifest.entry(WEIGHTS).size + MARGIN
    except Broken as error:
        raise UserError(f"{manifest.name} has no {WEIGHTS}, so there are no weights to export") from error
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise UserError(plain(f"{path} needs up to {size(needed)}, and the disk has {size(free)} free"))


def _replace_folder(aside: Path, path: Path) -> None:
    """A folder cannot be renamed over another one, so the old one is moved away first."""
    old = temporary_beside(path)
    path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old)


def _classes(rundir: Path, manifest: Manifest) -> int | None:
    """How many classes the evaluation of the checkpoint had."""
    path = rundir / "evaluations" / manifest.name / f"g{manifest.generation:06d}.json"
    result = read_json_or_none(path)
    confusion = result.get("confusion") if isinstance(result, dict) else None
    return len(confusion) if isinstance(confusion, list) and confusion else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
