"""A decoder-only transformer, small enough to read: RMS norms before each part, causal attention, and a gated MLP.

Root mean square layer normalization: https://arxiv.org/abs/1910.07467. Rotary positions:
https://arxiv.org/abs/2104.09864. The gated MLP (SwiGLU): https://arxiv.org/abs/2002.05202. Weights of layers that write
into the residual stream start smaller with the number of layers, as in GPT-2, so that its variance does not grow with
them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem_trainer.models.parts import Part

INITIAL_DEVIATION = 0.02
"""Standard deviation of fresh weights."""
ROTARY_BASE = 10_000.0
"""Base of the wavelengths of rotary positions."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a model."""

    vocabulary: int
    """Number of different tokens."""
    length: int
    """Number of tokens in the longest sequence."""
    layers: int
    """Number of blocks of attention and MLP."""
    heads: int
    """Number of attention heads in each layer."""
    width: int
    """Size of a token's vector between layers; a multiple of twice the heads."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Encoding of positions."""
    tied: bool = True
    """Whether the last layer has the weights of the first."""
    dropout: float = 0.0
    """Probability of dropout on the output of each part."""


class MiniGPT(nn.Module):
    """[N, tokens] token ids → [N, tokens, vocabulary] logits of the token that follows each."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape) -> None:
        """
        Raises:
            ValueError: the width is not a multiple of twice the heads.
        """
        super().__init__()
        if shape.width % (2 * shape.heads):
            raise ValueError(f"width {shape.width} is not a multiple of twice the {shape.heads} heads")
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width) if shape.positions == "learned" else None
        self.dropout = nn.Dropout(shape.dropout)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(shape.width)
        # A tied head uses the embedding's weights directly: under a second name they would be saved twice.
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialize)
        for block in blocks:
            for last in (block.attention.out, block.mlp.out):
                nn.init.normal_(last.weight, std=INITIAL_DEVIATION / math.sqrt(2 * shape.layers))
        if shape.positions == "rotary":
            cosines, sines = rotations(shape.length, shape.width // shape.heads)
            self.register_buffer("cosines", cosines, persistent=False)
            self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens: Tensor, caches: "Sequence[KeyValueCache] | None" = None) -> Tensor:
        """Compute the logits of the token that follows each; at most `length` tokens.

        Args:
            caches: one for each block, with the tokens before these; `tokens` are added to them.
        """
        start = caches[0].length if caches else 0
        x = self._embedded(tokens, start)
        for number, block in enumerate(self.blocks):
            x = block(x, self._rotations(x, start), caches[number] if caches else None)
        return self._predicted(x)

    def caches(self) -> "list[KeyValueCache]":
        """Return empty caches for one text."""
        return [KeyValueCache() for _ in self.blocks]

    def parts(self) -> dict[str, nn.Module]:
        """Return the forward pass in parts, one after the other, by the names of their first modules."""
        entrance = [module for module in (self.embedding, self.places, self.dropout) if module is not None]
        blocks = {
            f"blocks.{number}": Part(partial(self._through, block), block) for number, block in enumerate(self.blocks)
        }
        # A tied head uses the weights of the embedding; a pipeline has to know that.
        exit_ = [self.norm, self.embedding if self.head is None else self.head]
        return {"embedding": Part(self._embedded, *entrance), **blocks, "norm": Part(self._predicted, *exit_)}

    def _embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.embedding(tokens)
        if self.places is not None:
            x = x + self.places.weight[start : start + tokens.shape[1]]
        embedded: Tensor = self.dropout(x)
        return embedded

    def _rotations(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor] | None:
        """Return the rotations of the tokens of [N, tokens, width], the first of which is at the position `start`."""
        positions = slice(start, start + x.shape[1])
        return None if self.places is not None else (self.cosines[positions], self.sines[positions])

    def _through(self, block: nn.Module, x: Tensor) -> Tensor:
        added: Tensor = block(x, self._rotations(x))
        return added

    def _predicted(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.head is None:
            # The layers of a model may be on several devices; this one is on that of the first.
            weight = self.embedding.weight
            return F.linear(x.to(weight.device), weight)
        logits: Tensor = self.head(x)
        return logits


class KeyValueCache:
    """Keys and values of one block for the tokens so far, for a text that is written token by token."""

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return 0 if self._key is None else self._key.shape[2]

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of further tokens, [N, heads, tokens, size]; returns those of all."""
        if self._key is not None and self._value is not None:
            key, value = torch.cat([self._key, key], dim=2), torch.cat([self._value, value], dim=2)
        self._key, self._value = key, value
        return key, value


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(shape.width), Attention(shape)
        self.before_mlp, self.mlp = nn.RMSNorm(shape.width), GatedMLP(shape)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None, cache: KeyValueCache | None = None) -> Tensor:
        """Add this layer's output to [N, tokens, width]."""
        x = x + self.attention(self.before_attention(x), turns, cache)
        added: Tensor = x + self.mlp(self.before_mlp(x))
        return added


class Attention(nn.Module):
    """Causal attention: each token attends to itself and the tokens before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.width // shape.heads
        # Three matrices instead of one: split by rows, each part has whole heads.
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None, cache: KeyValueCache | None = None) -> Tensor:
        """[N, tokens, width] → the same shape. With a cache that has tokens, one token at a time."""
        query, key, value = (self._by_head(matrix(x)) for matrix in (self.query, self.key, self.value))
        if turns is not None:
            query, key = rotate(query, *turns), rotate(key, *turns)
        is_causal = True
        if cache is not None:
            # A token after others may attend to all of them.
            is_causal = not cache.length
            key, value = cache.extended(key, value)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        written: Tensor = self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return written

    def _by_head(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → [N, heads, tokens, size]; under tensor parallelism only the heads of this rank."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class GatedMLP(nn.Module):
    """Gated MLP. It is two thirds as wide as the usual four times the width, because it has three matrices instead of
    two."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = -(-8 * shape.width // 3 // 8) * 8
        self.gate = nn.Linear(shape.width, inner, bias=False)
        self.up = nn.Linear(shape.width, inner, bias=False)
        self.out = nn.Linear(inner, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → the same shape."""
        written: Tensor = self.dropout(self.out(F.silu(self.gate(x)) * self.up(x)))
        return written


TENSOR_PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.out": "rowwise",
}
"""Tensor-parallel plan: attention is split by heads, the MLP by its inner units."""


def rotations(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the angles by which pairs of elements of a head are rotated: [length, size / 2]
    each."""
    wavelengths = ROTARY_BASE ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(length, dtype=torch.float32)[:, None] / wavelengths
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair of elements of [N, heads, tokens, size] by the angle of its token."""
    first, second = x.chunk(2, dim=-1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_DEVIATION)


def flops_per_token(model: MiniGPT) -> float:
    """Estimate the operations of a training step for each token: six for each weight that a token meets, and twelve for
    each element of a token that attention compares (https://arxiv.org/abs/2204.02311, appendix B)."""
    shape = model.shape
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= 0 if model.places is None else model.places.weight.numel()
    weights -= 0 if shape.tied else model.embedding.weight.numel()
    return 6.0 * weights + 12.0 * shape.layers * shape.width * shape.length
