"""Coordinator processes, agents that a test plays and runs of this machine, for every test that asks for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator_process import Agent, Coordinator
from tests.support.local_run import LocalRun
from tests.support.waiting import until


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path).start()
    yield made
    if made.process.poll() is None:
        made.kill()


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator without agents, for requests that change nothing."""
    made = Coordinator(tmp_path_factory.mktemp("idle")).start()
    yield made
    made.kill()


@pytest.fixture
def agents(coordinator: Coordinator) -> Iterator[tuple[Agent, Agent]]:
    pair = Agent(coordinator, "worker-0"), Agent(coordinator, "worker-1")
    until(lambda: all(agent.generation == 1 for agent in pair), "the first generation")
    yield pair
    for agent in pair:
        agent.vanish()


@pytest.fixture
def runs() -> Iterator[list[LocalRun]]:
    """Runs to be ended whatever the test does."""
    started: list[LocalRun] = []
    yield started
    for run in reversed(started):  # the later one of the same folder holds its lock
        run.close()
