"""Training a built-in task, from top to bottom: data, model, where to start, steps, the end.

What makes it elastic, and the checkpoints, are the business of `tandem_trainer.elastic_run`.
"""

from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob
from tandem.rundir.checkpoint import Broken
from tandem.rundir.durable import may_pass
from tandem.tasks import ImageClassification
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.state import load_weights
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.classification import Stepper, build_optimizer, rate_factor
from tandem_trainer.data import load
from tandem_trainer.data.keyed import mixed
from tandem_trainer.data.order import Batches, Order, Passes
from tandem_trainer.elastic_run import ElasticRun, RankContext, StopRequest
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.meter import cost_of
from tandem_trainer.models import build
from tandem_trainer.models.dropout import key_dropout
from tandem_trainer.strategies.replicated import distribute, prepare


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
