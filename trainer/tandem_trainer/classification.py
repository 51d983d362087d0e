"""One optimizer step of the image-classification task on this rank's share of the global batch.

The gradient is that of the mean loss over the *global* batch, whatever the number of ranks, however unevenly the batch
splits and however many micro-batches a rank needs; every rank takes as many as the one that needs most, because a
forward pass may be a collective (syncBatchNorm). DistributedDataParallel averages over ranks, so each rank's sum of
losses is scaled by ranks / global samples.

Dropout draws by seed, step and sample (tandem_trainer.models.dropout). Whatever else draws in a model follows from
seed, step and rank. So a resumed run needs no stored generator state.
"""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.tasks import ImageClassification, Optimizer, Schedule
from tandem_trainer.data import Samples
from tandem_trainer.data.keyed import mixed, seed_torch
from tandem_trainer.data.order import pieces, share
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import Busy, GradientNorm
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group

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
