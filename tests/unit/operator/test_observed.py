"""What is taken from objects of the API server, and what is kept of them."""

from typing import Any

import pytest

from tandem_operator import kinds, names
from tandem_operator.informer import Cache
from tandem_operator.job_objects import InvalidSpec, parsed
from tandem_operator.observed import Pod, children, observe
from tandem_operator.pod_ends import PodEnd
from tandem_operator.pods import overlay
from tandem_operator.reporting import patch
from tests.support import manifests
from tests.support.worlds.operator_job import NOW, UID, coordinator, worker
from tests.support.worlds.operator_world import merged


def pod(phase: str = "Running", **status: Any) -> Pod:
    labels = {names.JOB: "j", names.ROLE: "worker", names.INDEX: "3"}
    metadata = {
        "name": "p",
        "uid": "u",
        "resourceVersion": "7",
        "labels": labels,
        "annotations": {names.FAILURES: "2"},
        "creationTimestamp": "1970-01-01T00:01:00Z",
        "ownerReferences": [{"kind": "DistributedTrainingJob", "uid": "owner", "controller": True}],
    }
    found = observe(kinds.POD, {"metadata": metadata, "status": {"phase": phase, **status}})
    assert isinstance(found, Pod)
    return found


def conditions(**those: bool) -> list[dict[str, str]]:
    return [{"type": kind, "status": str(holds)} for kind, holds in those.items()]


def state(**what: Any) -> list[dict[str, Any]]:
    beside = {"name": "sidecar", "state": {"terminated": {"exitCode": 9}}}
    return [beside, {"name": "worker", "state": what}]


def test_a_pod_says_who_it_is() -> None:
    found = pod()
    assert (found.index, found.failures, found.owner, found.created, found.live) == (3, 2, "owner", 60.0, True)


def test_our_container_decides_how_a_pod_ended_and_not_the_one_beside() -> None:
    times = {"startedAt": "1970-01-01T00:01:00Z", "finishedAt": "1970-01-01T00:02:30Z"}
    terminated = {"exitCode": 78, "reason": "Error", "message": "first\nno data set at /data\n", **times}
    found = pod("Failed", containerStatuses=state(terminated=terminated))
    assert (found.code, found.message, found.ended) == (78, "no data set at /data", True)
    assert (found.started, found.finished) == (60.0, 150.0)


@pytest.mark.parametrize(
    ("holds", "silent"),
    [
        ({"Ready": True, "ContainersReady": True}, False),
        ({"Ready": False, "ContainersReady": True}, True),
        ({"Ready": False, "ContainersReady": False}, False),
    ],
)
def test_a_pod_whose_containers_are_ready_and_that_is_not_is_on_a_silent_node(
    holds: dict[str, bool], silent: bool
) -> None:
    assert pod(conditions=conditions(**holds)).silent is silent


def test_why_a_pod_waits() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
    found = pod("Pending", conditions=[unscheduled])
    assert (found.waiting, found.message) == ("Unschedulable", "no node")
    pulling = pod("Pending", containerStatuses=state(waiting={"reason": "ErrImagePull", "message": "not found"}))
    assert (pulling.waiting, pulling.message) == ("ImagePullBackOff", "not found")
    assert pod("Pending", containerStatuses=state(waiting={"reason": "ContainerCreating"})).waiting == ""


@pytest.mark.parametrize("where", ["initContainerStatuses", "containerStatuses"])
def test_a_container_beside_ours_that_does_not_start_is_named(where: str) -> None:
    beside = {"name": "fetch", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    ours = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    found = pod("Pending", **{"containerStatuses": [ours], where: [ours, beside]})
    assert (found.waiting, found.message) == ("ImagePullBackOff", "container fetch: no such image")


@pytest.mark.parametrize(
    ("policy", "found"),
    [(None, ("PodInitializing", "init container fetch runs")), ("Always", ("", ""))],
    ids=["an init container", "a sidecar"],
)
def test_an_init_container_that_runs_is_what_the_rest_waits_for(policy: str | None, found: tuple[str, str]) -> None:
    init = {"name": "fetch", **({"restartPolicy": policy} if policy else {})}
    ours = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"phase": "Pending", "initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}]}
    body = {"metadata": {"labels": {names.ROLE: "worker"}}, "spec": {"initContainers": [init]}}
    waits = observe(kinds.POD, {**body, "status": {**status, "containerStatuses": [ours]}})
    runs = observe(kinds.POD, {**body, "status": {**status, "containerStatuses": [{**ours, "state": {"running": {}}}]}})
    assert isinstance(waits, Pod)
    assert isinstance(runs, Pod)
    assert (waits.waiting, waits.message) == found
    assert (runs.waiting, runs.message) == ("", "")


def test_restarts_of_init_containers_count_as_those_of_ours() -> None:
    """Between two of its starts nothing else shows that an init container fails again and again."""
    init = [{"name": "fetch", "restartCount": 2, "state": {"running": {}}}]
    assert pod("Pending", initContainerStatuses=init, containerStatuses=state()).restarts == 2


@pytest.mark.parametrize(
    ("container", "begun"),
    [
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, False),
        ({"state": {"running": {}}}, True),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 1}, True),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": {"terminated": {}}}, True),
    ],
)
def test_a_container_that_waits_to_be_started_again_has_begun(container: dict[str, Any], begun: bool) -> None:
    """Its pod would be ended otherwise, as one that never begins."""
    assert pod("Pending", containerStatuses=[{"name": "worker", **container}]).has_run is begun


@pytest.mark.parametrize("task", ["causal-lm", "image-classification"])
def test_parameters_that_the_coordinator_would_refuse_at_each_start_are_no_job(task: str) -> None:
    trainer = {"task": task, "parameters": {"lenght": 64}}
    body = manifests.manifest("digits", "lab", trainer=trainer)
    with pytest.raises(InvalidSpec, match=r"^spec\.trainer\.parameters\.lenght: "):
        parsed(body)


def test_an_init_container_that_failed_says_why_its_pod_ended() -> None:
    terminated = {"exitCode": 7, "reason": "Error", "message": "looking\nno such data set\n"}
    first = [{"name": "ok", "state": {"terminated": {"exitCode": 0}}}, {"name": "fetch", "state": {}}]
    first[1]["state"] = {"terminated": terminated}
    ours = state(waiting={"reason": "PodInitializing"})
    found = pod("Failed", initContainerStatuses=first, containerStatuses=ours)
    assert found.message == "init container fetch ended with exit code 7: no such data set"


@pytest.mark.parametrize(
    ("gates", "finalizers", "abandoned"),
    [
        ([names.GATE], [names.FINALIZER], False),
        ([names.GATE], [], True),
        ([], [names.FINALIZER], False),
        ([], [], False),
        (["somebody.else/gate"], [], False),
    ],
)
def test_a_queue_that_has_done_with_a_pod_at_its_gate_has_taken_its_finalizer(
    gates: list[str], finalizers: list[str], abandoned: bool
) -> None:
    metadata = {"name": "p", "uid": "u", "finalizers": finalizers}
    found = observe(kinds.POD, {"metadata": metadata, "spec": {"schedulingGates": [{"name": gate} for gate in gates]}})
    assert isinstance(found, Pod)
    assert found.abandoned is abandoned


STORAGE = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
RAN = [{"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}]
KILLED = [{"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
PULLED = [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}]


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ({"containerStatuses": RAN}, PodEnd.FAILED),
        ({"containerStatuses": RAN, "conditions": conditions(DisruptionTarget=True)}, PodEnd.DISRUPTED),
        (
            {"containerStatuses": RAN, "reason": "Evicted", "message": "The node was low on resource: memory. "},
            PodEnd.DISRUPTED,
        ),
        ({"containerStatuses": RAN, "reason": "Evicted", "message": STORAGE}, PodEnd.OVER_LIMIT),
        ({"containerStatuses": RAN, "reason": "NodeAffinity"}, PodEnd.DISRUPTED),
        ({"containerStatuses": RAN, "reason": "Terminated", "message": "Pod was terminated"}, PodEnd.DISRUPTED),
        ({"containerStatuses": KILLED}, PodEnd.OVER_LIMIT),
        ({"containerStatuses": PULLED, "reason": "DeadlineExceeded"}, PodEnd.FAILED),
        ({"containerStatuses": PULLED, "reason": "UnexpectedAdmissionError"}, PodEnd.REJECTED),
        ({"reason": "TopologyAffinityError", "message": "Pod was rejected: Topology"}, PodEnd.REJECTED),
        ({"reason": "OutOfnvidia.com/gpu"}, PodEnd.REJECTED),
        ({"reason": "NodeAffinity", "message": "Pod was rejected: Predicate NodeAffinity failed"}, PodEnd.REJECTED),
        ({"reason": "Evicted", "message": "The node had condition: [DiskPressure]. "}, PodEnd.REJECTED),
        ({"reason": "NodeLost"}, PodEnd.DISRUPTED),
    ],
)
def test_a_pod_that_has_ended_has_ended_in_one_way(status: dict[str, Any], end: PodEnd) -> None:
    assert pod("Failed", **status).end is end


def test_what_is_said_of_an_end_is_the_kubelets_word_where_it_is_its_doing() -> None:
    assert pod("Failed", reason="Evicted", message=STORAGE, containerStatuses=RAN).message == STORAGE.strip()
    assert pod("Failed", containerStatuses=KILLED).message == "OOMKilled: it used more memory than its limit"


@pytest.mark.parametrize(
    ("policy", "phase", "beside", "found"),
    [
        ("Never", "Running", "running", (True, True)),
        ("Never", "Running", "terminated", (True, False)),
        ("Always", "Running", "running", (False, False)),
        ("Never", "Failed", "terminated", (True, False)),
    ],
    ids=["a sidecar goes on", "its phase is late", "its kubelet starts it again", "all have ended"],
)
def test_the_end_of_our_container_is_the_end_of_its_pod(
    policy: str, phase: str, beside: str, found: tuple[bool, bool]
) -> None:
    ended = {"terminated": {"exitCode": 1, "finishedAt": "1970-01-01T00:02:30Z"}}
    labels = {names.JOB: "j", names.ROLE: "worker"}
    statuses = [{"name": "worker", "state": ended}, {"name": "proxy", "state": {beside: {}}}]
    status = {"phase": phase, "containerStatuses": statuses}
    seen = observe(kinds.POD, {"metadata": {"labels": labels}, "spec": {"restartPolicy": policy}, "status": status})
    assert isinstance(seen, Pod)
    assert (seen.ended, seen.lingers) == found
    assert (seen.code, seen.finished) == (1, 150.0)


def test_a_readiness_gate_that_is_not_met_is_no_silent_node() -> None:
    waits = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
    found = pod(conditions=[waits, {"type": "ContainersReady", "status": "True"}])
    assert (found.ready, found.silent, found.live) == (False, False, True)


# The cache


def body(version: int, uid: str = "u", **status: Any) -> dict[str, Any]:
    metadata = {"name": "p", "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": {names.JOB: "j"}}
    return {"metadata": metadata, "status": status}


def test_only_what_is_newer_and_different_is_news() -> None:
    cache = Cache()
    assert cache.upsert(kinds.POD, body(5, phase="Pending")) == [("n", "j")]
    assert cache.upsert(kinds.POD, body(6, phase="Pending")) == []
    assert cache.upsert(kinds.POD, body(8, phase="Running")) == [("n", "j")]
    assert cache.upsert(kinds.POD, body(7, phase="Pending")) == []
    assert [thing.phase for thing in cache.children(("n", "j")).objects.values() if isinstance(thing, Pod)] == [
        "Running"
    ]


def test_the_end_of_an_earlier_object_of_that_name_is_not_the_end_of_this_one() -> None:
    cache = Cache()
    cache.upsert(kinds.POD, body(5, uid="new"))
    assert cache.remove(kinds.POD, "n", "p", "old") is None
    assert cache.remove(kinds.POD, "n", "p", "new") == ("n", "j")
    assert cache.children(("n", "j")).objects == {}


def test_a_list_drops_what_is_gone_and_not_what_came_later() -> None:
    cache = Cache()
    cache.upsert(kinds.POD, body(5))
    assert list(cache.prune(kinds.POD, "", set(), 4)) == []
    assert list(cache.prune(kinds.POD, "elsewhere", set(), 9)) == []
    assert list(cache.prune(kinds.POD, "", {"u"}, 9)) == []
    assert list(cache.prune(kinds.POD, "", set(), 9)) == [("n", "j")]


# Templates and patches


def test_a_template_is_laid_over_ours_by_name() -> None:
    ours = {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}], "tolerations": [{"key": "t"}], "n": 1}
    theirs = {
        "containers": [{"name": "a", "env": [{"name": "X", "value": "2"}, {"name": "Y", "value": "3"}]}, {"name": "b"}],
        "tolerations": [{"key": "u"}],
        "n": 2,
    }
    assert overlay(ours, theirs) == {
        "containers": [{"name": "a", "env": [{"name": "X", "value": "2"}, {"name": "Y", "value": "3"}]}, {"name": "b"}],
        "tolerations": [{"key": "t"}, {"key": "u"}],
        "n": 2,
    }


def test_lists_without_names_are_replaced() -> None:
    assert overlay({"args": ["a", "b"]}, {"args": ["c"]}) == {"args": ["c"]}


def test_a_status_is_written_by_its_changes_alone() -> None:
    old = {"phase": "Running", "loss": 1.0, "workers": {"ready": 1, "desired": 2}, "gone": True}
    new = {"phase": "Running", "loss": 0.5, "workers": {"ready": 2, "desired": 2}}
    changes = patch(old, new)
    assert changes == {"loss": 0.5, "workers": {"ready": 2}, "gone": None}
    assert merged(old, changes) == new
    assert patch(new, new) == {}


def test_the_pods_of_a_look_are_sorted_once_and_whoever_gets_them_may_change_his_list() -> None:
    things = [worker(index, created=NOW - index) for index in range(3)]
    there = children([*things, worker(7, owner="another"), coordinator()])
    first = there.pods(names.WORKER, UID)
    assert [pod.index for pod in first] == [2, 1, 0]
    first.clear()
    again = there.pods(names.WORKER, UID)
    assert [pod.index for pod in again] == [2, 1, 0]
    assert there._pods is there._pods
    assert there.pods(names.EVALUATOR, UID) == []
