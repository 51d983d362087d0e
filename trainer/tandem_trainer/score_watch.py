"""The end of training by a score (`runPolicy.stopWhen`, tandem.job.stop_when), as rank 0 decides it.

Rank 0 reads the results of evaluators in the run directory, which all platforms share or exchange, and its wish to end
travels in the vote as that of a script: all ranks end after the same step, save, and the job is complete. So nothing of
this is in the protocol of coordinator and agents. A look at the disk may take long, so a thread takes it, and no step
waits for it.

Rejected: a decision of the coordinator, which has the scores already (ranks would need another kind of request to save
and leave, after which no group is formed, in the state machine of the membership).
"""

import logging
import threading
import time
from collections.abc import Callable

from tandem.confidence import Estimate
from tandem.job.stop_when import StopWhen
from tandem.rundir.catalog import Lineage, Results
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef

LOOK_SECONDS = 5.0
"""Time between two looks, in seconds."""

log = logging.getLogger("tandem_trainer")


class ScoreWatch:
    """Looks for a reason to end training.

    Args:
        clock: seconds of any steady clock.
    """

    def __init__(self, rundir: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._rundir, self._clock = rundir, clock
        self._results, self._lineage = Results(rundir), Lineage(rundir)
        self._scores: dict[CheckpointRef, Estimate | None] = {}
        self._looked_at: float | None = None
        self._thread: threading.Thread | None = None
        self._is_needed = True
        self._reason = ""

    def reason(self) -> str:
        """Return the reason to end training, as a clause; empty while there is none. Does not wait."""
        is_idle = self._thread is None or not self._thread.is_alive()
        is_due = self._looked_at is None or self._clock() - self._looked_at >= LOOK_SECONDS
        if self._is_needed and is_idle and is_due and not self._reason:
            self._looked_at = self._clock()
            self._thread = threading.Thread(target=self._update, name="score-watch", daemon=True)
            self._thread.start()
        return self._reason

    def _update(self) -> None:
        """Read new results, and decide. The next look repeats one that the disk refuses."""
        try:
            spec = self._rundir.read_job().spec
            rule = spec.run_policy.stop_when
            if rule is None:
                self._is_needed = False
                return
            self._reason = self._decide(rule, spec.evaluation.metric, spec.evaluation.direction)
        except (OSError, ValueError) as error:
            log.warning("the scores for runPolicy.stopWhen cannot be read: %s", error)

    def _decide(self, rule: StopWhen, metric: str, goal: str) -> str:
        self._lineage.look()
        for result, _ in self._results.new(time.time()):
            if not result.skipped:
                self._scores[result.checkpoint] = result.estimates.get(metric)
        counting = sorted((ref for ref in self._scores if self._lineage.counts(ref)), key=lambda ref: ref.age)
        scores = ((ref.step, self._scores[ref]) for ref in counting)
        return rule.reason(scores, metric, "Maximize" if goal == "Maximize" else "Minimize")
