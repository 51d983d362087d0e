"""The dashboard of one job: progress, loss, use of the hardware, and problems."""

from grafana_foundation_sdk.builders import dashboard as build

from tandem.job.labels import POD
from tandem.wire import metrics
from tandem.wire.metrics import Metric
from tools.dashboards.panels import (
    DCGM,
    GPUS,
    LOGS,
    Panel,
    Query,
    choice,
    graph,
    mark,
    number,
    ranking,
    scatter,
    source,
    word,
)

UID = "tandem-job"
CHOSEN = 'namespace="$namespace",job="$job"'
WINDOW = "$__rate_interval"


def job() -> build.Dashboard:
    """Build the dashboard."""
    jobs = f'{metrics.PHASE.name}{{namespace="$namespace"}}'
    formed = f"sum by (reason) (increase({series(metrics.RESTARTS)}[{WINDOW}])) > 0"
    dashboard = (
        build.Dashboard("Tandem / Job")
        .uid(UID)
        .tags(["tandem"])
        .description("One DistributedTrainingJob. What each number means: docs/reference/metrics.md.")
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(source())
        .with_variable(choice("namespace", "Namespace", f"label_values({metrics.PHASE.name}, namespace)", False))
        .with_variable(choice("job", "Job", f"label_values({jobs}, job)", False))
        .annotation(mark("Generations", formed, "orange"))
        .annotation(mark("World size", f"changes({series(metrics.WORLD_SIZE)}[{WINDOW}]) > 0", "purple"))
    )
    for title, group in (
        ("Is it training?", _training()),
        ("Is it learning?", _learning()),
        ("Is the hardware busy?", _busy()),
        ("What went wrong?", _trouble()),
        ("Checkpoints", _checkpoints()),
        ("Evaluation", _evaluation()),
        ("GPUs", _gpus()),
    ):
        dashboard = dashboard.with_row(build.Row(title))
        for panel in group:
            dashboard = dashboard.with_panel(panel)
    return dashboard


def series(metric: Metric, more: str = "") -> str:
    """The series of the selected job."""
    return f"{metric.name}{{{CHOSEN}{',' + more if more else ''}}}"


def _goodput(window: str) -> str:
    compute, everything = series(metrics.TIME, 'phase="compute"'), series(metrics.TIME)
    return f"sum(rate({compute}[{window}])) / sum(rate({everything}[{window}]))"


def _share_of_wall_time(causes: str) -> str:
    """The share of causes in the wall time of the whole run: the counters continue over restarts."""
    return f"sum by (cause) ({series(metrics.WALL_SECONDS, causes)}) / scalar(sum({series(metrics.WALL_SECONDS)}))"


def _training() -> list[Panel]:
    return [
        word("Phase", "Phase of the job.", Query(f"{series(metrics.PHASE)} == 1", "{{phase}}")),
        number(
            "Progress",
            "Share of the planned steps that are completed.",
            Query(f"{series(metrics.STEP)} / {series(metrics.TOTAL_STEPS)}"),
            unit="percentunit",
            decimals=1,
        ),
        number("Step", "Optimizer steps completed.", Query(series(metrics.STEP)), decimals=0),
        number(
            "Remaining", "Time estimated from the pace of the last minute.", Query(series(metrics.REMAINING)), unit="s"
        ),
        number(
            "Workers",
            "Workers in the group, and desired.",
            Query(series(metrics.WORKERS_READY), "ready"),
            Query(series(metrics.WORKERS_DESIRED), "desired"),
        ),
        number(
            "Goodput",
            "Share of the time shown in which steps were computed.",
            Query(_goodput("$__range")),
            unit="percentunit",
            decimals=1,
        ),
    ]


def _learning() -> list[Panel]:
    step, loss = Query(series(metrics.STEP), "step"), Query(series(metrics.LOSS), "training loss")
    evaluated = Query(series(metrics.EVALUATION_STEP), "evaluated step")
    score = Query(series(metrics.EVALUATION_SCORE), "score")
    return [
        graph(
            "Loss and evaluation over time",
            "Training loss on the left; scores of checkpoints, newest and best, and of the base model, on the right.",
            loss,
            Query(series(metrics.EVALUATION_METRIC), "{{metric}}", right=True),
            Query(series(metrics.BEST_SCORE), "best {{metric}}", right=True),
            Query(series(metrics.BASE_METRIC), "base model's {{metric}}", right=True),
            width=6,
        ),
        scatter(
            "Loss and evaluation over steps",
            "Loss and scores over optimizer steps. After a restart training continues from an earlier step.",
            [("training loss", step, loss), ("score", evaluated, score)],
            width=5,
        ),
        graph(
            "Steps",
            "Steps completed, in the newest checkpoint, and in the newest evaluated one.",
            Query(series(metrics.STEP), "completed"),
            Query(series(metrics.CHECKPOINT_STEP), "saved"),
            Query(series(metrics.EVALUATION_STEP), "evaluated"),
            width=4,
        ),
        graph(
            "Gradients and learning rate",
            "Norm of the gradients on the left, the learning rate on the right.",
            Query(series(metrics.GRADIENT_NORM), "gradient norm"),
            Query(series(metrics.LEARNING_RATE), "learning rate", right=True),
            width=5,
        ),
        graph(
            "Logged values",
            "Values that a script logs besides its loss (tandem.log).",
            Query(series(metrics.LOGGED_VALUE), "{{name}}"),
            width=4,
            signed=True,
            needs=LOGS,
        ),
    ]


def _busy() -> list[Panel]:
    buckets = f"sum by (le) (rate({metrics.STEP_SECONDS.name}_bucket{{{CHOSEN}}}[{WINDOW}]))"
    median = f"quantile by (namespace, job) (0.5, {series(metrics.RANK_BUSY)})"
    return [
        graph(
            "Throughput",
            "Training samples a second over all ranks: as reported now, and from the counter.",
            Query(series(metrics.THROUGHPUT), "now"),
            Query(f"rate({series(metrics.SAMPLES)}[{WINDOW}])", "counted"),
        ),
        graph(
            "Step time",
            "Median and 95th percentile of the time of a step.",
            Query(f"histogram_quantile(0.5, {buckets})", "median"),
            Query(f"histogram_quantile(0.95, {buckets})", "95th percentile"),
            unit="s",
        ),
        graph(
            "Where time goes",
            "Seconds per second by phase: data, compute and checkpoint while training steps; restore, rendezvous and "
            "idle otherwise.",
            Query(f"sum by (phase) (rate({series(metrics.TIME)}[{WINDOW}]))", "{{phase}}"),
            unit="percentunit",
            stacked=True,
        ),
        graph(
            "Goodput and ETTR",
            "Share of the time in which steps were computed, and share since the submission in which steps were taken "
            "the first time (effective training time ratio).",
            Query(_goodput("5m"), "goodput of 5 minutes"),
            Query(_share_of_wall_time('cause="training"'), "ETTR of the run"),
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "Lost time",
            "Share of the time since the submission that did not move training forward, by cause.",
            Query(_share_of_wall_time('cause!="training"'), "{{cause}}"),
            unit="percentunit",
            stacked=True,
        ),
        graph(
            "Processor use by rank",
            "Busy cores of each rank.",
            Query(series(metrics.RANK_CPU), "rank {{rank}}"),
        ),
        graph(
            "Stragglers",
            "Each rank's own work in a step over the median of all: all wait for the slowest. A rank above 1.5 for ten "
            "seconds is a straggler in the job's status.",
            Query(f"{series(metrics.RANK_BUSY)} / on (namespace, job) group_left () {median}", "rank {{rank}}"),
        ),
        graph(
            "GPUs by purpose",
            "GPUs of workers by what they were used for.",
            Query(f"sum by (purpose) (rate({series(metrics.GPU_SECONDS)}[{WINDOW}]))", "{{purpose}}"),
            stacked=True,
        ),
        graph(
            "CPUs by purpose",
            "CPUs of workers and evaluators, busy or not, by what they were used for.",
            Query(f"sum by (purpose) (rate({series(metrics.CPU_SECONDS)}[{WINDOW}]))", "{{purpose}}"),
            stacked=True,
        ),
        graph(
            "Cost by purpose",
            "Cost of the whole run so far by the job's prices; 0 without prices.",
            Query(series(metrics.COST), "{{purpose}}"),
            stacked=True,
        ),
    ]


def _trouble() -> list[Panel]:
    return [
        graph(
            "World size and generation",
            "Ranks in the group, and the number of its generation.",
            Query(series(metrics.WORLD_SIZE), "ranks"),
            Query(series(metrics.GENERATION), "generation", right=True),
        ),
        ranking(
            "Restarts by reason",
            "Groups formed again in the time shown, by the end of the one before.",
            Query(f"sum by (reason) (increase({series(metrics.RESTARTS)}[$__range]))", "{{reason}}"),
            width=5,
        ),
        graph(
            "Restart budget",
            "Tolerated failures, and failures so far.",
            Query(series(metrics.FAILURES), "used"),
            Query(series(metrics.BUDGET), "of"),
            width=5,
        ),
        graph(
            "Lost and skipped work",
            "Repeated steps and rewinds in the time shown, and skipped batches.",
            Query(f"increase({series(metrics.STEPS_LOST)}[$__range])", "steps lost"),
            Query(f"increase({series(metrics.REWINDS)}[$__range])", "rewinds", right=True),
            Query(series(metrics.SKIPPED_BATCHES), "skipped batches"),
            width=6,
        ),
        graph(
            "Silence",
            "Time since the last step, and since the last heartbeat of an agent.",
            Query(series(metrics.STEP_AGE), "last step"),
            Query(series(metrics.SILENT), "{{replica}}"),
            unit="s",
            width=24,
        ),
    ]


def _checkpoints() -> list[Panel]:
    return [
        graph(
            "Age of the newest checkpoint",
            "Training time that a crash would cost, and the configured interval.",
            Query(series(metrics.CHECKPOINT_AGE), "age"),
            Query(series(metrics.CHECKPOINT_INTERVAL), "interval"),
            unit="s",
        ),
        graph(
            "Cost of a save",
            "Time for which the last save blocked training (left), and until it was on the disk (right).",
            Query(series(metrics.CHECKPOINT_STALL), "stall"),
            Query(series(metrics.CHECKPOINT_COMMIT), "commit", right=True),
            unit="s",
            right_unit="s",
        ),
        graph(
            "Saves",
            "Saves a minute by result.",
            Query(f"60 * sum by (result) (rate({series(metrics.SAVES)}[{WINDOW}]))", "{{result}}"),
            width=4,
        ),
        graph(
            "Space for checkpoints",
            "Free space on the volume, and the size of one checkpoint.",
            Query(series(metrics.VOLUME_FREE), "free"),
            Query(series(metrics.CHECKPOINT_BYTES), "a checkpoint", right=True),
            unit="bytes",
            right_unit="bytes",
            width=4,
        ),
        graph(
            "Bucket",
            "Requests a minute by operation (left), and bytes by direction (right); nothing without a bucket.",
            Query(f"60 * sum by (operation) (rate({series(metrics.BUCKET_REQUESTS)}[{WINDOW}]))", "{{operation}}"),
            Query(f"sum by (direction) (rate({series(metrics.BUCKET_BYTES)}[{WINDOW}]))", "{{direction}}", right=True),
            right_unit="Bps",
            width=24,
        ),
    ]


def _evaluation() -> list[Panel]:
    return [
        graph(
            "Evaluation lag",
            "Steps between the newest checkpoint and the newest evaluated one, and the time for which one has waited.",
            Query(series(metrics.EVALUATION_LAG), "steps"),
            Query(series(metrics.EVALUATION_WAIT), "waiting", right=True),
            right_unit="s",
        ),
        graph(
            "Checkpoints by evaluation result",
            "Number of checkpoints over the whole life of the run directory.",
            Query(series(metrics.EVALUATIONS), "{{result}}"),
        ),
        graph(
            "Evaluators",
            "Busy cores of each evaluator, and the number of evaluators that are alive.",
            Query(series(metrics.EVALUATOR_CPU), "{{evaluator}}"),
            Query(series(metrics.EVALUATORS_READY), "ready", right=True),
        ),
    ]


def _gpus() -> list[Panel]:
    per_gpu, name = "avg by (exported_pod, gpu)", "{{exported_pod}} {{gpu}}"
    # Match GPUs by the names of the job's replicas: pods' names contain a shortened form of long job names.
    of_job = f"and on (replica) {series(metrics.SILENT)}"

    def by_place(metric: str) -> str:
        selector = f'{metric}{{exported_namespace="$namespace"}}'
        return f'label_replace({selector}, "replica", "$1", "exported_pod", "{POD}")'

    return [
        graph(
            "Utilization by rank",
            "Utilization that NVML reports to the rank.",
            Query(series(metrics.RANK_GPU), "rank {{rank}}"),
            unit="percentunit",
            maximum=1,
            width=5,
            needs=GPUS,
        ),
        graph(
            "MFU",
            "Model FLOPs over the peak of the GPUs, for built-in models in bfloat16 or float16.",
            Query(series(metrics.MFU), "MFU"),
            unit="percentunit",
            width=4,
            needs=GPUS,
        ),
        graph(
            "Memory by rank",
            "Memory in use on each rank's GPU.",
            Query(series(metrics.RANK_GPU_MEMORY), "rank {{rank}}"),
            unit="bytes",
            width=5,
            needs=GPUS,
        ),
        graph(
            "Tensor core activity",
            "Share of cycles in which tensor cores were active: the closest measure to MFU.",
            Query(f"{per_gpu} ({by_place('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE')} {of_job})", name),
            unit="percentunit",
            maximum=1,
            width=5,
            needs=DCGM,
        ),
        graph(
            "Power",
            "Power of each GPU.",
            Query(f"{per_gpu} ({by_place('DCGM_FI_DEV_POWER_USAGE')} {of_job})", name),
            unit="watt",
            width=5,
            needs=DCGM,
        ),
    ]
