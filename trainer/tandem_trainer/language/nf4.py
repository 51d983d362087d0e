"""Linear layers whose weights have four bits each and are frozen: NF4 of QLoRA (https://arxiv.org/abs/2305.14314).

A weight is the index of one of sixteen levels, and neighbours in a row share a scale, which is the largest absolute
value among them. Codes and scales of a row are one row of bytes. So a matrix is split over ranks by rows as others are,
is copied unchanged in any precision, and each rank holds the same numbers as one rank alone. The weights of a layer
exist in the type in which it computes only while it does (docs/decisions/0049-quantization.md).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen levels of NF4, from appendix E: about the same number of normally distributed weights is nearest to
each."""
BLOCK = 64
"""Maximum weights that share a scale."""
MIN_BLOCK = 16
"""Minimum weights that share a scale: fewer are not worth its four bytes."""
CHUNK_WEIGHTS = 2**22
"""Weights that are rounded at once; each needs about sixteen bytes of scratch memory."""


def block_of(columns: int) -> int | None:
    """Return the weights that share a scale in rows of some length: the largest part of a row, of at most 64, that a
    row can be cut into. None: such a matrix is not quantized."""
    size = next(size for size in range(min(BLOCK, columns), 0, -1) if columns % size == 0)
    return size if size >= MIN_BLOCK and columns % 2 == 0 else None


def width_of(columns: int) -> int:
    """Return the bytes of a row: two weights in each, followed by the scales."""
    block = block_of(columns)
    assert block is not None
    return columns // 2 + 4 * (columns // block)


def quantize(weight: Tensor) -> Tensor:
    """Pack weights: [rows, columns], floating point → [rows, bytes], uint8."""
    rows, columns = weight.shape
    packed = torch.empty(rows, width_of(columns), dtype=torch.uint8, device=weight.device)
    step = max(1, CHUNK_WEIGHTS // columns)
    for first in range(0, rows, step):
        packed[first : first + step] = _round(weight[first : first + step].detach().float())
    return packed


def _round(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    parts = weight.reshape(rows, -1, block_of(columns) or 1)
    scale = parts.abs().amax(dim=-1)
    # In a block of zeros every weight is the level 0.
    levels = torch.tensor(LEVELS, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(parts / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1), borders)
    pairs = codes.view(rows, columns // 2, 2).to(torch.uint8)
    return torch.cat([pairs[..., 0] * 16 + pairs[..., 1], scale.contiguous().view(torch.uint8)], dim=1)


def dequantize(packed: Tensor, pairs: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Unpack weights: [rows, bytes], uint8 → [rows, columns] of a dtype.

    Args:
        packed: codes and scales.
        pairs: [256, 2], float32: the two levels of each byte.
        columns: weights of a row.
        dtype: dtype of the result.
    """
    half = columns // 2
    levels = F.embedding(packed[:, :half].int(), pairs)
    # A copy, because a view of one row might begin at an odd address.
    scale = packed[:, half:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    values = levels.view(*scale.shape, -1) * scale.unsqueeze(-1)
    return values.view(len(packed), columns).to(dtype)


def level_pairs() -> Tensor:
    """Return the two levels of each byte. [256, 2], float32."""
    return torch.tensor([[first, second] for first in LEVELS for second in LEVELS])


class Nf4Linear(nn.Module):
    """A linear layer with packed weights, which are frozen. Gradients pass through it.

    In evaluation mode without gradients the unpacked weights stay in memory: a text is generated with many calls.
    """

    packed: nn.Parameter

    def __init__(self, layer: nn.Linear) -> None:
        """
        Args:
            layer: layer to replace. Its weights are not copied: `quantize` makes the packed ones.
        """
        super().__init__()
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        shape = (layer.out_features, width_of(layer.in_features))
        packed = torch.empty(shape, dtype=torch.uint8, device=layer.weight.device)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        # No buffer: DistributedDataParallel would broadcast it in each step.
        self._pairs = level_pairs()
        self._weight: Tensor | None = None

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Unpack the weights. [out_features, in_features]."""
        return dequantize(self.packed.detach(), self._level_table(), self.in_features, dtype)

    def to_linear(self) -> nn.Linear:
        """Return an ordinary layer with these weights, in their original dtype."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=False)
        layer.weight = nn.Parameter(self.weight(self.dtype), requires_grad=False)
        layer.bias = self.bias
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        """[…, in_features] → […, out_features]."""
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        if self.training or torch.is_grad_enabled():
            self._weight = None
            output: Tensor = _Matmul.apply(inputs, self.packed, self._level_table(), self.in_features)
        else:
            if self._weight is None or self._weight.dtype != inputs.dtype:
                self._weight = self.weight(inputs.dtype)
            output = F.linear(inputs, self._weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _level_table(self) -> Tensor:
        if self._pairs.device != self.packed.device:
            self._pairs = self._pairs.to(self.packed.device)
        return self._pairs


class _Matmul(torch.autograd.Function):
    """Product of inputs and weights, which are unpacked for the forward and once more for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, pairs: Tensor, columns: int) -> Tensor:
        """[…, columns] → […, rows]."""
        ctx.save_for_backward(packed, pairs)
        ctx.columns = columns
        return F.linear(inputs, dequantize(packed, pairs, columns, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Compute the gradient of the inputs."""
        (outer,) = gradients
        packed, pairs = ctx.saved_tensors
        return outer @ dequantize(packed, pairs, ctx.columns, outer.dtype), None, None, None
