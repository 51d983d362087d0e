"""Who has the quota that a job waits for: names in its own namespace, numbers of the others."""

from typing import Any

import pytest

from tandem.wire.queue_view import QueueView
from tandem_operator.queue_usage import (
    QueuePlace,
    QueueUsage,
    QuotaUse,
    WaitingWorkload,
    missing_quota,
    place_of,
    quantity,
    quota_use,
    with_wait,
)

GPU = "nvidia.com/gpu"
MESSAGE = (
    "couldn't assign flavors to pod set workers: insufficient unused quota for nvidia.com/gpu in flavor a100, "
    "1 more needed, insufficient unused quota for nvidia.com/gpu in flavor h100, 2 more needed. "
    "Pending the preemption of 1 workload(s)"
)
VIEW = QueueView(name="gpus", integration="Workload", admitted=0)
JOB = "DistributedTrainingJob"


def use(name: str, amount: float, namespace: str = "lab", **more: Any) -> QuotaUse:
    facts: dict[str, Any] = {"cluster_queue": "all", "priority": 0, "since": 100.0, "amounts": {("a100", GPU): amount}}
    return QuotaUse(namespace, (JOB, name), **{**facts, **more})


def usage(*uses: QuotaUse, **more: Any) -> QueueUsage:
    return QueueUsage(
        **{"places": {("lab", "digits-queue-0"): QueuePlace(2, 5)}, "cluster_queues": {("lab", "gpus"): "all"}, **more},
        uses=uses,
    )


def shown(found: QueueUsage, message: str = MESSAGE) -> dict[str, Any]:
    return with_wait(VIEW, WaitingWorkload("lab", (JOB, "digits"), "digits-queue-0", message), found).dump()


def test_the_largest_holder_comes_first_with_all_of_its_workloads() -> None:
    uses = [use("small", 1, since=5.0), use("large", 1, priority=-1, since=90.0), use("large", 2, since=60.0)]
    found = shown(usage(*uses))
    assert found["holders"] == [
        {"kind": JOB, "name": "large", "amount": 3.0, "priority": 0, "since": "1970-01-01T00:01:00Z"},
        {"kind": JOB, "name": "small", "amount": 1.0, "priority": 0, "since": "1970-01-01T00:00:05Z"},
    ]
    assert (found["position"], found["clusterPosition"]) == (2, 5)
    assert [entry["flavor"] for entry in found["missing"]] == ["a100", "h100"]
    assert "otherNamespaces" not in found


def test_of_other_namespaces_there_are_only_numbers() -> None:
    uses = [
        use("secret", 4, "theirs", priority=1000),
        use("secret", 1, "theirs", priority=999),
        use("secret", 2, "others", priority=-5),
    ]
    found = shown(usage(*uses))
    assert found["otherNamespaces"] == {"holders": 2, "amount": 7.0, "lowestPriority": -5, "highestPriority": 1000}
    assert found["holders"] == []
    assert not {"secret", "theirs", "others"} & {*str(found).replace("'", " ").split()}


def test_only_what_has_the_missing_quota_counts_and_not_the_job_itself() -> None:
    uses = [
        use("digits", 4),
        use("elsewhere", 4, cluster_queue="other"),
        use("other-flavor", 4, amounts={("t4", GPU): 4.0}),
        use("other-resource", 4, amounts={("a100", "cpu"): 4.0}),
        use("second-flavor", 3, amounts={("h100", GPU): 3.0}),
    ]
    assert [holder["name"] for holder in shown(usage(*uses))["holders"]] == ["second-flavor"]


def test_the_queues_of_a_cohort_share_their_quota() -> None:
    uses = [use("borrower", 4, cluster_queue="other"), use("stranger", 4, cluster_queue="third")]
    found = shown(usage(*uses, cohorts={"all": "team", "other": "team", "third": "b"}))
    assert [holder["name"] for holder in found["holders"]] == ["borrower"]
    assert shown(usage(*uses))["holders"] == [], "queues without a cohort share nothing"


def test_the_list_of_holders_is_bounded_and_the_rest_counted() -> None:
    found = shown(usage(*(use(f"job-{number}", number) for number in range(1, 9))))
    assert [holder["name"] for holder in found["holders"]] == [f"job-{number}" for number in (8, 7, 6, 5, 4)]
    assert found["moreHolders"] == 3


@pytest.mark.parametrize(
    "message",
    ["", "LocalQueue gpus doesn't exist", "insufficient quota for cpu in flavor a, request > maximum capacity (9 > 8)"],
)
def test_where_nobody_has_what_is_missing_nobody_is_named(message: str) -> None:
    found = shown(usage(use("large", 4)), message)
    assert (found["missing"], found["holders"], found["position"]) == ([], [], 2)


def test_a_job_of_which_nothing_could_be_read_still_says_what_is_missing() -> None:
    found = shown(QueueUsage())
    assert found["missing"][0] == {"resource": GPU, "flavor": "a100", "amount": 1.0}
    assert "position" not in found


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8.0), ("500m", 0.5), ("2Gi", 2.0**31), ("1.5G", 1.5e9), ("3Ki", 3072.0), ("1e3", 1000.0), ("2k", 2000.0)],
)
def test_quantities_of_kubernetes_are_numbers(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1" * 40, "1e999", "8 m", None, 8, [], "NaN"])
def test_what_is_no_quantity_is_none(text: object) -> None:
    assert quantity(text) is None
    assert missing_quota(f"insufficient unused quota for cpu in flavor a, {text}x more needed") == []


def body(**status: Any) -> dict[str, Any]:
    admission = {
        "clusterQueue": "all",
        "podSetAssignments": [
            {"flavors": {GPU: "a100", "cpu": "a100"}, "resourceUsage": {GPU: "2", "cpu": "500m"}},
            {"flavors": {GPU: "a100"}, "resourceUsage": {GPU: "1"}},
        ],
    }
    reserved = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "1970-01-01T00:01:40Z"}
    owner = {"kind": JOB, "name": "large", "controller": True}
    return {
        "metadata": {"name": "large-queue-0", "namespace": "lab", "ownerReferences": [{"kind": "Pod"}, owner]},
        "spec": {"priority": 7},
        "status": {"admission": admission, "conditions": [reserved], **status},
    }


def test_a_workload_has_the_quota_of_all_of_its_pod_sets() -> None:
    amounts = {("a100", GPU): 3.0, ("a100", "cpu"): 0.5}
    assert quota_use(body()) == QuotaUse("lab", (JOB, "large"), "all", 7, 100.0, amounts)


def test_a_group_of_pods_has_the_name_of_its_workload() -> None:
    group = body()
    group["metadata"]["ownerReferences"] = [{"kind": "Pod", "name": "a"}, {"kind": "Pod", "name": "b"}]
    found = quota_use(group)
    assert found is not None
    assert found.owner == ("Workload", "large-queue-0")


@pytest.mark.parametrize(
    "status", [{"admission": None}, {"conditions": [{"type": "Finished", "status": "True"}]}, {"admission": "x"}]
)
def test_a_workload_that_waits_has_finished_or_is_none_has_no_quota(status: dict[str, Any]) -> None:
    assert quota_use(body(**status)) is None


@pytest.mark.parametrize(
    "item", [{}, {"metadata": []}, {"metadata": {"name": "a", "namespace": "b"}} | {"positionInLocalQueue": -1}]
)
def test_an_answer_without_a_place_has_none(item: dict[str, Any]) -> None:
    assert place_of(item) is None


def test_places_count_from_one() -> None:
    item = {"metadata": {"name": "a", "namespace": "lab"}, "positionInLocalQueue": 0, "positionInClusterQueue": 3}
    assert place_of(item) == (("lab", "a"), QueuePlace(1, 4))
