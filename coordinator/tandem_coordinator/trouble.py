"""What went wrong and did not end the job: counted from what ranks report and from what the run directory holds.

Ranks say with each heartbeat how many saves have failed and how many lines of their log are lost, because a full disk
takes no record of either. Each kind is said to people when it begins, and again whenever its number has doubled.
"""

from collections.abc import Callable, Iterable

from tandem.messages import RankReport, Trouble
from tandem.status import CheckpointRef, Troubles
from tandem.troubles import EVALUATION_FAILED, LINES_LOST, REWOUND, SAVES_FAIL, SKIPPED, told
from tandem_coordinator.run_watcher import Observed

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
        )
        before, self._known = self._known, found
        if before is None:
            # What was there before this process was said by the one before it.
            self._told = {REWOUND: found.rewinds, SKIPPED: found.evaluations_skipped}
        elif before.saves_failed_in_a_row and not row:
            self._told.pop(SAVES_FAIL, None)
            self._say("a save has gone well again", "info")
        counts = {
            SAVES_FAIL: row,
            EVALUATION_FAILED: found.evaluations_failed,
            LINES_LOST: found.lines_lost,
            REWOUND: found.rewinds,
            SKIPPED: found.evaluations_skipped,
        }
        for one in told(found):
            count, said = counts[one.reason], self._told.get(one.reason, 0)
            if count > said and (count >= 2 * said or one.reason == REWOUND):
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
