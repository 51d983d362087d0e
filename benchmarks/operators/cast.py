"""Who takes part in the simulated jobs: what their coordinators would know, kept by those who play the kubelets."""

import time
from dataclasses import dataclass, field

from tandem.status import CheckpointRef, GenerationView, Members, MemberView, Progress, RankView, Snapshot, Status

STEPS_PER_SECOND = 10.0
TOTAL_STEPS = 10_000_000


@dataclass
class Part:
    """One job."""

    name: str
    workers: set[str] = field(default_factory=set)
    """Pods that run."""
    opened: float = 0.0
    """When its group was complete, seconds since the epoch."""


@dataclass
class Cast:
    """All jobs.

    Their step follows from the time alone, so that a status tells how old it is.
    """

    replicas: int
    """Workers of each."""
    began: float = field(default_factory=time.time)
    over: bool = False
    """Training is complete."""
    parts: dict[str, Part] = field(default_factory=dict)
    """By name."""
    tokens: dict[str, str] = field(default_factory=dict)
    """The job of each token: all coordinators have one address, and this is how they are told apart."""

    def part(self, job: str) -> Part:
        """A job's."""
        return self.parts.setdefault(job, Part(job))

    def step(self, now: float) -> int:
        """Of every job that trains."""
        return int((now - self.began) * STEPS_PER_SECOND) + 1

    def age(self, step: int, now: float) -> float:
        """Seconds since a job was at a step."""
        return now - self.began - (step - 1) / STEPS_PER_SECOND

    def snapshot(self, token: str) -> Snapshot | None:
        """What a job's coordinator says, None if nobody has this token."""
        name = self.tokens.get(token)
        if name is None:
            return None
        part, now = self.part(name), time.time()
        step = self.step(now)
        members = Members(desired=self.replicas, ready=len(part.workers), min=1, max=self.replicas)
        if self.over:
            status = Status(phase="Succeeded", workers=members, progress=Progress(step=step, total_steps=step))
            return Snapshot(job=name, time=now, status=status)
        if len(part.workers) < self.replicas:
            return Snapshot(job=name, time=now, status=Status(phase="Pending", workers=members))
        part.opened = part.opened or now
        return Snapshot(
            job=name,
            time=now,
            status=Status(
                phase="Running",
                workers=members,
                evaluators=Members(desired=1, ready=1),
                world_size=self.replicas,
                generation=1,
                progress=Progress(step=step, total_steps=TOTAL_STEPS, epoch=step / 1000, percent=step / 1e5),
                loss=1 / step,
                throughput=1000.0 + step % 7,
                latest_checkpoint=CheckpointRef(name="step-000000001", step=1, generation=1),
            ),
            members=[
                MemberView(
                    replica=worker,
                    address="192.0.2.1",
                    state="running",
                    silent_seconds=0.1,
                    ranks=[RankView(rank=rank, step=step, cpu=0.9, busy_seconds=0.01)],
                )
                for rank, worker in enumerate(sorted(part.workers))
            ],
            generations=[
                GenerationView(
                    generation=1,
                    world_size=self.replicas,
                    members=sorted(part.workers),
                    opened_at=part.opened,
                    reason="Started",
                )
            ],
        )
