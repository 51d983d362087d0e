"""One process of a pre-flight: runs the checks in order and reports their results."""

import datetime
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from tandem_trainer.preflight import (
    ARRIVE_SECONDS,
    GIVE_UP,
    PAIR_SECONDS,
    PAIRS_SECONDS,
    READY_SECONDS,
    SUM_SECONDS,
    ProcessPlace,
    opponents,
)

CPU_SIZE, GPU_SIZE = 512, 4096
"""Rows and columns of the matrices. Every sum of their products is a whole number below 2**24, which float32 holds
exactly, as do the tensor cores with its short form TF32."""
WINDOW_SECONDS = 0.25
"""Products are timed in windows that are longer than the period of a processor quota (0.1 s), so that a throttled
process is seen to be one."""
WINDOWS = 3
"""The best of this many measurements counts: a short disturbance does not make a node slow."""
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


Say = Callable[..., None]
ANSWER_SECONDS = 10.0
"""For the store to answer."""
LOOK_SECONDS = 0.2
"""How often it is asked whether a pair was broken anywhere."""


def check(place: ProcessPlace, say: Say) -> None:
    """Do all checks that can be done."""
    device = torch.device("cpu")
    say(at="matrix product")
    try:
        if torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        say(productSeconds=compute(device))
    except Wrong as wrong:
        say(wrong=str(wrong))
        return
    except RuntimeError as error:
        say(wrong=f"could not compute a matrix product: {_line(error)}")
        return
    if place.world_size == 1:
        return
    say(at="way to the store")
    try:
        patience = timedelta(seconds=ANSWER_SECONDS)
        whole = TCPStore(place.address, place.port, is_master=False, wait_for_workers=False, timeout=patience)
        store = PrefixStore(place.prefix, whole)
        if place.local_rank == 0 and place.replicas > 1:
            say(at="pairs")
            _Pairs(place, store, say).exchange()
        say(at="sum over all ranks")
        if _all_were_reached(place, store):
            say(allReduce=_add_up(place, store, device))
    except RuntimeError as error:
        # The store is gone: its owner has left, or closes the generation.
        say(allReduce="failed", why=_line(error))


class _Pairs:
    def __init__(self, place: ProcessPlace, store: Store, say: Say) -> None:
        self._mine, self._store, self._say = place.replica, store, say
        self._opponents = opponents(place.replica, place.replicas)
        self._replicas = place.replicas
        self._deadline = time.monotonic() + PAIRS_SECONDS

    def exchange(self) -> None:
        """Exchange blocks with each opponent, and say what came of it."""
        self._store.set(f"arrived/{self._mine}", "")
        arrived = time.monotonic() + ARRIVE_SECONDS
        absent = [
            other for other in self._opponents if other is not None and not self._has(f"arrived/{other}", arrived)
        ]
        broken = 0
        for number, other in enumerate(self._opponents):
            if other is None:
                continue
            if other in absent:
                self._say(pair=other, bytesPerSecond=None)
                continue
            goes_on = broken < GIVE_UP and time.monotonic() < self._deadline
            self._store.set(f"ready/{number}/{self._mine}", str(int(goes_on)))
            if not goes_on or not self._is_ready(number, other):
                continue
            found = self._try(number, other)
            broken += found is None
            self._say(pair=other, bytesPerSecond=found)
        if broken or absent:
            self._store.set("broken", "")
        if self._store.add("paired", 1) == self._replicas:
            self._store.set("all-paired", "")

    def _try(self, number: int, other: int) -> float | None:
        try:
            return exchange(PrefixStore(f"pair/{number}/{min(self._mine, other)}", self._store), self._mine, other)
        except (RuntimeError, Wrong) as error:
            print(f"pair {self._mine} and {other}: {_line(error)}", file=sys.stderr, flush=True)
            return None

    def _is_ready(self, number: int, other: int) -> bool:
        key = f"ready/{number}/{other}"
        until = min(self._deadline, time.monotonic() + READY_SECONDS)
        return self._has(key, until) and self._store.get(key) == b"1"

    def _has(self, key: str, until: float) -> bool:
        return _appears(self._store, key, max(0.01, until - time.monotonic()))


def _all_were_reached(place: ProcessPlace, store: Store) -> bool:
    """Wait for the pairs of all others; False once one was broken: the sum would wait for it in vain."""
    if place.replicas == 1:
        return True
    until = time.monotonic() + ARRIVE_SECONDS + PAIRS_SECONDS
    while time.monotonic() < until:
        if store.check(["broken"]):
            return False
        if _appears(store, "all-paired", LOOK_SECONDS):
            return not store.check(["broken"])
    return False


def _add_up(place: ProcessPlace, store: Store, device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    # A sum that does not come about is to be told of, and not to end the process.
    os.environ.update({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"})
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("sum", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=SUM_SECONDS),
            device_id=device if on_gpu else None,
        )
        return "right" if add_up(place.rank, place.world_size, device) else "wrong"
    except RuntimeError as error:
        print(f"sum over all ranks: {_line(error)}", file=sys.stderr, flush=True)
        return "failed"


def _appears(store: Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except DistStoreError:
        return False
    return True


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
