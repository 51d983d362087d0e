"""One look at a running job: what the coordinator's `/status` answers and every view of the job is drawn from."""

from typing import Annotated, Literal

from pydantic import Field

from tandem.measures import Generation
from tandem.model import Model, Whole, Words, cut
from tandem.status import Status

Name = Annotated[str, Field(max_length=316)]
MOST_MEMBERS = 20_000


class RankView(Model):
    """One training process."""

    rank: Whole
    """Global rank."""
    step: Whole
    """Optimizer steps completed."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    gpu: float | None = None
    """GPU utilization, 0 to 1."""
    gpu_memory_bytes: Whole | None = None
    """GPU memory in use."""
    busy_seconds: float | None = None
    """Mean seconds of its own work in a step, without waiting for others."""


class MemberView(Model):
    """One replica, as the coordinator sees it."""

    replica: Name
    """Its name."""
    address: Name
    """Where its processes listen."""
    state: Literal["joining", "running", "leaving"]
    """What it is about."""
    silent_seconds: float
    """Time since its last sign of life."""
    ranks: Annotated[list[RankView], Field(max_length=64)] = []
    """Its training processes."""


class GenerationView(Model):
    """One membership, running or past."""

    generation: Whole
    """Its number."""
    world_size: Whole
    """Ranks in it."""
    members: Annotated[list[Name], Field(max_length=MOST_MEMBERS)]
    """Replicas in rank order; in a brief answer, those that no newer generation has named."""
    replicas: Whole | None = None
    """How many there are, where not all are named."""
    opened_at: float
    """Seconds since the epoch."""
    closed_at: float | None = None
    """Seconds since the epoch; None while it runs."""
    reason: Words
    """Why it was formed: Started, WorkerFailed, Hung, MemberLost, MemberLeft, Preempted, MemberJoined, …"""
    detail: Words = ""
    """The reason in a sentence."""

    def seen(self) -> Generation:
        """The generation as views work with it."""
        return Generation(
            number=self.generation,
            opened_at=self.opened_at,
            closed_at=self.closed_at,
            world_size=self.world_size,
            members=tuple(self.members),
            reason=self.reason,
            detail=self.detail,
        )


class EvaluatorView(Model):
    """One evaluator process."""

    name: Name
    """Its name."""
    state: Words
    """`idle`, or what it is evaluating."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    silent_seconds: float
    """Time since its last sign of life."""


class Event(Model):
    """Something a person following the job wants to read."""

    at: float
    """Seconds since the epoch."""
    kind: Literal["info", "warning", "error"]
    """How much it matters."""
    text: Words
    """One sentence."""


class Snapshot(Model):
    """Everything the coordinator knows of the job now."""

    job: Name
    """The job's name."""
    time: float
    """Seconds since the epoch, of the coordinator's clock."""
    status: Status
    """The status as the resource shows it."""
    members: Annotated[list[MemberView], Field(max_length=MOST_MEMBERS)] = []
    """Replicas that are known."""
    finished: Whole | None = None
    """Of a script of the user's own: replicas of the group that have gone because all of their ranks ended with exit
    code 0."""
    generations: Annotated[list[GenerationView], Field(max_length=100)] = []
    """The last memberships, oldest first; at most 100."""
    evaluators: Annotated[list[EvaluatorView], cut(4_096)] = []
    """Evaluator processes that gave a sign of life lately."""
    events: Annotated[list[Event], cut(200)] = []
    """The last events, oldest first; at most 200."""
