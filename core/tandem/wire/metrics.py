"""Every Prometheus metric of Tandem: its name, kind, labels and help text, once.

Names begin with `tandem_`, contain their unit, and end in `_total` for counters. Every series has the labels `job` and
`namespace`, those of the training job; the chart's PodMonitor sets both from the pod, whatever the pod itself exports.
None has a pod's UID or any other label without a bound. Exporters build their series from the current state, so those
of a rank or an evaluator disappear with it. Counters restart with their process; `rate` and `increase` handle that.
"""

from dataclasses import dataclass
from typing import Literal, get_args

COMMON = ("job", "namespace")

TimePhase = Literal["data", "compute", "checkpoint", "restore", "rendezvous", "idle"]
"""Phases of a job's time; see TIME."""
TIME_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Histogram buckets in seconds: from a small model on a CPU to a step that accumulates for a minute."""


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    own: tuple[str, ...] = ()
    """Labels besides the common ones."""

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in the order of their values."""
        return (*COMMON, *self.own)


PHASE = Metric("tandem_phase", "gauge", "1 for the current phase of the job, 0 for the others.", ("phase",))
STEP = Metric("tandem_step", "gauge", "Optimizer steps completed; falls when training resumes from a checkpoint.")
TOTAL_STEPS = Metric("tandem_steps_planned", "gauge", "Optimizer steps of the whole run.")
EPOCH = Metric("tandem_epoch", "gauge", "Passes over the training data, with the fraction of the current one.")
LOSS = Metric("tandem_loss", "gauge", "Training loss of the last step that has one.")
LEARNING_RATE = Metric(
    "tandem_learning_rate", "gauge", "Learning rate of the last step, for the first parameter group."
)
GRADIENT_NORM = Metric(
    "tandem_gradient_norm", "gauge", "Norm of the gradients of the global batch; measured at most twice a second."
)
LOGGED_VALUE = Metric(
    "tandem_logged_value",
    "gauge",
    "Newest finite value that the script has logged under each name (tandem.log); at most 16 names.",
    ("name",),
)
THROUGHPUT = Metric("tandem_throughput_samples_per_second", "gauge", "Training samples a second over all ranks.")
TOKEN_THROUGHPUT = Metric(
    "tandem_throughput_tokens_per_second",
    "gauge",
    "Training tokens a second over all ranks, without padding; only for tasks with text samples.",
)
LEARNED_THROUGHPUT = Metric(
    "tandem_throughput_learned_tokens_per_second",
    "gauge",
    "Training tokens a second that the loss is computed on, over all ranks.",
)
REMAINING = Metric("tandem_remaining_seconds", "gauge", "Estimated time until training is complete.")
STEP_AGE = Metric(
    "tandem_step_age_seconds",
    "gauge",
    "Time since the last training step, in any generation; absent once the job has ended.",
)
IDLE = Metric(
    "tandem_ranks_idle_seconds",
    "gauge",
    "Time for which no rank of the group has used a CPU or a GPU; only for scripts that do not report their steps.",
)
STEPS_TAKEN = Metric("tandem_steps_total", "counter", "Optimizer steps taken, including repeated ones.")
SAMPLES = Metric("tandem_samples_total", "counter", "Samples trained on over all ranks.")
STEPS_LOST = Metric(
    "tandem_steps_lost_total", "counter", "Steps that are repeated because no checkpoint contained them."
)
STEP_SECONDS = Metric("tandem_step_seconds", "histogram", "Time of a step; each counts as the mean of its half second.")
TIME = Metric(
    "tandem_time_seconds_total",
    "counter",
    "Time by phase. While the group steps, by its first rank: data (waiting for samples), compute, checkpoint "
    "(blocked by a save). Otherwise: restore (from a formed group to its first step), rendezvous (agents without a "
    "group), idle (no agents, or a group whose work was lost). The share of compute in the sum is the goodput, "
    "repeated steps included.",
    ("phase",),
)
WALL_SECONDS = Metric(
    "tandem_wall_seconds_total",
    "counter",
    "Wall time of the run since its submission by cause; the share of training is the effective training time ratio. "
    "Continues the counter of an earlier coordinator. A group's last steps are added when its first rank has logged "
    "them.",
    ("cause",),
)
GPU_SECONDS = Metric(
    "tandem_gpu_seconds_total",
    "counter",
    "GPU-seconds of workers over the whole run by purpose: compute, recomputed (steps repeated after a restart), "
    "waiting (start, rendezvous, restoring, waiting for samples, blocked by a save), idle, evaluation. Continues "
    "the counter of an earlier coordinator.",
    ("purpose",),
)
CPU_SECONDS = Metric(
    "tandem_cpu_seconds_total",
    "counter",
    "CPU-seconds of workers and evaluators over the whole run by purpose, as reserved, whether used or not.",
    ("purpose",),
)
COST = Metric(
    "tandem_cost_total",
    "counter",
    "Cost of GPU and CPU time by the job's prices, in its currency, by purpose; 0 without prices.",
    ("purpose",),
)
BUCKET_REQUESTS = Metric(
    "tandem_bucket_requests_total",
    "counter",
    "Requests of all processes of the job to its bucket by operation: writes, reads, listings, deletions. Updated "
    "every five minutes; 0 without a bucket.",
    ("operation",),
)
BUCKET_BYTES = Metric(
    "tandem_bucket_bytes_total",
    "counter",
    "Bytes of objects that all processes of the job have sent to its bucket or received from it.",
    ("direction",),
)
MFU = Metric(
    "tandem_mfu_ratio",
    "gauge",
    "Model FLOPs utilization, 0 to 1: operations of forward and backward passes at the current throughput, over the "
    "peak of the group's GPUs. Only for built-in models in bfloat16 or float16 on GPUs whose data sheet is known.",
)
REWINDS = Metric("tandem_rewinds_total", "counter", "Times the loss became NaN or useless and training went back.")

WORLD_SIZE = Metric("tandem_world_size", "gauge", "Ranks in the current generation; 0 while there is none.")
GENERATION = Metric("tandem_generation", "gauge", "Number of the newest generation.")
WORKERS_DESIRED = Metric("tandem_workers_desired", "gauge", "Desired number of workers.")
WORKERS_READY = Metric("tandem_workers_ready", "gauge", "Replicas in the current generation.")
RESTARTS = Metric(
    "tandem_restarts_total",
    "counter",
    "Generations formed after the first, by the reason for which the one before ended. Restarts in status and pages "
    "are the unplanned ones: all but MemberJoined, TargetChanged, SettingsChanged and Preempted.",
    ("reason",),
)
FAILURES = Metric("tandem_restart_budget_used", "gauge", "Failures since the restart budget was last full.")
BUDGET = Metric("tandem_restart_budget", "gauge", "Failures that the job tolerates; the next one fails it.")
RANK_STEP = Metric("tandem_rank_step", "gauge", "Optimizer steps completed by a rank.", ("rank",))
RANK_CPU = Metric("tandem_rank_cpu_cores", "gauge", "Busy cores of a rank.", ("rank",))
RANK_GPU = Metric("tandem_rank_gpu_utilization_ratio", "gauge", "Utilization of a rank's GPU, 0 to 1.", ("rank",))
RANK_GPU_MEMORY = Metric("tandem_rank_gpu_memory_bytes", "gauge", "Memory in use on a rank's GPU.", ("rank",))
RANK_BUSY = Metric(
    "tandem_rank_busy_seconds",
    "gauge",
    "Mean time of a rank's own work in a step, without waiting for others.",
    ("rank",),
)
STRAGGLER = Metric(
    "tandem_straggler_ratio",
    "gauge",
    "Work time of a rank that is much slower than the others, over the median of all ranks.",
    ("rank", "replica"),
)
SILENT = Metric(
    "tandem_worker_silent_seconds",
    "gauge",
    "Time since the last heartbeat of a worker's agent. A pod that replaces another one continues its series.",
    ("replica",),
)

CHECKPOINT_STEP = Metric("tandem_checkpoint_step", "gauge", "Step of the newest committed checkpoint.")
CHECKPOINT_AGE = Metric(
    "tandem_checkpoint_age_seconds",
    "gauge",
    "Time since the newest checkpoint was saved, or since training began if there is none; absent after the end.",
)
CHECKPOINT_BYTES = Metric("tandem_checkpoint_bytes", "gauge", "Size of the newest checkpoint.")
CHECKPOINT_INTERVAL = Metric(
    "tandem_checkpoint_interval_seconds",
    "gauge",
    "Configured time between two checkpoints; everySteps is converted by the current time of a step. With "
    "`checkpoint.every: Auto`, the chosen time.",
)
CHECKPOINT_STALL = Metric(
    "tandem_checkpoint_stall_seconds", "gauge", "Time for which the last save blocked training, on the first rank."
)
CHECKPOINT_COMMIT = Metric(
    "tandem_checkpoint_commit_seconds", "gauge", "Time of the last save from its copy in memory to the disk."
)
SAVES = Metric(
    "tandem_saves_total",
    "counter",
    "Due saves by result: committed, skipped (the previous one was still being written), or failed.",
    ("result",),
)
SAVES_FAILING = Metric("tandem_saves_failed_in_a_row", "gauge", "Saves that have failed since the last successful one.")
UPLOAD_FAILING = Metric(
    "tandem_upload_failing", "gauge", "Whether the job's bucket lacks data because an upload failed."
)
LINES_LOST = Metric("tandem_log_lines_lost_total", "counter", "Lines of the job's own logs that could not be written.")
SKIPPED_BATCHES = Metric("tandem_batches_left_out", "gauge", "Batches that are skipped because of rewinds.")
VOLUME_BYTES = Metric("tandem_volume_bytes", "gauge", "Size of the file system of the checkpoints.")
VOLUME_FREE = Metric("tandem_volume_free_bytes", "gauge", "Free space on the file system of the checkpoints.")

EVALUATION_STEP = Metric("tandem_evaluation_step", "gauge", "Step of the newest evaluated checkpoint.")
EVALUATION_LAG = Metric(
    "tandem_evaluation_lag_steps", "gauge", "Steps between the newest checkpoint and the newest evaluated one."
)
EVALUATION_WAIT = Metric(
    "tandem_evaluation_wait_seconds",
    "gauge",
    "Time for which a checkpoint newer than the newest evaluated one has waited without a published evaluation; 0 "
    "while none waits.",
)
EVALUATION_SCORE = Metric("tandem_evaluation_score", "gauge", "Score of the newest evaluated checkpoint.", ("metric",))
EVALUATION_METRIC = Metric(
    "tandem_evaluation_metric",
    "gauge",
    "Each metric of the newest evaluated checkpoint, at most 16 of them.",
    ("metric",),
)
EVALUATIONS = Metric(
    "tandem_evaluations_total",
    "counter",
    "Checkpoints by evaluation result: merged, skipped (for a newer one), or failed.",
    ("result",),
)
BASE_METRIC = Metric(
    "tandem_evaluation_base_metric",
    "gauge",
    "Each metric of the base model of a fine-tuning job, at most 16 of them.",
    ("metric",),
)
WORSE_THAN_BASE = Metric(
    "tandem_evaluation_worse_than_base",
    "gauge",
    "Number of newest evaluated checkpoints, if all are worse than the base model; 0 unless they are three, or, after "
    "training, all that were evaluated.",
)
WEIGHTS_UNCHANGED = Metric(
    "tandem_checkpoint_weights_unchanged",
    "gauge",
    "Number of newest checkpoints whose weights are those of the one before, bit for bit, although steps were taken.",
)
CORRUPTIONS = Metric(
    "tandem_corruptions_total",
    "counter",
    "Numbers that were found to be wrong, by kind: ranks that differ, samples, optimizer state, gradients, scores.",
    ("reason",),
)
BEST_SCORE = Metric("tandem_best_score", "gauge", "Score of the best checkpoint.", ("metric",))
BEST_STEP = Metric("tandem_best_step", "gauge", "Step of the best checkpoint.")
EVALUATORS_DESIRED = Metric("tandem_evaluators_desired", "gauge", "Desired number of evaluator processes.")
EVALUATORS_READY = Metric("tandem_evaluators_ready", "gauge", "Evaluator processes that are alive.")
EVALUATOR_CPU = Metric("tandem_evaluator_cpu_cores", "gauge", "Busy cores of an evaluator.", ("evaluator",))

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order above."""


@dataclass(frozen=True)
class OperatorMetric:
    """One metric of the operator, without the labels of a job."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        """Type of the metric, by its name."""
        return "counter" if self.name.endswith("_total") else "gauge"


OPERATOR_RECONCILES = OperatorMetric("tandem_operator_reconciles_total", "Reconciliations of jobs.")
OPERATOR_ERRORS = OperatorMetric(
    "tandem_operator_reconcile_errors_total", "Reconciliations that failed and are retried."
)
OPERATOR_SECONDS = OperatorMetric(
    "tandem_operator_reconcile_seconds_total", "Time spent on reconciliations, including waiting."
)
OPERATOR_REQUESTS = OperatorMetric("tandem_operator_api_requests_total", "Requests sent to the API server.")
OPERATOR_UNREADABLE = OperatorMetric(
    "tandem_operator_unreadable_objects_total",
    "Versions of objects that could not be read and were skipped.",
    ("kind",),
)
OPERATOR_LEADS = OperatorMetric(
    "tandem_operator_leads",
    "1 if the operator holds the Lease and acts, 0 if it waits for another one. No namespace: the whole cluster.",
    ("namespace",),
)
OPERATOR_QUEUE = OperatorMetric("tandem_operator_queue_depth", "Jobs that are due for a reconciliation.")
OPERATOR_JOBS = OperatorMetric("tandem_operator_jobs", "Jobs by namespace and phase.", ("namespace", "phase"))
OPERATOR_STATE = OperatorMetric(
    "tandem_operator_job_state_seconds",
    "Time since the condition Ready of a job last changed; with its phase, and the reason.",
    ("namespace", "job", "phase", "reason"),
)
OPERATOR_GPUS_REQUESTED = OperatorMetric(
    "tandem_operator_gpus_asked",
    "GPUs requested by workers of jobs that are neither finished nor suspended.",
    ("namespace",),
)
OPERATOR_GPUS_READY = OperatorMetric(
    "tandem_operator_gpus_ready", "GPUs of these workers that are in their group.", ("namespace",)
)
OPERATOR_ADMITTED = OperatorMetric(
    "tandem_operator_queue_workers",
    "Workers that the queue of a job has admitted; it asks for as many as `workers.replicas`.",
    ("namespace", "job", "queue"),
)
OPERATOR_WAITING = OperatorMetric(
    "tandem_operator_queue_wait_seconds",
    "Time for which a job has waited for its smallest group, since it last had one; 0 while it has.",
    ("namespace", "job", "queue"),
)
OPERATOR_WAITED = OperatorMetric(
    "tandem_operator_queue_waited_seconds",
    "Time for which a job has waited for its smallest group in all, with the present wait.",
    ("namespace", "job", "queue"),
)
OPERATOR_POSITION = OperatorMetric(
    "tandem_operator_queue_position",
    "Place of a job's first Workload that waits among those of its queue, 1 is the next; where Kueue tells.",
    ("namespace", "job", "queue"),
)
OPERATOR_LENT = OperatorMetric(
    "tandem_operator_queue_lent_workers",
    "Workers of a job over its minimum: lent, the queue takes them back first.",
    ("namespace", "job", "queue"),
)
OPERATOR_SHRINKS = OperatorMetric(
    "tandem_operator_queue_shrinks_total",
    "Times that a job went on with fewer workers because its queue took some back.",
    ("namespace",),
)
OPERATOR_GROWTHS = OperatorMetric(
    "tandem_operator_queue_growths_total",
    "Times that a job got more workers from its queue while it had some.",
    ("namespace",),
)
OPERATOR_RELEASED = OperatorMetric(
    "tandem_operator_queue_releases_total",
    "Workloads whose quota jobs have given back to their queue, because Kueue evicted them.",
    ("namespace",),
)
OPERATOR_AGE = OperatorMetric(
    "tandem_operator_last_list_seconds", "Time since all objects were last listed from the API server."
)

OPERATOR: tuple[OperatorMetric, ...] = tuple(v for v in list(globals().values()) if isinstance(v, OperatorMetric))
"""All metrics of the operator, in the order above."""
