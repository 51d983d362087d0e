"""Hang detection from the reports of the ranks. No clock and no I/O: callers pass the time.

A rank that is stopped, deadlocked or stuck in a collective stops the whole group, because each step waits for all; its
agent lives and heartbeats on. So a group hangs when no rank at all has made a step for too long. Who is to blame is a
guess: a stopped process, else who is behind, else whose last step is the oldest. The stacks tell more.

Of the steps of a user's own script nothing is known, so it counts as going on. Once it logs them (tandem.log), it is
watched, too, with what a script may do and a session does not: some ranks never say anything, the time before the
second step that is seen may be of any length, and so may what follows the last one. Those ranks count as going on while
no other one's step is due. And a script that logs once an epoch is not called hung before twice the longest time
between two of its steps.

But no process goes on that is stopped:
a rank that is for too long makes its group hang, whatever the others say. The same holds while a rank says that it is
at something that takes as long as it takes: a validation, or the code after the loop, for which the others wait.

What is told of such a script is whether its ranks work: if none has used a processor or a GPU for that long, they may
wait for each other, or for something that will come. Nobody knows, so that is a warning, with the stacks, once a
generation; the group goes on.

**Time counts only while the ranks are heard.** The watch has a clock of its own that goes on with each report, and by
two heartbeats at most. So a coordinator that stood still, a network that broke, and reports that waited somewhere and
arrive in one heap add next to nothing, and ranks that never report can never hang.

Rejected: measuring from the last step to now (everybody hangs after our own standstill), and having each agent judge
its own ranks (all wait for the one that is stuck, so all would accuse themselves).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.protocol import SCRIPT, STOPPED, TRAIN, RankReport
from tandem_coordinator.group_state import listed

MAX_NAMED = 3
IDLE_CORES = IDLE_GPU = 0.02
"""Less than that of a core, and of a GPU, is used by a process that waits; what speaks for it takes some."""


@dataclass(slots=True)
class _Mark:
    """A rank, as it was when it last went on."""

    step: int
    phase: str
    at: float
    """When, on the watch's own clock."""
    steps_seen: bool = False
    """Whether it has made a step before our eyes; the first one may compile, and takes long."""
    complete: bool = False
    """Whether its last step was the last of the run."""
    script: bool = False
    """Whether it runs a script of the user's own, which may say nothing or stop saying it."""
    longest: float = 0.0
    """The longest time between two of its steps, by the watch's own clock."""

    @property
    def trains(self) -> bool:
        """Whether the next step is due."""
        return self.phase == TRAIN and self.steps_seen and not self.complete

    @property
    def doing(self) -> str:
        """What it does instead."""
        if self.phase != TRAIN:
            return self.phase
        return "ending" if self.complete else "at the first step"


_Marks = dict[tuple[int, str], _Mark]


class HangWatch:
    """Watches the ranks of one generation.

    Args:
        training_seconds: without a step for so long, a group that trains hangs.
        other_seconds: the same for ranks that start, restore, save, or make their first step.
        heartbeat_seconds: longest time between two reports of an agent.
    """

    def __init__(self, training_seconds: float, other_seconds: float, heartbeat_seconds: float) -> None:
        self._training, self._other = training_seconds, other_seconds
        self._most_between = 2 * heartbeat_seconds
        self.begin(0)

    def begin(self, generation: int) -> None:
        """A generation was formed."""
        self.generation = generation
        self._marks: dict[str, dict[int, _Mark]] = {}
        # Whose process is stopped, by rank and replica, and since when on our clock.
        self._halted: dict[tuple[int, str], float] = {}
        self._clock = self._moved = self._worked = 0.0
        self.idle_told = False
        """Whether it was said of this generation that it does nothing."""
        self._heard: float | None = None

    def take(self, replica: str, generation: int | None, ranks: Iterable[RankReport], now: float) -> None:
        """Take in what an agent reports; `now` is in seconds of any steady clock."""
        if generation != self.generation:
            return
        before = self._marks.pop(replica, {})
        ranks = list(ranks)
        self._look_for_halted(replica, ranks)
        marks = {report.rank: self._mark(before.get(report.rank), report) for report in ranks}
        if marks:
            self._marks[replica] = marks
            if self._heard is not None:
                self._clock += min(max(0.0, now - self._heard), self._most_between)
            self._heard = now
        due = any(mark.trains for mark in self._all().values())
        if not due and any(mark.script for mark in marks.values()):
            self._moved = self._clock
        if any(_works(report) for report in ranks):
            self._worked = self._clock

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._marks.pop(replica, None)
        self._look_for_halted(replica, ())

    def verdict(self) -> str | None:
        """Who hangs where since when, in a sentence; None while somebody goes on."""
        still = self._clock - self._moved
        if still < min(self._training, self._other) or not self._marks:
            return self._halt()
        marks = self._watched()
        # A process that is stopped will not go on by itself, whatever it was doing.
        if all(mark.trains for mark in marks.values()) or self._halted:
            if still < max(self._training, *(2 * mark.longest for mark in marks.values())):
                return self._halt()
            told = f"no rank has made a step for {still:.0f} s; {self._blamed(marks)}"
        elif still < self._other:
            return None
        else:
            busy = {key: mark for key, mark in marks.items() if not mark.trains}
            doing = listed({mark.doing for mark in busy.values()})
            told = f"no rank has gone on for {still:.0f} s; {_names(busy)} {_is(busy)} still {doing}"
        return f"{told}; {self._where()}"

    def idle(self) -> str | None:
        """That no rank does anything, in a sentence; None while one does, and once it has been said."""
        still = self._clock - self._worked
        if still < self._training or self.idle_told or not self._marks:
            return None
        self.idle_told = True
        return f"no rank has used a processor or a GPU for {still:.0f} s, and may wait for ever; {self._where()}"

    def idle_seconds(self) -> float | None:
        """For how long no rank has done anything; None where they say of their steps, or nothing is heard of them."""
        marks = self._all().values()
        if not marks or any(mark.phase != SCRIPT for mark in marks):
            return None
        return self._clock - self._worked

    def culprit(self) -> str:
        """The replica whose ranks alone seem to be stuck; empty if that is not one."""
        marks = self._watched()
        blamed = self._stopped(marks) or _behind(marks) or self._oldest(marks)
        replicas = {replica for _, replica in blamed}
        return replicas.pop() if len(replicas) == 1 and len(self._marks) > 1 else ""

    @property
    def step(self) -> int | None:
        """The step that the ranks have come to; None where a script does not say it."""
        known = [mark.step for mark in self._all().values() if not mark.script or mark.step]
        return max(known, default=None)

    def _all(self) -> _Marks:
        return {(rank, replica): mark for replica, ranks in self._marks.items() for rank, mark in ranks.items()}

    def _watched(self) -> _Marks:
        """The ranks that are judged: all, but for those of a script of which no step is due while one of others is."""
        marks = self._all()
        due = {key: mark for key, mark in marks.items() if mark.trains or not mark.script or key in self._halted}
        return due or marks

    def _halt(self) -> str | None:
        """Whose process is stopped for too long, though others seem to go on."""
        for (rank, replica), since in self._halted.items():
            if self._clock - since >= self._training:
                halted = f"rank {rank} ({replica}) has been stopped for {self._clock - since:.0f} s"
                return f"{halted}; {self._where()}"
        return None

    def _look_for_halted(self, replica: str, ranks: Iterable[RankReport]) -> None:
        halted = {(report.rank, replica) for report in ranks if report.phase == STOPPED}
        for key in [key for key in self._halted if key[1] == replica and key not in halted]:
            del self._halted[key]
        for key in halted:
            self._halted.setdefault(key, self._clock)

    def _where(self) -> str:
        return f"the stacks of all ranks are in stacks/g{self.generation:06d}"

    def _mark(self, before: _Mark | None, report: RankReport) -> _Mark:
        complete = report.total_steps is not None and report.step >= report.total_steps
        stopped = report.phase == STOPPED
        # A process that is stopped is still at what it was doing.
        phase = before.phase if stopped and before is not None else TRAIN if stopped else report.phase
        script = report.script or report.phase == SCRIPT
        if before is None or before.step != report.step or before.phase != phase or report.pauses:
            stepped = before is not None and before.phase == phase == TRAIN and before.step != report.step
            seen = before is not None and (before.steps_seen or (before.phase == TRAIN and before.step != report.step))
            longest = before.longest if before is not None else 0.0
            if script and stepped and before is not None:
                longest = max(longest, self._clock - before.at)
            self._moved = self._clock
            return _Mark(report.step, phase, self._clock, seen, complete, script, longest)
        return before

    def _blamed(self, marks: _Marks) -> str:
        steps = {mark.step for mark in marks.values()}
        oldest = self._oldest(marks)
        if stopped := self._stopped(marks):
            return f"{_names(stopped)} {_is(stopped)} stopped at step {min(m.step for m in stopped.values())}"
        if behind := _behind(marks):
            return f"{_names(behind)} {_is(behind)} stuck at step {min(steps)}, others at {max(steps)}"
        if oldest:
            return f"{_names(oldest)} seem{'s' if len(oldest) == 1 else ''} to be stuck at step {max(steps)}"
        if any(mark.script for mark in marks.values()):
            # Others may say nothing, and one of them may be the one that is stuck.
            return f"{_names(marks)} {_is(marks)} at step {max(steps)}"
        return f"all ranks are stuck at step {max(steps)}"

    def _stopped(self, marks: _Marks) -> _Marks:
        return {key: mark for key, mark in marks.items() if key in self._halted}

    def _oldest(self, marks: _Marks) -> _Marks:
        newest = max((mark.at for mark in marks.values()), default=0.0)
        return {key: mark for key, mark in marks.items() if newest - mark.at > self._most_between}


def _works(report: RankReport) -> bool:
    """Whether a rank does something, as far as that is known; of steps, see `verdict`."""
    idle = report.cpu is not None and report.cpu < IDLE_CORES and (report.gpu or 0.0) < IDLE_GPU
    return report.phase != SCRIPT or not idle


def _behind(marks: _Marks) -> _Marks:
    steps = {mark.step for mark in marks.values()}
    return {key: mark for key, mark in marks.items() if mark.step == min(steps)} if len(steps) > 1 else {}


def _names(marks: _Marks) -> str:
    names = [f"rank {rank} ({replica})" for rank, replica in sorted(marks)]
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _is(marks: _Marks) -> str:
    return "is" if len(marks) == 1 else "are"
