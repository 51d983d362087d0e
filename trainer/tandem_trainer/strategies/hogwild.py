"""Lock-free training on the processors of one machine (https://arxiv.org/abs/1106.5730).

The ranks of one worker map the same memory, and the parameters of the model lie in it. Each rank takes its part of
every global batch, computes the gradient with the weights as they are at that moment, and its optimizer writes the
update into them. Nobody waits for the others, and nothing is averaged. Two ranks that write a number at the same time
may lose one of the updates, and a forward pass may see a tensor of which a part is newer: that is what Hogwild accepts.

A rank's update is by the mean over its own part, so a step on n ranks moves the weights about n times as far as one
with the averaged gradient: the learning rate is that of a batch of globalBatchSize / n.

What is written by one rank alone stays its own: gradients, the optimizer's moments, buffers. Adam's step is bounded
because both of its moments come from the same gradients; moments that ranks overwrite for each other can be of
different ones. Rank 0 speaks for all in a checkpoint (docs/decisions/0039-hogwild.md).

The ranks meet at each vote and at each save, as under every strategy. No rank goes on from a save before rank 0 has
copied the weights (tandem_trainer.elastic_run).
"""

import logging
import mmap
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tandem.tasks import Loop
from tandem_trainer.checkpoint.node_memory import node_of_this_process
from tandem_trainer.checkpoint.staging import shared_memory
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Examples, Strategy
from tandem_trainer.task import Task

log = logging.getLogger(__name__)

LINE = 64
"""Bytes of a cache line; no two parameters share one."""


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
            raise ConfigurationError("strategy: hogwild trains on processors, and this rank has a GPU; take ddp")
        if loop.deterministic and group.rank == 0:
            log.warning("setting=deterministic ignored: under hogwild the order of updates is nobody's to say")

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        super().shard(model, task, examples)
        share(model, self.group)


def share(model: nn.Module, group: Group) -> None:
    """Have the parameters of a model lie in memory that all ranks share, with the values of rank 0. Collective.

    Raises:
        ConfigurationError: the ranks cannot share memory, or a parameter has no shape yet.
    """
    parameters = list(model.parameters())
    if any(is_lazy(one) for one in parameters):
        raise ConfigurationError("strategy: hogwild needs parameters whose shape is known from the start; take ddp")
    starts, end = [], 0
    for one in parameters:
        starts.append(end)
        end += -(-one.nbytes // LINE) * LINE
    memory = shared_by_all(group, max(end, LINE))
    for start, one in zip(starts, parameters, strict=True):
        # As dense as it is here, in the same order of dimensions (channels_last).
        strides = torch.empty_like(one, device="meta").stride()
        place = memory[start : start + one.nbytes].view(one.dtype).as_strided(one.shape, strides)
        if group.rank == 0:
            place.copy_(one.detach())
        one.data = place
    group.barrier()


def shared_by_all(group: Group, size: int) -> Tensor:
    """Memory that all ranks map; it is gone with the last of them. Collective.

    Args:
        size: bytes.

    Returns:
        [size], uint8.

    Raises:
        ConfigurationError: they are not all in one container of one machine, or one may not open what is another's.
    """
    node = node_of_this_process()
    if not node or any(view["node"] != node for view in group.gather({"node": node})):
        raise ConfigurationError(
            "strategy: hogwild needs all ranks in one worker (workers.processesPerReplica), on Linux; take ddp"
        )
    descriptor = -1
    offer: dict[str, Any] = {}
    if group.rank == 0:
        descriptor = shared_memory()
        # What there is no room for ends the rank here, and not at some later write.
        os.posix_fallocate(descriptor, 0, size)
        offer = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "inode": os.fstat(descriptor).st_ino}
    offer = group.tell(offer)
    why = ""
    if group.rank != 0:
        try:
            descriptor = os.open(offer["path"], os.O_RDWR | os.O_CLOEXEC)
            why = "" if os.fstat(descriptor).st_ino == offer["inode"] else "another file is there"
        except OSError as error:
            why = str(error)
    # Rank 0 keeps its descriptor until all have opened it.
    problems = [view["why"] for view in group.gather({"why": why}) if view["why"]]
    try:
        if problems:
            raise ConfigurationError(f"strategy: hogwild: ranks cannot open the memory of rank 0: {problems[0]}")
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
