"""Fully sharded data parallelism, and tensor parallelism within it, on a mesh of up to three dimensions.

The ranks of a generation are numbered worker by worker, so the dimensions are, from the outermost: workers that each
hold a copy (`replicate`, with `shardWithin: Worker`), ranks that shard the state and the batch (`shard`), and ranks
that split each matrix and work on the same samples (`tensor`). By a rule of the manifest the last is within a worker.
So any number of workers forms a mesh, and the coordinator need not know about it.

Each rank holds a part of every tensor. The weights of a block are gathered just before it computes, and gradients are
reduced to parts that are already averaged (https://arxiv.org/abs/2304.11277, in its per-parameter form: `fully_shard`).
With micro-batches both happen for each of them: this strategy is chosen for its memory, and full gradients would cost
what it saves.

With `cpuOffload` the parts of a rank are in host memory, where the optimizer's step is computed. A block's part is
copied to the GPU before it is gathered, and its gradient is copied back.

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

from tandem.job import tasks
from tandem.job.tasks import Loop
from tandem_trainer.checkpoint.sharding import copies_of, to_local
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.malloc import LARGE_BYTES, keep_freed_memory, return_large_blocks
from tandem_trainer.models.dropout import SampleDropout
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.replicated import GradientComparison, sum_gradients
from tandem_trainer.strategies.strategy import Examples, Plan, Strategy, blocks_of, clip_parts
from tandem_trainer.strategies.tensor import COLWISE, REPLICATED, ROWWISE, check, split_modules
from tandem_trainer.task import Task

log = logging.getLogger(__name__)

STYLES: dict[str, type[ParallelStyle]] = {COLWISE: ColwiseParallel, ROWWISE: RowwiseParallel}


class Fsdp(Strategy):
    """`fully_shard` with the options of the job, applied after tensor parallelism."""

    def __init__(self, loop: Loop, group: Group, per_worker: int, tensor_parallel: int) -> None:
        """
        Args:
            per_worker: number of ranks of each worker.
            tensor_parallel: number of them that split a matrix.

        Raises:
            ConfigurationError: tensor_parallel does not divide the ranks of a worker.
        """
        super().__init__(loop, group)
        if group.device.type == "cpu":
            # Before the model is created, so that its full tensors return their memory, too, once they are split.
            return_large_blocks()
        self._options = loop.fsdp or tasks.FsdpSettings()
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
            reason = "there is no GPU" if group.device.type == "cpu" else "no more ranks than tensorParallel says"
            log.warning("setting=fsdp.cpuOffload ignored: %s", reason)
        self._mesh = group.mesh(sizes)
        self._comparison = GradientComparison(self._mesh.get_group("tensor"), group.device)

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        if self.group.device.type == "cpu" and weights < LARGE_BYTES:
            keep_freed_memory()
        # Tensor parallelism first: `fully_shard` then shards what is left of each matrix.
        if self._degree > 1:
            split_matrices(model, task.tensor_plan(model, self._degree), self._mesh["tensor"])
        # One data-parallel rank has nothing to shard.
        if self.dp_size == 1:
            model.to(self.group.device)
            return
        blocks = blocks_of(model, self._options.wrap_parameters)
        if self.loop.compile:
            # Each block alone: the hooks of `fully_shard` run between them and cannot be compiled into one graph.
            for block in blocks:
                block.compile()
        settings = settings_of(self.loop, self._options, self._mesh)
        if self._offloads:
            settings["offload_policy"] = CPUOffloadPolicy()
        shard_blocks(model, blocks, settings)
        if not self._offloads:
            # With offloading parameters stay on the CPU, and fully_shard has moved the buffers.
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
            self._comparison.check(forward.named_parameters())

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        # clip_grad_norm_ fails here: parameters are on meshes of several shapes, and some on none.
        gradients = [(parameter, to_local(parameter.grad)) for parameter in parameters if parameter.grad is not None]
        copies = [copies_of(parameter, self.group.world_size) for parameter, _ in gradients]
        return clip_parts([part for _, part in gradients], copies, max_norm, self.group.device)

    @property
    def _offloads(self) -> bool:
        return self._options.cpu_offload and self.group.device.type != "cpu" and self.dp_size > 1


def settings_of(loop: Loop, options: tasks.FsdpSettings, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the arguments of `fully_shard` for a job.

    Args:
        mesh: has the dimensions `replicate` and `shard`.
    """
    split = mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"]
    settings: dict[str, Any] = {"mesh": split, "reshard_after_forward": options.reshard_after_forward}
    if loop.precision == "bfloat16":
        # Weights are gathered in the precision of the computation; gradients are summed in float32.
        settings["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return settings


def prefetch(modules: Sequence[nn.Module], depth: int) -> None:
    """Prefetch the weights of more than one block. torch prefetches one by itself.

    Args:
        modules: blocks in the order in which they compute.
    """
    blocks: list[FSDPModule] = [block for block in modules if isinstance(block, FSDPModule)]
    for number, block in enumerate(blocks if depth > 1 else ()):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, number - depth) : number])))


def shard_blocks(model: nn.Module, blocks: Sequence[nn.Module], settings: Mapping[str, Any]) -> None:
    """Shard a model over ranks, block by block, and finally the parameters outside of the blocks.

    Args:
        settings: options of `fully_shard`.
    """
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def split_matrices(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, is_here: Callable[[nn.Module], bool] = lambda module: True
) -> None:
    """Split the matrices of a model over the ranks of a one-dimensional mesh, and the dropout between them alike.

    Args:
        is_here: returns whether this rank has a module at all.

    Raises:
        ConfigurationError: the plan does not fit this model.
    """
    check(plan, model, mesh.size())
    styles: dict[str, ParallelStyle] = {}
    for name, module, style in split_modules(plan, model):
        if not is_here(module):
            continue
        # Such a layer has full weights and part of the values: its gradients are partial sums.
        if style == REPLICATED:
            sum_gradients(module, mesh.get_group())
        elif isinstance(module, SampleDropout):
            module.part = (mesh.get_local_rank(), mesh.size())
        elif not isinstance(module, nn.Dropout):
            styles[name] = STYLES[style]()
    parallelize_module(model, mesh, styles)
