"""Loss spike detection: finds the step at which the loss became NaN or worse than untrained.

Two signs. A loss that is NaN or infinite is bad at once. A *spike* is bad when the mean of the last SPIKE_SPAN_STEPS
losses exceeds the mean with which the run began and also FACTOR times the median of what came before: the model has
become worse than an untrained one. That is deliberately blunt. Ratios alone call every hard sample of a nearly perfect
model a spike, and a rewind that was not needed costs more than a spike that heals by itself.

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

from tandem.job.tasks import RewindOn
from tandem.rundir.lineage import SPIKE_SPAN_STEPS

MEMORY = 200
"""Steps over which the usual loss is taken."""
FACTOR = 3.0
SPREADS = 10.0
NORMAL = 1.4826
"""Standard deviations in a median deviation, if the losses are normally distributed."""


class LossSpikes:
    """Follows the losses of one run; checkpoints hold its memory.

    Args:
        memory: memory from a checkpoint.
        rewind_on: losses that count as bad.
    """

    def __init__(self, memory: dict[str, object] | None = None, rewind_on: RewindOn = "Spikes") -> None:
        self._rewind_on = rewind_on
        memory = memory or {}
        self._beginning = _floats(memory.get("beginning"))
        self._usual: deque[float] = deque(_floats(memory.get("usual")), maxlen=MEMORY)
        self._latest: deque[float] = deque(_floats(memory.get("latest")), maxlen=SPIKE_SPAN_STEPS)

    def first_bad(self, step: int, losses: Iterable[float]) -> int | None:
        """Record the losses of the steps from `step` on. Returns the first bad step, None if all are fine."""
        for number, loss in enumerate(losses, start=step):
            if not math.isfinite(loss):
                if self._rewind_on == "Never":
                    continue
                return number
            if len(self._beginning) < SPIKE_SPAN_STEPS:
                self._beginning.append(loss)
            if len(self._latest) == SPIKE_SPAN_STEPS:
                self._usual.append(self._latest[0])
            self._latest.append(loss)
            if self._spikes():
                return number - SPIKE_SPAN_STEPS + 1
        return None

    def memory(self) -> dict[str, object]:
        """Return the memory for a checkpoint, as JSON."""
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
