"""Loss spike detection: finds the step at which the loss became NaN or worse than untrained, and says what follows.

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

from tandem.formatting import count_noun, number
from tandem.job.tasks import RewindOn
from tandem.processes.exitcode import ExitCode
from tandem.rundir.lineage import SPIKE_SPAN_STEPS, Rewind

MEMORY = 200
"""Steps over which the usual loss is taken."""
FACTOR = 3.0
SPREADS = 10.0
NORMAL = 1.4826
"""Standard deviations in a median deviation, if the losses are normally distributed."""
ADVICE = "try a lower learning rate, a warm-up, or clipping of gradients."
"""Advice for training that diverges."""


class TrainingDiverged(Exception):  # noqa: N818 - it says what happened
    """The loss became useless, and training goes back or ends; carries the exit code. Raised on every rank."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


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
        for index, loss in enumerate(losses, start=step):
            if not math.isfinite(loss):
                if self._rewind_on == "Never":
                    continue
                return index
            if len(self._beginning) < SPIKE_SPAN_STEPS:
                self._beginning.append(loss)
            if len(self._latest) == SPIKE_SPAN_STEPS:
                self._usual.append(self._latest[0])
            self._latest.append(loss)
            if self._spikes():
                return index - SPIKE_SPAN_STEPS + 1
        return None

    def memory(self) -> dict[str, object]:
        """Return the memory for a checkpoint, as JSON."""
        return {"beginning": list(self._beginning), "usual": list(self._usual), "latest": list(self._latest)}

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


def decision(rewind: Rewind | None, bad_step: int, loss: float | None, earlier: int) -> tuple[ExitCode, str]:
    """Return the exit code and the message that follow from a useless loss.

    Args:
        rewind: where training goes back to; None: it ends.
        bad_step: step with the useless loss.
        loss: loss of that step; None if it is not known any more.
        earlier: number of earlier rewinds.
    """
    if loss is None or math.isfinite(loss):
        description = "worse than untrained" if loss is None else f"{loss:.4g}, worse than untrained,"
    else:
        description = "NaN" if math.isnan(loss) else "infinite"
    became = f"training diverged: the loss became {description} at step {number(bad_step)}"
    if rewind is None:
        times = "once" if earlier == 1 else f"{earlier} times"
        helped = f"to go back and leave data out {times} has not helped"
        tried = helped if earlier else "the run is too short to leave data out"
        return ExitCode.DIVERGED, f"{became}, and {tried}. T{ADVICE[1:]}"
    batches = count_noun(rewind.skip_to - rewind.skip_from, "batch", "batches")
    back = f"going back to before step {number(rewind.resume_before)} and leaving out {batches}"
    return ExitCode.REWOUND, f"{became}; {back}{'' if earlier else f'. If it does so again, {ADVICE}'}"


def _floats(value: object) -> list[float]:
    return [float(item) for item in value] if isinstance(value, list) else []
