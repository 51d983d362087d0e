"""What the log of a run says about its speed, its memory and its loss.

Speed is that between the ends of two steps, the last of the warm-up and the last of all, as rank 0 saw them. Ranks wait
for each other in each step, so this is the speed of all of them.
"""

from dataclasses import dataclass
from statistics import fmean

from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Start, Step, TrainingEnd, TrainingRecord

SMOOTHED = 5
"""A target loss is compared with the mean of this many losses: the loss of a single batch may be low by chance."""


class Unmeasured(Exception):  # noqa: N818 - it says what is so
    """There are no numbers; says why."""


@dataclass(frozen=True)
class Measurement:
    """What was measured in one run."""

    samples_per_second: float
    """Of all ranks together."""
    tokens_per_second: float | None
    """None where the task does not say how many tokens a sample has."""
    seconds: float
    """Time over which it was measured, without the warm-up."""
    steps: int
    """Steps in that time."""
    peak_memory: float | None
    """Bytes: the most resident memory of the rank that had most."""
    peak_gpu_memory: float | None
    """Bytes, likewise: the most that torch had allocated on a GPU; None on CPUs."""
    final_loss: float | None
    """Of the last step."""
    seconds_to_target: float | None
    """Until the target loss was reached, from the beginning of the first step; None: it was not, or there is none."""
    samples_to_target: int | None
    """Trained until then."""


def measured(run_dir: RunDir, warm_up: int, target: float | None = None) -> Measurement:
    """Read a run that is over.

    Args:
        warm_up: first steps that do not count.
        target: a loss to reach.

    Raises:
        Unmeasured: it did not end well, or not in one go.
    """
    failed = run_dir.failed()
    if failed is not None:
        raise Unmeasured(str(failed.get("message") or failed.get("reason") or "it failed for an unknown reason"))
    if run_dir.done() is None:
        raise Unmeasured("it did not complete")
    records = [record for path in run_dir.training_logs().values() for record in LogReader(path, TRAINING)]
    starts = [record for record in records if isinstance(record, Start)]
    steps = [record for record in records if isinstance(record, Step)]
    if len(starts) != 1:
        raise Unmeasured(f"its group was formed {len(starts)} times, and times are only comparable within one group")
    if len(steps) <= warm_up:
        raise Unmeasured(f"its log has {len(steps)} steps, and {warm_up} of them are warm-up")
    counted = steps[warm_up:]
    seconds = counted[-1].time - steps[warm_up - 1].time
    if seconds <= 0:
        raise Unmeasured("the clock of this machine was set back meanwhile")
    speed = sum(step.samples or 0 for step in counted) / seconds
    tokens = starts[0].tokens_per_sample
    reached = _reached(steps, starts[0], target)
    return Measurement(
        samples_per_second=speed,
        tokens_per_second=None if tokens is None else speed * tokens,
        seconds=seconds,
        steps=len(counted),
        peak_memory=_most(records, "peak_memory"),
        peak_gpu_memory=_most(records, "peak_gpu_memory"),
        final_loss=counted[-1].loss,
        seconds_to_target=None if reached is None else reached[0],
        samples_to_target=None if reached is None else reached[1],
    )


def _reached(steps: list[Step], start: Start, target: float | None) -> tuple[float, int] | None:
    """Seconds and samples until the target was reached."""
    if target is None:
        return None
    for end in range(SMOOTHED, len(steps) + 1):
        losses = [step.loss for step in steps[end - SMOOTHED : end] if step.loss is not None]
        if len(losses) == SMOOTHED and fmean(losses) <= target:
            return steps[end - 1].time - start.time, sum(step.samples or 0 for step in steps[:end])
    return None


def _most(records: list[TrainingRecord], name: str) -> float | None:
    found = [getattr(record, name) or {} for record in records if isinstance(record, TrainingEnd)]
    return max((size for one in found for size in one.values() if size is not None), default=None)
