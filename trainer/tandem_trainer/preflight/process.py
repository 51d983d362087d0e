"""What one process of a pre-flight does, from the first check to the last, and what it says of it."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tandem_trainer.preflight import (
    ARRIVE_SECONDS,
    GIVE_UP,
    PAIRS_SECONDS,
    READY_SECONDS,
    SUM_SECONDS,
    ProcessPlace,
    opponents,
)
from tandem_trainer.preflight.checks import Wrong, add_up, compute, exchange

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
