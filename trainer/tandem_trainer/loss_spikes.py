"""Loss spike detection: finds the step at which the loss became NaN or worse than untrained.

Two signs. A loss that is NaN or infinite is bad at once. A *spike* is bad when the mean of the last SPAN losses exceeds
the mean with which the run began and also FACTOR times the median of what came before: the model has become worse than
an untrained one. That is deliberately blunt. Ratios alone call every hard sample of a nearly perfect model a spike, and
a rewind that was not needed costs more than a spike that heals by itself.

Where a loss can be negative (a likelihood of densities, a policy gradient) a ratio means nothing. There the rise above
the median is compared: with FACTOR times what has been learned since the beginning, and with SPREADS times the usual
spread, measured by the median deviation, which outliers do not move. What a script of the user's own calls its loss may
be neither, so there spikes count only where the user says so.

Every rank computes this from the losses that all have agreed on, so all come to the same answer after the same step.
(Rewinding and skipping what came before a spike: "PaLM", arXiv 2204.02311, section 5.1.)
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable

from tandem.rundir.lineage import SPAN
from tandem.tasks import RewindOn

MEMORY = 200
"""Steps that tell what is usual."""
FACTOR = 3.0
SPREADS = 10.0
NORMAL = 1.4826
"""Standard deviations in a median deviation, were the losses normally distributed."""


class LossSpikes:
    """Follows the losses of one run; its memory travels with the checkpoints.

    Args:
        memory: what a checkpoint kept of it.
        rewind_on: which losses are bad.
    """

    def __init__(self, memory: dict[str, object] | None = None, rewind_on: RewindOn = "Spikes") -> None:
        self._rewind_on = rewind_on
        memory = memory or {}
        self._beginning = _floats(memory.get("beginning"))
        self._usual: deque[float] = deque(_floats(memory.get("usual")), maxlen=MEMORY)
        self._latest: deque[float] = deque(_floats(memory.get("latest")), maxlen=SPAN)

    def first_bad(self, step: int, losses: Iterable[float]) -> int | None:
        """Take note of the losses of the steps from `step` on; the first one that is bad, None if all is well."""
        for number, loss in enumerate(losses, start=step):
            if not math.isfinite(loss):
                if self._rewind_on == "Never":
                    continue
                return number
            if len(self._beginning) < SPAN:
                self._beginning.append(loss)
            if len(self._latest) == SPAN:
                self._usual.append(self._latest[0])
            self._latest.append(loss)
            if self._spikes():
                return number - SPAN + 1
        return None

    def memory(self) -> dict[str, object]:
        """What a checkpoint keeps of it, as JSON."""
        return {"beginning": self._beginning, "usual": list(self._usual), "latest": list(self._latest)}

    def _spikes(self) -> bool:
        if self._rewind_on != "Spikes" or len(self._usual) < MEMORY // 2:
            return False
        now, untrained, usual = (
            statistics.fmean(self._latest),
            statistics.fmean(self._beginning),
            statistics.median(self._usual),
        )
        if now <= untrained:
            return False
        if min(*self._beginning, *self._usual, *self._latest) >= 0:
            return now > FACTOR * usual
        spread = NORMAL * statistics.median(abs(loss - usual) for loss in self._usual)
        return now - usual > max(FACTOR * (untrained - usual), SPREADS * spread)


def _floats(value: object) -> list[float]:
    return [float(item) for item in value] if isinstance(value, list) else []
