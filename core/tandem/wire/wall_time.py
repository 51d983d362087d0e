"""The wall time of a run by cause, and its effective training time ratio (docs/decisions/0059-ettr.md)."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import Field

from tandem.formatting import elapsed, share
from tandem.model import Model, WholeNumber

Cause = Literal[
    "training",
    "queue",
    "start",
    "data",
    "checkpoint",
    "recomputed",
    "restart",
    "stragglers",
    "script",
    "unreported",
    "other",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
CAUSE_NAMES: dict[Cause, str] = {
    "training": "training",
    "queue": "queue",
    "start": "start",
    "data": "data",
    "checkpoint": "checkpoints",
    "recomputed": "recomputed",
    "restart": "restarts",
    "stragglers": "stragglers",
    "script": "pauses of the script",
    "unreported": "not reported",
    "other": "other",
}
"""Names as shown."""
CAUSE_MEANINGS: dict[Cause, str] = {
    "training": "steps, the first time",
    "queue": "no worker existed: a queue, a node or an image",
    "start": "from the first worker to the first step",
    "data": "waiting for samples",
    "checkpoint": "blocked by saves",
    "recomputed": "steps that were repeated from a checkpoint",
    "restart": "from a group's last recorded step to the first of the next",
    "stragglers": "waiting for much slower ranks, at least",
    "script": "pauses, and code after the loop",
    "unreported": "the script reported no steps",
    "other": "waiting until the last save is on the disk, and the rest",
}
MAX_ADVICE_LENGTH = 300

WallSeconds = Annotated[float, Field(ge=0)]


class WallTime(Model):
    """Wall time of a run from its submission to the end of training, in seconds by cause. Each moment has one cause.
    Time in which the run was stopped is not included."""

    training: WallSeconds = 0.0
    """Steps, the first time."""
    queue: WallSeconds = 0.0
    """No worker existed: waiting for a queue, a node or an image."""
    start: WallSeconds = 0.0
    """Time from the start of the first worker to the first step."""
    data: WallSeconds = 0.0
    """Waiting for samples."""
    checkpoint: WallSeconds = 0.0
    """Blocked by a save."""
    recomputed: WallSeconds = 0.0
    """Steps that were repeated after a restart."""
    restart: WallSeconds = 0.0
    """Time from a group's last recorded step to the first of the next: detection, rendezvous, restoring; hangs."""
    stragglers: WallSeconds = 0.0
    """Steps waited for ranks that were much slower than the others; an estimate."""
    script: WallSeconds = 0.0
    """Pauses of the script, and its code after the loop."""
    unreported: WallSeconds = 0.0
    """A script that reports no steps ran."""
    other: WallSeconds = 0.0
    """The rest: waiting until the last save is on the disk, and short absences of the coordinator."""
    saves: WholeNumber = 0
    """Number of saves that blocked training."""
    setbacks: WholeNumber = 0
    """Number of times that steps had to be repeated from a checkpoint."""
    interval_seconds: WallSeconds | None = None
    """Present interval of saves that `checkpoint.every: Auto` has chosen."""
    mirror_seconds: WallSeconds | None = None
    """Present interval of mirrors (`elasticity.mirror`)."""
    mirror_step: WholeNumber | None = None
    """Step after which the newest one was taken."""
    advice: Annotated[str, Field(max_length=MAX_ADVICE_LENGTH)] | None = None
    """A setting that would save time, with numbers."""

    def with_causes(self, amounts: Mapping[Cause, float]) -> Self:
        """Copy it with these seconds by cause, to milliseconds."""
        return self.model_copy(update={cause: round(max(0.0, seconds), 3) for cause, seconds in amounts.items()})

    @property
    def total(self) -> float:
        """Sum over all causes."""
        return float(sum(getattr(self, cause) for cause in CAUSES))

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the share in which steps were taken the first time. None if unknown, because
        there is no time yet, or only time of a script that reports no steps."""
        if self.total <= 0 or (self.unreported > 0 and self.training == 0):
            return None
        return self.training / self.total


def losses(wall: WallTime) -> list[tuple[Cause, float]]:
    """The causes besides training that took time, the largest first."""
    amounts = [(cause, getattr(wall, cause)) for cause in CAUSES[1:]]
    return sorted(((cause, seconds) for cause, seconds in amounts if seconds > 0), key=lambda entry: -entry[1])


MIN_SHARE = 0.0005
"""Share of the time below which a cause is left out of a line."""


def format_wall_time(wall: WallTime | None) -> str | None:
    """Format the ratio and the losses: `93 % of 1 h 2 min · start 2.1 % · restarts 1.9 %`; None if unknown."""
    if wall is None or wall.ettr is None:
        return None
    parts = [
        f"{CAUSE_NAMES[cause]} {share(seconds / wall.total)}"
        for cause, seconds in losses(wall)
        if seconds >= MIN_SHARE * wall.total
    ]
    return " · ".join([f"{share(wall.ettr)} of {elapsed(wall.total)}", *parts])
