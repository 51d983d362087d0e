"""Straggler detection: names ranks whose own work in a step takes longer than that of the others.

The time of a whole step is useless for this: each step waits for the slowest, so all ranks take equally long. The
median of all ranks is the measure, because a few slow ones do not move it; of an even number it is the lower middle
one, or of two ranks neither could ever be named. A rank has to be slow for a while to be named, and keep up for a while
to be cleared, so that a slow batch or a checkpoint accuses nobody and a rank at the border is not named twice a minute.
"""

from collections.abc import Iterable
from statistics import median_low

from tandem.protocol import RankReport
from tandem.status import Straggler

SLOW_RATIO = 1.5
"""Above this a rank is slow …"""
FINE_RATIO = 1.35
"""… and below this it keeps up."""
SLOW_SECONDS = 10.0
"""For so long it has to be one or the other."""
MAX_NAMED = 20


class StragglerWatch:
    """Watches the ranks of one generation."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A generation was formed: another rank may have the same number."""
        self.stragglers: list[Straggler] = []
        self._changing: dict[int, float] = {}

    def look(self, reports: Iterable[tuple[str, RankReport]], now: float) -> list[str]:
        """Compare all ranks; returns sentences about those that have become slow or keep up again.

        Args:
            reports: the newest report of each rank, with its replica.
            now: seconds of any steady clock.
        """
        ratios = _ratios(reports)
        named = {straggler.rank: straggler for straggler in self.stragglers}
        told = []
        for rank, (replica, ratio) in ratios.items():
            if not (ratio < FINE_RATIO if rank in named else ratio > SLOW_RATIO):
                self._changing.pop(rank, None)
            elif now - self._changing.setdefault(rank, now) >= SLOW_SECONDS:
                del self._changing[rank]
                if rank in named:
                    del named[rank]
                    told.append(f"rank {rank} ({replica}) keeps up again")
                elif len(named) < MAX_NAMED:
                    named[rank] = Straggler(rank=rank, replica=replica, ratio=ratio)
                    told.append(f"rank {rank} ({replica}) is slow: its work takes {ratio:.1f} times the median")
        self._changing = {rank: since for rank, since in self._changing.items() if rank in ratios}
        still = [rank for rank in sorted(named) if rank in ratios]
        self.stragglers = [named[rank].model_copy(update={"ratio": round(ratios[rank][1], 2)}) for rank in still]
        return told


def _ratios(reports: Iterable[tuple[str, RankReport]]) -> dict[int, tuple[str, float]]:
    known = [(report.rank, replica, report.busy_seconds) for replica, report in reports if report.busy_seconds]
    if len(known) < 2:
        return {}
    median = median_low(busy for _, _, busy in known)
    return {rank: (replica, busy / median) for rank, replica, busy in known}
