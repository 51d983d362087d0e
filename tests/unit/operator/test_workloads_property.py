"""Several queued jobs share a queue: whatever happens in whatever order, no worker runs without quota, no job holds a
part of its minimum, and in the end the queue is used as far as it goes, and shared evenly."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.worlds.played_kueue import NOT_READY, PREEMPTED
from tests.support.worlds.queued_jobs import PRIORITIES, QueuedJobs

NOMINAL = 6
JOBS = "abcd"
Step = tuple[Any, ...]

NUMBER = st.integers(0, 30)
JOB = st.sampled_from(JOBS)
SIZES = st.integers(1, 4), st.integers(0, 5), st.sampled_from(sorted(PRIORITIES))
OFTEN = [
    st.tuples(st.just("submit"), JOB, *SIZES),
    st.tuples(st.just("look"), JOB),
    st.tuples(st.just("tell"), JOB, st.one_of(st.just(-1), st.integers(0, 2**12))),
    st.tuples(st.just("tick"), JOB, st.one_of(st.none(), NUMBER)),
    st.tuples(st.just("round"), st.integers(1, 3)),
    st.tuples(st.just("cycle")),
    st.tuples(st.just("scale"), JOB, st.one_of(st.integers(1, 6), st.sampled_from([17, 40]))),
]
SELDOM = [
    st.tuples(st.just("minimum"), JOB, st.integers(1, 4)),
    st.tuples(st.just("requests"), JOB, st.integers(1, 3)),
    st.tuples(st.just("suspend"), JOB, st.booleans()),
    st.tuples(st.just("end"), JOB),
    st.tuples(st.just("evict"), NUMBER, st.sampled_from([NOT_READY, PREEMPTED])),
    st.tuples(st.just("deactivate"), NUMBER, st.sampled_from(["", "RequeuingLimitExceeded"])),
    st.tuples(st.just("activate")),
    st.tuples(st.just("disturb"), JOB, NUMBER, st.sampled_from(["fail", "lose", "delete"])),
    st.tuples(st.just("flavor"), st.booleans()),
    st.tuples(st.just("away"), st.booleans()),
    st.tuples(st.just("restart")),
]
STEPS = st.one_of(*OFTEN, *OFTEN, *OFTEN, *SELDOM)


def happen(world: QueuedJobs, step: Step) -> None:
    """One thing happens, if it can."""
    kueue = world.kueue
    match step:
        case "submit", name, least, more, priority if name not in world.jobs and not kueue.away:
            world.submit(name, least, least + more, priority)
            look(world, name)
        case "round", rounds:
            for _ in range(rounds):
                for name in world.jobs:
                    world.tell(name)
                    look(world, name)
                    world.tick(name)
                kueue.cycle()
        case ("cycle",):
            kueue.cycle()
        case "evict", number, reason if held := [
            c.name for c in kueue.claims.values() if c.admitted_at and not c.evicted
        ]:
            kueue.evict(held[number % len(held)], reason)
        case "deactivate", number, cause if kueue.workloads:
            kueue.set_active(sorted(kueue.workloads)[number % len(kueue.workloads)], active=False, cause=cause)
        case ("activate",):
            activate(world)
        case "flavor", there:
            world.flavor = there
        case "away", away:
            kueue.away = away
        case ("restart",):
            world.restart()
        case what, name, *more if name in world.jobs:
            of_job(world, what, name, *more)


def of_job(world: QueuedJobs, what: str, name: str, *more: Any) -> None:
    """Something happens to one job."""
    match what, *more:
        case ("look",):
            look(world, name)
        case "tell", which:
            world.tell(name, which)
        case "tick", index:
            world.tick(name, index)
        case "scale", replicas:
            world.edit(name, {"replicas": replicas})
        case "minimum", least:
            world.edit(name, {"minReplicas": least})
        case "requests", number:
            world.edit(name, {"resources": {"limits": {"cpu": number}}})
        case "suspend", flag:
            world.edit(name, suspend=flag)
        case "disturb", number, how:
            world.disturb(name, number, how)
        case ("end",):
            world.jobs[name].complete |= bool(world.jobs[name].using)


def activate(world: QueuedJobs) -> None:
    """Somebody activates all Workloads."""
    for name, body in list(world.kueue.workloads.items()):
        if not body["spec"]["active"]:
            world.kueue.set_active(name, active=True)


def look(world: QueuedJobs, name: str) -> None:
    """The operator looks at a job; what it decides holds for what it knows."""
    fresh = world.is_known(name)
    plan = world.look(name)
    played = world.jobs[name]
    fewest = played.job.spec.fewest_workers
    if plan is None or world.kueue.away:
        return
    assert played.admitted == 0 or played.admitted >= fewest, "it would run with fewer workers than it needs"
    claims = world.claims(name)
    if fresh and len(claims) > 1 and not (0 in claims and claims[0].admitted_at and not claims[0].evicted):
        assert played.using, "it holds more than its minimum, and not that"


def check(world: QueuedJobs) -> None:
    """What holds at every moment."""
    assert world.kueue.reserved <= NOMINAL
    for name, played in world.jobs.items():
        assert {*played.using} <= world.reserved(name), f"{name} has workers without quota"


def check_end(world: QueuedJobs) -> None:
    """What holds when nobody has anything to do."""
    claims = world.kueue.claims.values()
    free = NOMINAL - world.kueue.reserved
    surplus: dict[int, list[tuple[int, bool]]] = {}
    for name, played in world.jobs.items():
        workers, held = played.job.spec.workers, world.reserved(name)
        # A slice, or a minimum, of which some workers are left after a scale-down keeps its quota.
        held = {index for index in held if index < workers.replicas}
        assert {*played.using} == held, f"{name} does not use its quota"
        if not played.wants:
            assert not world.claims(name)
            continue
        priority = PRIORITIES[played.job.spec.run_policy.priority_class_name or ""]
        fewest = played.job.spec.fewest_workers
        lower = sum(claim.size for claim in claims if claim.admitted_at and claim.priority < priority)
        if not held:
            assert fewest > free + lower, f"{name} waits, and there is room for its minimum"
            continue
        assert len(held) >= fewest
        base, *slices = [claim.size for _, claim in sorted(world.claims(name).items())]
        is_whole = len(held) == workers.replicas
        assert max(world.claims(name)) < workers.replicas, f"{name} asks for more than its workers"
        assert base + sum(slices) >= workers.replicas, f"{name} does not ask for all of its workers"
        assert is_whole or min(c.size for c in world.claims(name).values() if not c.admitted_at) > free, "quota is idle"
        if all(size == 1 for size in slices):
            surplus.setdefault(priority, []).append((len(held) - base, is_whole))
    for shares in surplus.values():
        most = max(share for share, _ in shares)
        assert all(share >= most - 1 or is_whole for share, is_whole in shares), "it is not shared evenly"


def play(jobs: list[tuple[int, int, str]], steps: list[Step]) -> None:
    """Jobs are queued, things happen, then nothing is in the way any more."""
    world = QueuedJobs(NOMINAL)
    for name, sizes in zip(JOBS, jobs, strict=False):
        happen(world, ("submit", name, *sizes))
    for step in steps:
        happen(world, step)
        check(world)
    world.flavor, world.kueue.away = True, False
    activate(world)
    world.settle()
    check(world)
    check_end(world)
    # All that run end, until none is left but what the queue has no room for.
    for _ in JOBS:
        for played in world.jobs.values():
            played.complete |= bool(played.using)
        world.settle()
        check_end(world)
    waiting = [played for played in world.jobs.values() if played.wants]
    assert all(played.job.spec.fewest_workers > NOMINAL for played in waiting)


GIVEN = st.lists(st.tuples(*SIZES), min_size=2, max_size=3), st.lists(STEPS, min_size=20, max_size=40)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(*GIVEN)
def test_jobs_share_a_queue(jobs: list[tuple[int, int, str]], steps: list[Step]) -> None:
    play(jobs, steps)


@pytest.mark.timeout(900)
@pytest.mark.full("operator")
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(*GIVEN)
def test_jobs_share_a_queue_in_many_more_ways(jobs: list[tuple[int, int, str]], steps: list[Step]) -> None:
    play(jobs, steps)
