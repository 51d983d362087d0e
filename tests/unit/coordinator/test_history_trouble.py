"""What goes wrong and does not end a job is counted, and said when it begins and when it has doubled."""

import pytest

from tandem.wire.protocol import RankReport, Trouble
from tandem.wire.status import CheckpointRef, Corruption, Troubles, trouble_messages
from tandem_coordinator.base_watch import AgainstBase
from tandem_coordinator.history import TroubleWatch
from tandem_coordinator.log_followers import Training
from tandem_coordinator.run_watcher import Evaluations, Observed
from tandem_coordinator.weights_watch import Unchanged

FULL = "[Errno 28] No space left on device"
OLD = CheckpointRef(name="step-000000250", step=250, generation=1)
NEW = CheckpointRef(name="step-000000500", step=500, generation=2)


class World:
    """A watch, what it says, and what it looks at."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.watch = TroubleWatch(lambda text, level: self.said.append((level, text)), 1.0)
        self.observed = Observed(latest_checkpoint=OLD)
        self.now = 0.0
        self.look()

    def look(self, after: float = 0.0, **changes: object) -> Troubles | None:
        self.now += after
        self.observed = Observed(**{"latest_checkpoint": self.observed.latest_checkpoint, **changes})  # type: ignore[arg-type]
        self.watch.update(self.observed, 0, self.now)
        return self.watch.troubles

    def saves(self, failed: int, in_a_row: int, lines: int = 0) -> None:
        trouble = Trouble(saves_failed=failed, saves_failed_in_a_row=in_a_row, why=FULL, lines_lost=lines)
        self.watch.record([RankReport(rank=0, step=1, trouble=trouble), RankReport(rank=1, step=1)])


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_wrong_is_nothing_said(world: World) -> None:
    assert world.look() is None
    assert world.said == []


def test_failed_saves_are_said_when_they_begin_and_whenever_their_number_has_doubled(world: World) -> None:
    for number in range(1, 25):
        world.saves(number, number)
        world.look()
    assert [text.split(" have")[0].split(" has")[0] for _, text in world.said] == [
        "the disk is full: the last save",
        *(f"the disk is full: the last {number} saves" for number in (2, 4, 8, 16)),
    ]
    assert {level for level, _ in world.said} == {"error"}
    assert all(FULL in text for _, text in world.said)
    assert world.watch.troubles == Troubles(saves_failed=24, saves_failed_in_a_row=24, save_message=FULL)


def test_a_failed_save_that_the_log_tells_of_before_the_rank_is_not_told_of_twice(world: World) -> None:
    logged = Training(saves={"failed": 1})
    assert world.look(training=logged) is None
    world.saves(1, 1)
    assert world.look(0.5, training=logged) == Troubles(saves_failed=1, saves_failed_in_a_row=1, save_message=FULL)


def test_a_failed_save_that_the_log_alone_tells_of_counts(world: World) -> None:
    logged = Training(saves={"failed": 1})
    assert world.look(training=logged) is None
    assert world.look(3.0, training=logged) == Troubles(saves_failed=1)


def test_failed_saves_of_before_count_at_once(world: World) -> None:
    again = TroubleWatch(lambda text, level: world.said.append((level, text)), 1.0)
    again.update(Observed(training=Training(saves={"failed": 7})), 0, 0.0)
    assert again.troubles == Troubles(saves_failed=7)


def test_a_save_that_goes_well_ends_the_row_and_is_said(world: World) -> None:
    world.saves(3, 3)
    world.look()
    world.saves(3, 0)
    assert world.look() == Troubles(saves_failed=3)
    assert world.said[-1] == ("info", "a save succeeded again")


def test_a_new_group_goes_on_with_the_row_until_a_checkpoint_is_there(world: World) -> None:
    world.saves(3, 3)
    world.look()
    world.watch.begin()
    world.saves(1, 1)
    found = world.look()
    assert (found.saves_failed, found.saves_failed_in_a_row) == (4, 4)
    world.watch.begin()
    found = world.look(latest_checkpoint=NEW)
    assert found == Troubles(saves_failed=4)


def test_lost_lines_of_all_logs_are_added_up(world: World) -> None:
    world.saves(0, 0, lines=1_200)
    world.watch.update(Observed(lines_lost=70), 5, 0.0)
    assert world.watch.troubles == Troubles(lines_lost=1_275)
    assert world.said == [("error", "1,275 log lines have been lost: the disk refused them")]


def test_each_rewind_is_said_with_what_is_left_out_and_old_ones_are_not_said_again(world: World) -> None:
    world.look(rewinds=1, batches_left_out=60)
    world.look(rewinds=2, batches_left_out=120)
    world.look(rewinds=3, batches_left_out=180)
    assert world.said[0] == ("warning", "the loss became useless: training went back once and left out 60 batches")
    assert world.said[2][1].endswith("went back 3 times and left out 180 batches")
    again = World()
    again.watch = TroubleWatch(lambda text, level: again.said.append((level, text)), 1.0)
    again.look(rewinds=3, batches_left_out=180)
    assert again.said == []
    assert again.watch.troubles == Troubles(rewinds=3, batches_left_out=180)


def test_each_time_a_micro_batch_is_halved_is_said_with_what_is_left_of_it(world: World) -> None:
    world.look(limits=(4,))
    assert world.look(limits=(4, 2)) == Troubles(micro_batches_halved=2, micro_batch=2)
    world.look(limits=(4, 2, 1))
    assert world.said == [
        ("warning", "out of memory: the micro-batch was halved once, to 4 samples at the most"),
        ("warning", "out of memory: the micro-batch was halved 2 times, to 2 samples at the most"),
        ("warning", "out of memory: the micro-batch was halved 3 times, to 1 sample at the most"),
    ]
    again = World()
    again.watch = TroubleWatch(lambda text, level: again.said.append((level, text)), 1.0)
    again.look(limits=(4, 2))
    assert again.said == []


def test_a_worker_that_is_left_out_is_a_trouble_that_was_announced_already(world: World) -> None:
    world.watch.exclusion_message = "worker-1 is left out: the group failed 3 times in a row because of it"
    found = world.look()
    assert found == Troubles(exclusion_message=world.watch.exclusion_message)
    assert [(one.reason, one.text) for one in trouble_messages(found)] == [
        ("WorkerExcluded", world.watch.exclusion_message)
    ]
    assert world.said == []


def test_samples_that_are_left_out_are_said_once(world: World) -> None:
    """Also by a coordinator that starts later."""
    training = Training(filtered_samples="of 90, 60 without anything that is learned")
    for _ in range(2):
        found = world.look(training=training)
        assert found == Troubles(samples_message=training.filtered_samples)
    assert world.said == [("warning", f"samples are left out of training: {training.filtered_samples}")]
    again = World()
    again.watch = TroubleWatch(lambda text, level: again.said.append((level, text)), 1.0)
    again.look(training=training)
    assert again.said == []


def test_an_evaluation_that_failed_is_an_error_and_one_that_was_skipped_is_not(world: World) -> None:
    world.look(evaluations=Evaluations(failed=1, failure="step-000000250: it cannot be read", skipped=3))
    assert world.said == [
        ("error", "1 checkpoint could not be evaluated: step-000000250: it cannot be read"),
        ("info", "3 checkpoints have been skipped by evaluators"),
    ]


def test_weights_that_do_not_change_are_said_and_so_is_the_end_of_it(world: World) -> None:
    for count in (1, 2, 3):
        world.look(unchanged=Unchanged(count, f"{count} repeat"))
    world.look()
    assert world.said == [
        ("warning", "1 repeat"),
        ("warning", "2 repeat"),
        ("info", "the newest checkpoint has other weights than the one before"),
    ]


def test_wrong_numbers_are_said_when_they_are_found_and_when_there_are_twice_as_many(world: World) -> None:
    for count in (1, 1, 2, 3, 4):
        found = Corruption(reason="RanksDiffer", count=count, message="rank 1 differs")
        assert world.look(corruptions=[found]) == Troubles(corruptions=[found])
    assert world.said == [
        ("error", "rank 1 differs"),
        ("error", "rank 1 differs (2 times)"),
        ("error", "rank 1 differs (4 times)"),
    ]


def test_wrong_numbers_are_those_of_the_last_look_and_name_the_checkpoint_from_before(world: World) -> None:
    found = Corruption(reason="RanksDiffer", count=4, message="rank 1 differs")
    world.look(corruptions=[found], latest_checkpoint=NEW)
    assert world.watch.corruption == (
        "rank 1 differs (4 times); the newest checkpoint from before it was found: step-000000250"
    )
    world.look(corruptions=[found])
    assert world.watch.corruption == ""
    # Each time counts, also where it is not said again.
    world.look(corruptions=[found.model_copy(update={"count": 5})])
    assert world.watch.corruption.endswith("(5 times); the newest checkpoint from before it was found: step-000000500")
    world.look(unchanged=Unchanged(1, "1 repeats"))
    assert world.watch.corruption.startswith("1 repeats; ")


def test_wrong_numbers_of_the_time_of_another_coordinator_are_none_of_the_last_look(world: World) -> None:
    again = World()
    again.watch = TroubleWatch(lambda text, level: None, 1.0)
    again.look(corruptions=[Corruption(reason="RanksDiffer", message="rank 1 differs")])
    assert again.watch.corruption == ""


def test_checkpoints_that_are_worse_than_the_base_model_are_said_once_and_so_is_the_end_of_it(world: World) -> None:
    worse = AgainstBase(worse=3, message="the last 3 are worse")
    for _ in range(3):
        assert world.look(against_base=worse) == Troubles(worse_than_base=3, base_message="the last 3 are worse")
    assert world.look() is None
    world.look(against_base=worse)
    better = "the newest evaluated checkpoint is no worse than the base model"
    assert world.said == [
        ("warning", "the last 3 are worse"),
        ("info", better),
        ("warning", "the last 3 are worse"),
    ]


def test_what_a_coordinator_before_this_one_has_said_is_not_said_again() -> None:
    said: list[str] = []
    watch = TroubleWatch(lambda text, level: said.append(text), 1.0)
    for _ in range(2):
        watch.update(Observed(against_base=AgainstBase(worse=3, message="worse")), 0, 0.0)
    assert said == []


def test_a_tracking_server_that_is_away_is_said_once_and_once_when_it_has_everything(world: World) -> None:
    for why in ("connection refused", "connection refused", "it has timed out", ""):
        world.watch.tracking_message = why
        found = world.look(1.0)
        assert (found.tracking_message if found else "") == why
    assert world.said == [
        ("warning", "tracking: connection refused; training goes on, and what is missing is sent later"),
        ("info", "tracking: everything has been sent"),
    ]
