"""Every Prometheus metric of Tandem: its name, kind, labels and help text, once.

Names begin with `tandem_`, carry their unit, and end in `_total` where they only ever grow. Every series has the labels
`job` and `namespace`, those of the training job; the chart's PodMonitor takes the same from the pod, whatever that says
of itself. None has a pod's UID or anything else that grows without bound. Exporters build their series from what is
there now, so those of a rank or an evaluator disappear with it. Counters begin anew with the process that counts;
`rate` and `increase` know that.
"""

from dataclasses import dataclass
from typing import Literal, get_args

COMMON = ("job", "namespace")

Doing = Literal["data", "compute", "checkpoint", "restore", "rendezvous", "idle"]
"""What a job's time goes to; see TIME."""
DOINGS: tuple[Doing, ...] = get_args(Doing)

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: from a small model on a CPU to a step that accumulates for a minute."""


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


PHASE = Metric("tandem_phase", "gauge", "1 for the phase that the job is in, 0 for the others.", ("phase",))
STEP = Metric("tandem_step", "gauge", "Optimizer steps completed; falls back when training resumes from a checkpoint.")
TOTAL_STEPS = Metric("tandem_steps_planned", "gauge", "Optimizer steps of the whole run.")
EPOCH = Metric("tandem_epoch", "gauge", "Passes over the training data, with their fraction.")
LOSS = Metric("tandem_loss", "gauge", "Training loss of the last step that has one.")
LEARNING_RATE = Metric(
    "tandem_learning_rate", "gauge", "Learning rate of the last step; of the first group of parameters."
)
GRADIENT_NORM = Metric(
    "tandem_gradient_norm", "gauge", "Norm of the gradients of the global batch; measured twice a second at most."
)
LOGGED_VALUE = Metric(
    "tandem_logged_value",
    "gauge",
    "Newest value that the script has logged by a name of its own (tandem.log), while it is finite; at most 16 names.",
    ("name",),
)
THROUGHPUT = Metric("tandem_throughput_samples_per_second", "gauge", "Training samples a second over all ranks.")
TOKEN_THROUGHPUT = Metric(
    "tandem_throughput_tokens_per_second",
    "gauge",
    "Training tokens a second over all ranks, without padding; of tasks whose samples are text.",
)
LEARNED_THROUGHPUT = Metric(
    "tandem_throughput_learned_tokens_per_second", "gauge", "The same of the tokens that the loss is over."
)
REMAINING = Metric("tandem_remaining_seconds", "gauge", "Estimated time until training is complete.")
STEP_AGE = Metric(
    "tandem_step_age_seconds",
    "gauge",
    "Time since training last made a step, in whatever generation; absent once the job has ended.",
)
IDLE = Metric(
    "tandem_ranks_idle_seconds",
    "gauge",
    "Time for which no rank of the group has used a processor or a GPU; of scripts that say nothing of their steps.",
)
STEPS_TAKEN = Metric("tandem_steps_total", "counter", "Optimizer steps taken, those that are taken again included.")
SAMPLES = Metric("tandem_samples_total", "counter", "Samples trained on over all ranks.")
STEPS_LOST = Metric(
    "tandem_steps_lost_total", "counter", "Steps that were taken and are taken again, as they were in no checkpoint."
)
STEP_SECONDS = Metric(
    "tandem_step_seconds", "histogram", "Time of a step; each counts with the mean of the half second that it was in."
)
TIME = Metric(
    "tandem_time_seconds_total",
    "counter",
    "Where time went. Of a group that steps, by its first rank: data (waiting for samples), compute, checkpoint "
    "(standing still for a save). Of the others: restore (from a formed group to its first step), rendezvous (agents "
    "are there, no group is), idle (no agent is there, or a group did nothing that lasted). The part of compute in the "
    "sum is the goodput.",
    ("phase",),
)
GPU_SECONDS = Metric(
    "tandem_gpu_seconds_total",
    "counter",
    "GPU-seconds of workers over the whole run by what they were for: compute, recomputed (steps taken again after a "
    "restart), waiting (start, rendezvous, restoring, waiting for samples, standing still for a save), idle, "
    "evaluation. Goes on where an earlier coordinator ended.",
    ("purpose",),
)
CPU_SECONDS = Metric(
    "tandem_cpu_seconds_total",
    "counter",
    "The same of the CPUs of workers and evaluators, as they are reserved, whether used or not.",
    ("purpose",),
)
COST = Metric(
    "tandem_cost_total",
    "counter",
    "What these cost by the job's prices, in the currency that it names, by the same purposes; 0 without prices.",
    ("purpose",),
)
MFU = Metric(
    "tandem_mfu_ratio",
    "gauge",
    "Model FLOPs utilization, 0 to 1: what forward and backward pass of the present throughput cost, over the peak of "
    "the group's GPUs. Of built-in models in bfloat16 or float16 on GPUs whose data sheet is known.",
)
REWINDS = Metric("tandem_rewinds_total", "counter", "Times the loss became NaN or useless and training went back.")

WORLD_SIZE = Metric("tandem_world_size", "gauge", "Ranks in the current generation; 0 while there is none.")
GENERATION = Metric("tandem_generation", "gauge", "Number of the newest generation.")
WORKERS_DESIRED = Metric("tandem_workers_desired", "gauge", "Desired number of workers.")
WORKERS_READY = Metric("tandem_workers_ready", "gauge", "Replicas in the current generation.")
RESTARTS = Metric(
    "tandem_restarts_total",
    "counter",
    "Generations formed after the first, by what ended the one before. Status and pages count as restarts those that "
    "were not planned: all but MemberJoined, TargetChanged, SettingsChanged and Preempted.",
    ("reason",),
)
FAILURES = Metric("tandem_restart_budget_used", "gauge", "Failures since the restart budget was last full.")
BUDGET = Metric("tandem_restart_budget", "gauge", "Failures that the job tolerates; one more fails it.")
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
    "tandem_worker_silent_seconds",
    "gauge",
    "Time since the last heartbeat of a worker's agent. A pod that replaces another one continues its series.",
    ("replica",),
)

CHECKPOINT_STEP = Metric("tandem_checkpoint_step", "gauge", "Step of the newest committed checkpoint.")
CHECKPOINT_AGE = Metric(
    "tandem_checkpoint_age_seconds",
    "gauge",
    "Time since the newest checkpoint was taken, or since training began if there is none; absent after the end.",
)
CHECKPOINT_BYTES = Metric("tandem_checkpoint_bytes", "gauge", "Size of the newest checkpoint.")
CHECKPOINT_INTERVAL = Metric(
    "tandem_checkpoint_interval_seconds",
    "gauge",
    "Time between two checkpoints that the job asks for; everySteps counts by the present time of a step.",
)
CHECKPOINT_STALL = Metric(
    "tandem_checkpoint_stall_seconds", "gauge", "How long training stood still for the last save, on the first rank."
)
CHECKPOINT_COMMIT = Metric(
    "tandem_checkpoint_commit_seconds", "gauge", "How long the last save took from its copy in memory to the disk."
)
SAVES = Metric(
    "tandem_saves_total",
    "counter",
    "Saves that were due: committed, skipped (the one before was still being written), or failed.",
    ("result",),
)
SAVES_FAILING = Metric(
    "tandem_saves_failed_in_a_row", "gauge", "Saves that have failed since the last one that went well."
)
LINES_LOST = Metric("tandem_log_lines_lost_total", "counter", "Lines of the job's own logs that could not be written.")
LEFT_OUT = Metric("tandem_batches_left_out", "gauge", "Batches that are left out because of rewinds.")
VOLUME_BYTES = Metric("tandem_volume_bytes", "gauge", "Size of the file system that checkpoints are on.")
VOLUME_FREE = Metric("tandem_volume_free_bytes", "gauge", "Free space on it.")

EVALUATION_STEP = Metric("tandem_evaluation_step", "gauge", "Step of the newest evaluated checkpoint.")
EVALUATION_LAG = Metric(
    "tandem_evaluation_lag_steps", "gauge", "Steps between the newest checkpoint and the newest evaluated one."
)
EVALUATION_WAIT = Metric(
    "tandem_evaluation_wait_seconds",
    "gauge",
    "For how long a checkpoint newer than the newest evaluated one has waited and no evaluation was published; 0 while "
    "none waits.",
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
    "Checkpoints by what evaluators did with them: merged, skipped (a newer one was there), or failed.",
    ("result",),
)
BASE_METRIC = Metric(
    "tandem_evaluation_base_metric",
    "gauge",
    "Each metric of the base model that a fine-tuned one began with, at most 16 of them.",
    ("metric",),
)
WORSE_THAN_BASE = Metric(
    "tandem_evaluation_worse_than_base",
    "gauge",
    "Checkpoints that were evaluated last and are all worse than the base model; 0 unless they are three, or, after "
    "training, all that were evaluated.",
)
BEST_SCORE = Metric("tandem_best_score", "gauge", "Score of the best checkpoint.", ("metric",))
BEST_STEP = Metric("tandem_best_step", "gauge", "Step of the best checkpoint.")
EVALUATORS_DESIRED = Metric("tandem_evaluators_desired", "gauge", "Desired number of evaluator processes.")
EVALUATORS_READY = Metric("tandem_evaluators_ready", "gauge", "Evaluator processes that are alive.")
EVALUATOR_CPU = Metric("tandem_evaluator_cpu_cores", "gauge", "Cores that an evaluator keeps busy.", ("evaluator",))

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order above."""


@dataclass(frozen=True)
class OperatorMetric:
    """One metric of the operator: it has no job."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        """By its name."""
        return "counter" if self.name.endswith("_total") else "gauge"


OPERATOR_RECONCILES = OperatorMetric("tandem_operator_reconciles_total", "Reconciliations of jobs.")
OPERATOR_ERRORS = OperatorMetric(
    "tandem_operator_reconcile_errors_total", "Reconciliations that failed and are retried."
)
OPERATOR_SECONDS = OperatorMetric(
    "tandem_operator_reconcile_seconds_total", "Time spent on reconciliations, waiting included."
)
OPERATOR_REQUESTS = OperatorMetric("tandem_operator_api_requests_total", "Requests sent to the API server.")
OPERATOR_UNREADABLE = OperatorMetric(
    "tandem_operator_unreadable_objects_total",
    "Versions of objects that could not be read and were passed over.",
    ("kind",),
)
OPERATOR_LEADS = OperatorMetric(
    "tandem_operator_leads",
    "1 where the operator holds the Lease and acts, 0 where it waits for another one. No namespace: the whole cluster.",
    ("namespace",),
)
OPERATOR_QUEUE = OperatorMetric("tandem_operator_queue_depth", "Jobs that are due for a reconciliation.")
OPERATOR_JOBS = OperatorMetric("tandem_operator_jobs", "Jobs by namespace and phase.", ("namespace", "phase"))
OPERATOR_STATE = OperatorMetric(
    "tandem_operator_job_state_seconds",
    "Time since a job became Ready, or ceased to be so; with its phase, and the reason.",
    ("namespace", "job", "phase", "reason"),
)
OPERATOR_GPUS_ASKED = OperatorMetric(
    "tandem_operator_gpus_asked", "GPUs that workers of jobs which are not over or suspended ask for.", ("namespace",)
)
OPERATOR_GPUS_READY = OperatorMetric(
    "tandem_operator_gpus_ready", "GPUs of those of these workers that are in their group.", ("namespace",)
)
OPERATOR_AGE = OperatorMetric(
    "tandem_operator_last_list_seconds", "Time since everything was last compared with the API server."
)

OPERATOR: tuple[OperatorMetric, ...] = tuple(v for v in list(globals().values()) if isinstance(v, OperatorMetric))
"""All of the operator's, in the order above."""
