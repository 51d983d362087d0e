"""Lock-free training on the processors of one machine (https://arxiv.org/abs/1106.5730).

The ranks of one worker map the same memory, which holds the parameters of the model. Each rank takes its part of every
global batch, computes the gradient with the weights as they are at that moment, and its optimizer writes the update
into them. No rank waits for the others, and nothing is averaged. Two ranks that write a number at the same time may
lose one of the updates, and a forward pass may see a tensor that is partly newer: Hogwild accepts both.

A rank's update uses the mean over its own part, so a step on n ranks moves the weights about n times as far as one with
the averaged gradient: choose the learning rate for a batch of globalBatchSize / n.

Gradients, the optimizer's moments and buffers stay private to each rank. Adam's step is bounded because both of its
moments come from the same gradients; moments that ranks overwrite for each other could come from different ones. A
checkpoint has the private state of rank 0 (docs/decisions/0039-hogwild.md).

The ranks meet at each vote and at each save, as under every strategy. No rank continues after a save before rank 0 has
copied the weights (tandem_trainer.elastic_run).
"""

import logging
import mmap
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tandem.job.tasks import Loop
from tandem_trainer.checkpoint.node_memory import node_of_this_process
from tandem_trainer.checkpoint.staging import shared_memory
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Examples, Strategy
from tandem_trainer.task import Task

log = logging.getLogger(__name__)

CACHE_LINE = 64
"""Size of a cache line in bytes; no two parameters share one."""


class Hogwild(Strategy):
    """Several ranks that write into the same weights."""

    is_shared = True

    def __init__(self, loop: Loop, group: Group) -> None:
        """
        Raises:
            ConfigurationError: this rank computes on a GPU.
        """
        super().__init__(loop, group)
        if group.device.type != "cpu":
            raise ConfigurationError("strategy: hogwild trains on processors, and this rank has a GPU; use ddp")
        if loop.deterministic and group.rank == 0:
            log.warning("setting=deterministic ignored: hogwild updates are unordered")

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        super().shard(model, task, examples)
        share_parameters(model, self.group)


def share_parameters(model: nn.Module, group: Group) -> None:
    """Move the parameters of a model into memory that all ranks share, with the values of rank 0. Collective.

    Raises:
        ConfigurationError: the ranks cannot share memory, or a parameter has no shape yet.
    """
    parameters = list(model.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise ConfigurationError("strategy: hogwild needs parameters whose shape is known from the start; use ddp")
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.nbytes // CACHE_LINE) * CACHE_LINE
    memory = shared_by_all(group, max(end, CACHE_LINE))
    for start, parameter in zip(starts, parameters, strict=True):
        # Keep the memory format (channels_last), densely packed.
        strides = torch.empty_like(parameter, device="meta").stride()
        place = memory[start : start + parameter.nbytes].view(parameter.dtype).as_strided(parameter.shape, strides)
        if group.rank == 0:
            place.copy_(parameter.detach())
        parameter.data = place
    # No rank may compute before rank 0 has copied its values.
    group.barrier()


def shared_by_all(group: Group, size: int) -> Tensor:
    """Create memory that all ranks map; it is freed when the last of them ends. Collective.

    Args:
        size: size in bytes.

    Returns:
        [size], uint8.

    Raises:
        ConfigurationError: the ranks are not all in one container of one machine, or one may not open another's memory.
    """
    node = node_of_this_process()
    if not node or any(view["node"] != node for view in group.gather({"node": node})):
        raise ConfigurationError(
            "strategy: hogwild needs all ranks in one worker (workers.processesPerReplica), on Linux; use ddp"
        )
    descriptor = -1
    offer: dict[str, Any] = {}
    if group.rank == 0:
        descriptor = shared_memory()
        # Allocate now: a lack of memory fails here with an error, not at some later write with a signal.
        os.posix_fallocate(descriptor, 0, size)
        offer = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "inode": os.fstat(descriptor).st_ino}
    offer = group.tell(offer)
    reason = ""
    if group.rank != 0:
        try:
            descriptor = os.open(offer["path"], os.O_RDWR | os.O_CLOEXEC)
            reason = "" if os.fstat(descriptor).st_ino == offer["inode"] else "another file is there"
        except OSError as error:
            reason = str(error)
    # Rank 0 keeps its descriptor open until this collective, when all have opened it.
    problems = [view["why"] for view in group.gather({"why": reason}) if view["why"]]
    try:
        if problems:
            raise ConfigurationError(f"strategy: hogwild: ranks cannot open the memory of rank 0: {problems[0]}")
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
