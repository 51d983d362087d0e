"""The reasons of a job's conditions that tell of pods that fail and of a spec that cannot be read."""

from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.wire.status import Condition, GenerationView, Status
from tandem_operator import controller, kinds, pods
from tandem_operator.plan import ReconcilePlan
from tandem_operator.pod_ends import HEALTHY_SECONDS, PodEnd
from tandem_operator.replicas import MAX_FAILURES
from tests.support.worlds.operator_job import (
    IDLE,
    NOW,
    TASK,
    ended,
    evaluator,
    heard,
    initialized,
    job,
    made,
    removed,
    surroundings,
    worker,
)
from tests.support.worlds.operator_job import decided as decided_about
from tests.support.worlds.operator_world import JOB, KEY, LOOP, NAME, World


def condition(status: Status, kind: str) -> Condition | None:
    return next((one for one in status.conditions if one.type == kind), None)


def why(status: Status, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    found = condition(status, kind)
    assert found is not None
    return found.status, found.reason, found.message


# EvaluatorFailed

FAILED: dict[str, Any] = {"phase": "Failed", "ready": False, "code": 3, "message": "no such file", "finished": NOW}


def with_evaluators(*facts: dict[str, Any], now: float = NOW) -> ReconcilePlan:
    """What is decided about a job that trains and has these evaluator pods, all of one place."""
    of = job(status=initialized())
    pods = [evaluator(of, name=f"digits-evaluator-0-{number}", **one) for number, one in enumerate(facts)]
    return decided_about(of, surroundings(of, worker(0), worker(1), evaluators=pods), snapshot=heard(), now=now)


def test_an_evaluator_that_fails_is_the_reason_of_a_job_that_goes_on_training() -> None:
    plan = with_evaluators(FAILED)
    message = "digits-evaluator-0-0 ended with exit code 3: no such file"
    assert plan.status.phase == "Running"
    assert why(plan.status, "Running") == ("True", "EvaluatorFailed", message)
    assert plan.status.message == message
    assert (made(plan), removed(plan)) == (["evaluator 0"], [])


@pytest.mark.parametrize(
    "facts",
    [
        {"ended_by": PodEnd.DISRUPTED},
        {"deleting": True},
        {"code": int(ExitCode.PREEMPTED)},
        {"code": None},
        {"code": 0, "phase": "Succeeded"},
    ],
    ids=["evicted", "deleted", "asked to leave", "never started", "done"],
)
def test_an_evaluator_that_goes_for_another_reason_has_not_failed(facts: dict[str, Any]) -> None:
    plan = with_evaluators(FAILED | facts)
    assert why(plan.status, "Running")[1] == "Running"
    assert plan.status.message is None


def test_it_is_the_reason_until_the_evaluator_that_follows_has_been_at_work_for_a_while() -> None:
    follows = {"created": NOW + 1, "started": NOW + 2}
    before = with_evaluators(FAILED, follows, now=NOW + 1 + HEALTHY_SECONDS)
    assert why(before.status, "Running")[1] == "EvaluatorFailed"
    after = with_evaluators(FAILED, follows, now=NOW + 2 + HEALTHY_SECONDS)
    assert why(after.status, "Running")[1] == "Running"
    assert after.status.message is None
    assert removed(after) == [], "its logs can still be read"
    again = with_evaluators(FAILED, follows | FAILED, now=NOW + 100)
    assert why(again.status, "Running")[1] == "EvaluatorFailed"


# DoesNotStart

WORDS = "ModuleNotFoundError: No module named 'tandem_trainer'"


def with_worker(failures: int, status: dict[str, Any] | None = None, **said: Any) -> ReconcilePlan:
    """What is decided about a job whose worker 0 has failed soon after its start, and so often before."""
    of = job(status=status or initialized(phase="Starting"), workers={"replicas": 2, "minReplicas": 2})
    pod = ended(0, failures=failures, message=WORDS)
    snapshot = heard("Starting", worldSize=None).model_copy(update=said)
    return decided_about(of, surroundings(of, pod, worker(1)), snapshot=snapshot, idle=IDLE)


def test_a_place_whose_workers_fail_too_often_soon_after_their_start_ends_a_job_that_does_not_train() -> None:
    before = with_worker(failures=MAX_FAILURES - 2)
    assert (before.status.phase, condition(before.status, "Failed")) == ("Starting", None)
    plan = with_worker(failures=MAX_FAILURES - 1)
    again = f"as did {MAX_FAILURES - 1} pods before it"
    message = f"digits-worker-0-aaaaa ended soon after its start, {again}, with exit code 1: {WORDS}"
    assert plan.status.phase == "Failed"
    assert why(plan.status, "Failed") == ("True", "DoesNotStart", message)
    assert plan.status.message == message
    assert made(plan) == []
    assert removed(plan) == ["digits-worker-1-aaaaa", "digits-evaluator-0-aaaaa"], "nobody has told them to end"
    assert [(one.reason, one.message, one.warning) for one in plan.events] == [("Failed", message, True)]


def test_workers_that_were_in_the_group_did_start() -> None:
    view = GenerationView(
        generation=1, world_size=2, members=["digits-worker-0-aaaaa"], opened_at=NOW, reason="Started", detail=""
    )
    assert with_worker(failures=MAX_FAILURES, generations=[view]).status.phase == "Starting"


def test_that_a_job_does_not_start_is_remembered_and_told_once() -> None:
    first = with_worker(failures=MAX_FAILURES).status
    later = with_worker(failures=MAX_FAILURES, status=first.dump())
    assert why(later.status, "Failed") == why(first, "Failed")
    assert later.events == ()
    assert removed(later)[0] == "digits-worker-1-aaaaa"


# InvalidSpec


def operated(spec: dict[str, Any], status: dict[str, Any] | None = None) -> World:
    """A job beside an operator."""
    return World(job={**JOB, "spec": spec, **({"status": status} if status else {})})


def written(world: World) -> list[str]:
    return [f"{verb} {kind.name}" for verb, kind, _ in world.cluster.written]


@pytest.mark.parametrize(
    ("spec", "where", "what"),
    [
        ({"trainer": TASK, "workers": {"replicas": "2"}}, "workers.replicas", "Input should be a valid integer"),
        ({}, "trainer", "Field required"),
        ({"trainer": TASK, "workers": {"minReplicas": 3}}, "workers", "minReplicas must not be greater than replicas"),
    ],
    ids=["another type", "a field that is missing", "a rule that does not hold"],
)
def test_what_the_api_server_took_and_the_operator_cannot_read_is_told_and_left_alone(
    spec: dict[str, Any], where: str, what: str
) -> None:
    world = operated(spec)
    assert world.resync() is None, "only a change of the job could help"
    state, reason, message = why(world.status, "Initialized")
    assert (state, reason, world.status.phase) == ("False", "InvalidSpec", "Pending")
    assert message.startswith(f"spec.{where}: ")
    assert what in message
    assert message.endswith("; the CRD and the operator may be of different versions")
    assert world.status.message == message
    assert written(world) == ["status DistributedTrainingJob"]
    world.resync()
    assert written(world) == ["status DistributedTrainingJob"], "it is told once"


def with_slices(count: int) -> dict[str, Any]:
    return {"trainer": TASK, "workers": {"resources": {"limits": {"nvidia.com/mig-1g.5gb": count}}}}


def test_a_job_whose_number_of_processes_was_changed_is_held_as_it_is_until_that_is_undone() -> None:
    world = operated(with_slices(2))
    world.resync()
    assert "create ConfigMap" in written(world)
    before = list(written(world))
    world.cluster.edit(kinds.JOB, NAME, with_slices(4))
    assert world.resync() is None, "only a change of the job could help"
    _, reason, message = why(world.status, "Stalled")
    assert reason == "ProcessesChanged"
    assert message.startswith("each replica of this job has 2 processes, and by the GPUs that")
    assert "it would have 4" in message
    assert written(world) == [*before, "status DistributedTrainingJob"], "nothing else is touched"
    world.resync()
    assert written(world) == [*before, "status DistributedTrainingJob"], "it is told once"
    world.cluster.edit(kinds.JOB, NAME, with_slices(2))
    assert world.resync() is not None
    assert why(world.status, "Stalled")[1] != "ProcessesChanged"


def test_what_leaves_the_number_of_processes_as_it_is_holds_no_job() -> None:
    world = operated(with_slices(2))
    world.resync()
    world.cluster.edit(kinds.JOB, NAME, {"trainer": TASK, "workers": {"processesPerReplica": 2}})
    assert world.resync() is not None
    assert "apply ConfigMap" in written(world)


def test_what_a_template_must_not_set_is_told_in_the_words_of_tandem_validate() -> None:
    template = {"metadata": {"labels": {"kueue.x-k8s.io/pod-group-name": "theirs"}}}
    world = operated({"trainer": TASK, "workers": {"template": template}})
    assert world.resync() is None
    _, reason, message = why(world.status, "Initialized")
    assert (reason, written(world)) == ("InvalidSpec", ["status DistributedTrainingJob"])
    assert message.startswith("spec.workers.template: a pod template must not set kueue.x-k8s.io/pod-group-name")
    assert "different versions" not in message


def test_a_job_that_can_be_read_after_all_goes_on() -> None:
    world = operated({"trainer": TASK, "workers": {"replicas": "2"}})
    world.resync()
    world.cluster.objects[kinds.JOB, *KEY]["spec"].pop("workers")
    assert world.resync() is not None
    assert why(world.status, "Initialized")[1] == "CoordinatorStarts"
    assert "create Pod" in written(world)


def test_fields_of_a_newer_crd_are_passed_over() -> None:
    world = operated({"trainer": TASK | {"speed": "high"}, "novelty": {"of": "the next version"}})
    assert world.resync() is not None
    assert why(world.status, "Initialized")[1] == "CoordinatorStarts"
    assert "create Pod" in written(world)


def test_a_status_of_another_version_is_no_reason_to_refuse_a_job() -> None:
    world = operated({"trainer": TASK}, status={"phase": "Starting", "novelty": "of the next version"})
    assert world.resync() is not None
    assert "create Pod" in written(world)
    assert why(world.status, "Initialized")[1] == "CoordinatorStarts"


@pytest.mark.parametrize(
    "template",
    [
        {"metadata": None, "spec": None},
        {"metadata": {"labels": None, "annotations": None}},
        {"spec": {"containers": None, "tolerations": None, "volumes": None, "terminationGracePeriodSeconds": None}},
        {"spec": {"containers": [None], "volumes": [{"name": None}, {"name": ["x"]}]}},
        {"spec": {"securityContext": None, "nodeSelector": None}},
    ],
)
def test_a_null_in_a_template_says_nothing(template: dict[str, Any]) -> None:
    world = operated({"trainer": TASK, "workers": {"template": template}, "evaluators": {"template": template}})
    world.resync()
    assert world.status.phase == "Pending"
    assert "create Pod" in written(world)


@pytest.mark.parametrize(
    ("cpu", "threads"),
    [
        ("1k", 1_000),
        ("4000000u", 4),
        ("2500000000n", 2),
        ("2500m", 2),
        ("8", 8),
        (8, 8),
        ("1e1", 10),
        ("2E0", 2),
        ("1Ki", 1_024),
        (".5", 1),
        ("3.", 3),
        ("1E", 4_096),
        ("1e999999999", 4_096),
        ("1e-999999999", 1),
    ],
)
def test_any_amount_that_kubernetes_takes_is_understood(cpu: str | int, threads: int) -> None:
    assert pods.threads(job(workers={"resources": {"requests": {"cpu": cpu}}})) == threads


class DefectError(Exception):
    """Something that nobody thought of."""


@pytest.mark.parametrize("begun", [False, True])
def test_whatever_goes_wrong_is_told_and_tried_again(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"phase": "Running", "restarts": 3, "conditions": [{"type": "Initialized", "status": "True"}]}
    world = operated({"trainer": TASK}, status=status if begun else None)

    def breaks(*_: Any) -> Any:
        raise DefectError("x" * 10_000)

    monkeypatch.setattr(controller, "reconcile", breaks)
    for _ in range(3):
        LOOP.run(world.controller.process(KEY))
    assert world.cluster.told == ["InternalError"], "it is told once"
    state, reason, message = why(world.status, "Ready")
    assert (state, reason) == ("False", "InternalError")
    assert why(world.status, "Reconciling")[0] == "True"
    assert why(world.status, "Initialized")[0] == ("True" if begun else "False")
    assert message.startswith("the operator failed at this job and tries again: DefectError: xxx")
    assert len(message) < 700
    assert (world.status.phase, world.status.restarts) == (("Running", 3) if begun else ("Pending", 0))
    monkeypatch.undo()
    world.resync()
    assert why(world.status, "Initialized")[1] != "InternalError"


def test_a_job_that_trains_goes_on_to_while_its_spec_cannot_be_read() -> None:
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Running", "status": "True"}]
    status = {"phase": "Running", "restarts": 2, "conditions": conditions}
    world = operated({"trainer": TASK, "workers": {"replicas": "2"}}, status=status)
    world.resync()
    assert (world.status.phase, world.status.restarts) == ("Running", 2)
    assert [why(world.status, kind)[0] for kind in ("Initialized", "Running", "Stalled")] == ["True"] * 3
    assert world.cluster.told == ["InvalidSpec"]
