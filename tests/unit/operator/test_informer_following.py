"""What belongs to jobs is followed without a gap: over the ends of answers, over versions that are too long ago, and
over an API server that is away."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tandem_operator import kinds, names
from tandem_operator.api import EXPIRED, ListPart, RequestRefused, Unavailable
from tandem_operator.informer import BOOKMARK, RETRY_SECONDS, SWEEP_SECONDS, Cache, Informer, Key
from tandem_operator.kinds import Kind
from tests.support.clock import jumping

KEY = ("n", "digits")
Answer = list[tuple[str, dict[str, Any]] | Exception]


JOB = {"metadata": {"name": "digits", "namespace": "n", "uid": "u", "resourceVersion": "1", "generation": 1}}
OURS, OTHER = "digits-checkpoints", "digits-job"


def claim(version: int, name: str = OURS) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {names.JOB: "digits"}}}


class Api:
    """An API server that has a job and claims, and tells of them what a test has it tell."""

    def __init__(self) -> None:
        self.claims: list[dict[str, Any]] = []
        self.version = 10
        self.answers: list[Answer] = []
        """What the next watches of claims are told; after those, nothing happens."""
        self.asked: list[int] = []
        """From which versions on claims were watched."""
        self.lists = 0

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        self.lists += kind is kinds.CLAIM
        yield ListPart({kinds.CLAIM: self.claims, kinds.JOB: [JOB]}.get(kind, []), self.version)

    async def changes(self, kind: Kind, version: int, namespace: str = "", selector: str = "") -> AsyncIterator[Any]:
        assert selector == names.JOB
        if kind is kinds.CLAIM:
            self.asked.append(version)
            for told in self.answers.pop(0) if self.answers else ():
                if isinstance(told, Exception):
                    raise told
                yield told
        await asyncio.sleep(300)


def followed(api: Api, story: Callable[[Cache, list[Key]], Coroutine[Any, Any, None]]) -> None:
    """Tell a story beside a watch that has begun."""

    async def work() -> None:
        news: list[Key] = []
        cache, anything = Cache(), api
        watching = Informer(anything, cache, news.append, ())  # type: ignore[arg-type]
        tasks = [asyncio.create_task(one) for one in (watching.sweep(), watching.follow())]
        try:
            await asyncio.sleep(0.1)
            await story(cache, news)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    jumping(work())


def known(cache: Cache) -> set[str]:
    return {name for (kind, name) in cache._by_job.get(KEY, {}) if kind is kinds.CLAIM}


def test_what_happens_after_the_list_is_news() -> None:
    api = Api()
    api.claims = [claim(9)]
    api.answers = [[("ADDED", claim(11, OTHER)), ("DELETED", claim(12))]]

    async def story(cache: Cache, news: list[Key]) -> None:
        assert api.asked == [10]
        assert known(cache) == {OTHER}
        assert news == [KEY, KEY, KEY, KEY], "the job and its claims"

    followed(api, story)


def test_the_next_answer_begins_where_the_last_has_ended_and_a_bookmark_is_no_object() -> None:
    api = Api()
    api.answers = [[("ADDED", claim(11)), (BOOKMARK, {"metadata": {"resourceVersion": "40"}})]]

    async def story(cache: Cache, news: list[Key]) -> None:
        api.claims, api.version = [claim(11)], 40
        await asyncio.sleep(301)
        assert api.asked[:2] == [10, 40]
        assert known(cache) == {OURS}
        assert not cache.unreadable.counts.total()

    followed(api, story)


def test_a_version_that_is_too_long_ago_is_listed_anew_at_once() -> None:
    api = Api()
    api.answers = [[RequestRefused(EXPIRED, "Expired", "too old resource version")]]

    async def story(cache: Cache, news: list[Key]) -> None:
        api.claims, api.version = [claim(19)], 20
        await asyncio.sleep(RETRY_SECONDS + 0.1)
        assert api.lists == 2, "long before the next sweep"
        assert api.asked == [10, 20]
        assert known(cache) == {OURS}

    assert RETRY_SECONDS < SWEEP_SECONDS / 4
    followed(api, story)


def test_after_a_failure_it_goes_on_from_the_last_list() -> None:
    api = Api()
    api.answers = [
        [("ADDED", claim(11)), Unavailable("it is away")],
        [Unavailable("it is away still")],
        [RequestRefused(403, "Forbidden", "not yet")],
        [("ADDED", claim(11)), ("ADDED", claim(13, OTHER))],
    ]

    async def story(cache: Cache, news: list[Key]) -> None:
        await asyncio.sleep(3 * RETRY_SECONDS + 0.1)
        assert api.asked == [10, 10, 10, 10]
        assert known(cache) == {OURS, OTHER}
        assert news == [KEY, KEY, KEY], "the job, and what is told twice is news once"

    followed(api, story)


def test_answers_that_end_at_once_are_not_asked_for_without_pause() -> None:
    class Empty(Api):
        async def changes(
            self, kind: Kind, version: int, namespace: str = "", selector: str = ""
        ) -> AsyncIterator[Any]:
            self.asked.append(version)
            return
            yield

    api = Empty()

    async def story(cache: Cache, news: list[Key]) -> None:
        await asyncio.sleep(10 * RETRY_SECONDS)
        assert len(api.asked) <= 12 * len(kinds.WATCHED)

    followed(api, story)


def test_a_kind_that_the_cluster_lacks_is_followed_once_it_is_there_and_not_when_it_has_gone() -> None:
    api = Api()
    absent = RequestRefused(404, "NotFound", "the server could not find the requested resource")
    away = Unavailable("500 conversion webhook for kueue.x-k8s.io/v1beta2, Kind=Workload failed")
    refusals: list[Exception] = [away, absent, RequestRefused(403, "Forbidden", "workloads are forbidden")]
    pages, watched = api.pages, []

    async def served(kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        if kind is kinds.WORKLOAD and refusals:
            raise refusals[0]
        async for page in pages(kind, namespace, selector):
            yield page

    async def changes(kind: Kind, version: int, namespace: str = "", selector: str = "") -> AsyncIterator[Any]:
        if kind is kinds.WORKLOAD:
            watched.append(version)
            if refusals:
                raise refusals[0]
        await asyncio.sleep(300)
        for nothing in ():
            yield nothing

    api.pages, api.changes = served, changes  # type: ignore[method-assign]

    async def story(cache: Cache, news: list[Key]) -> None:
        assert cache.served.get(kinds.WORKLOAD) is None
        assert cache.job(KEY) is not None, "whoever waits in no queue is not held up"
        refusals.pop(0)
        await asyncio.sleep(SWEEP_SECONDS)
        assert cache.served.get(kinds.WORKLOAD) is False
        refusals.pop(0)
        await asyncio.sleep(SWEEP_SECONDS)
        assert (cache.served.get(kinds.WORKLOAD), watched) == (False, [])
        refusals.clear()
        await asyncio.sleep(SWEEP_SECONDS + 2 * RETRY_SECONDS)
        assert (cache.served.get(kinds.WORKLOAD), watched) == (True, [10])
        refusals.append(away)
        await asyncio.sleep(2 * SWEEP_SECONDS)
        assert cache.served.get(kinds.WORKLOAD), "what is known stays"
        refusals.clear()
        refusals.append(absent)
        await asyncio.sleep(300 + SWEEP_SECONDS)
        assert (cache.served.get(kinds.WORKLOAD), watched) == (False, [10, 10])

    followed(api, story)
