"""The dashboard of one job: progress, loss, use of the hardware, and problems."""

from grafana_foundation_sdk.builders import dashboard as build

from tandem import metrics
from tandem.labels import POD
from tandem.metrics import Metric
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
    """Build it."""
    jobs = f'{metrics.PHASE.name}{{namespace="$namespace"}}'
    formed = f"sum by (reason) (increase({of(metrics.RESTARTS)}[{WINDOW}])) > 0"
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
        .annotation(mark("World size", f"changes({of(metrics.WORLD_SIZE)}[{WINDOW}]) > 0", "purple"))
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


def of(metric: Metric, more: str = "") -> str:
    """The series of the job that is looked at."""
    return f"{metric.name}{{{CHOSEN}{',' + more if more else ''}}}"


def _goodput(window: str) -> str:
    compute, everything = of(metrics.TIME, 'phase="compute"'), of(metrics.TIME)
    return f"sum(rate({compute}[{window}])) / sum(rate({everything}[{window}]))"


def _training() -> list[Panel]:
    return [
        word("Phase", "In one word.", Query(f"{of(metrics.PHASE)} == 1", "{{phase}}")),
        number(
            "Progress",
            "Steps completed of those planned.",
            Query(f"{of(metrics.STEP)} / {of(metrics.TOTAL_STEPS)}"),
            unit="percentunit",
            decimals=1,
        ),
        number("Step", "Optimizer steps completed.", Query(of(metrics.STEP)), decimals=0),
        number("Left", "Estimated from the pace of the last minute.", Query(of(metrics.REMAINING)), unit="s"),
        number(
            "Workers",
            "In the group, and desired.",
            Query(of(metrics.WORKERS_READY), "ready"),
            Query(of(metrics.WORKERS_DESIRED), "desired"),
        ),
        number(
            "Goodput",
            "The part of the time shown in which steps were computed.",
            Query(_goodput("$__range")),
            unit="percentunit",
            decimals=1,
        ),
    ]


def _learning() -> list[Panel]:
    step, loss = Query(of(metrics.STEP), "step"), Query(of(metrics.LOSS), "training loss")
    evaluated = Query(of(metrics.EVALUATION_STEP), "evaluated step")
    score = Query(of(metrics.EVALUATION_SCORE), "score")
    return [
        graph(
            "Loss and evaluation over time",
            "Training loss on the left; scores of checkpoints, newest and best, and of the base model, on the right.",
            loss,
            Query(of(metrics.EVALUATION_METRIC), "{{metric}}", right=True),
            Query(of(metrics.BEST_SCORE), "best {{metric}}", right=True),
            Query(of(metrics.BASE_METRIC), "base model's {{metric}}", right=True),
            width=6,
        ),
        scatter(
            "Loss and evaluation over steps",
            "The same over optimizer steps. After a restart training goes on from an earlier step.",
            [("training loss", step, loss), ("score", evaluated, score)],
            width=5,
        ),
        graph(
            "Steps",
            "Completed, in the newest checkpoint, and in the newest evaluated one.",
            Query(of(metrics.STEP), "completed"),
            Query(of(metrics.CHECKPOINT_STEP), "saved"),
            Query(of(metrics.EVALUATION_STEP), "evaluated"),
            width=4,
        ),
        graph(
            "Gradients and learning rate",
            "Norm of the gradients on the left, the learning rate on the right.",
            Query(of(metrics.GRADIENT_NORM), "gradient norm"),
            Query(of(metrics.LEARNING_RATE), "learning rate", right=True),
            width=5,
        ),
        graph(
            "Logged values",
            "What a script of the user's own logs beside its loss (tandem.log).",
            Query(of(metrics.LOGGED_VALUE), "{{name}}"),
            width=4,
            signed=True,
            needs=LOGS,
        ),
    ]


def _busy() -> list[Panel]:
    buckets = f"sum by (le) (rate({metrics.STEP_SECONDS.name}_bucket{{{CHOSEN}}}[{WINDOW}]))"
    median = f"quantile by (namespace, job) (0.5, {of(metrics.RANK_BUSY)})"
    return [
        graph(
            "Throughput",
            "Training samples a second over all ranks: as told now, and counted.",
            Query(of(metrics.THROUGHPUT), "now"),
            Query(f"rate({of(metrics.SAMPLES)}[{WINDOW}])", "counted"),
        ),
        graph(
            "Step time",
            "Half of all steps, and 19 of 20, are faster than that.",
            Query(f"histogram_quantile(0.5, {buckets})", "median"),
            Query(f"histogram_quantile(0.95, {buckets})", "95th percentile"),
            unit="s",
        ),
        graph(
            "Where time goes",
            "Seconds of each second by phase: data, compute and checkpoint while steps are made; restore, rendezvous "
            "and idle while none are.",
            Query(f"sum by (phase) (rate({of(metrics.TIME)}[{WINDOW}]))", "{{phase}}"),
            unit="percentunit",
            stacked=True,
        ),
        graph(
            "Goodput",
            "The part of the time in which steps were computed.",
            Query(_goodput("5m"), "of 5 minutes"),
            unit="percentunit",
            most=1,
        ),
        graph(
            "Processor use by rank",
            "Cores that each rank keeps busy.",
            Query(of(metrics.RANK_CPU), "rank {{rank}}"),
        ),
        graph(
            "Stragglers",
            "Each rank's own work in a step over the median of all: all wait for the one on top. From 1.5 on for ten "
            "seconds, a rank is named in the job's status.",
            Query(f"{of(metrics.RANK_BUSY)} / on (namespace, job) group_left () {median}", "rank {{rank}}"),
        ),
        graph(
            "GPUs by purpose",
            "Of those that workers have: what they were for.",
            Query(f"sum by (purpose) (rate({of(metrics.GPU_SECONDS)}[{WINDOW}]))", "{{purpose}}"),
            stacked=True,
        ),
        graph(
            "CPUs by purpose",
            "Of those that workers and evaluators have, busy or not: what they were for.",
            Query(f"sum by (purpose) (rate({of(metrics.CPU_SECONDS)}[{WINDOW}]))", "{{purpose}}"),
            stacked=True,
        ),
        graph(
            "Cost by purpose",
            "Of the whole run so far, by the job's prices; 0 without.",
            Query(of(metrics.COST), "{{purpose}}"),
            stacked=True,
        ),
    ]


def _trouble() -> list[Panel]:
    return [
        graph(
            "World size and generation",
            "Ranks in the group, and which group it is since the job began.",
            Query(of(metrics.WORLD_SIZE), "ranks"),
            Query(of(metrics.GENERATION), "generation", right=True),
        ),
        ranking(
            "Restarts by reason",
            "Groups formed anew in the time shown, by what ended the one before.",
            Query(f"sum by (reason) (increase({of(metrics.RESTARTS)}[$__range]))", "{{reason}}"),
            width=5,
        ),
        graph(
            "Restart budget",
            "Failures that are forgiven, and those that were.",
            Query(of(metrics.FAILURES), "used"),
            Query(of(metrics.BUDGET), "of"),
            width=5,
        ),
        graph(
            "Lost and regretted",
            "Steps taken again, and times that the loss became useless, in the time shown; batches left out.",
            Query(f"increase({of(metrics.STEPS_LOST)}[$__range])", "steps lost"),
            Query(f"increase({of(metrics.REWINDS)}[$__range])", "rewinds", right=True),
            Query(of(metrics.LEFT_OUT), "batches left out"),
            width=6,
        ),
        graph(
            "Silence",
            "Time since the last step, and since the last heartbeat of an agent.",
            Query(of(metrics.STEP_AGE), "last step"),
            Query(of(metrics.SILENT), "{{replica}}"),
            unit="s",
            width=24,
        ),
    ]


def _checkpoints() -> list[Panel]:
    return [
        graph(
            "Age of the newest checkpoint",
            "What a crash would cost, beside the time between two that the job asks for.",
            Query(of(metrics.CHECKPOINT_AGE), "age"),
            Query(of(metrics.CHECKPOINT_INTERVAL), "asked for"),
            unit="s",
        ),
        graph(
            "Cost of a save",
            "How long training stood still for the last one (left), and until it was on the disk (right).",
            Query(of(metrics.CHECKPOINT_STALL), "stall"),
            Query(of(metrics.CHECKPOINT_COMMIT), "commit", right=True),
            unit="s",
            right_unit="s",
        ),
        graph(
            "Saves",
            "A minute, by what became of them.",
            Query(f"60 * sum by (result) (rate({of(metrics.SAVES)}[{WINDOW}]))", "{{result}}"),
            width=4,
        ),
        graph(
            "Room for checkpoints",
            "Free on the volume, and what one checkpoint takes.",
            Query(of(metrics.VOLUME_FREE), "free"),
            Query(of(metrics.CHECKPOINT_BYTES), "a checkpoint", right=True),
            unit="bytes",
            right_unit="bytes",
            width=4,
        ),
    ]


def _evaluation() -> list[Panel]:
    return [
        graph(
            "Evaluation lag",
            "Steps between the newest checkpoint and the newest evaluated one, and for how long one has waited.",
            Query(of(metrics.EVALUATION_LAG), "steps"),
            Query(of(metrics.EVALUATION_WAIT), "waiting", right=True),
            right_unit="s",
        ),
        graph(
            "Checkpoints by what evaluators did",
            "Over the whole life of the run directory.",
            Query(of(metrics.EVALUATIONS), "{{result}}"),
        ),
        graph(
            "Evaluators",
            "Cores that each keeps busy, and how many are alive.",
            Query(of(metrics.EVALUATOR_CPU), "{{evaluator}}"),
            Query(of(metrics.EVALUATORS_READY), "ready", right=True),
        ),
    ]


def _gpus() -> list[Panel]:
    each, name = "avg by (exported_pod, gpu)", "{{exported_pod}} {{gpu}}"
    # By the pods that are the job's replicas: long names of jobs are shortened in those of pods.
    ours = f"and on (replica) {of(metrics.SILENT)}"

    def by_place(metric: str) -> str:
        told = f'{metric}{{exported_namespace="$namespace"}}'
        return f'label_replace({told}, "replica", "$1", "exported_pod", "{POD}")'

    return [
        graph(
            "Utilization by rank",
            "As NVML told the rank.",
            Query(of(metrics.RANK_GPU), "rank {{rank}}"),
            unit="percentunit",
            most=1,
            width=5,
            needs=GPUS,
        ),
        graph(
            "MFU",
            "What the model's own operations come to, over the peak of the GPUs. Of built-in models in bfloat16 or "
            "float16.",
            Query(of(metrics.MFU), "MFU"),
            unit="percentunit",
            width=4,
            needs=GPUS,
        ),
        graph(
            "Memory by rank",
            "In use on each rank's GPU.",
            Query(of(metrics.RANK_GPU_MEMORY), "rank {{rank}}"),
            unit="bytes",
            width=5,
            needs=GPUS,
        ),
        graph(
            "Tensor cores at work",
            "The part of cycles in which they computed: what comes nearest to a model's FLOPs over the GPU's.",
            Query(f"{each} ({by_place('DCGM_FI_PROF_PIPE_TENSOR_ACTIVE')} {ours})", name),
            unit="percentunit",
            most=1,
            width=5,
            needs=DCGM,
        ),
        graph(
            "Power",
            "Of each GPU.",
            Query(f"{each} ({by_place('DCGM_FI_DEV_POWER_USAGE')} {ours})", name),
            unit="watt",
            width=5,
            needs=DCGM,
        ),
    ]
