"""The history of a job: recent generations and events, in memory for status requests and in the run's log.

Ranks say with each heartbeat how many saves have failed and how many lines of their log are lost, because a full disk
takes no record of either. Each kind is said to people when it begins, and again whenever its number has doubled.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from tandem.measures import is_restart
from tandem.protocol import Membership, RankReport, Trouble
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.status import (
    EVALUATION_FAILED,
    HALVED,
    LINES_LOST,
    NOT_TRACKED,
    REWOUND,
    SAVES_FAIL,
    SKIPPED,
    WORSE_THAN_BASE,
    CheckpointRef,
    Event,
    GenerationView,
    Troubles,
    told,
)
from tandem_coordinator.group_state import Cause, replicas
from tandem_coordinator.run_watcher import Observed

log = logging.getLogger("tandem.coordinator")

MAX_GENERATIONS, MAX_EVENTS = 100, 200
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
        self.generations = deque(generations, MAX_GENERATIONS)
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.restarts: Counter[str] = Counter()
        """How often a generation followed another in this process, by reason."""
        self._earlier = restarts
        self._first = first
        self._log = LogWriter(rundir.coordinator_log)
        self._told = ""
        """Why the last generation was closed, which was said then."""

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
        because = f", because {detail}" if detail != self._told else ""
        self.say(f"generation {opened.generation} with {replicas(len(names))}{because}", "info")

    def closed(self, generation: int, cause: Cause, progressed: bool, is_last: bool) -> None:
        """A generation is over.

        Args:
            progressed: its ranks have made a step or saved anything.
            is_last: the job is, too, which has been said already.
        """
        if self.generations and self.generations[-1].generation == generation:
            self.generations[-1] = self.generations[-1].model_copy(
                update={"closed_at": time.time(), "progressed": progressed}
            )
        self.write(records.Closed(time=now(), generation=generation, reason=cause.reason, detail=cause.detail))
        if not is_last:
            self._told = cause.detail
            self.say(f"generation {generation} is over: {cause.detail}", "info" if cause.is_planned else "warning")

    def close(self) -> None:
        """Write what waits, and that nothing follows."""
        self.write(records.CoordinatorEnd(time=now()))
        self._log.close(CLOSE_SECONDS)


def now() -> float:
    """Seconds since the epoch, to a millisecond: a log of a line a second need not be longer."""
    return round(time.time(), 3)


NOTHING = Troubles()


class TroubleWatch:
    """Counts, and tells people.

    Args:
        say: called with a sentence and how much it matters: `info`, `warning` or `error`.
        heartbeat_seconds: longest time between two reports of an agent.
    """

    def __init__(self, say: Callable[[str, str], None], heartbeat_seconds: float) -> None:
        self._say, self._most_between = say, 2 * heartbeat_seconds
        self._ranks: dict[int, Trouble] = {}
        self._saves = self._lines = self._carried = 0
        self._logged = self._ahead = 0
        self._ahead_since = 0.0
        self._message = ""
        self._newest: CheckpointRef | None = None
        self.tracking_message = ""
        """Why the tracking server has not got everything; empty if it has."""
        self._told: dict[str, int] = {}
        self._known: Troubles | None = None

    def begin(self) -> None:
        """A generation was formed: its processes count from 0 on."""
        self._carried = self._in_a_row
        self._ranks.clear()

    def take(self, reports: Iterable[RankReport]) -> None:
        """What ranks of the present generation say."""
        for report in reports:
            if (now := report.trouble) is None:
                continue
            before = self._ranks.get(report.rank, Trouble())
            self._saves += max(0, now.saves_failed - before.saves_failed)
            self._lines += max(0, now.lines_lost - before.lines_lost)
            if now.saves_failed_in_a_row < before.saves_failed_in_a_row:
                self._carried = 0
            if now.saves_failed > before.saves_failed:
                self._message = now.why
            self._ranks[report.rank] = now

    @property
    def _in_a_row(self) -> int:
        return self._carried + max((one.saves_failed_in_a_row for one in self._ranks.values()), default=0)

    def look(self, observed: Observed, own_lines_lost: int, now: float) -> bool:
        """Put together what is known, and say what is new. Whether it changed.

        Args:
            own_lines_lost: of the coordinator's own log.
            now: monotonic time.
        """
        if observed.latest_checkpoint != self._newest:
            self._newest, self._carried = observed.latest_checkpoint, 0
        row, failures = self._in_a_row, observed.evaluations
        self._count_logged(observed.training.saves.get("failed", 0), now)
        found = Troubles(
            saves_failed=max(self._saves, self._logged),
            saves_failed_in_a_row=row,
            save_message=self._message if row else "",
            evaluations_failed=failures.failed,
            evaluation_message=failures.failure,
            evaluations_skipped=failures.skipped,
            lines_lost=self._lines + own_lines_lost + observed.lines_lost,
            rewinds=observed.rewinds,
            batches_left_out=observed.batches_left_out,
            micro_batches_halved=len(observed.limits),
            micro_batch=min(observed.limits, default=None),
            worse_than_base=observed.against_base.worse,
            base_message=observed.against_base.message,
            tracking_message=self.tracking_message,
        )
        before, self._known = self._known, found
        if before is None:
            # What was there before this process was said by the one before it.
            self._told = {
                REWOUND: found.rewinds,
                HALVED: found.micro_batches_halved,
                SKIPPED: found.evaluations_skipped,
                WORSE_THAN_BASE: found.worse_than_base,
            }
        elif before.saves_failed_in_a_row and not row:
            self._told.pop(SAVES_FAIL, None)
            self._say("a save has gone well again", "info")
        if before is not None and before.worse_than_base and not found.worse_than_base:
            self._told.pop(WORSE_THAN_BASE, None)
            self._say("the newest evaluated checkpoint is no worse than the base model", "info")
        if before is not None and before.tracking_message and not found.tracking_message:
            self._told.pop(NOT_TRACKED, None)
            self._say("tracking: everything is sent again", "info")
        counts = {
            SAVES_FAIL: row,
            EVALUATION_FAILED: found.evaluations_failed,
            LINES_LOST: found.lines_lost,
            REWOUND: found.rewinds,
            HALVED: found.micro_batches_halved,
            SKIPPED: found.evaluations_skipped,
            WORSE_THAN_BASE: found.worse_than_base,
            NOT_TRACKED: int(bool(found.tracking_message)),
        }
        for one in told(found):
            count, said = counts[one.reason], self._told.get(one.reason, 0)
            if count > said and (count >= 2 * said or one.reason in (REWOUND, HALVED)):
                self._told[one.reason] = count
                self._say(one.text, one.level)
        return found != (before or NOTHING)

    def _count_logged(self, failed: int, now: float) -> None:
        """The log counts what ranks of earlier coordinators have said. Of the same failure it may tell before a
        heartbeat does, and does not tell whether it lasts: so what is new there is counted a little later.
        """
        if self._known is None:
            self._logged = self._ahead = failed
        if failed != self._ahead:
            self._ahead, self._ahead_since = failed, now
        elif now - self._ahead_since > self._most_between:
            self._logged = failed

    @property
    def troubles(self) -> Troubles | None:
        """All that went wrong; None if nothing did."""
        return None if self._known in (None, NOTHING) else self._known
