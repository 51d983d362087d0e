"""The training loop of a built-in task, from top to bottom: data, model, restore, steps, end.

The gradient is that of the mean loss over the *global* batch, whatever the number of ranks, however unevenly the batch
splits and however many micro-batches a rank needs; every rank takes as many as the one that needs most, because a
forward pass may be a collective (syncBatchNorm). DistributedDataParallel averages over ranks, so each rank's sum of
losses is scaled by ranks / global samples.

Dropout draws by seed, step and sample (tandem_trainer.models.dropout). Whatever else draws in a model follows from
seed, step and rank. So a resumed run needs no stored generator state.

What makes it elastic, and the checkpoints, are the business of `tandem_trainer.elastic_run`.
"""

import contextlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob
from tandem.rundir.checkpoint import Broken
from tandem.rundir.durable import may_pass
from tandem.tasks import ImageClassification, Optimizer, Schedule
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.state import load_weights
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.data import Samples, load
from tandem_trainer.data.keyed import mixed, seed_torch
from tandem_trainer.data.order import Batches, Order, Passes, pieces, share
from tandem_trainer.elastic_run import ElasticRun, RankContext, StopRequest
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.meter import Busy, GradientNorm, cost_of
from tandem_trainer.models import build
from tandem_trainer.models.dropout import Draws, key_dropout
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.replicated import distribute, prepare

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Stepper:
    """Takes optimizer steps."""

    def __init__(
        self,
        config: ImageClassification,
        group: Group,
        forward: nn.Module,
        draws: Draws,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        samples: Samples,
        gradients: GradientNorm | None = None,
    ) -> None:
        """
        Args:
            forward: the model as it is called, wrapped for data parallelism if there are several ranks.
            draws: what its dropout draws from.
            scaler: of the loss; enabled for float16 alone.
            samples: the training data; moved to the device as a whole.
            gradients: measures their norm; None where nobody asks.
        """
        if config.precision == "float16" and group.device.type != "cuda":
            raise ConfigurationError("precision: float16 needs a GPU; on a CPU take bfloat16 or float32")
        self._config, self._group = config, group
        self._forward, self._draws, self._optimizer, self._scaler = forward, draws, optimizer, scaler
        self._images = samples.images.to(group.device)
        self._labels = samples.labels.to(group.device)
        self._parameters = [p for parameters in optimizer.param_groups for p in parameters["params"]]
        self._gradients = gradients
        if gradients is not None:
            gradients.follow(optimizer)
        self.busy = Busy(group.device)
        forward.train()

    def take(self, step: int, ids: Tensor, learning_rate: float) -> Tensor:
        """Take one step.

        Args:
            step: its number, counted from 0.
            ids: [global batch], sample ids of all ranks together.
            learning_rate: for this step.

        Returns:
            This rank's part of the mean loss of the global batch: the sum over all ranks is the mean. Scalar, float32.
        """
        group = self._group
        seed_torch(mixed(self._config.seed, step, group.rank), group.device)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = learning_rate
        mine = share(ids, group.rank, group.world_size)
        cuts = pieces(len(mine), len(ids), group.world_size, self._config.micro_batch_size or len(ids))
        total = torch.zeros((), device=group.device)
        for number, (start, end) in enumerate(cuts, start=1):
            # A rank without a sample still takes part in the collectives: with one sample of weight 0.
            chunk, weight = (mine[start:end], 1.0) if start < end else (ids[:1], 0.0)
            scale = weight / len(ids)
            with self._synchronised(number == len(cuts)):
                with self.busy:
                    loss = self._loss(step, chunk)
                self._scaler.scale(loss * (scale * group.world_size)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * scale
        if self._config.gradient_clip_norm is not None:
            self._scaler.unscale_(self._optimizer)
            norm = nn.utils.clip_grad_norm_(self._parameters, self._config.gradient_clip_norm)
            if self._gradients is not None and self._gradients.is_due:
                self._gradients.tell(norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, step: int, chunk: Tensor) -> Tensor:
        """Sum of the cross entropies of some samples. Scalar, float32."""
        if self._group.device.type == "cuda":
            chunk = chunk.to(self._group.device, non_blocking=True)
        self._draws.set(self._config.seed, step, chunk)
        images, labels = self._images[chunk], self._labels[chunk]
        if self._config.precision == "float32":
            return F.cross_entropy(self._forward(images), labels, reduction="sum")
        with torch.autocast(self._group.device.type, dtype=DTYPES[self._config.precision]):
            logits = self._forward(images)
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Average gradients in the backward pass of the last micro-batch alone."""
        no_sync = getattr(self._forward, "no_sync", contextlib.nullcontext)
        return contextlib.nullcontext() if last else no_sync()


def build_optimizer(config: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters that learn."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The multi-tensor implementations: one launch for all parameters, on CPUs too.
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            fused=True,
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


def rate_factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied with in a step (counted from 0): warm-up, then the schedule's shape."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    span = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape


def train(job: DistributedTrainingJob, context: RankContext) -> ExitCode:
    """Train the built-in task until its end or until asked to leave. Collective: every rank of the generation calls it.

    Raises:
        ConfigurationError: the job cannot work as it is written.
        Superseded: a newer generation has taken over.
        SaveFailed: the last checkpoint could not be written.
        WentBack: the loss has become useless.
    """
    stop = StopRequest(context.pulse)
    config, group = job.spec.trainer.settings, context.group

    # Data and model
    torch.use_deterministic_algorithms(config.deterministic)
    samples = load(config.data, "train")
    elastic = ElasticRun(context, job.spec.checkpoint, stop, config.rewind_on)
    passes = Passes(order_of(config, len(samples)), config.epochs, config.max_steps)
    cost = cost_of(config, samples, group.device)
    torch.manual_seed(mixed(config.seed))
    model = build(config.model, samples.channels, samples.image_size, samples.classes)
    draws = key_dropout(model)
    model = prepare(model, config, group)
    average = averaged(model, config.ema_decay)
    optimizer = build_optimizer(config.optimizer, model)
    scaler = torch.amp.GradScaler(group.device.type, enabled=config.precision == "float16")

    def begin() -> None:
        if config.initial_weights is not None:
            load_initial(model, Path(config.initial_weights))
            if average is not None:
                average.module.load_state_dict(model.state_dict())

    # Where to start
    scaling = {"scaler": scaler} if scaler.is_enabled() else {}
    elastic.begin(TrainState(model, optimizer, average, scaling), passes, begin, cost)
    forward = distribute(model, config, group)
    stepper = Stepper(config, group, forward, draws, optimizer, scaler, samples, elastic.meter.gradients)

    # Steps
    assert elastic.total_steps is not None
    batches = Batches(passes.order)
    for step in elastic.steps(stepper.busy.take):
        ids = batches.ids(elastic.data_step)
        rate = config.optimizer.learning_rate * rate_factor(config.schedule, step, elastic.total_steps)
        elastic.meter.data_ready()
        loss = stepper.take(step, ids, rate)
        if average is not None:
            average.update_parameters(model)
        elastic.took(ids, rate, loss)
    return elastic.end()


def averaged(model: nn.Module, decay: float | None) -> AveragedModel | None:
    """An exponential moving average of the weights; None without a decay."""
    if decay is None:
        return None
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
    # It begins as a copy, and goes on as what a checkpoint held: its first update is one like all others.
    average.n_averaged.fill_(1)
    return average


def order_of(config: ImageClassification, samples: int) -> Order:
    """The order of the slice that the job trains on.

    Raises:
        ConfigurationError: the data set has no such slice, or nothing of it is left.
    """
    start, end = config.data.start or 0, config.data.end or samples
    if end > samples or start >= end:
        asked = f"data.start {start} and data.end {end}" if config.data.end else f"data.start {start}"
        raise ConfigurationError(f"{asked} is no slice of {config.data.name}, which has {samples} training samples")
    if config.drop_last and end - start < config.global_batch_size:
        raise ConfigurationError(
            f"dropLast leaves out all of the {end - start} samples, because globalBatchSize {config.global_batch_size} "
            "is more"
        )
    return Order(end - start, config.global_batch_size, config.seed, first=start, drop_last=config.drop_last)


def load_initial(model: nn.Module, path: Path) -> None:
    """Put weights from a file into a model.

    Raises:
        UnusableInput: the file is not there, or is no safetensors file.
        ConfigurationError: it holds other weights.
        OSError: the disk fails.
    """
    try:
        load_weights(model, parse(memoryview(bytearray(path.read_bytes()))))
    except OSError as error:
        if may_pass(error):
            raise
        raise UnusableInput(f"initialWeights {path} cannot be read: {error.strerror}") from error
    except Broken as error:
        raise UnusableInput(f"initialWeights {path}: {error}") from error
