"""The interval between two saves that costs least, from the cost of a save and the failures that lose steps.

A save that blocks training for `c` seconds, taken every `t` seconds, costs the share c/t. A failure that restores from
the disk loses half an interval on average, so failures at the rate r cost the share r·t/2. The sum is least at
t = √(2c/r) (J. W. Young, doi:10.1145/361147.361115; J. T. Daly, doi:10.1016/j.future.2004.11.016). What a failure costs
besides, such as the restart, does not depend on the interval. A failure after which ranks keep their state loses no
step, and does not count. The design is in docs/decisions/0059-ettr.md.
"""

from math import sqrt

from tandem.formatting import duration, number, share

PRIOR_FAILURES, PRIOR_SECONDS = 0.2, 2 * 3600.0
"""Failures and time that are assumed before a run has had any: one in ten hours, with the weight of a fifth of a
failure. The simulation of `python -m benchmarks.save_interval` chose the weight."""
MIN_SECONDS, MAX_SECONDS = 5.0, 3600.0
"""Bounds of an interval, in seconds: evaluators score checkpoints, and a loss of more than an hour is never worth what
the saves cost."""
MIN_SAVES = 20
"""Number of saves below which there is no advice."""
MIN_GAIN = 0.0025
"""Share of the time below which a change of the interval is not worth advice."""


def failure_rate(failures: float, seconds: float) -> float:
    """Expected failures a second, after some failures in some seconds of training.

    It is the mean of a Gamma distribution. Where failures come faster than the assumption lets this mean follow, all
    but one of them count, without it.
    """
    return max((PRIOR_FAILURES + failures) / (PRIOR_SECONDS + seconds), (failures - 1) / max(seconds, 1.0))


def cost_share(interval: float, save_seconds: float, rate: float) -> float:
    """Share of the time that saves and repeated steps cost.

    Args:
        interval: seconds between two saves.
        save_seconds: time for which a save blocks training.
        rate: failures a second that lose steps.
    """
    return save_seconds / interval + rate * interval / 2


def best_interval(save_seconds: float, write_seconds: float, failures: float, seconds: float) -> float:
    """The interval that costs least, within its bounds, in seconds. A save that falls due while the one before is still
    written to the disk would be skipped.

    Args:
        save_seconds: time for which a save blocks training.
        write_seconds: time from then until it is on the disk.
        failures: failures that lost steps so far.
        seconds: time of training so far.
    """
    interval = sqrt(2 * max(0.0, save_seconds) / failure_rate(failures, seconds))
    return min(MAX_SECONDS, max(MIN_SECONDS, save_seconds + write_seconds, interval))


def interval_advice(
    *,
    training_seconds: float,
    total_seconds: float,
    save_seconds: float,
    recomputed_seconds: float,
    saves: int,
    setbacks: int,
    write_seconds: float = 0.0,
    step_seconds: float | None = None,
) -> str | None:
    """Advise on the interval, in a sentence; None if the evidence is not enough.

    It is enough after MIN_SAVES saves, if the change gains MIN_GAIN of the time, and would lose none with one failure
    more or fewer than there were.

    Args:
        training_seconds: time in which steps were taken, repeated ones included.
        total_seconds: wall time of the run.
        save_seconds: time that all saves have blocked training.
        recomputed_seconds: time of repeated steps.
        saves: number of saves.
        setbacks: number of failures that lost steps.
        write_seconds: time of a save on the disk.
        step_seconds: time of a step, if the job's interval is given in steps.
    """
    if saves < MIN_SAVES or training_seconds <= 0 or total_seconds <= 0:
        return None
    present, cost = training_seconds / saves, save_seconds / saves
    better = best_interval(cost, write_seconds, setbacks, training_seconds)
    gains = [
        cost_share(present, cost, failures / training_seconds) - cost_share(better, cost, failures / training_seconds)
        for failures in (max(0, setbacks - 1), setbacks, setbacks + 1)
    ]
    if gains[1] < MIN_GAIN or min(gains) <= 0:
        return None
    costs = (
        f"cost {share(save_seconds / total_seconds)} and failures cost {share(recomputed_seconds / total_seconds)} "
        "of the time"
    )
    if step_seconds:
        every, advised = f"{number(max(1, round(present / step_seconds)))} steps", max(1, round(better / step_seconds))
        return f"saves every {every} {costs}: checkpoint.everySteps: {advised} would save {share(gains[1])}"
    return (
        f"saves every {duration(present)} {costs}: checkpoint.everySeconds: {round(better)} would save "
        f"{share(gains[1])}"
    )
