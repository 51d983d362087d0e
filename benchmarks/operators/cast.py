"""The simulated jobs: the state that their coordinators would have, maintained by the simulated kubelets."""

import time
from dataclasses import dataclass, field

from tandem.wire.status import CheckpointRef, GenerationView, Members, MemberView, Progress, RankView, Snapshot, Status

STEPS_PER_SECOND = 10.0
TOTAL_STEPS = 10_000_000


@dataclass
class SimulatedJob:
    """State of one job."""

    name: str
    workers: set[str] = field(default_factory=set)
    """Running pods."""
    opened: float = 0.0
    """Time at which its group was complete, in seconds since the epoch."""


@dataclass
class Cast:
    """All simulated jobs.

    Their step follows from the time alone, so that a status reveals its age.
    """

    replicas: int
    """Workers of each job."""
    started: float = field(default_factory=time.time)
    is_complete: bool = False
    """Whether training is complete."""
    parts: dict[str, SimulatedJob] = field(default_factory=dict)
    """Jobs by name."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Job of each token: all coordinators have one address, and are distinguished by the token."""

    def part(self, job: str) -> SimulatedJob:
        """State of a job."""
        return self.parts.setdefault(job, SimulatedJob(job))

    def step(self, now: float) -> int:
        """Step of every job that trains."""
        return int((now - self.started) * STEPS_PER_SECOND) + 1

    def age(self, step: int, now: float) -> float:
        """Seconds since a job was at a step."""
        return now - self.started - (step - 1) / STEPS_PER_SECOND

    def snapshot(self, token: str) -> Snapshot | None:
        """Snapshot of a job's coordinator; None for an unknown token."""
        name = self.tokens.get(token)
        if name is None:
            return None
        part, now = self.part(name), time.time()
        step = self.step(now)
        members = Members(desired=self.replicas, ready=len(part.workers), min=1, max=self.replicas)
        if self.is_complete:
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
