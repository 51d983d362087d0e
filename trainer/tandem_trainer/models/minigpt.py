"""A decoder-only transformer, small enough to read: RMS norms before each part, causal attention, and a gated MLP.

Root mean square layer normalization: https://arxiv.org/abs/1910.07467. Rotary positions: https://arxiv.org/abs/2104.09864.
The gated MLP (SwiGLU): https://arxiv.org/abs/2002.05202. Weights of the parts that write into the residual stream begin
smaller with the number of layers, as in GPT-2, so that its variance does not grow with them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem_trainer.models.parts import Part

SPREAD = 0.02
"""Standard deviation of fresh weights."""
BASE = 10_000.0
"""Of the wavelengths of rotary positions."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a model is."""

    vocabulary: int
    """Different tokens."""
    length: int
    """Tokens of the longest sequence."""
    layers: int
    """Blocks of attention and MLP."""
    heads: int
    """Of attention, in each layer."""
    width: int
    """Numbers for each token between layers. A multiple of twice the heads."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How a layer knows where a token is."""
    tied: bool = True
    """Whether the last layer has the weights of the first."""
    dropout: float = 0.0
    """Share of what each part writes that is dropped in training."""


class MiniGPT(nn.Module):
    """[N, tokens] token ids → [N, tokens, vocabulary] logits of the token that follows each."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape) -> None:
        """
        Raises:
            ValueError: the width does not divide into the heads.
        """
        super().__init__()
        if shape.width % (2 * shape.heads):
            raise ValueError(f"width {shape.width} is no multiple of twice the {shape.heads} heads")
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width) if shape.positions == "learned" else None
        self.dropout = nn.Dropout(shape.dropout)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(shape.width)
        # With weights of its own, or, tied, with those of the embedding: a second name for them would be saved twice.
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_begin)
        for block in blocks:
            for last in (block.attention.out, block.mlp.out):
                nn.init.normal_(last.weight, std=SPREAD / math.sqrt(2 * shape.layers))
        if shape.positions == "rotary":
            cosines, sines = rotations(shape.length, shape.width // shape.heads)
            self.register_buffer("cosines", cosines, persistent=False)
            self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token that follows each; at most `length` tokens."""
        x = self._embedded(tokens)
        for block in self.blocks:
            x = block(x, self._turns(x))
        return self._predicted(x)

    def parts(self) -> dict[str, nn.Module]:
        """The forward pass in parts, one after the other, by the names of their first modules."""
        entrance = [one for one in (self.embedding, self.places, self.dropout) if one is not None]
        blocks = {
            f"blocks.{number}": Part(partial(self._through, block), block) for number, block in enumerate(self.blocks)
        }
        # A tied head has the weights of the embedding, which a pipeline is to notice.
        exit_ = [self.norm, self.embedding if self.head is None else self.head]
        return {"embedding": Part(self._embedded, *entrance), **blocks, "norm": Part(self._predicted, *exit_)}

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.places is not None:
            x = x + self.places.weight[: tokens.shape[1]]
        embedded: Tensor = self.dropout(x)
        return embedded

    def _turns(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rotations of the tokens of [N, tokens, width]."""
        return None if self.places is not None else (self.cosines[: x.shape[1]], self.sines[: x.shape[1]])

    def _through(self, block: nn.Module, x: Tensor) -> Tensor:
        added: Tensor = block(x, self._turns(x))
        return added

    def _predicted(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.head is None:
            # The layers of a model may be on several devices, and this one is where the first is.
            weight = self.embedding.weight
            return F.linear(x.to(weight.device), weight)
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(shape.width), Attention(shape)
        self.before_mlp, self.mlp = nn.RMSNorm(shape.width), GatedMLP(shape)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """[N, tokens, width], with what this layer adds."""
        x = x + self.attention(self.before_attention(x), turns)
        added: Tensor = x + self.mlp(self.before_mlp(x))
        return added


class Attention(nn.Module):
    """Each token looks at itself and those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.width // shape.heads
        # Three matrices, not one for all: cut by rows, each part has whole heads.
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """[N, tokens, width] → the same shape."""
        query, key, value = (self._by_head(matrix(x)) for matrix in (self.query, self.key, self.value))
        if turns is not None:
            query, key = turned(query, *turns), turned(key, *turns)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        written: Tensor = self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return written

    def _by_head(self, x: Tensor) -> Tensor:
        """[N, tokens, width] → [N, heads, tokens, size]; under tensor parallelism of those heads that this rank has."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class GatedMLP(nn.Module):
    """Two thirds as wide inside as the usual four times, for it has three matrices in place of two."""

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
"""How tensor parallelism splits the matrices of a block: by heads, and by the numbers inside the MLP."""


def rotations(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles by which pairs of numbers of a head are turned: [length, size / 2] each."""
    wavelengths = BASE ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(length, dtype=torch.float32)[:, None] / wavelengths
    return angles.cos(), angles.sin()


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[N, heads, tokens, size], each pair of numbers turned by the angle of its token."""
    first, second = x.chunk(2, dim=-1)
    cosines, sines = cosines.to(x.dtype), sines.to(x.dtype)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=SPREAD)


def flops_per_token(model: MiniGPT) -> float:
    """Of a training step: six for each weight that a token meets, and twelve for each number of a token that attention
    compares (https://arxiv.org/abs/2204.02311, appendix B)."""
    shape = model.shape
    weights = sum(parameter.numel() for parameter in model.parameters())
    weights -= 0 if model.places is None else model.places.weight.numel()
    weights -= 0 if shape.tied else model.embedding.weight.numel()
    return 6.0 * weights + 12.0 * shape.layers * shape.width * shape.length
