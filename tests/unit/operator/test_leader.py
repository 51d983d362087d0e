"""One of several operators acts: who, since when, and what becomes of the others. In time that jumps."""

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tandem_operator import kinds
from tandem_operator.api import ApiServer, Object, RequestRefused, Unavailable
from tandem_operator.kinds import Kind
from tandem_operator.leader import DEADLINE_SECONDS, DURATION_SECONDS, HOME, MAX_SECONDS, NAME, Leases
from tandem_operator.options import parse
from tests.support.clock import jumping

SOON = 2.5
"""Seconds after which whoever waits has looked again."""


class Api:
    """Leases, as the API server has them."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Object] = {}
        self.away = False
        self.hangs = False
        self.forbidden = False
        self.most = 0
        """Operators that ever acted at once."""

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.away:
            raise Unavailable("the API server is away")
        if self.forbidden:
            raise RequestRefused(403, "Forbidden", "leases is forbidden")

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        await self._answer()
        return copy.deepcopy(self.found.get((namespace, name)))

    async def create(self, kind: Kind, manifest: Object) -> Object:
        await self._answer()
        place = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        if place in self.found:
            raise RequestRefused(409, "AlreadyExists", "it is there")
        return self._keep(place, manifest, 1)

    async def replace(self, kind: Kind, manifest: Object) -> Object:
        await self._answer()
        place = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        there = self.found[place]["metadata"]["resourceVersion"]
        if there != manifest["metadata"]["resourceVersion"]:
            raise RequestRefused(409, "Conflict", "it has changed")
        return self._keep(place, manifest, int(there) + 1)

    def _keep(self, place: tuple[str, str], manifest: Object, version: int) -> Object:
        whole = copy.deepcopy(manifest)
        whole["metadata"]["resourceVersion"] = str(version)
        self.found[place] = whole
        return copy.deepcopy(whole)

    def spec(self, namespace: str = HOME) -> Object:
        found: Object = self.found[namespace, NAME]["spec"]
        return found


class Party:
    """Several operators, each with its own connection to one set of Leases."""

    def __init__(self) -> None:
        self.leases = Api()
        self.told: list[tuple[str, str]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def joins(self, identity: str, *namespaces: str) -> tuple[Leases, Api, asyncio.Task[None]]:
        """Another operator, the faults of whose connection are its own."""
        api = Api()
        api.found = self.leases.found
        anything: Any = api
        leases = Leases(anything, namespaces, HOME, identity, lambda namespace: self.told.append((identity, namespace)))
        task = asyncio.create_task(leases.keep())
        self._tasks.append(task)
        return leases, api, task

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def party(story: Callable[[Party], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        there = Party()
        try:
            await story(there)
        finally:
            await there.end()

    jumping(work())


def test_whoever_comes_first_acts_and_the_other_one_says_for_whom_it_waits() -> None:
    async def story(there: Party) -> None:
        first, _, _ = there.joins("a/one")
        await asyncio.sleep(SOON)
        second, _, _ = there.joins("b/two")
        await asyncio.sleep(600)
        assert (first.acts("any"), second.acts("any"), there.told) == (True, False, [("a/one", "")])
        assert first.complaint == ""
        assert second.complaint == f"a/one holds the Lease {HOME}/{NAME}; this operator waits"
        assert there.leases.spec()["holderIdentity"] == "a/one"
        assert there.leases.spec()["leaseTransitions"] == 0

    party(story)


def test_two_that_come_at_once_are_told_apart_by_the_api_server() -> None:
    async def story(there: Party) -> None:
        both = [there.joins(name)[0] for name in ("one", "two")]
        await asyncio.sleep(600)
        assert sorted(one.acts("n") for one in both) == [False, True]

    party(story)


def test_who_lets_go_is_followed_within_seconds() -> None:
    async def story(there: Party) -> None:
        first, _, task = there.joins("one")
        await asyncio.sleep(SOON)
        second, _, _ = there.joins("two")
        await asyncio.sleep(60)
        task.cancel()
        await first.release()
        assert not first.acts("n")
        await asyncio.sleep(SOON)
        assert second.acts("n")
        assert there.leases.spec()["leaseTransitions"] == 1

    party(story)


def test_the_lease_of_one_that_is_killed_runs_out() -> None:
    async def story(there: Party) -> None:
        _, _, task = there.joins("one")
        await asyncio.sleep(SOON)
        second, _, _ = there.joins("two")
        await asyncio.sleep(60)
        task.cancel()
        await asyncio.sleep(DURATION_SECONDS - 5)
        assert not second.acts("n")
        await asyncio.sleep(5 + SOON)
        assert second.acts("n")

    party(story)


def test_a_container_that_is_started_again_in_its_pod_goes_on_at_once() -> None:
    async def story(there: Party) -> None:
        _, _, task = there.joins("pod")
        await asyncio.sleep(60)
        task.cancel()
        again, _, _ = there.joins("pod")
        await asyncio.sleep(SOON)
        assert again.acts("n")
        assert there.leases.spec()["leaseTransitions"] == 0

    party(story)


@pytest.mark.parametrize("fault", ["away", "hangs"])
def test_who_cannot_renew_ceases_to_act_before_another_one_begins(fault: str) -> None:
    async def story(there: Party) -> None:
        first, api, _ = there.joins("one")
        await asyncio.sleep(SOON)
        second, _, _ = there.joins("two")
        await asyncio.sleep(60)
        setattr(api, fault, True)
        both, since = 0, asyncio.get_running_loop().time()
        while not second.acts("n"):
            await asyncio.sleep(0.1)
            both += first.acts("n") and second.acts("n")
            assert asyncio.get_running_loop().time() - since < 2 * DURATION_SECONDS
        assert both == 0
        assert there.told == [("one", ""), ("one", ""), ("two", "")], "it was told to cease, in time"

    party(story)


def test_an_api_server_that_is_away_for_moments_changes_nothing() -> None:
    async def story(there: Party) -> None:
        first, api, _ = there.joins("one")
        await asyncio.sleep(60)
        api.away = True
        await asyncio.sleep(DEADLINE_SECONDS - 5)
        api.away = False
        await asyncio.sleep(60)
        assert (first.acts("n"), there.told) == (True, [("one", "")])

    party(story)


def test_without_the_right_nobody_acts_and_the_reason_is_said() -> None:
    async def story(there: Party) -> None:
        leases, api, _ = there.joins("one")
        api.forbidden = True
        await asyncio.sleep(60)
        assert not leases.acts("n")
        assert leases.complaint == f"the Lease {HOME}/{NAME} could not be had: leases is forbidden"

    party(story)


def test_operators_of_different_namespaces_do_not_meet() -> None:
    async def story(there: Party) -> None:
        one, two = there.joins("one", "a", "b")[0], there.joins("two", "c")[0]
        await asyncio.sleep(60)
        acts = [(leases.acts(namespace)) for leases in (one, two) for namespace in ("a", "b", "c", "d")]
        assert acts == [True, True, False, False, False, False, True, False]

    party(story)


def test_whoever_takes_the_lease_of_his_namespace_stops_no_other() -> None:
    async def story(there: Party) -> None:
        leases, _, _ = there.joins("one", "his", "theirs")
        await asyncio.sleep(60)
        held = there.leases.found["his", NAME]
        held["metadata"]["resourceVersion"] = "99"
        held["spec"] = {"holderIdentity": "x" * 100_000, "leaseDurationSeconds": 2**31 - 1}
        await asyncio.sleep(DEADLINE_SECONDS)
        assert leases.is_held == {"his": False, "theirs": True}
        assert leases.complaint == "", "it is ready: it works for the others"
        await asyncio.sleep(MAX_SECONDS + SOON)
        assert leases.is_held == {"his": True, "theirs": True}, "what he says of its duration is not believed for ever"

    party(story)


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None}, {"leaseTransitions": 2**31 - 1}])
def test_a_lease_that_nobody_holds_is_taken(spec: Any) -> None:
    async def story(there: Party) -> None:
        metadata = {"name": NAME, "namespace": HOME, "resourceVersion": "7"}
        there.leases.found[HOME, NAME] = {"metadata": metadata, "spec": spec}
        leases, _, _ = there.joins("one")
        await asyncio.sleep(SOON)
        assert leases.acts("n")
        assert 0 <= there.leases.spec()["leaseTransitions"] < 2**31

    party(story)


def test_what_does_not_hold_the_lease_writes_nothing() -> None:
    async def work() -> None:
        anything: Any = None
        api = ApiServer(anything)
        api.acts = lambda namespace: False
        whole = {"metadata": {"name": "n", "namespace": "n"}}
        writes: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: api.create(kinds.POD, whole),
            lambda: api.apply(kinds.SERVICE, whole),
            lambda: api.patch_status(kinds.JOB, "n", "n", {}),
            lambda: api.terminate(kinds.POD, "n", "n", "u", {}),
            lambda: api.delete(kinds.POD, "n", "n", "u"),
        ]
        for write in writes:
            with pytest.raises(Unavailable, match="the Lease is not held"):
                await write()
        assert api.requests == 0

    asyncio.run(work())


def test_a_lease_is_held_unless_that_is_switched_off() -> None:
    given = [f"--{role}-image=i" for role in ("operator", "trainer", "evaluator")]
    plain, again, off = parse(given), parse(given), parse([*given, "--no-lease"])
    assert plain.identity != again.identity, "two processes are two operators"
    assert (off.identity, plain.lease_namespace) == ("", HOME)
    assert parse([*given, "--identity=pod"]).identity == "pod"
