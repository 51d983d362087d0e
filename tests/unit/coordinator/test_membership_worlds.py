"""Membership under everything that can happen in any order: agents, coordinator and network as hypothesis likes.

The agents follow the protocol as the real ones do, but messages and answers may be lost, agents may die, be cut off, be
replaced, have to go, be slow to stop or to save, hang, and the coordinator may be killed and started again with what it
had recorded.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from tests.support.worlds.membership_world import NAMES, World

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
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "an_agent_starts": ("name",),
    "an_agent_speaks": ("index", "heard"),
    "ranks_stop_and_the_agent_joins": ("index",),
    "a_worker_ends": ("index", "reason", "heard"),
    "an_agent_has_to_go": ("index", "heard"),
    "ranks_save_and_end": ("index", "heard"),
    "ranks_begin_or_cease_to_step": ("training", "can_save"),
    "the_group_hangs": ("back",),
    "an_agent_dies": ("index", "noticed"),
    "an_agent_leaves": ("index",),
    "the_network_cuts_or_heals": ("index",),
    "time_passes": ("seconds",),
    "the_coordinator_stands_still": ("seconds",),
    "the_target_changes": ("wished",),
}


def walk(seed: int) -> World:
    """One random history; returns the world at its end."""
    chance = random.Random(seed)
    world = World()
    world.begin(chance.randint(2, 4), chance.randint(2, 4), apart=1 + seed % 2)
    world.training, world.can_save = True, chance.random() < 0.7
    for _ in range(120):
        (name,) = chance.choices(list(EVENTS), EVENTS.values())
        wanted = ARGUMENTS.get(name, ())
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
