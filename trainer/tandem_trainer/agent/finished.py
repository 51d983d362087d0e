"""The end of an agent whose ranks have all ended with exit code 0, where no coordinator answers.

The coordinator has to learn that the ranks have finished, or it would start the script again. One that restarts is back
within seconds or minutes, and one that is gone for good never is. So after some seconds without an answer the agent
writes it into the run directory and leaves; the next coordinator reads it there (`RunDir.finished_members`). An agent
that cannot write there waits for the coordinator, for as long as before.

Rejected: to write it always (a request to a shared disk for each agent, and the coordinator's answer is faster), to let
the last agent mark the job as complete (a coordinator that the agent cannot reach may have formed another group).
"""

import logging
import threading

from tandem.rundir.layout import FinishedMember, RunDir

log = logging.getLogger("tandem.agent")

WRITE_SECONDS = 2.0
"""Maximum time that an agent waits for the run directory, in seconds: a shared disk may hang."""


def is_recorded(rundir: RunDir, member: FinishedMember) -> bool:
    """Record that a member has finished, unless the whole run has ended. Returns whether the run directory says either;
    the agent may then leave without an answer."""
    recorded = threading.Event()

    def record() -> None:
        try:
            if not rundir.ended():
                rundir.record_finished(member)
        except OSError as error:
            log.warning("event=finished-unrecorded generation=%d error=%r", member.generation, str(error))
        else:
            log.info("event=finished-unanswered generation=%d", member.generation)
            recorded.set()

    # A thread that hangs with the disk does not keep this process.
    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    thread.join(WRITE_SECONDS)
    return recorded.is_set()
