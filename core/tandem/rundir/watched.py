"""Checkpoints that a script writes in its own format, and that evaluators evaluate (`evaluators.watch`).

    watched/step-000000500/
        record.json    {"step", "path", "fingerprint", "at"}: never replaced
        ckpt-500.pt    hard links to its files, until it is evaluated

A record gives such a file or folder the name and step under which evaluations, the best checkpoint and all views refer
to it. Its generation is FOREIGN: the ranks that wrote it are unknown, so it is on every lineage. The record has the
fingerprint of the path when it was complete; overwritten content is another checkpoint.

The links cost no copy, and keep files that the script deletes or replaces by a rename until they are evaluated. One
rename commits record and links. Where a disk does not support links, the script's own path is read.

Nobody announces such a checkpoint, and one that is read too early is incomplete. It counts as complete when

- its format shows it: a safetensors file as long as its header says, a zip file of torch.save with its directory at the
  end, a folder of torch.distributed.checkpoint with `.metadata`, one of the Hugging Face Trainer with its state, which
  are written last;
- or else when nothing in it has changed for `settleSeconds`, by the clock of its disk;
- or when training is over: nobody writes any more.

A file that is truncated by its own format never counts, however old it is: a script that is killed during a save leaves
half a file.

In any case two scans in a row must have found the same fingerprint. The coordinator scans, which is never busy, and so
does each evaluator, which may be the last process of a run. The first one that finds a checkpoint records it.

The step is the last number in the name (`checkpoint-500`, `epoch=3-step=1500.ckpt`). A path without one, such as
`best.pt`, is overwritten again and again: each state of it is a checkpoint. Its step is the one that was logged last
when it was written, and at least one more than that of the state before: a restarted script logs earlier steps. The
states of a script that logs no steps are numbered in the order in which they are found.
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

from tandem.model import Model, Timestamp, WholeNumber
from tandem.rundir import lease, tensor_header
from tandem.rundir.durable import (
    TEMPORARY,
    commit_folder,
    list_folder,
    read_json_or_none,
    replace_json,
    temporary_beside,
)
from tandem.rundir.layout import RunDir, checkpoint_name, step_of
from tandem.rundir.lineage import FOREIGN_GENERATION
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Step
from tandem.wire.status import CheckpointRef

WATCHED, RECORD = "watched", "record.json"
MAX_ENTRIES = 5_000
"""Maximum number of files in a folder and below it: no checkpoint has more."""
MAX_STEP = 10**15 - 1
ZIP = b"PK\x03\x04"
"""First bytes of a zip file, such as one of torch.save."""
LOGGED_BYTES = 2**18
"""Bytes at the end of a training log that are searched for a step first."""
_NUMBER = re.compile(r"\d+")


class Watched(Model):
    """A file or folder of the script that is a checkpoint."""

    step: WholeNumber
    """The checkpoint's step."""
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path relative to the run directory."""
    fingerprint: Annotated[str, Field(max_length=128)]
    """Digest of the names, sizes and times of its files when it was complete."""
    at: Timestamp
    """Time of its last change, in seconds since the epoch."""

    @property
    def reference(self) -> CheckpointRef:
        """The reference by which evaluations name this checkpoint."""
        return CheckpointRef(name=checkpoint_name(self.step), step=self.step, generation=FOREIGN_GENERATION)


def step_in(path: str) -> int | None:
    """The last number in a file's name, without its ending; None if there is none."""
    name = Path(path).name
    stem = name if name.rpartition(".")[2].isdecimal() else name.partition(".")[0] or name
    numbers = [int(number) for number in _NUMBER.findall(stem) if len(number) < 16]
    return numbers[-1] if numbers else None


def folder(rundir: RunDir, name: str) -> Path:
    """The folder with the record and the links of a checkpoint."""
    return rundir.path / WATCHED / name


def records(rundir: RunDir, skip: Container[str] = ()) -> list[Watched]:
    """All recorded checkpoints, by step. Damaged records are skipped.

    Args:
        skip: names of checkpoints whose records are not read.
    """
    checkpoints = []
    for path in list_folder(rundir.path / WATCHED):
        if step_of(path.name) is None or path.name in skip:
            continue
        try:
            checkpoints.append(Watched.read(read_json_or_none(path / RECORD)))
        except ValidationError:
            continue
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def record(rundir: RunDir, watched: Watched) -> bool:
    """Record a checkpoint, and link its files. Returns False if that step has a record, or if the checkpoint has
    changed meanwhile.

    Raises:
        OSError: the record cannot be written.
    """
    final = folder(rundir, watched.reference.name)
    final.parent.mkdir(exist_ok=True)
    temporary = temporary_beside(final)
    temporary.mkdir()
    try:
        source = rundir.path / watched.path
        links = temporary / source.name
        with suppress(OSError):
            _link(source, links)
        state = fingerprint(links if links.exists() else source)
        if state is None or state[0] != watched.fingerprint:
            return False
        replace_json(temporary / RECORD, watched.dump())
        commit_folder(temporary, final)
    except OSError:
        # A folder that is not empty is not replaced: another process was first.
        if (final / RECORD).exists():
            return False
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _link(source: Path, target: Path) -> None:
    """Create hard links to a file, or to all files of a folder; nothing at all if that fails.

    Raises:
        OSError: the disk does not support it, or the source is gone.
    """
    try:
        if source.is_file():
            os.link(source.resolve(), target)
        else:
            shutil.copytree(source, target, copy_function=os.link, symlinks=True)
    except (OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        raise


def evaluated_path(rundir: RunDir, watched: Watched) -> Path:
    """The path that evaluators read: the links of a checkpoint, or else the script's own path."""
    links = folder(rundir, watched.reference.name) / Path(watched.path).name
    return links if links.exists() else rundir.path / watched.path


def remove_links(rundir: RunDir, watched: Watched) -> None:
    """Remove the links of a checkpoint that is no longer evaluated."""
    links = folder(rundir, watched.reference.name) / Path(watched.path).name
    if links.is_dir():
        shutil.rmtree(links, ignore_errors=True)
    else:
        links.unlink(missing_ok=True)


OVERWRITTEN = "it was overwritten or deleted before its evaluation was complete"
"""Reason for which a state of a file was not evaluated."""
UNFINISHED = (".tmp", ".part", ".incomplete")
"""Suffixes of files that are still being written."""
MAX_MATCHES = 2_000
"""Maximum number of files and folders that a pattern matches; the newest steps count."""
ABANDONED_SECONDS = 3600.0
"""Age after which a temporary folder counts as left by a crash, in seconds."""


def _sweep(rundir: RunDir) -> None:
    """Remove partial records that crashes have left; one that cannot be removed does no harm."""
    with suppress(OSError):
        for path in list_folder(rundir.path / WATCHED):
            if path.name.startswith(TEMPORARY) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)


def checkpoint_path(rundir: RunDir, name: str) -> Path:
    """The path of a checkpoint: one of Tandem's own, or one of the script's."""
    try:
        watched = Watched.read(read_json_or_none(folder(rundir, name) / RECORD))
    except ValidationError:
        return rundir.checkpoint(name)
    return rundir.path / watched.path


def fingerprint(path: Path) -> tuple[str, float] | None:
    """Fingerprint of a file or folder, and the time of the last change in it; None if it is empty.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    facts = path.stat()
    if stat.S_ISREG(facts.st_mode):
        return (f"{facts.st_size}-{facts.st_mtime_ns}", facts.st_mtime) if facts.st_size else None
    digest, newest, files, remaining = hashlib.sha256(), facts.st_mtime_ns, 0, MAX_ENTRIES
    folders = [path]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                remaining -= 1
                if remaining < 0:
                    return None
                inside = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(inside.st_mode):
                    folders.append(Path(entry.path))
                    continue
                name = os.path.relpath(entry.path, path)
                digest.update(f"{name}\0{inside.st_size}\0{inside.st_mtime_ns}\n".encode(errors="surrogateescape"))
                newest, files = max(newest, inside.st_mtime_ns), files + 1
    return (digest.hexdigest()[:32], newest / 1e9) if files else None


def logged_step(rundir: RunDir, timestamp: float) -> int | None:
    """The last step that was logged before a time, in seconds since the epoch; None if there is none.

    Raises:
        OSError: the logs cannot be read.
    """
    for path in reversed(rundir.training_logs().values()):
        # The checkpoint was written recently, so its step is near the end of the log.
        for start in sorted({max(0, path.stat().st_size - LOGGED_BYTES), 0}, reverse=True):
            entries = (entry for entry in LogReader(path, TRAINING, start) if isinstance(entry, Step))
            steps = [entry.step for entry in entries if entry.time <= timestamp]
            if steps:
                return steps[-1]
    return None


class Finder:
    """Finds the checkpoints of a script and records them. Not thread-safe.

    Args:
        pattern: glob pattern of their paths in the run directory.
        settle_seconds: time without a change after which a checkpoint counts as complete, where its format does not
            show it.
    """

    def __init__(self, rundir: RunDir, pattern: str, settle_seconds: float) -> None:
        self._rundir, self._pattern, self._settle_seconds = rundir, pattern, settle_seconds
        self._fingerprints: dict[str, str] = {}
        """Fingerprints of unrecorded paths in the last scan."""
        self.known: dict[str, Watched] = {}
        """All recorded checkpoints by name, also those of other processes."""
        _sweep(rundir)

    def look(self, ended: bool) -> bool:
        """Record complete checkpoints. Returns whether the next call may find more though training is over.

        Args:
            ended: training is over, so that nobody writes any more.

        Raises:
            OSError: a record cannot be written.
        """
        self._read_records()
        fingerprints: dict[str, str] = {}
        complete, has_pending = [], False
        for path in self._matches():
            # A path may vanish at any time: it is the script's.
            with suppress(OSError):
                state = self._candidate_state(path)
                if state is None:
                    continue
                name = str(path.relative_to(self._rundir.path))
                fingerprints[name] = state[0]
                # It changed since the last scan, or is new: still being written, as far as anybody knows.
                if self._fingerprints.get(name) != state[0]:
                    has_pending = True
                elif ended or self._is_complete(path, state[1]):
                    if not is_truncated(path):
                        complete.append((path, *state))
                else:
                    has_pending = True
        for path, digest, changed in complete:
            self._record(path, digest, changed)
        self._fingerprints = fingerprints
        return ended and has_pending

    def is_there(self, watched: Watched) -> bool:
        """Whether a checkpoint still has the recorded fingerprint."""
        with suppress(FileNotFoundError, NotADirectoryError):
            state = fingerprint(evaluated_path(self._rundir, watched))
            return state is not None and state[0] == watched.fingerprint
        return False

    def _matches(self) -> list[Path]:
        paths = [path for path in self._rundir.path.glob(self._pattern) if not path.name.startswith(".")]
        paths = [path for path in paths if path.suffix not in UNFINISHED]
        return sorted(paths, key=lambda path: (step_in(path.name) or 0, str(path)))[-MAX_MATCHES:]

    def _candidate_state(self, path: Path) -> tuple[str, float] | None:
        """Fingerprint and time of a path that may be an unrecorded checkpoint; None for any other path.

        Raises:
            OSError: it is gone, or cannot be read.
        """
        name, step = str(path.relative_to(self._rundir.path)), step_in(path.name)
        if step is not None and checkpoint_name(step) in self.known:
            return None
        state = fingerprint(path)
        is_known = state is not None and any(
            (checkpoint.path, checkpoint.fingerprint) == (name, state[0]) for checkpoint in self.known.values()
        )
        return None if is_known else state

    def _is_complete(self, path: Path, changed: float) -> bool:
        is_quiet = lease.server_time(self._rundir.leases) - changed >= self._settle_seconds
        return is_quiet or is_marked_complete(path)

    def _record(self, path: Path, digest: str, changed: float) -> None:
        name, step = str(path.relative_to(self._rundir.path)), step_in(path.name)
        if step is None:
            step = logged_step(self._rundir, changed)
            used_steps = {checkpoint.step for checkpoint in self.known.values()}
            if step is None:
                step = 1 + max(used_steps, default=0)
            # A restarted script logs earlier steps, and yet this is the newest state of its file.
            step = max([step, *(checkpoint.step + 1 for checkpoint in self.known.values() if checkpoint.path == name)])
            while step in used_steps:  # several states of one step
                step += 1
        record(self._rundir, Watched(step=step, path=name, fingerprint=digest, at=changed))
        self._read_records()

    def _read_records(self) -> None:
        """Read new records."""
        for checkpoint in records(self._rundir, skip=self.known):
            self.known[checkpoint.reference.name] = checkpoint


def is_marked_complete(path: Path) -> bool:
    """Whether the format of a checkpoint shows that it is complete.

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
        return _is_complete_safetensors(path)
    return zipfile.is_zipfile(path)


def is_truncated(path: Path) -> bool:
    """Whether a file, or one directly in a folder, has a known format and ends too early.

    Raises:
        OSError: it cannot be read.
    """
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        if file.suffix == ".safetensors":
            if not _is_complete_safetensors(file):
                return True
        elif _begins_as_zip(file) and not zipfile.is_zipfile(file):
            return True
    return False


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


def _is_complete_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        try:
            tensors = tensor_header.tensors(read, size)
        except ValueError:
            return False
    return max((tensor.start + tensor.size for tensor in tensors.values()), default=size) == size
