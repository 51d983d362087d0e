"""A random order of any number of samples that is computed where it is needed, and never stored.

A Feistel network of six rounds permutes the numbers below 4^h; numbers that fall outside of the set are sent through it
again until they fall inside (cycle walking), which keeps it a permutation, and takes four times as long at worst.
("Ciphers with arbitrary finite domains", CT-RSA 2002, section 4.) So any part of the order of a trillion
samples costs as much as of a thousand: microseconds and no memory, where a list would take eight bytes for each.
"""

import torch
from torch import Tensor

from tandem_trainer.data.hashing import LOWER, hashed
from tandem_trainer.data.seed import mixed

ROUNDS = 6


class Permutation:
    """One random order of the numbers from 0 to size - 1.

    Args:
        size: how many there are; at most 2^62.
        seed: which order.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._half = max(1, -(-max(size - 1, 1).bit_length() // 2))
        self._keys = [mixed(seed, number) & LOWER for number in range(ROUNDS)]

    def at(self, start: int, end: int) -> Tensor:
        """What stands at the places from `start` to `end` (exclusive). [end - start], int64."""
        numbers = self._shuffled(torch.arange(start, end, dtype=torch.int64))
        while (outside := numbers >= self._size).any():
            numbers[outside] = self._shuffled(numbers[outside])
        return numbers

    def _shuffled(self, numbers: Tensor) -> Tensor:
        low = (1 << self._half) - 1
        left, right = numbers >> self._half, numbers & low
        for key in self._keys:
            left, right = right, left ^ (hashed(right ^ key) & low)
        return left << self._half | right
