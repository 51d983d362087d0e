"""All that is shown of a run at one moment."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tandem.snapshot import Event, Snapshot

MOST_POINTS = 240
"""Points of the loss curve that are kept; neighbours are merged beyond that."""


@dataclass(frozen=True, kw_only=True)
class Trail:
    """The loss so far, as the snapshots told it: a step and the loss there, rising in steps."""

    points: tuple[tuple[int, float], ...] = ()

    def follow(self, snapshot: Snapshot) -> "Trail":
        """The trail with this snapshot's loss. Steps that a restart takes back are forgotten."""
        progress, loss = snapshot.status.progress, snapshot.status.loss
        if progress is None or loss is None or (self.points and self.points[-1] == (progress.step, loss)):
            return self
        kept = tuple(point for point in self.points if point[0] < progress.step)
        points = (*kept, (progress.step, loss))
        if len(points) > MOST_POINTS:
            halves = zip(points[::2], points[1::2], strict=False)
            points = tuple((later[0], (earlier[1] + later[1]) / 2) for earlier, later in halves)
        return replace(self, points=points)

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses alone."""
        return tuple(loss for _, loss in self.points)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run at one moment."""

    job: str
    run_dir: str
    """As the user would type it."""
    endpoint: str = ""
    """Base URL of the coordinator; empty before it has one."""
    elapsed: float = 0.0
    """Seconds since `tandem run` was started."""
    waiting: str = ""
    """What the run is waiting for, empty while it steps."""
    notice: str = ""
    """What the user must know now: that it is saving, and what another Ctrl-C does."""
    leaving: bool = False
    """The user asked to stop."""
    own_command: bool = False
    """The user's own script trains."""
    output: str = ""
    """The last line that it printed."""
    draining: bool = False
    """Training is complete and evaluators are at work."""
    cores: int = 1
    """Cores this machine has for it."""
    evaluates: bool = True
    """Whether there are evaluators."""
    snapshot: Snapshot | None = None
    """The coordinator's newest word."""
    trail: Trail = field(default_factory=Trail)
    events: tuple[Event, ...] = ()
    """The coordinator's events and those of this machine, oldest first."""


def merged(*sources: Iterable[Event]) -> tuple[Event, ...]:
    """Events of several sources in the order of time."""
    return tuple(sorted((event for source in sources for event in source), key=lambda event: event.at))
