"""The tasks and their typed configuration.

A task defines the data, the model and the loss (tandem_trainer.task) and takes `Parameters`; `Loop` configures the
training loop of any task. The parameters of the built-in tasks have a type here and in `tandem.job.causal_lm`; those of
a user's own task can be validated only by its own code, where that can be imported.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from tandem.job.causal_lm import parameters_of
from tandem.model import TASK, FilePath, JsonLimits, Model, Rule, exceeded_limit

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

BUILT_IN = "image-classification"
"""The built-in task that classifies images."""
CAUSAL_LM = "causal-lm"
"""The built-in task that trains language models."""
PRETRAINED = "pretrained"
"""The parameter of `causal-lm` that names a pretrained model."""
TASKS = (BUILT_IN, CAUSAL_LM)
"""Names of the built-in tasks; all others are a module and a class."""
TaskName = Annotated[str, Field(pattern=TASK, max_length=253)]
"""A built-in task, or the module and class of another one."""

GOALS: dict[str, Literal["Maximize", "Minimize"]] = {
    "loss": "Minimize",
    "accuracy": "Maximize",
    "macroF1": "Maximize",
    "bitsPerByte": "Minimize",
    "perplexity": "Minimize",
}
"""Whether a higher or a lower value is better, for each metric of a built-in task."""
METRICS = {
    BUILT_IN: ("loss", "accuracy", "macroF1"),
    CAUSAL_LM: ("loss", "bitsPerByte", "perplexity", "accuracy"),
}
"""Metrics that evaluators report for each built-in task."""
CLASSES = 10
"""Number of classes of each built-in data set: 0 to 9."""
DIGITS = 1442
"""Training samples of `digits`; a fifth of each class is held out for testing."""
SYNTHETIC = 8192
"""Default number of training samples of `synthetic`."""
SYNTHETIC_SIZE = 28
"""Default height and width of its images."""
MIN_FOR_CNN = 6
"""Minimum height and width of an image for `cnn`, in pixels: two convolutions and pooling leave one."""


FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")


def class_names(data: str) -> tuple[str, ...]:
    """Names of the classes of a data set."""
    return FASHION if data == "fashion-mnist" else tuple(str(index) for index in range(CLASSES))


class Data(Model):
    """The data set."""

    name: Literal["digits", "fashion-mnist", "mnist", "synthetic"] = "fashion-mnist"
    """`digits` ships with scikit-learn (1,797 real 8×8 images), the two MNISTs are downloaded by torchvision or read
    from `path`, `synthetic` is generated."""
    path: FilePath | None = None
    """Folder of the data set's files, which downloads go to. Default: `~/.cache/tandem/data`."""
    download: bool = True
    """Whether a missing data set may be downloaded."""
    start: Annotated[int, Field(ge=0)] | None = None
    """First training sample to use, counted from 0 without those of `validation`. Default: the first one."""
    end: Positive | None = None
    """First training sample not to use. Default: none, all are used. The test data is always whole."""
    validation: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of the training samples to hold out from training, always the same ones. Evaluators also score each
    checkpoint on them, and that score decides which is the best; without them the score on the test data does."""
    samples: Positive | None = None
    """`synthetic` only: training samples to generate. Default: 8192. The test set has a fifth of that."""
    image_size: Annotated[int, Field(ge=4, le=512)] | None = None
    """`synthetic` only: height and width in pixels. Default: 28."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda d: d.end is None or (d.start or 0) < d.end,
            "!has(self.end) || (has(self.start) ? self.start : 0) < self.end",
            "end must be greater than start, or there are no samples to train on",
            "end",
        ),
        Rule(
            lambda d: d.name == "synthetic" or d.samples is None,
            "self.name == 'synthetic' || !has(self.samples)",
            "samples is only for the synthetic data set; the size of a real one is fixed",
            "samples",
        ),
        Rule(
            lambda d: d.name == "synthetic" or d.image_size is None,
            "self.name == 'synthetic' || !has(self.imageSize)",
            "imageSize is only for the synthetic data set; the image size of a real one is fixed",
            "imageSize",
        ),
        Rule(
            lambda d: d.name != "digits" or ((d.start or 0) < DIGITS and (d.end or 0) <= DIGITS),
            f"self.name != 'digits' || ((has(self.start) ? self.start : 0) < {DIGITS}"
            f" && (has(self.end) ? self.end : 0) <= {DIGITS})",
            f"digits has {DIGITS:,} training samples, so start must be less and end at most that",
            "end",
        ),
        Rule(
            lambda d: d.name != "synthetic" or max((d.start or 0) + 1, d.end or 0) <= (d.samples or SYNTHETIC),
            "self.name != 'synthetic' || ((has(self.start) ? self.start : 0)"
            f" < (has(self.samples) ? self.samples : {SYNTHETIC})"
            f" && (has(self.end) ? self.end : 0) <= (has(self.samples) ? self.samples : {SYNTHETIC}))",
            f"start must be less than samples ({SYNTHETIC:,} by default), and end at most that",
            "end",
        ),
    )

    @property
    def known_samples(self) -> int | None:
        """Number of training samples, where the name implies it; None where only the files do."""
        return {"digits": DIGITS, "synthetic": self.samples or SYNTHETIC}.get(self.name)

    def held_out(self, samples: int) -> int:
        """Number of training samples that are held out as validation data."""
        return round(self.validation * samples)


class Optimizer(Model):
    """The optimizer and its settings."""

    name: Literal["adam", "adamw", "adamw8bit", "muon", "sgd"] = "adam"
    """The torch.optim class. `adamw8bit` is AdamW with moments of 8 bits, a quarter of the memory. `muon` is for the
    matrices of hidden layers alone; embeddings, the first and the last layer, and whatever is no matrix are trained by
    AdamW."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate. That of `muon` means the same as that of `adamw`."""
    adamw_learning_rate: Annotated[float, Field(gt=0)] | None = None
    """`muon` only: peak learning rate of AdamW's part. Default: `learningRate`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty (`adam`, `sgd`) or decoupled decay (`adamw`, `adamw8bit`, `muon`)."""
    momentum: Fraction = 0.9
    """`sgd` and `muon` only; 0.95 is usual for `muon`."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda o: o.name == "muon" or o.adamw_learning_rate is None,
            "self.name == 'muon' || !has(self.adamwLearningRate)",
            "adamwLearningRate is only for muon; all others have one learningRate",
            "adamwLearningRate",
        ),
    )


class Schedule(Model):
    """The learning rate over the run, in optimizer steps."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    """The shape after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly from 0."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final value of `cosine` and `linear`, as a fraction of the peak."""
    total_steps: Positive | None = None
    """Step at which `cosine` and `linear` end. Default: the last one of the run. With `initialOptimizer:
    MomentsAndSchedule` it counts the steps of the runs before, too."""


RewindOn = Literal["Spikes", "NotFinite", "Never"]
"""Losses that send training back to an older checkpoint."""


StrategyName = Literal["ddp", "fsdp", "pipeline", "hogwild", "dp", "model"]
"""Distribution of the training state over the ranks."""


class DdpSettings(Model):
    """Options of the strategy `ddp`, in which each rank holds the whole state and gradients are averaged."""

    bucket_megabytes: Annotated[float, Field(gt=0, le=4096)] = 25.0
    """Gradients are averaged in buckets of this many MiB, while the backward pass computes the rest."""
    static_graph: bool = False
    """Each step uses the same parameters in the same order, so that the averaging can be planned once."""
    compression: Literal["none", "float16", "bfloat16", "powerSGD"] = "none"
    """Communicated form of gradients: unchanged, rounded to half the bytes, or, with `powerSGD`, as two narrow matrices
    for each one. The error that `powerSGD` accumulates is not in checkpoints; a new group starts without it."""


class FsdpSettings(Model):
    """Options of the strategy `fsdp`, in which each rank holds a shard of each tensor of the state, and the weights of
    a block are gathered while it computes."""

    wrap_parameters: Positive | None = None
    """Gather the weights of each module with at least this many parameters at a time. Default: those of each block of
    the model, which is a member of a `ModuleList` or `Sequential`."""
    reshard_after_forward: bool = True
    """Free a block's weights between its forward and its backward pass: less memory, more communication."""
    prefetch: Annotated[int, Field(ge=1, le=16)] = 1
    """Number of blocks whose weights are gathered while another one computes."""
    shard_within: Literal["Group", "Worker"] = "Group"
    """`Worker`: shard the state over the ranks of one worker only, and keep a copy in each worker."""
    cpu_offload: bool = False
    """Keep parameters, gradients and the optimizer's state in the memory of the machine, and copy a block's weights to
    the GPU while it computes: less memory of the GPU, much slower. Without a GPU, or with one rank, ignored with a
    warning."""


class Pipeline(Model):
    """Options of the strategy `pipeline`, in which ranks, of one worker or of several, hold consecutive parts of the
    model, and the micro-batches of a step pass through them."""

    stages: Annotated[int, Field(ge=2, le=64)] = 2
    """Number of ranks of a pipeline, in one worker or in several. `workers.replicas` times the processes of a worker
    must be a multiple of it. A group has only as many workers as form whole pipelines; others wait."""
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zeroBubble"] = "1f1b"
    """The order of forward and backward passes. With `interleaved1f1b` and `zeroBubble` each rank holds two stages, or
    as many as `splitAt` makes."""
    chunks: Positive | None = None
    """Micro-batches of a step. Default: four for each rank of the pipeline."""
    split_at: Annotated[list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=255)] | None = None
    """Names of the parts of the model with which stages begin, without the first. Default: stages of about equal
    cost."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda p: p.chunks is None or p.chunks >= p.stages,
            "!has(self.chunks) || self.chunks >= (has(self.stages) ? self.stages : 2)",
            "chunks must be at least as many as stages, or ranks never work at the same time",
            "chunks",
        ),
        Rule(
            lambda p: p.chunks is None or p.schedule in ("gpipe", "1f1b") or p.chunks % p.stages == 0,
            "!has(self.chunks) || !has(self.schedule) || self.schedule in ['gpipe', '1f1b']"
            " || self.chunks % (has(self.stages) ? self.stages : 2) == 0",
            "chunks must be a multiple of stages for the schedules interleaved1f1b and zeroBubble",
            "chunks",
        ),
    )


class Loop(Model):
    """Configuration of the training loop of any task."""

    strategy: StrategyName = "ddp"
    """Distribution of the training state over the ranks: `ddp`, whole on each; `fsdp`, sharded; `pipeline`, split into
    stages; `hogwild`, one copy of the weights for all ranks of a worker, on processors. `dp` and `model` are for one
    process with several GPUs, which splits the samples or the layers between them. A checkpoint of one strategy is
    resumed under any other, on any number of ranks."""
    ddp: DdpSettings | None = None
    """Options of `ddp`."""
    fsdp: FsdpSettings | None = None
    """Options of `fsdp`. Under `pipeline`: several pipelines split the state of a stage between them, where otherwise
    each holds it whole."""
    pipeline: Pipeline | None = None
    """Options of `pipeline`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks of one worker that split each matrix of a layer between them, by the plan that the task or the model
    brings; needs `strategy: fsdp`, which splits the rest, or `strategy: pipeline`. They work on the same samples."""

    initial_weights: FilePath | None = None
    """Weights to start with, for instance of a run on another slice of the data: a run directory, whose newest
    checkpoint is used; a checkpoint in it; a folder with `model.safetensors`; a safetensors file; or a state_dict of
    torch.save. Default: random ones, or those of `pretrained`."""
    initial_optimizer: Literal["Fresh", "Moments", "MomentsAndSchedule"] = "Fresh"
    """State to load besides the weights of `initialWeights`, if that is a run or a checkpoint. `Fresh`: none.
    `Moments`: the state of its optimizer. `MomentsAndSchedule`: also the position in the schedule; the learning rate
    continues as if the steps of the earlier run had been steps of this one."""
    epochs: Positive = 5
    """Passes over the training data."""
    max_steps: Positive | None = None
    """End after this many optimizer steps, if that comes first."""
    global_batch_size: Positive = 64
    """Samples of one optimizer step over all workers together; it does not change when the group grows or shrinks."""
    micro_batch_size: Positive | None = None
    """Maximum number of samples in one forward pass of a rank; gradients of more are accumulated. Default: no limit."""
    drop_last: bool = False
    """Drop the last batch of an epoch if it is smaller than `globalBatchSize`; each epoch drops other samples."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    schedule: Schedule = Schedule()
    """The learning-rate schedule."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Automatic mixed precision; `float16` scales the loss and needs a GPU."""
    gradient_clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the global gradient norm to this."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights with this decay for each step, such as 0.999, and evaluate and
    export that instead of the weights themselves. Batch-norm statistics are those of the model."""
    rewind_on: RewindOn | None = None
    """Losses that send training back to an older checkpoint, and skip the data around the bad step: `NotFinite`, a
    loss that is NaN or infinite; `Spikes`, also one that has become worse than that of the untrained model; `Never`,
    none. Default: `Spikes` for `image-classification`, otherwise `NotFinite`."""
    loader_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes of each rank that read samples ahead. They do not change which rank sees which sample. 0: a sample is
    read when its step begins. Not used if the data is a `TensorDataset`, which lies on the device as a whole."""
    sync_batch_norm: bool = False
    """Share batch-norm statistics over all ranks (GPUs only; ignored with a warning on CPUs)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Run the model through torch.compile; under `pipeline` each of its stages."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """Use deterministic algorithms where torch has them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda c: c.ddp is None or c.strategy == "ddp",
            "!has(self.ddp) || !has(self.strategy) || self.strategy == 'ddp'",
            "ddp has options of the strategy ddp, which is not the one chosen",
            "ddp",
        ),
        Rule(
            lambda c: c.fsdp is None or c.strategy in ("fsdp", "pipeline"),
            "!has(self.fsdp) || (has(self.strategy) && self.strategy in ['fsdp', 'pipeline'])",
            "fsdp has options of the strategy fsdp; choose it with strategy: fsdp, or split the stages of strategy: "
            "pipeline",
            "fsdp",
        ),
        Rule(
            lambda c: c.strategy != "pipeline" or c.fsdp is None or not (c.fsdp.cpu_offload or c.fsdp.wrap_parameters),
            "!has(self.strategy) || self.strategy != 'pipeline' || !has(self.fsdp)"
            " || ((!has(self.fsdp.cpuOffload) || !self.fsdp.cpuOffload) && !has(self.fsdp.wrapParameters))",
            "in a pipeline fsdp splits part by part on the device, without cpuOffload and wrapParameters",
            "fsdp",
        ),
        Rule(
            lambda c: c.fsdp is None or c.pipeline is None or c.pipeline.schedule != "zeroBubble",
            "!has(self.fsdp) || !has(self.pipeline) || !has(self.pipeline.schedule)"
            " || self.pipeline.schedule != 'zeroBubble'",
            "fsdp does not go together with the schedule zeroBubble, which computes gradients of inputs and of weights "
            "apart: fsdp sends them together",
            "fsdp",
        ),
        Rule(
            lambda c: c.precision != "float16" or c.fsdp is None or not c.fsdp.cpu_offload,
            "!has(self.precision) || self.precision != 'float16' || !has(self.fsdp) || !has(self.fsdp.cpuOffload)"
            " || !self.fsdp.cpuOffload",
            "fsdp.cpuOffload does not go together with precision: float16; take bfloat16",
            "precision",
        ),
        Rule(
            lambda c: c.initial_weights is not None or c.initial_optimizer == "Fresh",
            "has(self.initialWeights) || !has(self.initialOptimizer) || self.initialOptimizer == 'Fresh'",
            "initialOptimizer says what is taken over beside initialWeights, which is not given",
            "initialOptimizer",
        ),
        Rule(
            lambda c: not c.compile or c.strategy not in ("dp", "model"),
            "!has(self.compile) || !self.compile || !has(self.strategy) || !(self.strategy in ['dp', 'model'])",
            "compile is for a model on one device; strategy: dp and strategy: model use several, so take ddp or fsdp",
            "compile",
        ),
        Rule(
            lambda c: not c.activation_checkpointing or c.strategy != "dp",
            "!has(self.activationCheckpointing) || !self.activationCheckpointing || !has(self.strategy)"
            " || self.strategy != 'dp'",
            "activationCheckpointing does not work in the copies that strategy: dp makes of a model; take ddp",
            "activationCheckpointing",
        ),
        Rule(
            lambda c: c.pipeline is None or c.strategy == "pipeline",
            "!has(self.pipeline) || (has(self.strategy) && self.strategy == 'pipeline')",
            "pipeline has options of the strategy pipeline; choose it with strategy: pipeline",
            "pipeline",
        ),
        Rule(
            lambda c: c.strategy != "pipeline" or not c.sync_batch_norm,
            "!has(self.strategy) || self.strategy != 'pipeline' || !has(self.syncBatchNorm) || !self.syncBatchNorm",
            "strategy: pipeline does not go together with syncBatchNorm",
            "strategy",
        ),
        Rule(
            lambda c: not c.compile or c.pipeline is None or c.pipeline.schedule != "zeroBubble",
            "!has(self.compile) || !self.compile || !has(self.pipeline) || !has(self.pipeline.schedule)"
            " || self.pipeline.schedule != 'zeroBubble'",
            "compile does not go together with the schedule zeroBubble, which computes gradients of inputs and of "
            "weights apart: compiled code computes them together",
            "compile",
        ),
        Rule(
            lambda c: c.strategy != "hogwild" or c.optimizer.name != "adamw8bit",
            "!has(self.strategy) || self.strategy != 'hogwild' || !has(self.optimizer) || !has(self.optimizer.name)"
            " || self.optimizer.name != 'adamw8bit'",
            "adamw8bit writes whole tensors back, and what other ranks of strategy: hogwild have written meanwhile"
            " would be lost; take adamw",
            "optimizer",
        ),
        Rule(
            lambda c: c.tensor_parallel == 1 or c.strategy in ("fsdp", "pipeline"),
            "!has(self.tensorParallel) || self.tensorParallel == 1"
            " || (has(self.strategy) && self.strategy in ['fsdp', 'pipeline'])",
            "tensorParallel needs strategy: fsdp or strategy: pipeline",
            "tensorParallel",
        ),
        Rule(
            lambda c: c.tensor_parallel == 1 or c.optimizer.name != "adamw8bit",
            "!has(self.tensorParallel) || self.tensorParallel == 1 || !has(self.optimizer) || !has(self.optimizer.name)"
            " || self.optimizer.name != 'adamw8bit'",
            "optimizer.name: adamw8bit has a scale for each part of a row, and tensorParallel cuts rows; take adamw",
            "optimizer",
        ),
    )


MAX_PARAMETERS = JsonLimits(depth=16, values=5_000, characters=2**16)


def _bounded(parameters: dict[str, Any]) -> dict[str, Any]:
    if problem := exceeded_limit(parameters, MAX_PARAMETERS):
        raise ValueError(f"parameters: this {problem}; keep data in a file, and pass its path to the task")
    return parameters


Parameters = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""Parameters of a task."""


class ImageParameters(Model):
    """The parameters of the task `image-classification` (`trainer.parameters`)."""

    model: Literal["cnn", "baby-cnn", "simple-net", "resnet-18"] = "cnn"
    """`cnn`: conv 32 and 64, dropout, two linear layers; `baby-cnn`: a smaller one; `simple-net`: an MLP of
    256-256; `resnet-18`: torchvision's, with the input layer fitted to the data."""
    data: Data = Data()
    """The data set."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda c: c.model != "cnn" or (c.data.image_size or SYNTHETIC_SIZE) >= MIN_FOR_CNN,
            "self.model != 'cnn' || !has(self.data) || !has(self.data.imageSize)"
            f" || self.data.imageSize >= {MIN_FOR_CNN}",
            f"model cnn needs images of at least {MIN_FOR_CNN}×{MIN_FOR_CNN} pixels",
            "model",
        ),
    )


def parameters_type(task: object, parameters: object) -> type[Model] | None:
    """The type of the parameters of a built-in task; None for a task of the user's own."""
    if task == BUILT_IN:
        return ImageParameters
    return parameters_of(parameters) if task == CAUSAL_LM else None


class ImageConfig(Loop, ImageParameters):
    """Loop and parameters of `image-classification` in one group, as earlier manifests have them."""

    rewind_on: RewindOn = "Spikes"
    """Losses that send training back to an older checkpoint, and skip the data around the bad step: `NotFinite`, a
    loss that is NaN or infinite; `Spikes`, also one that has become worse than that of the untrained model; `Never`,
    none."""
    # The default stays in the CRD: the API server has stored it in jobs, and a trainer without it would be another one.

    rules: ClassVar[tuple[Rule, ...]] = (
        *Loop.rules,
        *ImageParameters.rules,
        Rule(
            lambda c: (
                not c.drop_last
                or (end := c.data.end or c.data.known_samples) is None
                or c.global_batch_size <= end - (c.data.start or 0)
            ),
            "!self.dropLast || !has(self.data) || !(has(self.data.end) || self.data.name in ['digits', 'synthetic'])"
            " || self.globalBatchSize <= (has(self.data.end) ? self.data.end"
            f" : self.data.name == 'digits' ? {DIGITS} : has(self.data.samples) ? self.data.samples : {SYNTHETIC})"
            " - (has(self.data.start) ? self.data.start : 0)",
            "dropLast would drop all samples, because globalBatchSize exceeds their number",
            "globalBatchSize",
        ),
    )
