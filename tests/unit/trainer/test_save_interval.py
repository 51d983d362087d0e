"""When `checkpoint.every: Auto` saves."""

from pathlib import Path

import pytest

from tandem.job.resource import CheckpointSpec
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Continuation, GenerationRecord
from tandem.rundir.log import LogWriter
from tandem.wire.save_interval import MAX_SECONDS, best_interval
from tandem.wire.status import CheckpointRef
from tandem_trainer.save_interval import (
    MAX_COSTS,
    MAX_FAILURES,
    FailureCount,
    SaveInterval,
    count_failures,
    recent_failures,
)

AUTO = CheckpointSpec(every="Auto")
CHECKPOINT = CheckpointRef(name="step-000000100", step=100, generation=1)


class Log:
    """A training log in memory."""

    def __init__(self) -> None:
        self.records: list[records.IntervalChosen] = []

    def append(self, *records: records.IntervalChosen) -> None:
        self.records += records


def begun(
    log: Log | None = None, count: FailureCount = FailureCount(), checkpoints: CheckpointSpec = AUTO
) -> SaveInterval:
    interval = SaveInterval(checkpoints, lambda: 0.0)
    interval.begin(log, lambda: count)
    return interval


@pytest.mark.parametrize(("settings", "seconds"), [({}, 60.0), ({"every_seconds": 7}, 7.0), ({"every_steps": 5}, None)])
def test_a_fixed_interval_is_that_of_the_job_whatever_saves_cost(
    settings: dict[str, float], seconds: float | None
) -> None:
    log = Log()
    interval = begun(log, checkpoints=CheckpointSpec(**settings))
    interval.saved(9.0, {"seconds": 100.0})
    assert interval.seconds == seconds
    assert interval.memory() == {}
    assert log.records == []


def test_auto_saves_every_minute_until_it_knows_what_a_save_costs() -> None:
    interval = begun(Log())
    assert interval.seconds == 60.0
    interval.saved(0.5, {})
    assert interval.seconds == best_interval(0.5, 0.0, 0, 0.0)


def test_the_cost_is_the_median_of_the_newest_saves() -> None:
    interval = begun(Log())
    for cost in (30.0, *[0.1] * MAX_COSTS):
        interval.saved(cost, {"seconds": 3.0})
    assert interval.seconds == best_interval(0.1, 3.0, 0, 0.0)


def test_changes_of_a_tenth_are_logged_with_what_they_follow_from() -> None:
    log = Log()
    interval = begun(log, FailureCount(3, 7200.0))
    interval.saved(1.0, {"seconds": 2.0})
    interval.saved(1.05, {"seconds": 2.0})
    assert len(log.records) == 1, "a twentieth is no news"
    interval.saved(4.0, {"seconds": 2.0})
    interval.saved(4.0, {"seconds": 2.0})
    first, second = log.records
    assert (first.save_seconds, first.write_seconds, first.failures, first.training_seconds) == (1.0, 2.0, 3, 7200.0)
    assert second.save_seconds == 2.525, "the median of four"
    assert second.seconds == pytest.approx(first.seconds * 2.525**0.5, rel=0.001)


def test_the_next_generation_goes_on_with_the_costs_of_its_checkpoint() -> None:
    interval = begun(Log())
    interval.saved(2.0, {"seconds": 5.0})
    restored = SaveInterval(AUTO, lambda: 0.0)
    restored.restore({"health": {}, **interval.memory()})
    restored.begin(log := Log(), lambda: FailureCount())
    assert restored.seconds == interval.seconds
    assert [record.seconds for record in log.records] == [pytest.approx(interval.seconds, abs=0.001)], (
        "it is shown again"
    )


def test_the_cost_of_the_save_that_is_restored_stands_in_the_log(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    chosen = records.IntervalChosen(time=1.0, save_seconds=3.0)
    generation(rundir, 1, 1000.0, 50.0, ends=True, chosen=chosen, steps=2_000)
    generation(rundir, 2, 1100.0, None)
    count = count_failures(rundir, 2)
    assert begun(Log(), count).seconds == best_interval(3.0, 0.0, 0, 50.0)


@pytest.mark.parametrize("memory", [None, [], {"costs": 3}, {"costs": ["much", -1.0, True]}, {"write": "long"}])
def test_damaged_memory_is_none(memory: object) -> None:
    interval = SaveInterval(AUTO, lambda: 0.0)
    interval.restore({"saveInterval": memory})
    interval.begin(Log(), lambda: FailureCount())
    assert interval.seconds == 60.0


def test_a_rank_without_the_log_looks_for_no_failures() -> None:
    interval = SaveInterval(AUTO, lambda: 0.0)
    interval.begin(None, lambda: pytest.fail("only rank 0's interval counts"))
    interval.saved(1.0, {})
    assert interval.seconds is not None
    assert interval.seconds <= MAX_SECONDS


def test_only_the_newest_failures_count_so_that_their_rate_is_followed() -> None:
    quiet, bad = [(1_000_000.0, True)] * 5, [(60.0, True)] * MAX_FAILURES
    assert recent_failures([*bad, *quiet]) == FailureCount(MAX_FAILURES, 600.0)
    assert recent_failures([(60.0, False), (40.0, True)]) == FailureCount(1, 100.0)


def generation(
    rundir: RunDir,
    number: int,
    at: float,
    seconds: float | None,
    ends: bool = False,
    continues: bool = False,
    chosen: records.IntervalChosen | None = None,
    steps: int = 1,
) -> None:
    """A generation whose log ends after so many seconds and steps; None: its log is on another node."""
    record = GenerationRecord(
        generation=number,
        resumed_from=None if number == 1 else CHECKPOINT,
        continues=Continuation(generation=number - 1, step=120) if continues else None,
        world_size=1,
        started_at=at,
    )
    assert rundir.record_generation(record)
    if seconds is None:
        return
    log = LogWriter(rundir.training_log(number))
    log.append(records.Start(time=at, step=0), *([chosen] if chosen else []))
    log.append(*(records.Step(time=at, step=step + 1) for step in range(steps)))
    log.append(records.Rate(time=at + seconds, step=steps))
    if ends:
        log.append(records.TrainingEnd(time=at + seconds, step=9, why="asked to leave"))
    log.close()


def test_failures_are_generations_that_were_lost_with_steps(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    generation(rundir, 1, 1000.0, 50.0)  # is killed
    generation(rundir, 2, 1100.0, 20.0, ends=True)  # saves and leaves
    generation(rundir, 3, 9000.0, 30.0)  # loses a member
    generation(rundir, 4, 9040.0, 5.0, continues=True)  # goes on without a restart, and is killed
    generation(rundir, 5, 9100.0, None)  # its node is gone, with its log
    generation(rundir, 6, 9200.0, None)
    assert count_failures(rundir, 6) == FailureCount(3, pytest.approx(105.0))
    assert count_failures(rundir, 3) == FailureCount(1, pytest.approx(70.0))
    assert count_failures(rundir, 1) == FailureCount()
