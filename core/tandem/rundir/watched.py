"""Checkpoints that a script writes in its own format, and that evaluators evaluate (`evaluators.watch`).

    watched/step-000000500/
        record.json    {"step", "path", "fingerprint", "at"}, "copiedBytes", "noCopyReason": never replaced
        ckpt-500.pt    hard links to its files or a copy of them, until it is evaluated

A record gives such a file or folder the name and step under which evaluations, the best checkpoint and all views refer
to it. Its generation is FOREIGN: the ranks that wrote it are unknown, so it is on every lineage. The record has the
fingerprint of the path when it was complete; overwritten content is another checkpoint.

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
`best.pt`, and the only path that a pattern without wildcards names, is overwritten again and again: each state of it is
a checkpoint. Its step is the one that was logged last when it was written, and at least one more than that of the state
before: a restarted script logs earlier steps. The states of a script that logs no steps are numbered in the order in
which they are found.

**Links and copies.** Hard links cost nothing, and keep files that the script deletes or replaces by a rename until they
are evaluated. A script that writes into the same file again changes what is linked; a copy keeps it, and costs its
bytes where the disk has no reflinks (tandem.rundir.file_copy). Which one a script does is only known afterwards, from
the inode of its next state. So

- a path with a number in its name is linked: such a file is not written again;
- of any other path the first state is copied, so that it is not lost, and so is each further one, until the path has
  got another inode and no inode was ever written to twice: then the script renames, and links keep its states, too;
- what is found when training is over is linked.

A copy counts only if its source did not change meanwhile. One rename commits record and files.

Copies wait for evaluators that may be slower than the script. At most MAX_COPIES of them and MAX_COPIED_BYTES exist,
and the disk keeps space for FREE_COPIES more of the same size: training comes first. Under `Latest` a new state
removes the copies of older ones that nobody has started to evaluate. Beyond these bounds, and where the disk is full,
the state is linked instead. A link takes space, too, once the script deletes the file, so there is none without space
for FREE_LINKED more. If a state is then lost before its evaluation, the note says why it was not kept. A lease
lets one process at a time copy, large files on a thread beside the next scans. Its holder removes what a crash has left
half copied. Rejected: evaluating under a lock (scripts know none), copying every path (a numbered checkpoint of 30 GB
would be written twice), inotify (not on NFS).

The copy or links of the best checkpoint so far stay until another one is the best, and after the end only where the
script's own file has another content by then.
"""

import glob
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationError

from tandem.formatting import size as format_size
from tandem.model import Model, Timestamp, WholeNumber
from tandem.rundir import evaluations, file_copy, lease
from tandem.rundir.completeness import is_marked_complete, is_truncated
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
LOGGED_BYTES = 2**18
"""Bytes at the end of a training log that are searched for a step first."""
MAX_COPIES, MAX_COPIED_BYTES = 100, 32 * 2**30
"""Maximum number of copies that wait for their evaluation, and of the bytes in them."""
FREE_COPIES, FREE_LINKED = 4, 1
"""Number of checkpoints of the same size that the disk has space for after a copy, and once the file behind a link has
been deleted."""
INLINE_BYTES = 4 * 2**20
"""Size from which on a file is copied on a thread, in bytes."""
UNSETTLED_SECONDS = 30.0
"""Time for which a path changes again and again before that is reported, in seconds."""
COPY_LEASE = "copy-watched.json"
Policy = Literal["Latest", "Every"]
PARTIAL = f"{TEMPORARY}copy-"
"""Prefix of folders with a copy that is not complete."""
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
    copied_bytes: WholeNumber | None = None
    """Size of the copy of its files, in bytes. None: they are linked."""
    no_copy_reason: Annotated[str | None, Field(max_length=300)] = None
    """Reason for which a copy or a link was not made that would have been needed."""

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
    return _read(list_folder(rundir.path / WATCHED), skip)


def _read(paths: Iterable[Path], skip: Container[str]) -> list[Watched]:
    checkpoints = []
    for path in paths:
        if step_of(path.name) is None or path.name in skip:
            continue
        try:
            checkpoints.append(Watched.read(read_json_or_none(path / RECORD)))
        except ValidationError:
            continue
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def record(rundir: RunDir, watched: Watched, copy: Path | None = None, links: bool = True) -> bool:
    """Record a checkpoint with its files. Returns False if that step has a record, or if the checkpoint has changed
    meanwhile.

    Args:
        copy: temporary folder with a copy of the files, which becomes the checkpoint's.
        links: whether they are linked where there is no copy.

    Raises:
        OSError: the record cannot be written.
    """
    final = folder(rundir, watched.reference.name)
    final.parent.mkdir(exist_ok=True)
    temporary = copy or temporary_beside(final)
    try:
        source = rundir.path / watched.path
        files = temporary / source.name
        if copy is None:
            temporary.mkdir()
        if copy is None and links:
            with suppress(OSError):
                _link(source, files)
        state = fingerprint(files if files.exists() else source)
        if state is None or state.fingerprint != watched.fingerprint:
            return False
        replace_json(temporary / RECORD, watched.dump())
        commit_folder(temporary, final)
    except OSError:
        # A folder that is not empty is not replaced: another process was first.
        if (final / RECORD).exists():
            return False
        raise
    finally:
        if copy is None:
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
    """The path that evaluators read: the copy or the links of a checkpoint, or else the script's own path."""
    files = folder(rundir, watched.reference.name) / Path(watched.path).name
    return files if files.exists() else rundir.path / watched.path


def remove_files(rundir: RunDir, watched: Watched) -> None:
    """Remove the copy or the links of a checkpoint that is no longer evaluated."""
    files = folder(rundir, watched.reference.name) / Path(watched.path).name
    if files.is_dir():
        shutil.rmtree(files, ignore_errors=True)
    else:
        files.unlink(missing_ok=True)


def is_unchanged(path: Path, watched: Watched) -> bool:
    """Whether a file or folder has the content of a recorded checkpoint."""
    with suppress(FileNotFoundError, NotADirectoryError):
        state = fingerprint(path)
        return state is not None and state.fingerprint == watched.fingerprint
    return False


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


def checkpoint_path(rundir: RunDir, name: str) -> Path | None:
    """The path of a checkpoint: one of Tandem's own, or one of the script's; None if the script has overwritten or
    deleted it, and no copy or link is left."""
    try:
        watched = Watched.read(read_json_or_none(folder(rundir, name) / RECORD))
    except ValidationError:
        return rundir.checkpoint(name)
    paths = (rundir.path / watched.path, evaluated_path(rundir, watched))
    return next((path for path in paths if is_unchanged(path, watched)), None)


class FileState(NamedTuple):
    """The state of a file or folder, by what the file system says about it."""

    fingerprint: str
    """Digest of the names, sizes and modification times of its files."""
    changed: float
    """Time of the last change in it, in seconds since the epoch."""
    size: int
    """Size of its files in bytes."""
    inode: int
    """Its own inode."""


def fingerprint(path: Path) -> FileState | None:
    """The state of a file or folder; None if it is empty.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    facts = path.stat()
    if stat.S_ISREG(facts.st_mode):
        size = facts.st_size
        return FileState(f"{size}-{facts.st_mtime_ns}", facts.st_mtime, size, facts.st_ino) if size else None
    digest, newest, size, files, remaining = hashlib.sha256(), facts.st_mtime_ns, 0, 0, MAX_ENTRIES
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
                newest, size, files = max(newest, inside.st_mtime_ns), size + inside.st_size, files + 1
    return FileState(digest.hexdigest()[:32], newest / 1e9, size, facts.st_ino) if files else None


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


class _Candidate(NamedTuple):
    """A complete state of a path without a record."""

    path: Path
    name: str
    """Path relative to the run directory."""
    state: FileState


class Finder:
    """Finds the checkpoints of a script and records them. Not thread-safe.

    Args:
        pattern: glob pattern of their paths in the run directory.
        settle_seconds: time without a change after which a checkpoint counts as complete, where its format does not
            show it.
        policy: the checkpoints that are evaluated; None if none are, so that nothing needs to be copied.
    """

    def __init__(self, rundir: RunDir, pattern: str, settle_seconds: float, policy: Policy | None = "Every") -> None:
        self._rundir, self._pattern, self._settle_seconds = rundir, pattern, settle_seconds
        self._policy = policy
        self._states: dict[str, FileState] = {}
        """States of the paths in the last scan, except those whose step is recorded."""
        self._unrecorded_since: dict[str, float] = {}
        """Time since which a path has had no recorded state, on the monotonic clock."""
        self._rewritten: set[str] = set()
        """Paths at which an inode was written to again."""
        self._replaced: set[str] = set()
        """Paths that got another inode."""
        self._partial: list[Path] = []
        """Incomplete copies that the last scan found, also those of other processes."""
        self._removed: set[str] = set()
        """Checkpoints whose copy is removed."""
        self._reported: set[str] = set()
        self._copying: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards `recorded`, which the copying thread replaces, too."""
        self.recorded: dict[str, Watched] = {}
        """All recorded checkpoints by name, also those of other processes. Replaced when it changes."""
        self.problems: list[str] = []
        """Sentences about states that are not evaluated, or may not be, one for each path and reason."""
        _sweep(rundir)

    def look(self, ended: bool) -> bool:
        """Record complete checkpoints. Returns whether the next call may find more though training is over.

        Args:
            ended: training is over, so that nobody writes any more.

        Raises:
            OSError: a record cannot be written.
        """
        self._read_records()
        has_pending = self._remove_partial_copies() and ended
        states: dict[str, FileState] = {}
        complete = []
        for path in self._matches():
            name, step = str(path.relative_to(self._rundir.path)), self._step_in(path)
            if step is not None and checkpoint_name(step) in self.recorded:
                continue
            # A path may vanish at any time: it is the script's.
            with suppress(OSError):
                before, state = self._states.get(name), fingerprint(path)
                if (newest := state or before) is not None:
                    states[name] = newest
                if state is None:
                    continue
                is_changed = before is None or before.fingerprint != state.fingerprint
                if before is not None and is_changed:
                    self._learn(name, before, state)
                if self._is_known(name, state):
                    self._unrecorded_since.pop(name, None)
                    continue
                # It changed since the last scan, or is new: still being written, as far as anybody knows.
                if not is_changed and (ended or self._is_complete(path, state.changed)):
                    if not is_truncated(path):
                        complete.append(_Candidate(path, name, state))
                else:
                    has_pending = True
                    self._report_if_never_complete(name)
        self._states = states
        self._unrecorded_since = {name: since for name, since in self._unrecorded_since.items() if name in states}
        for candidate in complete:
            self._record(candidate, ended)
        return ended and has_pending

    def is_there(self, watched: Watched) -> bool:
        """Whether a checkpoint still has the recorded fingerprint."""
        return is_unchanged(evaluated_path(self._rundir, watched), watched)

    def take_problems(self) -> Sequence[str]:
        """New sentences about states that are not evaluated, or may not be."""
        problems, self.problems = self.problems, []
        return problems

    def _matches(self) -> list[Path]:
        paths = [path for path in self._rundir.path.glob(self._pattern) if not path.name.startswith(".")]
        paths = [path for path in paths if path.suffix not in UNFINISHED]
        # A pattern such as `**/*.pt` matches the links and copies, too.
        own = self._rundir.path / WATCHED
        paths = [path for path in paths if own not in path.parents]
        return sorted(paths, key=lambda path: (step_in(path.name) or 0, str(path)))[-MAX_MATCHES:]

    def _step_in(self, path: Path) -> int | None:
        return step_in(path.name) if glob.has_magic(self._pattern) else None

    def _is_known(self, name: str, state: FileState) -> bool:
        return any(
            (checkpoint.path, checkpoint.fingerprint) == (name, state.fingerprint)
            for checkpoint in self.recorded.values()
        )

    def _learn(self, name: str, before: FileState, now: FileState) -> None:
        """Learn from two states of a path in which way the script writes it."""
        if before.inode != now.inode:
            self._replaced.add(name)
        # One that grows and was not recorded before is being written for the first time.
        elif now.size <= before.size or self._is_known(name, before):
            self._rewritten.add(name)

    def _is_complete(self, path: Path, changed: float) -> bool:
        is_quiet = lease.server_time(self._rundir.leases) - changed >= self._settle_seconds
        return is_quiet or is_marked_complete(path)

    def _report_if_never_complete(self, name: str) -> None:
        since = self._unrecorded_since.setdefault(name, time.monotonic())
        seconds = time.monotonic() - since
        if name in self._rewritten and seconds > max(UNSETTLED_SECONDS, 3 * self._settle_seconds):
            self._report(
                f"{name} was overwritten again and again for {seconds:.0f} s and never counted as complete: that takes "
                f"a format that shows it, or {self._settle_seconds:g} s without a change (evaluators.settleSeconds); "
                "set fewer seconds than lie between two saves, or have each save write a file of its own",
                name,
            )

    def _report(self, problem: str, *key: str) -> None:
        """Report a problem unless one with the same key was."""
        if (joined := "\0".join(key)) not in self._reported:
            self._reported.add(joined)
            self.problems.append(problem)

    # Records

    def _record(self, candidate: _Candidate, ended: bool) -> None:
        """Record a checkpoint, or begin to copy it; the next call tries again where another one is being copied."""
        name = candidate.name
        is_renamed = name in self._replaced and name not in self._rewritten
        if ended or is_renamed or self._policy is None or self._step_in(candidate.path) is not None:
            self._commit(candidate)
            return
        if self._copying is not None and self._copying.is_alive():
            return
        acquired = lease.acquire(self._rundir.leases / COPY_LEASE)
        if acquired is None:
            return  # another process copies
        # Each file of a folder is synced, and there may be thousands.
        if candidate.state.size <= INLINE_BYTES and not candidate.path.is_dir():
            self._copy(candidate, acquired)
            return
        self._copying = threading.Thread(
            target=self._copy_on_thread, args=(candidate, acquired), name="watched-copy", daemon=True
        )
        self._copying.start()

    def _copy_on_thread(self, candidate: _Candidate, acquired: lease.Lease) -> None:
        try:
            self._copy(candidate, acquired)
        except OSError as error:
            self._report(f"{candidate.name} cannot be recorded: {error.strerror or error}", candidate.name, "record")

    def _copy(self, candidate: _Candidate, acquired: lease.Lease) -> None:
        """Copy a checkpoint and record the copy; link it if that is not possible.

        Raises:
            OSError: the record cannot be written.
        """
        temporary = self._rundir.path / WATCHED / f"{PARTIAL}{acquired.holder}-{time.monotonic_ns()}"
        renewed_at = time.monotonic()

        def renew() -> None:
            nonlocal renewed_at
            if time.monotonic() - renewed_at > acquired.seconds / 3:
                acquired.renew()
                renewed_at = time.monotonic()

        with acquired:
            reason = self._reason_against_copying(candidate.state.size)
            try:
                if not reason:
                    temporary.mkdir(parents=True)
                    file_copy.copy(candidate.path, temporary / candidate.path.name, renew)
                    self._commit(candidate, temporary)
                    return
            except (file_copy.SourceChanged, FileNotFoundError):
                self._report(
                    f"{candidate.name} was overwritten while it was copied ({format_size(candidate.state.size)}), so "
                    "that state is not evaluated; saves that lie further apart are",
                    candidate.name,
                    "changed",
                )
                return
            except OSError as error:
                reason = f"the copy failed: {error.strerror or error}"
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            self._report(
                f"{candidate.name} is not copied: {reason}; what is overwritten before its evaluation is lost",
                candidate.name,
                "limit",
            )
            self._commit(candidate, no_copy_reason=f"no copy was taken: {reason}"[:300])

    def _reason_against_copying(self, size: int) -> str:
        """The reason for which no copy may be taken; empty if there is none."""
        waiting = self._waiting_copies()
        if len(waiting) >= MAX_COPIES:
            return f"{len(waiting)} copies wait for their evaluation, which is the maximum"
        total = size + sum(checkpoint.copied_bytes or 0 for checkpoint in waiting)
        if total > MAX_COPIED_BYTES:
            return f"copies that wait for their evaluation may have at most {format_size(MAX_COPIED_BYTES)}"
        return self._shortage((1 + FREE_COPIES) * size)

    def _shortage(self, size: int) -> str:
        """The sentence that the disk has less free space than this; empty if it has more."""
        space = os.statvfs(self._rundir.path)
        free = space.f_bavail * space.f_frsize
        return f"the disk has only {format_size(free)} free" if free < size else ""

    def _waiting_copies(self) -> list[Watched]:
        waiting = []
        for name, checkpoint in self.recorded.items():
            if checkpoint.copied_bytes is None or name in self._removed:
                continue
            if (folder(self._rundir, name) / Path(checkpoint.path).name).exists():
                waiting.append(checkpoint)
            else:
                self._removed.add(name)
        return waiting

    def _commit(self, candidate: _Candidate, copy: Path | None = None, no_copy_reason: str | None = None) -> None:
        """Record a checkpoint, unless it has changed or another process was first.

        Raises:
            OSError: the record cannot be written.
        """
        step, size = self._step_in(candidate.path), candidate.state.size
        shortage = "" if copy is not None else self._shortage((1 + FREE_LINKED) * size)
        if shortage:
            no_copy_reason = no_copy_reason or f"no link was made: {shortage}"
        with self._lock:
            while True:
                self._read_records()
                if self._is_known(candidate.name, candidate.state):
                    return
                watched = Watched(
                    step=self._next_step(candidate) if step is None else step,
                    path=candidate.name,
                    fingerprint=candidate.state.fingerprint,
                    at=candidate.state.changed,
                    copied_bytes=None if copy is None else size,
                    no_copy_reason=no_copy_reason,
                )
                is_recorded = record(self._rundir, watched, copy, links=not shortage)
                self._read_records()
                if is_recorded and copy is not None and self._policy == "Latest":
                    self._pass_over_older_than(watched)
                # Another process may have used the step for another state. Otherwise it has changed.
                if is_recorded or step is not None or watched.reference.name not in self.recorded:
                    return

    def _next_step(self, candidate: _Candidate) -> int:
        """The step of a state of a path that has none in its name."""
        step = logged_step(self._rundir, candidate.state.changed)
        used_steps = {checkpoint.step for checkpoint in self.recorded.values()}
        if step is None:
            step = 1 + max(used_steps, default=0)
        # A restarted script logs earlier steps, and yet this is the newest state of its file.
        earlier = (checkpoint.step + 1 for checkpoint in self.recorded.values() if checkpoint.path == candidate.name)
        step = max([step, *earlier])
        while step in used_steps:  # several states of one step
            step += 1
        return step

    def _pass_over_older_than(self, newest: Watched) -> None:
        """Remove the copies of older states that nobody has started to evaluate. An evaluator writes its claim before
        it looks for the note, and here the note is written before claims are looked for: one of them sees the other."""
        for checkpoint in self._waiting_copies():
            reference = checkpoint.reference
            is_waiting = evaluations.evaluation_progress(self._rundir, reference) == "waits"
            if checkpoint.step >= newest.step or not is_waiting:
                continue
            evaluations.record_skipped_evaluation(self._rundir, reference, evaluations.PASSED_OVER)
            claims = self._rundir.leases.glob(f"evaluate-{reference.name}-*.json")
            if not any(lease.is_held(claim) for claim in claims):
                remove_files(self._rundir, checkpoint)

    def _read_records(self) -> None:
        """Read new records."""
        paths = list_folder(self._rundir.path / WATCHED)
        self._partial = [path for path in paths if path.name.startswith(PARTIAL)]
        if new := _read(paths, skip=self.recorded):
            self.recorded = self.recorded | {checkpoint.reference.name: checkpoint for checkpoint in new}

    def _remove_partial_copies(self) -> bool:
        """Remove what crashes have left. Returns whether a process is copying."""
        if not self._partial:
            return False
        acquired = lease.acquire(self._rundir.leases / COPY_LEASE)
        if acquired is None:
            return True
        with acquired:
            for path in self._partial:
                shutil.rmtree(path, ignore_errors=True)
        return False
