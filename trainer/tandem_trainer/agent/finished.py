"""The end of an agent whose ranks have all ended with exit code 0, where no coordinator answers.

The coordinator has to learn that the ranks have finished, or it would start the script again. One that restarts is back
within seconds or minutes, and one that is gone for good never is. So after some seconds without an answer the agent
writes it into the run directory and leaves; the next coordinator reads it there (`RunDir.finished_members`). An agent
that cannot write there tries again, and waits for the coordinator, for as long as before.

Rejected: to write it always (a request to a shared disk for each agent, and the coordinator's answer is faster), to let
the last agent mark the job as complete (a coordinator that the agent cannot reach may have formed another group).
"""

import logging
import threading
import time

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import FinishedMember, RunDir

log = logging.getLogger("tandem.agent")

UNANSWERED_SECONDS = 2.0
"""Time without an answer after which an agent writes into the run directory instead, in seconds."""
WRITE_RETRY_SECONDS = 10.0
"""Time between the beginnings of two attempts to write, in seconds."""


class FinishedRecorder:
    """Records in the run directory that a member has finished, unless the run directory shows another end for it.

    Args:
        member: this agent, in the generation whose ranks have ended.
    """

    def __init__(self, rundir: RunDir, member: FinishedMember) -> None:
        self._rundir, self._member = rundir, member
        self._thread: threading.Thread | None = None
        self._tried_at = float("-inf")
        self._code: int | None = None

    def poll(self, unreachable_since: float | None) -> int | None:
        """Start an attempt if one is due. Returns the exit code with which the agent may leave without an answer; None
        as long as there is none. Never blocks.

        Args:
            unreachable_since: time since which no coordinator answers, on the monotonic clock; None if one does.
        """
        now = time.monotonic()
        is_unanswered = unreachable_since is not None and now - unreachable_since > UNANSWERED_SECONDS
        # A disk that hangs gets no further request, and its thread does not keep this process.
        is_writing = self._thread is not None and self._thread.is_alive()
        if is_unanswered and self._code is None and not is_writing and now - self._tried_at > WRITE_RETRY_SECONDS:
            self._tried_at = now
            self._thread = threading.Thread(target=self._record, daemon=True)
            self._thread.start()
        return self._code

    def _record(self) -> None:
        generation = self._member.generation
        try:
            code = self._rundir.end_code()
            if code is None and self._rundir.newest_generation() > generation:
                # The others train again, in a group that this replica has to join.
                code = ExitCode.PEER_LOST
            if code is None:
                self._rundir.record_finished(self._member)
        except OSError as error:
            log.warning("event=finished-unrecorded generation=%d error=%r", generation, str(error))
        else:
            log.info("event=finished-unanswered generation=%d code=%d", generation, code or ExitCode.DONE)
            self._code = code or ExitCode.DONE
