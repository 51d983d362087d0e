"""The trainer of a task that compares gradients every few steps, in which rank 1 flips a bit of them now and then.

python flipping.py STEPS BIT [NUMBER]: a bit of each NUMBER-th gradient that is compared, or of none.
"""

import os
import sys
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tandem_trainer import gradient_check
from tandem_trainer.__main__ import main
from tandem_trainer.gradient_check import GradientCheck

every, bit, *numbers = map(int, sys.argv[1:])
gradient_check.EVERY_STEPS = every
real, computations = GradientCheck._gradients, count(1)


def flipped(self: GradientCheck, step: int, batch: Any, ids: Tensor) -> list[Tensor]:
    gradients = real(self, step, batch, ids)
    if numbers and os.environ["RANK"] == "1" and next(computations) % numbers[0] == 0:
        gradients[-1].view(torch.int32).view(-1)[0] ^= 1 << bit
    return gradients


GradientCheck._gradients = flipped  # type: ignore[method-assign]
main()
