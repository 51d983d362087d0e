"""A rank that is much slower than the rest for a while is named, and cleared when it keeps up again."""

from tandem.wire.protocol import RankReport
from tandem_coordinator.straggler import SLOW_SECONDS, StragglerWatch


class Group:
    """Ranks with the time that their own work of a step takes, looked at once a second."""

    def __init__(self, *busy: float | None) -> None:
        self.watch, self.now, self.busy = StragglerWatch(), 100.0, list(busy)

    def passes(self, seconds: float) -> list[str]:
        told = []
        for _ in range(int(seconds)):
            self.now += 1.0
            reports = [
                (f"worker-{rank}", RankReport(rank=rank, step=1, busy_seconds=busy))
                for rank, busy in enumerate(self.busy)
            ]
            told += self.watch.update(reports, self.now)
        return told

    def named(self) -> dict[int, float]:
        return {straggler.rank: straggler.ratio for straggler in self.watch.stragglers}


def test_a_slow_rank_is_named_once_with_its_ratio_and_cleared_once() -> None:
    group = Group(0.10, 0.11, 0.21, 0.10)
    assert group.passes(SLOW_SECONDS) == []
    assert group.passes(60) == ["rank 2 (worker-2) is slow: its work takes 2.1 times the median"]
    assert group.named() == {2: 2.1}
    group.busy[2] = 0.25
    assert group.passes(5) == []
    assert group.named() == {2: 2.5}, "the ratio is that of now"
    group.busy[2] = 0.1
    assert group.passes(SLOW_SECONDS) == []
    assert group.passes(60) == ["rank 2 (worker-2) keeps up again"]
    assert group.named() == {}


def test_of_two_ranks_the_slower_one_is_named() -> None:
    group = Group(0.3, 0.1)
    group.passes(SLOW_SECONDS)
    assert group.watch.excess_seconds == 0.0
    group.passes(SLOW_SECONDS)
    assert group.named() == {0: 3.0}
    assert round(group.watch.excess_seconds, 6) == 0.2, "so long the other one waits in each step"


def test_a_slow_moment_accuses_nobody() -> None:
    group = Group(0.1, 0.1, 0.1)
    for _ in range(10):
        group.busy[1] = 0.9
        assert group.passes(SLOW_SECONDS - 2) == []
        group.busy[1] = 0.1
        assert group.passes(2) == []
    assert group.named() == {}


def test_a_rank_at_the_border_is_named_once() -> None:
    group = Group(0.10, 0.10, 0.16)
    told = group.passes(30)
    for _ in range(20):
        group.busy[2] = 0.14
        told += group.passes(15)
        group.busy[2] = 0.16
        told += group.passes(15)
    assert len(told) == 1


def test_ranks_that_do_not_say_how_long_they_work_are_left_alone() -> None:
    group = Group(0.1, None, None)
    assert group.passes(60) == []
    group = Group(None, None)
    assert group.passes(60) == []
    group = Group(0.0, 0.0, 0.1)
    assert group.passes(60) == []


def test_a_slow_rank_that_leaves_is_named_no_longer_and_a_new_generation_starts_afresh() -> None:
    group = Group(0.1, 0.1, 0.3)
    group.passes(30)
    group.busy.pop()
    assert group.passes(5) == []
    assert group.named() == {}
    group.busy.append(0.3)
    group.passes(30)
    group.watch.begin()
    assert group.named() == {}
    assert group.passes(SLOW_SECONDS) == []
