"""The operator's Prometheus metrics, and its probes: /healthz, /readyz, /metrics."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.formatting import parse_rfc3339
from tandem.job.resource import Spec
from tandem.processes.launch import ALL_ADDRESSES, listen
from tandem.wire import metrics
from tandem.wire.http_server import BACKLOG, HttpServer
from tandem.wire.queue_view import QueueView
from tandem.wire.status import Status
from tandem_operator.informer import Informer
from tandem_operator.lifecycle import find_condition

INACTIVE_PHASES = {"Succeeded", "Failed", "Suspended"}
"""Phases of jobs that request nothing."""


@dataclass(frozen=True)
class Holding:
    """The state of one job, and what it holds."""

    phase: str
    gpus: int = 0
    """GPUs of one worker."""
    workers: int = 0
    """Desired workers."""
    ready: int = 0
    """Workers in the group."""
    reason: str = ""
    """Reason of the condition Ready, one CamelCase word."""
    since: float | None = None
    """Time of its last transition, seconds since the epoch."""
    queue: QueueView | None = None
    """The queue that admits its workers one by one."""
    minimum: int = 0
    """Workers that it needs at least."""

    @property
    def admitted(self) -> int:
        """Workers that its queue has admitted."""
        return 0 if self.queue is None or self.phase in INACTIVE_PHASES else self.queue.admitted or 0


def holding(status: Status, spec: Spec | None = None) -> Holding:
    """Compute what a job with this status holds.

    Args:
        spec: the job's; None: it counts as requesting nothing.
    """
    ready = find_condition(status, "Ready")
    reason, since = ("", None) if ready is None else (ready.reason, parse_rfc3339(ready.last_transition_time))
    if spec is None:
        return Holding(status.phase, reason=reason, since=since)
    ready_workers = 0 if status.workers is None else status.workers.ready
    queue = status.queue if status.queue is not None and status.queue.admitted is not None else None
    workers, fewest = spec.workers, min(spec.fewest_workers, spec.workers.replicas)
    return Holding(status.phase, workers.gpus, workers.replicas, ready_workers, reason, since, queue, fewest)


class OperatorMetrics:
    """Metrics of the operator's work. Used on one event loop.

    Args:
        names_jobs: include metrics of single jobs, by namespace and name: everybody who reaches the port can read them.
    """

    def __init__(self, names_jobs: bool = True) -> None:
        self._names_jobs = names_jobs
        self._looks = 0
        self._errors = 0
        self._seconds = 0.0
        self._jobs: dict[tuple[str, str], Holding] = {}
        self._released: Counter[str] = Counter()
        self._shrinks: Counter[str] = Counter()
        self._growths: Counter[str] = Counter()
        self.depth: Callable[[], int] = lambda: 0
        """Number of jobs that wait for a reconcile."""
        self.requests: Callable[[], int] = lambda: 0
        """Number of requests sent to the API server."""
        self.unreadable: Callable[[], Mapping[str, int]] = dict
        """Number of unreadable versions of objects, by kind."""
        self.leads: Callable[[], Mapping[str, bool]] = lambda: {"": True}
        """Whether this operator is the one that acts, by namespace, empty for all."""
        self.age: Callable[[], float] = lambda: 0.0
        """Seconds since the last complete list."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def reconciled(self, seconds: float, failed: bool) -> None:
        """Count a reconcile."""
        self._looks += 1
        self._errors += failed
        self._seconds += seconds

    def released(self, namespace: str) -> None:
        """Count a Workload whose quota was given back."""
        self._released[namespace] += 1

    def holds(self, key: tuple[str, str], holding: Holding) -> None:
        """Record the state of a job, by its namespace and name."""
        before, after = self._jobs[key].admitted if key in self._jobs else 0, holding.admitted
        self._jobs[key] = holding
        # A start and an end are neither; nor is a smaller size that its user has asked for.
        self._growths[key[0]] += 0 < before < after
        self._shrinks[key[0]] += 0 < after < min(before, holding.workers)

    def forget(self, key: tuple[str, str]) -> None:
        """Forget a deleted job."""
        self._jobs.pop(key, None)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Called by the registry."""
        totals = {
            metrics.OPERATOR_RECONCILES: float(self._looks),
            metrics.OPERATOR_ERRORS: float(self._errors),
            metrics.OPERATOR_SECONDS: self._seconds,
            metrics.OPERATOR_REQUESTS: float(self.requests()),
        }
        for metric, value in totals.items():
            yield CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, value=value)
        yield GaugeMetricFamily(metrics.OPERATOR_QUEUE.name, metrics.OPERATOR_QUEUE.help, value=float(self.depth()))
        yield GaugeMetricFamily(metrics.OPERATOR_AGE.name, metrics.OPERATOR_AGE.help, value=self.age())
        unreadable = metrics.OPERATOR_UNREADABLE
        family = CounterMetricFamily(unreadable.name.removesuffix("_total"), unreadable.help, labels=unreadable.labels)
        for kind, count in sorted(self.unreadable().items()):
            family.add_metric([kind], float(count))
        yield family
        leads = _family(metrics.OPERATOR_LEADS)
        for namespace, is_held in sorted(self.leads().items()):
            leads.add_metric([namespace], float(is_held))
        yield leads
        if self._names_jobs:
            yield from self._fleet()

    def _fleet(self) -> Iterator[Metric]:
        jobs = Counter((namespace, holding.phase) for (namespace, _), holding in self._jobs.items())
        state, now = _family(metrics.OPERATOR_STATE), time.time()
        for (namespace, name), holding in sorted(self._jobs.items()):
            if holding.since is not None:
                state.add_metric([namespace, name, holding.phase, holding.reason], max(0.0, now - holding.since))
        yield state
        yield from self._queues(now)
        requested, ready = Counter[str](), Counter[str]()
        for (namespace, _), holding in self._jobs.items():
            at_work = holding.phase not in INACTIVE_PHASES
            requested[namespace] += holding.gpus * holding.workers * at_work
            ready[namespace] += holding.gpus * holding.ready * at_work
        phases = _family(metrics.OPERATOR_JOBS)
        for labels, count in sorted(jobs.items()):
            phases.add_metric(labels, float(count))
        yield phases
        for metric, gpus in {metrics.OPERATOR_GPUS_REQUESTED: requested, metrics.OPERATOR_GPUS_READY: ready}.items():
            family = _family(metric)
            for namespace, count in sorted(gpus.items()):
                family.add_metric([namespace], float(count))
            yield family

    def _queues(self, now: float) -> Iterator[Metric]:
        admitted, waiting = _family(metrics.OPERATOR_ADMITTED), _family(metrics.OPERATOR_WAITING)
        waited, position = _family(metrics.OPERATOR_WAITED), _family(metrics.OPERATOR_POSITION)
        lent = _family(metrics.OPERATOR_LENT)
        for (namespace, name), holding in sorted(self._jobs.items()):
            if holding.queue is not None and holding.phase not in INACTIVE_PHASES:
                labels = [namespace, name, holding.queue.name]
                since = parse_rfc3339(holding.queue.waiting_since)
                waits = 0.0 if since is None else max(0.0, now - since)
                admitted.add_metric(labels, float(holding.admitted))
                waiting.add_metric(labels, waits)
                waited.add_metric(labels, holding.queue.waited_seconds + waits)
                lent.add_metric(labels, float(max(0, holding.admitted - holding.minimum)))
                if holding.queue.position is not None:
                    position.add_metric(labels, float(holding.queue.position))
        yield from (admitted, waiting, waited, position, lent)
        counters = {
            metrics.OPERATOR_RELEASED: self._released,
            metrics.OPERATOR_SHRINKS: self._shrinks,
            metrics.OPERATOR_GROWTHS: self._growths,
        }
        for metric, counts in counters.items():
            family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for namespace, count in sorted(counts.items()):
                family.add_metric([namespace], float(count))
            yield family


def _family(metric: metrics.OperatorMetric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def serve_health(
    port: int, informer: Informer, numbers: OperatorMetrics, waits: Callable[[], str] = lambda: ""
) -> None:
    """Serve the probes and the metrics until cancelled.

    Args:
        port: 0 for a free one.
        waits: returns the reason why this operator does not act yet, which is no fault; empty if it acts.

    Raises:
        OSError: the port is in use.
    """

    async def healthz(_: web.Request) -> web.Response:
        complaint = informer.complaint
        return web.Response(status=503 if complaint else 200, text=complaint or "ok")

    async def readyz(_: web.Request) -> web.Response:
        complaint = (informer.complaint or waits()) if informer.synced.is_set() else "not everything is listed yet"
        return web.Response(status=503 if complaint else 200, text=complaint or "ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=numbers.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    server = HttpServer(app)
    try:
        await server.start(listen(ALL_ADDRESSES, port, BACKLOG))
        await asyncio.Event().wait()
    finally:
        await server.close()
