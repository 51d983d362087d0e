"""An exported checkpoint: its name, its destination, what it may replace, and its config.json.

A name is made from a pattern such as `digits_{step:06d}-{accuracy}`, which has the fields of str.format with their
format, and nothing else of it: no attributes, no indices, no conversions, which would let it reach into the program.

The weights are read, cast and written by `tandem_trainer.export` in a process of its own, because that needs torch and
core does not have it. The copy is written beside its target under a temporary name and renamed when it is complete and
synced, so nobody ever finds half of it.

While the copy is made, a lease keeps retention from deleting the checkpoint. A disk that takes no lease (mounted
read-only, say) is not refused: every byte is compared with its checksum, so the copy is right or is not made.
"""

import importlib.util
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import Any

from tandem.distribution import install
from tandem.errors import UserError
from tandem.formatting import printable, size
from tandem.job import DistributedTrainingJob
from tandem.launch import module_command
from tandem.manifest.fields import nearest
from tandem.rundir import lease
from tandem.rundir.checkpoint import WEIGHTS, Manifest
from tandem.rundir.durable import encode, read_json_or_none, sync_file, sync_folder, temporary_beside
from tandem.rundir.layout import FOLDERS
from tandem.rundir.lineage import GenerationRecord, origin_of
from tandem_cli.checkpoints.inventory import Entry, Inventory
from tandem_cli.checkpoints.listing import plain

MAX_CHARACTERS = 200
"""A file's name may have 255 bytes, and ours gets a suffix and, while it is written, a prefix."""

Value = int | float | str
Fields = Mapping[str, Value | None]
"""None: a field that exists but has no value for this checkpoint."""


def filled(pattern: str, fields: Fields) -> str:
    """The name that a pattern gives.

    Raises:
        UserError: it names a field that is not known or has no value, or gives no name that a file can have.
    """
    try:
        parts = list(Formatter().parse(pattern))
    except ValueError as error:
        raise UserError(f"--name {pattern}: {error}. Write a field as {{step}}, and a brace itself as {{{{") from error
    name = ""
    for text, field, form, conversion in parts:
        name += text
        if field is not None:
            name += _value(pattern, field, form or "", conversion, fields)
    if not name or name.startswith((".", "-")) or "/" in name or printable(name) != name or "\n" in name:
        raise UserError(
            f"--name {pattern} gives {printable(name)!r}, which is not a valid file name: no slash, no control "
            "characters, and no leading dot or dash"
        )
    if len(name.encode()) > MAX_CHARACTERS:
        raise UserError(f"--name {pattern} gives a name of {len(name)} characters; {MAX_CHARACTERS} are the most")
    return name


def _value(pattern: str, field: str, form: str, conversion: str | None, fields: Fields) -> str:
    there = ", ".join(f"{{{name}}}" for name, value in fields.items() if value is not None)
    if conversion is not None or field not in fields:
        near = nearest(field, list(fields))
        hint = f" Did you mean {{{near}}}?" if near and near != field else ""
        raise UserError(f"--name {pattern}: there is no field {{{field}}}.{hint} Those there are: {there}")
    value = fields[field]
    if value is None:
        raise UserError(f"--name {pattern}: {{{field}}} is not known of this checkpoint. Those there are: {there}")
    if isinstance(value, float) and not form:
        form = ".4f"
    # Python would try: where the kernel promises memory that is not there, as on a Kubernetes node, until it is killed.
    if any(len(number) > 4 or int(number) > MAX_CHARACTERS for number in re.findall(r"[0-9]+", form)):
        raise UserError(
            f"--name {pattern}: {{{field}}} cannot be written as {form!r}: {MAX_CHARACTERS} characters are the most"
        )
    try:
        return format(value, form)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--name {pattern}: {{{field}}} cannot be written as {form!r}: {error}") from error


MODEL = "model.safetensors"
CONFIG = "config.json"
ADAPTER = "adapter_model.safetensors"
BESIDE = {
    ADAPTER,
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
"""What else stands in the folder of a pretrained model, or of its adapter."""


class Format(StrEnum):
    """What the copy is."""

    SAFETENSORS = "safetensors"
    STATE_DICT = "state-dict"
    FOLDER = "folder"
    PEFT = "peft"

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, and not a file."""
        return self in (Format.FOLDER, Format.PEFT)


class Dtype(StrEnum):
    """What floating-point tensors are cast to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


SUFFIXES = {Format.SAFETENSORS: ".safetensors", Format.STATE_DICT: ".pt", Format.FOLDER: "", Format.PEFT: ""}


@dataclass(frozen=True)
class ExportOrder:
    """What the user wants."""

    path: Path
    """Where the copy goes."""
    form: Format = Format.SAFETENSORS
    """What it is."""
    dtype: Dtype | None = None
    """What floating-point tensors are cast to; None: they stay what they are."""
    force: bool = False
    """Whether an earlier copy is replaced."""


def fields(entry: Entry, manifest: Manifest, inventory: Inventory) -> Fields:
    """What a name's pattern may use; None for what is not known of this checkpoint."""
    job = inventory.job
    start, end = _slice(job)
    metrics = {metric: entry.metrics.get(metric) for metric in ("loss", "accuracy", "macroF1")}
    return {
        "job": job.metadata.name if job else None,
        "name": entry.name,
        "step": entry.step,
        "epoch": manifest.data.epoch if manifest.data else None,
        "generation": manifest.generation,
        "start": start,
        "end": end,
        **metrics,
        **{metric: value for metric, value in entry.metrics.items() if metric not in metrics},
    }


def _slice(job: DistributedTrainingJob | None) -> tuple[int | None, int | None]:
    """First sample of the training data, and the one after the last, as far as the job says them."""
    if job is None:
        return None, None
    trainer = job.spec.trainer
    if trainer.is_built_in:
        return trainer.settings.data.start or 0, trainer.settings.data.end
    data = (trainer.parameters or {}).get("data") if trainer.is_fine_tuning else None
    if not isinstance(data, dict) or "mixture" in data:
        return None, None
    return data.get("start", 0), data.get("end")


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
    elif not form.is_folder and to.is_dir():
        found = to / (default + SUFFIXES[form])
    else:
        found = to
    if any(found.resolve().is_relative_to((rundir / folder).resolve()) for folder in FOLDERS):
        raise UserError(f"{found} is among the run's own files; give another --to")
    return found


def refuse_to_overwrite(order: ExportOrder) -> None:
    """
    Raises:
        UserError: something is there, and must not or cannot be replaced.
    """
    path = order.path
    if not (path.exists() or path.is_symlink()):
        return
    if not order.force:
        raise UserError(f"{path} is already there; --force replaces it")
    if order.form.is_folder:
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
        if strange := names - {MODEL, CONFIG} - BESIDE:
            some = ", ".join(sorted(strange)[:3])
            raise UserError(f"{path} is no exported folder (it holds {some}), and --force replaces nothing else")
    elif not path.is_file():
        raise UserError(f"{path} is not a file, and --force replaces nothing else")


def config(
    entry: Entry,
    manifest: Manifest,
    job: DistributedTrainingJob | None,
    rundir: Path,
    records: Sequence[GenerationRecord] = (),
) -> dict[str, Any]:
    """config.json of an exported folder: enough to find the checkpoint again and to build its model."""
    found: dict[str, Any] = {"model_type": "tandem", "checkpoint": entry.name, "step": manifest.step}
    found |= {"generation": manifest.generation, "versions": manifest.versions, "metrics": dict(entry.metrics)}
    found |= {"epoch": manifest.data.epoch} if manifest.data else {}
    origin = origin_of(manifest.generation, records)
    found |= {"initial_weights": origin.dump()} if origin else {}
    datasets = [one.dump() for record in records if record.generation == manifest.generation for one in record.datasets]
    found |= {"datasets": datasets} if datasets else {}
    if job is None:
        return found
    found["job"] = job.metadata.name
    if job.spec.trainer.task is None:
        return found | {"command": job.spec.trainer.command}
    if job.spec.trainer.own_task is not None:
        own = {"task": job.spec.trainer.own_task, "parameters": job.spec.trainer.parameters or {}}
        return found | own | {"precision": job.spec.trainer.settings_of_loop.precision}
    settings = job.spec.trainer.settings
    found |= {"task": job.spec.trainer.task, "architectures": [settings.model], "model": settings.model}
    found["data"] = {name: value for name, value in settings.data.dump_brief().items() if name != "download"}
    found["precision"] = settings.precision
    classes = _classes(rundir, manifest)
    return found | ({"num_labels": classes} if classes else {})


def _classes(rundir: Path, manifest: Manifest) -> int | None:
    """How many classes the evaluation of the checkpoint had."""
    path = rundir / "evaluations" / manifest.name / f"g{manifest.generation:06d}.json"
    result = read_json_or_none(path)
    confusion = result.get("confusion") if isinstance(result, dict) else None
    return len(confusion) if isinstance(confusion, list) and confusion else None


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
        raise UserError(f"tandem checkpoints export needs torch; install it with: {install('trainer')}")
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
    rundir, file = inventory.rundir, aside / (ADAPTER if order.form is Format.PEFT else MODEL)
    job = inventory.job
    is_pretrained = order.form.is_folder and job is not None and job.spec.trainer.is_fine_tuning
    if order.form is Format.PEFT and not is_pretrained:
        raise UserError("--format peft is for runs of causal-lm with parameters.lora")
    with _leased(rundir.leases / f"export-{entry.name}-{lease.default_holder()}.json") as held:
        beside = ["--beside", str(rundir.path)] if is_pretrained else []
        answer = _converted(rundir.checkpoint(entry.name), manifest, file, order, held, beside)
    if is_pretrained and order.form is Format.FOLDER:
        # The model's own configuration, as transformers reads it; ours is a part of it.
        known = config(entry, manifest, job, rundir.path, inventory.records)
        theirs = json.loads((aside / CONFIG).read_bytes())
        (aside / CONFIG).write_bytes(encode(theirs | {"tandem": known}))
    elif order.form is Format.FOLDER:
        known = config(entry, manifest, job, rundir.path, inventory.records)
        (aside / CONFIG).write_bytes(encode(known | {"torch_dtype": next(iter(answer["dtypes"]), None)}))
    for path in aside.iterdir():
        sync_file(path)
    sync_folder(aside)
    note = "" if held else "no lease could be taken, so the checkpoint could have been deleted meanwhile; it was not"
    return Exported(
        order.path, file.stat().st_size, answer["tensors"], answer["parameters"], tuple(answer["dtypes"]), note
    )


def _place(aside: Path, order: ExportOrder) -> None:
    """Give the copy its name."""
    refuse_to_overwrite(order)
    if not order.form.is_folder:
        (aside / MODEL).replace(order.path)
    elif order.path.exists():
        _replace_folder(aside, order.path)
    else:
        aside.rename(order.path)
    sync_folder(order.path.parent)


def _converted(
    folder: Path,
    manifest: Manifest,
    file: Path,
    order: ExportOrder,
    held: lease.Lease | None,
    more: Sequence[str],
) -> dict[str, Any]:
    """Have the weights written; what was written.

    Args:
        more: further words for the program that writes them.
    """
    command = module_command("tandem_trainer.export", "--checkpoint", str(folder), "--digest", manifest.digest)
    command += ["--to", str(file), "--form", "safetensors" if order.form is Format.FOLDER else order.form]
    command += ["--dtype", order.dtype] if order.dtype else []
    command += more
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
        return "the process was killed, perhaps for lack of memory; it needs twice the size of the weights"
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
