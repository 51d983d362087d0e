"""The end of a script: its ranks end with exit code 0 and its agents leave, in every order, with everything that may
happen to an agent whose ranks have finished, and to the coordinator."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest

from tandem.rundir.layout import FinishedMember
from tandem.wire.protocol import Sync
from tandem_coordinator.group_state import (
    Close,
    Complete,
    Disconnected,
    Event,
    MemberFinished,
    RunEnded,
    State,
    Synced,
    Tick,
)
from tandem_coordinator.membership import answer, initial_state, step
from tandem_coordinator.snapshots import _are_all_running
from tandem_coordinator.state_store import RecordedState
from tests.support.worlds.membership_job import RULES, message

AGENTS = ("worker-0", "worker-1", "worker-2")
FATES = ("leaves", "dies", "is replaced")
"""Of an agent whose ranks have finished: it leaves in good order; it dies, or its node is lost; it dies, and another
process takes its name."""
SCRIPTS = replace(RULES, completes_on_exit=True)


class End:
    """A group whose ranks end. The first agent serves the store, and stays until it is told to end."""

    def __init__(self) -> None:
        self.now, self.closed, self.completed = 1000.0, list[str](), 0
        self.living = dict.fromkeys(AGENTS, "a")
        self.finished: set[str] = set()
        self.ended: set[str] = set()
        self.state: State = initial_state(SCRIPTS, len(AGENTS), self.now)
        for replica in AGENTS:
            self.tell(Synced(message(replica, "joining", incarnation="a")))
        self.tell(Tick())
        assert self.state.open
        self.number = self.state.number

    def tell(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self.now)
        for action in actions:
            if isinstance(action, Close) and action.cause.reason != "Completed":
                self.closed.append(action.cause.reason)
            elif isinstance(action, Complete):
                self.completed += 1
                self.tell(RunEnded(action.cause))

    def says(self, replica: str, state: str = "running") -> str:
        """What it is told."""
        sync = self.words(replica, state)
        self.tell(Synced(sync))
        told = answer(self.state, sync, self.state.number)
        if told.order == "end":
            self.ended.add(replica)
        if replica in self.finished and told.order == "run":
            assert told.finished, "it stays for as long as it is known that its ranks have finished"
        return told.order

    def words(self, replica: str, state: str) -> Sync:
        finished = True if replica in self.finished else None
        return message(replica, state, incarnation=self.living[replica], generation=self.number, finished=finished)

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for replica, incarnation in self.living.items():
                if incarnation == "b":
                    self.tell(Synced(message(replica, "joining", incarnation="b")))
                else:
                    self.says(replica)
            self.tell(Tick())

    def ranks_end(self, replica: str) -> None:
        self.finished.add(replica)
        self.says(replica)

    def departs(self, replica: str, fate: str) -> None:
        if replica in self.ended or fate == "leaves":
            self.says(replica, "leaving")
            del self.living[replica]
        elif fate == "dies":
            self.tell(Disconnected(replica, self.living.pop(replica)))
        else:
            self.living[replica] = "b"
            self.finished.discard(replica)
            self.tell(Synced(message(replica, "joining", incarnation="b")))

    def coordinator_restarts(self) -> None:
        """With what it has recorded."""
        recorded = RecordedState(
            generation=self.state.number, membership=self.state.latest, finished=list(self.state.finished)
        )
        if self.state.end is None:
            self.state = initial_state(SCRIPTS, len(AGENTS), self.now, recorded)


def orders() -> Iterator[tuple[str, ...]]:
    """All orders in which the ranks of three agents end and the agents go after that."""
    events = [*AGENTS, *AGENTS]
    yield from sorted(set(permutations(events)))


@pytest.mark.parametrize("fates", [*product(FATES, repeat=len(AGENTS))], ids=" ".join)
def test_in_whatever_order_agents_go_whose_ranks_have_finished_the_job_is_complete(fates: tuple[str, ...]) -> None:
    for index, order in enumerate(orders()):
        end = End()
        for number, replica in enumerate(order):
            if number == index % (len(order) + 1):
                end.coordinator_restarts()
                end.passes(1.0)
            if replica not in order[:number]:
                end.ranks_end(replica)
            elif replica in end.living:
                end.departs(replica, fates[AGENTS.index(replica)])
            # Long enough that who is silent is lost.
            end.passes(SCRIPTS.lost_after + 1.0)
        assert (end.closed, end.completed) == ([], 1), order
        assert end.state.end.reason == "Completed"


def record_of(end: End, replica: str, generation: int, incarnation: str = "a") -> MemberFinished:
    return MemberFinished(FinishedMember(generation, replica, incarnation))


@pytest.mark.parametrize("restarts", [False, True])
def test_what_agents_have_recorded_counts_as_what_they_say(restarts: bool) -> None:
    """They cannot reach this coordinator, or there was none when they left."""
    end = End()
    if restarts:
        end.coordinator_restarts()
    for replica in AGENTS[:2]:
        del end.living[replica]
        end.tell(record_of(end, replica, end.number))
    end.passes(2 * SCRIPTS.lost_after)
    assert (end.closed, end.completed) == ([], 0)
    assert end.state.open
    end.ranks_end(AGENTS[2])
    assert end.completed == 1


def test_a_record_of_another_generation_or_process_or_of_a_task_says_nothing() -> None:
    end = End()
    end.tell(record_of(end, AGENTS[0], end.number - 1))
    end.tell(record_of(end, AGENTS[0], end.number, "b"))
    assert not end.state.finished
    end.state = replace(end.state, rules=RULES)
    end.tell(record_of(end, AGENTS[0], end.number))
    assert not end.state.finished


def test_one_that_dies_before_its_ranks_have_finished_has_the_script_begin_again() -> None:
    end = End()
    end.ranks_end("worker-0")
    end.ranks_end("worker-1")
    end.departs("worker-2", "dies")
    end.passes(2 * SCRIPTS.lost_after)
    assert end.closed == ["MemberLost"]
    assert end.completed == 0
    assert end.says("worker-0") == "rejoin"


def test_a_group_of_a_built_in_task_is_complete_by_its_own_word_alone() -> None:
    end = End()
    end.state = replace(end.state, rules=RULES)
    for replica in AGENTS:
        sync = message(replica, "running", incarnation="a", generation=end.number, finished=True)
        end.tell(Synced(sync))
        assert answer(end.state, sync, end.number).finished is None
    assert end.completed == 0
    assert not end.state.finished


def test_a_script_of_which_some_have_finished_still_runs() -> None:
    end = End()
    end.ranks_end("worker-1")
    end.departs("worker-1", "leaves")
    end.passes(1.0)
    assert _are_all_running(end.state)
