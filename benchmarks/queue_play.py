"""A week of a GPU queue, all or none beside elastic, in simulated time: `python -m benchmarks.queue_play`.

    all-or-none   each job is one Workload for `replicas`, as a pod group is. It starts when all of it fits, and is
                  preempted as a whole
    elastic       each job is one Workload for `minReplicas` and more above it, as tandem_operator.workloads makes them

The rules of the queue are the same: those of Kueue (tests.support.worlds.played_kueue), with preemption of lower
priorities in one ClusterQueue. tests/unit/benchmarks/test_queue_play.py checks that this model admits what the
operator's own reconcile and the played Kueue do.

A job trains as fast as it has workers: n of them do n GPU hours of work in an hour. It loses no work when it is
preempted. What it loses is time: START_SECONDS from an admission until those workers train, REGROUP_SECONDS of the
whole group at each change of its size, and LEAVE_SECONDS from an eviction until the quota is free.

Goals, by the medians over the seeds: elastic does at least as many useful GPU hours in the week, and the median and the
95th percentile of the time that a job waits are lower.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from benchmarks.goals import MIN_VALUES, Outcome, Verdict, exit_code
from tandem_operator.workloads import MAX_SLICES
from tests.support.worlds.played_kueue import Claim, decide

HOUR = 3600.0
DAY, WEEK = 24 * HOUR, 7 * 24 * HOUR
START_SECONDS, REGROUP_SECONDS, LEAVE_SECONDS = 120.0, 10.0, 30.0
CLASSES = {"production": (2000, 0.15), "research": (1000, 0.35), "batch": (0, 0.5)}
"""Priority and share of the jobs of each class. They are further apart than any job has workers."""
SIZES = {4: 0.35, 8: 0.3, 16: 0.25, 32: 0.1}
"""Share of the jobs by `replicas`. `minReplicas` is a quarter of it."""
ARRIVAL_HOUR, ARRIVAL_SPREAD = 14.0, 3.0
"""Hour of a working day at which jobs are submitted: mean and standard deviation."""
LENGTH_SPREAD = 1.0
"""Standard deviation of the logarithm of a job's length."""
MODES = ("all-or-none", "elastic")


@dataclass(frozen=True)
class QueuedJob:
    """A job of the queue."""

    name: str
    kind: str
    arrival: float
    """Seconds since the beginning of the week."""
    work: float
    """GPU seconds."""
    minimum: int
    replicas: int

    @property
    def priority(self) -> int:
        """The priority of its class."""
        return CLASSES[self.kind][0]


@dataclass
class Queue:
    """The Workloads of all jobs, as the operator makes them and Kueue decides about them."""

    nominal: int
    elastic: bool
    claims: dict[str, Claim] = field(default_factory=dict)
    jobs: dict[str, QueuedJob] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    """Claims over a minimum that is lost: they end when their workers have left."""

    def submit(self, job: QueuedJob, now: float) -> None:
        """Queue a job."""
        size = job.minimum if self.elastic else job.replicas
        self.jobs[job.name] = job
        self.claims[_name(job.name, 0)] = Claim(_name(job.name, 0), size, job.priority, now)

    def remove(self, name: str) -> None:
        """Give back all that a job has."""
        del self.jobs[name]
        for claim in self.of_job(name):
            del self.claims[claim.name]
            self.leaving.discard(claim.name)

    def of_job(self, name: str) -> list[Claim]:
        """Claims of a job, its minimum first."""
        return [claim for claim in self.claims.values() if job_of(claim) == name]

    def size(self, name: str) -> int:
        """Number of workers that a job may have."""
        base, *more = self.of_job(name)
        reserved = [claim for claim in (base, *more) if claim.admitted_at is not None and not claim.evicted]
        return sum(claim.size for claim in reserved) if base in reserved else 0

    def step(self, now: float) -> tuple[Claim | None, list[Claim]] | None:
        """One cycle of the scheduler: the claim that is admitted, and those that are evicted; None: nothing to do."""
        decision = decide(self.claims.values(), self.nominal)
        if decision is None:
            return None
        if decision.preempts is None:
            decision.head.admitted_at = now
            self._ask_for_more(decision.head, now)
            return decision.head, []
        evicted = [claim for claim in decision.preempts if not claim.evicted]
        for claim in list(evicted):
            claim.evicted = True
            if _is_base(claim):
                evicted += self._leave(claim)
        return (None, evicted) if evicted else None

    def give_back(self, claim: Claim) -> None:
        """The workers of an evicted claim have left."""
        if claim.name in self.leaving:
            self.leaving.discard(claim.name)
            del self.claims[claim.name]
        claim.admitted_at, claim.evicted = None, False

    def _ask_for_more(self, base: Claim, now: float) -> None:
        job = self.jobs[job_of(base)]
        if not self.elastic or not _is_base(base):
            return
        size = max(1, -(-(job.replicas - job.minimum) // MAX_SLICES))
        for slot, start in enumerate(range(job.minimum, job.replicas, size), start=1):
            end, name = min(start + size, job.replicas), _name(job.name, slot)
            self.claims[name] = Claim(name, end - start, job.priority - (end - job.minimum), now)

    def _leave(self, base: Claim) -> list[Claim]:
        """Take back the claims over a minimum that is lost; returns those whose workers leave."""
        more = [claim for claim in self.of_job(job_of(base)) if claim is not base]
        reserved = [claim for claim in more if claim.admitted_at is not None]
        for claim in more:
            if claim.admitted_at is None:
                del self.claims[claim.name]
        result = [claim for claim in reserved if not claim.evicted]
        for claim in reserved:
            claim.evicted = True
            self.leaving.add(claim.name)
        return result


def _name(job: str, slot: int) -> str:
    return f"{job}/{slot}"


def job_of(claim: Claim) -> str:
    """Name of a claim's job."""
    return claim.name.partition("/")[0]


def _is_base(claim: Claim) -> bool:
    return claim.name.endswith("/0")


@dataclass
class Run:
    """A job's week."""

    job: QueuedJob
    remaining: float
    """GPU seconds of work to do."""
    done: float = 0.0
    paused_until: float = 0.0
    """The group changes its size until then."""
    joining: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Time from which a claim's workers train, and their number, by the claim's name."""
    members: dict[str, int] = field(default_factory=dict)
    """Number of workers in the group, by their claim's name."""
    first_step: float | None = None
    waited: float = 0.0
    """Seconds without any worker."""
    ended: float | None = None
    preemptions: int = 0
    shrinks: int = 0

    def join(self, claim: Claim, now: float) -> None:
        """Workers are admitted."""
        self.joining[claim.name] = now + START_SECONDS, claim.size

    def leave(self, claim: Claim, now: float) -> None:
        """Workers are evicted."""
        self.joining.pop(claim.name, None)
        if self.members.pop(claim.name, None) is not None and self.members:
            self.paused_until = now + REGROUP_SECONDS

    def due(self, now: float) -> float:
        """Time of the next change by itself."""
        times = [time for time, _ in self.joining.values()]
        if self.paused_until > now:
            times.append(self.paused_until)
        elif self.members:
            times.append(now + self.remaining / sum(self.members.values()))
        return min(times, default=math.inf)

    def advance(self, now: float, until: float, has_quota: bool) -> None:
        """Train, or wait, from now on."""
        if not has_quota:
            self.waited += until - now
        if self.members and self.paused_until <= now:
            self.first_step = now if self.first_step is None else self.first_step
            work = min(self.remaining, (until - now) * sum(self.members.values()))
            self.remaining, self.done = self.remaining - work, self.done + work
        ready = [name for name, (time, _) in self.joining.items() if time <= until]
        if ready and self.members:
            self.paused_until = until + REGROUP_SECONDS
        self.members |= {name: self.joining.pop(name)[1] for name in ready}


def play(jobs: Sequence[QueuedJob], nominal: int, elastic: bool) -> list[Run]:
    """Play a week."""
    queue, now = Queue(nominal, elastic), 0.0
    runs = {job.name: Run(job, job.work) for job in jobs}
    arrivals = sorted(jobs, key=lambda job: job.arrival)
    leaves: dict[str, float] = {}
    while now < WEEK:
        while arrivals and arrivals[0].arrival <= now:
            queue.submit(arrivals.pop(0), now)
        for name in [name for name, time in leaves.items() if time <= now]:
            del leaves[name]
            if name in queue.claims:
                queue.give_back(queue.claims[name])
        while (step := queue.step(now)) is not None:
            admitted, evicted = step
            if admitted is not None:
                runs[job_of(admitted)].join(admitted, now)
            for claim in evicted:
                run = runs[job_of(claim)]
                run.leave(claim, now)
                run.preemptions += _is_base(claim)
                run.shrinks += not _is_base(claim) and claim.name not in queue.leaving
                leaves[claim.name] = now + LEAVE_SECONDS
        active = [runs[name] for name in queue.jobs]
        times = [arrivals[0].arrival if arrivals else math.inf, *leaves.values(), *(run.due(now) for run in active)]
        until = min([WEEK, *times])
        for run in active:
            run.advance(now, until, queue.size(run.job.name) > 0)
            if run.remaining <= 1e-6:
                run.ended = until
                queue.remove(run.job.name)
        now = until
    return list(runs.values())


def week_of_jobs(seed: int, count: int, nominal: int, load: float) -> list[QueuedJob]:
    """Draw the jobs of a week.

    Args:
        load: their work over what the queue could do in the week.
    """
    chance = random.Random(seed)
    kinds = chance.choices(list(CLASSES), [share for _, share in CLASSES.values()], k=count)
    sizes = chance.choices(list(SIZES), list(SIZES.values()), k=count)
    hours = [chance.gauss(ARRIVAL_HOUR, ARRIVAL_SPREAD) % 24 for _ in range(count)]
    arrivals = [chance.randrange(5) * DAY + hour * HOUR for hour in hours]
    work = [size * chance.lognormvariate(0.0, LENGTH_SPREAD) for size in sizes]
    factor = load * nominal * WEEK / sum(work)
    return [
        QueuedJob(f"job-{number:03}", kind, arrival, share * factor, max(1, size // 4), size)
        for number, (kind, size, arrival, share) in enumerate(zip(kinds, sizes, arrivals, work, strict=True))
    ]


Figures = Mapping[str, float]


def figures(runs: Sequence[Run], nominal: int) -> Figures:
    """Figures of a week, times in hours."""
    waits = [run.waited / HOUR for run in runs]
    first = [((WEEK if run.first_step is None else run.first_step) - run.job.arrival) / HOUR for run in runs]
    turnaround = [((WEEK if run.ended is None else run.ended) - run.job.arrival) / HOUR for run in runs]
    useful = sum(run.done for run in runs) / HOUR
    return {
        "useful GPU hours": useful,
        "of all GPU hours, %": 100 * useful / (nominal * WEEK / HOUR),
        "waits, median": median(waits),
        "waits, 95 %": quantiles(waits, n=20)[-1],
        "first step, median": median(first),
        "first step, 95 %": quantiles(first, n=20)[-1],
        "from arrival to end, median": median(turnaround),
        "from arrival to end, 95 %": quantiles(turnaround, n=20)[-1],
        "preemptions of a whole job": sum(run.preemptions for run in runs),
        "shrinks": sum(run.shrinks for run in runs),
        "ended in the week": sum(run.ended is not None for run in runs),
    }


def judge(weeks: Mapping[str, Sequence[Figures]]) -> list[Verdict]:
    """Judge the goals by the figures of all jobs, of each mode one for each seed."""
    goals: dict[str, Callable[[float, float], bool]] = {
        "useful GPU hours": lambda elastic, all_or_none: elastic >= all_or_none,
        "waits, median": lambda elastic, all_or_none: elastic < all_or_none,
        "waits, 95 %": lambda elastic, all_or_none: elastic < all_or_none,
    }
    verdicts = []
    for name, holds in goals.items():
        all_or_none, elastic = (median(week[name] for week in weeks[mode]) for mode in MODES)
        outcome = Outcome.MET if holds(elastic, all_or_none) else Outcome.MISSED
        outcome = outcome if len(weeks["elastic"]) >= MIN_VALUES else Outcome.UNJUDGED
        reason = f"{elastic:.1f} beside {all_or_none:.1f}, medians of {len(weeks['elastic'])} seeds"
        verdicts.append(Verdict(outcome, f"{name}: elastic no worse than all-or-none", reason))
    return verdicts


def table(weeks: Mapping[str, Sequence[Figures]]) -> str:
    """The figures of both modes, as a table: the median over the seeds, the minimum and the maximum."""
    rows = [f"| what | {' | '.join(MODES)} |", "|---|" + "---|" * len(MODES)]
    for name in weeks["elastic"][0]:
        cells = []
        for mode in MODES:
            values = [week[name] for week in weeks[mode]]
            cells.append(f"{_text(median(values))} ({_text(min(values))} to {_text(max(values))})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def main() -> int:
    """Play the weeks, and print a table for all jobs and one for each class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--load", type=float, default=1.0, help="work of the jobs over that of the queue in a week")
    args = parser.parse_args()
    weeks: dict[str, dict[str, list[Figures]]] = {kind: {mode: [] for mode in MODES} for kind in ("all jobs", *CLASSES)}
    for seed in range(args.seeds):
        jobs = week_of_jobs(seed, args.jobs, args.gpus, args.load)
        for mode in MODES:
            runs = play(jobs, args.gpus, mode == "elastic")
            weeks["all jobs"][mode].append(figures(runs, args.gpus))
            for kind in CLASSES:
                weeks[kind][mode].append(figures([run for run in runs if run.job.kind == kind], args.gpus))
    for kind, of_kind in weeks.items():
        print(f"{kind}\n\n{table(of_kind)}\n")
    verdicts = judge(weeks["all jobs"])
    for verdict in verdicts:
        print(verdict)
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
