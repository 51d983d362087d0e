"""A 32-bit hash of each number of a tensor: multiply, xor-shift, multiply, with constants that were found by search
(https://nullprogram.com/blog/2018/07/31/).

There are two forms of it, because two things are wanted. The order of the samples needs any of the 32 bits, of a few
numbers at a time: `hashed` mixes the lower ones as well. Dropout compares the upper bits alone and draws for every unit
of every sample: `hash_in_place` leaves two of the three shifts out, needs numbers of half the width and less memory.
The data order and the dropout of every run follow from these values, so they must never change.
"""

import torch
from torch import Tensor

LOWER = 0xFFFF_FFFF
"""The lower 32 bits of a number."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Odd factors; each spreads what it multiplies over the bits above."""


def hashed(numbers: Tensor) -> Tensor:
    """A well mixed 32-bit number for each number below 2^32. Both int64."""
    numbers = (numbers ^ numbers >> 16) * FIRST & LOWER
    numbers = (numbers ^ numbers >> 15) * SECOND & LOWER
    return numbers ^ numbers >> 16


def hash_in_place(numbers: Tensor) -> Tensor:
    """A number for each, int32, whose upper bits are well mixed; changes what it is given and returns it."""
    numbers *= signed(FIRST)
    # A signed shift copies the sign; what is wanted are zeros.
    numbers ^= (numbers >> 15).bitwise_and_(0x1_FFFF)
    numbers *= signed(SECOND)
    return numbers


def wrapped(numbers: Tensor) -> Tensor:
    """The lower 32 bits of each number, less 2^31: int64 to int32."""
    return (numbers & LOWER).sub_(2**31).to(torch.int32)


def signed(number: int) -> int:
    """The signed number of 32 bits that has the bits of an unsigned one."""
    return number - 2**32 if number >= 2**31 else number
