"""The coordinator's persistent state: `coordinator.json` in the run directory.

It is written before a generation is handed out, so that a number is never given twice. It also names its writer: a
coordinator whose node was cut off while another one took over finds the other's name there and ends. Its kubelet then
starts it again in the same pod; so the file also lists the pods that were taken over from, and none of them gets the
job back.

Some fields are in a second file, where the version before reads and writes them (docs/decisions/0020-versions.md).
"""

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from tandem.model import Model, WholeNumber
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.layout import END_SECONDS, FinishedMember, RunDir
from tandem.rundir.ledger import newest_ledger
from tandem.rundir.records import LedgerRecord
from tandem.wire.measures import is_restart
from tandem.wire.protocol import Membership
from tandem.wire.status import GenerationView
from tandem_coordinator.group_state import State

M = TypeVar("M", bound=Model)

MAX_HISTORY = 20
"""Number of generations that survive a restart of the coordinator with their reasons."""


MAX_PODS = 20
"""Number of pods that are remembered as taken over from."""


class TakenOver(Exception):  # noqa: N818 - it is a state of the job
    """Another coordinator has claimed the run directory."""


class ExclusionRecord(Model):
    """A replica or a node that the group goes on without, as recorded (see `failures`)."""

    replica: str
    """The excluded replica; empty if the whole node is excluded."""
    node: str
    why: str
    seconds: float
    """Age of the decision when the file was written, in seconds."""


def exclusion_records(state: State, now: float) -> list[ExclusionRecord]:
    """The exclusions of a state, as records."""
    return [
        ExclusionRecord(
            replica=exclusion.replica, node=exclusion.node, why=exclusion.reason, seconds=now - exclusion.since
        )
        for exclusion in state.exclusions
    ]


class CoordinatorState(Model):
    """The content of `coordinator.json`."""

    owner: str
    """Name of the coordinator that wrote it."""
    pod: str | None = None
    """The uid of its pod; None outside a cluster."""
    taken_from: list[str] | None = None
    """Uids of pods that other coordinators have taken over from, oldest first."""
    generation: WholeNumber
    """The highest generation number handed out."""
    membership: Membership | None = None
    """The generation with that number; None if unknown."""
    failures: WholeNumber = 0
    """Failures charged to the restart budget."""
    replicas: WholeNumber
    """`workers.replicas` of the job when `target` was set: if the job has changed since, its new value counts."""
    target: WholeNumber
    """Target number of replicas."""
    started_at: float | None = None
    """Time at which the first generation opened, in seconds since the epoch."""
    left_out: list[ExclusionRecord] | None = None
    """Exclusions; None if there are none."""
    restarts: WholeNumber | None = None
    """Number of generations formed because of a failure or a loss."""
    finished: list[str] | None = None
    """Members of the generation whose ranks have all exited with code 0; None if there are none."""
    settings_changed: str | None = None
    """Job settings that have changed since the members of the generation read them, as a sentence."""
    history: list[GenerationView] = Field(default=[])
    """The last generations, oldest first."""


EXTENSION_FIELDS = ("pod", "taken_from", "left_out", "restarts", "finished", "settings_changed")
"""Fields of `CoordinatorState` that are in the second file."""


class StateExtension(Model):
    """The content of the second file."""

    owner: str
    """Owner of the `coordinator.json` that it belongs to; with any other it does not count."""
    pod: str | None = None
    taken_from: list[str] | None = None
    left_out: list[ExclusionRecord] | None = None
    restarts: WholeNumber | None = None
    finished: list[str] | None = None
    settings_changed: str | None = None


@dataclass(frozen=True)
class RecordedState:
    """The state that a predecessor recorded."""

    generation: int = 0
    first: int = 1
    """The first generation number of this run (tandem.rundir.ownership)."""
    membership: Membership | None = None
    failures: int = 0
    target: int | None = None
    started_at: float | None = None
    exclusions: list[ExclusionRecord] = field(default_factory=list)
    restarts: int = 0
    finished: list[str] = field(default_factory=list)
    settings_changed: str = ""
    history: list[GenerationView] = field(default_factory=list)
    ledger: LedgerRecord | None = None
    """The last record of the ledger."""
    in_pod: bool = False
    """Whether the processes of this job run in pods."""


class StateStore:
    """Reads and writes `coordinator.json`. Every method may block for as long as the disk does."""

    def __init__(self, rundir: RunDir, pod: str | None = None) -> None:
        self._rundir, self._pod = rundir, pod
        self._taken_from: list[str] | None = None
        self._extension: StateExtension | None = None
        self.owner = f"{time.time():.3f}-{secrets.token_hex(4)}"

    def claim(self, replicas: int, settings_changed: str = "") -> RecordedState:
        """Read the recorded state, and become its writer.

        Args:
            replicas: the job's present value of `workers.replicas`.
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
            recorded_state = RecordedState(generation=newest, first=first, settings_changed=settings_changed)
        else:
            # A generation that has a record but no page was handed out by a coordinator whose disk lost the page.
            current = page.generation >= newest
            membership = page.membership if current else None
            recorded_state = RecordedState(
                generation=max(page.generation, newest),
                first=first,
                membership=membership,
                failures=page.failures,
                target=page.target if page.replicas == replicas else None,
                started_at=page.started_at,
                exclusions=page.left_out or [],
                restarts=_restarts(page) if page.generation >= first else 0,
                finished=sorted({*(page.finished or ()), *self._finished_of(membership)}) if current else [],
                settings_changed=settings_changed or page.settings_changed or "",
                history=page.history,
            )
        self._write(
            CoordinatorState(
                owner=self.owner,
                generation=recorded_state.generation,
                membership=recorded_state.membership,
                failures=recorded_state.failures,
                replicas=replicas,
                target=recorded_state.target or replicas,
                started_at=recorded_state.started_at,
                left_out=recorded_state.exclusions or None,
                restarts=recorded_state.restarts,
                finished=recorded_state.finished or None,
                settings_changed=recorded_state.settings_changed or None,
                history=recorded_state.history,
            )
        )
        return replace(recorded_state, ledger=newest_ledger(self._rundir), in_pod=self._pod is not None)

    def record(self, page: CoordinatorState) -> None:
        """Make a state durable.

        Raises:
            TakenOver: another coordinator writes now.
            OSError: the run directory cannot be written.
        """
        current = self._read()
        if current is not None and current.owner != self.owner:
            raise TakenOver(f"coordinator {current.owner} has taken over this job")
        self._write(page)
        # Where pods share no disk, this one may be lost before the next exchange. While the bucket is away, the record
        # of each generation keeps numbers apart.
        with suppress(OSError):
            self._rundir.refresh(END_SECONDS)

    def _finished_of(self, membership: Membership | None) -> set[str]:
        """The replicas of a generation whose agents have recorded that they have finished. The run watcher's first poll
        may come after the generation is given up."""
        if membership is None:
            return set()
        members = {
            FinishedMember(membership.generation, member.replica, member.incarnation) for member in membership.members
        }
        return {member.replica for member in members & self._rundir.finished_members()}

    def _read(self) -> CoordinatorState | None:
        page = _read(CoordinatorState, self._rundir.coordinator_file)
        extension = None if page is None else _read(StateExtension, self._rundir.beside_coordinator_file)
        if page is None or extension is None or extension.owner != page.owner:
            return page
        return page.model_copy(update={name: getattr(extension, name) for name in EXTENSION_FIELDS})

    def _write(self, page: CoordinatorState) -> None:
        extension = StateExtension(
            owner=page.owner,
            pod=self._pod,
            taken_from=self._taken_from,
            left_out=page.left_out,
            restarts=page.restarts,
            finished=page.finished,
            settings_changed=page.settings_changed,
        )
        if extension != self._extension:
            replace_json(self._rundir.beside_coordinator_file, extension.dump_brief())
            self._extension = extension
        replace_json(
            self._rundir.coordinator_file, page.model_copy(update=dict.fromkeys(EXTENSION_FIELDS)).dump_brief()
        )


def _read(model: type[M], path: Path) -> M | None:
    data = read_json_or_none(path)
    try:
        return None if data is None else model.read(data)
    except ValidationError:
        return None


def _restarts(page: CoordinatorState) -> int:
    """The number of restarts; for a file of an earlier version, those that its history still lists."""
    listed_restarts = sum(is_restart(view.reason) for view in page.history[1:])
    return listed_restarts if page.restarts is None else page.restarts


def _taken_from(page: CoordinatorState | None, pod: str | None) -> list[str] | None:
    if page is None:
        return None
    before = page.taken_from or []
    if page.pod is None or page.pod == pod:
        return before or None
    return [*before, page.pod][-MAX_PODS:]
