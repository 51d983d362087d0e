"""Every Prometheus metric of Tandem: its name, kind, labels and help text, once.

Names begin with `tandem_`, carry their unit, and end in `_total` where they only ever grow. Every series has the labels
`job` and `namespace`; none has a pod's UID or anything else that grows without bound. Exporters build their series from
what is there now, so those of a rank or an evaluator disappear with it.
"""

from dataclasses import dataclass
from typing import Literal

COMMON = ("job", "namespace")


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    own: tuple[str, ...] = ()
    """Labels besides the common ones."""

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in the order of their values."""
        return (*COMMON, *self.own)


PHASE = Metric("tandem_phase", "gauge", "1 for the phase that the job is in, 0 for the others.", ("phase",))
STEP = Metric("tandem_step", "gauge", "Optimizer steps completed; falls back when training resumes from a checkpoint.")
TOTAL_STEPS = Metric("tandem_steps_planned", "gauge", "Optimizer steps of the whole run.")
EPOCH = Metric("tandem_epoch", "gauge", "Passes over the training data, with their fraction.")
LOSS = Metric("tandem_loss", "gauge", "Training loss, mean over the last reported steps.")
THROUGHPUT = Metric("tandem_throughput_samples_per_second", "gauge", "Training samples a second over all ranks.")
REMAINING = Metric("tandem_remaining_seconds", "gauge", "Estimated time until training is complete.")

WORLD_SIZE = Metric("tandem_world_size", "gauge", "Ranks in the current generation; 0 while there is none.")
GENERATION = Metric("tandem_generation", "gauge", "Number of the newest generation.")
WORKERS_DESIRED = Metric("tandem_workers_desired", "gauge", "Replicas wished for.")
WORKERS_READY = Metric("tandem_workers_ready", "gauge", "Replicas in the current generation.")
RESTARTS = Metric(
    "tandem_restarts_total",
    "counter",
    "Generations formed after the first, by what ended the one before.",
    ("reason",),
)
FAILURES = Metric("tandem_restart_budget_used", "gauge", "Failures since the restart budget was last full.")
RANK_STEP = Metric("tandem_rank_step", "gauge", "Optimizer steps completed by a rank.", ("rank",))
RANK_CPU = Metric("tandem_rank_cpu_cores", "gauge", "Cores that a rank keeps busy.", ("rank",))
RANK_GPU = Metric("tandem_rank_gpu_utilization_ratio", "gauge", "Utilization of a rank's GPU, 0 to 1.", ("rank",))
RANK_GPU_MEMORY = Metric("tandem_rank_gpu_memory_bytes", "gauge", "Memory in use on a rank's GPU.", ("rank",))
RANK_BUSY = Metric(
    "tandem_rank_busy_seconds", "gauge", "Mean time of a rank's own work in a step, without waiting.", ("rank",)
)
STRAGGLER = Metric(
    "tandem_straggler_ratio",
    "gauge",
    "Work time of a rank that is much slower than the others, over the median of all ranks.",
    ("rank", "replica"),
)
SILENT = Metric(
    "tandem_worker_silent_seconds", "gauge", "Time since a replica's agent gave a sign of life.", ("replica",)
)

CHECKPOINT_STEP = Metric("tandem_checkpoint_step", "gauge", "Step of the newest committed checkpoint.")
EVALUATION_STEP = Metric("tandem_evaluation_step", "gauge", "Step of the newest evaluated checkpoint.")
EVALUATION_LAG = Metric(
    "tandem_evaluation_lag_steps", "gauge", "Steps between the newest checkpoint and the newest evaluated one."
)
EVALUATION_SCORE = Metric("tandem_evaluation_score", "gauge", "Score of the newest evaluated checkpoint.", ("metric",))
BEST_SCORE = Metric("tandem_best_score", "gauge", "Score of the best checkpoint.", ("metric",))
BEST_STEP = Metric("tandem_best_step", "gauge", "Step of the best checkpoint.")
EVALUATORS_DESIRED = Metric("tandem_evaluators_desired", "gauge", "Evaluator processes wished for.")
EVALUATORS_READY = Metric("tandem_evaluators_ready", "gauge", "Evaluator processes that gave a sign of life lately.")
EVALUATOR_CPU = Metric("tandem_evaluator_cpu_cores", "gauge", "Cores that an evaluator keeps busy.", ("evaluator",))

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""


@dataclass(frozen=True)
class OperatorMetric:
    """One metric of the operator: it has no job."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


OPERATOR_RECONCILES = OperatorMetric("tandem_operator_reconciles_total", "Looks at a job.")
OPERATOR_ERRORS = OperatorMetric("tandem_operator_reconcile_errors_total", "Looks that failed and are repeated.")
OPERATOR_SECONDS = OperatorMetric("tandem_operator_reconcile_seconds_total", "Time spent on looks, waiting included.")
OPERATOR_REQUESTS = OperatorMetric("tandem_operator_api_requests_total", "Requests sent to the API server.")
OPERATOR_QUEUE = OperatorMetric("tandem_operator_queue_depth", "Jobs that are due and wait to be looked at.")
OPERATOR_JOBS = OperatorMetric("tandem_operator_jobs", "Jobs by phase.", ("phase",))
OPERATOR_AGE = OperatorMetric(
    "tandem_operator_last_list_seconds", "Time since everything was last compared with the API server."
)
