"""Hang detection from the reports of the ranks. No clock and no I/O: callers pass the time.

A rank that is stopped, deadlocked or stuck in a collective stops the whole group, because each step waits for all
ranks; its agent lives and heartbeats on. So a group hangs when no rank at all has made a step for too long. The culprit
is a guess: a stopped process, otherwise the ranks that are behind, otherwise those whose last step is the oldest. The
stacks tell more.

The steps of a user's own script are unknown, so it counts as advancing. Once it logs them (tandem.log), it is watched,
too, with allowance for what a script may do and a session does not: some ranks never report anything, the time before
the second step that is seen may be of any length, and so may what follows the last one. Those ranks count as advancing
while no other rank's step is due. A script that logs once an epoch is not called hung before twice the longest time
between two of its steps.

A stopped process does not advance: a rank that is stopped for too long makes its group hang, whatever the others
report. The same holds while a rank is in `Session.pausing()`, for example in a validation or in the code after the
loop, for which the others wait.

Of a script without steps only its activity is judged: if no rank has used a processor or a GPU for that long, they may
wait for each other, or for something that will come. Nobody knows, so that is a warning, with the stacks, once a
generation; the group goes on.

**Time counts only while the ranks are heard.** The watch has a clock of its own that advances with each report, by two
heartbeats at most. So a coordinator that stood still, a network that broke, and reports that were delayed and arrive
together add next to nothing, and ranks that never report can never hang.

Rejected: measuring from the last step to now (everybody hangs after our own standstill), and having each agent judge
its own ranks (all wait for the one that is stuck, so all would accuse themselves).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.wire.protocol import SCRIPT, STOPPED, TRAIN, RankReport
from tandem_coordinator.group_state import join_names

MAX_NAMED_RANKS = 3
MAX_IDLE_CORES = MAX_IDLE_GPU = 0.02
"""Share of a core, and of a GPU, below which a process is idle. A process that waits uses some for its reports."""


@dataclass(slots=True)
class _RankProgress:
    """A rank, as it was when it last advanced."""

    step: int
    phase: str
    advanced_at: float
    """Time of the advance, on the watch's own clock."""
    has_stepped: bool = False
    """Whether a step of it was observed. The first step may compile, and takes long."""
    is_complete: bool = False
    """Whether its step is the last of the run."""
    is_script: bool = False
    """Whether it runs a user's own script, which need not report its steps."""
    longest_step: float = 0.0
    """The longest time between two of its steps, on the watch's own clock."""

    @property
    def is_step_due(self) -> bool:
        """Whether its next step is due."""
        return self.phase == TRAIN and self.has_stepped and not self.is_complete

    @property
    def activity(self) -> str:
        """Its activity while no step is due."""
        if self.phase != TRAIN:
            return self.phase
        return "ending" if self.is_complete else "at the first step"


_Progress = dict[tuple[int, str], _RankProgress]


class HangWatch:
    """A watch over the ranks of one generation.

    Args:
        training_seconds: time without a step after which a group that trains hangs.
        other_seconds: the same time for ranks that start, restore, save, or make their first step.
        heartbeat_seconds: longest time between two reports of an agent.
    """

    def __init__(self, training_seconds: float, other_seconds: float, heartbeat_seconds: float) -> None:
        self._training, self._other = training_seconds, other_seconds
        self._max_interval = 2 * heartbeat_seconds
        self.begin(0)

    def begin(self, generation: int) -> None:
        """Start over for a new generation."""
        self.generation = generation
        self._ranks: dict[str, dict[int, _RankProgress]] = {}
        # Whose process is stopped, by rank and replica, and since when on our clock.
        self._halted: dict[tuple[int, str], float] = {}
        self._clock = self._last_advance = self._last_work = 0.0
        self.is_idle_reported = False
        """Whether the idleness of this generation was reported."""
        self._last_report: float | None = None

    def record(self, replica: str, generation: int | None, ranks: Iterable[RankReport], now: float) -> None:
        """Record an agent's report; `now` is in seconds of any steady clock."""
        if generation != self.generation:
            return
        earlier = self._ranks.pop(replica, {})
        ranks = list(ranks)
        self._update_halted(replica, ranks)
        progress = {report.rank: self._updated(earlier.get(report.rank), report) for report in ranks}
        if progress:
            self._ranks[replica] = progress
            if self._last_report is not None:
                # The clock advances by what was heard, so that our own standstill counts for next to nothing.
                self._clock += min(max(0.0, now - self._last_report), self._max_interval)
            self._last_report = now
        due = any(state.is_step_due for state in self._all_ranks().values())
        # While no step is due, a script may do whatever it does for as long as it likes.
        if not due and any(state.is_script for state in progress.values()):
            self._last_advance = self._clock
        if any(_is_working(report) for report in ranks):
            self._last_work = self._clock

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone."""
        self._ranks.pop(replica, None)
        self._update_halted(replica, ())

    def verdict(self) -> str | None:
        """Describe the hang, as a sentence; None while a rank advances."""
        idle_for = self._clock - self._last_advance
        # Nothing can hang yet. A single stopped process may, though others still advance.
        if idle_for < min(self._training, self._other) or not self._ranks:
            return self._halted_rank()
        ranks = self._judged()
        # A stopped process will not continue by itself, whatever it was doing.
        if all(rank.is_step_due for rank in ranks.values()) or self._halted:
            # A script that logs once an epoch is given twice its longest step.
            if idle_for < max(self._training, *(2 * rank.longest_step for rank in ranks.values())):
                return self._halted_rank()
            message = f"no rank has made a step for {idle_for:.0f} s; {self._blamed(ranks)}"
        elif idle_for < self._other:
            return None
        else:
            busy = {key: rank for key, rank in ranks.items() if not rank.is_step_due}
            activities = join_names({rank.activity for rank in busy.values()})
            names = f"{_rank_names(busy)} {_verb(busy)}"
            message = f"no rank has made progress for {idle_for:.0f} s; {names} still {activities}"
        return f"{message}; {self._stacks_location()}"

    def progressed_at(self) -> float | None:
        """Time of the last progress of any rank, on the clock of `record`; None before the first report."""
        return None if self._last_report is None else self._last_report - (self._clock - self._last_advance)

    def idle(self) -> str | None:
        """Describe idle ranks, once a generation, as a sentence; None while a rank works, and after the first
        report."""
        idle_for = self._clock - self._last_work
        if idle_for < self._training or self.is_idle_reported or not self._ranks:
            return None
        self.is_idle_reported = True
        message = f"no rank has used a processor or a GPU for {idle_for:.0f} s, and may wait for ever"
        return f"{message}; {self._stacks_location()}"

    def idle_seconds(self) -> float | None:
        """Time for which no rank has worked, in seconds; None if ranks report their steps, or nothing is heard of
        them."""
        progress = self._all_ranks().values()
        if not progress or any(state.phase != SCRIPT for state in progress):
            return None
        return self._clock - self._last_work

    def culprit(self) -> str:
        """The replica whose ranks alone seem to be stuck; empty if it is not a single one."""
        progress = self._judged()
        # From the strongest evidence to the weakest.
        blamed = self._stopped_ranks(progress) or _ranks_behind(progress) or self._oldest_ranks(progress)
        replicas = {replica for _, replica in blamed}
        return replicas.pop() if len(replicas) == 1 and len(self._ranks) > 1 else ""

    @property
    def step(self) -> int | None:
        """The step that the ranks have reached; None if a script does not report it."""
        steps = [rank.step for rank in self._all_ranks().values() if not rank.is_script or rank.step]
        return max(steps, default=None)

    def _all_ranks(self) -> _Progress:
        return {(rank, replica): mark for replica, ranks in self._ranks.items() for rank, mark in ranks.items()}

    def _judged(self) -> _Progress:
        """The ranks to judge: all, except those of a script whose step is not due while the step of another rank is."""
        progress = self._all_ranks()
        due = {
            key: state
            for key, state in progress.items()
            if state.is_step_due or not state.is_script or key in self._halted
        }
        return due or progress

    def _halted_rank(self) -> str | None:
        """Describe a rank whose process has been stopped for too long, though others seem to advance; None if there is
        none."""
        for (rank, replica), since in self._halted.items():
            if self._clock - since >= self._training:
                halted = f"rank {rank} ({replica}) has been stopped for {self._clock - since:.0f} s"
                return f"{halted}; {self._stacks_location()}"
        return None

    def _update_halted(self, replica: str, ranks: Iterable[RankReport]) -> None:
        halted = {(report.rank, replica) for report in ranks if report.phase == STOPPED}
        for key in [key for key in self._halted if key[1] == replica and key not in halted]:
            del self._halted[key]
        for key in halted:
            self._halted.setdefault(key, self._clock)

    def _stacks_location(self) -> str:
        return f"the stacks of all ranks are in stacks/g{self.generation:06d}"

    def _updated(self, earlier: _RankProgress | None, report: RankReport) -> _RankProgress:
        is_complete = report.total_steps is not None and report.step >= report.total_steps
        is_stopped = report.phase == STOPPED
        # A process that is stopped is still at what it was doing.
        phase = earlier.phase if is_stopped and earlier is not None else TRAIN if is_stopped else report.phase
        is_script = report.script or report.phase == SCRIPT
        # A new step, a new phase or a pause is an advance.
        if earlier is None or earlier.step != report.step or earlier.phase != phase or report.pauses:
            made_step = earlier is not None and earlier.phase == phase == TRAIN and earlier.step != report.step
            has_stepped = earlier is not None and (
                earlier.has_stepped or (earlier.phase == TRAIN and earlier.step != report.step)
            )
            longest_step = earlier.longest_step if earlier is not None else 0.0
            if is_script and made_step and earlier is not None:
                longest_step = max(longest_step, self._clock - earlier.advanced_at)
            self._last_advance = self._clock
            return _RankProgress(report.step, phase, self._clock, has_stepped, is_complete, is_script, longest_step)
        return earlier

    def _blamed(self, progress: _Progress) -> str:
        steps = {state.step for state in progress.values()}
        oldest = self._oldest_ranks(progress)
        if stopped := self._stopped_ranks(progress):
            return f"{_rank_names(stopped)} {_verb(stopped)} stopped at step {min(m.step for m in stopped.values())}"
        if behind := _ranks_behind(progress):
            return f"{_rank_names(behind)} {_verb(behind)} stuck at step {min(steps)}, others at {max(steps)}"
        if oldest:
            return f"{_rank_names(oldest)} seem{'s' if len(oldest) == 1 else ''} to be stuck at step {max(steps)}"
        if any(state.is_script for state in progress.values()):
            # Other ranks may not report, and one of them may be the one that is stuck.
            return f"{_rank_names(progress)} {_verb(progress)} at step {max(steps)}"
        return f"all ranks are stuck at step {max(steps)}"

    def _stopped_ranks(self, progress: _Progress) -> _Progress:
        return {key: state for key, state in progress.items() if key in self._halted}

    def _oldest_ranks(self, progress: _Progress) -> _Progress:
        newest = max((state.advanced_at for state in progress.values()), default=0.0)
        return {key: state for key, state in progress.items() if newest - state.advanced_at > self._max_interval}


def _is_working(report: RankReport) -> bool:
    """Whether a rank works, as far as that is known; for ranks that report steps, see `verdict`."""
    idle = report.cpu is not None and report.cpu < MAX_IDLE_CORES and (report.gpu or 0.0) < MAX_IDLE_GPU
    return report.phase != SCRIPT or not idle


def _ranks_behind(progress: _Progress) -> _Progress:
    steps = {state.step for state in progress.values()}
    return {key: state for key, state in progress.items() if state.step == min(steps)} if len(steps) > 1 else {}


def _rank_names(progress: _Progress) -> str:
    names = [f"rank {rank} ({replica})" for rank, replica in sorted(progress)]
    return ", ".join(names[:MAX_NAMED_RANKS]) + (
        f" and {len(names) - MAX_NAMED_RANKS} more" if len(names) > MAX_NAMED_RANKS else ""
    )


def _verb(progress: _Progress) -> str:
    return "is" if len(progress) == 1 else "are"
