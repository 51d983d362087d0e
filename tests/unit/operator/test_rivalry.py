"""Two jobs that each hold a part of what the other needs do not wait for ever."""

from typing import Any

from tandem_operator.observed import Pod
from tandem_operator.plan import Plan
from tandem_operator.rivalry import GAVE_WAY, LONGEST_PATIENCE_SECONDS, WAY_SECONDS, Claimant
from tests.support.worlds.operator_job import (
    IDLE,
    NOW,
    decided,
    heard,
    initialized,
    job,
    made,
    removed,
    surroundings,
    worker,
)

TWO = {"replicas": 2, "minReplicas": 2}
OLDER = Claimant(NOW - 5000, "a", "older")
YOUNGER = Claimant(NOW - 10, "z", "younger")


def half(since: float = 60.0) -> tuple[Pod, Pod]:
    """One worker is placed, the other finds no node."""
    return worker(0), worker(1, phase="Pending", ready=False, waiting="Unschedulable", created=NOW - since)


def starved(*others: Claimant, since: float = 60.0, status: dict[str, Any] | None = None, **more: Any) -> Plan:
    of = job(status=status or initialized(phase="Starting"), workers=TWO)
    facts: dict[str, Any] = {"heard": heard("Starting", worldSize=None), "idle": IDLE, "created": NOW - 100, **more}
    return decided(of, surroundings(of, *half(since)), others=others, **facts)


def test_the_younger_gives_its_pods_back() -> None:
    plan = starved(OLDER)
    assert sorted(removed(plan)) == ["digits-worker-0-aaaaa", "digits-worker-1-aaaaa"]
    assert made(plan) == []
    assert "gave its workers back to older" in (plan.status.message or "")


def test_the_older_keeps_them() -> None:
    assert removed(starved(YOUNGER)) == []


def test_a_moment_is_not_enough() -> None:
    assert removed(starved(OLDER, since=5.0)) == []


def test_a_job_that_waits_alone_keeps_what_it_has() -> None:
    assert removed(starved(since=10_000.0)) == []


def test_the_oldest_gives_way_in_the_end_because_it_may_want_more_than_there_is() -> None:
    assert len(removed(starved(YOUNGER, since=LONGEST_PATIENCE_SECONDS))) == 2


def test_a_job_that_trains_with_what_it_has_never_gives_way() -> None:
    assert removed(starved(OLDER, heard=heard("Running", worldSize=1), idle=None)) == []


def test_who_gave_way_keeps_out_for_a_while_and_then_tries_again() -> None:
    of = job(status=initialized(phase="Starting"), workers=TWO)
    gave = starved(OLDER).status
    waiting = of.model_copy(update={"status": gave})
    silent = {"heard": heard("Pending", worldSize=None), "idle": IDLE}
    during = decided(waiting, surroundings(of), now=NOW + WAY_SECONDS - 1, **silent)
    assert (made(during), during.status.conditions[1].reason) == ([], GAVE_WAY)
    again = waiting.model_copy(update={"status": during.status})
    after = decided(again, surroundings(of), now=NOW + WAY_SECONDS + 1, **silent)
    assert made(after) == ["worker 0", "worker 1"]
