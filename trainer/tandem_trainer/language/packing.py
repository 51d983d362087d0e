"""Packing: documents of different lengths in rows of one length, without any of them seeing another.

Documents are put into rows by best fit, the longest first: each goes into the row whose free space it fills best. The
result depends on their lengths alone, so it is the same in every process, and is made once for a data set. A row is
then one sample for the exact order of data (docs/decisions/0041-packing.md).

Within a row positions begin anew with each document, and attention is causal and stays within a document. So the logits
are those of the documents alone.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


def packed(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Put documents into rows by best-fit decreasing.

    Args:
        lengths: of the documents, in tokens, each from 1 to `most`.
        most: tokens of a row.

    Returns:
        For each row the numbers of its documents.
    """
    rows: list[list[int]] = []
    with_space: dict[int, deque[int]] = {}
    spaces: list[int] = []  # those of `with_space`, sorted
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        need = lengths[number]
        place = bisect_left(spaces, need)
        if place == len(spaces):
            row, space = len(rows), most
            rows.append([])
        else:
            space = spaces[place]
            row = with_space[space].popleft()
            if not with_space[space]:
                del with_space[space], spaces[place]
        rows[row].append(number)
        left = space - need
        if left:
            if left not in with_space:
                with_space[left] = deque()
                insort(spaces, left)
            with_space[left].append(row)
    return rows


def positions(documents: Tensor) -> Tensor:
    """Place of each token in its document, from 0.

    Args:
        documents: [rows, tokens], the number of each token's document; those of a document stand together.

    Returns:
        [rows, tokens], int64.
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def mask(documents: Tensor) -> Tensor:
    """Which tokens each token sees: itself, and those before it of its document.

    Args:
        documents: [rows, tokens], as of `positions`.

    Returns:
        [rows, 1, tokens, tokens], bool.
    """
    size = documents.shape[1]
    before = torch.ones(size, size, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & before)[:, None]


def mask_at(places: Tensor) -> Tensor:
    """The same of the places of tokens in their documents, as `positions` returns them."""
    return mask((places == 0).cumsum(dim=1))


class Layout(Protocol):
    """How the tokens of a batch are given to a model."""

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """What the model is called with.

        Args:
            tokens: [rows, tokens], int64.
        """
        ...

    def laid(self, values: Tensor) -> Tensor:
        """Values of the tokens, [rows, tokens], as the model is given these."""
        ...

    def rows(self, values: Tensor) -> Tensor:
        """The reverse: [rows, tokens], 0 in place of what was not given."""
        ...


@dataclass(frozen=True)
class Padded:
    """Rows as they are."""

    documents: Tensor | None = None
    """As of `positions`; None: a row is one document, and what follows it is padding."""
    with_mask: bool = True

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """As Layout."""
        # Padding follows the text, and a token sees only those before it: a single document needs no mask.
        found = {"input_ids": tokens, "use_cache": False}
        if self.documents is not None:
            found["position_ids"] = positions(self.documents)
            if self.with_mask:
                found["attention_mask"] = mask(self.documents)
        return found

    def laid(self, values: Tensor) -> Tensor:
        """As Layout."""
        return values

    def rows(self, values: Tensor) -> Tensor:
        """As Layout."""
        return values


class Unpadded:
    """The documents of all rows in one row, without padding, for a model that stays within them
    (tandem_trainer.language.attention)."""

    def __init__(self, documents: Tensor) -> None:
        """
        Args:
            documents: as of `positions`; 0 is padding.
        """
        self._shape = documents.shape
        self._there = documents.flatten().nonzero().squeeze(1)
        self._places = self.laid(positions(documents))

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """As Layout, with the lengths of the documents in the place of a mask."""
        begins = (self._places[0] == 0).nonzero().squeeze(1)
        lengths = torch.cat([begins, begins.new_tensor([len(self._there)])]).diff()
        return {
            "input_ids": self.laid(tokens),
            "position_ids": self._places,
            "attention_mask": lengths[None, None, None],
            "use_cache": False,
        }

    def laid(self, values: Tensor) -> Tensor:
        """As Layout: [1, tokens]."""
        return values.flatten().index_select(0, self._there)[None]

    def rows(self, values: Tensor) -> Tensor:
        """As Layout."""
        found = values.new_zeros(self._shape.numel())
        return found.index_copy(0, self._there, values[0]).view(self._shape)
