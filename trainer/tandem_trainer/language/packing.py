"""Packing: documents of different lengths in rows of one length, without attention between them.

Documents are packed into rows by best fit, the longest first: each goes into the row whose free space it fills best.
The result depends on the lengths only, so it is the same in every process, and is computed once for a data set. A row
is then one sample for the exact order of data (docs/decisions/0041-packing.md).

Within a row positions restart with each document, and attention is causal and stays within a document. So the logits
are those of the documents alone.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


def pack_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack documents into rows by best-fit decreasing.

    Args:
        lengths: lengths of the documents, in tokens, each from 1 to `row_length`.
        row_length: tokens of a row.

    Returns:
        The numbers of the documents of each row.
    """
    rows: list[list[int]] = []
    with_space: dict[int, deque[int]] = {}
    spaces: list[int] = []  # those of `with_space`, sorted
    for number in sorted(range(len(lengths)), key=lambda document: (-lengths[document], document)):
        need = lengths[number]
        index = bisect_left(spaces, need)
        if index == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[index]
            row = with_space[space].popleft()
            if not with_space[space]:
                del with_space[space], spaces[index]
        rows[row].append(number)
        remaining = space - need
        if remaining:
            if remaining not in with_space:
                with_space[remaining] = deque()
                insort(spaces, remaining)
            with_space[remaining].append(row)
    return rows


def positions(documents: Tensor) -> Tensor:
    """Compute the position of each token in its document, from 0.

    Args:
        documents: [rows, tokens], the number of each token's document; those of a document stand together.

    Returns:
        [rows, tokens], int64.
    """
    indices = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return indices - torch.where(is_start, indices, 0).cummax(dim=1).values


def mask(documents: Tensor) -> Tensor:
    """Compute the attention mask: each token attends to itself, and to those before it in its document.

    Args:
        documents: [rows, tokens], as in `positions`.

    Returns:
        [rows, 1, tokens, tokens], bool.
    """
    size = documents.shape[1]
    before = torch.ones(size, size, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & before)[:, None]


def mask_from_positions(token_positions: Tensor) -> Tensor:
    """Compute the attention mask from the positions of tokens in their documents, as `positions` returns them."""
    return mask((token_positions == 0).cumsum(dim=1))


class BatchLayout(Protocol):
    """Layout of a batch's tokens as the model gets them."""

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments of the model.

        Args:
            tokens: [rows, tokens], int64.
        """
        ...

    def arrange(self, values: Tensor) -> Tensor:
        """Arrange values of the tokens, [rows, tokens], in the layout."""
        ...

    def restore(self, values: Tensor) -> Tensor:
        """Restore values from the layout: [rows, tokens], 0 for tokens that are not in it."""
        ...


@dataclass(frozen=True)
class Padded:
    """Layout of unchanged rows."""

    documents: Tensor | None = None
    """Documents as in `positions`; None: a row is one document, followed by padding."""
    with_mask: bool = True

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """See BatchLayout."""
        # Padding follows the text, and a token attends only to those before it: a single document needs no mask.
        arguments = {"input_ids": tokens, "use_cache": False}
        if self.documents is not None:
            arguments["position_ids"] = positions(self.documents)
            if self.with_mask:
                arguments["attention_mask"] = mask(self.documents)
        return arguments

    def arrange(self, values: Tensor) -> Tensor:
        """See BatchLayout."""
        return values

    def restore(self, values: Tensor) -> Tensor:
        """See BatchLayout."""
        return values


class Unpadded:
    """Layout of the documents of all rows in one row, without padding, for a model that stays within them
    (tandem_trainer.language.attention)."""

    def __init__(self, documents: Tensor) -> None:
        """
        Args:
            documents: as in `positions`; 0 is padding.
        """
        self._shape = documents.shape
        self._token_indices = documents.flatten().nonzero().squeeze(1)
        self._positions = self.arrange(positions(documents))

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """See BatchLayout. The lengths of the documents replace the mask."""
        starts = (self._positions[0] == 0).nonzero().squeeze(1)
        lengths = torch.cat([starts, starts.new_tensor([len(self._token_indices)])]).diff()
        return {
            "input_ids": self.arrange(tokens),
            "position_ids": self._positions,
            "attention_mask": lengths[None, None, None],
            "use_cache": False,
        }

    def arrange(self, values: Tensor) -> Tensor:
        """See BatchLayout. [1, tokens]."""
        return values.flatten().index_select(0, self._token_indices)[None]

    def restore(self, values: Tensor) -> Tensor:
        """See BatchLayout."""
        restored = values.new_zeros(self._shape.numel())
        return restored.index_copy(0, self._token_indices, values[0]).view(self._shape)
