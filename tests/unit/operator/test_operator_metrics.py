"""What the operator tells of all jobs."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.formatting import rfc3339
from tandem.wire.metrics import OPERATOR
from tandem.wire.queue_view import QueueView
from tandem.wire.status import Phase, Status
from tandem_operator.operator_metrics import Holding, OperatorMetrics, holding
from tests.support.worlds.operator_job import job


def told(metrics: OperatorMetrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_jobs_and_their_gpus_are_summed_by_namespace() -> None:
    metrics = OperatorMetrics()
    metrics.holds(("lab", "a"), Holding("Running", gpus=4, workers=3, ready=2))
    metrics.holds(("lab", "b"), Holding("Pending", gpus=1, workers=2, ready=0))
    metrics.holds(("ops", "c"), Holding("Running"))
    found = told(metrics)
    assert found["tandem_operator_jobs", "lab", "Running"] == 1
    assert found["tandem_operator_jobs", "lab", "Pending"] == 1
    assert found["tandem_operator_jobs", "ops", "Running"] == 1
    assert (found["tandem_operator_gpus_asked", "lab"], found["tandem_operator_gpus_ready", "lab"]) == (14, 8)
    assert (found["tandem_operator_gpus_asked", "ops"], found["tandem_operator_gpus_ready", "ops"]) == (0, 0)


def test_a_job_that_is_over_or_suspended_asks_for_nothing_and_one_that_is_gone_is_not_told() -> None:
    metrics = OperatorMetrics()
    for phase in ("Succeeded", "Failed", "Suspended"):
        metrics.holds(("lab", phase), Holding(phase, gpus=4, workers=3, ready=3))
    assert (told(metrics)["tandem_operator_gpus_asked", "lab"], told(metrics)["tandem_operator_gpus_ready", "lab"]) == (
        0,
        0,
    )
    for phase in ("Succeeded", "Failed", "Suspended"):
        metrics.forget(("lab", phase))
    assert not any(name.startswith(("tandem_operator_jobs", "tandem_operator_gpus")) for name, *_ in told(metrics))


def test_looks_and_errors_are_counted_from_zero() -> None:
    metrics = OperatorMetrics()
    assert told(metrics)["tandem_operator_reconcile_errors_total",] == 0
    metrics.reconciled(0.25, failed=False)
    metrics.reconciled(0.5, failed=True)
    found = told(metrics)
    names = ("reconciles_total", "reconcile_errors_total", "reconcile_seconds_total")
    assert [found[f"tandem_operator_{name}",] for name in names] == [2, 1, 0.75]


def test_every_metric_of_the_list_is_told() -> None:
    metrics = OperatorMetrics()
    queue = QueueView(name="gpus", integration="Workload", admitted=2, position=1)
    metrics.holds(("lab", "a"), Holding("Running", reason="Running", since=0.0, queue=queue))
    metrics.released("lab")
    metrics.unreadable = lambda: {"Pod": 0}
    assert {name for name, *_ in told(metrics)} == {metric.name for metric in OPERATOR}


def test_since_when_a_job_is_ready_or_is_not_is_told_with_the_reason() -> None:
    metrics = OperatorMetrics()
    metrics.holds(("lab", "a"), Holding("Failed", reason="DoesNotStart", since=time.time() - 90))
    assert told(metrics)["tandem_operator_job_state_seconds", "a", "lab", "Failed", "DoesNotStart"] == pytest.approx(
        90, abs=30
    )


def test_where_jobs_are_not_to_be_named_none_is_and_no_namespace() -> None:
    metrics = OperatorMetrics(names_jobs=False)
    metrics.holds(("lab", "a"), Holding("Running", gpus=4, workers=3, ready=2, reason="Running", since=0.0))
    text = metrics.text().decode()
    assert "lab" not in text
    assert "tandem_operator_reconciles_total" in text


def test_how_long_a_job_waits_in_its_queue_and_with_how_many_workers_it_trains_is_told() -> None:
    metrics = OperatorMetrics()
    since = rfc3339(time.time() - 90)
    waits = QueueView(name="gpus", integration="Workload", admitted=0, waiting_since=since)
    trains = QueueView(name="gpus", integration="Workload", admitted=3)
    for name, queue in (("a", waits), ("b", trains), ("c", QueueView(name="gpus", integration="PodGroup"))):
        metrics.holds(("lab", name), holding(Status(phase="Running", queue=queue), job().spec))
    found = told(metrics)
    assert found["tandem_operator_queue_wait_seconds", "a", "lab", "gpus"] == pytest.approx(90, abs=30)
    assert found["tandem_operator_queue_wait_seconds", "b", "lab", "gpus"] == 0
    assert [found["tandem_operator_queue_workers", name, "lab", "gpus"] for name in "ab"] == [0, 3]
    assert ("tandem_operator_queue_workers", "c", "lab", "gpus") not in found


def test_a_job_that_its_queue_shrinks_or_lets_grow_is_counted_and_what_its_user_does_is_not() -> None:
    metrics = OperatorMetrics()

    def has(workers: int, replicas: int = 4, phase: Phase = "Running") -> None:
        spec = job(workers={"replicas": replicas, "minReplicas": 1, "maxReplicas": 8}).spec
        queue = QueueView(name="gpus", integration="Workload", admitted=workers, waited_seconds=30.0, position=3)
        metrics.holds(("lab", "a"), holding(Status(phase=phase, queue=queue), spec))

    def counted() -> tuple[float, float]:
        found = told(metrics)
        growths = found["tandem_operator_queue_growths_total", "lab"]
        return growths, found["tandem_operator_queue_shrinks_total", "lab"]

    has(0)
    has(2)
    assert counted() == (0, 0), "a start"
    has(4)
    has(4)
    assert counted() == (1, 0)
    found = told(metrics)
    assert found["tandem_operator_queue_lent_workers", "a", "lab", "gpus"] == 3
    assert found["tandem_operator_queue_waited_seconds", "a", "lab", "gpus"] == 30
    assert found["tandem_operator_queue_position", "a", "lab", "gpus"] == 3
    has(3)
    assert counted() == (1, 1)
    has(2, replicas=2)
    assert counted() == (1, 1), "its user has scaled it"
    has(0)
    has(0, phase="Succeeded")
    assert counted() == (1, 1), "it waits as a whole, and ends"
