"""An exported checkpoint: its name, its destination, what it may replace, and its config.json.

A name is made from a pattern such as `digits_{step:06d}-{accuracy}`, which has the fields of str.format with their
format, and nothing else of it: no attributes, no indices, no conversions, which would give access to the program's
objects.

The weights are read, cast and written by `tandem_trainer.export` in a process of its own, because that needs torch and
core does not have it. The copy is written beside its target under a temporary name and renamed when it is complete and
synced, so nobody ever sees a part of it.

During the copy, a lease keeps retention from deleting the checkpoint. A disk without leases (mounted read-only, say) is
accepted: every byte is compared with its checksum, so the copy is correct or is not made.
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

from tandem.errors import UserError
from tandem.formatting import printable, size
from tandem.job.manifest.fields import closest_choice
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.distribution import install_command
from tandem.processes.launch import module_command
from tandem.rundir import lease
from tandem.rundir.checkpoint import WEIGHTS, Manifest
from tandem.rundir.durable import encode, read_json_or_none, sync_file, sync_folder, temporary_beside
from tandem.rundir.layout import FOLDERS
from tandem.rundir.lineage import GenerationRecord, origin_of
from tandem_cli.checkpoints.inventory import Entry, Inventory
from tandem_cli.checkpoints.listing import plain

MAX_CHARACTERS = 200
"""Length of a name: a file's name may have 255 bytes, and ours gets a suffix and, during the copy, a prefix."""

Value = int | float | str
Fields = Mapping[str, Value | None]
"""Values of a pattern's fields; None for a field without a value for this checkpoint."""


def filled(pattern: str, fields: Fields) -> str:
    """Fill in a pattern.

    Raises:
        UserError: the pattern has a field that is unknown or has no value, or the result is not a valid file name.
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
        raise UserError(f"--name {pattern} gives a name of {len(name)} characters; {MAX_CHARACTERS} is the maximum")
    return name


def _value(pattern: str, field: str, form: str, conversion: str | None, fields: Fields) -> str:
    """Format the value of one field."""
    available = ", ".join(f"{{{name}}}" for name, value in fields.items() if value is not None)
    if conversion is not None or field not in fields:
        similar = closest_choice(field, list(fields))
        hint = f" Did you mean {{{similar}}}?" if similar and similar != field else ""
        raise UserError(f"--name {pattern}: there is no field {{{field}}}.{hint} Available fields: {available}")
    value = fields[field]
    if value is None:
        raise UserError(f"--name {pattern}: {{{field}}} is unknown for this checkpoint. Available fields: {available}")
    if isinstance(value, float) and not form:
        form = ".4f"
    # Python would try to format any width, and be killed on a machine that overcommits memory, as Kubernetes nodes do.
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
OTHER_FILES = {
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
"""Other files in the folder of a pretrained model, or of its adapter."""


class Format(StrEnum):
    """Format of the copy."""

    SAFETENSORS = "safetensors"
    STATE_DICT = "state-dict"
    FOLDER = "folder"
    PEFT = "peft"

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder instead of a file."""
        return self in (Format.FOLDER, Format.PEFT)


class Dtype(StrEnum):
    """Dtype that floating-point tensors are cast to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


SUFFIXES = {Format.SAFETENSORS: ".safetensors", Format.STATE_DICT: ".pt", Format.FOLDER: "", Format.PEFT: ""}
"""Suffix of the copy's name, by format."""


@dataclass(frozen=True)
class ExportOrder:
    """Settings of an export."""

    path: Path
    """Destination of the copy."""
    form: Format = Format.SAFETENSORS
    """Format of the copy."""
    dtype: Dtype | None = None
    """Dtype that floating-point tensors are cast to; None leaves them as they are."""
    force: bool = False
    """Whether an earlier copy is replaced."""


def fields(entry: Entry, manifest: Manifest, inventory: Inventory) -> Fields:
    """Collect the values that a name's pattern may use; None for what is unknown of this checkpoint."""
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
    """First sample of the training data, and the one after the last, as far as the job specifies them."""
    if job is None:
        return None, None
    trainer = job.spec.trainer
    if trainer.is_built_in:
        return trainer.images.data.start or 0, trainer.images.data.end
    data = (trainer.parameters or {}).get("data") if trainer.is_fine_tuning else None
    if not isinstance(data, dict) or "mixture" in data:
        return None, None
    return data.get("start", 0), data.get("end")


def target(path: Path, form: Format, name: str | None, default: str, rundir: Path) -> Path:
    """Choose the destination of the copy.

    Args:
        path: path from the command line.
        name: the filled pattern; then `path` is the folder that contains it.
        default: name inside `path` if that is a folder and the copy is a file.

    Raises:
        UserError: the copy cannot be written there.
    """
    # With a name, `to` is always the folder; without one, it may be the file itself.
    if name is not None:
        if path.exists() and not path.is_dir():
            raise UserError(f"--to {path} is a file; with --name it is the folder that the copy goes into")
        destination = path / (name if name.endswith(SUFFIXES[form]) else name + SUFFIXES[form])
    elif not form.is_folder and path.is_dir():
        destination = path / (default + SUFFIXES[form])
    else:
        destination = path
    # The run would take a copy there for its own, and pruning would delete it.
    if any(destination.resolve().is_relative_to((rundir / folder).resolve()) for folder in FOLDERS):
        raise UserError(f"{destination} is among the run's own files; give another --to")
    return destination


def refuse_to_overwrite(order: ExportOrder) -> None:
    """Check that the destination is free, or may be replaced.

    Raises:
        UserError: something exists there, and must not or cannot be replaced.
    """
    path = order.path
    if not (path.exists() or path.is_symlink()):
        return
    if not order.force:
        raise UserError(f"{path} is already there; --force replaces it")
    if order.form.is_folder:
        # Replace only what an export can have written: the folder may be the user's own.
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
        if strange := names - {MODEL, CONFIG} - OTHER_FILES:
            examples = ", ".join(sorted(strange)[:3])
            raise UserError(f"{path} is no exported folder (it holds {examples}), and --force replaces nothing else")
    elif not path.is_file():
        raise UserError(f"{path} is not a file, and --force replaces nothing else")


def config(
    entry: Entry,
    manifest: Manifest,
    job: DistributedTrainingJob | None,
    rundir: Path,
    records: Sequence[GenerationRecord] = (),
) -> dict[str, Any]:
    """Build config.json of an exported folder: enough to find the checkpoint again and to build its model."""
    content: dict[str, Any] = {"model_type": "tandem", "checkpoint": entry.name, "step": manifest.step}
    content |= {"generation": manifest.generation, "versions": manifest.versions, "metrics": dict(entry.metrics)}
    content |= {"epoch": manifest.data.epoch} if manifest.data else {}
    origin = origin_of(manifest.generation, records)
    content |= {"initial_weights": origin.dump()} if origin else {}
    datasets = [
        dataset.dump() for record in records if record.generation == manifest.generation for dataset in record.datasets
    ]
    content |= {"datasets": datasets} if datasets else {}
    if job is None:
        return content
    content["job"] = job.metadata.name
    if job.spec.trainer.task is None:
        return content | {"command": job.spec.trainer.command}
    content |= {"task": job.spec.trainer.task, "precision": job.spec.trainer.settings_of_loop.precision}
    if job.spec.trainer.own_task is not None:
        return content | {"parameters": job.spec.trainer.parameters or {}}
    images = job.spec.trainer.images
    content |= {"architectures": [images.model], "model": images.model}
    content["data"] = {name: value for name, value in images.data.dump_brief().items() if name != "download"}
    classes = _classes(rundir, manifest)
    return content | ({"num_labels": classes} if classes else {})


def _classes(rundir: Path, manifest: Manifest) -> int | None:
    """Number of classes in the evaluation of the checkpoint."""
    path = rundir / "evaluations" / manifest.name / f"g{manifest.generation:06d}.json"
    result = read_json_or_none(path)
    confusion = result.get("confusion") if isinstance(result, dict) else None
    return len(confusion) if isinstance(confusion, list) and confusion else None


MARGIN = 2**20
"""Bytes that a copy may take beyond its tensors: headers, names, a folder."""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    path: Path
    """The copy."""
    size: int
    """Size in bytes."""
    tensors: int
    """Number of tensors."""
    parameters: int
    """Number of elements."""
    dtypes: tuple[str, ...]
    """Dtypes of the tensors."""
    note: str = ""
    """Warning for the user."""


def copy(inventory: Inventory, entry: Entry, manifest: Manifest, order: ExportOrder) -> Exported:
    """Write the copy.

    Raises:
        UserError: torch is missing, the checkpoint is damaged or gone, or the target cannot be written.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"tandem checkpoints export needs torch; install it with: {install_command('trainer')}")
    refuse_to_overwrite(order)
    try:
        order.path.parent.mkdir(parents=True, exist_ok=True)
        _need_space(order.path, manifest)
        # A file gets a folder, too: the library that writes it creates temporary files beside it.
        temporary = temporary_beside(order.path)
        temporary.mkdir()
        try:
            exported = _written(inventory, entry, manifest, order, temporary)
            _place(temporary, order)
            return exported
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{order.path} cannot be written: {error.strerror or error}") from error


def _written(inventory: Inventory, entry: Entry, manifest: Manifest, order: ExportOrder, temporary: Path) -> Exported:
    """Write everything into the temporary folder, and sync it."""
    rundir, file = inventory.rundir, temporary / (ADAPTER if order.form is Format.PEFT else MODEL)
    job = inventory.job
    is_pretrained = order.form.is_folder and job is not None and job.spec.trainer.is_fine_tuning
    if order.form is Format.PEFT and not is_pretrained:
        raise UserError("--format peft is for runs of causal-lm with parameters.lora")
    with _leased(rundir.leases / f"export-{entry.name}-{lease.default_holder()}.json") as export_lease:
        pretrained = ["--beside", str(rundir.path)] if is_pretrained else []
        answer = _converted(rundir.checkpoint(entry.name), manifest, file, order, export_lease, pretrained)
    if is_pretrained and order.form is Format.FOLDER:
        # The configuration that transformers reads is the model's own; Tandem's is one key of it.
        own_config = config(entry, manifest, job, rundir.path, inventory.records)
        model_config = json.loads((temporary / CONFIG).read_bytes())
        (temporary / CONFIG).write_bytes(encode(model_config | {"tandem": own_config}))
    elif order.form is Format.FOLDER:
        own_config = config(entry, manifest, job, rundir.path, inventory.records)
        (temporary / CONFIG).write_bytes(encode(own_config | {"torch_dtype": next(iter(answer["dtypes"]), None)}))
    for path in temporary.iterdir():
        sync_file(path)
    sync_folder(temporary)
    note = (
        ""
        if export_lease
        else "no lease could be taken, so the checkpoint could have been deleted meanwhile; it was not"
    )
    return Exported(
        order.path, file.stat().st_size, answer["tensors"], answer["parameters"], tuple(answer["dtypes"]), note
    )


def _place(temporary: Path, order: ExportOrder) -> None:
    """Rename the copy to its name."""
    # Again: the path may have been created during the copy.
    refuse_to_overwrite(order)
    if not order.form.is_folder:
        (temporary / MODEL).replace(order.path)
    elif order.path.exists():
        _replace_folder(temporary, order.path)
    else:
        temporary.rename(order.path)
    sync_folder(order.path.parent)


def _converted(
    folder: Path,
    manifest: Manifest,
    file: Path,
    order: ExportOrder,
    export_lease: lease.Lease | None,
    arguments: Sequence[str],
) -> dict[str, Any]:
    """Run the process that writes the weights. Return its answer.

    Args:
        arguments: further arguments of the process.
    """
    command = module_command("tandem_trainer.export", "--checkpoint", str(folder), "--digest", manifest.digest)
    command += ["--to", str(file), "--form", "safetensors" if order.form is Format.FOLDER else order.form]
    command += ["--dtype", order.dtype] if order.dtype else []
    command += arguments
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        # Renew the lease while the process works; it expires after `lease.SECONDS`.
        while True:
            try:
                output, errors = process.communicate(timeout=lease.LEASE_LENGTH_SECONDS / 3)
                break
            except subprocess.TimeoutExpired:
                if export_lease is not None:
                    with suppress(OSError):  # tried again in a moment
                        export_lease.renew()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    answer = _answer(output)
    # The process answers in JSON if it knows the reason; otherwise the last line of its errors is the reason.
    if "refused" in answer:
        raise UserError(answer["refused"])
    if process.returncode != 0 or "tensors" not in answer:
        raise UserError(f"the weights of {folder.name} could not be written: {_failure(process.returncode, errors)}")
    return answer


def _answer(output: str) -> dict[str, Any]:
    """Parse the answer on the last line of the process's output; {} if there is none."""
    with suppress(ValueError, IndexError):
        answer = json.loads(output.splitlines()[-1])
        if isinstance(answer, dict):
            return answer
    return {}


def _failure(code: int, errors: str) -> str:
    """Describe the failure of the process."""
    if code == -signal.SIGKILL:
        return "the process was killed, perhaps for lack of memory; it needs twice the size of the weights"
    last = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
    return last[0]


@contextmanager
def _leased(path: Path) -> Iterator[lease.Lease | None]:
    """Hold a lease on the checkpoint; None if the disk takes no lease."""
    try:
        export_lease = lease.acquire(path)
    except OSError:
        export_lease = None
    try:
        yield export_lease
    finally:
        if export_lease is not None:
            with suppress(OSError):  # it ends by itself
                export_lease.release()


def _need_space(path: Path, manifest: Manifest) -> None:
    # There may be two files of weights: those for evaluators, and those in full precision.
    """Check that the disk has room for the copy."""
    sizes = [entry.size for entry in manifest.files if Path(entry.path).name == WEIGHTS]
    if not sizes:
        raise UserError(f"{manifest.name} has no {WEIGHTS}, so there are no weights to export")
    needed = max(sizes) + MARGIN
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise UserError(plain(f"{path} needs up to {size(needed)}, and the disk has {size(free)} free"))


def _replace_folder(temporary: Path, path: Path) -> None:
    """Replace a folder: it cannot be renamed over another one, so the old one is moved away first."""
    old = temporary_beside(path)
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old)
