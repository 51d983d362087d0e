"""Workloads of Kueue: what a queued job asks for, and which of its workers may have pods."""

from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.wire.reasons import Reason
from tandem_operator import kinds, names
from tandem_operator.job_memory import Attempt, write_key
from tandem_operator.objects import Manifest
from tandem_operator.observed import Children, KubeObject, Pod, Workload, children, observe
from tandem_operator.plan import ReconcilePlan
from tandem_operator.queue_usage import QueuePlace, QueueUsage
from tandem_operator.reporting import JobProblem
from tandem_operator.workloads import NodePlacement, Queueing, placement_of
from tests.support.worlds.operator_job import (
    NOW,
    SCRIPT,
    UID,
    coordinator,
    decided,
    ended,
    heard,
    initialized,
    job,
    made,
    reason,
    removed,
    surroundings,
    worker,
)

GPU = {"nodeLabels": {"pool": "a100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
QUEUEING = Queueing({"a100": placement_of(GPU, labels="nodeLabels")}, {"": 0, "urgent": 1000})
RESERVED = {"clusterQueue": "all", "podSetAssignments": [{"name": "workers", "flavors": {"nvidia.com/gpu": "a100"}}]}


def queued(least: int = 2, replicas: int = 4, **workers: Any) -> DistributedTrainingJob:
    """A job of two to four workers in a queue."""
    sizes = {"replicas": replicas, "minReplicas": least, "maxReplicas": 16}
    return job(status=initialized(), workers=sizes | workers, runPolicy={"queueName": "gpus"})


def planned(of: DistributedTrainingJob, *there: KubeObject, queueing: Queueing | None = QUEUEING) -> ReconcilePlan:
    return decided(of, surroundings(of, *there), snapshot=heard(), queueing=queueing)


def workload(manifest: Manifest, admitted: bool = True, evicted: str = "", **status: Any) -> Workload:
    """A Workload as the operator sees it, once it was created from this manifest."""
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": "Played",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind in (("QuotaReserved", "Admitted") if admitted else ())
    ]
    if evicted:
        conditions.append({"type": "Evicted", "status": "True", "reason": evicted, "message": "makes room"})
    body = {"status": {"conditions": conditions, **({"admission": RESERVED} if admitted else {}), **status}}
    metadata = {**manifest["metadata"], "uid": f"uid-{manifest['metadata']['name']}", "resourceVersion": "7"}
    found = observe(kinds.WORKLOAD, {**manifest, **body, "metadata": metadata})
    assert isinstance(found, Workload)
    return found


def asked(plan: ReconcilePlan) -> list[tuple[str, int, int]]:
    """Name, workers and priority of each new Workload."""
    specs = [(one["metadata"]["name"], one["spec"]) for one in plan.create_workloads]
    return [(name, spec["podSets"][0]["count"], spec["priority"]) for name, spec in specs]


def of_all(of: DistributedTrainingJob) -> list[Manifest]:
    """The Workloads of a job of four."""
    (base,) = planned(of).create_workloads
    return [base, *planned(of, workload(base)).create_workloads]


def test_the_smallest_group_is_asked_for_first_and_no_pod_exists_before_it_is_admitted() -> None:
    of = queued()
    plan = planned(of)
    assert asked(plan) == [("digits-queue-0", 2, 0)]
    assert [name for name in made(plan) if name.startswith("worker")] == []
    (base,) = plan.create_workloads
    assert base["metadata"]["ownerReferences"][0]["uid"] == UID
    waits = planned(of, workload(base, admitted=False))
    assert (asked(waits), made(waits), waits.status.queue.admitted if waits.status.queue else None) == ([], [], 0)
    assert reason(waits) == Reason.QUEUED


def test_each_further_worker_is_asked_for_apart_and_is_worth_less_than_the_one_before() -> None:
    of = queued()
    base, *more = of_all(of)
    assert asked(planned(of, workload(base))) == [("digits-queue-1", 1, -1), ("digits-queue-2", 1, -2)]
    assert made(planned(of, workload(base))) == ["worker 0", "worker 1"]
    second = planned(of, workload(base), *(workload(one, admitted=slot > 0) for slot, one in enumerate(more)))
    assert made(second) == ["worker 0", "worker 1", "worker 3"]
    assert reason(second) == Reason.PARTLY_ADMITTED


def test_many_further_workers_are_asked_for_in_slices() -> None:
    of = queued(least=1, replicas=16)
    (base,) = planned(of).create_workloads
    assert len(asked(planned(of, workload(base)))) == 15
    many = job(
        status=initialized(),
        workers={"replicas": 101, "minReplicas": 1, "maxReplicas": 101},
        runPolicy={"queueName": "gpus"},
    )
    (base,) = planned(many).create_workloads
    slices = asked(planned(many, workload(base)))
    assert (len(slices), slices[0], sum(count for _, count, _ in slices)) == (15, ("digits-queue-1", 7, -7), 100)


def test_a_worker_runs_where_its_flavor_is() -> None:
    of = queued(template={"spec": {"nodeSelector": {"disk": "ssd"}}})
    (base,) = planned(of).create_workloads
    update = {"name": "check", "podSetUpdates": [{"name": "workers", "annotations": {"provisioned": "yes"}}]}
    pod = planned(of, workload(base, admissionChecks=[update])).create_pods[0]
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "disk": "ssd", "pool": "a100"}
    assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
    assert pod["metadata"]["annotations"]["provisioned"] == "yes"
    assert names.QUEUE not in pod["metadata"]["labels"]
    unknown = planned(of, workload(base), queueing=Queueing())
    assert made(unknown) == []
    assert "there is no such ResourceFlavor" in str(unknown.status.message)


def test_an_evicted_worker_leaves_and_its_quota_is_given_back_when_it_has_gone() -> None:
    of = queued()
    base, third, fourth = of_all(of)
    there = [workload(base), workload(third), workload(fourth, evicted="Preempted")]
    workers = [worker(index) for index in range(4)]
    plan = planned(of, *there, *workers)
    assert (removed(plan), [change for change in plan.write_workloads if change.releases]) == (
        ["digits-worker-3-aaaaa"],
        [],
    )
    assert plan.target is None, "the coordinator hears of it once the worker has gone"
    (change,) = [one for one in planned(of, *there, *workers[:3]).write_workloads if one.releases]
    values = {entry["type"]: entry["status"] for entry in change.conditions}
    assert values == {"QuotaReserved": "False", "Admitted": "False", "Evicted": "True", "Requeued": "True"}
    assert change.workload.name == "digits-queue-2"
    assert (
        planned(of, *there, *workers[:3], worker(3, silent=True)).write_workloads
        == planned(of, *there, *workers[:3]).write_workloads
    )


def test_only_who_was_preempted_is_queued_again_at_once() -> None:
    of = queued()
    base, third, fourth = of_all(of)
    there = [workload(base), workload(third), workload(fourth, evicted="PodsReadyTimeout")]
    (change,) = [
        one for one in planned(of, *there, *(worker(index) for index in range(3))).write_workloads if one.releases
    ]
    assert [entry["status"] for entry in change.conditions if entry["type"] == "Requeued"] == ["False"]


@pytest.mark.parametrize("cause", ["", "DueToRequeuingLimitExceeded"])
def test_who_was_deactivated_is_queued_again_once_it_is_activated(cause: str) -> None:
    """Kueue knows it by this very reason, whatever the cause was."""
    of = queued()
    (base, *_) = of_all(of)
    (change,) = planned(of, workload(base, evicted=f"Deactivated{cause}")).write_workloads
    (requeued,) = [entry for entry in change.conditions if entry["type"] == "Requeued"]
    assert (requeued["status"], requeued["reason"]) == ("False", "Deactivated")


def test_kueue_waits_for_the_pods_of_each_admission() -> None:
    of = queued()
    (base, *_) = of_all(of)
    (ready,) = planned(of, workload(base), worker(0), worker(1)).write_workloads
    before = {"admission": RESERVED, "conditions": [*ready.conditions, {"type": "Evicted", "status": "True"}]}
    evicted = observe(kinds.WORKLOAD, {**base, "status": before})
    (change,) = planned(of, evicted).write_workloads
    assert [entry["status"] for entry in change.conditions if entry["type"] == "PodsReady"] == ["False"]


def test_with_its_minimum_the_job_gives_everything_back() -> None:
    of = queued()
    base, third, fourth = of_all(of)
    there = [workload(base, evicted="Preempted"), workload(third), workload(fourth)]
    plan = planned(of, *there, *(worker(index) for index in range(4)))
    assert removed(plan) == [f"digits-worker-{index}-aaaaa" for index in (3, 2, 1, 0)]
    gone = planned(of, *there)
    assert removed(gone) == ["digits-queue-1", "digits-queue-2"]
    assert [change.workload.name for change in gone.write_workloads] == ["digits-queue-0"]


@pytest.mark.parametrize(
    "change", [{"runPolicy": {"queueName": "others"}}, {"workers": {"resources": {"limits": {"cpu": 9}}}}]
)
def test_a_job_that_asks_for_something_else_is_queued_anew(change: dict[str, Any]) -> None:
    of = queued()
    base = workload(of_all(of)[0])
    sizes = {"replicas": 4, "minReplicas": 2, "maxReplicas": 16}
    spec: dict[str, Any] = {
        "workers": sizes | change.get("workers", {}),
        "runPolicy": change.get("runPolicy", {"queueName": "gpus"}),
    }
    after = job(status=initialized(), **spec)
    busy = planned(after, base, worker(0), worker(1))
    assert removed(busy) == ["digits-worker-1-aaaaa", "digits-worker-0-aaaaa"]
    assert removed(planned(after, base)) == ["digits-queue-0"]


def test_a_smaller_job_gives_back_what_it_needs_no_longer() -> None:
    base, third, fourth = (workload(one) for one in of_all(queued()))
    of = queued(replicas=3)
    plan = planned(of, base, third, fourth, *(worker(index) for index in range(3)))
    assert removed(plan) == ["digits-queue-2"]


def test_a_larger_minimum_is_asked_for_once_the_job_has_fewer_workers() -> None:
    base, second, third = (workload(one) for one in of_all(queued(least=1, replicas=3)))
    of = queued(least=3)
    enough = planned(of, base, second, third, *(worker(index) for index in range(3)))
    assert (removed(enough), asked(enough)) == ([], [("digits-queue-3", 1, -3)])
    lost = [base, second, workload(of_all(queued(least=1, replicas=3))[2], evicted="Preempted")]
    assert len(removed(planned(of, *lost, *(worker(index) for index in range(3))))) == 3
    gone = planned(of, *lost)
    assert removed(gone) == ["digits-queue-0", "digits-queue-1", "digits-queue-2"]
    assert asked(planned(of)) == [("digits-queue-0", 3, 0)]


def test_a_job_that_waits_asks_for_its_new_minimum() -> None:
    base = workload(of_all(queued(least=3))[0], admitted=False)
    assert removed(planned(queued(least=3), base)) == []
    assert removed(planned(queued(least=1), base)) == ["digits-queue-0"]


def test_a_job_that_grows_by_many_workers_asks_for_all_of_them() -> None:
    there = [workload(one) for one in of_all(queued(least=1, replicas=17, maxReplicas=40))]
    of = queued(least=1, replicas=40, maxReplicas=40)
    assert len(there) == names.MAX_WORKLOADS
    first = planned(of, *there, *(worker(index) for index in range(17)))
    # Small slices make room for larger ones, the last first; no worker of the others has to leave.
    assert removed(first) == [f"digits-worker-{index}-aaaaa" for index in range(16, 4, -1)]
    kept = there[:5]
    assert len(removed(planned(of, *there, *(worker(index) for index in range(5))))) == 12
    slices = asked(planned(of, *kept, *(worker(index) for index in range(5))))
    assert sum(count for _, count, _ in slices) + 5 == 40


def test_a_job_with_more_workers_over_its_old_minimum_than_it_may_have_workloads_asks_for_all_of_them() -> None:
    there = [workload(one) for one in of_all(queued(least=1, replicas=4))]
    of = queued(least=3, replicas=19, maxReplicas=19)
    slices = asked(planned(of, *there, *(worker(index) for index in range(4))))
    assert sum(count for _, count, _ in slices) + 4 == 19


def test_the_quota_of_a_worker_is_given_back_before_it_is_asked_for_anew() -> None:
    """Else its new pod would seem to use the old Workload, which would stay as long as the job."""
    old = [workload(one) for one in of_all(queued())]
    sizes = {"replicas": 4, "minReplicas": 2, "maxReplicas": 16, "resources": {"limits": {"cpu": 9}}}
    after = job(status=initialized(), workers=sizes, runPolicy={"queueName": "gpus"})
    (base,) = planned(after).create_workloads
    leaving = [*old[2:], workload(base), worker(0), worker(1), worker(3, deleting=True)]
    assert asked(planned(after, *leaving)) == [("digits-queue-1", 1, -1)]
    assert asked(planned(after, *old, worker(1, deleting=True))) == []


def test_ready_pods_are_reported_once() -> None:
    of = queued()
    base, *_ = of_all(of)
    (change,) = planned(of, workload(base), worker(0), worker(1)).write_workloads
    assert {"type": "PodsReady", "status": "True"}.items() <= change.conditions[-1].items()
    assert planned(of, workload(base), worker(0), worker(1, ready=False)).write_workloads == ()
    heard_of = observe(
        kinds.WORKLOAD,
        {**base, "status": {"admission": RESERVED, "conditions": [*change.conditions]}},
    )
    assert planned(of, heard_of, worker(0), worker(1)).write_workloads == ()


def test_a_refused_write_is_forgotten_once_there_is_nothing_to_write() -> None:
    of = queued()
    key = write_key(kinds.WORKLOAD, "digits-queue-0")
    refused = {key: Attempt(1, NOW, JobProblem(Reason.REFUSED, "a webhook says no"))}
    base, *_ = of_all(of)

    def after(*workers: Pod) -> ReconcilePlan:
        there = surroundings(of, workload(base), *workers)
        return decided(of, there, snapshot=heard(), queueing=QUEUEING, attempts=refused)

    assert key in after(worker(0)).resolved
    assert key not in after(worker(0), worker(1)).resolved, "that they are ready is to be written"


@pytest.mark.parametrize("ends", [{"runPolicy": {"queueName": "gpus", "suspend": True}}, {"runPolicy": {}}])
def test_a_job_that_waits_no_longer_has_no_workloads(ends: dict[str, Any]) -> None:
    base = workload(of_all(queued())[0])
    of = job(status=initialized(), workers={"replicas": 4, "minReplicas": 2}, **ends)
    assert "digits-queue-0" in removed(planned(of, base))


def test_workers_outlive_an_api_that_is_away() -> None:
    of = queued()
    base, third, fourth = (workload(one) for one in of_all(of))
    workers = [worker(index) for index in range(4)]
    plan = planned(of, base, third, fourth, *workers, queueing=None)
    assert (made(plan), removed(plan), plan.create_workloads) == ([], [], ())
    assert planned(of, base, third, fourth, *workers[:3], queueing=None).create_pods == ()


def test_a_job_that_ends_while_the_api_is_away_gives_its_quota_back_later() -> None:
    base, *_ = (workload(one) for one in of_all(queued()))
    of = job(status={"phase": "Failed"}, workers={"replicas": 4, "minReplicas": 2}, runPolicy={"queueName": "gpus"})
    away = decided(of, children([base]), queueing=None)
    assert removed(away) == []
    assert away.requeue_after is not None
    assert "digits-queue-0" in removed(planned(of, base))


def test_a_job_that_waits_goes_on_waiting_while_the_api_is_away() -> None:
    of = queued()
    (base, *_) = of_all(of)
    plan = planned(of, workload(base, admitted=False), queueing=None)
    assert (made(plan), removed(plan)) == ([], [])
    assert "cannot be read" in str(plan.status.message)


def test_a_group_that_runs_stays_one_and_without_workloads_there_are_groups() -> None:
    of = queued()
    (pod, *_) = planned(of, queueing=None).create_pods
    grouped = observe(kinds.POD, {**pod, "status": {"phase": "Running"}})
    assert isinstance(grouped, Pod)
    assert grouped.group is not None
    plan = planned(of, grouped)
    assert (plan.create_workloads, len(plan.create_pods)) == ((), 3)


def test_a_workload_admits_as_many_workers_as_kueue_has_counted() -> None:
    of = queued()
    (base, *_) = of_all(of)
    more = {**base, "metadata": {**base["metadata"], "annotations": {**base["metadata"]["annotations"], "count": "4"}}}
    assert workload(more).indices == range(2)
    for count in (0, -1, 10**9, "2", None):
        pod_sets = [{**base["spec"]["podSets"][0], "count": count}]
        forged = workload({**base, "spec": {**base["spec"], "podSets": pod_sets}})
        assert (forged.count, made(planned(of, forged))) == (0, [])


def test_a_slice_that_is_only_partly_needed_stays() -> None:
    whole = job(
        status=initialized(),
        workers={"replicas": 101, "minReplicas": 1, "maxReplicas": 101},
        runPolicy={"queueName": "gpus"},
    )
    (base,) = planned(whole).create_workloads
    slices = [workload(one) for one in planned(whole, workload(base)).create_workloads]
    sizes = {"replicas": 100, "minReplicas": 1, "maxReplicas": 101}
    smaller = job(status=initialized(), workers=sizes, runPolicy={"queueName": "gpus"})
    workers = [worker(index) for index in range(101)]
    assert removed(planned(smaller, workload(base), *slices, *workers)) == ["digits-worker-100-aaaaa"]
    assert removed(planned(smaller, workload(base), *slices, *workers[:100])) == []


def test_nodes_that_kueue_chooses_one_by_one_are_refused() -> None:
    of = queued()
    (base, *_) = of_all(of)
    assigned = {**RESERVED["podSetAssignments"][0], "topologyAssignment": {"levels": ["host"]}}  # type: ignore[index]
    plan = planned(of, workload(base, admission={**RESERVED, "podSetAssignments": [assigned]}))
    assert made(plan) == []
    assert "topology-aware scheduling" in str(plan.status.message)


def test_no_admission_check_sets_labels_of_ours() -> None:
    of = queued()
    (base, *_) = of_all(of)
    labels = {names.INDEX: "77", names.JOB: "other", "kueue.x-k8s.io/queue-name": "q", "team": "vision"}
    update = {"name": "workers", "labels": labels, "annotations": {names.FAILURES: "9", "note": "x"}}
    plan = planned(of, workload(base, admissionChecks=[{"name": "check", "podSetUpdates": [update]}]))
    metadata = plan.create_pods[0]["metadata"]
    assert [metadata["labels"].get(name) for name in labels] == ["0", "digits", None, "vision"]
    assert (metadata["annotations"][names.FAILURES], metadata["annotations"]["note"]) == ("0", "x")


def test_a_job_that_cannot_start_gives_back_what_it_has_and_keeps_its_place() -> None:
    of = job(workers={"replicas": 4, "minReplicas": 2}, runPolicy={"queueName": "gpus"})
    (base,) = planned(of).create_workloads
    broken = [coordinator(of, ready=False, waiting="ImagePullBackOff")]

    def there(*more: KubeObject) -> Children:
        kept = [child for child in surroundings(of).objects.values() if getattr(child, "role", "") != names.COORDINATOR]
        return children([*kept, *broken, *more])

    waits = decided(of, there(workload(base, admitted=False)), queueing=QUEUEING)
    assert (removed(waits), waits.create_workloads) == ([], ())
    assert removed(decided(of, there(workload(base)), queueing=QUEUEING)) == ["digits-queue-0"]


def test_since_when_a_job_waits_is_the_same_at_each_look_whatever_the_status_keeps() -> None:
    of = queued()
    (base, *_) = of_all(of)
    metadata = {**base["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}
    waiting = workload({**base, "metadata": metadata}, admitted=False)
    (queue,) = [planned(of, waiting).status.queue]
    assert queue is not None
    assert queue.waiting_since == "2026-01-01T00:00:00Z"


def test_a_job_that_waits_shows_its_place_and_one_that_has_all_shows_none() -> None:
    of = queued()
    base, third, fourth = of_all(of)
    known = QueueUsage(places={("default", f"digits-queue-{slot}"): QueuePlace(slot + 1, slot + 4) for slot in (0, 1)})

    def shown(*there: Workload) -> tuple[str, int | None]:
        plan = decided(of, surroundings(of, *there), snapshot=heard(), queueing=QUEUEING, queue_usage=known)
        assert plan.status.queue is not None
        return plan.waits_in, plan.status.queue.position

    assert shown(workload(base, admitted=False)) == ("gpus", 1)
    assert shown(workload(base), workload(third, admitted=False), workload(fourth, admitted=False)) == ("gpus", 2)
    assert shown(workload(base), workload(third), workload(fourth)) == ("", None)


def test_a_script_is_not_complete_while_a_worker_that_gives_way_still_runs() -> None:
    sizes = {"replicas": 4, "minReplicas": 2, "maxReplicas": 16}
    of = job(status=initialized(), trainer=SCRIPT, workers=sizes, runPolicy={"queueName": "gpus"})
    base, third, fourth = of_all(of)
    there = [workload(base), *(workload(one, evicted="Preempted") for one in (third, fourth))]
    done = [ended(0, code=0), ended(1, code=0)]
    assert planned(of, *there, *done, worker(2), worker(3)).status.phase != "Succeeded"
    assert planned(of, *there, *done).status.phase == "Succeeded"


@pytest.mark.parametrize("body", [{}, {"nodeLabels": []}, {"tolerations": "x", "nodeLabels": {"a": 1}}])
def test_a_flavor_of_any_form_is_read(body: dict[str, Any]) -> None:
    assert placement_of(body, labels="nodeLabels").tolerations == NodePlacement().tolerations
