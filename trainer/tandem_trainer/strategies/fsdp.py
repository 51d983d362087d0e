"""Fully sharded data parallelism, and tensor parallelism within it, on a mesh of up to three dimensions.

The ranks of a generation are numbered worker by worker, so the dimensions are, from the outermost: workers that hold a
copy each (`replicate`, with `shardWithin: Worker`), ranks that split the state and the batch (`shard`), and ranks that
split each matrix and work on the same samples (`tensor`). The last is within a worker by a rule of the manifest. So any
number of workers forms a mesh, and the coordinator needs to know nothing of it.

Each rank holds a part of every tensor. The weights of a block are put together just before it computes, and gradients
go back as parts that are averaged already (https://arxiv.org/abs/2304.11277, in its form by parameter: `fully_shard`).
With micro-batches that is done for each of them: memory is what this strategy is chosen for, and whole gradients would
cost what it saves.

With `cpuOffload` the parts of a rank are in the memory of the machine, where the optimizer's step is computed. A
block's part is copied to the GPU before it is gathered, and its gradient is copied back.

Rejected: DistributedDataParallel around a model with split matrices (torch 2.15 refuses it).
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tandem import tasks
from tandem.tasks import Loop
from tandem_trainer.checkpoint.sharding import copies_of, here
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.malloc import LARGE_BYTES, keep_freed_memory, return_large_blocks
from tandem_trainer.models.dropout import SampleDropout
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.replicated import Comparison, add_up_gradients
from tandem_trainer.strategies.strategy import Examples, Plan, Strategy, blocks_of, clip_parts
from tandem_trainer.strategies.tensor import COLWISE, REPLICATED, ROWWISE, check, split_modules
from tandem_trainer.task import Task

log = logging.getLogger(__name__)

STYLES: dict[str, type[ParallelStyle]] = {COLWISE: ColwiseParallel, ROWWISE: RowwiseParallel}


class Fsdp(Strategy):
    """`fully_shard` with the options of the job, over what tensor parallelism has left."""

    def __init__(self, loop: Loop, group: Group, per_worker: int, tensor_parallel: int) -> None:
        """
        Args:
            per_worker: ranks of each worker.
            tensor_parallel: how many of them split a matrix.

        Raises:
            ConfigurationError: that does not divide them.
        """
        super().__init__(loop, group)
        if group.device.type == "cpu":
            # Before the model is made: what it is made of is to return as well, once it is split.
            return_large_blocks()
        self._options = loop.fsdp or tasks.Fsdp()
        self._degree = tensor_parallel
        if per_worker % tensor_parallel:
            raise ConfigurationError(
                f"tensorParallel: {tensor_parallel} does not divide the {per_worker} processes of a worker"
            )
        self.dp_rank, self.dp_size = group.rank // tensor_parallel, group.world_size // tensor_parallel
        split = per_worker // tensor_parallel if self._options.shard_within == "Worker" else self.dp_size
        sizes = {"replicate": self.dp_size // split, "shard": split, "tensor": tensor_parallel}
        self.mesh = {name: size for name, size in sizes.items() if size > 1}
        if self._options.cpu_offload and not self._offloads and group.rank == 0:
            why = "there is no GPU" if group.device.type == "cpu" else "no more ranks than tensorParallel says"
            log.warning("setting=fsdp.cpuOffload ignored: %s", why)
        self._mesh = group.mesh(sizes)
        self._comparison = Comparison(self._mesh.get_group("tensor"), group.device)

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        if self.group.device.type == "cpu" and weights < LARGE_BYTES:
            keep_freed_memory()
        if self._degree > 1:
            split_matrices(model, task.tensor_plan(model, self._degree), self._mesh["tensor"])
        if self.dp_size == 1:
            model.to(self.group.device)
            return
        blocks = blocks_of(model, self._options.wrap_parameters)
        if self.loop.compile:
            for block in blocks:
                block.compile()
        settings = settings_of(self.loop, self._options, self._mesh)
        if self._offloads:
            settings["offload_policy"] = CPUOffloadPolicy()
        shard_blocks(model, blocks, settings)
        if not self._offloads:
            # Otherwise parameters stay where they are, and fully_shard has moved the buffers.
            model.to(self.group.device)
        prefetch(blocks, self._options.prefetch)

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.loop.compile and self.dp_size == 1:
            model.compile()
        return model

    @contextlib.contextmanager
    def synchronised(self, forward: nn.Module, last: bool) -> Iterator[None]:
        yield
        if last:
            self._comparison.look(forward.named_parameters())

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        # torch's own cannot: parameters are on meshes of several shapes, and some of them on none.
        gradients = [(one, here(one.grad)) for one in parameters if one.grad is not None]
        copies = [copies_of(one, self.group.world_size) for one, _ in gradients]
        return clip_parts([mine for _, mine in gradients], copies, most, self.group.device)

    @property
    def _offloads(self) -> bool:
        return self._options.cpu_offload and self.group.device.type != "cpu" and self.dp_size > 1


def settings_of(loop: Loop, options: tasks.Fsdp, mesh: DeviceMesh) -> dict[str, Any]:
    """The arguments of `fully_shard` that a job asks for.

    Args:
        mesh: has the dimensions `replicate` and `shard`.
    """
    split = mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
    settings: dict[str, Any] = {"mesh": split, "reshard_after_forward": options.reshard_after_forward}
    if loop.precision == "bfloat16":
        # Weights travel in the precision in which they compute; gradients are added up in full.
        settings["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return settings


def prefetch(modules: Sequence[nn.Module], depth: int) -> None:
    """Have the weights of more than one block under way. One is what torch does by itself.

    Args:
        modules: in the order in which they compute.
    """
    blocks: list[FSDPModule] = [block for block in modules if isinstance(block, FSDPModule)]
    for number, block in enumerate(blocks if depth > 1 else ()):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, number - depth) : number])))


def shard_blocks(model: nn.Module, blocks: Sequence[nn.Module], settings: Mapping[str, Any]) -> None:
    """Split a model over ranks, block by block, and last what is in none of them.

    Args:
        settings: options of `fully_shard`.
    """
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def split_matrices(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, is_here: Callable[[nn.Module], bool] = lambda module: True
) -> None:
    """Split the matrices of a model over the ranks of a mesh with one dimension, and dropout within them alike.

    Args:
        is_here: whether this rank has a module at all.

    Raises:
        ConfigurationError: the plan is none for this model.
    """
    check(plan, model, mesh.size())
    styles: dict[str, ParallelStyle] = {}
    for name, module, style in split_modules(plan, model):
        if not is_here(module):
            continue
        if style == REPLICATED:
            add_up_gradients(module, mesh.get_group())
        elif isinstance(module, SampleDropout):
            module.part = (mesh.get_local_rank(), mesh.size())
        elif not isinstance(module, nn.Dropout):
            styles[name] = STYLES[style]()
    parallelize_module(model, mesh, styles)
