"""Write a verified copy of a checkpoint's weights, and give it its name when it is whole.

The weights are read, cast and written by `tandem_trainer.export` in a process of its own, because that needs torch and
core does not have it. The copy is written beside its target under a temporary name and renamed when it is complete and
synced, so nobody ever finds half of it.

While the copy is made, a lease keeps retention from deleting the checkpoint. A disk that takes no lease (mounted
read-only, say) is not refused: every byte is compared with its checksum, so the copy is right or is not made.
"""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.formatting import size
from tandem.rundir import lease
from tandem.rundir.checkpoint import WEIGHTS, Manifest
from tandem.rundir.durable import encode, sync_file, sync_folder, temporary_beside
from tandem_cli.checkpoints.columns import plain
from tandem_cli.checkpoints.exporting import CONFIG, MODEL, ExportOrder, Format, config, refuse_to_overwrite
from tandem_cli.checkpoints.inventory import Entry, Inventory

MARGIN = 2**20
"""Bytes that a copy may take beyond its tensors: headers, names, a folder."""


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


def copy(inventory: Inventory, entry: Entry, manifest: Manifest, order: ExportOrder) -> Exported:
    """Write the copy.

    Raises:
        UserError: torch is missing, the checkpoint is damaged or gone, or the target cannot be written.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("tandem checkpoints export needs torch; install it with: pip install 'tandem[trainer]'")
    refuse_to_overwrite(order)
    try:
        order.path.parent.mkdir(parents=True, exist_ok=True)
        _need_space(order.path, manifest)
        # A file gets a folder, too: the library that writes it has temporary files of its own.
        aside = temporary_beside(order.path)
        aside.mkdir()
        try:
            exported = _written(inventory, entry, manifest, order, aside)
            _place(aside, order)
            return exported
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{order.path} cannot be written: {error.strerror or error}") from error


def _written(inventory: Inventory, entry: Entry, manifest: Manifest, order: ExportOrder, aside: Path) -> Exported:
    """Write everything aside, synced."""
    rundir, file = inventory.rundir, aside / MODEL
    with _leased(rundir.leases / f"export-{entry.name}-{lease.default_holder()}.json") as held:
        answer = _converted(rundir.checkpoint(entry.name), manifest, file, order, held)
    if order.form is Format.FOLDER:
        known = config(entry, manifest, inventory.job, rundir.path)
        (aside / CONFIG).write_bytes(encode(known | {"torch_dtype": next(iter(answer["dtypes"]), None)}))
        sync_file(aside / CONFIG)
    sync_file(file)
    sync_folder(aside)
    note = "" if held else "no lease could be taken, so the checkpoint could have been deleted meanwhile; it was not"
    return Exported(
        order.path, file.stat().st_size, answer["tensors"], answer["parameters"], tuple(answer["dtypes"]), note
    )


def _place(aside: Path, order: ExportOrder) -> None:
    """Give the copy its name."""
    refuse_to_overwrite(order)
    if order.form is not Format.FOLDER:
        (aside / MODEL).replace(order.path)
    elif order.path.exists():
        _replace_folder(aside, order.path)
    else:
        aside.rename(order.path)
    sync_folder(order.path.parent)


def _converted(
    folder: Path, manifest: Manifest, file: Path, order: ExportOrder, held: lease.Lease | None
) -> dict[str, Any]:
    """Have the weights written; what was written."""
    command = [sys.executable, "-m", "tandem_trainer.export", "--checkpoint", str(folder), "--digest", manifest.digest]
    command += ["--to", str(file), "--form", "state-dict" if order.form is Format.STATE_DICT else "safetensors"]
    command += ["--dtype", order.dtype] if order.dtype else []
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
    # Beside weights for evaluators there may be some in full precision.
    sizes = [entry.size for entry in manifest.files if Path(entry.path).name == WEIGHTS]
    if not sizes:
        raise UserError(f"{manifest.name} has no {WEIGHTS}, so there are no weights to export")
    needed = max(sizes) + MARGIN
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
