"""AdamW with moments of 8 bits (https://arxiv.org/abs/2110.02861).

A moment is stored as codes, one byte a number, and a scale for each block of numbers. A block is a part of one row of
the whole tensor, so the blocks of a tensor are the same however its rows are spread over ranks. Codes and scales are
plain tensors of the optimizer's state, `exp_avg.codes` and `exp_avg.scale`: a checkpoint holds them as they are, and is
resumed exactly on any number of ranks (docs/decisions/0049-quantization.md).

Small tensors, vectors and matrices with short rows have moments in full precision.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem_trainer.checkpoint.sharding import is_sharded, to_local
from tandem_trainer.checkpoint.state import BY_ROW

BLOCK = 256
"""Maximum numbers that share a scale."""
MIN_BLOCK = 32
"""Minimum numbers that share a scale: fewer are not worth its four bytes."""
MIN_TENSOR_SIZE = 4096
"""Minimum size of a tensor whose moments are rounded, as in bitsandbytes and torchao."""
DECADES = 7
"""Powers of ten that the levels span."""
MIN_SCALE = 1e-12
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether they can be negative."""
CODES, SCALE = ".codes", BY_ROW
"""Suffixes of the names of a moment's parts."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are rounded after each step. The step itself uses them unrounded."""

    has_scales = True
    """Whether its state has tensors with a row for each row of their parameter."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self._tables: dict[tuple[bool, torch.device], tuple[Tensor, Tensor]] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Returns the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        assert parameter.grad is not None
        weights, gradient = to_local(parameter), to_local(parameter.grad).float()
        (beta1, beta2), rate = group["betas"], group["lr"]
        first, second = (self._moment(parameter, key) for key in SIGNED)
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient.square(), 1 - beta2)
        self._store(parameter, "exp_avg", first)
        self._store(parameter, "exp_avg_sq", second)
        size = second.sqrt() / (1 - beta2 ** state["step"]).sqrt() + group["eps"]
        change = first / (1 - beta1 ** state["step"]) / size
        weights.copy_(weights.float() * (1 - rate * group["weight_decay"]) - rate * change)

    def _moment(self, parameter: Tensor, key: str) -> Tensor:
        """Return this rank's part of a moment, in memory of its own. float32."""
        state, local = self.state[parameter], to_local(parameter)
        if f"{key}{CODES}" in state:
            codes, scale = to_local(state[f"{key}{CODES}"]), to_local(state[f"{key}{SCALE}"])
            if not codes.numel():
                return codes.float()
            table, _ = self._table(SIGNED[key], local.device)
            return (table[codes.int()].view(*scale.shape, -1) * scale.unsqueeze(-1)).view(codes.shape)
        # A checkpoint of adamw has unrounded moments; they are rounded from here on.
        if key in state:
            return to_local(state[key]).float().clone()
        return torch.zeros_like(local, dtype=torch.float32)

    def _store(self, parameter: Tensor, key: str, moment: Tensor) -> None:
        state, block = self.state[parameter], block_of(parameter.shape)
        if block is None:
            stored = {key: moment.clone()}
        else:
            state.pop(key, None)
            rows = len(moment)
            blocks = math.prod(parameter.shape[1:]) // block
            parts = moment.view(rows, blocks, block)
            scale = parts.abs().amax(dim=-1).clamp(min=MIN_SCALE)
            _, borders = self._table(SIGNED[key], moment.device)
            codes = torch.bucketize(parts / scale.unsqueeze(-1), borders, out_int32=True).to(torch.uint8)
            stored = {f"{key}{CODES}": codes.view(moment.shape), f"{key}{SCALE}": scale}
        for name, tensor in stored.items():
            if name in state:
                to_local(state[name]).copy_(tensor)
            else:
                state[name] = _like_parameter(tensor, parameter)

    def _table(self, signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the level of each code, and the borders between them."""
        if (tables := self._tables.get((signed, device))) is None:
            table = torch.tensor(levels(signed), dtype=torch.float32, device=device)
            tables = self._tables[signed, device] = table, (table[1:] + table[:-1]) / 2
        return tables


def levels(signed: bool) -> list[float]:
    """Compute the 256 levels of dynamic quantization, from −1 or 0 to 1. Each power of ten has twice the levels of the
    one below, so that small numbers have about the relative error of large ones."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        width = 0.9 / count
        # Middles of equal parts between a tenth and the whole.
        middles = [(0.1 + width * (part + 0.5)) * 10.0 ** (decade - DECADES + 1) for part in range(count)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return sorted(values)


def block_of(shape: Sequence[int]) -> int | None:
    """Return the numbers that share a scale in a tensor of some shape: the largest part of a row, of at most 256, that
    a row can be cut into. None: its moments are not rounded."""
    row = math.prod(shape[1:])
    if len(shape) < 2 or shape[0] * row < MIN_TENSOR_SIZE:
        return None
    block = next(size for size in range(min(BLOCK, row), 0, -1) if row % size == 0)
    return block if block >= MIN_BLOCK else None


def _like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Wrap a local tensor as a part of a tensor that is sharded by rows like a parameter."""
    if not is_sharded(parameter):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
