"""The history of a job: its latest generations and events, in memory for status requests and in the run's log."""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable

from tandem.measures import is_restart
from tandem.messages import Membership
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.snapshot import Event, GenerationView
from tandem_coordinator.group import Cause, replicas

log = logging.getLogger("tandem.coordinator")

MOST_GENERATIONS, MOST_EVENTS = 100, 200
CLOSE_SECONDS = 2.0
"""For what waits for the disk when the coordinator leaves."""
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class History:
    """The generations and events of one job, the newest of each.

    Args:
        first: the lowest number of a generation of this run.
        restarts: how many there were before this process.
    """

    def __init__(
        self, rundir: RunDir, generations: Iterable[GenerationView], first: int = 1, restarts: int = 0
    ) -> None:
        self.generations = deque(generations, MOST_GENERATIONS)
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.restarts: Counter[str] = Counter()
        """How often a generation followed another in this process, by reason."""
        self._earlier = restarts
        self._first = first
        self._log = LogWriter(rundir.coordinator_log)

    def say(self, text: str, kind: str) -> None:
        """Tell people something: `info`, `warning` or `error`."""
        self.events.append(Event.parse({"at": time.time(), "kind": kind, "text": text}))
        self.write(records.Told(time=now(), level=kind, text=text))
        log.log(_LEVELS[kind], "%s", text)

    @property
    def all_restarts(self) -> int:
        """How often a generation was formed because something had failed or was lost, over the whole run."""
        return self._earlier + sum(count for reason, count in self.restarts.items() if is_restart(reason))

    @property
    def lines_lost(self) -> int:
        """Of the run's log, since this process began."""
        return self._log.lost

    def write(self, record: records.CoordinatorRecord) -> None:
        """Add a record to the run's log. Never blocks."""
        self._log.append(record)

    def opened(self, opened: Membership, detail: str, adopted: bool) -> None:
        """A generation has begun, or has been found going on by a coordinator that has just started."""
        if adopted:
            self.say(detail, "info")
            if self.generations and self.generations[-1].generation == opened.generation:
                return
        elif opened.generation > self._first:
            self.restarts[opened.reason] += 1
        names = [member.replica for member in opened.members]
        view = GenerationView(
            generation=opened.generation,
            world_size=opened.world_size,
            members=names,
            opened_at=time.time(),
            reason=opened.reason,
            detail=detail,
        )
        self.generations.append(view)
        self.write(
            records.Formed(
                time=now(),
                generation=opened.generation,
                world_size=opened.world_size,
                members=names,
                reason=opened.reason,
                detail=detail,
            )
        )
        self.say(f"generation {opened.generation} with {replicas(len(names))}, because {detail}", "info")

    def closed(self, generation: int, cause: Cause, is_last: bool) -> None:
        """A generation is over.

        Args:
            is_last: the job is, too, which has been said already.
        """
        if self.generations and self.generations[-1].generation == generation:
            self.generations[-1] = self.generations[-1].model_copy(update={"closed_at": time.time()})
        self.write(records.Closed(time=now(), generation=generation, reason=cause.reason, detail=cause.detail))
        if not is_last:
            self.say(f"generation {generation} is over: {cause.detail}", "info" if cause.is_planned else "warning")

    def close(self) -> None:
        """Write what waits, and that nothing follows."""
        self.write(records.CoordinatorEnd(time=now()))
        self._log.close(CLOSE_SECONDS)


def now() -> float:
    """Seconds since the epoch, to a millisecond: a log of a line a second need not be longer."""
    return round(time.time(), 3)
