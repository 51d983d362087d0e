"""A pod in one line: what it is in the job, how it is, and why it does not run."""

from typing import Any

import pytest

from tandem_cli.kubernetes.job_view import parse_pod, parse_pods
from tests.support import fake_kubectl as fake

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}


def ended(code: int, **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "finishedAt": "2026-11-21T12:05:00Z", "reason": "Error", **more}}


@pytest.mark.parametrize(
    ("item", "state", "why"),
    [
        (fake.pod("worker", 0), "running", ""),
        (fake.pod("worker", 0, ready=False), "not ready", ""),
        (fake.pod("worker", 0, {"waiting": {"reason": "ContainerCreating"}}), "starting", ""),
        (
            fake.pod("worker", 0, {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}),
            "waiting",
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            fake.pod("worker", 0, {}, node="", phase="Pending", conditions=[UNSCHEDULABLE], containerStatuses=[]),
            "waiting",
            "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        ),
        (fake.pod("evaluator", 0, ended(0)), "done", ""),
        (fake.pod("worker", 0, ended(1)), "failed", "exit code 1"),
        (fake.pod("worker", 0, ended(65)), "failed", "exit code 65 (diverged)"),
        (fake.pod("worker", 0, ended(137, reason="OOMKilled")), "failed", "OOMKilled; exit code 137"),
        (
            fake.pod("worker", 0, ended(78, message="a line\nspec.trainer: no such data\n")),
            "failed",
            "exit code 78 (configuration); spec.trainer: no such data",
        ),
        (
            fake.pod("worker", 0, ended(75), conditions=[EVICTED]),
            "failed",
            "EvictionByEvictionAPI: drained; exit code 75 (preempted)",
        ),
        (
            fake.pod("worker", 0, {}, phase="Failed", reason="Evicted", message="The node was low on memory."),
            "failed",
            "Evicted: The node was low on memory.",
        ),
        (fake.pod("worker", 0, metadata={"deletionTimestamp": "2026-11-21T12:09:00Z"}), "leaving", ""),
    ],
)
def test_how_a_pod_is_and_why(item: dict[str, Any], state: str, why: str) -> None:
    found = parse_pod(item)
    assert (found.state, found.why) == (state, why)


def test_a_container_that_was_started_again_says_how_the_one_before_ended() -> None:
    item = fake.pod("coordinator", state={"waiting": {"reason": "CrashLoopBackOff"}}, restarts=3)
    item["status"]["containerStatuses"][0]["lastState"] = ended(1)
    found = parse_pod(item)
    assert (found.why, found.restarts) == ("CrashLoopBackOff; before: exit code 1", 3)
    assert found.has_logs, "why it crashed is what one wants to read"


def test_pods_are_called_what_they_are_in_the_job_and_come_in_its_order() -> None:
    all_of_them = [
        fake.pod("evaluator", 0),
        fake.pod("worker", 10),
        fake.pod("worker", 2),
        fake.pod("coordinator"),
    ]
    assert [one.name for one in parse_pods(all_of_them)] == ["coordinator", "worker-2", "worker-10", "evaluator-0"]


def test_of_two_pods_in_one_place_the_older_comes_first() -> None:
    old = fake.pod("worker", 0, name="old")
    new = fake.pod("worker", 0, name="new", metadata={"creationTimestamp": "2026-11-21T12:30:00Z"})
    assert [one.pod for one in parse_pods([new, old])] == ["old", "new"]


def test_ours_is_told_from_the_containers_that_a_template_adds() -> None:
    item = fake.pod("worker", 0)
    theirs = {"name": "proxy", "restartCount": 7, "ready": False, "state": ended(1)}
    item["status"]["containerStatuses"].insert(0, theirs)
    assert (parse_pod(item).state, parse_pod(item).restarts) == ("running", 0)


def test_a_pod_that_the_kubelet_has_not_seen_yet_has_no_log() -> None:
    item = fake.pod("worker", 0, node="")
    item["status"] = {"phase": "Pending"}
    assert (parse_pod(item).state, parse_pod(item).has_logs) == ("waiting", False)
    assert parse_pod(fake.pod("worker", 0)).has_logs
    assert parse_pod(fake.pod("worker", 0, ended(1))).has_logs
