"""The catalog of a run directory: the one reading of evaluations and lineage that every view uses.

`tandem checkpoints`, `tandem report`, the live page and the coordinator show the same checkpoints with the same scores,
because they all read them here. A view that looks once calls the functions; one that follows a run keeps a `Results`
and a `Lineage`, which read each file once: a run of weeks has thousands of evaluations, and on NFS each is a request.

Evaluators look at names alone and several times a second, and must tell a half-seen disk from an empty one. They have a
survey of their own (tandem_evaluator.survey), by the same names and the same rules.
"""

import random
import stat
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tandem.model import finite
from tandem.rundir import evaluations
from tandem.rundir.durable import listed, read_json_or_none
from tandem.rundir.evaluations import (
    BASE,
    COMPLETIONS,
    METRICS,
    Goal,
    LastWord,
    Rank,
    deciding,
    held_out,
    last_word,
    rank,
    scores,
)
from tandem.rundir.layout import RunDir, step_of
from tandem.rundir.lineage import Chain, Rewind, chain, counts
from tandem.status import CheckpointRef

MAX_RESULT_BYTES = 16 * 2**20
OLD_SECONDS = 30.0
"""Between two looks at what hardly ever changes."""
RECENT_SECONDS = 60.0
"""A folder that has changed so lately is looked at each time."""
SETTLED_SECONDS = 2.0
"""A folder that was changed longer ago than this is not read again until it changes: the clock of a disk is coarse."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The last word on one checkpoint: the scores of its evaluation, or a note that it was skipped."""

    checkpoint: CheckpointRef
    skipped: str = ""
    """Why it is not evaluated; empty for one that was."""
    is_failure: bool = False
    """Whether it is not evaluated because its evaluation failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The scores on the test data: those that are numbers, by metric."""
    deciding: Mapping[str, float] = field(default_factory=dict)
    """The scores that decide which checkpoint is the best."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """The scores on the validation data; empty where none is held out."""
    finished_at: float | None = None
    """Seconds since the epoch."""
    has_completions: bool = False
    """Whether its file has what a language model wrote for prompts."""

    def rank(self, metric: str, goal: Goal) -> Rank | None:
        """Its rank among others; None where it cannot become the best."""
        return rank(self.deciding, metric, goal, self.checkpoint.step, self.checkpoint.generation)


def read_result(word: LastWord) -> tuple[Result, Mapping[str, Any]] | None:
    """A result, and the whole content of its file; None for a file that holds neither scores nor a note."""
    content = read_json_or_none(word.path, MAX_RESULT_BYTES)
    content = content if isinstance(content, dict) else {}
    name = word.path.parent.name
    step = BASE.step if name == BASE.name else step_of(name)
    if step is None:
        return None
    try:
        reference = CheckpointRef(name=name, step=step, generation=word.generation)
    except ValidationError:
        return None
    if word.is_note:
        why = content.get("why")
        skipped = why if isinstance(why, str) and why else "passed over"
        at = finite(content.get("at"))
        return Result(checkpoint=reference, skipped=skipped, is_failure=word.is_failure, finished_at=at), content
    if not (isinstance(content.get(METRICS), dict) and content[METRICS]):
        return None
    return Result(
        checkpoint=reference,
        metrics=scores(content),
        deciding=deciding(content),
        validation=held_out(content),
        finished_at=finite(content.get("finishedAt")),
        has_completions=bool(content.get(COMPLETIONS)),
    ), content


def merged_result(rundir: RunDir, reference: CheckpointRef) -> Mapping[str, Any]:
    """The whole content of the merged result of a checkpoint; empty where there is none that can be read."""
    content = read_json_or_none(evaluations.merged_file(rundir, reference), MAX_RESULT_BYTES)
    return content if isinstance(content, dict) else {}


def base(rundir: RunDir) -> tuple[Result, Mapping[str, Any]] | None:
    """The result of the base model, and the whole content of its file; None while it is not evaluated."""
    words = sorted(
        filter(None, map(last_word, listed(evaluations.folder(rundir, BASE)))), key=lambda word: word.is_note
    )
    return read_result(words[0]) if words else None


class Rarely:
    """When to look again at what hardly ever changes. By chance, or it would all be due at the same look."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def is_due(self, name: str, now: float) -> bool:
        """Whether to look now; also where the clock was set back."""
        return not 0.0 < self._due.get(name, now) - now <= OLD_SECONDS

    def put_off(self, name: str, now: float) -> None:
        """Look again later."""
        self._due[name] = now + OLD_SECONDS * random.uniform(0.5, 1.0)  # noqa: S311


class Results:
    """Follows the results of a run. For one thread.

    Args:
        most: how many folders of evaluations to read, the newest first; None: all.
    """

    def __init__(self, rundir: RunDir, most: int | None = None) -> None:
        self._rundir, self._most = rundir, most
        self._read: dict[str, int] = {}
        """When a folder was changed last, in nanoseconds, of those that were read after that."""
        self._old = Rarely()
        self.changed_at: float | None = None
        """When a folder of evaluations was changed last, seconds since the epoch; also by a result of a part."""

    def new(self, now: float, awaited: Container[str] | None = None) -> Iterator[tuple[Result, float]]:
        """The results that are new, each with when its folder was changed. One that is new may be given again.

        Args:
            now: seconds since the epoch.
            awaited: names of checkpoints to look at each time, others now and then; None: look at all each time.

        Raises:
            OSError: the folder cannot be read.
        """
        folders = [path for path in listed(self._rundir.evaluations) if step_of(path.name) is not None]
        for folder in folders[-self._most :] if self._most else folders:
            is_awaited = awaited is None or folder.name in awaited
            if not is_awaited and not self._old.is_due(folder.name, now):
                continue
            try:
                status = folder.stat()
            except FileNotFoundError:
                continue
            changed = status.st_mtime_ns
            if now - changed / 1e9 > RECENT_SECONDS:
                self._old.put_off(folder.name, now)
            if not stat.S_ISDIR(status.st_mode) or self._read.get(folder.name) == changed:
                continue
            self.changed_at = max(self.changed_at or 0.0, changed / 1e9)
            for word in filter(None, map(last_word, listed(folder))):
                if (found := read_result(word)) is not None:
                    yield found[0], changed / 1e9
            if now - changed / 1e9 > SETTLED_SECONDS:
                self._read[folder.name] = changed

    def forget(self, name: str) -> None:
        """Give the results of a checkpoint once more, should it be among the newest again."""
        self._read.pop(name, None)


class Lineage:
    """Follows which checkpoints count. For one thread."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self.newest = -1
        """The number of the newest generation of which there is a record."""
        self._links: Chain = {}
        self._files = 0
        self.rewinds: list[Rewind] = []
        """Those that can be read, oldest first."""

    def look(self) -> None:
        """Read what is new.

        Raises:
            OSError, ValueError: a record of a generation cannot be read, or is damaged.
        """
        newest = self._rundir.newest_generation()
        if newest != self.newest:
            self._links, self.newest = chain(self._rundir.generation_records()), newest
        paths = self._rundir.rewind_files()
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
        """Whether a checkpoint lies on the lineage."""
        return counts(self._links, checkpoint)
