"""The catalog of a run directory: the one reader of evaluations and lineage that every view uses.

`tandem checkpoints`, `tandem report`, the live page and the coordinator show the same checkpoints with the same scores,
because they all read them here. A view that reads once calls the functions; one that follows a run keeps a `Results`
and a `Lineage`, which read each file once: a run of weeks has thousands of evaluations, and on NFS each is a request.

Evaluators read file names alone, several times a second, and must distinguish a partly visible disk from an empty one.
They have a survey of their own (tandem_evaluator.survey), with the same names and the same rules.
"""

import random
import stat
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tandem.confidence import Estimate, Interval
from tandem.model import finite
from tandem.rundir import evaluations
from tandem.rundir.durable import list_folder, read_json_or_none
from tandem.rundir.evaluations import (
    BASE,
    COMPLETIONS,
    METRICS,
    FinalFile,
    Goal,
    Rank,
    deciding_estimates,
    held_out,
    intervals,
    parse_final_file,
    rank,
    scores,
)
from tandem.rundir.layout import RunDir, step_of
from tandem.rundir.lineage import Chain, Rewind, chain, counts
from tandem.wire.status import CheckpointRef

MAX_RESULT_BYTES = 16 * 2**20
OLD_SECONDS = 30.0
"""Maximum time between two reads of a folder that hardly ever changes, in seconds."""
RECENT_SECONDS = 60.0
"""A folder that changed within this time, in seconds, is read on each call."""
SETTLED_SECONDS = 2.0
"""A folder that changed longer ago than this, in seconds, is not read again until it changes: the clock of a disk is
coarse."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The final result of one checkpoint: the scores of its evaluation, or a note that it was skipped."""

    checkpoint: CheckpointRef
    skipped: str = ""
    """The reason for which it is not evaluated; empty if it was."""
    is_failure: bool = False
    """Whether it is not evaluated because its evaluation failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The finite scores on the test data, by metric."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """The confidence intervals of the scores on the test data, of those that have one."""
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """The scores that decide which checkpoint is the best, with their confidence intervals."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """The scores on the validation data; empty where none is held out."""
    finished_at: float | None = None
    """Seconds since the epoch."""
    has_completions: bool = False
    """Whether its file contains completions of a language model."""

    @property
    def deciding(self) -> dict[str, float]:
        """The scores that decide which checkpoint is the best."""
        return {name: estimate.value for name, estimate in self.estimates.items()}

    def rank(self, metric: str, goal: Goal) -> Rank | None:
        """The rank among other checkpoints; None if this one cannot become the best."""
        return rank(self.deciding, metric, goal, self.checkpoint.step, self.checkpoint.generation)


def read_result(file: FinalFile) -> tuple[EvaluationResult, Mapping[str, Any]] | None:
    """Read a result, and the whole content of its file; None for a file with neither scores nor a note."""
    content = read_json_or_none(file.path, MAX_RESULT_BYTES)
    content = content if isinstance(content, dict) else {}
    name = file.path.parent.name
    step = BASE.step if name == BASE.name else step_of(name)
    # Another program's folder.
    if step is None:
        return None
    try:
        reference = CheckpointRef(name=name, step=step, generation=file.generation)
    except ValidationError:
        return None
    if file.is_note:
        reason = content.get("why")
        skipped = reason if isinstance(reason, str) and reason else "passed over"
        finished_at = finite(content.get("at"))
        result = EvaluationResult(
            checkpoint=reference, skipped=skipped, is_failure=file.is_failure, finished_at=finished_at
        )
        return result, content
    # A merged result without metrics is damaged, and an incomplete one must not count.
    if not (isinstance(content.get(METRICS), dict) and content[METRICS]):
        return None
    return EvaluationResult(
        checkpoint=reference,
        metrics=scores(content),
        intervals=intervals(content),
        estimates=deciding_estimates(content),
        validation=held_out(content),
        finished_at=finite(content.get("finishedAt")),
        has_completions=bool(content.get(COMPLETIONS)),
    ), content


def merged_result(rundir: RunDir, reference: CheckpointRef) -> Mapping[str, Any]:
    """Read the whole content of the merged result of a checkpoint; empty if there is none that can be read."""
    content = read_json_or_none(evaluations.merged_file(rundir, reference), MAX_RESULT_BYTES)
    return content if isinstance(content, dict) else {}


def read_base_result(rundir: RunDir) -> tuple[EvaluationResult, Mapping[str, Any]] | None:
    """Read the result of the base model, and the whole content of its file; None while it is not evaluated."""
    # Scores come before a note, should both exist.
    files = sorted(
        filter(None, map(parse_final_file, list_folder(evaluations.folder(rundir, BASE)))),
        key=lambda file: file.is_note,
    )
    return read_result(files[0]) if files else None


class RereadSchedule:
    """A schedule for reading folders again that hardly ever change. The times are random, or all folders would be due
    in the same call."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def is_due(self, name: str, now: float) -> bool:
        """Whether the folder is due; also if the clock was set back."""
        return not 0.0 < self._due.get(name, now) - now <= OLD_SECONDS

    def put_off(self, name: str, now: float) -> None:
        """Schedule the next read of a folder."""
        self._due[name] = now + OLD_SECONDS * random.uniform(0.5, 1.0)  # noqa: S311


class Results:
    """Reader that follows the results of a run. Not thread-safe.

    Args:
        max_folders: number of folders of evaluations to read, the newest first; None: all.
    """

    def __init__(self, rundir: RunDir, max_folders: int | None = None) -> None:
        self._rundir, self._max_folders = rundir, max_folders
        self._read: dict[str, int] = {}
        """Modification times of the folders that were read after that time, in nanoseconds."""
        self._old = RereadSchedule()
        self._noticed: dict[str, int] | None = None
        """Modification times that were ever seen, in nanoseconds; None before the first call."""
        self.changed_at: float | None = None
        """The last modification of a folder of evaluations, in seconds since the epoch; also by the result of one
        shard. Modification times come from the clock of the machine with the disk, which may be ahead or behind, so
        they count only for changes before the first call."""

    def new(self, now: float, awaited: Container[str] | None = None) -> Iterator[tuple[EvaluationResult, float]]:
        """The new results, each with the modification time of its folder. A result may be returned again.

        Args:
            now: seconds since the epoch.
            awaited: names of checkpoints whose folders are read on each call, others now and then; None: all on each
                call.

        Raises:
            OSError: the folder cannot be read.
        """
        is_first = self._noticed is None
        noticed = self._noticed = self._noticed or {}
        # Names sort by step, so the newest folders come last.
        folders = [path for path in list_folder(self._rundir.evaluations) if step_of(path.name) is not None]
        for folder in folders[-self._max_folders :] if self._max_folders else folders:
            # Awaited folders are few; the others cost one request each on NFS.
            is_awaited = awaited is None or folder.name in awaited
            if not is_awaited and not self._old.is_due(folder.name, now):
                continue
            try:
                status = folder.stat()
            # Retention has deleted it since it was listed.
            except FileNotFoundError:
                continue
            changed = status.st_mtime_ns
            # Quiet for a while: it is probably complete.
            if now - changed / 1e9 > RECENT_SECONDS:
                self._old.put_off(folder.name, now)
            if not stat.S_ISDIR(status.st_mode) or self._read.get(folder.name) == changed:
                continue
            if noticed.get(folder.name) != changed:
                noticed[folder.name] = changed
                self.changed_at = max(self.changed_at or 0.0, min(changed / 1e9, now) if is_first else now)
            for file in filter(None, map(parse_final_file, list_folder(folder))):
                if (result := read_result(file)) is not None:
                    yield result[0], changed / 1e9
            # A later change within the clock's resolution would have the same time stamp: remember the folder only once
            # that is past.
            if now - changed / 1e9 > SETTLED_SECONDS:
                self._read[folder.name] = changed

    def forget(self, name: str) -> None:
        """Return the results of a checkpoint again if it is among the newest once more."""
        self._read.pop(name, None)


class Lineage:
    """Reader that follows which checkpoints count. Not thread-safe."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self.newest = -1
        """The newest generation that has a record; -1 before the first `look`."""
        self._links: Chain = {}
        self._files = 0
        self.rewinds: list[Rewind] = []
        """The readable rewinds, oldest first."""

    def look(self) -> None:
        """Read new records.

        Raises:
            OSError, ValueError: a record of a generation cannot be read, or is damaged.
        """
        newest = self._rundir.newest_generation()
        # Records are never rewritten, so a new highest number is the only change there is.
        if newest != self.newest:
            self._links, self.newest = chain(self._rundir.generation_records()), newest
        paths = self._rundir.rewind_files()
        # Rewinds are only ever added.
        if len(paths) != self._files:
            self.rewinds, self._files = [], len(paths)
            for path in paths:
                with suppress(ValidationError):
                    self.rewinds.append(Rewind.read(read_json_or_none(path)))

    @property
    def is_known(self) -> bool:
        """Whether there is a record of any generation."""
        return bool(self._links)

    def counts(self, checkpoint: CheckpointRef) -> bool:
        """Whether a checkpoint is on the lineage."""
        return counts(self._links, checkpoint)
