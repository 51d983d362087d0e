"""The work queue: which jobs to reconcile and when, each at most once at a time, with backoff after errors.

Slow keys, and the keys of one group, may only take some of the places: a tenant with a hundred coordinators that accept
every poll and never answer delays only his own jobs. Of the places for slow keys, a group may only take a share, so
that a key of another group that was slow once does not wait for the hundred. A key that is due and finds no place is
due again once one is free.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

FIRST_PAUSE, MAX_PAUSE = 0.5, 60.0
"""Seconds after an error, doubled for each further one in a row."""

QUICK_RECONCILES = 10
"""Number of quick reconciles in a row after which a slow key counts as quick again."""
SLOW = object()
"""The lane of slow keys. The lane of a group is the group itself, and its lane of slow keys is the pair of both."""
SHARE = 4
"""A group may take one part in this many of the lane for slow keys, and at least one place."""

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys that are due now or later. A key that was taken is not given out again before it is done.

    Args:
        min_interval: seconds between two times that a key is taken, so that a burst of changes is processed once.
        max_slow: maximum number of slow keys that are taken at a time, a quarter of them of one group; None: any.
        max_per_group: maximum number of keys of one group that are taken at a time; None: any.
        group: returns the group of a key.
    """

    def __init__(
        self,
        min_interval: float = 0.0,
        max_slow: int | None = None,
        max_per_group: int | None = None,
        group: Callable[[K], Hashable] = lambda key: key,
    ) -> None:
        self._min_interval = min_interval
        self._max_slow, self._max_per_group, self._group = max_slow, max_per_group, group
        self._slow: dict[K, int] = {}
        self._lanes: dict[K, tuple[Hashable, ...]] = {}
        self._occupied: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, list[tuple[float, int, K]]] = {}
        self._due: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._busy: set[K] = set()
        self._taken_at: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()

    def __len__(self) -> int:
        """Number of keys that are due now and wait."""
        now = asyncio.get_running_loop().time()
        return sum(1 for key, (due, _) in self._due.items() if due <= now and key not in self._busy)

    def add(self, key: K, seconds: float = 0.0) -> None:
        """Make a key due in `seconds`, or leave it as it is if it is due earlier already."""
        now = asyncio.get_running_loop().time()
        due = max(now + seconds, self._taken_at.get(key, -self._min_interval) + self._min_interval)
        if key in self._due and self._due[key][0] <= due:
            return
        self._push(key, due)

    async def take(self) -> K:
        """Wait for the next key that is due. Pass it to `done` afterwards."""
        # Of all idle consumers, one waits for the next key: a change need not wake a hundred.
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
                    heapq.heappush(self._waiting.setdefault(full, []), entry)
                    self._pass_on(key, full)
                    continue
                self._enter(key)
                del self._due[key]
                self._busy.add(key)
                self._taken_at[key] = now
                return key
            patience = self._heap[0][0] - now if self._heap else None
            self._changed.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def done(self, key: K, requeue_after: float | None = None, failed: bool = False, slow: bool = False) -> None:
        """Finish a key, which is due again in `requeue_after` seconds, or after a backoff if it failed.

        Args:
            slow: it took long.
        """
        self._busy.discard(key)
        self._leave(key)
        if slow:
            self._slow[key] = QUICK_RECONCILES
        elif key in self._slow:
            self._slow[key] -= 1
            if self._slow[key] <= 0:
                del self._slow[key]
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            requeue_after = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** (count - 1))
        else:
            self._failures.pop(key, None)
        if requeue_after is not None:
            self.add(key, requeue_after)
        if key in self._due:
            self._push(key, self._due[key][0])

    def forget(self, key: K) -> None:
        """Remove a key."""
        lanes = [lane for lane, _ in self._lanes_of(key)]
        self._due.pop(key, None)
        self._taken_at.pop(key, None)
        self._failures.pop(key, None)
        self._slow.pop(key, None)
        for lane in lanes:
            # The key may have been called to a place, which goes to the next one.
            self._unbar(lane)

    def _lanes_of(self, key: K) -> Iterator[tuple[Hashable, int]]:
        """The lanes that a key needs a place in, with their capacities."""
        if self._max_slow is not None and key in self._slow:
            yield (SLOW, self._group(key)), max(1, self._max_slow // SHARE)
            yield SLOW, self._max_slow
        if self._max_per_group is not None:
            yield self._group(key), self._max_per_group

    def _full(self, key: K) -> Hashable | None:
        return next((lane for lane, capacity in self._lanes_of(key) if self._occupied[lane] >= capacity), None)

    def _enter(self, key: K) -> None:
        self._lanes[key] = tuple(lane for lane, _ in self._lanes_of(key))
        self._occupied.update(self._lanes[key])

    def _leave(self, key: K) -> None:
        lanes = self._lanes.pop(key, ())
        self._occupied.subtract(lanes)
        for lane in lanes:
            if self._occupied[lane] <= 0:
                del self._occupied[lane]
        # All places are freed before any key is called: otherwise a key that waits for the first would be found to wait
        # for the second.
        for lane in lanes:
            self._unbar(lane)

    def _pass_on(self, key: K, full: Hashable) -> None:
        """A key that waits for a place in a full lane passes the places that it was called to in other lanes on to the
        next key."""
        for lane, _ in self._lanes_of(key):
            if lane != full:
                self._unbar(lane)

    def _unbar(self, lane: Hashable) -> None:
        """Make the first key that waits for a place in a lane due again, and not all: of a thousand that wait, each
        would be examined a thousand times."""
        barred = self._waiting.pop(lane, [])
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
            heapq.heappush(self._waiting.setdefault(full, []), entry)
        if barred:
            self._waiting[lane] = barred

    def _counts(self, due: float, count: int, key: K) -> bool:
        """Whether an entry of the heap is the current one of its key, and the key may be taken."""
        return self._due.get(key) == (due, count) and key not in self._busy

    def _push(self, key: K, due: float) -> None:
        # Only one entry of a key counts: a key that is called to two free places would leave one of them empty.
        self._count += 1
        self._due[key] = due, self._count
        heapq.heappush(self._heap, (due, self._count, key))
        self._changed.set()
