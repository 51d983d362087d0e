"""How many processor seconds a step takes: of the ranks, and of all other processes of a run, seen from outside.

The same is done to every side: from time to time all descendants of the command are looked at in /proc. What a process
took that has ended since counts as its parent's, which has waited for it, so nothing is lost between two looks.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

import psutil

TICK = 1 / os.sysconf("SC_CLK_TCK")
IsRank = Callable[[psutil.Process], bool]


@dataclass(frozen=True)
class Sample:
    """Processor seconds that a run has taken until a moment."""

    at: float
    """Seconds since the epoch."""
    ranks: float
    beside: float
    """All processes that are no ranks, and those that have ended."""
    peak: float = 0.0
    """Resident memory of a rank at the most until then, MB of 10^6 bytes; of the rank that took most."""


@dataclass(frozen=True)
class Use:
    """Processor seconds of a step."""

    ranks: float
    """Of all ranks together."""
    beside: float
    """Of all that is beside them: agents, coordinator, evaluators, writers of checkpoints, the command itself."""

    @property
    def whole(self) -> float:
        """Of everything."""
        return self.ranks + self.beside


def look(root: psutil.Process, is_rank: IsRank) -> Sample:
    """What a command and all its descendants have taken until now."""
    ranks = beside = peak = 0.0
    at = time()
    with suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                rank = is_rank(process)
                own, ended = _seconds(process.pid)
                ranks, beside = (ranks + own, beside) if rank else (ranks, beside + own)
                beside += ended
                peak = max(peak, _peak(process.pid)) if rank else peak
    return Sample(at, ranks, beside, peak)


def per_step(samples: Sequence[Sample], ends: Sequence[float], skip: int) -> Use | None:
    """What a step took between the first look after step `skip` and the last one before the end.

    Args:
        ends: when each step ended, in the order of time; seconds since the epoch.

    Returns:
        None if fewer than two looks lie in that time.
    """
    inside = [sample for sample in samples if ends[skip - 1] <= sample.at <= ends[-1]]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    steps = steps_until(ends, last.at) - steps_until(ends, first.at)
    return Use((last.ranks - first.ranks) / steps, (last.beside - first.beside) / steps)


def steps_until(ends: Sequence[float], at: float) -> float:
    """Steps taken until a moment, with the part of the one that was under way."""
    index = bisect_right(ends, at)
    if index in (0, len(ends)):
        return float(index)
    return index + (at - ends[index - 1]) / (ends[index] - ends[index - 1])


def _peak(pid: int) -> float:
    """MB; 0 of a process that has ended, and has no memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def _seconds(pid: int) -> tuple[float, float]:
    """Of a process itself, and of its children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, ended_user, ended_system = map(int, fields[11:15])
    return (user + system) * TICK, (ended_user + ended_system) * TICK
