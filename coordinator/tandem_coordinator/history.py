"""The history of a job: recent generations and events, in memory for status requests and in the run's log.

Ranks report with each heartbeat how many saves have failed and how many lines of their log are lost, because a full
disk takes no record of either. Each kind is reported to people when it begins, and again whenever its number has
doubled.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.wire.measures import is_restart
from tandem.wire.protocol import Membership, RankReport, Trouble
from tandem.wire.status import (
    CORRUPTIONS,
    EVALUATION_FAILED,
    EXCLUDED,
    HALVED,
    LINES_LOST,
    NOT_TRACKED,
    NOT_UPLOADED,
    REWOUND,
    SAMPLES_FILTERED,
    SAVES_FAIL,
    SKIPPED,
    WEIGHTS_UNCHANGED,
    WORSE_THAN_BASE,
    CheckpointRef,
    Event,
    GenerationView,
    Troubles,
    trouble_messages,
)
from tandem_coordinator.group_state import Cause, replicas_text
from tandem_coordinator.run_watcher import Observed

log = logging.getLogger("tandem.coordinator")

MAX_GENERATIONS, MAX_EVENTS = 100, 200
CLOSE_TIMEOUT_SECONDS = 2.0
"""Maximum wait for the disk when the coordinator leaves, in seconds."""
RESOLVED = {
    SAVES_FAIL: ("saves_failed_in_a_row", "a save succeeded again"),
    WORSE_THAN_BASE: ("worse_than_base", "the newest evaluated checkpoint is no worse than the base model"),
    WEIGHTS_UNCHANGED: ("weights_unchanged", "the newest checkpoint has other weights than the one before"),
    NOT_TRACKED: ("tracking_message", "tracking: everything has been sent"),
    NOT_UPLOADED: ("upload_message", "bucket: everything has been uploaded"),
}
"""The field of `Troubles` of each trouble that can end, and the event that reports its end."""
WRONG_NUMBERS = (*CORRUPTIONS, WEIGHTS_UNCHANGED)
"""The troubles at which a job with `elasticity.onCorruption: Stop` fails."""
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
        """Number of generations that followed another in this process, by reason."""
        self._earlier = restarts
        self._first = first
        self._log = LogWriter(rundir.coordinator_log)
        self._reported = ""
        """Reason for the last close, which was reported then."""

    def report(self, text: str, kind: str) -> None:
        """Report a message to people: `info`, `warning` or `error`."""
        self.events.append(Event.parse({"at": time.time(), "kind": kind, "text": text}))
        self.write(records.EventRecord(time=now(), level=kind, text=text))
        log.log(_LEVELS[kind], "%s", text)

    @property
    def all_restarts(self) -> int:
        """Number of generations formed because of a failure or a loss, over the whole run."""
        return self._earlier + sum(count for reason, count in self.restarts.items() if is_restart(reason))

    @property
    def lines_lost(self) -> int:
        """Lost lines of the run's log, since this process started."""
        return self._log.lost

    def write(self, record: records.CoordinatorRecord) -> None:
        """Add a record to the run's log. Never blocks."""
        self._log.append(record)

    def opened(
        self,
        opened: Membership,
        detail: str,
        adopted: bool,
        stopped_at: float | None = None,
        ready_at: float | None = None,
        failed_at: float | None = None,
    ) -> None:
        """Record that a generation has begun, or was adopted by a coordinator that has just started.

        Args:
            stopped_at: time at which the last member of the one before had stopped its ranks.
            ready_at: time at which the last member was ready to join.
            failed_at: time of the failure for which it was formed. All in seconds since the epoch; None if not known.
        """
        if adopted:
            self.report(detail, "info")
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
                stopped_at=stopped_at,
                ready_at=ready_at,
                failed_at=failed_at,
            )
        )
        # What was reported when the last one was closed is not repeated.
        is_known = bool(self._reported) and detail.startswith(self._reported)
        because = detail.removeprefix(self._reported) if is_known else f", because {detail}"
        self.report(f"generation {opened.generation} with {replicas_text(len(names))}{because}", "info")

    def closed(
        self, generation: int, cause: Cause, progressed: bool, is_last: bool, failed_at: float | None = None
    ) -> None:
        """Record that a generation was closed.

        Args:
            progressed: its ranks have made a step or saved anything.
            is_last: the job has ended, too, which has been reported already.
            failed_at: time of the failure, in seconds since the epoch; None if it is not known, or there was none.
        """
        if self.generations and self.generations[-1].generation == generation:
            self.generations[-1] = self.generations[-1].model_copy(
                update={"closed_at": time.time(), "progressed": progressed}
            )
        self.write(
            records.Closed(
                time=now(), generation=generation, reason=cause.reason, detail=cause.detail, failed_at=failed_at
            )
        )
        if not is_last:
            self._reported = cause.detail
            self.report(f"generation {generation} is over: {cause.detail}", "info" if cause.is_planned else "warning")

    def close(self) -> None:
        """Write pending records, and that nothing follows."""
        self.write(records.CoordinatorEnd(time=now()))
        self._log.close(CLOSE_TIMEOUT_SECONDS)


def now() -> float:
    """Seconds since the epoch, rounded to a millisecond: a log of a line a second need not be longer."""
    return round(time.time(), 3)


NO_TROUBLES = Troubles()


class TroubleWatch:
    """Counts troubles of a run, and reports them.

    Args:
        report: called with a sentence and its level: `info`, `warning` or `error`.
        heartbeat_seconds: longest time between two reports of an agent.
    """

    def __init__(self, report: Callable[[str, str], None], heartbeat_seconds: float) -> None:
        self._report, self._max_interval = report, 2 * heartbeat_seconds
        self._ranks: dict[int, Trouble] = {}
        self._saves = self._lines = self._carried = 0
        self._logged = self._ahead = 0
        self._ahead_since = 0.0
        self._message = ""
        self._newest: CheckpointRef | None = None
        self.exclusion_message = ""
        self.tracking_message = ""
        self.upload_message = ""
        """Problem of the tracking server; empty if it has received everything."""
        self.corruption = ""
        """The wrong numbers that the last update has found, and the newest checkpoint from before; empty if none."""
        self._reported: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._troubles: Troubles | None = None

    def begin(self) -> None:
        """Start over for a new generation, whose processes count from 0."""
        self._carried = self._in_a_row
        self._ranks.clear()

    def record(self, reports: Iterable[RankReport]) -> None:
        """Record the reports of ranks of the present generation."""
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
        return self._carried + max((trouble.saves_failed_in_a_row for trouble in self._ranks.values()), default=0)

    def update(self, observed: Observed, own_lines_lost: int, now: float) -> bool:
        """Combine all counts, and report what is new; returns whether they changed.

        Args:
            own_lines_lost: of the coordinator's own log.
            now: monotonic time.
        """
        checkpoint_before = self._newest
        if observed.latest_checkpoint != self._newest:
            self._newest, self._carried = observed.latest_checkpoint, 0
        in_a_row, evaluations = self._in_a_row, observed.evaluations
        self._count_logged(observed.training.saves.get("failed", 0), now)
        troubles = Troubles(
            saves_failed=max(self._saves, self._logged),
            saves_failed_in_a_row=in_a_row,
            save_message=self._message if in_a_row else "",
            evaluations_failed=evaluations.failed,
            evaluation_message=evaluations.failure,
            evaluations_skipped=evaluations.skipped,
            lines_lost=self._lines + own_lines_lost + observed.lines_lost,
            rewinds=observed.rewinds,
            batches_left_out=observed.batches_left_out,
            micro_batches_halved=len(observed.limits),
            micro_batch=min(observed.limits, default=None),
            samples_message=observed.training.filtered_samples,
            exclusion_message=self.exclusion_message,
            worse_than_base=observed.against_base.worse,
            base_message=observed.against_base.message,
            weights_unchanged=observed.unchanged.count,
            weights_message=observed.unchanged.message,
            corruptions=list(observed.corruptions),
            tracking_message=self.tracking_message,
            upload_message=self.upload_message,
        )
        before, self._troubles = self._troubles, troubles
        recorded = {
            REWOUND: troubles.rewinds,
            HALVED: troubles.micro_batches_halved,
            SAMPLES_FILTERED: int(bool(troubles.samples_message)),
            SKIPPED: troubles.evaluations_skipped,
            WORSE_THAN_BASE: troubles.worse_than_base,
            WEIGHTS_UNCHANGED: troubles.weights_unchanged,
            **{corruption.reason: corruption.count for corruption in troubles.corruptions},
        }
        if before is None:
            # What happened before this process was reported by the one before it.
            self._reported = dict(recorded)
        for reason, (field, text) in RESOLVED.items():
            if before is not None and getattr(before, field) and not getattr(troubles, field):
                self._reported.pop(reason, None)
                self._report(text, "info")
        counts = recorded | {
            # The group has announced it already.
            EXCLUDED: 0,
            SAVES_FAIL: in_a_row,
            EVALUATION_FAILED: troubles.evaluations_failed,
            LINES_LOST: troubles.lines_lost,
            NOT_TRACKED: int(bool(troubles.tracking_message)),
            NOT_UPLOADED: int(bool(troubles.upload_message)),
        }
        self.corruption = ""
        for trouble in trouble_messages(troubles):
            count, reported = counts[trouble.reason], self._reported.get(trouble.reason, 0)
            if before is not None and trouble.reason in WRONG_NUMBERS and count > self._counts.get(trouble.reason, 0):
                name = "none" if checkpoint_before is None else checkpoint_before.name
                self.corruption = f"{trouble.text}; the newest checkpoint from before it was found: {name}"
            if count > reported and (count >= 2 * reported or trouble.reason in (REWOUND, HALVED)):
                self._reported[trouble.reason] = count
                self._report(trouble.text, trouble.level)
        self._counts = counts
        return troubles != (before or NO_TROUBLES)

    def _count_logged(self, failed: int, now: float) -> None:
        """Count failed saves in the log, which include those of earlier coordinators' time.

        The log may show a failure before a heartbeat does, and does not tell whether it persists: so what is new there
        is counted a little later.
        """
        if self._troubles is None:
            self._logged = self._ahead = failed
        if failed != self._ahead:
            self._ahead, self._ahead_since = failed, now
        elif now - self._ahead_since > self._max_interval:
            self._logged = failed

    @property
    def troubles(self) -> Troubles | None:
        """All troubles; None if there are none."""
        return None if self._troubles in (None, NO_TROUBLES) else self._troubles
