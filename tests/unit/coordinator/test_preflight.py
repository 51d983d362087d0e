"""What follows from a pre-flight: who is left out and why, and when the ranks may start."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tandem.wire.protocol import Pair, PreflightReport
from tandem_coordinator.membership import answer
from tandem_coordinator.preflight import LIMIT_SECONDS, SETTLE_SECONDS, Suspect, judge
from tests.support.worlds.membership_job import RULES, Job, message

FOUR = ("worker-0", "worker-1", "worker-2", "worker-3")
RATE = 1e9
MIXED = {"worker-0": "a", "worker-1": "a", "worker-2": "b", "worker-3": "c"}

Reports = dict[str, PreflightReport]


def report(**found: Any) -> PreflightReport:
    return PreflightReport(**{"generation": 1, "product_seconds": 0.005, "all_reduce": "right"} | found)


def reports(
    members: tuple[str, ...] = FOUR,
    rates: Mapping[tuple[str, str], float | None] | None = None,
    **changed: dict[str, Any],
) -> Reports:
    """Sound ones, but for these rates of pairs and these fields of members."""
    own = rates or {}
    found = {}
    for name in members:
        pairs = [
            Pair(replica=other, bytes_per_second=own.get((name, other), own.get((other, name), RATE)))
            for other in members
            if other != name
        ]
        more = changed.get(name.replace("-", "_"), {})
        found[name] = report(**{"pairs": pairs, "all_reduce": None if None in own.values() else "right"} | more)
    return found


def judged(found: Reports, members: tuple[str, ...] = FOUR, places: Mapping[str, str] | None = None) -> list[Suspect]:
    return judge(members, found, places or dict.fromkeys(members, "here"))


# The judge


def test_nothing_is_found_where_all_is_well() -> None:
    assert judged(reports()) == []
    assert judged(reports(FOUR[:1]), FOUR[:1]) == []


def test_a_wrong_result_is_its_members_fault_whatever_the_others_say() -> None:
    found = reports(
        rates={("worker-1", "worker-2"): None},
        worker_2={"wrong": "computed a matrix product with 3 of 512 rows wrong (rank 2)"},
    )
    assert judged(found) == [Suspect("worker-2", "computed a matrix product with 3 of 512 rows wrong (rank 2)")]


@pytest.mark.parametrize(
    ("broken", "culprit", "why"),
    [
        ([(3, 0), (3, 1), (3, 2)], "worker-3", "and worker-0, worker-1, worker-2 do not reach each other"),
        ([(0, 1), (0, 2), (0, 3)], "worker-0", "and worker-1, worker-2, worker-3 do not reach each other"),
        ([(1, 2), (1, 3)], "worker-1", "and worker-2, worker-3 do not reach each other"),
        ([(1, 2)], "worker-2", "and worker-1 do not reach each other"),
    ],
)
def test_of_pairs_that_do_not_reach_each_other_the_one_with_more_of_them_has_to_go(
    broken: list[tuple[int, int]], culprit: str, why: str
) -> None:
    rates: dict[tuple[str, str], float | None] = {(FOUR[a], FOUR[b]): None for a, b in broken}
    assert judged(reports(rates=rates)) == [Suspect(culprit, why)]


def test_a_member_that_cannot_reach_the_store_is_at_fault_while_the_others_have_not_told_anything_yet() -> None:
    lonely = report(pairs=[Pair(replica="worker-0")], product_seconds=None, all_reduce=None)
    assert judged({"worker-3": lonely}) == [Suspect("worker-3", "and worker-0 do not reach each other")]
    three = dict.fromkeys(FOUR[1:], lonely)
    assert [found.replica for found in judged(three)] == ["worker-0"], "nobody reaches its store"


def test_a_member_that_tells_nothing_has_failed() -> None:
    found = reports()
    del found["worker-1"]
    assert judged(found) == [Suspect("worker-1", "sent no pre-flight report", "failed")]


def test_a_wrong_sum_is_the_fault_of_the_only_one_that_has_it() -> None:
    assert [found.replica for found in judged(reports(worker_1={"all_reduce": "wrong"}))] == ["worker-1"]
    everywhere = {name: report(all_reduce="wrong") for name in FOUR}
    assert judged(everywhere) == [Suspect("", "the sum over all ranks is wrong everywhere", "failed")]
    (nowhere,) = judged(reports(worker_3={"all_reduce": "failed"}))
    assert (nowhere.replica, nowhere.kind) == ("", "failed")


@pytest.mark.parametrize(("seconds", "slow"), [(0.014, False), (0.016, True)])
def test_three_times_the_median_is_slow(seconds: float, slow: bool) -> None:
    found = judged(reports(worker_2={"product_seconds": seconds}))
    assert [one.replica for one in found] == (["worker-2"] if slow else [])
    if slow:
        why = "took 16 ms for a matrix product, 3.2 times as long as the median of 5 ms"
        assert found == [Suspect("worker-2", why, "slow")]


def test_of_two_nobody_knows_which_is_the_slow_one() -> None:
    assert judged(reports(FOUR[:2], worker_1={"product_seconds": 1.0}), FOUR[:2]) == []


@pytest.mark.parametrize("members", [FOUR[:3], FOUR])
def test_who_is_slow_with_all_of_its_peers_is_the_slow_one_and_not_they(members: tuple[str, ...]) -> None:
    found = judged(reports(members, {("worker-1", other): RATE / 10 for other in members}), members)
    why = "exchanges 100 MB/s with most of the others, 10.0 times less than the median of 1.0 GB/s"
    assert found == [Suspect("worker-1", why, "slow")]


def test_one_slow_pair_is_no_slow_member() -> None:
    assert judged(reports(rates={("worker-1", "worker-2"): RATE / 100})) == []


def test_a_member_alone_on_its_node_is_not_slow_because_others_share_one() -> None:
    rates: dict[tuple[str, str], float | None] = {("worker-0", "worker-1"): 20 * RATE}
    assert judged(reports(rates=rates), places=MIXED) == []
    assert judged(reports(FOUR[:3], rates), FOUR[:3], MIXED) == []


# The machine


def group(members: int = 4, **rules: Any) -> Job:
    job = Job(target=members, rules=replace(RULES, preflight=True, **rules))
    job.nodes = {name: f"node-{name[-1]}" for name in FOUR}
    for name in FOUR[:members]:
        job.joins(name)
    job.passes(0.2)
    return job


def tell(job: Job, found: Reports) -> None:
    number = job.state.number
    for name, told in found.items():
        if job.state.open and job.state.number == number:
            job.runs(name, number, preflight=told.model_copy(update={"generation": number}))


def may_start(job: Job, replica: str) -> bool:
    told = answer(job.state, message(replica, "running", generation=job.state.number), job.state.number)
    return told.order == "run" and not told.preflight


def test_ranks_start_once_all_members_have_passed() -> None:
    job = group()
    told = job.joins("worker-0")
    assert (told.order, told.preflight) == ("run", True), "asked together with the generation"
    tell(job, reports(FOUR[:3]))
    assert not may_start(job, "worker-0")
    tell(job, {"worker-3": reports()["worker-3"]})
    assert all(may_start(job, name) for name in FOUR)
    assert job.closings() == []
    assert any("the pre-flight passed" in text and "1.0 GB/s" in text for text in job.said())


def test_nobody_is_asked_where_it_is_switched_off() -> None:
    job = group()
    off = Job(target=4)
    for name in FOUR:
        off.joins(name)
    assert job.state.preflight is not None
    assert off.state.preflight is None
    assert may_start(off, "worker-0")


def test_members_that_have_passed_are_asked_again_only_with_a_new_one() -> None:
    job = group()
    tell(job, reports())
    job.say("worker-3", "leaving", generation=1)
    job.passes(12.0)
    assert (job.members(), job.state.preflight) == (list(FOUR[:3]), None)
    job.joins("worker-3", incarnation="b")
    job.passes(40.0)
    assert job.members() == list(FOUR)
    assert job.state.preflight is not None


def test_who_is_to_blame_for_a_failure_has_to_pass_again() -> None:
    job = group()
    tell(job, reports())
    for name in FOUR:
        job.runs(name, 1, reason="WorkerFailed" if name == "worker-2" else "")
    job.passes(12.0)
    assert job.members() == list(FOUR)
    assert job.state.preflight is not None


def test_a_wrong_member_is_left_out_at_once_and_the_reason_says_which_and_why() -> None:
    job = group()
    tell(job, {"worker-2": report(wrong="computed a matrix product with 3 of 512 rows wrong (rank 2)")})
    told = job.joins("worker-2", incarnation="b")
    assert (told.order, told.left_out) == ("end", True)
    job.passes(12.0)
    assert job.members() == ["worker-0", "worker-1", "worker-3"]
    assert job.state.latest.reason == "PreflightFailed"
    assert job.state.cause.detail == (
        "worker-2 (node node-2) is left out after the pre-flight: "
        "it computed a matrix product with 3 of 512 rows wrong (rank 2)"
    )
    assert job.state.failures == 0
    assert job.state.preflight is not None, "none of the others has passed one"
    tell(job, reports(("worker-0", "worker-1", "worker-3")))
    assert may_start(job, "worker-0")


def test_a_slow_member_that_cannot_be_left_out_trains_and_is_told_of() -> None:
    job = group(minimum=4)
    tell(job, reports(worker_1={"product_seconds": 1.0}))
    assert may_start(job, "worker-1")
    assert any("worker-1 took 1000 ms" in text and "cannot be left out" in text for text in job.said())


def test_a_wrong_member_that_cannot_be_left_out_never_trains() -> None:
    job = group(minimum=4, max_restarts=2)
    for _ in range(3):
        assert job.state.preflight is not None
        tell(job, {"worker-2": report(wrong="could not compute a matrix product (rank 2)")})
        job.passes(12.0)
    assert job.closings()[:3] == ["PreflightFailed"] * 3
    assert job.failed()


def test_a_member_that_reaches_nobody_is_left_out_without_waiting_for_those_that_wait_for_it() -> None:
    job = group()
    tell(job, {"worker-3": report(pairs=[Pair(replica="worker-0")], product_seconds=None, all_reduce=None)})
    job.passes(SETTLE_SECONDS + 0.2)
    assert "PreflightFailed" in job.closings()
    assert job.joins("worker-3").left_out


def test_a_member_that_does_not_tell_in_time_is_to_blame() -> None:
    job = group(max_restarts=10)
    tell(job, reports(FOUR[:3]))
    job.passes(LIMIT_SECONDS + 0.2)
    assert job.closings() == ["PreflightFailed"]
    assert [one.replica for one in job.state.strikes] == ["worker-3"]
    assert job.state.failures == 1


def test_a_report_of_another_generation_or_process_says_nothing() -> None:
    job = group()
    for name in FOUR:
        job.runs(name, 1, preflight=report(generation=7))
    assert job.state.preflight.reports == {}
