"""What the operator does about a job, for each thing that can be the matter with it."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.wire.reasons import Reason
from tandem.wire.status import GenerationView
from tandem_operator import kinds, names
from tandem_operator.job_memory import Attempt, replica_key, write_key
from tandem_operator.objects import Volumes
from tandem_operator.observed import Children, KubeObject, Pod, Service, VolumeClaim, children
from tandem_operator.pod_ends import PodEnd
from tandem_operator.pod_starts import MAX_START_SECONDS, UNREAD
from tandem_operator.reconcile import COORDINATOR_START_SECONDS, reconcile
from tandem_operator.replicas import MAX_PAUSE
from tandem_operator.reporting import JobProblem
from tests.support.worlds.operator_job import (
    IDLE,
    IMAGES,
    NOW,
    SCRIPT,
    UID,
    coordinator,
    decided,
    ended,
    evaluator,
    heard,
    initialized,
    job,
    made,
    reason,
    removed,
    running,
    situation,
    surroundings,
    worker,
)

EVERYTHING = [
    "ConfigMap digits-job",
    "PersistentVolumeClaim digits-checkpoints",
    "Service digits-coordinator",
    "coordinator 0",
    "evaluator 0",
]


# Creation


def test_a_new_job_gets_everything_but_workers_which_are_told_the_address_of_its_service() -> None:
    plan = decided(job(), Children())
    assert plan.needs_token
    assert made(plan) == EVERYTHING
    assert plan.status.phase == "Pending"


def test_workers_are_made_before_the_coordinator_answers_and_wait_for_it() -> None:
    assert made(decided(job())) == ["worker 0", "worker 1"]


@pytest.mark.parametrize(
    "state",
    [
        {"restarts": 1},
        {"waiting": "CrashLoopBackOff"},
        {"waiting": "ImagePullBackOff"},
        {"phase": "Pending", "started": None, "created": NOW - COORDINATOR_START_SECONDS},
        {"phase": "Pending", "started": None, "has_run": True, "created": NOW - COORDINATOR_START_SECONDS},
    ],
    ids=str,
)
def test_workers_do_not_hold_gpus_for_a_coordinator_that_does_not_come_up(state: dict[str, Any]) -> None:
    of = job()
    broken = coordinator(of, ready=False, **state)
    there = surroundings(of, broken, worker(0), worker(1))
    plan = decided(of, there)
    assert (made(plan), removed(plan)) == ([], ["digits-worker-0-aaaaa", "digits-worker-1-aaaaa"])
    trains = job(status=initialized())
    assert removed(decided(trains, surroundings(trains, broken, worker(0), worker(1)))) == []


def test_a_pod_that_does_not_begin_is_ended_unless_its_image_is_pulled() -> None:
    of = job(status=initialized())
    mount = JobProblem("FailedMount", 'MountVolume.SetUp failed for volume "data": configmap "setup" not found')
    facts = {"phase": "Pending", "ready": False, "started": None, "placed": NOW - MAX_START_SECONDS}
    pod = worker(1, **facts)
    there = surroundings(of, worker(0), pod)
    # Of those that were not asked about yet, nobody knows whether their image is pulled.
    for want, ends in ((mount, [pod]), (JobProblem("Pulling", 'Pulling image "x"'), []), (UNREAD, []), (None, [])):
        plan = decided(of, there, snapshot=heard("Starting"), starts={} if want is None else {pod.uid: want})
        assert list(plan.terminate) == ends
        assert plan.status.message == (None if want is None else f"{pod.name}: {want.message}")
    backs_off = replace(pod, waiting="ImagePullBackOff")
    assert list(decided(of, surroundings(of, worker(0), backs_off), snapshot=heard("Starting")).terminate) == [
        backs_off
    ]
    soon = surroundings(of, worker(0), replace(pod, placed=NOW - MAX_START_SECONDS + 1))
    assert decided(of, soon, snapshot=heard("Starting"), starts={pod.uid: mount}).terminate == ()


def test_workers_wait_for_a_coordinator_that_is_about_to_begin() -> None:
    of = job()
    starts = coordinator(of, ready=False, phase="Pending", started=None, created=NOW - COORDINATOR_START_SECONDS + 1)
    assert removed(decided(of, surroundings(of, starts, worker(0), worker(1)))) == []


def test_a_coordinator_that_is_refused_gets_the_room_of_everybody_else() -> None:
    refused = {replica_key(names.COORDINATOR, 0): Attempt(9, NOW - 1, JobProblem("QuotaExceeded", "exceeded quota"))}
    of = job()
    there = surroundings(of, worker(0), evaluators=())
    alone = children([one for one in there.objects.values() if getattr(one, "role", "") != names.COORDINATOR])
    plan = decided(of, alone, attempts=refused)
    assert ("worker 1" in made(plan), removed(plan)) == (False, ["digits-worker-0-aaaaa"])
    trains = job(status=initialized())
    plan = decided(trains, alone, attempts=refused)
    assert (made(plan), removed(plan)) == ([], []), "who trains goes on, and nobody takes its place"


def test_a_token_that_somebody_has_deleted_is_made_again_once_a_pod_misses_it() -> None:
    of, there = running()
    assert not decided(of, there, snapshot=heard()).needs_token
    words = 'secret "digits-token" not found'
    waits = worker(1, phase="Pending", ready=False, waiting="CreateContainerConfigError", message=words)
    assert decided(of, surroundings(of, worker(0), waits), snapshot=heard()).needs_token
    other = replace(waits, message='configmap "of-the-users" not found')
    assert not decided(of, surroundings(of, worker(0), other), snapshot=heard()).needs_token


def test_that_it_has_answered_is_remembered() -> None:
    of = job(status=initialized())
    plan = decided(of, snapshot=None)
    assert (made(plan), reason(plan, "Initialized")) == (["worker 0", "worker 1"], Reason.COORDINATOR_ANSWERED)


def test_there_is_nothing_to_do_about_a_job_that_trains() -> None:
    of, there = running()
    plan = decided(of, there, snapshot=heard())
    assert (made(plan), plan.update, plan.delete, plan.target, plan.expired) == ([], (), (), None, False)


def test_what_somebody_removed_is_made_again() -> None:
    of, there = running()
    rest = {key: thing for key, thing in there.objects.items() if key[0] is not kinds.SERVICE}
    assert made(decided(of, Children(rest), snapshot=heard())) == ["Service digits-coordinator"]


def test_an_object_is_written_again_when_what_is_wanted_of_it_has_changed() -> None:
    _, there = running()
    changed = job(status=initialized(), elasticity={"hangSeconds": 7.0})
    plan = decided(changed, there, snapshot=heard())
    assert [manifest["kind"] for manifest in plan.update] == ["ConfigMap"]
    assert (made(plan), removed(plan)) == (["coordinator 0"], ["digits-coordinator-0-aaaaa"])
    (notice,) = [one for one in plan.events if one.reason == "CoordinatorReplaced"]
    assert (notice.warning, "an earlier spec of the job" in notice.message) == (False, True)


@pytest.mark.parametrize(("size", "applied"), [(None, None), ("20Gi", "20Gi")])
def test_a_claim_that_was_made_with_another_size_by_default_keeps_it(size: str | None, applied: str | None) -> None:
    storage = {"size": size} if size else {}
    of = job(status=initialized(), checkpoint={"storage": {**storage, "accessModes": ["ReadWriteMany"]}})
    there = surroundings(of, worker(0), worker(1))
    claim = there.objects[kinds.CLAIM, "digits-checkpoints"]
    changed = children([one for one in there.objects.values() if one is not claim] + [replace(claim, applied="old")])
    (update,) = decided(of, changed, snapshot=heard()).update
    assert update["spec"].get("resources", {}).get("requests", {}).get("storage") == applied
    assert update["spec"]["accessModes"] == ["ReadWriteMany"]


def test_another_number_of_replicas_does_not_restart_the_coordinator() -> None:
    of = job(status=initialized(), workers={"replicas": 2, "maxReplicas": 4})
    there = surroundings(of, worker(0), worker(1))
    scaled = job(status=initialized(), workers={"replicas": 3, "maxReplicas": 4})
    plan = decided(scaled, there, snapshot=heard(workers={"desired": 2, "ready": 2, "min": 1, "max": 4}))
    assert [manifest["kind"] for manifest in plan.update] == ["ConfigMap"]
    assert (made(plan), plan.target) == (["worker 2"], 3)


def test_a_claim_that_is_named_is_used_and_none_is_made() -> None:
    of = job(checkpoint={"storage": {"claimName": "shared"}})
    assert "PersistentVolumeClaim digits-checkpoints" not in made(decided(of, Children()))


@pytest.mark.parametrize("retain", [True, False])
def test_a_volume_that_is_to_outlive_its_job_has_no_owner(retain: bool) -> None:
    of = job(checkpoint={"storage": {"retain": retain}})
    claim = next(one for one in decided(of, Children()).create if one["kind"] == "PersistentVolumeClaim")
    assert ("ownerReferences" in claim["metadata"]) != retain


def claimed(storage: dict[str, object], volumes: Volumes) -> dict[str, object]:
    """What the claim of a new job asks for, besides its size."""
    plan = reconcile(situation(job(checkpoint={"storage": storage}), Children()), IMAGES, volumes)
    spec = next(one["spec"] for one in plan.create if one["kind"] == "PersistentVolumeClaim")
    return {name: value for name, value in spec.items() if name != "resources"}


def test_a_claim_asks_for_what_the_job_says_and_else_for_what_the_operator_was_told() -> None:
    told = Volumes("nfs", ("ReadWriteOnce",))
    assert claimed({}, Volumes()) == {"accessModes": ["ReadWriteMany"]}
    assert claimed({}, told) == {"accessModes": ["ReadWriteOnce"], "storageClassName": "nfs"}
    asked = {"accessModes": ["ReadWriteMany"], "storageClassName": "fast"}
    assert claimed(asked, told) == asked


def test_a_claim_is_as_large_as_the_job_says_and_else_as_the_operator_was_told() -> None:
    def size(storage: dict[str, object], volumes: Volumes) -> object:
        plan = reconcile(situation(job(checkpoint={"storage": storage}), Children()), IMAGES, volumes)
        spec = next(one["spec"] for one in plan.create if one["kind"] == "PersistentVolumeClaim")
        return spec["resources"]["requests"]["storage"]

    assert [size({}, Volumes()), size({}, Volumes(size="1Ti"))] == ["10Gi", "1Ti"]
    assert size({"size": "3Gi"}, Volumes(size="1Ti")) == "3Gi"


def test_a_claim_that_is_there_stays_as_it_is_when_the_operator_is_told_something_else() -> None:
    of = job(status=initialized())
    plan = reconcile(situation(of), IMAGES, Volumes("another", ("ReadWriteOnce",), "1Ti"))
    assert "PersistentVolumeClaim" not in [manifest["kind"] for manifest in (*plan.create, *plan.update)]


def test_a_volume_that_outlived_an_earlier_job_of_that_name_is_taken_up_again() -> None:
    of = job()
    kept = VolumeClaim(name=names.checkpoints("digits"), owner="", applied="of an earlier one", phase="Bound")
    plan = decided(of, children([kept]))
    assert "PersistentVolumeClaim digits-checkpoints" not in made(plan)
    assert not [trouble for trouble in plan.status.conditions if trouble.reason == "NameTaken"]


def test_a_claim_that_nobody_owns_and_no_job_has_left_is_taken_only_where_it_says_so() -> None:
    of = job()
    theirs = VolumeClaim(name=names.checkpoints("digits"), phase="Bound")
    plan = decided(of, children([theirs]))
    assert made(plan) == ["ConfigMap digits-job", "Service digits-coordinator"], "no pod mounts it"
    (why,) = (one for one in plan.status.conditions if one.type == "Initialized")
    assert (why.reason, 'annotate it with tandem.dev/adopt="true"' in why.message) == ("NameTaken", True)
    plan = decided(of, children([replace(theirs, adoptable=True)]))
    assert "coordinator 0" in made(plan)
    (mark,) = plan.update
    assert (mark["kind"], "spec" in mark) == ("PersistentVolumeClaim", False), "it is marked as the job's, and stays"
    assert "NameTaken" not in [one.reason for one in plan.status.conditions]


COMMAND = "kubectl delete pods,services,configmaps,secrets,networkpolicies -n default -l tandem.dev/job=digits"


@pytest.mark.parametrize(
    ("owner", "label", "message"),
    [
        ("", "digits", f"if a job of this name was deleted without its objects, remove those ({COMMAND})"),
        ("", "", "exists and is not this job's, nor any job's; rename it, or give the job another name"),
        ("", "another", "exists and is not this job's; rename it, or give the job another name"),
        ("another", "digits", "exists and is not this job's; remove or rename it, or give the job another name"),
    ],
)
def test_what_a_job_deleted_without_its_objects_has_left_is_named_with_the_command_that_removes_it(
    owner: str, label: str, message: str
) -> None:
    plan = decided(job(), children([Service(name="digits-coordinator", owner=owner, job=label)]))
    (why,) = (one for one in plan.status.conditions if one.type == "Initialized")
    assert why.reason == "NameTaken"
    assert message in why.message


def test_a_claim_that_must_not_change_is_used_as_it_is() -> None:
    of = job(checkpoint={"storage": {"size": "20Gi"}})
    kept = VolumeClaim(name=names.checkpoints("digits"), applied="of an earlier one", phase="Bound")
    refused = Attempt(5, NOW, JobProblem("Refused", "the size cannot change"))
    plan = decided(of, children([kept]), attempts={write_key(kinds.CLAIM, kept.name): refused})
    assert ("coordinator 0" in made(plan), plan.update) == (True, ())
    assert plan.status.message == "the size cannot change"


def test_workers_stay_while_their_service_is_missing() -> None:
    of, there = running()
    rest = {key: thing for key, thing in there.objects.items() if key[0] is not kinds.SERVICE}
    plan = decided(of, Children(rest), snapshot=heard())
    assert (made(plan), removed(plan)) == (["Service digits-coordinator"], [])


def test_a_name_that_somebody_else_has_taken_is_told_and_left_alone() -> None:
    foreign = KubeObject(kind=kinds.CONFIG_MAP, name="digits-job", uid="x", owner="another")
    plan = decided(job(), children([foreign]))
    assert "ConfigMap digits-job" not in made(plan)
    assert "digits-job" not in removed(plan)
    assert plan.status.message is not None
    assert "ConfigMap digits-job exists and is not this job's" in plan.status.message


def test_evaluators_that_have_changed_are_made_anew() -> None:
    _, there = running()
    changed = job(status=initialized(), evaluators={"resources": {"requests": {"cpu": "2"}}})
    plan = decided(changed, there, snapshot=heard())
    assert (removed(plan), made(plan)) == (["digits-evaluator-0-aaaaa"], ["evaluator 0"])
    assert [manifest["kind"] for manifest in plan.update] == ["ConfigMap"]


@pytest.mark.parametrize("off", [{"replicas": 0}, {"replicas": 1}], ids=["all", "all but one"])
def test_evaluators_that_are_turned_off_go(off: dict[str, int]) -> None:
    of = job(status=initialized(), evaluators={"replicas": 2})
    fewer = job(status=initialized(), evaluators=off)
    plan = decided(fewer, surroundings(of, worker(0), worker(1), coordinator(fewer)), snapshot=heard())
    assert removed(plan) == [f"digits-evaluator-{index}-aaaaa" for index in (1, 0) if index >= off["replicas"]]
    assert made(plan) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"deleting": True}, "was deleted"),
        ({"phase": "Failed", "ended_by": PodEnd.DISRUPTED}, "was evicted"),
        ({"silent": True, "ready": False}, "was lost with its node"),
        ({"phase": "Failed", "code": 137, "finished": NOW}, "ended with exit code 137"),
    ],
    ids=["deleted", "evicted", "lost", "killed"],
)
def test_an_evaluator_that_is_lost_is_replaced_at_once_whatever_becomes_of_the_others(
    facts: dict[str, object], words: str
) -> None:
    of = job(status=initialized(), evaluators={"replicas": 2})
    there = surroundings(of, worker(0), worker(1), evaluators=[evaluator(of, 0, **facts), evaluator(of, 1)])
    plan = decided(of, there, snapshot=heard())
    assert made(plan) == ["evaluator 0"]
    (told,) = [notice for notice in plan.events if notice.reason == "EvaluatorReplaced"]
    assert told.message == f"evaluator 0 is replaced: digits-evaluator-0-aaaaa {words}"


def test_an_evaluator_that_fails_soon_after_its_start_again_and_again_waits_longer_and_is_never_given_up() -> None:
    of = job(status=initialized())
    failed = {"phase": "Failed", "code": 1, "started": NOW - 10, "finished": NOW}
    for failures, due in ((2, 4.0), (50, MAX_PAUSE)):
        pod = evaluator(of, failures=failures, **failed)
        there = surroundings(of, worker(0), worker(1), evaluators=[pod])
        assert made(decided(of, there, snapshot=heard())) == []
        later = decided(of, there, snapshot=heard(), now=NOW + due)
        assert (later.status.phase, made(later)) == ("Running", ["evaluator 0"])


def test_workers_of_an_earlier_job_of_that_name_neither_end_this_one_nor_take_its_places() -> None:
    """They are there until garbage collection has removed them, and how they end is no news of this job."""
    of = job(status=initialized(phase="Starting"), trainer=SCRIPT)
    theirs = {"owner": "uid-of-another"}
    done = [ended(index, code=0, **theirs) for index in (0, 1)]
    plan = decided(of, surroundings(of, *done, evaluators=[]), snapshot=heard("Starting", worldSize=None), idle=IDLE)
    assert (plan.status.phase, made(plan), removed(plan)) == ("Starting", ["worker 0", "worker 1"], [])
    failed = [ended(0, code=78, **theirs), ended(1, failures=9, **theirs)]
    plan = decided(of, surroundings(of, *failed, evaluators=[]), snapshot=heard("Starting", worldSize=None), idle=IDLE)
    assert (plan.status.phase, made(plan), removed(plan)) == ("Starting", ["worker 0", "worker 1"], [])


@pytest.mark.parametrize("owner", ["uid-of-another", ""], ids=["another job's", "nobody's"])
def test_a_pod_with_our_labels_that_is_not_ours_is_left_alone(owner: str) -> None:
    of, there = running()
    strangers = [
        worker(0, "stranger", owner=owner, created=NOW - 9999),
        worker(7, "beyond", owner=owner),
        coordinator(of, "chair", owner=owner, created=NOW),
        evaluator(of, 0, "seat", owner=owner, created=NOW),
    ]
    plan = decided(of, Children({**there.objects, **children(strangers).objects}), snapshot=heard())
    assert (made(plan), removed(plan)) == ([], [])


def test_evaluators_of_an_earlier_job_of_that_name_are_none_of_ours() -> None:
    of = job(status=initialized(phase="Draining", completionTime="1970-01-12T13:46:40Z"))
    old = evaluator(of, phase="Succeeded", code=0, owner="uid-of-another", finished=NOW - 1)
    plan = decided(of, surroundings(of, evaluators=[old]), snapshot=heard("Draining"))
    assert plan.status.phase == "Draining"


# Scaling


def test_a_smaller_group_is_told_once_its_pods_have_gone() -> None:
    of = job(status=initialized(), workers={"replicas": 1, "maxReplicas": 3})
    said = heard(workers={"desired": 2, "ready": 2, "min": 1, "max": 3})
    before = decided(of, surroundings(of, worker(0), worker(1)), snapshot=said)
    assert (removed(before), before.target) == (["digits-worker-1-aaaaa"], None)
    leaving = decided(of, surroundings(of, worker(0), worker(1, deleting=True)), snapshot=said)
    assert leaving.target is None
    assert decided(of, surroundings(of, worker(0)), snapshot=said).target == 1


# Suspension


def test_a_suspended_job_gives_its_pods_back_but_not_its_volume() -> None:
    of, there = running(runPolicy={"suspend": True})
    plan = decided(of, there, snapshot=heard())
    assert sorted(removed(plan)) == ["digits-evaluator-0-aaaaa", "digits-worker-0-aaaaa", "digits-worker-1-aaaaa"]
    assert plan.status.phase == "Suspended"


def test_the_coordinator_stays_until_the_workers_have_saved_and_left() -> None:
    of = job(status=initialized(phase="Suspended"), runPolicy={"suspend": True})
    leaving = surroundings(of, worker(0, deleting=True), evaluators=[])
    assert removed(decided(of, leaving, snapshot=heard())) == []
    left = decided(of, surroundings(of, evaluators=[]), snapshot=heard())
    assert removed(left) == ["digits-coordinator-0-aaaaa"]


def test_a_resumed_job_gets_its_coordinator_evaluators_and_workers_back() -> None:
    suspended = {"type": "Suspended", "status": "True", "reason": "Suspended"}
    before = initialized(phase="Suspended")
    of = job(status={**before, "conditions": [*before["conditions"], suspended]})
    there = surroundings(of, evaluators=[])
    rest = {key: one for key, one in there.objects.items() if key[0] is not kinds.POD}
    plan = decided(of, Children(rest))
    assert made(plan) == ["coordinator 0", "worker 0", "worker 1", "evaluator 0"]
    assert reason(plan, "Suspended") == Reason.RESUMED


# What is told


def test_why_pods_do_not_start_stands_in_the_status() -> None:
    of = job(status=initialized(phase="Starting"))
    words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    pod = worker(1, phase="Pending", ready=False, waiting="Unschedulable", message=words)
    plan = decided(of, surroundings(of, worker(0), pod), snapshot=heard("Starting"))
    condition = next(one for one in plan.status.conditions if one.type == "Running")
    assert (condition.status, condition.reason) == ("False", "Unschedulable")
    assert plan.status.message == f"{pod.name}: {words}"


def test_what_the_api_server_refused_stands_in_the_status() -> None:
    trouble = JobProblem("QuotaExceeded", "Pod digits-worker-0-x: exceeded quota")
    attempts = {replica_key(names.WORKER, 0): Attempt(3, NOW, trouble)}
    plan = decided(job(status=initialized()), attempts=attempts)
    assert (plan.status.message, made(plan)) == (trouble.message, ["worker 1"])


def test_step_and_loss_come_from_the_coordinator_and_stay_when_it_is_silent() -> None:
    of = job()
    said = heard(progress={"step": 40, "totalSteps": 100}, loss=0.5, throughput=900.0123456)
    told = decided(of, surroundings(of, worker(0), worker(1)), snapshot=said).status
    assert (told.progress is not None and told.progress.step, told.loss, told.throughput) == (40, 0.5, 900.0)
    later = of.model_copy(update={"status": told})
    silent = decided(later, surroundings(of, worker(0), worker(1)), snapshot=None).status
    assert (silent.loss, silent.throughput) == (0.5, None)


def test_a_new_generation_is_told_once() -> None:
    view = GenerationView(
        generation=2, world_size=1, members=["a"], opened_at=NOW, reason="MemberLost", detail="a was lost"
    )
    of, there = running(status={"generation": 1})
    said = heard(generation=2).model_copy(update={"generations": [view]})
    first = decided(of, there, snapshot=said)
    assert [notice.message for notice in first.events] == ["generation 2 with 1 worker: a was lost"]
    assert decided(of.model_copy(update={"status": first.status}), there, snapshot=said).events == ()  # type: ignore[attr-defined]


def test_a_condition_keeps_its_time_while_it_holds() -> None:
    of, there = running()
    first = decided(of, there, snapshot=heard()).status
    later = decided(of.model_copy(update={"status": first}), there, snapshot=heard(), now=NOW + 100).status  # type: ignore[attr-defined]
    assert [one.last_transition_time for one in later.conditions] == [
        one.last_transition_time for one in first.conditions
    ]


def test_a_pod_that_waits_for_ever_is_no_reason_to_remove_it() -> None:
    of = job(status=initialized(phase="Starting"))
    pod = replace(worker(0), phase="Pending", ready=False, waiting="Unschedulable")
    assert isinstance(pod, Pod)
    assert removed(decided(of, surroundings(of, pod, worker(1)), snapshot=heard("Starting"))) == []
    assert pod.owner == UID
