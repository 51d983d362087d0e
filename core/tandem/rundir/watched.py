"""Checkpoints that a script writes in a way of its own, and that evaluators take up (`evaluators.watch`).

    watched/step-000000500/
        record.json    {"step", "path", "fingerprint", "at"}: never replaced
        ckpt-500.pt    hard links to its files, until it is evaluated

A record gives such a file or folder the name and step by which evaluations, the best checkpoint and all views know it.
Its generation is FOREIGN: whose ranks wrote it Tandem does not know, so it lies on every lineage. The record holds what
the path looked like when it was found complete; what was overwritten since is another checkpoint.

The links cost no copy, and keep what the script deletes or replaces by a rename until evaluators have done with it. One
rename commits record and links. Where a disk refuses the links, the script's own path is read.

Nobody announces such a checkpoint, and one that is read too early is half of one. It counts as complete when

- its format says so: a safetensors file as long as its header tells, a zip file of torch.save with its directory at the
  end, a folder of torch.distributed.checkpoint with `.metadata`, one of the Hugging Face Trainer with its state, which
  are written last;
- or else when nothing in it was changed for `settleSeconds`, by the clock of its disk;
- or when training is over: nobody writes any more.

What its own format shows to be cut off never counts, however long it rests: a script that is killed while it saves
leaves half a file.

And always only if two looks have found it the same. The coordinator looks, which is never busy, and so does each
evaluator, which may be the last process of a run. The first one that finds a checkpoint records it.

The step is the last number in the name (`checkpoint-500`, `epoch=3-step=1500.ckpt`). A name without one, such as
`best.pt`, is overwritten again and again: each state of it is a checkpoint, of the step that was logged last when it
was written, and at least one after that of the state before: a script that was started again logs earlier steps. One
that logs no steps has its states numbered in the order in which they are found.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from tandem import tensor_header
from tandem.model import Model, Moment, Whole
from tandem.rundir import lease
from tandem.rundir.durable import TEMPORARY, commit_folder, listed, read_json_or_none, replace_json, temporary_beside
from tandem.rundir.layout import RunDir, checkpoint_name, step_of
from tandem.rundir.lineage import FOREIGN
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Step
from tandem.status import CheckpointRef

WATCHED, RECORD = "watched", "record.json"
MAX_ENTRIES = 5_000
"""Of a folder, in it and below: no checkpoint has more files."""
MAX_STEP = 10**15 - 1
ZIP = b"PK\x03\x04"
"""Begins a zip file, such as one of torch.save."""
LOGGED_BYTES = 2**18
"""Of the end of a training log, in which a step is looked for first."""
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


def folder(rundir: RunDir, name: str) -> Path:
    """Where the record and the links of a checkpoint are."""
    return rundir.path / WATCHED / name


def records(rundir: RunDir, known: Container[str] = ()) -> list[Watched]:
    """All that are recorded, by step. One that is damaged is passed over.

    Args:
        known: names of checkpoints whose records need not be read again.
    """
    found = []
    for path in listed(rundir.path / WATCHED):
        if step_of(path.name) is None or path.name in known:
            continue
        try:
            found.append(Watched.read(read_json_or_none(path / RECORD)))
        except ValidationError:
            continue
    return sorted(found, key=lambda one: one.step)


def record(rundir: RunDir, watched: Watched) -> bool:
    """Record a checkpoint, and link its files. False if there is one of that step, or if it has changed meanwhile.

    Raises:
        OSError: the disk does not take it.
    """
    final = folder(rundir, watched.reference.name)
    final.parent.mkdir(exist_ok=True)
    aside = temporary_beside(final)
    aside.mkdir()
    try:
        source = rundir.path / watched.path
        links = aside / source.name
        with suppress(OSError):
            _link(source, links)
        looks = fingerprint(links if links.exists() else source)
        if looks is None or looks[0] != watched.fingerprint:
            return False
        replace_json(aside / RECORD, watched.dump())
        commit_folder(aside, final)
    except OSError:
        # A folder that holds something is not replaced: somebody else was first.
        if (final / RECORD).exists():
            return False
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _link(source: Path, target: Path) -> None:
    """Hard links to a file, or to all files of a folder; nothing at all if that fails.

    Raises:
        OSError: the disk refuses, or the source is gone.
    """
    try:
        if source.is_file():
            os.link(source.resolve(), target)
        else:
            shutil.copytree(source, target, copy_function=os.link, symlinks=True)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        raise


def content(rundir: RunDir, watched: Watched) -> Path:
    """What evaluators read of a checkpoint: its links, or else the script's own path."""
    links = folder(rundir, watched.reference.name) / Path(watched.path).name
    return links if links.exists() else rundir.path / watched.path


def let_go(rundir: RunDir, watched: Watched) -> None:
    """Remove the links of a checkpoint that nobody evaluates any more."""
    links = folder(rundir, watched.reference.name) / Path(watched.path).name
    if links.is_dir():
        shutil.rmtree(links, ignore_errors=True)
    else:
        links.unlink(missing_ok=True)


OVERWRITTEN = "it was overwritten or deleted before its evaluation was complete"
"""Why a state of a file was not evaluated."""
UNFINISHED = (".tmp", ".part", ".incomplete")
"""Endings of names that nobody has finished with."""
MAX_FOUND = 2_000
"""Files and folders that a pattern may match; the newest steps count."""
FORGOTTEN_SECONDS = 3600.0
"""Nobody takes so long to record a checkpoint."""


def _sweep(rundir: RunDir) -> None:
    """Remove what crashes have left half recorded; what cannot be removed does no harm."""
    with suppress(OSError):
        for path in listed(rundir.path / WATCHED):
            if path.name.startswith(TEMPORARY) and time.time() - path.stat().st_mtime > FORGOTTEN_SECONDS:
                shutil.rmtree(path)


def path_of(rundir: RunDir, name: str) -> Path:
    """Where a checkpoint is: one of Tandem's own, or one of the script's."""
    try:
        watched = Watched.read(read_json_or_none(folder(rundir, name) / RECORD))
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
    digest, newest, files, left = hashlib.sha256(), facts.st_mtime_ns, 0, MAX_ENTRIES
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


def logged_step(rundir: RunDir, at: float) -> int | None:
    """The last step that was logged until a time, seconds since the epoch; None if none is found.

    Raises:
        OSError: the logs cannot be read.
    """
    for path in reversed(rundir.training_logs().values()):
        # Looked for soon after it was written.
        for start in sorted({max(0, path.stat().st_size - LOGGED_BYTES), 0}, reverse=True):
            steps = [one.step for one in LogReader(path, TRAINING, start) if isinstance(one, Step) and one.time <= at]
            if steps:
                return steps[-1]
    return None


class Finder:
    """Finds the checkpoints of a script and records them. For one thread.

    Args:
        pattern: of their paths in the run directory.
        settle_seconds: how long one rests before it counts, where its format does not say that it is complete.
    """

    def __init__(self, rundir: RunDir, pattern: str, settle_seconds: float) -> None:
        self._rundir, self._pattern, self._settle_seconds = rundir, pattern, settle_seconds
        self._seen: dict[str, str] = {}
        """Fingerprints at the last look, by path, of what is not recorded."""
        self.known: dict[str, Watched] = {}
        """All that are recorded, by name, also by other processes."""
        _sweep(rundir)

    def look(self, ended: bool) -> bool:
        """Record what is complete. Returns whether the next look may find more though training is over.

        Args:
            ended: nobody writes any more.

        Raises:
            OSError: the disk does not take a record.
        """
        self._learn()
        seen: dict[str, str] = {}
        found, waits = [], False
        for path in self._matching():
            with suppress(OSError):
                looks = self._considered(path)
                if looks is None:
                    continue
                name = str(path.relative_to(self._rundir.path))
                seen[name] = looks[0]
                if self._seen.get(name) != looks[0]:
                    waits = True
                elif ended or self._counts(path, looks[1]):
                    if not is_cut_off(path):
                        found.append((path, *looks))
                else:
                    waits = True
        for path, looks_like, changed in found:
            self._record(path, looks_like, changed)
        self._seen = seen
        return ended and waits

    def is_there(self, watched: Watched) -> bool:
        """Whether a checkpoint is still what was recorded."""
        with suppress(FileNotFoundError, NotADirectoryError):
            looks = fingerprint(content(self._rundir, watched))
            return looks is not None and looks[0] == watched.fingerprint
        return False

    def _matching(self) -> list[Path]:
        found = [path for path in self._rundir.path.glob(self._pattern) if not path.name.startswith(".")]
        found = [path for path in found if path.suffix not in UNFINISHED]
        return sorted(found, key=lambda path: (step_in(path.name) or 0, str(path)))[-MAX_FOUND:]

    def _considered(self, path: Path) -> tuple[str, float] | None:
        """What a path looks like that may be a checkpoint that is not recorded; None for any other one.

        Raises:
            OSError: it is gone, or cannot be read.
        """
        name, step = str(path.relative_to(self._rundir.path)), step_in(path.name)
        if step is not None and checkpoint_name(step) in self.known:
            return None
        looks = fingerprint(path)
        is_known = looks is not None and any(
            (one.path, one.fingerprint) == (name, looks[0]) for one in self.known.values()
        )
        return None if is_known else looks

    def _counts(self, path: Path, changed: float) -> bool:
        rests = lease.server_time(self._rundir.leases) - changed >= self._settle_seconds
        return rests or says_that_it_is_complete(path)

    def _record(self, path: Path, looks_like: str, changed: float) -> None:
        name, step = str(path.relative_to(self._rundir.path)), step_in(path.name)
        if step is None:
            step = logged_step(self._rundir, changed)
            taken = {one.step for one in self.known.values()}
            if step is None:
                step = 1 + max(taken, default=0)
            # After a restart earlier steps are logged, and yet this is the newest state of its file.
            step = max([step, *(one.step + 1 for one in self.known.values() if one.path == name)])
            while step in taken:  # several states of one step
                step += 1
        record(self._rundir, Watched(step=step, path=name, fingerprint=looks_like, at=changed))
        self._learn()

    def _learn(self) -> None:
        """Read the records that are new."""
        for one in records(self._rundir, known=self.known):
            self.known[one.reference.name] = one


def says_that_it_is_complete(path: Path) -> bool:
    """Whether a checkpoint of a known format is there to its end.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_dir():
        if (path / ".metadata").is_file():
            return True
        with suppress(FileNotFoundError, ValueError):
            return isinstance(json.loads((path / "trainer_state.json").read_bytes()), dict)
        return False
    if path.suffix == ".safetensors":
        return _is_whole_safetensors(path)
    return zipfile.is_zipfile(path)


def is_cut_off(path: Path) -> bool:
    """Whether a file, or one directly in a folder, is of a known format and ends too early.

    Raises:
        OSError: it cannot be read.
    """
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        if file.suffix == ".safetensors":
            if not _is_whole_safetensors(file):
                return True
        elif _begins_as_zip(file) and not zipfile.is_zipfile(file):
            return True
    return False


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


def _is_whole_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        try:
            found = tensor_header.tensors(read, size)
        except ValueError:
            return False
    return max((tensor.start + tensor.size for tensor in found.values()), default=size) == size
