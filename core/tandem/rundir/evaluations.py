"""The files in `evaluations/step-000000500/`, and how far they say that the evaluation of a checkpoint is.

Of generation 7: `g000007.shard-0-of-2.json` for each part, then `g000007.json`, the merged result; or
`g000007.skipped.json`, the note that nobody evaluates it. Each is created once and never replaced. A merged result
counts whatever else is there.
"""

import re
import time
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from tandem.model import Count, Model, Number, PlainName, Text
from tandem.rundir.durable import create_json, listed, read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef

Fate = Literal["merged", "skipped", "begun", "waits"]
"""`begun`: a part is there, and the rest is not."""

_LAST_WORD = re.compile(r"^g(\d{6,15})(\.skipped)?\.json$")
_SHARD = re.compile(r"^g(\d{6,15})\.shard-\d+-of-\d+\.json$")


class LastWord(NamedTuple):
    """A file that says that nothing more will come: the merged result of a checkpoint, or the note that it is passed
    over."""

    path: Path
    generation: int
    """That wrote the checkpoint."""
    is_note: bool


def last_word(path: Path) -> LastWord | None:
    """What a file is by its name; None for every other one."""
    match = _LAST_WORD.match(path.name)
    return LastWord(path, int(match[1]), bool(match[2])) if match else None


class Best(Model):
    """What best.json says, for people: nobody decides by it. A checkpoint is the best by `tandem.rundir.ranking`."""

    name: PlainName
    """The checkpoint's."""
    step: Count = None
    generation: Count = None
    metric: Text = None
    """By which it is the best."""
    value: Number = None
    """Of that metric, on the test data."""


def best(rundir: RunDir) -> Best | None:
    """The best checkpoint, as evaluators have said; None while there is none."""
    try:
        return Best.read(read_json_or_none(rundir.best_file))
    except ValidationError:
        return None


def folder(rundir: RunDir, reference: CheckpointRef) -> Path:
    """Where the evaluation files of a checkpoint are."""
    return rundir.evaluations / reference.name


def shard_name(reference: CheckpointRef, shard: int, shards: int) -> str:
    """File name of a shard's result."""
    return f"g{reference.generation:06d}.shard-{shard}-of-{shards}.json"


def merged_name(reference: CheckpointRef) -> str:
    """File name of the merged result."""
    return f"g{reference.generation:06d}.json"


def skipped_name(reference: CheckpointRef) -> str:
    """File name of the note that a checkpoint was passed over."""
    return f"g{reference.generation:06d}.skipped.json"


def skip(rundir: RunDir, reference: CheckpointRef, why: str) -> bool:
    """Record that a checkpoint is passed over. False if that is recorded already.

    Raises:
        OSError: the disk does not take it.
    """
    target = folder(rundir, reference)
    target.mkdir(parents=True, exist_ok=True)
    return create_json(target / skipped_name(reference), {"why": why, "at": time.time()}, durable=False)


def fate(rundir: RunDir, reference: CheckpointRef) -> Fate:
    """How far the evaluation of a checkpoint is."""
    names = {path.name for path in listed(folder(rundir, reference))}
    if merged_name(reference) in names:
        return "merged"
    if skipped_name(reference) in names:
        return "skipped"
    parts = (match for name in names if (match := _SHARD.match(name)))
    return "begun" if any(int(match[1]) == reference.generation for match in parts) else "waits"
