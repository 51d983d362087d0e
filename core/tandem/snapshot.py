"""One look at a running job: what the coordinator's `/status` answers and every view of the job is drawn from."""

from typing import Literal

from tandem.model import Model
from tandem.status import Status


class RankView(Model):
    """One training process."""

    rank: int
    """Global rank."""
    step: int
    """Optimizer steps completed."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    gpu: float | None = None
    """GPU utilization, 0 to 1."""
    gpu_memory_bytes: int | None = None
    """GPU memory in use."""
    busy_seconds: float | None = None
    """Mean seconds of its own work in a step, without waiting for others."""


class MemberView(Model):
    """One replica, as the coordinator sees it."""

    replica: str
    """Its name."""
    address: str
    """Where its processes listen."""
    state: Literal["joining", "running", "leaving"]
    """What it is about."""
    silent_seconds: float
    """Time since its last sign of life."""
    ranks: list[RankView] = []
    """Its training processes."""


class GenerationView(Model):
    """One membership, running or past."""

    generation: int
    """Its number."""
    world_size: int
    """Ranks in it."""
    members: list[str]
    """Replicas in rank order."""
    opened_at: float
    """Seconds since the epoch."""
    closed_at: float | None = None
    """Seconds since the epoch; None while it runs."""
    reason: str
    """Why it was formed: Started, WorkerFailed, Hung, MemberLost, MemberLeft, Preempted, MemberJoined, …"""
    detail: str = ""
    """The reason in a sentence."""


class EvaluatorView(Model):
    """One evaluator process."""

    name: str
    """Its name."""
    state: str
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
    text: str
    """One sentence."""


class Snapshot(Model):
    """Everything the coordinator knows of the job now."""

    job: str
    """The job's name."""
    time: float
    """Seconds since the epoch, of the coordinator's clock."""
    status: Status
    """The status as the resource shows it."""
    members: list[MemberView] = []
    """Replicas that are known."""
    generations: list[GenerationView] = []
    """The last memberships, oldest first; at most 100."""
    evaluators: list[EvaluatorView] = []
    """Evaluator processes that gave a sign of life lately."""
    events: list[Event] = []
    """The last events, oldest first; at most 200."""
