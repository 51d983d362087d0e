"""What the per-step writer logs say: when a group was whole again, whether there were two, what was done twice.

Pure: lines in, findings out. The *writer* of a group is its rank 0. All times are seconds since the epoch, of one
machine's clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

GAP_SECONDS = 1.0
"""Steps further apart than this are not a group that is training; a step takes 0.02 s."""


@dataclass(frozen=True)
class Line:
    """One event of one rank."""

    at: float
    event: str
    """`born`, `imported`, `joined`, `restored`, `step`, `saved`, or `tripped-…`."""
    group: str
    """A word that no two groups share; `-` before the rank has joined one."""
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
    """The first step in it, as counted after it was taken."""
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
    """The older group committed a checkpoint in it."""

    @property
    def seconds(self) -> float:
        """How long both were active."""
        return self.end - self.start


def parse(text: str, replica: str, pid: int) -> list[Line]:
    """The lines of one rank's log. A last line that is still being written is passed over."""
    found = []
    for line in text.splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 6:
            at, event, group, world, rank, step = words
            found.append(Line(float(at), event, group, int(world), int(rank), int(step), replica, pid))
    return found


def stretches(lines: Iterable[Line]) -> list[Stretch]:
    """What each group's writer did without a gap, in the order of time."""
    found: list[Stretch] = []
    newest: dict[str, int] = {}
    for line in sorted((line for line in lines if line.event == "step" and line.rank == 0), key=lambda line: line.at):
        index = newest.get(line.group)
        if index is not None and line.at - found[index].end <= GAP_SECONDS:
            before = found[index]
            found[index] = Stretch(line.group, line.world, before.start, line.at, before.first, line.step)
        else:
            newest[line.group] = len(found)
            found.append(Stretch(line.group, line.world, line.at, line.at, line.step, line.step))
    return found


def steady(lines: Iterable[Line], since: float, world: int, seconds: float) -> Stretch | None:
    """The group of so many ranks that went on for so long after a moment, without a gap.

    Returns: its stretch, which may have begun before `since` if the group was not disturbed; None as long as none has.
    """
    for stretch in reversed(stretches(lines)):
        if stretch.world == world and stretch.end - max(stretch.start, since) >= seconds:
            return stretch
    return None


def overlaps(lines: Sequence[Line]) -> list[Overlap]:
    """Pairs of groups that were active at the same time. There should be none."""
    stepped = {line.group for line in lines if line.event == "step"}
    active: dict[str, list[Line]] = {}
    for line in lines:
        if line.rank == 0 and line.event in ("step", "saved") and line.group in stepped:
            active.setdefault(line.group, []).append(line)
    ordered = sorted(active.items(), key=lambda item: min(line.at for line in item[1] if line.event == "step"))
    found = []
    for index, (older, done) in enumerate(ordered):
        for newer, work in ordered[index + 1 :]:
            start, end = min(line.at for line in work if line.event == "step"), max(line.at for line in done)
            if end > start:
                saved = any(line.event == "saved" and line.at > start for line in done)
                found.append(Overlap(older, newer, start, end, saved))
    return found


def repeated_steps(lines: Iterable[Line], since: float) -> int:
    """Steps that were taken again by groups that began after a moment: the work that the faults undid."""
    return sum(max(0, before - first + 1) for before, first in _beginnings(lines, since, "step"))


def lost_steps(lines: Iterable[Line], since: float) -> int:
    """Steps behind a committed checkpoint that were taken again all the same: what should never happen."""
    return sum(max(0, before - first + 1) for before, first in _beginnings(lines, since, "saved"))


def longest_pause(lines: Iterable[Line], start: float, end: float) -> float:
    """The longest time without a step of any writer, between two moments."""
    steps = sorted(line.at for line in lines if line.event == "step" and line.rank == 0 and start <= line.at <= end)
    return max(later - earlier for earlier, later in pairwise([start, *steps, end]))


PHASES = ("detect and rendezvous", "start and import", "join", "restore", "first step")
"""Where recovery time goes, for a script: up to its start, torch's import, the process group, the checkpoint."""


def phases(lines: Iterable[Line], fault: float, stretch: Stretch) -> dict[str, float]:
    """Seconds of each phase of the recovery that ended in this stretch, as its slowest rank saw them; {} if the group
    was not formed for it."""
    lines = list(lines)
    ends = [fault]
    for event in ("joined", "restored"):
        times = [line.at for line in lines if line.group == stretch.group and line.event == event]
        if not times or min(times) < fault:
            return {}
        ends.append(max(times))
    pids = {line.pid for line in lines if line.group == stretch.group}
    early = [
        max((line.at for line in lines if line.pid in pids and line.event == event), default=fault)
        for event in ("born", "imported")
    ]
    marks = [fault, *early, ends[1], ends[2], stretch.start]
    return {name: max(0.0, later - earlier) for name, (earlier, later) in zip(PHASES, pairwise(marks), strict=True)}


def _beginnings(lines: Iterable[Line], since: float, event: str) -> list[tuple[int, int]]:
    """For each group that began after a moment: the highest step with this event before its beginning, and its first
    step."""
    lines = [line for line in lines if line.rank == 0]
    first: dict[str, Line] = {}
    restored: dict[str, float] = {}
    for line in sorted(lines, key=lambda line: line.at):
        if line.event == "step":
            first.setdefault(line.group, line)
        if line.event == "joined":
            restored.setdefault(line.group, line.at)
    found = []
    for group, line in first.items():
        if line.at < since:
            continue
        # A checkpoint that was committed while the new group was already reading counts for the next one.
        until = restored.get(group, line.at) if event == "saved" else line.at
        before = [other.step for other in lines if other.event == event and other.group != group and other.at < until]
        if before:
            found.append((max(before), line.step))
    return found
