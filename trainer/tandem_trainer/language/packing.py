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
