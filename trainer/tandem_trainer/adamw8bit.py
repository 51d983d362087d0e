"""AdamW with moments of 8 bits (https://arxiv.org/abs/2110.02861), of the package torchao.

A moment is kept as codes, one byte a number, and a scale for each block of numbers. torchao cuts the numbers that a
rank holds into blocks of 256. Here a block is a part of one row of the whole tensor, so the blocks of a tensor are the
same however its rows are spread over ranks. A checkpoint holds codes and scales as they are, under names such as
`<parameter>/exp_avg.codes`, and is resumed exactly on any number of ranks (docs/decisions/0051-quantization.md).

Small tensors, vectors and matrices with short rows have moments in full precision.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as Torchao8bit
from torchao.optim.subclass_8bit import OptimState8bit

from tandem_trainer.checkpoint.sharding import here, is_sharded
from tandem_trainer.checkpoint.state import BY_ROW

BLOCK = 256
"""Numbers that share a scale, at the most."""
LEAST_BLOCK = 32
"""Fewer are not worth a scale of four bytes."""
LEAST_NUMBERS = 4096
"""A smaller tensor is not worth it, as bitsandbytes and torchao have it."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether they can be negative."""
CODES, SCALE = ".codes", BY_ROW
"""Ends of the names under which the parts of a moment are kept."""


class AdamW8bit(Torchao8bit):
    """torchao's, with blocks that do not depend on the number of ranks.

    Its step is compiled for GPUs. On other devices it runs as it is: no compiler is needed there.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Returns what the closure does."""
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):
                # A number would be compiled in. A schedule sets one for each step.
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = fresh(parameter)
        on_gpu = any(one.is_cuda for group in self.param_groups for one in group["params"])
        with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
            return super().step(closure)

    def parts(self, parameter: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter as a checkpoint holds it: plain tensors, which alias the live ones."""
        found = dict(entries)
        if block_of(parameter.shape) is None:
            return found
        for key in SIGNED.keys() & found.keys():
            codes, scale = _parts(here(found.pop(key)), parameter.shape)
            found |= {f"{key}{CODES}": _spread(codes, parameter), f"{key}{SCALE}": _spread(scale, parameter)}
        return found

    def whole(self, parameter: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, of what a checkpoint holds of it. Moments in full precision are rounded."""
        found = dict(entries)
        block = block_of(parameter.shape)
        if block is None:
            return found
        for key, signed in SIGNED.items():
            if f"{key}{CODES}" in found:
                codes, scale = here(found.pop(f"{key}{CODES}")), here(found.pop(f"{key}{SCALE}"))
                if codes.numel():
                    table = _zeros((1, block), signed, block, parameter).qmap
                    found[key] = OptimState8bit(codes, scale.reshape(-1), table, signed, dtype=parameter.dtype)
                else:
                    found[key] = codes.to(parameter.dtype)
                found[key] = _like(found[key], parameter)
            elif isinstance(found.get(key), Tensor):
                given = here(found[key])
                found[key] = _moment(parameter, signed)
                here(found[key]).copy_(given)
        return found


def block_of(shape: Sequence[int]) -> int | None:
    """Numbers that share a scale in a tensor of some shape: the largest part of a row, of at most 256, that a row can
    be cut into. None: its moments are not rounded."""
    row = math.prod(shape[1:])
    if len(shape) < 2 or shape[0] * row < LEAST_NUMBERS:
        return None
    block = next(size for size in range(min(BLOCK, row), 0, -1) if row % size == 0)
    return block if block >= LEAST_BLOCK else None


def fresh(parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before the first step."""
    return {"step": torch.tensor(0.0), **{key: _moment(parameter, signed) for key, signed in SIGNED.items()}}


def _moment(parameter: Tensor, signed: bool) -> Tensor:
    local, block = here(parameter), block_of(parameter.shape)
    if block is None or not local.numel():
        return _like(torch.zeros_like(local), parameter)
    return _like(_zeros(local.shape, signed, block, parameter), parameter)


def _zeros(shape: Sequence[int], signed: bool, block: int, parameter: Tensor) -> OptimState8bit:
    return OptimState8bit.zeros(tuple(shape), signed, block, parameter.device, dtype=parameter.dtype)


def _parts(moment: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Codes, [rows, …], and scales, [rows, blocks], of what a rank holds of a moment.

    Args:
        shape: of the whole parameter.
    """
    block = block_of(shape)
    assert block is not None
    blocks = math.prod(shape[1:]) // block
    if not isinstance(moment, OptimState8bit):
        # A rank that holds no row.
        return moment.new_empty(moment.shape, dtype=torch.uint8), moment.new_empty((0, blocks), dtype=torch.float32)
    return moment.codes, moment.scale.view(-1, blocks)


def _spread(local: Tensor, parameter: Tensor) -> Tensor:
    """What a rank holds, as a part of a tensor whose rows are spread as those of a parameter are."""
    if not is_sharded(parameter):
        return local
    shape = (parameter.shape[0], *local.shape[1:])
    return _of_mesh(local, parameter, shape)


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    """What a rank holds, as a part of a tensor of the shape of a parameter."""
    return _of_mesh(local, parameter, tuple(parameter.shape)) if is_sharded(parameter) else local


def _of_mesh(local: Tensor, parameter: Tensor, shape: Sequence[int]) -> Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    stride = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
