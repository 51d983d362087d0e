"""Membership under everything that can happen in any order: agents, coordinator and network as hypothesis likes.

The agents follow the protocol as the real ones do, but messages and answers may be lost, agents may die, be cut off, be
replaced, have to go, be slow to stop or to save, hang, and the coordinator may be killed and started again with what it
had recorded.
"""

import inspect
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.wire.protocol import Membership, Sync
from tandem_coordinator.group_state import (
    Close,
    Disconnected,
    Event,
    FailJob,
    Hung,
    Open,
    Retarget,
    Rules,
    RunEnded,
    State,
    Synced,
    Tick,
)
from tandem_coordinator.membership import answer, initial_state, step
from tandem_coordinator.state_store import RecordedState

RULES = Rules(
    minimum=2, maximum=4, lost_after=3.0, grow_cooldown=5.0, grow_after=15.0, max_restarts=3, restart_window=60.0
)
NAMES = ("worker-0", "worker-1", "worker-2", "worker-3", "worker-4")


@dataclass
class Agent:
    """One agent process, as tandem_trainer.agent.heartbeat behaves."""

    replica: str
    incarnation: str
    port: int = 4000
    state: str = "joining"
    reason: str = ""
    generation: int | None = None
    membership: Membership | None = None
    stopped: bool = True
    """Whether its ranks are stopped."""
    finished: bool = False
    cut_off: bool = False
    must_go: bool = False

    def sync(self) -> Sync:
        return Sync(
            replica=self.replica,
            incarnation=self.incarnation,
            address="10.0.0.1",
            port=self.port,
            processes=1,
            state=self.state,  # type: ignore[arg-type]
            reason=self.reason,  # type: ignore[arg-type]
            generation=self.generation,
            membership=self.membership if self.state == "running" else None,
            leaving=self.must_go and self.state == "running",
        )


class World(RuleBasedStateMachine):
    """Agents, one coordinator at a time, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.agents: dict[str, Agent] = {}
        self.born = 0
        self.recorded = 0
        self.durable: tuple[int, Membership | None, int] = (0, None, 0)
        self.opened: list[int] = []
        self.open: set[int] = set()
        self.over = False
        self.training = self.can_save = False
        self.checkpoint = 0
        self.asked_to_save: set[int] = set()
        self.begun: set[tuple[int, str]] = set()
        """Generations and incarnations whose ranks were started."""
        self.closings: Counter[str] = Counter()

    @initialize(wished=st.integers(2, 4), there=st.integers(0, 4), apart=st.integers(1, 2))
    def begin(self, wished: int, there: int, apart: int) -> None:
        self.target = wished
        self.rules = replace(RULES, multiple=apart)
        self.state: State = initial_state(self.rules, wished, self.now)
        for name in NAMES[:there]:
            self.an_agent_starts(name)
        self.time_passes(3.5)

    # What happens

    def tick(self) -> None:
        latest = self.state.latest
        # Nobody makes a step before the ranks of all members have started.
        all_begun = latest is not None and all(
            (latest.generation, member.incarnation) in self.begun for member in latest.members
        )
        self.tell(Tick(checkpoint=self.checkpoint, training=self.training and all_begun, can_save=self.can_save))

    def tell(self, event: Event) -> None:
        saving = self.state.saving
        self.state, actions = step(self.state, event, self.now)
        for action in actions:
            if isinstance(action, Open):
                number = action.membership.generation
                if not action.adopted:
                    assert number > max(self.opened, default=0), "numbers strictly increase, over all coordinators"
                    assert not self.open, "a generation is closed before the next one is opened"
                    self.opened.append(number)
                    assert RULES.minimum <= len(action.membership.members) <= self.state.target
                    assert len(action.membership.members) % self.rules.multiple == 0, "pipelines are whole"
                self.open = {number}
            elif isinstance(action, Close):
                assert action.generation in self.open
                self.open.discard(action.generation)
                saved = saving is not None and action.cause.detail == saving.cause.detail
                self.closings[f"{'saved' if saved else 'closed'} {action.cause.reason}"] += 1
                if saved:
                    at_work = [agent for agent in self.agents.values() if agent.state == "running"]
                    assert action.generation not in {agent.generation for agent in at_work}, "somebody still saves"
            elif isinstance(action, FailJob):
                assert self.state.failures > RULES.max_restarts
                self.over = True
                self.state, _ = step(self.state, RunEnded(action.cause), self.now)

    def talk(self, agent: Agent, heard: bool = True) -> None:
        """The agent speaks; `heard` says whether the answer reaches it."""
        sync = agent.sync()
        self.tell(Synced(sync))
        told = answer(self.state, sync, self.recorded)
        if not heard:
            return
        if told.order == "end":
            assert self.over or told.left_out or (agent.replica, agent.incarnation) in self.state.retired
            agent.finished = True
        elif told.order == "run" and told.membership is not None:
            assert agent.state == "joining"
            assert agent.incarnation in [member.incarnation for member in told.membership.members]
            assert told.membership.generation > (agent.generation or 0), "nobody is given a generation twice"
            assert told.membership.generation <= self.recorded, "nobody learns of what is not durable"
            agent.state, agent.reason, agent.stopped = "running", "", False
            agent.generation, agent.membership = told.membership.generation, told.membership
            self.begun.add((told.membership.generation, agent.incarnation))
        elif told.order == "save":
            assert agent.state == "running"
            assert agent.generation in self.open
            self.asked_to_save.add(self.state.number)
        elif told.order == "rejoin":
            assert agent.state == "running"
            assert agent.generation not in self.open or self.state.saving is None, "an abort would ruin the save"
            agent.state, agent.reason = "stopping", ""

    def record(self) -> None:
        self.durable = (self.state.number, self.state.latest, self.state.failures)
        self.recorded = self.state.number

    def pick(self, index: int) -> Agent:
        return self.agents[sorted(self.agents)[index % len(self.agents)]]

    # Rules

    @rule(name=st.sampled_from(NAMES))
    def an_agent_starts(self, name: str) -> None:
        """Also under the name of one that still lives: it is replaced."""
        self.born += 1
        self.agents[name] = Agent(name, f"i{self.born}", port=4000 + self.born, reason="Started")
        self.talk(self.agents[name])

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9), heard=st.booleans())
    def an_agent_speaks(self, index: int, heard: bool) -> None:
        agent = self.pick(index)
        if agent.state != "stopping" and not agent.finished:
            self.talk(agent, heard)

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9))
    def ranks_stop_and_the_agent_joins(self, index: int) -> None:
        agent = self.pick(index)
        if agent.state == "stopping":
            self.come_back(agent)
            if not agent.must_go:
                self.talk(agent)

    def come_back(self, agent: Agent) -> None:
        """Its ranks have stopped: it wants to join, or goes if it has to."""
        if agent.must_go:
            self.tell(Synced(replace(agent, state="leaving", must_go=False).sync()))
            del self.agents[agent.replica]
            return
        self.born += 1
        agent.state, agent.reason, agent.stopped = "joining", "MembershipChanged", True
        agent.port = 4000 + self.born

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9), reason=st.sampled_from(["WorkerFailed", "MembershipChanged"]), heard=st.booleans())
    def a_worker_ends(self, index: int, reason: str, heard: bool) -> None:
        agent = self.pick(index)
        if agent.state == "running" and not agent.finished:
            agent.reason = reason
            self.talk(agent, heard)
            self.come_back(agent)
            agent.reason = reason

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9), heard=st.booleans())
    def an_agent_has_to_go(self, index: int, heard: bool) -> None:
        agent = self.pick(index)
        if agent.state == "running" and not agent.finished:
            agent.must_go = True
            self.talk(agent, heard)

    @precondition(lambda self: any(agent.generation in self.asked_to_save for agent in self.agents.values()))
    @rule(index=st.integers(0, 9), heard=st.booleans())
    def ranks_save_and_end(self, index: int, heard: bool) -> None:
        """They vote, so those end, too, whose agent has not been told yet."""
        agent = self.pick(index)
        if agent.state == "running" and agent.generation in self.asked_to_save and not agent.finished:
            self.save_and_end(agent, heard)

    @rule()
    def all_ranks_save_and_end(self) -> None:
        for agent in list(self.agents.values()):
            if agent.state == "running" and agent.generation in self.asked_to_save and not agent.finished:
                self.save_and_end(agent)

    def save_and_end(self, agent: Agent, heard: bool = True) -> None:
        agent.reason = "MembershipChanged"
        self.talk(agent, heard)
        agent.state = "stopping"
        self.come_back(agent)
        if not agent.must_go:
            self.talk(agent, heard)

    @rule(training=st.booleans(), can_save=st.booleans())
    def ranks_begin_or_cease_to_step(self, training: bool, can_save: bool) -> None:
        self.training, self.can_save = training, can_save

    @rule()
    def a_checkpoint_is_committed(self) -> None:
        self.checkpoint += 100

    @rule(back=st.integers(0, 1))
    def the_group_hangs(self, back: int) -> None:
        """Also an older one: the news may be late."""
        closed = self.state.open and back == 0
        self.tell(Hung(self.state.number - back, "nobody makes a step"))
        assert not (closed and self.state.open)

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9), noticed=st.booleans())
    def an_agent_dies(self, index: int, noticed: bool) -> None:
        agent = self.pick(index)
        del self.agents[agent.replica]
        if noticed:
            self.tell(Disconnected(agent.replica, agent.incarnation))

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9))
    def an_agent_leaves(self, index: int) -> None:
        agent = self.pick(index)
        self.tell(Synced(replace(agent, state="leaving", reason="").sync()))
        del self.agents[agent.replica]

    @precondition(lambda self: self.agents)
    @rule(index=st.integers(0, 9))
    def the_network_cuts_or_heals(self, index: int) -> None:
        agent = self.pick(index)
        agent.cut_off = not agent.cut_off

    @rule()
    def all_who_were_told_stop_and_join(self) -> None:
        for agent in list(self.agents.values()):
            if agent.state == "stopping":
                self.come_back(agent)

    @rule()
    def the_network_heals(self) -> None:
        for agent in self.agents.values():
            agent.cut_off = False

    @rule(seconds=st.sampled_from([0.05, 0.2, 0.5, 1.0, 3.5, 12.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        """Everybody who can heartbeats, and stays in the state they are in."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            for agent in list(self.agents.values()):
                if not agent.cut_off and not agent.finished and agent.state != "stopping":
                    self.talk(agent)
                elif agent.state == "stopping" and not agent.cut_off:
                    self.tell(Synced(replace(agent, state="running").sync()))
            self.tick()
            self.record()

    @rule()
    def a_tick(self) -> None:
        self.tick()

    @rule()
    def the_disk_is_written(self) -> None:
        self.record()

    @rule(seconds=st.sampled_from([5.0, 60.0]))
    def the_coordinator_stands_still(self, seconds: float) -> None:
        lived = set(self.state.agents)
        self.now += seconds
        self.tick()
        assert set(self.state.agents) >= lived or not self.state.open, "its own absence is nobody's death"

    @rule(wished=st.integers(0, 9))
    def the_target_changes(self, wished: int) -> None:
        self.tell(Retarget(wished))
        assert RULES.minimum <= self.state.target <= RULES.maximum
        assert self.state.target % self.rules.multiple == 0

    @rule()
    def the_coordinator_is_killed_and_started_again(self) -> None:
        number, latest, failures = self.durable
        # A number that was not durable was given to nobody: the next coordinator may use it.
        self.opened = [known for known in self.opened if known <= number]
        self.open = set()
        if not self.over:
            recorded = RecordedState(generation=number, membership=latest, failures=failures)
            self.state = initial_state(self.rules, self.target, self.now, recorded)
            self.recorded = number

    # What must always hold

    @invariant()
    def at_most_one_generation_is_open(self) -> None:
        if hasattr(self, "state"):
            assert len(self.open) <= 1
            assert self.over or self.open == ({self.state.number} if self.state.open else set())

    @invariant()
    def the_budget_is_kept(self) -> None:
        if hasattr(self, "state"):
            assert self.over or self.state.failures <= RULES.max_restarts

    def teardown(self) -> None:
        """Whatever happened: when the world is calm again, everybody who wishes to join trains, or knows why not."""
        if not hasattr(self, "state"):
            return
        for agent in self.agents.values():
            agent.cut_off = False
        self.training = True
        deadline = self.now + 60.0
        while self.now < deadline:
            for agent in list(self.agents.values()):
                if agent.state == "stopping":
                    self.come_back(agent)
                elif agent.state == "running" and agent.generation in self.asked_to_save:
                    self.save_and_end(agent)
            self.time_passes(0.25)
        living = [agent for agent in self.agents.values() if not agent.finished]
        if self.over:
            assert not living
            return
        running = [agent for agent in living if agent.state == "running"]
        if len(living) >= RULES.minimum:
            assert self.state.open
            assert len(running) == min(self.rules.largest_usable(len(living)), self.state.target)
            assert {agent.generation for agent in running} == {self.state.number}
            assert self.state.saving is None
            assert not any(agent.must_go for agent in running)


World.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorlds = World.TestCase
"""What hypothesis finds it makes small. The walks below go where things happen: mostly a group that trains."""

WALKS = [range(60), pytest.param(range(60, 600), marks=pytest.mark.full("coordinator"))]
"""Seeds. The first ones come by every reason for a new generation; more of them find what is rare."""
EVENTS: dict[str, int] = {
    "an_agent_starts": 6,
    "an_agent_speaks": 6,
    "ranks_stop_and_the_agent_joins": 10,
    "all_who_were_told_stop_and_join": 25,
    "a_worker_ends": 4,
    "an_agent_has_to_go": 4,
    "ranks_save_and_end": 15,
    "all_ranks_save_and_end": 15,
    "ranks_begin_or_cease_to_step": 4,
    "a_checkpoint_is_committed": 3,
    "the_group_hangs": 1,
    "an_agent_dies": 2,
    "an_agent_leaves": 1,
    "the_network_cuts_or_heals": 2,
    "the_network_heals": 6,
    "time_passes": 40,
    "a_tick": 20,
    "the_disk_is_written": 10,
    "the_coordinator_stands_still": 1,
    "the_target_changes": 6,
    "the_coordinator_is_killed_and_started_again": 1,
}
"""How often each happens, relative to the others."""


def walk(seed: int) -> World:
    """One random history; returns the world at its end."""
    chance = random.Random(seed)
    world = World()
    world.begin(chance.randint(2, 4), chance.randint(2, 4), apart=1 + seed % 2)
    world.training, world.can_save = True, chance.random() < 0.7
    for _ in range(120):
        (name,) = chance.choices(list(EVENTS), EVENTS.values())
        wanted = inspect.signature(getattr(world, name)).parameters
        if "index" in wanted and not world.agents:
            continue
        arguments = {
            "name": chance.choice(
                [name for name in NAMES if name not in world.agents or chance.random() < 0.02] or NAMES
            ),
            "index": chance.randrange(60),
            "heard": chance.random() < 0.8,
            "noticed": chance.random() < 0.5,
            "reason": chance.choice(["WorkerFailed", "MembershipChanged"]),
            "training": chance.random() < 0.8,
            "can_save": chance.random() < 0.7,
            "back": chance.randint(0, 1),
            "seconds": chance.choice([5.0, 60.0] if "stands" in name else [0.2, 0.5, 1.0, 3.5, 5.5, 5.5]),
            "wished": chance.randint(1, 5),
        }
        if name == "time_passes" and chance.random() < 0.02:
            arguments["seconds"] = 31.0
        getattr(world, name)(**{key: arguments[key] for key in wanted})
        world.at_most_one_generation_is_open()
        world.the_budget_is_kept()
    return world


@pytest.mark.parametrize("seeds", WALKS, ids=["some", "many"])
def test_many_histories_of_a_group_that_trains(seeds: range) -> None:
    closed: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = walk(seed)
            world.teardown()
        except AssertionError as error:
            raise AssertionError(f"walk {seed}: {error}") from error
        closed += world.closings
    for reason in (
        "closed WorkerFailed",
        "closed PeerLost",
        "closed MemberLost",
        "closed MemberLeft",
        "closed Hung",
        "closed Preempted",
        "saved Preempted",
        "saved MemberJoined",
        "saved TargetChanged",
        "closed MemberJoined",
        "closed TargetChanged",
    ):
        assert closed[reason] >= len(seeds) / 30, f"the walks hardly come by {reason}: {closed}"
