"""The operator's Prometheus metrics, and its probes: /healthz, /readyz, /metrics."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem import metrics
from tandem.formatting import seconds
from tandem.http_server import BACKLOG, HttpServer
from tandem.job import Workers
from tandem.launch import EVERYWHERE, listen
from tandem.status import Status
from tandem_operator.informer import Watching
from tandem_operator.lifecycle import condition

OVER = {"Succeeded", "Failed", "Suspended"}
"""Phases of jobs that ask for nothing."""


@dataclass(frozen=True)
class Holding:
    """What one job is about, and what it holds."""

    phase: str
    gpus: int = 0
    """GPUs of one worker."""
    workers: int = 0
    """Wished for."""
    ready: int = 0
    """In the group."""
    reason: str = ""
    """Why it is Ready, or is not; one word."""
    since: float | None = None
    """Since when, in seconds since the epoch."""


def holding(status: Status, workers: Workers | None = None) -> Holding:
    """What a job of this status is about.

    Args:
        workers: what it asks for; None: nothing that counts.
    """
    ready = condition(status, "Ready")
    reason, since = ("", None) if ready is None else (ready.reason, seconds(ready.last_transition_time))
    if workers is None:
        return Holding(status.phase, reason=reason, since=since)
    there = 0 if status.workers is None else status.workers.ready
    return Holding(status.phase, workers.gpus, workers.replicas, there, reason, since)


class OperatorMetrics:
    """Counts what the operator does. Used on one event loop.

    Args:
        names_jobs: tell of jobs, too, by namespace and name: whoever reaches the port can read it.
    """

    def __init__(self, names_jobs: bool = True) -> None:
        self._names_jobs = names_jobs
        self._looks = 0
        self._errors = 0
        self._seconds = 0.0
        self._jobs: dict[tuple[str, str], Holding] = {}
        self.depth: Callable[[], int] = lambda: 0
        """How many jobs wait to be looked at."""
        self.requests: Callable[[], int] = lambda: 0
        """How many requests the API server was sent."""
        self.unreadable: Callable[[], Mapping[str, int]] = dict
        """Versions of objects that could not be read, by kind."""
        self.leads: Callable[[], Mapping[str, bool]] = lambda: {"": True}
        """By namespace, empty for all: whether this operator is the one that acts there."""
        self.age: Callable[[], float] = lambda: 0.0
        """Seconds since everything was listed."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def looked(self, seconds: float, failed: bool) -> None:
        """A job was looked at."""
        self._looks += 1
        self._errors += failed
        self._seconds += seconds

    def holds(self, key: tuple[str, str], holding: Holding) -> None:
        """A job, by its namespace and name, is about this."""
        self._jobs[key] = holding

    def forget(self, key: tuple[str, str]) -> None:
        """A job is gone."""
        self._jobs.pop(key, None)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
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
        for namespace, held in sorted(self.leads().items()):
            leads.add_metric([namespace], float(held))
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
        asked, ready = Counter[str](), Counter[str]()
        for (namespace, _), holding in self._jobs.items():
            at_work = holding.phase not in OVER
            asked[namespace] += holding.gpus * holding.workers * at_work
            ready[namespace] += holding.gpus * holding.ready * at_work
        phases = _family(metrics.OPERATOR_JOBS)
        for labels, count in sorted(jobs.items()):
            phases.add_metric(labels, float(count))
        yield phases
        for metric, gpus in {metrics.OPERATOR_GPUS_ASKED: asked, metrics.OPERATOR_GPUS_READY: ready}.items():
            family = _family(metric)
            for namespace, count in sorted(gpus.items()):
                family.add_metric([namespace], float(count))
            yield family


def _family(metric: metrics.OperatorMetric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def serve_health(
    port: int, watching: Watching, numbers: OperatorMetrics, waits: Callable[[], str] = lambda: ""
) -> None:
    """Answer until cancelled.

    Args:
        port: 0 takes a free one.
        waits: why this operator does not act yet, which is no fault of its own; empty if it does.

    Raises:
        OSError: the port is in use.
    """

    async def healthz(_: web.Request) -> web.Response:
        complaint = watching.complaint
        return web.Response(status=503 if complaint else 200, text=complaint or "ok")

    async def readyz(_: web.Request) -> web.Response:
        complaint = (watching.complaint or waits()) if watching.listed.is_set() else "not everything is listed yet"
        return web.Response(status=503 if complaint else 200, text=complaint or "ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=numbers.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    server = HttpServer(app)
    try:
        await server.start(listen(EVERYWHERE, port, BACKLOG))
        await asyncio.Event().wait()
    finally:
        await server.close()
