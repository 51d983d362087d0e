"""Processor seconds of a step, measured from outside: of the ranks, and of all other processes of a run.

All sides are measured alike: at intervals, all descendants of the command are sampled in /proc. The time of a process
that has ended counts as its parent's, which has waited for it, so nothing is lost between two samples.
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
    """Processor seconds of a run until a time."""

    time: float
    """Time of the sample, in seconds since the epoch."""
    ranks: float
    other: float
    """Seconds of all processes that are not ranks, and of those that have ended."""
    peak: float = 0.0
    """Peak resident memory until then of the rank that had most, MB of 10^6 bytes."""


@dataclass(frozen=True)
class Use:
    """Processor seconds of a step."""

    ranks: float
    """Seconds of all ranks together."""
    beside: float
    """Seconds of all other processes: agents, coordinator, evaluators, writers of checkpoints, the command itself."""

    @property
    def total(self) -> float:
        """Seconds of all processes."""
        return self.ranks + self.beside


def sample(root: psutil.Process, is_rank: IsRank) -> Sample:
    """Sample the processor seconds of a command and all its descendants."""
    ranks = other = peak = 0.0
    sampled_at = time()
    with suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                rank = is_rank(process)
                own, ended = _seconds(process.pid)
                ranks, other = (ranks + own, other) if rank else (ranks, other + own)
                other += ended
                peak = max(peak, _peak(process.pid)) if rank else peak
    return Sample(sampled_at, ranks, other, peak)


def per_step(samples: Sequence[Sample], ends: Sequence[float], skip: int) -> Use | None:
    """Compute the processor seconds of a step between the first sample after step `skip` and the last one.

    Args:
        ends: end times of the steps, in order; seconds since the epoch.

    Returns:
        None if there are fewer than two samples in that time.
    """
    inside = [sample for sample in samples if ends[skip - 1] <= sample.time <= ends[-1]]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    steps = steps_until(ends, last.time) - steps_until(ends, first.time)
    return Use((last.ranks - first.ranks) / steps, (last.other - first.other) / steps)


def steps_until(ends: Sequence[float], time_at: float) -> float:
    """Steps taken until a time, including the fraction of the current one."""
    index = bisect_right(ends, time_at)
    if index in (0, len(ends)):
        return float(index)
    return index + (time_at - ends[index - 1]) / (ends[index] - ends[index - 1])


def _peak(pid: int) -> float:
    """Peak resident memory in MB; 0 for a process that has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def _seconds(pid: int) -> tuple[float, float]:
    """Processor seconds of a process, and of its children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, ended_user, ended_system = map(int, fields[11:15])
    return (user + system) * TICK, (ended_user + ended_system) * TICK
