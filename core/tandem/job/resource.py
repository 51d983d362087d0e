"""The DistributedTrainingJob: the single source of its fields, defaults, rules and documentation.

The CRD, the JSON schema for editors and the reference page are generated from these models by `tools/`
(`make generate`); a test fails when one of them is stale. Field names follow Kubernetes Job and PyTorchJob habits.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from tandem.job.language_evaluation import RULES as LANGUAGE_RULES
from tandem.job.language_evaluation import Generate, Harness
from tandem.job.pod_template import (
    GPU_RESOURCES,
    GROUP,
    Resources,
    Template,
    gpus,
    is_whole_number,
    overridden_resources,
    processes_in_cel,
)
from tandem.job.stop_when import StopWhen
from tandem.job.storage import BUCKET_FIELDS as BUCKET_FIELDS
from tandem.job.storage import RULES as STORAGE_RULES
from tandem.job.storage import Storage as Storage
from tandem.job.strategies import RULES, worker_multiple_of
from tandem.job.tasks import (
    BUILT_IN,
    CAUSAL_LM,
    GOALS,
    METRICS,
    Positive,
)
from tandem.job.tracking import Tracking
from tandem.job.trainer import OWN_TASK, Trainer
from tandem.job.variables import EnvVar, Word
from tandem.model import (
    Image,
    Label,
    MetricName,
    Model,
    ObjectName,
    Rule,
    ShortName,
    Transition,
    WatchPattern,
)
from tandem.wire.ledger import Prices
from tandem.wire.status import Status

VERSION = "v1alpha1"
KIND = "DistributedTrainingJob"
API_VERSION = f"{GROUP}/{VERSION}"

Count = Annotated[int, Field(ge=0)]
Replicas = Annotated[int, Field(ge=1, le=10_000)]
Seconds = Annotated[float, Field(gt=0)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", max_length=253)]


class Ports(Model):
    """A range of ports."""

    first: Annotated[int, Field(ge=1024, le=65535)]
    """The lowest port."""
    last: Annotated[int, Field(ge=1024, le=65535)]
    """The highest port."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda p: p.first <= p.last,
            "self.first <= self.last",
            "first must not be greater than last",
            "last",
        ),
    )


class CoordinatorSpec(Model):
    """The process that decides which workers form the group. `tandem run` does not use this."""

    resources: Resources = {}
    """Kubernetes resource requests and limits of its pod. Default: scaled to the number of ranks."""
    template: Template = {}
    """A pod template merged over the operator's own."""


class Workers(Model):
    """The elastic group of training pods."""

    replicas: Replicas = 1
    """Number of workers. `kubectl scale` changes it while the job runs."""
    min_replicas: Replicas = 1
    """Training continues as long as this many workers are available."""
    max_replicas: Replicas | None = None
    """Upper bound of `replicas`. Default: `replicas` itself."""
    processes_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """Ranks in each pod. Default: one for each GPU that the pod requests in `resources` or `template`, or 1."""
    gpu_resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=128)] | None = None
    """Resource name of the cluster's GPUs, if they are not NVIDIA's (whole or MIG), AMD's or Intel's."""
    store_ports: Ports | None = None
    """Ports for a worker's rendezvous store, which takes a free one of them. Default: any free port."""
    resources: Resources = {}
    """Kubernetes resource requests and limits of one worker pod."""
    template: Template = {}
    """A pod template merged over the operator's own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda w: w.min_replicas <= w.replicas,
            "self.minReplicas <= self.replicas",
            "minReplicas must not be greater than replicas",
            "minReplicas",
        ),
        Rule(
            lambda w: w.max_replicas is None or w.replicas <= w.max_replicas,
            "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            "replicas must not be greater than maxReplicas",
            "maxReplicas",
        ),
        Rule(
            lambda w: all(
                is_whole_number(part[gpu]) for part in w.resources.values() for gpu in GPU_RESOURCES if gpu in part
            ),
            " && ".join(
                f"(!has(self.resources.{part}) || !('{gpu}' in self.resources.{part})"
                f" || string(self.resources.{part}['{gpu}']).matches('^[0-9]+$'))"
                for part in ("limits", "requests")
                for gpu in GPU_RESOURCES
            ),
            f"GPUs come whole: {', '.join(GPU_RESOURCES)} must be plain numbers",
            "resources",
        ),
    )
    transitions: ClassVar[tuple[Transition, ...]] = (
        Transition(
            lambda old, new: old.processes == new.processes,
            f"{processes_in_cel('self')} == {processes_in_cel('oldSelf')}",
            "the number of processes in each replica (processesPerReplica, or its GPUs) cannot be changed; create a "
            "new job with another name",
            "processesPerReplica",
        ),
    )

    @property
    def most(self) -> int:
        """`maxReplicas` with its default filled in."""
        return self.max_replicas or self.replicas

    @property
    def processes(self) -> int:
        """Number of ranks in each replica."""
        if self.processes_per_replica:
            return self.processes_per_replica
        return max(1, self.gpus)

    @property
    def gpus(self) -> int:
        """Number of GPUs in each replica."""
        return sum(gpus(self.asked, self.gpu_resource).values())

    @property
    def asked(self) -> dict[str, dict[str, Any]]:
        """Resource requests and limits of a worker's container: `resources`, overridden by those of the template."""
        return overridden_resources(self.resources, self.template, "worker")


GOAL_REQUIRED = "goal must say whether more of this metric is better (Maximize) or less (Minimize)"


class Evaluators(Model):
    """Processes that evaluate checkpoints during training, on CPUs unless `resources` has GPUs. Each takes a share of
    the evaluation data."""

    replicas: Annotated[int, Field(ge=0, le=1_000)] = 1
    """Evaluator pods; 0 turns evaluation off."""
    processes_per_replica: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes in each pod. The evaluation data is split over all processes of all pods."""
    policy: Literal["Latest", "Every"] = "Latest"
    """`Latest` evaluates the newest checkpoint, skips those that became older meanwhile, and records that. `Every`
    evaluates all, the oldest first; those that wait are kept, so the disk fills if evaluators are slower than saves."""
    named_metric: Annotated[MetricName | None, Field(alias="metric")] = None
    """The score that decides which checkpoint is the best. Of `image-classification`: `loss`, `accuracy` or `macroF1`.
    Of `causal-lm`: `loss`, `bitsPerByte`, `perplexity` or `accuracy`. Of a `command` or your own task: one that it
    reports. Default: `loss` for `causal-lm` and your own task, otherwise `accuracy`."""
    goal: Literal["Maximize", "Minimize"] | None = None
    """Whether a higher (`Maximize`) or a lower (`Minimize`) score is better. Default: the metric's own, if it is one of
    a built-in task."""
    image: Image | None = None
    """Container image of the evaluators. Default: the chart's evaluator image. `tandem run` does not use it."""
    command: Annotated[list[Word], Field(min_length=1, max_length=64)] | None = None
    """Your own program and how to start it, for instance `[python, evaluate.py]`, in place of a built-in task's
    metrics. Each evaluator process runs it for its share of each checkpoint, or keeps it alive between checkpoints
    (`tandem.evaluation`)."""
    args: Annotated[list[Word], Field(max_length=512)] = []
    """Arguments that follow `command`. No shell reads them; `$TANDEM_RUN_DIR` in them is the run directory."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = []
    """Environment variables of the evaluators, besides those of `trainer.env`."""
    generate: Generate | None = None
    """`causal-lm` only: prompts that the model completes under each checkpoint."""
    harness: Harness | None = None
    """`causal-lm` with `pretrained` only: tasks of lm-evaluation-harness that are run under each checkpoint."""
    watch: WatchPattern | None = None
    """Pattern of the files or folders in the run directory that are checkpoints in your script's own format, such as
    `checkpoint-*` or `out/*.pt`. `command` gets each one once it is complete. Default: the checkpoints of a built-in
    task or a session."""
    settle_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """`watch` only: a checkpoint whose format does not show that it is complete counts when nothing in it has changed
    for this long. Of a file that is overwritten again and again, set fewer seconds than lie between two saves."""
    timeout_seconds: Seconds | None = None
    """A program or a task of your own that takes longer than this for one shard of one checkpoint is killed, and the
    checkpoint counts as failed after the second time. Default: no limit."""
    drain_seconds: Seconds = 600.0
    """Time without a new result after which the job ends, once training is complete. It waits for its evaluators as
    long as they make progress."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: a task's model is held and computed in it, in half the memory. Scores differ a little."""
    resources: Resources = {}
    """Kubernetes resource requests and limits of one evaluator pod. Its processes divide the GPUs in them."""
    fallback: Literal["CPU"] | None = None
    """`CPU`: while a pod waits for its GPUs for longer than fallbackAfterSeconds, one without GPUs evaluates in its
    place. Default: checkpoints wait for a GPU."""
    fallback_after_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """Time that a pod waits for its GPUs before another one evaluates in its place (`fallback`)."""
    priority_class_name: ObjectName | None = None
    """Priority class of the evaluators' pods. With a low one they borrow GPUs that nobody else wants. Default: that of
    runPolicy."""
    template: Template = {}
    """A pod template merged over the operator's own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda e: e.command is None or e.metric in GOALS or e.goal is not None,
            f"!has(self.command) || !has(self.metric) || self.metric in {list(GOALS)} || has(self.goal)",
            GOAL_REQUIRED,
            "metric",
        ),
        Rule(
            lambda e: e.command is not None or not e.args,
            "has(self.command) || !has(self.args) || size(self.args) == 0",
            "args belong to a command",
            "args",
        ),
        Rule(
            lambda e: e.command is not None or e.watch is None,
            "has(self.command) || !has(self.watch)",
            "watch needs a command, which evaluates what is found",
            "watch",
        ),
        Rule(
            lambda e: e.command is None or e.precision == "float32",
            "!has(self.command) || !has(self.precision) || self.precision == 'float32'",
            "precision is that of a task's model; a command chooses its own",
            "precision",
        ),
    )

    @property
    def metric(self) -> str:
        """The deciding score, with its default filled in."""
        return self.named_metric or "accuracy"

    @property
    def processes(self) -> int:
        """Number of evaluator processes over all pods, which is also the number of shards of the evaluation data."""
        return self.replicas * self.processes_per_replica

    @property
    def direction(self) -> Literal["Maximize", "Minimize"]:
        """The goal with its default filled in."""
        return self.goal or GOALS.get(self.metric, "Maximize")


OnExisting = Literal["Resume", "Fresh", "Refuse"]
"""Policy for the checkpoints of an earlier run."""


class CheckpointSpec(Model):
    """The intervals at which checkpoints are written, and the checkpoints to keep."""

    on_existing: OnExisting = "Resume"
    """Policy for the files of an earlier run in the run directory. `Resume`: continue from its newest checkpoint; the
    job is refused if its data or model differ. `Fresh`: move them into the folder `previous`, replacing its content,
    and start over; with `tandem run`, each time. `Refuse`: leave them alone, and do not start. A directory in which
    nothing was saved is always reused."""

    every: Literal["Auto"] | None = None
    """`Auto`: the interval follows from the measured time of a save and from the failures so far. It excludes
    everySteps and everySeconds."""
    every_steps: Positive | None = None
    """Write a checkpoint every this many optimizer steps."""
    every_seconds: Seconds | None = None
    """Write a checkpoint when this many seconds have passed since the last one, also after a restart. Without
    everySteps and everySeconds: every 60 seconds."""
    keep_last: Positive = 3
    """Number of newest checkpoints to keep."""
    keep_best: Count = 1
    """Number of checkpoints with the best score to keep."""
    keep_every: Positive | None = None
    """Keep checkpoints whose step is a multiple of this permanently."""
    weights_precision: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16`: `weights.safetensors`, which evaluators read and which is exported, has half the size. Training
    resumes from full precision either way."""
    storage: Storage = Storage()
    """The volume that holds them, and a bucket. `tandem run` uses the bucket; instead of a volume it has a run
    directory."""

    immutable: ClassVar[tuple[str, ...]] = ("storage",)
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda c: c.every is None or (c.every_steps is None and c.every_seconds is None),
            "!has(self.every) || (!has(self.everySteps) && !has(self.everySeconds))",
            "every: Auto chooses the interval itself; leave out everySteps and everySeconds",
            "every",
        ),
    )

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between checkpoints with the default filled in, None where only steps count. With `every: Auto`, the
        interval of the first save."""
        if self.every_seconds is None and self.every_steps is None:
            return 60.0
        return self.every_seconds


OnCorruption = Literal["Continue", "Stop", "Off"]
"""Reaction to numbers that are wrong."""


class Elasticity(Model):
    """The group's reaction to lost workers, hangs and new workers."""

    heartbeat_seconds: Annotated[float, Field(ge=0.1, le=60)] = 1.0
    """Maximum time between two heartbeats of a member."""
    lost_after_seconds: Annotated[float, Field(ge=0.5, le=600)] = 3.0
    """A member without a heartbeat for this long is lost."""
    hang_seconds: Seconds = 300.0
    """Time without a step of any rank after which the stacks of all ranks are saved and the group restarts."""
    hang_start_seconds: Seconds = 1200.0
    """Limit like `hangSeconds` while ranks start, restore, save, or make their first step, which may compile."""
    start_after_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """The first group starts with fewer than `replicas`, but at least `minReplicas`, once no further worker has joined
    for this long."""
    grow_cooldown_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Minimum time between two growths of a group. Late workers of its start and replacements of lost members join
    immediately; a worker that was disconnected and comes back does not restart the group each time. Further workers
    wait up to `startAfterSeconds` for each other, so that they join together."""
    grow_after_seconds: Annotated[float, Field(ge=0)] = 60.0
    """A group that cannot save on request loses the work since its last checkpoint when it grows. It grows immediately
    if that is at most this many seconds of work; otherwise at its next checkpoint, or after a new worker has waited
    this long."""
    max_restarts: Count = 10
    """Number of failures of training processes to tolerate. Lost nodes and membership changes do not count."""
    restart_window_seconds: Seconds = 3600.0
    """Time without a failure after which the full budget is restored."""
    warm_start: bool = True
    """Fork Python ranks from a process that has already imported torch, which saves seconds at every start. Linux only;
    elsewhere it has no effect."""
    preload: Annotated[list[ModuleName], Field(max_length=64)] = []
    """Modules to import once for all ranks and starts, if ranks start warm: the slow imports of your script, such as
    `transformers.trainer`. A module that is missing, starts a thread, or uses a GPU during its import is named in the
    worker's log, and the ranks import it themselves."""
    on_membership_change: Literal["Restart", "Regroup"] = "Restart"
    """Reaction of the ranks to a member that is lost or joins. `Restart`: all start again from the newest checkpoint.
    `Regroup`: those that live keep their process and their state, and take the interrupted step again with the members
    that there are. Alpha; for tasks with `strategy: ddp` and sessions on CPUs, on Linux. Others restart."""
    mirror: bool = False
    """Keep a copy of the state in the memory of each worker, and of its part in that of the next worker, renewed every
    few seconds at a cost of at most 1%. A restart then loses seconds of work instead of the steps since the newest
    checkpoint, unless two workers in a row are lost at once. Takes four times a process's share of weights and
    optimizer state in host memory. Alpha; not with `onMembershipChange: Regroup`,
    and without effect on `strategy: hogwild`."""
    on_corruption: OnCorruption = "Continue"
    """Reaction to numbers that are found to be wrong, such as weights that differ between ranks. `Continue`: the job
    goes on where it can. `Stop`: it fails, and names the newest checkpoint from before. `Off`: nothing is compared but
    what ranks must share at a start."""
    preflight: bool = False
    """Have all members compute, reduce and exchange a little data before ranks start in a group with a new member, and
    continue without members that are wrong, much slower than the others, or unreachable. Takes a few seconds."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda e: e.lost_after_seconds >= 2 * e.heartbeat_seconds,
            "self.lostAfterSeconds >= 2.0 * self.heartbeatSeconds",
            "lostAfterSeconds must be at least twice heartbeatSeconds, or one late heartbeat ends a member",
            "lostAfterSeconds",
        ),
        Rule(
            lambda e: not (e.mirror and e.on_membership_change == "Regroup"),
            "!has(self.mirror) || !self.mirror"
            " || !has(self.onMembershipChange) || self.onMembershipChange != 'Regroup'",
            "mirror is for ranks that restart; with onMembershipChange: Regroup they keep their state themselves",
            "mirror",
        ),
    )


class RunPolicy(Model):
    """The life cycle of the job."""

    suspend: bool = False
    """Save, release all pods, and keep the volume until this is false again."""
    active_deadline_seconds: Positive | None = None
    """Fail the job after this many seconds. In a queue, the time starts with its workers."""
    ttl_seconds_after_finished: Count | None = None
    """Delete the job this many seconds after its end."""
    stop_when: StopWhen | None = None
    """End training early by a score. A script needs a session or an adapter for it."""
    queue_name: ShortName | None = None
    """Kueue local queue that admits the workers."""
    priority_class_name: ObjectName | None = None
    """Priority class of all pods."""
    scheduler_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Scheduler of all pods."""


SCORED_BY_TASK = "!has(self.evaluators) || has(self.evaluators.command)"
"""CEL expression: whether a rule on evaluators that a task scores does not apply."""


class Spec(Model):
    """The desired state of the job."""

    trainer: Trainer
    """The training program."""
    workers: Workers = Workers()
    """The training group."""
    coordinator: CoordinatorSpec = CoordinatorSpec()
    """The coordinator's pod."""
    evaluators: Evaluators | None = None
    """The evaluators. Default: one process for a task, none for a command."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints and their storage."""
    elasticity: Elasticity = Elasticity()
    """Reaction to lost workers, hangs and new workers."""
    run_policy: RunPolicy = RunPolicy()
    """Suspension, deadlines, queues."""
    prices: Prices | None = None
    """Prices of a GPU and a CPU per hour. Default: status and report show hours only."""
    tracking: Tracking = Tracking()
    """Trackers of the run besides the run directory."""

    immutable: ClassVar[tuple[str, ...]] = ("trainer",)
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: (
                s.trainer.task is not None
                or s.evaluators is None
                or s.evaluators.replicas == 0
                or s.evaluators.command is not None
            ),
            "has(self.trainer.task) || !has(self.evaluators) || self.evaluators.replicas == 0"
            " || has(self.evaluators.command)",
            "evaluators need a program of your own for a model that your own trainer.command trains: set "
            "evaluators.command, or omit evaluators",
            "evaluators",
        ),
        Rule(
            lambda s: (
                s.trainer.own_task is not None or not s.is_scored_by_task or s.evaluators.metric in METRICS[BUILT_IN]
            ),
            f"{SCORED_BY_TASK} || ({OWN_TASK.format('self.trainer')}) || !has(self.evaluators.metric)"
            f" || self.evaluators.metric in {list(METRICS[BUILT_IN])}",
            f"metric must be one of {', '.join(METRICS[BUILT_IN])}; others are reported by a command or another task",
            "evaluators.metric",
        ),
        Rule(
            lambda s: (
                s.trainer.task != CAUSAL_LM
                or not s.is_scored_by_task
                or s.evaluators.harness is not None
                or s.evaluators.named_metric in (None, *METRICS[CAUSAL_LM])
            ),
            f"{SCORED_BY_TASK} || !has(self.trainer.task) || self.trainer.task != '{CAUSAL_LM}'"
            " || has(self.evaluators.harness)"
            f" || !has(self.evaluators.metric) || self.evaluators.metric in {list(METRICS[CAUSAL_LM])}",
            f"metric of {CAUSAL_LM} must be one of {', '.join(METRICS[CAUSAL_LM])}; others are reported by a command",
            "evaluators.metric",
        ),
        Rule(
            lambda s: (
                s.trainer.own_task is None
                or not s.is_scored_by_task
                or s.evaluators.metric in GOALS
                or s.evaluators.goal is not None
                or s.trainer.task == CAUSAL_LM
            ),
            f"{SCORED_BY_TASK} || !({OWN_TASK.format('self.trainer')}) || !has(self.evaluators.metric)"
            f" || self.evaluators.metric in {list(GOALS)} || has(self.evaluators.goal)"
            f" || self.trainer.task == '{CAUSAL_LM}'",
            GOAL_REQUIRED,
            "evaluators.metric",
        ),
        Rule(
            lambda s: s.trainer.own_task is not None or not s.is_scored_by_task or s.evaluators.timeout_seconds is None,
            f"{SCORED_BY_TASK} || ({OWN_TASK.format('self.trainer')}) || !has(self.evaluators.timeoutSeconds)",
            "timeoutSeconds belongs to a command, causal-lm or a task of your own",
            "evaluators.timeoutSeconds",
        ),
        Rule(
            lambda s: s.trainer.loop is None or s.workers.processes % s.trainer.loop.tensor_parallel == 0,
            "!has(self.trainer.loop) || !has(self.trainer.loop.tensorParallel)"
            f" || (has(self.workers) ? {processes_in_cel('self.workers')} : 1) % self.trainer.loop.tensorParallel == 0",
            "tensorParallel must divide the processes of a worker (workers.processesPerReplica, or its GPUs), so that "
            "any number of workers can train",
            "trainer.loop.tensorParallel",
        ),
        Rule(
            lambda s: s.run_policy.stop_when is None or s.evaluation.replicas > 0,
            "!has(self.runPolicy) || !has(self.runPolicy.stopWhen)"
            " || (has(self.evaluators) ? self.evaluators.replicas > 0 : has(self.trainer.task))",
            "stopWhen needs evaluators",
            "runPolicy.stopWhen",
        ),
        *LANGUAGE_RULES,
        *STORAGE_RULES,
        *RULES,
    )

    @property
    def regroups(self) -> bool:
        """Whether its ranks keep their process and state when the group changes, where they run on CPUs of Linux. Those
        of a script do if it has a session that can (tandem_trainer.session_regroup)."""
        loop = self.trainer.settings_of_loop
        is_plain = loop.strategy == "ddp" and (loop.ddp is None or loop.ddp.compression == "none")
        return self.elasticity.on_membership_change == "Regroup" and is_plain

    @property
    def workers_apart(self) -> int:
        """Number of workers of which a group has a multiple."""
        return worker_multiple_of(self.trainer.settings_of_loop, self.workers.processes)

    @property
    def fewest_workers(self) -> int:
        """Size of the smallest group in workers."""
        multiple = self.workers_apart
        return -(-self.workers.min_replicas // multiple) * multiple

    @property
    def most_workers(self) -> int:
        """Size of the largest group in workers."""
        return self.workers.most // self.workers_apart * self.workers_apart

    @property
    def is_scored_by_task(self) -> bool:
        """Whether evaluators are specified, and their scores come from the task."""
        return self.evaluators is not None and self.evaluators.command is None

    @property
    def variables(self) -> list[tuple[tuple[str | int, ...], EnvVar]]:
        """All environment variables of the job's processes, each with its path in the manifest."""
        mlflow = self.tracking.mlflow
        parts = {
            ("trainer",): self.trainer.env,
            ("evaluators",): self.evaluation.env,
            ("tracking", "mlflow"): [] if mlflow is None else mlflow.env,
        }
        return [
            (("spec", *part, "env", index), variable)
            for part, variables in parts.items()
            for index, variable in enumerate(variables)
        ]

    @property
    def evaluator_gpus(self) -> int:
        """Number of GPUs of each evaluator pod."""
        requested = overridden_resources(self.evaluation.resources, self.evaluation.template, "evaluator")
        return sum(gpus(requested, self.workers.gpu_resource).values())

    @property
    def evaluation(self) -> Evaluators:
        """The evaluators with their default filled in."""
        evaluators = self.evaluators or (Evaluators() if self.trainer.task else Evaluators(replicas=0))
        if self.trainer.own_task and evaluators.command is None and evaluators.named_metric is None:
            return evaluators.model_copy(update={"named_metric": "loss"})
        return evaluators


class Metadata(Model):
    """The part of Kubernetes object metadata that Tandem reads; the rest is kept as it is."""

    model_config = ConfigDict(extra="allow")

    name: Label
    """Name of the job: lower-case letters, digits and dashes."""
    namespace: Label = "default"
    """Namespace of the job."""
    labels: dict[str, str] = {}
    """Labels of the job."""
    annotations: dict[str, str] = {}
    """Annotations of the job."""
    creation_timestamp: Annotated[str | None, BeforeValidator(lambda time: time if isinstance(time, str) else None)] = (
        None
    )
    """Time of creation, as the API server sets it."""


class DistributedTrainingJob(Model):
    """A PyTorch model trained by an elastic group of workers, its checkpoints evaluated on CPUs meanwhile."""

    api_version: Literal["tandem.dev/v1alpha1"]
    """Always tandem.dev/v1alpha1."""
    kind: Literal["DistributedTrainingJob"]
    """Always DistributedTrainingJob."""
    metadata: Metadata
    """Name, namespace, labels."""
    spec: Spec
    """The desired state."""
    status: Status | None = None
    """The observed state, written by the operator."""
