"""What an exported checkpoint is called, where it goes, what it may replace, and what its config.json says.

A name is made from a pattern such as `digits_{step:06d}-{accuracy}`, which has the fields of str.format with their
format, and nothing else of it: no attributes, no indices, no conversions, which would let it reach into the program.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import Any

from tandem.errors import UserError
from tandem.job import DistributedTrainingJob
from tandem.manifest.fields import nearest
from tandem.printable import printable
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import FOLDERS
from tandem_cli.checkpoints.inventory import Entry, Inventory

MOST_CHARACTERS = 200
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
            f"--name {pattern} gives {printable(name)!r}, which is no good name for a file: "
            "no slash, no control characters, and neither a dot nor a dash in front"
        )
    if len(name.encode()) > MOST_CHARACTERS:
        raise UserError(f"--name {pattern} gives a name of {len(name)} characters; {MOST_CHARACTERS} are the most")
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
    if any(len(number) > 4 or int(number) > MOST_CHARACTERS for number in re.findall(r"[0-9]+", form)):
        raise UserError(
            f"--name {pattern}: {{{field}}} cannot be written as {form!r}: {MOST_CHARACTERS} characters are the most"
        )
    try:
        return format(value, form)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--name {pattern}: {{{field}}} cannot be written as {form!r}: {error}") from error


MODEL = "model.safetensors"
CONFIG = "config.json"


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
    data = job.spec.trainer.settings.data if job and job.spec.trainer.task else None
    metrics = {metric: entry.metrics.get(metric) for metric in ("loss", "accuracy", "macroF1")}
    return {
        "job": job.metadata.name if job else None,
        "name": entry.name,
        "step": entry.step,
        "epoch": manifest.data.epoch if manifest.data else None,
        "generation": manifest.generation,
        "start": (data.start or 0) if data else None,
        "end": data.end if data else None,
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
    if order.form is Format.FOLDER:
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else {path.name}
        if names - {MODEL, CONFIG}:
            some = ", ".join(sorted(names - {MODEL, CONFIG})[:3])
            raise UserError(f"{path} is no exported folder (it holds {some}), and --force replaces nothing else")
    elif not path.is_file():
        raise UserError(f"{path} is not a file, and --force replaces nothing else")


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
