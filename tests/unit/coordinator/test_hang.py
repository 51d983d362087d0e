"""A group that hangs is noticed from what its ranks report, and nobody else is."""

import pytest

from tandem.wire.protocol import RankReport
from tandem_coordinator.hang import HangWatch

TRAINING, OTHER, HEARTBEAT = 10.0, 40.0, 1.0


class Group:
    """Two replicas of one rank each that report once a second."""

    def __init__(self, generation: int = 4) -> None:
        self.watch = HangWatch(TRAINING, OTHER, HEARTBEAT)
        self.watch.begin(generation)
        self.generation, self.now = generation, 500.0
        self.ranks = {
            "worker-0": RankReport(rank=0, step=0, phase="starting"),
            "worker-1": RankReport(rank=1, step=0, phase="starting"),
        }

    def at(self, replica: str, **more: object) -> None:
        self.ranks[replica] = self.ranks[replica].model_copy(update=more)

    def report(self, replica: str) -> None:
        self.watch.record(replica, self.generation, [self.ranks[replica]], self.now)

    def passes(self, seconds: float) -> str | None:
        """Time passes, and all report; what the watch says first."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.report("worker-0" if self.now % 1.0 else "worker-1")
            if (verdict := self.watch.verdict()) is not None:
                return verdict
        return None

    def all_at(self, **more: object) -> "Group":
        for replica in self.ranks:
            self.at(replica, **more)
        return self

    def hangs(self, *words: str, seconds: float = 30.0) -> float:
        """Assert what the watch says within so long; returns the seconds until then."""
        began, verdict = self.now, self.passes(seconds)
        assert verdict is not None
        assert [each for each in words if each not in verdict] == []
        return self.now - began

    def steps(self, seconds: float) -> None:
        """Both ranks train for so long, a step a second."""
        for _ in range(int(seconds)):
            for replica, rank in self.ranks.items():
                self.at(replica, step=rank.step + 1, phase="train")
            assert self.passes(1.0) is None


def trained() -> Group:
    """A group that has made five steps."""
    group = Group()
    group.steps(5)
    return group


def test_a_group_that_makes_steps_does_not_hang() -> None:
    group = Group()
    group.steps(100)


@pytest.fixture
def group() -> Group:
    return trained()


def test_a_group_without_a_step_hangs_and_the_rank_that_is_stopped_is_named(group: Group) -> None:
    group.at("worker-1", phase="stopped")
    words = "rank 1 (worker-1) is stopped at step 5", "no rank has made a step for 10 s", "stacks/g000004"
    assert TRAINING - 1.0 <= group.hangs(*words) <= TRAINING + 2.0


def test_a_rank_that_is_stopped_while_it_starts_does_not_get_the_time_of_a_slow_start() -> None:
    group = Group()
    assert group.passes(5.0) is None
    group.at("worker-1", phase="stopped")
    assert group.hangs("rank 1 (worker-1) is stopped") <= TRAINING + 2.0


def test_the_rank_that_is_behind_is_named(group: Group) -> None:
    group.at("worker-0", step=6)
    group.hangs("rank 1 (worker-1) is stuck at step 5, others at 6")


def test_the_rank_whose_last_step_is_the_oldest_is_named(group: Group) -> None:
    group.at("worker-0", step=6)
    assert group.passes(5.0) is None
    group.at("worker-1", step=6)
    group.hangs("rank 0 (worker-0) seems to be stuck at step 6")


def test_where_nobody_can_be_named_all_are(group: Group) -> None:
    group.hangs("all ranks are stuck at step 5")


def test_one_rank_that_still_makes_steps_is_enough(group: Group) -> None:
    for step in range(6, 60):
        group.at("worker-0", step=step)
        assert group.passes(1.0) is None


def test_starting_and_the_first_step_take_longer_and_are_not_endless() -> None:
    group = Group()
    assert group.passes(30.0) is None
    group.all_at(phase="train", step=100)
    assert group.passes(30.0) is None, "the next step is the first that is seen; it may compile"
    group.hangs("rank 0 (worker-0), rank 1 (worker-1) are still at the first step")

    group = Group()
    group.hangs("no rank has made progress for 40 s", "still starting", seconds=60.0)


def test_a_rank_that_saves_gives_all_the_longer_time(group: Group) -> None:
    group.at("worker-0", phase="saving")
    assert group.passes(30.0) is None
    group.hangs("rank 0 (worker-0) is still saving")


def test_ranks_that_have_made_all_their_steps_do_not_hang_in_training(group: Group) -> None:
    group.all_at(total_steps=6, step=6)
    assert group.passes(30.0) is None
    group.hangs("still ending")


def test_the_coordinators_own_standstill_is_no_hang(group: Group) -> None:
    group.now += 3600.0
    for replica in group.ranks:
        group.report(replica)
    assert group.watch.verdict() is None, "these reports are from before it stood still"
    group.steps(5)


def test_a_network_that_delivers_old_reports_in_a_heap_is_no_hang(group: Group) -> None:
    group.now += 3600.0
    for _ in range(1000):
        group.report("worker-0")
    assert group.watch.verdict() is None


def test_ranks_that_do_not_report_never_hang() -> None:
    watch = HangWatch(TRAINING, OTHER, HEARTBEAT)
    watch.begin(1)
    for second in range(1000):
        watch.record("worker-0", 1, [], float(second))
        assert watch.verdict() is None


def test_what_an_older_generation_says_counts_for_nothing(group: Group) -> None:
    group.watch.begin(5)
    for _ in range(100):
        group.now += 1.0
        group.report("worker-0")
    assert group.watch.verdict() is None


def test_a_replica_that_is_gone_is_not_blamed(group: Group) -> None:
    group.at("worker-1", phase="stopped")
    assert group.passes(5.0) is None
    group.watch.forget("worker-1")
    until = group.now + 20.0
    while group.now < until and group.watch.verdict() is None:
        group.now += 1.0
        group.report("worker-0")
    assert "worker-1" not in group.watch.verdict()


def test_a_process_that_goes_on_after_a_short_stop_has_not_hung(group: Group) -> None:
    for _ in range(10):
        group.at("worker-1", phase="stopped")
        assert group.passes(5.0) is None
        group.steps(1)


def test_a_script_of_whose_steps_nothing_is_known_never_hangs() -> None:
    group = Group().all_at(phase="script")
    assert group.passes(10 * OTHER) is None


def test_a_script_whose_ranks_do_nothing_is_told_of_once_and_goes_on() -> None:
    group = Group().all_at(phase="script", cpu=0.001, gpu=0.0)
    assert group.passes(TRAINING - 2.0) is None
    assert group.watch.idle() is None
    assert group.passes(4.0) is None
    told = group.watch.idle()
    assert told.startswith("no rank has used a processor or a GPU for 1")
    assert "stacks/g000004" in told
    assert group.passes(OTHER) is None
    assert group.watch.idle() is None


def test_how_long_a_script_has_done_nothing_is_counted_until_it_does_something() -> None:
    group = Group().all_at(phase="script", cpu=0.001, gpu=0.0)
    group.passes(4.0 * TRAINING)
    idle = group.watch.idle_seconds()
    assert idle is not None
    assert idle == pytest.approx(4.0 * TRAINING, abs=5.0)
    group.at("worker-1", phase="script", cpu=0.9)
    group.passes(1.0)
    assert group.watch.idle_seconds() == 0.0
    group.watch.begin(5)
    assert group.watch.idle_seconds() is None, "nothing is heard of the next group yet"


def test_of_ranks_that_tell_their_steps_it_is_not_counted_that_they_do_nothing() -> None:
    group = Group()
    group.at("worker-0", phase="script", cpu=0.001)
    group.at("worker-1", phase="train", cpu=0.001)
    group.passes(TRAINING - 1.0)
    assert group.watch.idle_seconds() is None


@pytest.mark.parametrize(
    "busy", [{"cpu": 0.3}, {"cpu": 0.001, "gpu": 0.5}, {"cpu": None}, {"cpu": 0.001, "phase": "train"}]
)
def test_one_rank_that_works_or_may_is_enough(busy: dict[str, object]) -> None:
    group = Group()
    group.at("worker-0", phase="script", cpu=0.001)
    group.at("worker-1", **{"phase": "script", **busy})
    group.passes(TRAINING - 1.0)
    for _ in range(5):
        group.passes(2.0)
        assert group.watch.idle() is None


def test_a_script_whose_process_is_stopped_hangs_and_no_sooner() -> None:
    group = Group().all_at(phase="script")
    group.passes(20.0)
    group.at("worker-1", phase="stopped")
    assert group.passes(TRAINING - 2.0) is None
    group.hangs("rank 1 (worker-1) has been stopped for 10 s", "stacks/g000004", seconds=4.0)


def test_a_script_that_was_stopped_for_a_moment_does_not_hang() -> None:
    group = Group().all_at(phase="script")
    for _ in range(4):
        group.at("worker-1", phase="stopped")
        assert group.passes(TRAINING - 2.0) is None
        group.at("worker-1", phase="script")
        assert group.passes(2.0) is None


def test_a_stopped_script_whose_replica_is_gone_accuses_nobody() -> None:
    group = Group().all_at(phase="script")
    group.at("worker-1", phase="stopped")
    assert group.passes(TRAINING - 2.0) is None
    group.watch.forget("worker-1")
    for _ in range(20):
        group.now += 1.0
        group.report("worker-0")
        assert group.watch.verdict() is None


def test_a_group_in_which_one_rank_validates_does_not_hang_until_it_trains_again(group: Group) -> None:
    group.at("worker-0", phase="validation", pauses=True)
    assert group.passes(100 * OTHER) is None
    group.at("worker-0", phase="train", pauses=False)
    assert group.hangs("no rank has made a step") >= TRAINING - 1.0


def test_a_group_one_of_whose_ranks_is_in_a_debugger_does_not_hang_until_it_trains_again(group: Group) -> None:
    group.at("worker-1", phase="debugger", pauses=True)
    assert group.passes(100 * OTHER) is None
    group.at("worker-1", phase="train", pauses=False)
    group.hangs("no rank has made a step")


def test_a_script_in_a_debugger_is_not_called_idle() -> None:
    group = Scripts()
    group.at("worker-0", phase="script", script=True, cpu=0.0)
    group.at("worker-1", phase="debugger", script=True, cpu=0.0, pauses=True)
    assert group.passes(5 * OTHER) is None
    assert group.watch.idle() is None
    group.at("worker-1", phase="script", pauses=False)
    assert group.passes(5 * OTHER) is None
    assert "no rank has used a processor" in str(group.watch.idle())


def test_a_process_that_is_stopped_in_a_pause_is_noticed(group: Group) -> None:
    group.at("worker-0", phase="validation", pauses=True)
    group.at("worker-1", phase="stopped")
    group.hangs("rank 1 (worker-1) has been stopped")


class Scripts(Group):
    """Two ranks of a script, of which nothing is known before it logs a step."""

    def __init__(self) -> None:
        super().__init__()
        self.all_at(phase="script", script=True)

    def logs(self, seconds: float, *replicas: str, every: float = 1.0) -> None:
        """These log a step now and then, for so long."""
        for _ in range(int(seconds / every)):
            for replica in replicas:
                self.at(replica, step=self.ranks[replica].step + 1, phase="train")
            assert self.passes(every) is None


def test_a_script_that_logs_no_step_never_hangs() -> None:
    assert Scripts().passes(100 * OTHER) is None


def test_a_script_that_stops_logging_hangs_and_who_never_logged_is_not_named() -> None:
    group = Scripts()
    group.logs(5.0, "worker-1")
    seconds = group.hangs("no rank has made a step for 10 s; rank 1 (worker-1) is at step 5; the stacks")
    assert TRAINING - 1.0 <= seconds <= TRAINING + 2.0
    assert group.watch.culprit() == "", "it may wait for the other one"


def test_where_all_ranks_log_who_is_behind_is_named() -> None:
    group = Scripts()
    group.logs(5.0, "worker-0", "worker-1")
    group.at("worker-0", step=6)
    group.hangs("rank 1 (worker-1) is stuck at step 5, others at 6")


def test_the_time_before_the_second_step_of_a_script_may_be_of_any_length() -> None:
    group = Scripts()
    group.at("worker-0", step=1, phase="train")
    assert group.passes(100 * OTHER) is None


def test_a_rank_that_logged_once_holds_up_no_verdict_on_those_that_go_on_logging() -> None:
    group = Scripts()
    group.at("worker-1", step=1, phase="train")
    group.logs(5.0, "worker-0")
    assert group.passes(3 * TRAINING) is not None


def test_a_script_that_logs_rarely_gets_twice_the_longest_time_between_its_steps() -> None:
    group = Scripts()
    group.logs(10 * TRAINING, "worker-0", every=2.5 * TRAINING)
    stepped = group.now - 2.5 * TRAINING
    assert group.passes(10 * TRAINING) is not None
    assert 5 * TRAINING - 2.0 <= group.now - stepped <= 5 * TRAINING + 2.0


def test_a_rank_that_is_stopped_gets_no_more_than_the_hang_time_all_the_same() -> None:
    group = Scripts()
    group.logs(10 * TRAINING, "worker-0", every=2.5 * TRAINING)
    group.at("worker-0", step=5)
    assert group.passes(1.0) is None
    group.at("worker-1", phase="stopped")
    assert group.hangs("rank 1 (worker-1) has been stopped", seconds=10 * TRAINING) <= TRAINING + 2.0


def test_what_follows_the_last_step_of_a_script_may_take_any_time() -> None:
    group = Scripts()
    group.at("worker-0", total_steps=5)
    group.logs(5.0, "worker-0")
    assert group.passes(100 * OTHER) is None


def test_a_rank_that_has_ended_is_waited_for_no_more() -> None:
    group = Scripts()
    group.logs(5.0, "worker-0")
    group.at("worker-0", phase="script")
    assert group.passes(100 * OTHER) is None


def test_a_script_that_pauses_does_not_hang() -> None:
    group = Scripts()
    group.logs(5.0, "worker-0")
    group.at("worker-0", phase="validation", pauses=True)
    assert group.passes(100 * OTHER) is None


def test_a_script_that_logs_is_not_called_idle() -> None:
    group = Scripts()
    group.all_at(cpu=0.0)
    group.logs(5 * TRAINING, "worker-0")
    assert group.watch.idle() is None
    assert group.watch.idle_seconds() is None
