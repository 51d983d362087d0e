"""Speed, memory and loss of a run, from its log.

Speed is measured between the ends of two steps, the last of the warm-up and the last of all, on rank 0. Ranks wait for
each other in each step, so this is the speed of all of them.
"""

from dataclasses import dataclass
from statistics import fmean

from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Start, Step, TrainingEnd, TrainingRecord

SMOOTHED = 5
"""Number of losses whose mean is compared with a target loss: the loss of a single batch may be low by chance."""


class Unmeasured(Exception):  # noqa: N818 - it says what is so
    """There is no measurement; the message says why."""


@dataclass(frozen=True)
class Measurement:
    """Measurement of one run."""

    samples_per_second: float
    """Samples a second of all ranks together."""
    tokens_per_second: float | None
    """None if the task does not report the tokens of a sample."""
    seconds: float
    """Measured time, without the warm-up."""
    steps: int
    """Measured steps."""
    peak_memory: float | None
    """Peak resident memory of the rank that had most, in bytes."""
    peak_gpu_memory: float | None
    """Peak memory that torch had allocated on a GPU, in bytes; None on CPUs."""
    final_loss: float | None
    """Loss of the last step."""
    seconds_to_target: float | None
    """Time to the target loss since the start of the first step; None if it was not reached, or there is none."""
    samples_to_target: int | None
    """Samples trained until then."""


def measure(run_dir: RunDir, warm_up: int, target: float | None = None) -> Measurement:
    """Measure a finished run.

    Args:
        warm_up: first steps that are excluded.
        target: a loss to reach.

    Raises:
        Unmeasured: the run failed, or its group was formed more than once.
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
    timed = steps[warm_up:]
    seconds = timed[-1].time - steps[warm_up - 1].time
    if seconds <= 0:
        raise Unmeasured("the clock of this machine was set back meanwhile")
    speed = sum(step.samples or 0 for step in timed) / seconds
    tokens = starts[0].tokens_per_sample
    reached = _reached(steps, starts[0], target)
    return Measurement(
        samples_per_second=speed,
        tokens_per_second=None if tokens is None else speed * tokens,
        seconds=seconds,
        steps=len(timed),
        peak_memory=_peak(records, "peak_memory"),
        peak_gpu_memory=_peak(records, "peak_gpu_memory"),
        final_loss=timed[-1].loss,
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


def _peak(records: list[TrainingRecord], name: str) -> float | None:
    by_rank = [getattr(record, name) or {} for record in records if isinstance(record, TrainingEnd)]
    return max((size for sizes in by_rank for size in sizes.values() if size is not None), default=None)
