"""Which job is looked at, and when. The clock is the event loop's own, made to jump."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_operator.workqueue import FIRST_PAUSE, MAX_PAUSE, QUICK_RECONCILES, WorkQueue
from tests.support.clock import jumping


def now() -> float:
    return asyncio.get_running_loop().time()


async def taken(workqueue: WorkQueue[str]) -> tuple[str, float]:
    key = await workqueue.take()
    return key, round(now(), 3)


def test_what_is_due_first_comes_first() -> None:
    async def work() -> list[tuple[str, float]]:
        workqueue: WorkQueue[str] = WorkQueue()
        workqueue.add("late", 3.0)
        workqueue.add("soon", 1.0)
        workqueue.add("now")
        return [await taken(workqueue) for _ in range(3)]

    assert jumping(work()) == [("now", 0.0), ("soon", 1.0), ("late", 3.0)]


def test_news_is_looked_at_at_once_although_the_key_was_due_later() -> None:
    async def work() -> tuple[str, float]:
        workqueue: WorkQueue[str] = WorkQueue()
        workqueue.add("a", 100.0)
        workqueue.add("a", 1.0)
        workqueue.add("a", 50.0)
        return await taken(workqueue)

    assert jumping(work()) == ("a", 1.0)


def test_a_key_is_given_out_once_at_a_time_and_again_if_there_was_news_meanwhile() -> None:
    async def work() -> list[tuple[str, float]]:
        workqueue: WorkQueue[str] = WorkQueue()
        workqueue.add("a")
        found = [await taken(workqueue)]
        workqueue.add("a")
        workqueue.add("b", 1.0)
        found.append(await taken(workqueue))
        workqueue.done("a")
        found.append(await taken(workqueue))
        return found

    assert jumping(work()) == [("a", 0.0), ("b", 1.0), ("a", 1.0)]


def test_a_burst_of_news_is_one_look() -> None:
    async def work() -> list[tuple[str, float]]:
        workqueue: WorkQueue[str] = WorkQueue(min_interval=0.5)
        workqueue.add("a")
        found = [await taken(workqueue)]
        workqueue.done("a")
        for _ in range(100):
            workqueue.add("a")
        found.append(await taken(workqueue))
        workqueue.done("a")
        workqueue.add("b", 9.0)
        found.append(await taken(workqueue))
        return found

    assert jumping(work()) == [("a", 0.0), ("a", 0.5), ("b", 9.5)]


def test_errors_make_the_pause_grow_and_success_makes_it_small_again() -> None:
    async def work() -> list[float]:
        workqueue: WorkQueue[str] = WorkQueue()
        workqueue.add("a")
        times = []
        for _ in range(12):
            times.append((await taken(workqueue))[1])
            workqueue.done("a", failed=True)
        await taken(workqueue)
        workqueue.done("a", requeue_after=0.0)
        await taken(workqueue)
        before = now()
        workqueue.done("a", failed=True)
        times.append((await taken(workqueue))[1] - before)
        return times

    times = jumping(work())
    assert times[1] == FIRST_PAUSE
    assert times[2] - times[1] == 2 * FIRST_PAUSE
    assert times[11] - times[10] == MAX_PAUSE
    assert times[12] == pytest.approx(FIRST_PAUSE, abs=0.01)


def test_what_is_forgotten_is_not_given_out() -> None:
    async def work() -> tuple[str, float]:
        workqueue: WorkQueue[str] = WorkQueue()
        workqueue.add("gone")
        workqueue.add("there", 1.0)
        workqueue.forget("gone")
        return await taken(workqueue)

    assert jumping(work()) == ("there", 1.0)


def test_how_many_wait() -> None:
    async def work() -> list[int]:
        workqueue: WorkQueue[str] = WorkQueue()
        for key in "abc":
            workqueue.add(key)
        workqueue.add("later", 10.0)
        counts = [len(workqueue)]
        await taken(workqueue)
        counts.append(len(workqueue))
        return counts

    assert jumping(work()) == [3, 2]


def slots(workqueue: WorkQueue[str], count: int, seconds: Callable[[str], float], begun: dict[str, list[float]]) -> Any:
    """So many that take keys, each for as long as that takes, until cancelled."""

    async def serve() -> None:
        while True:
            key = await workqueue.take()
            begun.setdefault(key, []).append(now())
            await asyncio.sleep(seconds(key))
            workqueue.done(key, requeue_after=1.0, slow=seconds(key) > 0.5)

    return [asyncio.create_task(serve()) for _ in range(count)]


@pytest.mark.parametrize(
    "lanes",
    [{"max_slow": 4}, {"max_per_group": 4, "group": lambda key: key.partition("/")[0]}],
    ids=["that take long", "of one namespace"],
)
def test_a_hundred_that_never_answer_slow_nobody_but_themselves(lanes: dict[str, Any]) -> None:
    async def work() -> tuple[float, int]:
        workqueue: WorkQueue[str] = WorkQueue(0.2, **lanes)
        begun: dict[str, list[float]] = {}
        for number in range(100):
            workqueue.add(f"evil/{number}")
        tasks = slots(workqueue, 8, lambda key: 3.0 if key.startswith("evil") else 0.01, begun)
        # Nobody knows yet who takes long.
        await asyncio.sleep(60.0)
        workqueue.add("good/job")
        await asyncio.sleep(600.0)
        for task in tasks:
            task.cancel()
        looks = begun["good/job"]
        looked = [len(times) for key, times in begun.items() if key.startswith("evil")]
        return max(later - earlier for earlier, later in itertools.pairwise(looks)), min(looked)

    longest, fewest = jumping(work())
    assert longest < 1.1
    assert fewest > 5, "they have their turns all the same"


@pytest.mark.parametrize("tenants", [1, 2])
def test_a_job_that_was_slow_once_waits_for_nobody_elses_coordinators(tenants: int) -> None:
    async def work() -> tuple[float, int]:
        workqueue: WorkQueue[str] = WorkQueue(
            0.2, max_slow=16, max_per_group=24, group=lambda key: key.partition("/")[0]
        )
        begun: dict[str, list[float]] = {}

        def seconds(key: str) -> float:
            if key.startswith("evil"):
                return 3.0
            return 1.1 if len(begun[key]) == 5 else 0.01

        for number in range(100 * tenants):
            workqueue.add(f"evil-{number % tenants}/{number}")
        tasks = slots(workqueue, 64, seconds, begun)
        # Until all are known to take long.
        await asyncio.sleep(60.0)
        workqueue.add("good/job")
        await asyncio.sleep(600.0)
        for task in tasks:
            task.cancel()
        looks = begun["good/job"]
        looked = [len(times) for key, times in begun.items() if key.startswith("evil")]
        return max(later - earlier for earlier, later in itertools.pairwise(looks)), min(looked)

    longest, fewest = jumping(work())
    assert longest < 2.2, "a second between two looks, and the look that was slow"
    assert fewest > 5, "they have their turns all the same"


def test_of_a_thousand_that_wait_for_a_place_each_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        asked: Counter[str] = Counter()
        workqueue: WorkQueue[str] = WorkQueue(max_per_group=4, group=lambda key: "all")
        full = workqueue._full

        def noted(key: str) -> Any:
            asked[key] += 1
            return full(key)

        monkeypatch.setattr(workqueue, "_full", noted)
        for number in range(1000):
            workqueue.add(str(number))
        begun: dict[str, list[float]] = {}
        tasks = slots(workqueue, 8, lambda key: 0.001, begun)
        await asyncio.sleep(0.9)
        assert len(begun) == 1000
        assert max(asked.values()) <= 5
        for task in tasks:
            task.cancel()

    jumping(work())


def test_who_is_forgotten_while_it_was_to_take_a_free_place_leaves_it_to_the_next() -> None:
    async def work() -> str:
        workqueue: WorkQueue[str] = WorkQueue(max_per_group=1, group=lambda key: "all")
        for key in "abc":
            workqueue.add(key)
        waiting = [asyncio.create_task(workqueue.take()) for _ in range(2)]
        await asyncio.sleep(0.1)
        # `b` and `c` have been found to wait for the place of `a`.
        workqueue.done(waiting[0].result())
        workqueue.forget("b")
        return await asyncio.wait_for(waiting[1], 1.0)

    assert jumping(work()) == "c"


def test_two_free_places_call_two_keys() -> None:
    async def work() -> list[str]:
        workqueue: WorkQueue[str] = WorkQueue(max_slow=2)
        for key in "abcd":
            workqueue.add(key)
        for key in [await workqueue.take() for _ in "abcd"]:
            workqueue.done(key, requeue_after=0.0, slow=True)
        waiting = [asyncio.create_task(workqueue.take()) for _ in "abcd"]
        await asyncio.sleep(0.1)
        for task in waiting[:2]:
            workqueue.done(task.result())
        await asyncio.sleep(0.1)
        return [task.result() for task in waiting]

    assert jumping(work()) == ["a", "b", "c", "d"]


def test_a_key_that_is_called_and_finds_its_group_full_leaves_the_place_to_the_next() -> None:
    async def work() -> list[str]:
        workqueue: WorkQueue[str] = WorkQueue(max_slow=1, max_per_group=1, group=lambda key: key[0])
        for key in ("x1", "y1", "z1"):
            workqueue.add(key)
            workqueue.done(await workqueue.take(), requeue_after=2.0, slow=True)
        workqueue.add("x1")
        workqueue.add("y2")
        taken = [await workqueue.take(), await workqueue.take()]
        await asyncio.sleep(1.0)
        # Due again before `y1`, and busy until then.
        workqueue.add("y2")
        with suppress(TimeoutError):
            # `y1` and `z1` are found to wait for the place of `x1`.
            await asyncio.wait_for(workqueue.take(), 2.0)
        for key in reversed(taken):
            workqueue.done(key)
        return taken + [await asyncio.wait_for(workqueue.take(), 1.0) for _ in range(2)]

    assert jumping(work()) == ["x1", "y2", "y2", "z1"]


@given(data=st.data())
def test_whatever_happens_who_is_due_is_given_out(data: st.DataObject) -> None:
    """Keys of two groups, some of which take long, some are added anew or forgotten: those that are due and have a
    place get it at once."""

    async def work() -> None:
        workqueue: WorkQueue[str] = WorkQueue(0.0, max_slow=1, max_per_group=2, group=lambda key: key[0])
        busy: list[str] = []
        keys = st.sampled_from([group + str(number) for group in "xy" for number in range(4)])
        for _ in range(data.draw(st.integers(0, 25))):
            step = data.draw(st.sampled_from(["add", "add", "take", "done", "done slow", "forget", "later"]))
            if step == "add":
                workqueue.add(data.draw(keys), data.draw(st.sampled_from([0.0, 0.0, 1.0])))
            elif step == "take":
                with suppress(TimeoutError):
                    busy.append(await asyncio.wait_for(workqueue.take(), 0.01))
            elif step == "forget" and (idle := sorted(set(workqueue._due) - set(busy))):
                workqueue.forget(data.draw(st.sampled_from(idle)))
            elif step.startswith("done") and busy:
                workqueue.done(busy.pop(0), data.draw(st.sampled_from([None, 0.0])), slow=step == "done slow")
            elif step == "later":
                await asyncio.sleep(1.0)
        for key in busy:
            workqueue.done(key)
        left = set(workqueue._due)
        for _ in range(len(left)):
            key = await asyncio.wait_for(workqueue.take(), 2.0)
            left.discard(key)
            workqueue.done(key)
        assert not left

    jumping(work())


def test_news_of_one_key_wakes_one_of_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> int:
        waits: list[float | None] = []
        timeout = asyncio.timeout

        def noted(seconds: float | None) -> asyncio.Timeout:
            waits.append(seconds)
            return timeout(seconds)

        monkeypatch.setattr(asyncio, "timeout", noted)
        workqueue: WorkQueue[str] = WorkQueue()
        tasks = [asyncio.create_task(workqueue.take()) for _ in range(100)]
        await asyncio.sleep(1.0)
        for number in range(10):
            workqueue.add(str(number))
            await asyncio.sleep(1.0)
        assert sum(task.done() for task in tasks) == 10
        for task in tasks:
            task.cancel()
        return len(waits)

    assert jumping(work()) == 11, "one more wait after each"


def test_what_took_long_is_quick_again_after_some_quick_looks() -> None:
    async def work() -> list[str]:
        workqueue: WorkQueue[str] = WorkQueue(max_slow=1)
        for key in ("a", "b"):
            workqueue.add(key)
            workqueue.done(await workqueue.take(), slow=True)
        for _ in range(QUICK_RECONCILES):
            workqueue.add("a")
            workqueue.done(await workqueue.take())
        workqueue.add("b")
        workqueue.add("a")
        return sorted([await workqueue.take(), await workqueue.take()])

    assert jumping(work()) == ["a", "b"]
