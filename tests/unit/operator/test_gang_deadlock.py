"""Two jobs that each hold a part of what the other needs do not wait for ever."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.wire.reasons import Reason
from tandem_operator.gang_deadlock import BACKOFF_SECONDS, PATIENCE_SECONDS, Claimant, claimant
from tandem_operator.observed import Pod
from tandem_operator.plan import ReconcilePlan
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

GPU = "nvidia.com/gpu"
TWO = {"replicas": 2, "minReplicas": 2, "resources": {"limits": {GPU: 4}}}
GPUS = {"requests": frozenset({GPU, "cpu", "pods"}), "missing": frozenset({GPU})}
OLDER = Claimant(NOW - 5000, "a", "older", "default", **GPUS)
YOUNGER = Claimant(NOW - 10, "z", "younger", "default", **GPUS)
WORDS = f"0/3 nodes are available: 1 Insufficient cpu, 2 Insufficient {GPU}. preemption: 0/3 nodes are available."
LONG = PATIENCE_SECONDS + 1


def half(since: float = LONG, words: str = WORDS) -> tuple[Pod, Pod]:
    """One worker is placed, the other finds no node."""
    waits = {"phase": "Pending", "ready": False, "waiting": "Unschedulable", "message": words}
    return worker(0), worker(1, created=NOW - since, **waits)


def starved(
    *others: Claimant, since: float = LONG, words: str = WORDS, status: dict[str, Any] | None = None, **more: Any
) -> ReconcilePlan:
    of = job(status=status or initialized(phase="Starting"), workers=TWO)
    facts: dict[str, Any] = {"snapshot": heard("Starting", worldSize=None), "idle": IDLE, "created": NOW - 100, **more}
    return decided(of, surroundings(of, *half(since, words)), claimants=others, **facts)


def test_the_younger_gives_its_pods_back() -> None:
    plan = starved(OLDER)
    assert sorted(removed(plan)) == ["digits-worker-0-aaaaa", "digits-worker-1-aaaaa"]
    assert made(plan) == []
    assert "gave its workers back to older" in (plan.status.message or "")


def test_the_older_keeps_them() -> None:
    assert removed(starved(YOUNGER)) == []


def test_a_moment_is_not_enough() -> None:
    assert removed(starved(OLDER, since=PATIENCE_SECONDS - 1)) == [], "an autoscaler may be about to add a node"
    assert len(removed(starved(OLDER, since=61.0, patience=60.0))) == 2, "where there is none, somebody may say so"


def test_a_job_that_waits_alone_keeps_what_it_has() -> None:
    assert removed(starved(since=10_000.0)) == []


def test_the_oldest_gives_way_in_the_end_because_it_may_want_more_than_there_is() -> None:
    assert len(removed(starved(YOUNGER, since=2 * PATIENCE_SECONDS))) == 2


def test_a_job_that_trains_with_what_it_has_never_gives_way() -> None:
    assert removed(starved(OLDER, snapshot=heard("Running", worldSize=1), idle=None)) == []


def test_who_gave_way_keeps_out_for_a_while_and_then_tries_again() -> None:
    of = job(status=initialized(phase="Starting"), workers=TWO)
    gave = starved(OLDER).status
    waiting = of.model_copy(update={"status": gave})
    silent = {"snapshot": heard("Pending", worldSize=None), "idle": IDLE}
    during = decided(waiting, surroundings(of), now=NOW + BACKOFF_SECONDS - 1, **silent)
    assert (made(during), during.status.conditions[1].reason) == ([], Reason.GAVE_WAY)
    again = waiting.model_copy(update={"status": during.status})
    after = decided(again, surroundings(of), now=NOW + BACKOFF_SECONDS + 1, **silent)
    assert made(after) == ["worker 0", "worker 1"]


# Who is a rival


@pytest.mark.parametrize(
    "other",
    [
        replace(OLDER, requests=frozenset({"cpu", "pods"}), missing=frozenset({"cpu"})),
        replace(OLDER, missing=frozenset()),
        replace(OLDER, missing=frozenset({"memory"})),
        replace(OLDER, requests=frozenset({"amd.com/gpu", "pods"}), missing=frozenset({"amd.com/gpu"})),
    ],
    ids=["it holds no GPU", "no node would do", "it lacks what we do not hold", "other GPUs"],
)
def test_a_job_that_could_do_nothing_with_what_it_got_is_no_rival(other: Claimant) -> None:
    assert removed(starved(other, since=9999.0, words=f"0/3 nodes are available: 2 Insufficient {GPU}.")) == []


def test_jobs_whose_nodes_are_others_are_no_rivals() -> None:
    apart = {"spec": {"nodeSelector": {"pool": "a100"}}}
    of = job(status=initialized(phase="Starting"), workers=TWO | {"template": apart})
    there = surroundings(of, *half())
    facts: dict[str, Any] = {"snapshot": heard("Starting", worldSize=None), "idle": IDLE, "created": NOW - 100}
    for pool, gives in (({"pool": "h100"}, False), ({"pool": "a100"}, True), ({"zone": "b"}, True)):
        plan = decided(of, there, claimants=[replace(OLDER, selector=pool)], **facts)
        assert bool(removed(plan)) == gives, pool


def test_the_name_of_a_job_in_another_namespace_is_not_told() -> None:
    plan = starved(replace(OLDER, namespace="secret", name="project-x"))
    assert len(removed(plan)) == 2
    told = " ".join([plan.status.message or "", *(one.message for one in plan.events), str(plan.status.dump())])
    assert "gave its workers back to a job of another namespace" in told
    assert "project-x" not in told
    assert "secret" not in told


def test_what_a_job_asks_for_and_lacks_is_seen_from_its_template_and_the_schedulers_words() -> None:
    sidecar = {"name": "shipper", "resources": {"requests": {"example.org/nic": 1}}}
    template = {
        "spec": {
            "containers": [sidecar, {"name": "odd", "resources": {"limits": None}}, None],
            "nodeSelector": {"pool": "a100"},
        }
    }
    found = claimant(job(workers=TWO | {"template": template}), NOW, "u", half())
    assert found.requests == {GPU, "example.org/nic", "pods"}
    assert found.missing == {"cpu", GPU}
    assert found.selector == {"pool": "a100"}
    full = claimant(job(workers=TWO), NOW, "u", half(words="0/1 nodes are available: 1 Too many pods."))
    assert full.missing == {"pods"}
    assert claimant(job(workers=TWO), NOW, "u", [], starved=False).missing == {GPU, "pods"}, "it gave all of it back"
