"""An API server that is overloaded: it answers late, out of order, with 429 or 5xx, and does some of what it has not
answered."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem_operator import kinds, names
from tandem_operator.api import Object, RequestRefused, Unavailable
from tandem_operator.kinds import Kind
from tests.support.worlds.operator_world import KEY, LOOP, NAME, World, live

ANSWERS = st.sampled_from(["done", "done", "late", "429", "done, and 500", "timed out, and done later"])


@dataclass
class Overload:
    """What becomes of creations, one after the other; all are done at once after the last of these."""

    answers: list[str]
    in_flight: int = 0
    pending: list[tuple[Kind, Object]] = field(default_factory=list)
    """What is done later."""

    def next(self) -> str:
        return self.answers.pop(0) if self.answers else "done"


@contextmanager
def overloaded(world: World, answers: list[str], pods_alone: bool = True) -> Iterator[Overload]:
    """Have the world's API server answer creations so."""
    overload, create = Overload(answers), world.cluster.create

    async def answer(kind: Kind, manifest: Object) -> Object:
        # A Secret that is there already may be of an earlier job, whose end is waited for.
        if kind in (kinds.EVENT, kinds.SECRET) or (pods_alone and kind is not kinds.POD):
            return await create(kind, manifest)
        overload.in_flight += 1
        try:
            match overload.next():
                case "late":
                    # Those after it are answered before it.
                    await asyncio.sleep(0.01)
                case "429":
                    raise Unavailable("429 Too Many Requests")
                case "done, and 500":
                    await create(kind, manifest)
                    raise Unavailable("500 the request may or may not have completed")
                case "timed out, and done later":
                    overload.pending.append((kind, manifest))
                    raise Unavailable("TimeoutError")
            return await create(kind, manifest)
        finally:
            overload.in_flight -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.cluster, "create", answer)
        yield overload


def look(world: World) -> None:
    try:
        world.look()
    except Unavailable:
        pass


def finish(world: World, overload: Overload) -> None:
    """What timed out is done now, unless the name is taken by then."""
    for kind, manifest in overload.pending:
        try:
            LOOP.run(type(world.cluster).create(world.cluster, kind, manifest))
        except RequestRefused:
            continue
    overload.pending.clear()


def of_one_place(world: World) -> list[tuple[str, str]]:
    """Places that have more than one pod that is at work, or will be."""
    pods = [pod["metadata"] for pod in world.cluster.pods() if "deletionTimestamp" not in pod["metadata"]]
    places = Counter((pod["labels"][names.ROLE], pod["labels"][names.INDEX]) for pod in pods)
    return [place for place, count in places.items() if count > 1]


def test_no_write_is_in_flight_when_a_look_ends() -> None:
    world = World()
    world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": 4}})
    world.relist()
    with overloaded(world, ["done", "429", *["late"] * 8]) as overload:
        with pytest.raises(Unavailable):
            world.look()
        assert overload.in_flight == 0
        assert len(world.cluster.pods()) == 5


@pytest.mark.parametrize("answer", ["done, and 500", "timed out, and done later"])
def test_a_pod_whose_creation_was_not_answered_is_tried_again_under_its_name(answer: str) -> None:
    """The watch has not told of it when the next look comes, and it may be made after that."""
    world = World()
    with overloaded(world, [answer] * 4) as overload:
        look(world)
        finish(world, overload)
        for _ in range(3):
            look(world)
            assert of_one_place(world) == []
    world.settle()
    assert (live(world, names.WORKER), of_one_place(world)) == ([0, 1], [])


WRITES = ("create", "apply", "patch_status", "delete", "terminate")


@contextmanager
def storm(world: World, chance: random.Random) -> Iterator[list[str]]:
    """Have the API server refuse a quarter of all writes with 429, and answer another quarter, which it does, with 500.
    Yields the pods that are made."""
    made: list[str] = []

    def disturbed(verb: str) -> Callable[..., Awaitable[Any]]:
        write = getattr(world.cluster, verb)

        async def answer(kind: Kind, *rest: Any, **more: Any) -> Any:
            # A Secret that is there already may be of an earlier job, whose end is waited for.
            fate = "done" if kind in (kinds.EVENT, kinds.SECRET) else chance.choice(("done", "done", "429", "500"))
            if fate == "429":
                raise Unavailable("429 Too Many Requests")
            result = await write(kind, *rest, **more)
            if (verb, kind) == ("create", kinds.POD):
                made.append(result["metadata"]["name"])
            if fate == "500":
                raise Unavailable("500 the request may or may not have completed")
            return result

        return answer

    with pytest.MonkeyPatch.context() as patch:
        for verb in WRITES:
            patch.setattr(world.cluster, verb, disturbed(verb))
        yield made


@pytest.mark.parametrize("seed", range(20))
def test_as_many_pods_are_made_in_a_storm_as_are_wanted(seed: int) -> None:
    chance, world = random.Random(seed), World()
    with storm(world, chance) as made:
        for _ in range(40):
            look(world)
            if chance.random() < 0.5:
                world.relist()
            world.cluster.tick()
            assert of_one_place(world) == []
    world.settle()
    pods = [pod["metadata"]["name"] for pod in world.cluster.pods()]
    assert sorted(made) == sorted(pods)
    assert (live(world, names.WORKER), len(pods)) == ([0, 1], 4)
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"


STEPS = st.one_of(
    st.tuples(st.just("look"), st.lists(ANSWERS, max_size=8)),
    st.tuples(st.sampled_from(["finish", "list", "tick"]), st.just([])),
    st.tuples(st.just("tell"), st.lists(st.integers(0, 30), max_size=10)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=15))
def test_a_place_never_has_two_pods_at_work(steps: list[tuple[str, list]]) -> None:
    world = World()
    with overloaded(world, [], pods_alone=False) as overload:
        for what, more in steps:
            overload.answers = more if what == "look" else []
            match what:
                case "look":
                    look(world)
                case "finish":
                    finish(world, overload)
                case "list":
                    world.relist()
                case "tell":
                    world.tell(more)
                case "tick":
                    world.cluster.tick()
            assert overload.in_flight == 0
            assert of_one_place(world) == []
        finish(world, overload)
    world.settle()
    assert live(world, names.WORKER) == [0, 1]
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"
