"""The operator's own numbers, for Prometheus. Names and help texts are in tandem.metrics."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem import metrics


class Gauges:
    """Counts what the operator does. Used on one event loop."""

    def __init__(self) -> None:
        self._looks = 0
        self._errors = 0
        self._seconds = 0.0
        self._phases: dict[Hashable, str] = {}
        self.depth: Callable[[], int] = lambda: 0
        """How many jobs wait to be looked at."""
        self.requests: Callable[[], int] = lambda: 0
        """How many requests the API server was sent."""
        self.age: Callable[[], float] = lambda: 0.0
        """Seconds since everything was listed."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def looked(self, seconds: float, failed: bool) -> None:
        """A job was looked at."""
        self._looks += 1
        self._errors += failed
        self._seconds += seconds

    def phase(self, key: Hashable, phase: str) -> None:
        """A job is in this phase."""
        self._phases[key] = phase

    def forget(self, key: Hashable) -> None:
        """A job is gone."""
        self._phases.pop(key, None)

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
        phases = GaugeMetricFamily(metrics.OPERATOR_JOBS.name, metrics.OPERATOR_JOBS.help, labels=["phase"])
        for phase, count in sorted(Counter(self._phases.values()).items()):
            phases.add_metric([phase], float(count))
        yield phases
