"""The checks of a pre-flight: what is computed and sent, and how it is known to be right."""

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tandem_trainer.preflight import PAIR_SECONDS

CPU_SIZE, GPU_SIZE = 512, 4096
"""Rows and columns of the matrices. Every sum of their products is a whole number below 2**24, which float32 holds
exactly, as do the tensor cores with its short form TF32."""
WINDOW_SECONDS = 0.25
"""Products are timed in windows that are longer than the period of a processor quota (0.1 s), so that a throttled
process is seen to be one."""
WINDOWS = 3
"""The best of so many counts: a hiccup of the machine is no slow node."""
TERMS = 2**20
"""Of the sum."""
BLOCK_BYTES = 4 * 2**20
"""Of what travels between two processes."""
TRIPS = 3
"""So many times there and back; the best counts."""
ALL_REDUCE_TERMS = 2**18


class Wrong(Exception):  # noqa: N818 - it says what happened
    """A result is not what it must be; the message goes on after "it"."""


def compute(device: torch.device) -> float:
    """Multiply two matrices again and again, and sum up a vector; returns the seconds of one product.

    Raises:
        Wrong: a result is not right.
        RuntimeError: the device cannot.
    """
    on_gpu = device.type == "cuda"
    size = GPU_SIZE if on_gpu else CPU_SIZE
    a, b = _whole_numbers(0, size, size), _whole_numbers(1, size, size)
    there = a.to(device), b.to(device)
    product = torch.empty(size, size, device=device)
    precisions = (False, True) if on_gpu else (False,)
    for tf32 in precisions:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.matmul(*there, out=product)
        _check_product(a, b, product.cpu())
    first = product.clone()
    best = float("inf")
    for _ in range(WINDOWS):
        _finish(device)
        began, count, seconds = time.perf_counter(), 0, 0.0
        while seconds < WINDOW_SECONDS:
            torch.matmul(*there, out=product)
            _finish(device)
            count += 1
            seconds = time.perf_counter() - began
        best = min(best, seconds / count)
        if not torch.equal(product, first):
            raise Wrong("computed another matrix product the second time than the first")
    terms = _whole_numbers(2, TERMS)
    total, expected = float(terms.to(device).sum()), int(terms.long().sum())
    if total != expected:
        raise Wrong(f"added up {TERMS} numbers to {total:.9g} instead of {expected}")
    return best


def exchange(store: Store, mine: int, other: int) -> float:
    """Exchange blocks with another replica; returns bytes a second. Both call it, with a store of their own.

    Raises:
        RuntimeError: it was not reached.
        Wrong: what came was not what it had sent.
    """
    first = mine < other
    pair: Any = ProcessGroupGloo(store, 0 if first else 1, 2, datetime.timedelta(seconds=PAIR_SECONDS))
    peer = 1 if first else 0
    own, expected = _block(mine), _block(other)
    received = torch.zeros_like(expected)
    best = torch.full((1,), float("inf"), dtype=torch.float64)
    for _ in range(TRIPS):
        began = time.perf_counter()
        if first:
            pair.send([own], peer, 0).wait()
        pair.recv([received], peer, 0).wait()
        if not first:
            pair.send([own], peer, 0).wait()
        best = torch.minimum(best, torch.tensor([time.perf_counter() - began], dtype=torch.float64))
        if not torch.equal(received, expected):
            raise Wrong("received other data than was sent")
    # Only the one that begins knows when a trip begins.
    if first:
        pair.send([best], peer, 1).wait()
    else:
        pair.recv([best], peer, 1).wait()
    return 2 * BLOCK_BYTES / float(best)


def add_up(rank: int, world_size: int, device: torch.device) -> bool:
    """Add up something over all ranks of the default group; whether the sum is right.

    Raises:
        RuntimeError: it did not come about.
    """
    terms = _whole_numbers(3, ALL_REDUCE_TERMS)
    factors = [one % 8 + 1 for one in range(world_size)]
    total = (terms * factors[rank]).to(device)
    dist.all_reduce(total)
    return torch.equal(total.cpu(), terms * sum(factors))


def _check_product(a: Tensor, b: Tensor, product: Tensor) -> None:
    """Compare by another way: in whole numbers, and for a few random sums of the columns (Freivalds 1977)."""
    weights = torch.randint(-1000, 1000, (len(b), 2), generator=torch.Generator().manual_seed(4))
    expected = a.long() @ (b.long() @ weights)
    found = product.long() @ weights
    if wrong := int((found != expected).any(dim=1).sum()):
        raise Wrong(f"computed a matrix product with {wrong} of {len(a)} rows wrong")


def _whole_numbers(seed: int, *shape: int) -> Tensor:
    """Float32 numbers from -2 to 2, the same everywhere."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _block(replica: int) -> Tensor:
    return torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(replica))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
