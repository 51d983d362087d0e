"""What is known stays true although watches lose things, and a watch that has stalled is noticed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tandem_operator import kinds, names
from tandem_operator.api import ListPart, RequestRefused, Unavailable
from tandem_operator.informer import PAGE_SECONDS, STALE_SECONDS, SWEEP_SECONDS, Cache, Informer, Key
from tandem_operator.kinds import Kind
from tests.support.clock import jumping

KEY = ("n", "digits")


def job(name: str = "digits", version: int = 1, generation: int = 1) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "generation": generation}}


def policy() -> dict[str, Any]:
    labels = {names.JOB: "digits"}
    return {
        "metadata": {
            "name": "digits-network",
            "namespace": "n",
            "uid": "uid-p",
            "resourceVersion": "9",
            "labels": labels,
        }
    }


class Api:
    """Lists that a test decides on."""

    def __init__(self) -> None:
        self.jobs = [job()]
        self.policies: list[dict[str, Any]] = []
        self.version = 1
        self.fails = False
        self.forbidden: Kind | None = None

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        if self.fails:
            raise Unavailable("the API server is away")
        if kind is self.forbidden:
            raise RequestRefused(403, "Forbidden", f"may not list {kind.plural}")
        yield ListPart({kinds.JOB: self.jobs, kinds.NETWORK_POLICY: self.policies}.get(kind, []), self.version)


def watched(story: Callable[[Api, Informer, list[Key]], Coroutine[Any, Any, None]], isolates: bool = False) -> None:
    """Tell a story beside the sweep."""

    async def work() -> None:
        api = Api()
        news: list[Key] = []
        anything: Any = api
        watching = Informer(anything, Cache(), news.append, (), isolates)
        sweep = asyncio.create_task(watching.sweep())
        try:
            await story(api, watching, news)
        finally:
            sweep.cancel()

    jumping(work())


def test_what_is_there_at_the_start_is_news() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        assert not watching.synced.is_set()
        await watching.synced.wait()
        assert (news, watching.complaint) == ([KEY], "")

    watched(story)


def test_an_end_that_the_watch_has_lost_is_found_by_the_next_list() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        api.jobs, api.version = [], 2
        await asyncio.sleep(SWEEP_SECONDS + 1)
        assert news == [KEY, KEY]

    watched(story)


def test_a_watch_that_says_nothing_of_what_a_list_finds_has_stalled_until_it_speaks_again() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        api.jobs, api.version = [job(version=5, generation=2)], 5
        await asyncio.sleep(SWEEP_SECONDS + 1)
        assert watching.complaint == ""
        await asyncio.sleep(SWEEP_SECONDS + 1)
        assert watching.complaint == "the watch of distributedtrainingjobs has stalled"
        watching.handle(kinds.JOB, "MODIFIED", job(version=6, generation=3))
        assert watching.complaint == ""

    watched(story)


def test_a_watch_that_is_only_a_little_late_has_not_stalled() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        api.jobs, api.version = [job(version=5, generation=2)], 5
        await asyncio.sleep(SWEEP_SECONDS + 1)
        watching.handle(kinds.JOB, "MODIFIED", job(version=5, generation=2))
        await asyncio.sleep(SWEEP_SECONDS + 1)
        assert watching.complaint == ""

    watched(story)


def test_an_operator_that_cannot_list_says_so() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        api.fails = True
        await asyncio.sleep(STALE_SECONDS - 1)
        assert watching.complaint == ""
        await asyncio.sleep(2)
        assert "nothing could be listed" in watching.complaint

    watched(story)


def test_a_list_of_very_many_objects_may_take_long_as_long_as_it_gets_on() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        pages, pauses = api.pages, [PAGE_SECONDS - 1] * 8

        async def many(kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
            while kind is kinds.CONFIG_MAP and pauses:
                await asyncio.sleep(pauses.pop())
                yield ListPart([], api.version)
            async for page in pages(kind, namespace, selector):
                yield page

        api.pages = many  # type: ignore[method-assign]
        for _ in range(50):
            await asyncio.sleep(10)
            assert watching.complaint == ""
        await asyncio.sleep(2 * SWEEP_SECONDS)
        assert watching.age < SWEEP_SECONDS
        # One that gets no further is as bad as none.
        pauses += [10 * STALE_SECONDS]
        await asyncio.sleep(STALE_SECONDS + 2 * SWEEP_SECONDS)
        assert "nothing could be listed" in watching.complaint

    watched(story)


def test_lists_that_fail_after_some_pages_are_none() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        api.forbidden = kinds.SERVICE
        await asyncio.sleep(STALE_SECONDS + SWEEP_SECONDS)
        for _ in range(20):
            await asyncio.sleep(1)
            assert "nothing could be listed" in watching.complaint

    watched(story)


def test_where_no_network_policies_are_made_nothing_waits_for_the_right_to_see_them() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        api.forbidden = kinds.NETWORK_POLICY
        await asyncio.sleep(1)
        assert (watching.synced.is_set(), watching.complaint, news) == (True, "", [KEY])

    watched(story)


def test_where_network_policies_are_made_the_right_to_see_them_is_needed() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        api.forbidden = kinds.NETWORK_POLICY
        await asyncio.sleep(STALE_SECONDS + 1)
        assert not watching.synced.is_set()
        assert "nothing could be listed" in watching.complaint

    watched(story, isolates=True)


def test_policies_that_are_left_are_found_by_lists_alone_and_no_watch_has_stalled() -> None:
    async def story(api: Api, watching: Informer, news: list[Key]) -> None:
        await watching.synced.wait()
        api.policies = [policy()]
        api.version = 9
        await asyncio.sleep(2 * SWEEP_SECONDS + 2)
        assert (news, watching.complaint) == ([KEY, KEY], "")

    watched(story)
