"""Checkpoints that a script writes in a way of its own, and that evaluators take up (`evaluators.watch`).

    watched/step-000000500.json    {"step", "path", "fingerprint", "at"}: created once, never replaced

A record gives such a file or folder the name and step by which evaluations, the best checkpoint and all views know it.
Its generation is FOREIGN: whose ranks wrote it Tandem does not know, so it lies on every lineage. The record holds what
the path looked like when it was found complete; what was overwritten since is another checkpoint.

The step is the last number in the name (`checkpoint-500`, `epoch=3-step=1500.ckpt`). A name without one, such as
`best.pt`, is overwritten again and again: each state of it is a checkpoint, numbered in the order in which they are
found.
"""

import hashlib
import os
import re
import stat
from collections.abc import Container
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from tandem.model import Model, Moment, Whole
from tandem.rundir.durable import create_json, listed, read_json_or_none
from tandem.rundir.layout import RunDir, checkpoint_name, step_of
from tandem.rundir.lineage import FOREIGN
from tandem.status import CheckpointRef

WATCHED = "watched"
MOST_ENTRIES = 5_000
"""Of a folder, in it and below: no checkpoint has more files."""
MOST_STEP = 10**15 - 1
_NUMBER = re.compile(r"\d+")


class Watched(Model):
    """A file or folder of the script's that is a checkpoint."""

    step: Whole
    """Its number."""
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """In the run directory."""
    fingerprint: Annotated[str, Field(max_length=128)]
    """Of names, sizes and times of its files when it was complete."""
    at: Moment
    """When it was last changed, seconds since the epoch."""

    @property
    def reference(self) -> CheckpointRef:
        """The checkpoint, as evaluations know it."""
        return CheckpointRef(name=checkpoint_name(self.step), step=self.step, generation=FOREIGN)


def step_in(path: str) -> int | None:
    """The last number in a file's name, without its ending; None if there is none."""
    name = Path(path).name
    stem = name if name.rpartition(".")[2].isdecimal() else name.partition(".")[0] or name
    found = [int(number) for number in _NUMBER.findall(stem) if len(number) < 16]
    return found[-1] if found else None


def records(rundir: RunDir, known: Container[str] = ()) -> list[Watched]:
    """All that are recorded, by step. One that is damaged is passed over.

    Args:
        known: names of checkpoints whose records need not be read again.
    """
    found = []
    for path in listed(rundir.path / WATCHED):
        if path.suffix != ".json" or step_of(path.stem) is None or path.stem in known:
            continue
        try:
            found.append(Watched.read(read_json_or_none(path)))
        except ValidationError:
            continue
    return sorted(found, key=lambda one: one.step)


def record(rundir: RunDir, watched: Watched) -> bool:
    """Record a checkpoint. False if there is one of that step.

    Raises:
        OSError: the disk does not take it.
    """
    folder = rundir.path / WATCHED
    folder.mkdir(exist_ok=True)
    return create_json(folder / f"{watched.reference.name}.json", watched.dump())


def path_of(rundir: RunDir, name: str) -> Path:
    """Where a checkpoint is: one of Tandem's own, or one of the script's."""
    try:
        watched = Watched.read(read_json_or_none(rundir.path / WATCHED / f"{name}.json"))
    except ValidationError:
        return rundir.checkpoint(name)
    return rundir.path / watched.path


def fingerprint(path: Path) -> tuple[str, float] | None:
    """What a file or folder looks like, and when anything in it was changed last; None for one that is empty.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    facts = path.stat()
    if stat.S_ISREG(facts.st_mode):
        return (f"{facts.st_size}-{facts.st_mtime_ns}", facts.st_mtime) if facts.st_size else None
    digest, newest, files, left = hashlib.sha256(), facts.st_mtime_ns, 0, MOST_ENTRIES
    folders = [path]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                left -= 1
                if left < 0:
                    return None
                inside = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(inside.st_mode):
                    folders.append(Path(entry.path))
                    continue
                name = os.path.relpath(entry.path, path)
                digest.update(f"{name}\0{inside.st_size}\0{inside.st_mtime_ns}\n".encode(errors="surrogateescape"))
                newest, files = max(newest, inside.st_mtime_ns), files + 1
    return (digest.hexdigest()[:32], newest / 1e9) if files else None
