"""How a pod ended decides what counts, when the next one is made and what people read; docs/operator.md says so."""

import pytest

from tandem.wire.status import GenerationView
from tandem_operator import names
from tandem_operator.job_memory import MAX_PAUSE_SECONDS, Attempt, next_attempt, replica_key
from tandem_operator.observed import Pod
from tandem_operator.plan import ReconcilePlan
from tandem_operator.pod_ends import CONSEQUENCES, Consequence, PodEnd
from tandem_operator.replicas import MAX_FAILURES, MAX_FAILURES_PER_NODE, MAX_PAUSE
from tests.support import ROOT
from tests.support.worlds.operator_job import IDLE, NOW, decided, ended, heard, initialized, job, surroundings, worker

WORDS = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."


def after(pod: Pod, attempts: dict[str, Attempt] | None = None, now: float = NOW) -> ReconcilePlan:
    """What is decided about a job of one worker, which was in the group and has ended so."""
    of = job(status=initialized(), workers={"replicas": 1})
    group = GenerationView(generation=1, world_size=1, members=[pod.name], opened_at=0.0, reason="Started")
    said = heard("Restarting").model_copy(update={"generations": [group]})
    return decided(of, surroundings(of, pod), snapshot=said, idle=IDLE, now=now, attempts=attempts or {})


def annotations(plan: ReconcilePlan) -> dict[str, str]:
    (pod,) = (one for one in plan.create_pods if one["metadata"]["labels"][names.ROLE] == names.WORKER)
    found: dict[str, str] = pod["metadata"]["annotations"]
    return found


def reasons(plan: ReconcilePlan) -> set[str]:
    return {one.reason for one in plan.status.conditions if one.type in ("Running", "Ready")}


def test_a_pod_that_nodes_reject_never_ends_its_job_and_is_tried_ever_more_slowly() -> None:
    facts = {
        "ended_by": PodEnd.REJECTED,
        "code": None,
        "started": None,
        "message": "Pod was rejected: no healthy devices",
    }
    what, now, pod = replica_key(names.WORKER, 0), NOW, ended(0, node="gpu-1", **facts)
    attempt, pauses = next_attempt(None, now), []
    for number in range(20):
        plan = after(pod, {what: attempt}, now)
        assert plan.status.phase != "Failed"
        assert reasons(plan) == {"PodRejected"}
        assert plan.status.message == f"{pod.name} was rejected by its node: Pod was rejected: no healthy devices"
        if not plan.create_pods:
            pauses.append(attempt.due - now)
            now = attempt.due
            plan = after(pod, {what: attempt}, now)
        found = annotations(plan)
        assert found[names.FAILURES] == "0"
        on = found.get(names.FAILED_ON, "").split(",")
        assert len(on) == min(number + 1, 8)
        assert (number + 1 >= MAX_FAILURES_PER_NODE) == ("nodeAffinity" in str(plan.create_pods))
        pod = ended(
            0, f"digits-worker-0-{number}", node="gpu-1", failed_on=tuple(on), finished=now, created=now, **facts
        )
        attempt = next_attempt(attempt, now)
    assert pauses[:3] == [2, 4, 8]
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_a_pod_that_exceeds_its_own_limit_again_and_again_ends_the_job_in_the_kubelets_words() -> None:
    failures, now = 0, NOW
    for _ in range(MAX_FAILURES):
        pod = ended(
            0, code=137, ended_by=PodEnd.OVER_LIMIT, message=WORDS, failures=failures, started=now - 40, finished=now
        )
        plan = after(pod, now=now + MAX_PAUSE)
        assert reasons(plan) & {"LimitExceeded", "DoesNotStart"}
        assert WORDS in (plan.status.message or "")
        if plan.status.phase == "Failed":
            break
        assert any(WORDS in notice.message for notice in plan.events if notice.reason == "WorkerReplaced")
        failures, now = int(annotations(plan)[names.FAILURES]), now + MAX_PAUSE
    assert (failures, plan.status.phase) == (MAX_FAILURES - 1, "Failed")


def test_a_pod_that_fails_in_the_group_before_a_step_counts_and_one_after_a_step_does_not() -> None:
    of, pod = job(status=initialized(), workers={"replicas": 1}), ended(0, failures=MAX_FAILURES - 1)
    for progressed, phase in ((False, "Failed"), (True, "Restarting"), (None, "Restarting")):
        group = GenerationView(
            generation=1, world_size=1, members=[pod.name], opened_at=0.0, reason="Started", progressed=progressed
        )
        said = heard("Restarting", worldSize=None).model_copy(update={"generations": [group]})
        assert decided(of, surroundings(of, pod), snapshot=said, idle=IDLE).status.phase == phase


@pytest.mark.parametrize("end", [PodEnd.REJECTED, PodEnd.OVER_LIMIT, PodEnd.NOT_BEGUN])
def test_it_is_no_trouble_any_more_once_the_next_pod_has_run_for_a_minute(end: PodEnd) -> None:
    of = job(status=initialized(), workers={"replicas": 1})
    before = ended(0, "digits-worker-0-a", ended_by=end, created=NOW - 200)
    for lived, reason in ((10, end.value), (61, "Running")):
        there = surroundings(of, before, worker(0, started=NOW - lived, created=NOW - lived))
        plan = decided(of, there, snapshot=heard())
        assert reasons(plan) == {reason}


def row(end: PodEnd, follows: Consequence) -> str:
    """The line about it in docs/operator.md."""
    well = f"{follows.healthy_after:.0f} s" + (" or its group made steps" if follows.is_proven_by_steps else "")
    counts = f"one more in a row; the first again if it ran for {well}" if follows.counts else "no"
    if follows.resets:
        counts += "; ends a row of failures"
    pauses = {
        PodEnd.FINISHED: "not, if that completes the job; else after 10 s",
        PodEnd.LEFT_OUT: "at once, on another node",
        PodEnd.DISRUPTED: "at once",
        PodEnd.REJECTED: f"at once, then after 2, 4, 8, … {MAX_PAUSE_SECONDS:.0f} s",
    }
    pause = pauses.get(end, f"at once, then after 2, 4, 8, … {MAX_PAUSE:.0f} s")
    return f"| {follows.verb} | {counts} | {pause} | {f'`{end}`' if follows.is_reported else ''} |"


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    assert set(CONSEQUENCES) == set(PodEnd)
    text = (ROOT / "docs/operator.md").read_text()
    for end, follows in CONSEQUENCES.items():
        assert row(end, follows) in text, row(end, follows)
