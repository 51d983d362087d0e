"""The chart's monitors and rules under a real Prometheus operator: what it makes of them is a real Prometheus'
configuration, which finds the operator and a job's coordinator, and asks them every query of every dashboard.

The release, its jobs and Prometheus are in a namespace each, as on a cluster that several teams share.
"""

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tandem.wire.metrics import COMMON
from tests.support.cluster import ON_OUR_OWN, prometheus_operator
from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images
from tests.support.cluster.operated import CRD, LONG, Job, kubectl, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, named, pod, restricted
from tests.support.cluster.prometheus import Prometheus, configured
from tests.support.cluster.prometheus_operator import LABEL, Programs, PrometheusObject
from tests.support.cluster.recording import Period, record
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.full("operator", "coordinator", "charts"),
    pytest.mark.alone,
    ON_OUR_OWN,
]
NAME = "digits"
MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
DASHBOARDS = CHART / "files/dashboards"
ALERTS = CHART / "files/alerts.yaml"
WINDOW = "20s"
WATCHED_SECONDS = 15.0
"""Some scrapes, so that there are rates."""
NOTHING_HAPPENED = re.compile(
    r"restarts_total|steps_lost|rewinds|changes\(|gpu|mfu|DCGM|logged_value|base_metric|operator_queue_", re.IGNORECASE
)
"""Queries without an answer for a calm job on CPUs that fine-tunes nothing and waits in no queue. But for that,
test_signals.py has one of each."""


@pytest.fixture(scope="module")
def system() -> Iterator[Namespace]:
    """Where the release is."""
    with restricted() as found:
        yield found


@pytest.fixture(scope="module")
def monitoring() -> Iterator[Namespace]:
    """Where Prometheus is."""
    with restricted() as found:
        yield found


@pytest.fixture(scope="module")
def log(monitoring_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the Prometheus operator says."""
    with prometheus_operator.running(monitoring_programs.operator, tmp_path_factory.mktemp("operator")) as found:
        yield found


def monitored(**more: object) -> Manifest:
    """Values as docs/install.md tells users of kube-prometheus-stack, but for the time between two scrapes."""
    each = {"enabled": True, "labels": LABEL}
    often = {**each, "interval": "1s"}
    return {"metrics": {"serviceMonitor": often, "podMonitor": often, "alerts": each}, **more}


@pytest.fixture(scope="module")
def released(helm: Helm, images: Images, log: Path, system: Namespace, namespace: Namespace) -> Iterator[None]:
    """A release that looks after one namespace."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    values = {
        **image_values(images),
        **monitored(operator={"namespaces": [namespace.name]}),
        "crds": {"enabled": False},
    }
    helm("install", "tandem", CHART, f"--namespace={system.name}", "--wait", "--timeout=200s", values=values)
    yield
    helm("uninstall", "tandem", f"--namespace={system.name}")


@pytest.fixture(scope="module")
def job(released: None, namespace: Namespace) -> Job:
    """A job that trains for as long as it is looked at."""
    found = Job(namespace, NAME)
    whole = manifest(NAME, trainer=LONG)
    whole["spec"]["checkpoint"]["everySteps"] = 400
    found.apply(whole)
    found.trains()
    found.becomes(lambda: found.status.get("latestEvaluation"), "an evaluation")
    # Told only once the pace is known, which takes longer where the machine is busy.
    found.becomes(lambda: "remainingSeconds" in found.status.get("progress", {}), "an estimate of the time left")
    return found


@pytest.fixture(scope="module")
def chosen(
    released: None,
    system: Namespace,
    namespace: Namespace,
    monitoring: Namespace,
    log: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> PrometheusObject:
    """A Prometheus that has chosen all three."""
    found = PrometheusObject(monitoring)
    found.create([system, namespace], tmp_path_factory.mktemp("access"))
    until(
        lambda: len(found.scrapes()) == 2 and found.rules(), "both monitors and rules", 120.0, otherwise=log.read_text
    )
    return found


@pytest.fixture(scope="module")
def prometheus(
    job: Job, chosen: PrometheusObject, monitoring_programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with configured(folder, chosen.written(folder), monitoring_programs.prometheus) as found:
        log = folder / "prometheus.log"
        until(
            lambda: len(found.healthy_targets()) == 2,
            "two healthy targets",
            120.0,
            otherwise=lambda: f"{found.targets()}\n{log.read_text()}",
        )
        yield found


@pytest.fixture(scope="module")
def period(job: Job, prometheus: Prometheus) -> Period:
    """A while in which all is well."""
    start = time.time()
    until(lambda: time.time() - start > WATCHED_SECONDS, "a calm while", 10 * WATCHED_SECONDS)
    return Period(start, time.time(), WINDOW)


def monitor(kind: str, namespace: Namespace, name: str) -> str:
    """What the operator calls a scrape."""
    return f"{kind}/{namespace.name}/{name}/0"


def check(promtool: Path, what: str, path: Path) -> str:
    done = subprocess.run([promtool, "check", what, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_api_server_takes_monitors_and_rules_as_they_are(helm: Helm, log: Path, system: Namespace) -> None:
    values = monitored()
    for metrics in values["metrics"].values():
        metrics.update({"scrapeTimeout": "1s"} if "interval" in metrics else {"alertLabels": {"team": "ml"}})
    ours = [one for one in helm.rendered(system.name, **values) if one["kind"] in MONITORS]
    assert sorted(one["kind"] for one in ours) == sorted(MONITORS)
    strictly = ("create", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-f", "-")
    system(*strictly, stdin=yaml.safe_dump_all(ours))


def test_it_makes_a_configuration_that_promtool_takes(
    chosen: PrometheusObject,
    monitoring_programs: Programs,
    system: Namespace,
    namespace: Namespace,
    tmp_path: Path,
) -> None:
    scrapes = chosen.scrapes()
    operator = scrapes[monitor("serviceMonitor", system, "tandem-operator")]
    jobs = scrapes[monitor("podMonitor", system, "tandem-jobs")]
    assert [one["kubernetes_sd_configs"][0]["namespaces"]["names"] for one in (operator, jobs)] == [
        [system.name],
        [namespace.name],
    ]
    written = chosen.written(tmp_path)
    assert "is valid" in check(monitoring_programs.promtool, "config", written)
    (rules,) = (tmp_path / "rules").glob("*/*.yaml")
    ours = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert f"{len(ours)} rules found" in check(monitoring_programs.promtool, "rules", rules)


def test_a_release_for_the_whole_cluster_has_jobs_of_every_namespace_read(
    helm: Helm, chosen: PrometheusObject, system: Namespace
) -> None:
    rendered = helm.rendered(system.name, fullnameOverride="wide", **monitored())
    (everywhere,) = (one for one in rendered if one["kind"] == "PodMonitor")
    system("apply", "-f", "-", stdin=yaml.safe_dump(everywhere))
    name = monitor("podMonitor", system, "wide-jobs")
    found = until(lambda: chosen.scrapes().get(name), "its scrape", 120.0)
    assert "namespaces" not in found["kubernetes_sd_configs"][0]
    system("delete", "podmonitor", "wide-jobs")
    until(lambda: name not in chosen.scrapes(), "one scrape less", 120.0)


def test_both_targets_are_up_and_say_where_they_are(
    prometheus: Prometheus, job: Job, system: Namespace, namespace: Namespace
) -> None:
    found = {target["labels"]["namespace"]: target for target in prometheus.targets()}
    assert {name: target["health"] for name, target in found.items()} == {system.name: "up", namespace.name: "up"}
    (coordinator,) = job.live("coordinator")
    here = found[namespace.name]["labels"]
    assert (here["pod"], here["container"], here["endpoint"]) == (coordinator, "coordinator", "metrics")
    there = found[system.name]["labels"]
    assert (there["service"], there["container"], there["endpoint"]) == (
        "tandem-operator-metrics",
        "operator",
        "metrics",
    )


def told(address: str) -> list[tuple[str, Manifest]]:
    """Name and labels of each series of ours at a target."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [one for family in families for one in family.samples]
    return [(one.name, comparable(one.labels)) for one in samples if one.name.startswith("tandem_")]


def comparable(labels: Manifest) -> Manifest:
    """Prometheus 3 writes the bounds of a histogram in a way of its own: 1 is 1.0."""
    return {name: float(value) if name == "le" else value for name, value in labels.items()}


def test_every_series_keeps_the_labels_that_it_was_given(
    prometheus: Prometheus, job: Job, namespace: Namespace
) -> None:
    wanted = [(name, labels) for target in prometheus.targets() for name, labels in told(target["scrapeUrl"])]
    assert len({name for name, _ in wanted}) > 40

    def lost() -> list[str]:
        kept: dict[str, list[Manifest]] = {}
        for one in prometheus.now('last_over_time({__name__=~"tandem_.+"}[10m])'):
            metric = comparable(one["metric"])
            kept.setdefault(metric.pop("__name__"), []).append(metric)
        return [
            f"{name}{labels}: {kept.get(name)}"
            for name, labels in wanted
            if not any(labels.items() <= one.items() for one in kept.get(name, []))
        ]

    until(lambda: not lost(), "every series with its labels", 60.0, otherwise=lambda: "\n".join(lost()[:5]))
    assert prometheus.now('{exported_job!=""}') == prometheus.now('{exported_namespace!=""}') == []
    (step,) = prometheus.now("tandem_step")
    assert [step["metric"][label] for label in COMMON] == [NAME, namespace.name]


@pytest.mark.parametrize("name", ["fleet", "job"])
def test_every_query_of_a_dashboard_has_an_answer(name: str, prometheus: Prometheus, period: Period, job: Job) -> None:
    values = {"namespace": job.namespace.name, "job": NAME}

    def unanswered() -> list[str]:
        until_now = Period(period.start, time.time(), WINDOW)
        answered = record(DASHBOARDS / f"{name}.json", prometheus, until_now, values)
        asked = [one for panel in answered.panels for one in panel.answers if not NOTHING_HAPPENED.search(one.query)]
        assert len(asked) > 15
        return [one.query for one in asked if one.is_empty]

    # Some series begin later where the machine is busy.
    until(lambda: not unanswered(), "an answer to each", 180.0, otherwise=lambda: "\n".join(unanswered()), pause=5.0)


def test_no_alert_fires_for_a_job_that_is_well(prometheus: Prometheus, period: Period) -> None:
    def seen() -> dict[str, tuple[str, str]]:
        return {rule["name"]: (rule["health"], rule["state"]) for rule in prometheus.rules()}

    until(lambda: "unknown" not in dict(seen().values()), "a first look at each", 120.0, otherwise=lambda: str(seen()))
    ours = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert {name: health for name, (health, _) in seen().items()} == dict.fromkeys(ours, "ok")
    told = {name for name, (_, state) in seen().items() if state != "inactive"}
    assert told - {"TandemVolumeNearlyFull"} == set(), "that one is about the disk of this machine"


FORGED = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        whose = 'namespace="kube-system",job="bert"'
        told = [f"{name}{{{whose}}} 666" for name in ("tandem_loss", "tandem_operator_queue_depth", "kube_pod_info")]
        self.wfile.write("".join(f"{line}\\n" for line in told).encode())
http.server.HTTPServer(("", 7071), Handler).serve_forever()
"""
"""A tenant's own pod that tells numbers in the name of somebody else's job, in that of the operator, and numbers that
are none of ours."""


def test_a_tenant_can_tell_numbers_of_its_own_namespace_alone(
    prometheus: Prometheus, namespace: Namespace, images: Images
) -> None:
    forger = named("Pod", "forger", spec=pod([container("c", images.operator, "python3", "-c", FORGED)]))
    forger["metadata"]["labels"] |= {"tandem.dev/role": "coordinator", "tandem.dev/job": "forged"}
    forger["spec"]["containers"][0]["ports"] = [{"name": "metrics", "containerPort": 7071}]
    namespace.create(forger)
    try:
        (found,) = until(lambda: prometheus.now("tandem_loss == 666"), "what it tells", 120.0)
        assert (found["metric"]["namespace"], found["metric"]["job"]) == (namespace.name, "forged")
        assert prometheus.now("kube_pod_info") == []
        assert prometheus.now("tandem_operator_queue_depth == 666") == []
        assert prometheus.now('{exported_namespace!=""}') == prometheus.now('{exported_job!=""}') == []
    finally:
        namespace("delete", "pod", "forger", "--wait=false")


def test_what_it_made_goes_with_the_prometheus(chosen: PrometheusObject) -> None:
    made = chosen.made()
    assert {"statefulset.apps/prometheus-k8s", "secret/prometheus-k8s"} <= set(made)
    chosen.delete()
    until(lambda: not chosen.made(), "nothing left", 120.0, otherwise=lambda: str(chosen.made()))
