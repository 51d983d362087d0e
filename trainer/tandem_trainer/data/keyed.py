"""Counter-based random numbers: seeds, hashes and permutations that are pure functions of their keys. The same keys
give the same numbers on any rank and after any restart. The data order and the dropout of every run depend on these
values, so they must never change.

`Permutation` is a Feistel network of six rounds that permutes the numbers below 4^h; numbers that fall outside of the
set are sent through it again until they fall inside (cycle walking), which keeps it a permutation, and takes four times
as long at worst ("Ciphers with arbitrary finite domains", CT-RSA 2002, section 4). So any part of the order of a
trillion samples costs as much as of a thousand: microseconds and no memory, where a list would take eight bytes for
each.

The hash of a number is multiply, xor-shift, multiply, with constants that were found by search
(https://nullprogram.com/blog/2018/07/31/). There are two forms of it, for two purposes. The order of the
samples needs any of the 32 bits, of a few numbers at a time: `hashed` mixes the lower ones as well. Dropout compares
the upper bits alone and draws for every unit of every sample: `hash_in_place` leaves two of the three shifts out, needs
numbers of half the width and less memory.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def mixed(*parts: int) -> int:
    """Derive a 63-bit seed from several numbers, so that neighbouring numbers give unrelated streams."""
    data = b"".join(part.to_bytes(8, "little") for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the random generators of torch for the CPU and a device.

    torch.manual_seed seeds every kind of device there could be, and takes a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed everything that user code may draw from: Python, numpy, and torch. Takes six microseconds on a CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    seed_torch(seed, device)


@contextlib.contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore the states of Python's, numpy's and torch's generators for the CPU afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


LOWER = 0xFFFF_FFFF
"""Mask of the lower 32 bits."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Odd factors; each spreads a number over the bits above."""


def hashed(numbers: Tensor) -> Tensor:
    """Compute a well mixed 32-bit number for each number below 2^32. Both int64."""
    numbers = (numbers ^ numbers >> 16) * FIRST & LOWER
    numbers = (numbers ^ numbers >> 15) * SECOND & LOWER
    return numbers ^ numbers >> 16


def hash_in_place(numbers: Tensor) -> Tensor:
    """Hash int32 numbers in place, and return them. Only the upper bits are well mixed."""
    numbers *= signed(FIRST)
    # A signed shift copies the sign bit; mask it to shift in zeros.
    numbers ^= (numbers >> 15).bitwise_and_(0x1_FFFF)
    numbers *= signed(SECOND)
    return numbers


def wrapped(numbers: Tensor) -> Tensor:
    """Compute the lower 32 bits of each number, minus 2^31: int64 to int32."""
    return (numbers & LOWER).sub_(2**31).to(torch.int32)


def signed(number: int) -> int:
    """Reinterpret an unsigned 32-bit number as a signed one."""
    return number - 2**32 if number >= 2**31 else number


ROUNDS = 6


class Permutation:
    """A random order of the numbers from 0 to size - 1.

    Args:
        size: number of elements; at most 2^62.
        seed: selects the order.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._half = max(1, -(-max(size - 1, 1).bit_length() // 2))
        self._keys = [mixed(seed, number) & LOWER for number in range(ROUNDS)]

    def values(self, start: int, end: int) -> Tensor:
        """Compute the elements at the positions from `start` to `end` (exclusive). [end - start], int64."""
        numbers = self._shuffled(torch.arange(start, end, dtype=torch.int64))
        while (outside := numbers >= self._size).any():
            numbers[outside] = self._shuffled(numbers[outside])
        return numbers

    def _shuffled(self, numbers: Tensor) -> Tensor:
        low = (1 << self._half) - 1
        high, low_bits = numbers >> self._half, numbers & low
        for key in self._keys:
            high, low_bits = low_bits, high ^ (hashed(low_bits ^ key) & low)
        return high << self._half | low_bits
