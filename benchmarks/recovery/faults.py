"""The faults, each as a generator: it disturbs the job, then waits for it to be complete again.

A fault yields a `Wait` for each recovery to be measured, and continues when that has happened or timed out. Random
values come from the scene's generator, which is seeded by fault, round and shot, so that all sides get the same stalls
and the same victims.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from benchmarks.recovery.sides import LEAVE_SECONDS, Scripted, Side
from benchmarks.recovery.surroundings import kill

MIN_STALL, MAX_STALL = 1.0, 30.0
SUPERVISOR_SECONDS = 1.0
"""Time in which a supervisor (Kubernetes, systemd) restarts a dead process."""
KILLED, STALLED, ORPHANED = 1.0, 5.0, 10.0
"""Seconds that a group must train to count as recovered. After a stall, consequences may come seconds later; a rank
whose agent is dead may train on until the new agent disturbs its group."""
MOMENT_SECONDS = 30.0
"""Timeout for the moment that a fault waits for."""


@dataclass(frozen=True)
class Wait:
    """Recovery to be measured."""

    name: str
    since: float
    """Start of the recovery time, in seconds since the epoch."""
    world: int
    steady: float = KILLED


@dataclass
class Scene:
    """Side, random values and record of a fault."""

    side: Side
    random: Random
    shot: int
    longest_stall: float = MAX_STALL
    facts: dict[str, float | str] = field(default_factory=dict)
    """Details of the fault, for the record."""

    def victim(self) -> str:
        """The victim; the replicas take turns."""
        return self.side.replicas[self.shot % len(self.side.replicas)]

    def other(self) -> str:
        """A replica that is not the victim."""
        return self.side.replicas[(self.shot + 1) % len(self.side.replicas)]

    def kill_worker(self, replica: str, number: int = signal.SIGKILL) -> float:
        """Signal a replica's first rank; returns the time."""
        ranks = self.side.ranks(replica)
        fault_at = time.time()
        self.facts[f"{signal.Signals(number).name} {replica}"] = round(fault_at, 3)
        for rank in ranks[:1]:
            kill(rank, number)
        return fault_at

    def stall(self) -> float:
        """Choose the length of a stall in seconds: short ones are as likely as long ones."""
        length: float = MIN_STALL * (self.longest_stall / MIN_STALL) ** self.random.random()
        self.facts["stallSeconds"] = round(length, 2)
        return length


Story = Iterator[Wait]


def worker_kill(scene: Scene) -> Story:
    """A training process dies."""
    yield Wait("recovery", scene.kill_worker(scene.victim()), scene.side.full)


def agent_kill(scene: Scene) -> Story:
    """An agent dies, its training process does not; a supervisor starts another agent."""
    victim, fault_at = scene.victim(), time.time()
    scene.side.kill_agent(victim)
    time.sleep(SUPERVISOR_SECONDS)
    scene.side.start_replica(victim)
    yield Wait("recovery", fault_at, scene.side.full, ORPHANED)


def node_loss(scene: Scene) -> Story:
    """A node vanishes and returns."""
    victim, fault_at = scene.victim(), time.time()
    scene.side.kill_node(victim)
    yield Wait("the rest goes on", fault_at, scene.side.full - 1)
    time.sleep(scene.random.random())
    fault_at = time.time()
    scene.side.start_replica(victim)
    yield Wait("full size after return", fault_at, scene.side.full)


def preemption(scene: Scene) -> Story:
    """A replica is asked to leave, by SIGTERM as Kubernetes does it, and returns."""
    victim, fault_at = scene.victim(), time.time()
    agent = scene.side.agents.pop(victim)
    agent.terminate()
    yield Wait("the rest goes on", fault_at, scene.side.full - 1)
    try:
        scene.facts["exitCode"] = agent.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        scene.facts["exitCode"] = "did not leave"
        agent.kill()
        agent.wait()
    fault_at = time.time()
    scene.side.start_replica(victim)
    yield Wait("full size after return", fault_at, scene.side.full)


def coordinator_kill(scene: Scene) -> Story:
    """The authority on membership dies; a supervisor restarts it."""
    fault_at = time.time()
    scene.side.kill_authority()
    time.sleep(SUPERVISOR_SECONDS)
    scene.side.replace_authority()
    yield Wait("recovery", fault_at, scene.side.full, STALLED)


def stop(scene: Scene) -> Story:
    """A training process is stopped and hangs without dying."""
    yield Wait("recovery", scene.kill_worker(scene.victim(), signal.SIGSTOP), scene.side.full)


def stall_member(scene: Scene) -> Story:
    """The network drops all packets of one member for some seconds."""
    return _stall(scene, scene.victim())


def stall_coordinator(scene: Scene) -> Story:
    """The network drops all packets of the authority on membership for some seconds."""
    return _stall(scene, scene.side.authority_place)


def stall_member_kill(scene: Scene) -> Story:
    """The network drops all packets of one member, and a training process of the other member dies meanwhile."""
    return _stall(scene, scene.victim(), scene.other())


def stall_coordinator_kill(scene: Scene) -> Story:
    """The network drops all packets of the authority on membership, and a training process dies meanwhile."""
    return _stall(scene, scene.side.authority_place, scene.side.replicas[-1 - scene.shot % len(scene.side.replicas)])


def _stall(scene: Scene, place: str, killed: str | None = None) -> Story:
    length = scene.stall()
    before = length * scene.random.random()
    fault_at = time.time()
    scene.side.network.cut(place)
    if killed is None:
        time.sleep(length)
    else:
        time.sleep(before)
        scene.kill_worker(killed)
        time.sleep(max(0.0, fault_at + length - time.time()))
    scene.side.network.heal(place)
    yield Wait("after the network heals", time.time(), scene.side.full, STALLED)


def double_kill(scene: Scene) -> Story:
    """Two training processes of different replicas die within a second."""
    pause = 0.1 + 0.9 * scene.random.random()
    scene.facts["pauseSeconds"] = round(pause, 2)
    first = time.time()
    scene.kill_worker(scene.victim())
    time.sleep(max(0.0, first + pause - time.time()))
    yield Wait("recovery", scene.kill_worker(scene.other()), scene.side.full)


def kill_in_rendezvous(scene: Scene) -> Story:
    """A training process dies, and the other node vanishes while the group forms again; it returns."""
    pause = 0.05 + 0.45 * scene.random.random()
    scene.facts["pauseSeconds"] = round(pause, 2)
    first = scene.kill_worker(scene.victim())
    time.sleep(max(0.0, first + pause - time.time()))
    fault_at = time.time()
    scene.side.kill_node(scene.other())
    time.sleep(max(0.0, fault_at + SUPERVISOR_SECONDS - time.time()))
    scene.side.start_replica(scene.other())
    yield Wait("recovery", fault_at, scene.side.full)


def kill_in_save(scene: Scene) -> Story:
    """The writer dies in the middle of a checkpoint."""
    fault_at = _tripped(scene, "save")
    yield Wait("recovery", fault_at, scene.side.full)


def kill_in_restore(scene: Scene) -> Story:
    """A training process dies, and the reader of the checkpoint dies in the middle of reading it."""
    assert isinstance(scene.side, Scripted)
    scene.side.trip("restore")
    scene.kill_worker(scene.victim())
    yield Wait("recovery", _awaited(scene, "tripped-restore", time.time() - 1.0), scene.side.full)


def _tripped(scene: Scene, moment: str) -> float:
    assert isinstance(scene.side, Scripted)
    fault_at = time.time()
    scene.side.trip(moment)
    return _awaited(scene, f"tripped-{moment}", fault_at)


def _awaited(scene: Scene, event: str, since: float) -> float:
    """Wait for an event; returns its time. If it does not come, the fault did not happen, and the recovery before it
    is awaited."""
    deadline = time.monotonic() + MOMENT_SECONDS
    while time.monotonic() < deadline:
        times = [line.time for line in scene.side.lines() if line.event == event and line.time >= since]
        if times:
            return times[-1]
        time.sleep(0.05)
    scene.facts["missed"] = event
    return since


@dataclass(frozen=True)
class Fault:
    """A fault by name."""

    story: Callable[[Scene], Story]
    scripted: bool = False
    """Whether it needs a trip wire, and so a side that runs the script."""
    hangs: bool = False
    """Whether it is only noticed after the side's `hang_seconds`."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.story.__name__.replace("_", "-")

    @property
    def what(self) -> str:
        """Description, one sentence."""
        return (self.story.__doc__ or "").strip()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(worker_kill),
        Fault(node_loss),
        Fault(preemption),
        Fault(coordinator_kill),
        Fault(stall_member),
        Fault(stall_member_kill),
        Fault(stall_coordinator),
        Fault(stall_coordinator_kill),
        Fault(agent_kill),
        Fault(stop, hangs=True),
        Fault(double_kill),
        Fault(kill_in_rendezvous),
        Fault(kill_in_save, scripted=True),
        Fault(kill_in_restore, scripted=True),
    )
}
