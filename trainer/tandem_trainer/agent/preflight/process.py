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

from tandem_trainer.agent.preflight import (
    ARRIVAL_SECONDS,
    MAX_FAILED_PAIRS,
    PAIR_SECONDS,
    PAIRS_SECONDS,
    READY_SECONDS,
    SUM_SECONDS,
    ProcessPlace,
    opponents,
)

CPU_SIZE, GPU_SIZE = 512, 4096
"""Rows and columns of the matrices. Every sum of their products is an integer below 2**24, which is exact in float32,
and on tensor cores with TF32."""
WINDOW_SECONDS = 0.25
"""Length of the windows in which products are timed, in seconds: more than the period of a CPU quota (0.1 s), so that
throttling shows."""
WINDOWS = 3
"""Number of measurements, of which the best counts: a short disturbance does not make a node slow."""
TERMS = 2**20
"""Number of terms of the local sum."""
BLOCK_BYTES = 4 * 2**20
"""Size of a block that two processes exchange, in bytes."""
TRIPS = 3
"""Number of round trips, of which the best counts."""
ALL_REDUCE_TERMS = 2**18


class WrongResult(Exception):  # noqa: N818 - it says what happened
    """A result is wrong; the message continues a sentence that begins with "it"."""


def compute(device: torch.device) -> float:
    """Multiply two matrices repeatedly, and sum a vector; returns the seconds of one product.

    Raises:
        WrongResult: a result is wrong.
        RuntimeError: the device fails.
    """
    on_gpu = device.type == "cuda"
    size = GPU_SIZE if on_gpu else CPU_SIZE
    a, b = _whole_numbers(0, size, size), _whole_numbers(1, size, size)
    operands = a.to(device), b.to(device)
    product = torch.empty(size, size, device=device)
    precisions = (False, True) if on_gpu else (False,)
    for tf32 in precisions:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.matmul(*operands, out=product)
        _check_product(a, b, product.cpu())
    first = product.clone()
    best = float("inf")
    for _ in range(WINDOWS):
        _finish(device)
        started, count, seconds = time.perf_counter(), 0, 0.0
        while seconds < WINDOW_SECONDS:
            torch.matmul(*operands, out=product)
            _finish(device)
            count += 1
            seconds = time.perf_counter() - started
        best = min(best, seconds / count)
        if not torch.equal(product, first):
            raise WrongResult("computed another matrix product the second time than the first")
    terms = _whole_numbers(2, TERMS)
    total, expected = float(terms.to(device).sum()), int(terms.long().sum())
    if total != expected:
        raise WrongResult(f"added up {TERMS} numbers to {total:.9g} instead of {expected}")
    return best


def exchange(store: Store, own_replica: int, other: int) -> float:
    """Exchange blocks with another replica; returns bytes per second. Both call it, each with its own store client.

    Raises:
        RuntimeError: the other replica could not be reached.
        WrongResult: the received data differ from what was sent.
    """
    first = own_replica < other
    pair: Any = ProcessGroupGloo(store, 0 if first else 1, 2, datetime.timedelta(seconds=PAIR_SECONDS))
    peer = 1 if first else 0
    own, expected = _block(own_replica), _block(other)
    received = torch.zeros_like(expected)
    best = torch.full((1,), float("inf"), dtype=torch.float64)
    for _ in range(TRIPS):
        started = time.perf_counter()
        if first:
            pair.send([own], peer, 0).wait()
        pair.recv([received], peer, 0).wait()
        if not first:
            pair.send([own], peer, 0).wait()
        best = torch.minimum(best, torch.tensor([time.perf_counter() - started], dtype=torch.float64))
        if not torch.equal(received, expected):
            raise WrongResult("received other data than was sent")
    # Only the process that sends first measures whole round trips.
    if first:
        pair.send([best], peer, 1).wait()
    else:
        pair.recv([best], peer, 1).wait()
    return 2 * BLOCK_BYTES / float(best)


def sum_over_ranks(rank: int, world_size: int, device: torch.device) -> bool:
    """Sum known values over all ranks of the default group; returns whether the sum is right.

    Raises:
        RuntimeError: the collective failed.
    """
    terms = _whole_numbers(3, ALL_REDUCE_TERMS)
    factors = [index % 8 + 1 for index in range(world_size)]
    total = (terms * factors[rank]).to(device)
    dist.all_reduce(total)
    return torch.equal(total.cpu(), terms * sum(factors))


def _check_product(a: Tensor, b: Tensor, product: Tensor) -> None:
    """Check a product in another way: with integers, and for a few random sums of the columns (Freivalds 1977)."""
    weights = torch.randint(-1000, 1000, (len(b), 2), generator=torch.Generator().manual_seed(4))
    expected = a.long() @ (b.long() @ weights)
    actual = product.long() @ weights
    if wrong := int((actual != expected).any(dim=1).sum()):
        raise WrongResult(f"computed a matrix product with {wrong} of {len(a)} rows wrong")


def _whole_numbers(seed: int, *shape: int) -> Tensor:
    """Return float32 integers from -2 to 2, the same on every machine."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _block(replica: int) -> Tensor:
    return torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(replica))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Report = Callable[..., None]
ANSWER_SECONDS = 10.0
"""Timeout of requests to the store, in seconds."""
POLL_SECONDS = 0.2
"""Interval at which the store is asked whether any pair has failed, in seconds."""


def check(place: ProcessPlace, report: Report) -> None:
    """Run all checks that are possible."""
    device = torch.device("cpu")
    report(at="matrix product")
    try:
        if torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        report(productSeconds=compute(device))
    except WrongResult as wrong:
        report(wrong=str(wrong))
        return
    except RuntimeError as error:
        report(wrong=f"could not compute a matrix product: {_line(error)}")
        return
    if place.world_size == 1:
        return
    report(at="way to the store")
    try:
        patience = timedelta(seconds=ANSWER_SECONDS)
        tcp_store = TCPStore(place.address, place.port, is_master=False, wait_for_workers=False, timeout=patience)
        store = PrefixStore(place.prefix, tcp_store)
        if place.local_rank == 0 and place.replicas > 1:
            report(at="pairs")
            _Pairs(place, store, report).exchange()
        report(at="sum over all ranks")
        if _all_were_reached(place, store):
            report(allReduce=_sum_over_ranks(place, store, device))
    except RuntimeError as error:
        # The store is gone: its host has left, or closes the generation.
        report(allReduce="failed", why=_line(error))


class _Pairs:
    def __init__(self, place: ProcessPlace, store: Store, report: Report) -> None:
        self._replica, self._store, self._report = place.replica, store, report
        self._opponents = opponents(place.replica, place.replicas)
        self._replicas = place.replicas
        self._deadline = time.monotonic() + PAIRS_SECONDS

    def exchange(self) -> None:
        """Exchange blocks with each opponent, and report the results."""
        self._store.set(f"arrived/{self._replica}", "")
        arrived = time.monotonic() + ARRIVAL_SECONDS
        absent = [
            other for other in self._opponents if other is not None and not self._has(f"arrived/{other}", arrived)
        ]
        broken = 0
        for number, other in enumerate(self._opponents):
            if other is None:
                continue
            if other in absent:
                self._report(pair=other, bytesPerSecond=None)
                continue
            # Both sides must try the same pairs: each tells its opponent in advance whether it will.
            goes_on = broken < MAX_FAILED_PAIRS and time.monotonic() < self._deadline
            self._store.set(f"ready/{number}/{self._replica}", str(int(goes_on)))
            if not goes_on or not self._is_ready(number, other):
                continue
            bandwidth = self._try(number, other)
            broken += bandwidth is None
            self._report(pair=other, bytesPerSecond=bandwidth)
        if broken or absent:
            self._store.set("broken", "")
        if self._store.add("paired", 1) == self._replicas:
            self._store.set("all-paired", "")

    def _try(self, number: int, other: int) -> float | None:
        try:
            return exchange(
                PrefixStore(f"pair/{number}/{min(self._replica, other)}", self._store), self._replica, other
            )
        except (RuntimeError, WrongResult) as error:
            print(f"pair {self._replica} and {other}: {_line(error)}", file=sys.stderr, flush=True)
            return None

    def _is_ready(self, number: int, other: int) -> bool:
        key = f"ready/{number}/{other}"
        until = min(self._deadline, time.monotonic() + READY_SECONDS)
        return self._has(key, until) and self._store.get(key) == b"1"

    def _has(self, key: str, until: float) -> bool:
        return _appears(self._store, key, max(0.01, until - time.monotonic()))


def _all_were_reached(place: ProcessPlace, store: Store) -> bool:
    """Wait for the pairs of all replicas; returns False once one has failed, because the sum would wait in vain."""
    if place.replicas == 1:
        return True
    until = time.monotonic() + ARRIVAL_SECONDS + PAIRS_SECONDS
    while time.monotonic() < until:
        if store.check(["broken"]):
            return False
        if _appears(store, "all-paired", POLL_SECONDS):
            return not store.check(["broken"])
    return False


def _sum_over_ranks(place: ProcessPlace, store: Store, device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    # A failed collective must be reported, and not end the process.
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
        return "right" if sum_over_ranks(place.rank, place.world_size, device) else "wrong"
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
