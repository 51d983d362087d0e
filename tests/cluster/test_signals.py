"""Every query of every dashboard and alert, answered by a real Prometheus that scrapes a real job and its operator.

What needs GPUs is asked of a second job: its coordinator is real, and its ranks are played. What needs dcgm-exporter,
which is not installed here, is only parsed.
"""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from tandem.wire import metrics
from tandem.wire.protocol import RankReport
from tests.support import ROOT
from tests.support.cluster.operated import Job, Operator, manifest
from tests.support.cluster.pods import Namespace
from tests.support.cluster.prometheus import Prometheus, scraping
from tests.support.cluster.recording import Period, Recording, filled, record
from tests.support.coordinator_process import Agent, Coordinator
from tests.support.elastic import TOKEN
from tests.support.lines import Lines
from tests.support.waiting import until
from tools.dashboards.panels import DCGM, GPUS, LOGS

FILES = ROOT / "charts/tandem/files"
RULES = FILES / "alerts.yaml"
NAME = "digits"
WINDOW = "20s"
"""For rates; scrapes come every second."""
CALM_SECONDS = 40.0
"""Before and after the loss of a worker, so that there is something to see."""
CRASH = "import os; os.kill(-1, 9)"
"""Run in a container, it ends all that runs there."""


QUEUES = {metric.name for metric in metrics.OPERATOR if metric.name.startswith("tandem_operator_queue_")}
"""Of jobs in queues alone (test_kueue_workloads.py)."""


@pytest.fixture(scope="module")
def job(namespace: Namespace, operator: Operator) -> Job:
    """A job that trains for as long as it is looked at."""
    found = Job(namespace, NAME)
    whole = manifest(NAME)
    # It learns slowly, so that there is something to see.
    whole["spec"]["trainer"]["loop"] |= {"epochs": 5_000, "optimizer": {"learningRate": 1e-5}}
    whole["spec"]["checkpoint"]["everySteps"] = 400
    whole["spec"]["workers"] |= {"minReplicas": 1, "resources": {"limits": {"nvidia.com/gpu": 1}}}
    whole["spec"]["elasticity"] = {"growCooldownSeconds": 1}
    found.apply(whole)
    found.trains()
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator whose two ranks say that they have GPUs, and whose script logs a value."""
    coordinator = Coordinator(tmp_path_factory.mktemp("played")).start()
    agents = [Agent(coordinator, f"worker-{index}", 4000 + index) for index in range(2)]
    try:
        for rank, agent in enumerate(agents):
            agent.ranks = [
                RankReport(rank=rank, step=5, gpu=0.9, gpu_memory_bytes=12 * 2**30, loss=1.0, throughput=2_000.0)
            ]
        lines = Lines(coordinator.rundir.log / "train-g000001.jsonl")
        lines.append({"kind": "start", "time": time.time(), "step": 0, "flopsPerSample": 2e11, "peakFlops": 989e12})
        lines.append({"kind": "values", "time": time.time(), "step": 5, "values": {"perplexity": 12.5}})
        lines.close()
        yield coordinator
    finally:
        for agent in agents:
            agent.vanish()
        coordinator.kill()


def address(job: Job) -> str:
    """Of the pod of its coordinator."""
    return str(job.becomes(lambda: [pod["status"].get("podIP") for pod in job.pods("coordinator")], "an address")[0])


@pytest.fixture(scope="module")
def prometheus(
    job: Job, operator: Operator, played: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    targets = {"operator": f"127.0.0.1:{operator.port}", "job": f"{address(job)}:7071"}
    with scraping(
        tmp_path_factory.mktemp("prometheus"), targets, {"played": (f"127.0.0.1:{played.port}", TOKEN)}, [RULES]
    ) as found:
        until(lambda: found.healthy_targets() == {"operator", "job", "played"}, "three healthy targets", 30.0)
        yield found


@pytest.fixture(scope="module")
def period(job: Job, prometheus: Prometheus) -> Period:
    """A while in which the job trains, loses a worker, and trains on."""
    start = time.time()
    generation = job.status["generation"]
    until(lambda: time.time() - start > CALM_SECONDS, "a calm while", 2 * CALM_SECONDS)
    job.namespace("exec", job.live("worker")[-1], "--", "python", "-c", CRASH, check=False)
    job.becomes(lambda: job.status["generation"] > generation and len(job.live("worker")) == 2, "its full size again")
    again = time.time()
    until(lambda: time.time() - again > CALM_SECONDS, "another calm while", 2 * CALM_SECONDS)
    job.becomes(lambda: job.status.get("latestEvaluation"), "an evaluation")
    return Period(start, time.time(), WINDOW)


def recordings(prometheus: Prometheus, period: Period, namespace: str) -> dict[str, Recording]:
    return {
        name: record(FILES / f"dashboards/{name}.json", prometheus, period, {"namespace": namespace, "job": NAME})
        for name in ("fleet", "job")
    }


@pytest.fixture(scope="module")
def answered(prometheus: Prometheus, period: Period, namespace: Namespace) -> dict[str, Recording]:
    return recordings(prometheus, period, namespace.name)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["fleet", "job"])
def test_every_query_of_a_dashboard_has_an_answer(name: str, answered: dict[str, Recording]) -> None:
    asked = [panel for panel in answered[name].panels if panel.kind != "row" and not panel.needs]
    assert len(asked) > 15
    empty = [f"{panel.title}: {one.query}" for panel in asked for one in panel.answers if one.is_empty]
    # The job here fine-tunes nothing, so it has no base model, and waits in no queue.
    absent = (metrics.BASE_METRIC.name, *QUEUES)
    assert [query for query in empty if not any(metric in query for metric in absent)] == []
    assert [one.query for one in answered[name].marks if one.is_empty] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("need", [GPUS, LOGS])
def test_what_needs_gpus_or_logged_values_has_an_answer_where_there_are_some(
    prometheus: Prometheus, period: Period, need: str
) -> None:
    theirs = record(FILES / "dashboards/job.json", prometheus, period, {"namespace": "lab", "job": "digits"})
    asked = [panel for panel in theirs.panels if panel.needs == need]
    assert asked
    assert [one.query for panel in asked for one in panel.answers if one.is_empty] == []


@pytest.mark.timeout(900)
def test_what_needs_dcgm_exporter_is_empty_without_it(answered: dict[str, Recording]) -> None:
    asked = [panel for whole in answered.values() for panel in whole.panels if panel.needs == DCGM]
    assert asked
    assert all(one.is_empty for panel in asked for one in panel.answers), "it is not marked for nothing"


@pytest.mark.timeout(900)
def test_alerts_are_evaluated_and_about_series_that_there_are(prometheus: Prometheus, period: Period) -> None:
    told = until(lambda: [rule for rule in prometheus.rules() if rule["health"] != "unknown"], "a first look", 30.0)
    names = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError", "") for rule in told} == dict.fromkeys(names, "")
    # The job here is a task that fine-tunes nothing. Only of a script that says nothing of its steps there is a series
    # of its idleness, and only of a job that fine-tunes one of its base model.
    others = {metrics.IDLE.name, metrics.WORSE_THAN_BASE.name, *QUEUES}
    for name in sorted(set(re.findall(r"\btandem_\w+", RULES.read_text())) - others):
        assert prometheus.now(f"max_over_time({name}[{period.end - period.start:.0f}s])", period.end), name


@pytest.mark.timeout(900)
def test_series_are_about_the_training_job(prometheus: Prometheus, period: Period, namespace: Namespace) -> None:
    (found,) = prometheus.now(filled('tandem_step{namespace="$namespace"}', period, {"namespace": namespace.name}))
    assert found["metric"]["job"] == NAME
    kinds = {one["metric"]["phase"] for one in prometheus.now(f'tandem_operator_jobs{{namespace="{namespace.name}"}}')}
    assert kinds == {"Running"}
    asked = prometheus.now(f'tandem_operator_gpus_asked{{namespace="{namespace.name}"}}')
    assert [one["value"][1] for one in asked] == ["2"]


@pytest.mark.timeout(900)
def test_the_port_for_prometheus_tells_numbers_and_nothing_else(job: Job) -> None:
    def status(port: int, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://{address(job)}:{port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [status(7071, path) for path in ("/metrics", "/healthz", "/status", "/v1/target")] == [200, 200, 404, 404]
    assert status(7070, "/metrics") == 401
    (pod,) = job.pods("coordinator")
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert ports == {"http": 7070, "metrics": 7071}
