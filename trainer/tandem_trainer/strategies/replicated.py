"""Data parallelism: every rank holds the whole model, gradients are averaged while the backward pass runs."""

import logging
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tandem.tasks import ImageClassification
from tandem_trainer.group import Group

log = logging.getLogger(__name__)


def prepare(model: nn.Module, config: ImageClassification, group: Group) -> nn.Module:
    """Put the model on the device, with what the configuration asks for; names of parameters stay as they are."""
    if config.sync_batch_norm:
        if group.device.type == "cuda" and group.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        elif group.rank == 0:
            log.warning("setting=syncBatchNorm ignored: it needs more than one rank, on GPUs")
    if config.activation_checkpointing:
        for child in model.children():
            if any(True for _ in child.parameters()):
                child.forward = partial(checkpoint, child.forward, use_reentrant=False)
    return model.to(group.device)


def distribute(model: nn.Module, config: ImageClassification, group: Group) -> nn.Module:
    """Wrap a prepared model whose weights are the same on every rank."""
    if config.compile:
        # The model and not what is wrapped around it: in DistributedDataParallel's own forward the compiler gives up
        # (torch 2.15), and of a model that is made of torch's modules alone nothing would be compiled at all.
        model.compile()
    if group.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
