"""The work queue: which jobs to reconcile and when, each at most once at a time, with backoff after errors.

Keys that take long, and keys of one group, have some of the places alone: whoever has a hundred coordinators that take
each question and never answer waits for himself. Of the places for keys that take long, too, a group has a share alone:
a key of another group that took long once does not wait for the hundred. What is due and finds no place is due again
once one is free.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

FIRST_PAUSE, MAX_PAUSE = 0.5, 60.0
"""Seconds after an error, doubled for each further one in a row."""

QUICK_LOOKS = 10
"""So many in a row, and a key that took long counts as quick again."""
SLOW = object()
"""The lane of those that take long; a group's lane is the group, and its lane of those that take long is both."""
SHARE = 4
"""A group has one part in this many of the lane for keys that take long, and at least one place."""

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys that are due now or later. A key that is being worked on is not given out a second time before it is done.

    Args:
        least: seconds between two times that a key is given out, so that a burst of news is looked at once.
        most_slow: how many keys that take long are given out at a time, a quarter of them of one group; None: any.
        most_of_group: how many keys of one group are given out at a time; None likewise.
        group: the group of a key.
    """

    def __init__(
        self,
        least: float = 0.0,
        most_slow: int | None = None,
        most_of_group: int | None = None,
        group: Callable[[K], Hashable] = lambda key: key,
    ) -> None:
        self._least = least
        self._most_slow, self._most_of_group, self._group = most_slow, most_of_group, group
        self._slow: dict[K, int] = {}
        self._lanes: dict[K, tuple[Hashable, ...]] = {}
        self._taken: Counter[Hashable] = Counter()
        self._barred: dict[Hashable, list[tuple[float, int, K]]] = {}
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._busy: set[K] = set()
        self._given: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    def __len__(self) -> int:
        """How many are due now and wait."""
        now = asyncio.get_running_loop().time()
        return sum(1 for key, (due, _) in self._due.items() if due <= now and key not in self._busy)

    def add(self, key: K, seconds: float = 0.0) -> None:
        """Have a key given out in `seconds`, or earlier if it is due earlier already."""
        now = asyncio.get_running_loop().time()
        due = max(now + seconds, self._given.get(key, -self._least) + self._least)
        if key in self._due and self._due[key][0] <= due:
            return
        self._push(key, due)

    async def take(self) -> K:
        """The next key that is due. Give it back with `done`."""
        # Of all who have nothing to do, one waits for the next key: news need not wake a hundred.
        async with self._turn:
            return await self._next()

    async def _next(self) -> K:
        while True:
            now = asyncio.get_running_loop().time()
            while self._heap and not self._counts(*self._heap[0]):
                heapq.heappop(self._heap)
            if self._heap and self._heap[0][0] <= now:
                entry = heapq.heappop(self._heap)
                key = entry[2]
                if (full := self._full(key)) is not None:
                    heapq.heappush(self._barred.setdefault(full, []), entry)
                    self._pass_on(key, full)
                    continue
                self._enter(key)
                del self._due[key]
                self._busy.add(key)
                self._given[key] = now
                return key
            patience = self._heap[0][0] - now if self._heap else None
            self._changed.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K, again_in: float | None = None, failed: bool = False, slow: bool = False) -> None:
        """It was looked at, and is due again in `again_in` seconds, or soon because that failed.

        Args:
            slow: that took long.
        """
        self._busy.discard(key)
        self._leave(key)
        if slow:
            self._slow[key] = QUICK_LOOKS
        elif key in self._slow:
            self._slow[key] -= 1
            if self._slow[key] <= 0:
                del self._slow[key]
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            again_in = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** (count - 1))
        else:
            self._failures.pop(key, None)
        if again_in is not None:
            self.add(key, again_in)
        if key in self._due:
            self._push(key, self._due[key][0])

    def forget(self, key: K) -> None:
        """It does not exist any more."""
        lanes = [lane for lane, _ in self._wanted(key)]
        self._due.pop(key, None)
        self._given.pop(key, None)
        self._failures.pop(key, None)
        self._slow.pop(key, None)
        for lane in lanes:
            # It may have been the one that was to take the free place.
            self._unbar(lane)

    def _wanted(self, key: K) -> Iterator[tuple[Hashable, int]]:
        """The lanes that a key goes in, and how many each holds."""
        if self._most_slow is not None and key in self._slow:
            yield (SLOW, self._group(key)), max(1, self._most_slow // SHARE)
            yield SLOW, self._most_slow
        if self._most_of_group is not None:
            yield self._group(key), self._most_of_group

    def _full(self, key: K) -> Hashable | None:
        return next((lane for lane, most in self._wanted(key) if self._taken[lane] >= most), None)

    def _enter(self, key: K) -> None:
        self._lanes[key] = tuple(lane for lane, _ in self._wanted(key))
        self._taken.update(self._lanes[key])

    def _leave(self, key: K) -> None:
        lanes = self._lanes.pop(key, ())
        self._taken.subtract(lanes)
        for lane in lanes:
            if self._taken[lane] <= 0:
                del self._taken[lane]
        # All are free before anybody is called: else who waits for the first would be found to wait for the second.
        for lane in lanes:
            self._unbar(lane)

    def _pass_on(self, key: K, full: Hashable) -> None:
        """A key that waits for a place in a full lane leaves those that it was called to in other ones to the next."""
        for lane, _ in self._wanted(key):
            if lane != full:
                self._unbar(lane)

    def _unbar(self, lane: Hashable) -> None:
        """Have the first one that waits for a place in a lane be due again, and not all: of a thousand that wait, each
        would be looked at a thousand times."""
        barred = self._barred.pop(lane, [])
        while barred:
            entry = heapq.heappop(barred)
            if not self._counts(*entry):
                continue
            if (full := self._full(entry[2])) is None:
                heapq.heappush(self._heap, entry)
                self._changed.set()
                break
            if full == lane:
                heapq.heappush(barred, entry)
                break
            heapq.heappush(self._barred.setdefault(full, []), entry)
        if barred:
            self._barred[lane] = barred

    def _counts(self, due: float, count: int, key: K) -> bool:
        """Whether an entry of the heap is the one that says when its key is due, and the key may be given out."""
        return self._due.get(key) == (due, count) and key not in self._busy

    def _push(self, key: K, due: float) -> None:
        # One entry of a key counts, or one that is called twice to two free places would leave one of them free.
        self._count += 1
        self._due[key] = due, self._count
        heapq.heappush(self._heap, (due, self._count, key))
        self._changed.set()
