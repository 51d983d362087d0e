"""The snapshot of a job as Prometheus metrics.

The series are built anew from the snapshot at each scrape. Rejected: gauges that are set as news arrive, which would
keep the series of ranks and evaluators that are long gone.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tandem import metrics
from tandem.metrics import Metric
from tandem.snapshot import Snapshot
from tandem.status import Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Metric, tuple[str, ...], float | int | None]


def prometheus_text(snapshot: Snapshot, namespace: str, restarts: Mapping[str, int], failures: int) -> bytes:
    """What a scrape is answered.

    Args:
        restarts: generations formed after the first, by reason.
        failures: how much of the restart budget is used.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Current([*_samples(snapshot), *_history(restarts, failures)], (snapshot.job, namespace)))
    return generate_latest(registry)


class _Current(Collector):
    def __init__(self, samples: Iterable[Sample], common: tuple[str, str]) -> None:
        self._samples, self._common = list(samples), common

    def collect(self) -> Iterator[Family]:
        for metric in metrics.ALL:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for sampled, own, value in self._samples:
                if sampled is metric and value is not None:
                    family.add_metric((*self._common, *own), value)
            if family.samples:
                yield family


def _samples(snapshot: Snapshot) -> Iterator[Sample]:
    status = snapshot.status
    for phase in get_args(Phase):
        yield metrics.PHASE, (phase,), int(phase == status.phase)
    if (progress := status.progress) is not None:
        yield metrics.STEP, (), progress.step
        yield metrics.TOTAL_STEPS, (), progress.total_steps
        yield metrics.EPOCH, (), progress.epoch
        yield metrics.REMAINING, (), progress.remaining_seconds
    yield metrics.LOSS, (), status.loss
    yield metrics.THROUGHPUT, (), status.throughput
    yield metrics.WORLD_SIZE, (), status.world_size or 0
    yield metrics.GENERATION, (), status.generation
    if status.workers is not None:
        yield metrics.WORKERS_DESIRED, (), status.workers.desired
        yield metrics.WORKERS_READY, (), status.workers.ready
    yield from _members(snapshot)
    yield from _evaluation(snapshot)


def _members(snapshot: Snapshot) -> Iterator[Sample]:
    for member in snapshot.members:
        yield metrics.SILENT, (member.replica,), member.silent_seconds
        for view in member.ranks:
            rank = (str(view.rank),)
            yield metrics.RANK_STEP, rank, view.step
            yield metrics.RANK_CPU, rank, view.cpu
            yield metrics.RANK_GPU, rank, view.gpu
            yield metrics.RANK_GPU_MEMORY, rank, view.gpu_memory_bytes
            yield metrics.RANK_BUSY, rank, view.busy_seconds
    for straggler in snapshot.status.stragglers:
        yield metrics.STRAGGLER, (str(straggler.rank), straggler.replica), straggler.ratio


def _evaluation(snapshot: Snapshot) -> Iterator[Sample]:
    status = snapshot.status
    if status.latest_checkpoint is not None:
        yield metrics.CHECKPOINT_STEP, (), status.latest_checkpoint.step
    if (newest := status.latest_evaluation) is not None:
        yield metrics.EVALUATION_STEP, (), newest.step
        yield metrics.EVALUATION_SCORE, (newest.metric,), newest.value
    if (best := status.best_checkpoint) is not None:
        yield metrics.BEST_STEP, (), best.step
        yield metrics.BEST_SCORE, (best.metric,), best.value
    yield metrics.EVALUATION_LAG, (), status.evaluation_lag_steps
    if status.evaluators is not None:
        yield metrics.EVALUATORS_DESIRED, (), status.evaluators.desired
        yield metrics.EVALUATORS_READY, (), status.evaluators.ready
    for evaluator in snapshot.evaluators:
        yield metrics.EVALUATOR_CPU, (evaluator.name,), evaluator.cpu


def _history(restarts: Mapping[str, int], failures: int) -> Iterator[Sample]:
    for reason, count in sorted(restarts.items()):
        yield metrics.RESTARTS, (reason,), count
    yield metrics.FAILURES, (), failures
