"""Whether training still learns: finds the step at which the loss became useless.

Two signs. A loss that is NaN or infinite is bad at once. A *spike* is bad when the mean of the last SPAN losses exceeds
the mean with which the run began and also FACTOR times the median of what came before: the model has become worse than
an untrained one. That is deliberately blunt. Ratios alone call every hard sample of a nearly perfect model a spike, and
a rewind that was not needed costs more than a spike that heals by itself.

Every rank computes this from the losses that all have agreed on, so all come to the same answer after the same step.
(Rewinding and skipping what came before a spike: "PaLM", arXiv 2204.02311, section 5.1.)
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable

from tandem.rewind import SPAN

MEMORY = 200
"""Steps that tell what is usual."""
FACTOR = 3.0


class Health:
    """Follows the losses of one run; its memory travels with the checkpoints."""

    def __init__(self, memory: dict[str, object] | None = None) -> None:
        memory = memory or {}
        self._beginning = _floats(memory.get("beginning"))
        self._usual: deque[float] = deque(_floats(memory.get("usual")), maxlen=MEMORY)
        self._latest: deque[float] = deque(_floats(memory.get("latest")), maxlen=SPAN)

    def first_bad(self, step: int, losses: Iterable[float]) -> int | None:
        """Take note of the losses of the steps from `step` on; the first one that is bad, None if all is well."""
        for number, loss in enumerate(losses, start=step):
            if not math.isfinite(loss):
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
        if len(self._usual) < MEMORY // 2:
            return False
        now = statistics.fmean(self._latest)
        return now > statistics.fmean(self._beginning) and now > FACTOR * statistics.median(self._usual)


def _floats(value: object) -> list[float]:
    return [float(item) for item in value] if isinstance(value, list) else []
