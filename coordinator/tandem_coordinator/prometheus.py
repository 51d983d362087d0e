"""The snapshot of a job, and its counters, as Prometheus metrics.

The series are built anew at each scrape. Rejected: gauges that are set as news arrive, which would keep the series of
ranks and evaluators that are long gone.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tandem.job.labels import replica_of_pod
from tandem.job.resource import CheckpointSpec
from tandem.wire import metrics
from tandem.wire.ledger import PURPOSES, BucketUsage, Ledger, UsageByPurpose
from tandem.wire.metrics import STEP_BUCKETS, Metric
from tandem.wire.status import CORRUPTIONS, Phase, Snapshot, Troubles
from tandem.wire.wall_time import CAUSES, WallTime
from tandem_coordinator.log_followers import Training
from tandem_coordinator.run_watcher import Observed
from tandem_coordinator.snapshots import Instant

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REASONS = (
    *("WorkerFailed", "Hung", "PeerLost", "MemberLost", "MemberLeft", "Preempted"),
    *(
        "MemberJoined",
        "TargetChanged",
        "SettingsChanged",
        "MembershipChanged",
        "Rewound",
        "OutOfMemory",
        "StoreUnreachable",
    ),
)
"""Reasons why generations end. They are exported from 0 on; otherwise the first of each kind would be no increase."""

MIN_CACHE_SECONDS = 0.4
"""Minimum time for which an answer is reused, in seconds."""
PAUSE_FACTOR = 9.0
"""Time for which an answer is reused, as a multiple of the time to make it."""

MAX_METRICS = 16
"""Maximum number of metrics of one checkpoint: each is a series."""

Sample = tuple[Metric, tuple[str, ...], float | int | None]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Values that are exported and not part of a snapshot."""

    clock: Instant
    """Time of the scrape."""
    checkpoints: CheckpointSpec = field(default_factory=CheckpointSpec)
    """Settings of when the job saves checkpoints."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Number of generations formed after the first, by reason."""
    failures: int = 0
    """Failures charged to the restart budget."""
    budget: int = 0
    """Size of the restart budget."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (tandem_coordinator.goodput)."""
    ledger: Ledger = field(default_factory=Ledger)
    """GPU time, CPU time and cost, as far as they are settled."""
    stepped_at: float | None = None
    """Time of the last report of a step, on the monotonic clock."""
    idle_seconds: float | None = None
    """Time for which no rank of a script without steps has worked, in seconds; None otherwise."""
    finishing: bool = False
    """Whether all steps are taken, and the code after the loop runs."""
    scripted: bool = False
    """Whether ranks run a user's own script without a session, which saves in its own format."""
    started_at: float | None = None
    """Time at which the first generation opened, in seconds since the epoch."""
    observed: Observed = field(default_factory=Observed)
    """The state of the run directory."""
    troubles: Troubles = field(default_factory=Troubles)
    """Troubles that did not end the job."""


def prometheus_text(snapshot: Snapshot, namespace: str, figures: Figures) -> bytes:
    """Render the answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    samples = [
        *_samples(snapshot),
        *_history(figures),
        *_checkpoints(snapshot, figures),
        *_efficiency(snapshot, figures),
    ]
    registry.register(_Current(samples, figures.observed.training, (snapshot.job, namespace)))
    return generate_latest(registry)


class Scrapes:
    """A cache of the answer to scrapes. It is made anew so rarely that a client that asks without a pause cannot keep
    the coordinator from its agents: for 10,000 of them it takes half a second.

    Args:
        make: makes it.
        clock: seconds of any steady clock.
    """

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._text, self._fresh_until = b"", float("-inf")

    def text(self) -> bytes:
        """The answer, in Prometheus' text format."""
        started = self._clock()
        if started >= self._fresh_until:
            self._text = self._make()
            ended = self._clock()
            self._fresh_until = ended + max(MIN_CACHE_SECONDS, PAUSE_FACTOR * (ended - started))
        return self._text


class _Current(Collector):
    def __init__(self, samples: Iterable[Sample], training: Training, common: tuple[str, str]) -> None:
        self._training, self._common = training, common
        # A job of thousands has hundreds of thousands of samples.
        self._samples: dict[Metric, list[tuple[tuple[str, ...], float]]] = {}
        for metric, own, value in samples:
            if value is not None:
                self._samples.setdefault(metric, []).append((own, value))

    def collect(self) -> Iterator[Family]:
        for metric in metrics.ALL:
            if metric is metrics.STEP_SECONDS:
                yield self._step_seconds(metric)
                continue
            if metric not in self._samples:
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for own, value in self._samples[metric]:
                family.add_metric((*self._common, *own), value)
            yield family

    def _step_seconds(self, metric: Metric) -> Family:
        bounds = [*(f"{bound:g}" for bound in STEP_BUCKETS), "+Inf"]
        counts = self._training.buckets
        buckets = [(bound, float(sum(counts[: place + 1]))) for place, bound in enumerate(bounds)]
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        family.add_metric(self._common, buckets, self._training.step_seconds_sum)
        return family


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
    silent: dict[str, float] = {}
    for member in snapshot.members:
        # Two pods of one place may exist for a short time: one that is lost, and its replacement.
        name = replica_of_pod(member.replica)
        silent[name] = max(member.silent_seconds, silent.get(name, 0.0))
        for view in member.ranks:
            rank = (str(view.rank),)
            yield metrics.RANK_STEP, rank, view.step
            yield metrics.RANK_CPU, rank, view.cpu
            yield metrics.RANK_GPU, rank, view.gpu
            yield metrics.RANK_GPU_MEMORY, rank, view.gpu_memory_bytes
            yield metrics.RANK_BUSY, rank, view.busy_seconds
    for name, seconds in silent.items():
        yield metrics.SILENT, (name,), seconds
    slow: dict[tuple[str, str], float] = {}
    for straggler in snapshot.status.stragglers:
        own = str(straggler.rank), replica_of_pod(straggler.replica)
        slow[own] = max(straggler.ratio, slow.get(own, 0.0))
    for own, ratio in slow.items():
        yield metrics.STRAGGLER, own, ratio


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
    cores: dict[str, float] = {}
    for evaluator in snapshot.evaluators:
        if evaluator.cpu is not None:
            name = _place_of_process(evaluator.name)
            cores[name] = max(evaluator.cpu, cores.get(name, 0.0))
    for name, cpu in cores.items():
        yield metrics.EVALUATOR_CPU, (name,), cpu


def _place_of_process(evaluator: str) -> str:
    """The place of one of a pod's evaluator processes (POD-INDEX), without the part that differs between pods of one
    place."""
    pod, dash, index = evaluator.rpartition("-")
    return f"{replica_of_pod(pod)}{dash}{index}"


def _history(figures: Figures) -> Iterator[Sample]:
    # The one that decides is among the first, whatever a program reports besides.
    deciding = figures.observed.latest_evaluation
    scores = figures.observed.latest_metrics
    for name in sorted(scores, key=lambda name: deciding is None or name != deciding.metric)[:MAX_METRICS]:
        yield metrics.EVALUATION_METRIC, (name,), scores[name]
    against_base = figures.observed.against_base
    for comparison in against_base.compared:
        yield metrics.BASE_METRIC, (comparison.metric,), comparison.base
    if against_base.compared:
        yield metrics.WORSE_THAN_BASE, (), against_base.worse
    training = figures.observed.training
    for reason, count in sorted((dict.fromkeys(REASONS, 0) | dict(figures.restarts)).items()):
        yield metrics.RESTARTS, (reason,), count
    yield metrics.FAILURES, (), figures.failures
    yield metrics.BUDGET, (), figures.budget
    for phase in metrics.TIME_PHASES:
        yield metrics.TIME, (phase,), round(figures.seconds.get(phase, 0.0), 3)
    ledger = figures.ledger
    wall = ledger.wall or WallTime()
    for cause in CAUSES:
        yield metrics.WALL_SECONDS, (cause,), getattr(wall, cause)
    for metric, amounts in (
        (metrics.GPU_SECONDS, ledger.gpu_seconds),
        (metrics.CPU_SECONDS, ledger.cpu_seconds),
        (metrics.COST, ledger.cost or UsageByPurpose()),
    ):
        for purpose in PURPOSES:
            yield metric, (purpose,), getattr(amounts, purpose)
    bucket = ledger.bucket or BucketUsage()
    for operation in ("writes", "reads", "listings", "deletions"):
        yield metrics.BUCKET_REQUESTS, (operation,), getattr(bucket, operation)
    yield metrics.BUCKET_BYTES, ("sent",), bucket.sent_bytes
    yield metrics.BUCKET_BYTES, ("received",), bucket.received_bytes
    yield metrics.STEPS_TAKEN, (), training.steps
    yield metrics.SAMPLES, (), training.samples
    yield metrics.STEPS_LOST, (), training.steps_lost
    yield metrics.LEARNING_RATE, (), training.learning_rate
    yield metrics.GRADIENT_NORM, (), training.gradient_norm
    for name, value in training.values.items():
        yield metrics.LOGGED_VALUE, (name,), value
    yield metrics.REWINDS, (), figures.observed.rewinds
    for result in ("committed", "skipped"):
        yield metrics.SAVES, (result,), training.saves.get(result, 0)
    troubles = figures.troubles
    yield metrics.SAVES, ("failed",), max(training.saves.get("failed", 0), troubles.saves_failed)
    yield metrics.SAVES_FAILING, (), troubles.saves_failed_in_a_row
    yield metrics.WEIGHTS_UNCHANGED, (), troubles.weights_unchanged
    corruptions = {corruption.reason: corruption.count for corruption in troubles.corruptions}
    for reason in CORRUPTIONS:
        yield metrics.CORRUPTIONS, (reason,), corruptions.get(reason, 0)
    yield metrics.LINES_LOST, (), troubles.lines_lost
    yield metrics.UPLOAD_FAILING, (), int(bool(troubles.upload_message))
    yield metrics.SKIPPED_BATCHES, (), figures.observed.batches_left_out
    evaluations = figures.observed.evaluations
    for result, number in {
        "merged": evaluations.merged,
        "skipped": evaluations.skipped,
        "failed": evaluations.failed,
    }.items():
        yield metrics.EVALUATIONS, (result,), number


def _efficiency(snapshot: Snapshot, figures: Figures) -> Iterator[Sample]:
    training, status = figures.observed.training, snapshot.status
    if status.throughput is not None:
        for metric, tokens in (
            (metrics.TOKEN_THROUGHPUT, training.tokens_per_sample),
            (metrics.LEARNED_THROUGHPUT, training.learned_per_sample),
        ):
            yield metric, (), None if tokens is None else round(status.throughput * tokens, 3)
    cost, peak = training.flops_per_sample, training.peak_flops
    if cost and peak and status.world_size and status.throughput is not None:
        yield metrics.MFU, (), round(status.throughput * cost / (peak * status.world_size), 6)


def _checkpoints(snapshot: Snapshot, figures: Figures) -> Iterator[Sample]:
    observed, clock = figures.observed, figures.clock
    training, saved, volume = observed.training, observed.saved, observed.volume
    yield metrics.CHECKPOINT_STALL, (), training.stall_seconds
    yield metrics.CHECKPOINT_COMMIT, (), training.commit_seconds
    if volume is not None:
        yield metrics.VOLUME_BYTES, (), volume.size
        yield metrics.VOLUME_FREE, (), volume.free
    if saved is not None:
        yield metrics.CHECKPOINT_BYTES, (), saved.size
    if snapshot.status.phase in ("Succeeded", "Failed", "Draining"):
        return
    if figures.stepped_at is not None:
        yield metrics.STEP_AGE, (), max(0.0, round(clock.steady - figures.stepped_at, 3))
    if figures.idle_seconds is not None:
        yield metrics.IDLE, (), round(figures.idle_seconds, 3)
    # Of a script without a session it is not known whether it saves at all.
    saves = figures.stepped_at is not None and not figures.scripted
    if saves and not figures.finishing:
        yield metrics.CHECKPOINT_INTERVAL, (), _interval(figures.checkpoints, training)
    since = saved.saved_at if saved is not None else figures.started_at if saves else None
    if since is not None and not figures.finishing:
        yield metrics.CHECKPOINT_AGE, (), max(0.0, round(clock.wall - since, 3))
    if snapshot.status.evaluators is not None and snapshot.status.evaluators.desired > 0:
        waits = observed.evaluations.waits_since
        yield metrics.EVALUATION_WAIT, (), 0.0 if waits is None else max(0.0, round(clock.wall - waits, 3))


def _interval(settings: CheckpointSpec, training: Training) -> float | None:
    if settings.every == "Auto" and training.interval_seconds is not None:
        return training.interval_seconds
    by_steps = None
    if settings.every_steps is not None and training.step_seconds is not None:
        by_steps = settings.every_steps * training.step_seconds
    limits = [seconds for seconds in (settings.interval_seconds, by_steps) if seconds is not None]
    return round(min(limits), 3) if limits else None
