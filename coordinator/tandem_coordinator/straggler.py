"""Straggler detection: reports ranks whose own work in a step takes longer than that of the others.

The duration of a whole step does not show this: each step waits for the slowest rank, so all take equally long. The
reference is the median of all ranks, because a few slow ones do not move it. For an even number it is the lower of the
two middle values; otherwise, of two ranks, neither could ever be reported. A rank has to be slow for a while to be
reported, and to keep up for a while to be cleared, so that a slow batch or a checkpoint reports nobody.
"""

from collections.abc import Iterable
from statistics import median_low

from tandem.wire.protocol import RankReport
from tandem.wire.status import Straggler

SLOW_RATIO = 1.5
"""Multiple of the median work per step above which a rank is slow."""
FINE_RATIO = 1.35
"""Multiple of the median work per step below which a slow rank keeps up again. It is less than SLOW_RATIO, so that a
rank at the border is not reported twice a minute."""
SLOW_SECONDS = 10.0
"""Time for which a rank has to be above or below the ratio before its state changes, in seconds."""
MAX_NAMED = 20


class StragglerWatch:
    """A watch over the ranks of one generation."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start over for a new generation, in which another rank may have the same number."""
        self.stragglers: list[Straggler] = []
        self.excess_seconds = 0.0
        """Time of a step for which the others wait for the slowest straggler: the difference of its work from the
        median."""
        self._changing: dict[int, float] = {}

    def update(self, reports: Iterable[tuple[str, RankReport]], now: float) -> list[str]:
        """Compare all ranks; returns sentences about those that have become slow or keep up again.

        Args:
            reports: the newest report of each rank, with its replica.
            now: seconds of any steady clock.
        """
        ratios, median = _ratios(reports)
        slow_ranks = {straggler.rank: straggler for straggler in self.stragglers}
        messages = []
        for rank, (replica, ratio) in ratios.items():
            # Two thresholds (hysteresis): a rank that hovers around one of them must not flap.
            if not (ratio < FINE_RATIO if rank in slow_ranks else ratio > SLOW_RATIO):
                self._changing.pop(rank, None)
            elif now - self._changing.setdefault(rank, now) >= SLOW_SECONDS:
                del self._changing[rank]
                if rank in slow_ranks:
                    del slow_ranks[rank]
                    messages.append(f"rank {rank} ({replica}) keeps up again")
                elif len(slow_ranks) < MAX_NAMED:
                    slow_ranks[rank] = Straggler(rank=rank, replica=replica, ratio=ratio)
                    messages.append(f"rank {rank} ({replica}) is slow: its work takes {ratio:.1f} times the median")
        # Ranks without a report lose their timer, and are no stragglers any more.
        self._changing = {rank: since for rank, since in self._changing.items() if rank in ratios}
        still = [rank for rank in sorted(slow_ranks) if rank in ratios]
        self.stragglers = [slow_ranks[rank].model_copy(update={"ratio": round(ratios[rank][1], 2)}) for rank in still]
        self.excess_seconds = max((ratios[rank][1] - 1.0 for rank in still), default=0.0) * median
        return messages


def _ratios(reports: Iterable[tuple[str, RankReport]]) -> tuple[dict[int, tuple[str, float]], float]:
    """The replica of each rank and its work over the median, and the median, in seconds."""
    timed = [(report.rank, replica, report.busy_seconds) for replica, report in reports if report.busy_seconds]
    # With a single rank there is nothing to compare with.
    if len(timed) < 2:
        return {}, 0.0
    median = median_low(busy for _, _, busy in timed)
    return {rank: (replica, busy / median) for rank, replica, busy in timed}, median
