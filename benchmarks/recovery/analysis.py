"""Evaluation of the writers' logs of steps: when a group was complete again, whether there were two, what was repeated.

Pure: lines in, results out. The *writer* of a group is its rank 0. All times are in seconds since the epoch, of one
machine's clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

GAP_SECONDS = 1.0
"""Distance of steps above which a group is not training; a step takes 0.02 s."""


@dataclass(frozen=True)
class Line:
    """One event of one rank."""

    time: float
    event: str
    """`born`, `imported`, `joined`, `restored`, `step`, `dropped`, `saved`, or `tripped-…`."""
    group: str
    """Word that is unique to a group; `-` before the rank has joined one."""
    world: int
    rank: int
    step: int
    replica: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Stretch:
    """Steps of one group without a gap."""

    group: str
    world: int
    start: float
    end: float
    first: int
    """Its first step, as counted after it was taken."""
    last: int


@dataclass(frozen=True)
class Overlap:
    """An older group whose writer was still active after a newer group's first step."""

    older: str
    newer: str
    start: float
    """The newer group's first step."""
    end: float
    """The older group's last step or save."""
    older_saved: bool
    """Whether the older group committed a checkpoint in it."""

    @property
    def seconds(self) -> float:
        """Time that both were active."""
        return self.end - self.start


def parse(text: str, replica: str, pid: int) -> list[Line]:
    """Parse the lines of one rank's log. A last line that is incomplete is skipped."""
    lines = []
    for line in text.splitlines(keepends=True):
        columns = line.split()
        if line.endswith("\n") and len(columns) == 6:
            time, event, group, world, rank, step = columns
            lines.append(Line(float(time), event, group, int(world), int(rank), int(step), replica, pid))
    return lines


def stretches(lines: Iterable[Line]) -> list[Stretch]:
    """Find the stretches without a gap of each group's writer, in order of time."""
    ordered: list[Stretch] = []
    newest: dict[str, int] = {}
    for line in sorted((line for line in lines if line.event == "step" and line.rank == 0), key=lambda line: line.time):
        index = newest.get(line.group)
        if index is not None and line.time - ordered[index].end <= GAP_SECONDS:
            before = ordered[index]
            ordered[index] = Stretch(line.group, line.world, before.start, line.time, before.first, line.step)
        else:
            newest[line.group] = len(ordered)
            ordered.append(Stretch(line.group, line.world, line.time, line.time, line.step, line.step))
    return ordered


def steady(lines: Iterable[Line], since: float, world: int, seconds: float) -> Stretch | None:
    """Find the group of this world size that trained for this long after a time, without a gap.

    Returns:
        Its stretch, which may have started before `since` if the group was not disturbed; None while there is none.
    """
    for stretch in reversed(stretches(lines)):
        if stretch.world == world and stretch.end - max(stretch.start, since) >= seconds:
            return stretch
    return None


def overlaps(lines: Sequence[Line]) -> list[Overlap]:
    """Find pairs of groups that were active at the same time. There should be none."""
    stepped = {line.group for line in lines if line.event == "step"}
    active: dict[str, list[Line]] = {}
    for line in lines:
        if line.rank == 0 and line.event in ("step", "saved") and line.group in stepped:
            active.setdefault(line.group, []).append(line)
    ordered = sorted(active.items(), key=lambda item: min(line.time for line in item[1] if line.event == "step"))
    pairs = []
    for index, (older, done) in enumerate(ordered):
        for newer, work in ordered[index + 1 :]:
            start, end = min(line.time for line in work if line.event == "step"), max(line.time for line in done)
            if end > start:
                saved = any(line.event == "saved" and line.time > start for line in done)
                pairs.append(Overlap(older, newer, start, end, saved))
    return pairs


def repeated_steps(lines: Iterable[Line], since: float) -> int:
    """Count the steps that were repeated by groups that started after a time: the work that the faults undid."""
    return sum(max(0, before - first + 1) for before, first in _beginnings(lines, since, "step"))


def lost_steps(lines: Iterable[Line], since: float) -> int:
    """Count the steps before a committed checkpoint that were repeated all the same, which should never happen."""
    return sum(max(0, before - first + 1) for before, first in _beginnings(lines, since, "saved"))


def dropped_batches(lines: Iterable[Line], since: float) -> int:
    """Count the batches of ranks that took no part in any step, since a time."""
    return sum(line.event == "dropped" and line.time >= since for line in lines)


def longest_pause(lines: Iterable[Line], start: float, end: float) -> float:
    """Longest time without a step of any writer, between two times."""
    steps = sorted(line.time for line in lines if line.event == "step" and line.rank == 0 and start <= line.time <= end)
    return max(later - earlier for earlier, later in pairwise([start, *steps, end]))


PHASES = ("detect and rendezvous", "start and import", "join", "restore", "first step")
"""Phases of a recovery, for a script: up to its start, torch's import, the process group, the checkpoint."""


def phases(lines: Iterable[Line], fault: float, stretch: Stretch) -> dict[str, float]:
    """Seconds of each phase of the recovery that ended in this stretch, of its slowest rank; {} if the group was not
    formed for it."""
    lines = list(lines)
    ends = [fault]
    for event in ("joined", "restored"):
        times = [line.time for line in lines if line.group == stretch.group and line.event == event]
        if not times or min(times) < fault:
            return {}
        ends.append(max(times))
    pids = {line.pid for line in lines if line.group == stretch.group}
    early = [
        max((line.time for line in lines if line.pid in pids and line.event == event), default=fault)
        for event in ("born", "imported")
    ]
    marks = [fault, *early, ends[1], ends[2], stretch.start]
    return {name: max(0.0, later - earlier) for name, (earlier, later) in zip(PHASES, pairwise(marks), strict=True)}


def _beginnings(lines: Iterable[Line], since: float, event: str) -> list[tuple[int, int]]:
    """Find the highest step with this event before the start of each group that started after a time, and the
    group's first step."""
    lines = [line for line in lines if line.rank == 0]
    first: dict[str, Line] = {}
    restored: dict[str, float] = {}
    for line in sorted(lines, key=lambda line: line.time):
        if line.event == "step":
            first.setdefault(line.group, line)
        if line.event == "joined":
            restored.setdefault(line.group, line.time)
    pairs = []
    for group, line in first.items():
        if line.time < since:
            continue
        # A checkpoint that was committed while the new group was already reading counts for the next group.
        until = restored.get(group, line.time) if event == "saved" else line.time
        before = [other.step for other in lines if other.event == event and other.group != group and other.time < until]
        if before:
            pairs.append((max(before), line.step))
    return pairs
