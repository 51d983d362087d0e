"""The coordinator's persistent state: `coordinator.json` in the run directory.

It is written before a generation is handed out, so that a number is never given twice. It also says who writes it: a
coordinator whose node was cut off while another took over finds the other's name there and ends. Its kubelet then
starts it again in the same pod; so the page also remembers which pods were taken over from: none gets it back.

A coordinator of the first protocol takes a page with a field that it does not know for none at all, and, after a
rollback, closes the generation that trains. So what it does not know stands in a file beside
(docs/decisions/0020-versions.md).
"""

import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from tandem.measures import is_restart
from tandem.model import Model, Whole
from tandem.protocol import FIRST, Membership, worded
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ledger import newest_ledger
from tandem.rundir.records import Accounted
from tandem.status import GenerationView
from tandem_coordinator.group_state import State

M = TypeVar("M", bound=Model)

HISTORY = 20
"""So many generations survive a restart of the coordinator with their reasons."""


PODS = 20
"""So many pods that were taken over from are remembered."""


class TakenOver(Exception):  # noqa: N818 - it is a state of the job
    """Another coordinator has claimed the run directory since."""


class Absent(Model):
    """What the others go on without (see `blame`)."""

    replica: str
    """Empty: the whole node."""
    node: str
    why: str
    seconds: float
    """So long ago that was decided when the page was written."""


def remembered_left_out(state: State, now: float) -> list[Absent]:
    """What to remember of those that are left out."""
    return [Absent(replica=one.replica, node=one.node, why=one.why, seconds=now - one.at) for one in state.left_out]


class CoordinatorState(Model):
    """The content of `coordinator.json`."""

    owner: str
    """The coordinator that wrote it."""
    pod: str | None = None
    """The uid of its pod, where it has one."""
    taken_from: list[str] | None = None
    """The pods that others have taken over from, oldest first."""
    generation: Whole
    """The highest number given out."""
    membership: Membership | None = None
    """The generation with that number."""
    failures: Whole = 0
    """How much of the restart budget is used."""
    replicas: Whole
    """What the job said when `target` was set: a job that says something else now counts more."""
    target: Whole
    """Replicas wished for."""
    started_at: float | None = None
    """When the first generation opened, seconds since the epoch."""
    left_out: list[Absent] | None = None
    """What the others go on without, if there is anything."""
    restarts: Whole | None = None
    """Generations that were formed because something had failed or was lost."""
    finished: list[str] | None = None
    """Members of the generation that have gone because all of their ranks ended with exit code 0, if there are any."""
    settings_changed: str | None = None
    """What of the job's settings the members of the generation have read before it was changed, in a sentence."""
    history: list[GenerationView] = Field(default=[])
    """The last generations, oldest first."""


BESIDE = ("pod", "taken_from", "left_out", "restarts", "finished", "settings_changed")
"""Fields of a page that the first protocol does not know."""


class Beside(Model):
    """The content of the file beside the page."""

    owner: str
    """Of the page that it belongs to; beside any other it does not count."""
    pod: str | None = None
    taken_from: list[str] | None = None
    left_out: list[Absent] | None = None
    restarts: Whole | None = None
    finished: list[str] | None = None
    settings_changed: str | None = None


@dataclass(frozen=True)
class Remembered:
    """What a predecessor left behind."""

    generation: int = 0
    first: int = 1
    """The lowest number of this run (tandem.rundir.ownership)."""
    membership: Membership | None = None
    failures: int = 0
    target: int | None = None
    started_at: float | None = None
    left_out: list[Absent] = field(default_factory=list)
    restarts: int = 0
    finished: list[str] = field(default_factory=list)
    settings_changed: str = ""
    history: list[GenerationView] = field(default_factory=list)
    ledger: Accounted | None = None
    """What the run had taken by the last record."""
    in_pod: bool = False
    """Whether the processes of this job are pods."""


class StateStore:
    """Reads and writes `coordinator.json`. Every method may block for as long as the disk does."""

    def __init__(self, rundir: RunDir, pod: str | None = None) -> None:
        self._rundir, self._pod = rundir, pod
        self._taken_from: list[str] | None = None
        self._beside: Beside | None = None
        self.owner = f"{time.time():.3f}-{secrets.token_hex(4)}"

    def claim(self, replicas: int, settings_changed: str = "") -> Remembered:
        """Read what is remembered, and become the one that writes.

        Args:
            replicas: what the job says now.
            settings_changed: what has changed in the job since the last coordinator, in a sentence.

        Raises:
            TakenOver: a coordinator in another pod has claimed it since this pod had it.
            OSError: the run directory cannot be written.
        """
        page = self._read()
        self._taken_from = _taken_from(page, self._pod)
        if self._pod is not None and self._pod in (self._taken_from or ()):
            raise TakenOver(f"a coordinator in another pod has taken over this job from pod {self._pod}")
        first = self._rundir.first_generation()
        newest = max(self._rundir.newest_generation(), first - 1)
        if page is None:
            remembered = Remembered(generation=newest, first=first, settings_changed=settings_changed)
        else:
            # A generation that has a record but no page was handed out by a coordinator whose disk lost the page.
            current = page.generation >= newest
            remembered = Remembered(
                generation=max(page.generation, newest),
                first=first,
                membership=page.membership if current else None,
                failures=page.failures,
                target=page.target if page.replicas == replicas else None,
                started_at=page.started_at,
                left_out=page.left_out or [],
                restarts=_restarts(page) if page.generation >= first else 0,
                finished=page.finished or [] if current else [],
                settings_changed=settings_changed or page.settings_changed or "",
                history=page.history,
            )
        self._write(
            CoordinatorState(
                owner=self.owner,
                generation=remembered.generation,
                membership=remembered.membership,
                failures=remembered.failures,
                replicas=replicas,
                target=remembered.target or replicas,
                started_at=remembered.started_at,
                left_out=remembered.left_out or None,
                restarts=remembered.restarts,
                finished=remembered.finished or None,
                settings_changed=remembered.settings_changed or None,
                history=remembered.history,
            )
        )
        return replace(remembered, ledger=newest_ledger(self._rundir), in_pod=self._pod is not None)

    def record(self, page: CoordinatorState) -> None:
        """Make a page durable.

        Raises:
            TakenOver: another coordinator writes now.
            OSError: the run directory cannot be written.
        """
        current = self._read()
        if current is not None and current.owner != self.owner:
            raise TakenOver(f"coordinator {current.owner} has taken over this job")
        self._write(page)

    def _read(self) -> CoordinatorState | None:
        page = _read(CoordinatorState, self._rundir.coordinator_file)
        beside = None if page is None else _read(Beside, self._rundir.beside_coordinator_file)
        if page is None or beside is None or beside.owner != page.owner:
            return page
        return page.model_copy(update={name: getattr(beside, name) for name in BESIDE})

    def _write(self, page: CoordinatorState) -> None:
        beside = Beside(
            owner=page.owner,
            pod=self._pod,
            taken_from=self._taken_from,
            left_out=page.left_out,
            restarts=page.restarts,
            finished=page.finished,
            settings_changed=page.settings_changed,
        )
        if beside != self._beside:
            replace_json(self._rundir.beside_coordinator_file, beside.dump_brief())
            self._beside = beside
        replace_json(self._rundir.coordinator_file, worded(page.model_copy(update=dict.fromkeys(BESIDE)), FIRST))


def _read(model: type[M], path: Path) -> M | None:
    data = read_json_or_none(path)
    try:
        return None if data is None else model.read(data)
    except ValidationError:
        return None


def _restarts(page: CoordinatorState) -> int:
    """Of a page of an earlier version, those that its history still tells of."""
    told = sum(is_restart(one.reason) for one in page.history[1:])
    return told if page.restarts is None else page.restarts


def _taken_from(page: CoordinatorState | None, pod: str | None) -> list[str] | None:
    if page is None:
        return None
    before = page.taken_from or []
    if page.pod is None or page.pod == pod:
        return before or None
    return [*before, page.pod][-PODS:]
