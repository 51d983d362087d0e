"""Whatever is taken in, nothing ends: real objects with something changed by chance (`make soak-operator`)."""

import asyncio
import json
import logging
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem.wire.protocol import MAX_BRIEF_BYTES
from tandem.wire.status import GenerationView, Members, Snapshot, Status
from tandem_operator import kinds
from tandem_operator.coordinators import UnreadableAnswer, parse_snapshot
from tests.support.hostile import Operator, mutated, real_objects

FEW = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
VIEW = GenerationView(generation=1, world_size=2, members=["a", "b"], opened_at=1.0, reason="Started")
HEARD = Snapshot(
    job="j",
    time=1.0,
    status=Status(phase="Running", workers=Members(desired=2, ready=2), generation=1, world_size=2),
    generations=[VIEW],
)
VERSIONS = 6
real = cache(real_objects)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """An exception that is told with its stack takes longer than the object."""
    log = logging.getLogger("tandem.operator")
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(logging.NOTSET)


@FEW
@given(st.integers(0, 2**32), st.sampled_from(["ADDED", "MODIFIED", "DELETED"]))
@example(269, "ADDED")
def test_no_object_harms_the_others(seed: int, what: str) -> None:
    chance = Random(seed)
    bodies: list[tuple[Any, Any]] = []
    # Of a job anything may be written; of what it owns, the API server looks at most.
    job = next(one for one in real() if one[0] is kinds.JOB)
    for kind, body in [*chance.sample(real(), 3), *[job] * VERSIONS]:
        text = mutated(body, chance, large=0.02)
        try:
            bodies.append((kind, json.loads(text)))
        except RecursionError:
            continue

    async def work() -> None:
        operator = Operator()
        for kind, body in real():
            operator.take(kind, "ADDED", body)
        for kind, body in bodies:
            operator.take(kind, what, body)
            await operator.process(kind, body)
            await operator.goes_on()

    asyncio.run(work())


@FEW
@given(st.integers(0, 2**32))
def test_no_answer_of_a_coordinator_harms_the_others(seed: int) -> None:
    chance = Random(seed)
    text = mutated(HEARD.dump(), chance, large=0.02, most=MAX_BRIEF_BYTES)

    async def work() -> None:
        operator = Operator()
        for kind, body in real():
            operator.take(kind, "ADDED", body)
        try:
            operator.api.snapshot = parse_snapshot(text)
        except UnreadableAnswer:
            return
        for kind, body in real()[:1]:
            await operator.process(kind, body)
        await operator.goes_on()

    asyncio.run(work())
