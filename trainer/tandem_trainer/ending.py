"""The end of a training process: maps an error to an exit code, and exits with it."""

import logging
import os
import sys
import traceback
from typing import NoReturn

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.saving import SaveFailed
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.failure import ConfigurationError, MicroBatchHalved, UnusableInput, is_of_peers
from tandem_trainer.loss_spikes import TrainingDiverged
from tandem_trainer.process_group import GroupLost, PeerFault
from tandem_trainer.pulse import Pulse

log = logging.getLogger("tandem_trainer")

FRAMES = 8
"""Innermost frames printed for a rank that lost its peers."""


def code_of(error: Exception, rundir: RunDir, has_peers: bool) -> ExitCode:
    """Map the error that ended training to an exit code. Log it, and record it in the run directory if a restart is of
    no use.

    Args:
        has_peers: whether there are other ranks, or may be.
    """
    Pulse.record_failure(error)
    match error:
        # Another machine may have the input that this one lacks.
        case UnusableInput() if _has_trained(rundir):
            log.error("input: %s; earlier generations had it, so this machine may lack it", error)
            return ExitCode.FAILED
        # Only a change of the manifest helps: the record in the run directory ends the job.
        case ConfigurationError():
            log.error("configuration: %s", error)
            rundir.mark_failed(error.reason, str(error), ExitCode.CONFIGURATION)
            return ExitCode.CONFIGURATION
        # Recorded by elastic_run, together with where the next generation starts.
        case TrainingDiverged():
            return error.code
        case MicroBatchHalved():
            log.warning("%s", error)
            return ExitCode.OUT_OF_MEMORY
        case Superseded():
            log.warning("%s", error)
            return ExitCode.SUPERSEDED
        case PeerFault() | GroupLost():
            log.warning("another rank cannot go on: %s", error)
            return ExitCode.PEER_LOST
        case SaveFailed():
            log.error("%s", error)
            return ExitCode.FAILED
        # A collective failed because a peer is gone. The peer's own error counts, not this one.
        case _ if has_peers and is_of_peers(error):
            log.warning("another rank is gone: %s", next(iter(str(error).splitlines()), ""))
            traceback.print_exception(error, limit=-FRAMES)
            return ExitCode.PEER_LOST
        case _:
            traceback.print_exception(error)
            return ExitCode.FAILED


def _has_trained(rundir: RunDir) -> bool:
    """Whether a generation of the run has started to train: all of its ranks had read data and weights by then."""
    try:
        return rundir.newest_generation() >= rundir.first_generation()
    except OSError:
        # A machine that cannot read the run directory is the one at fault.
        return True


def leave(code: int, pulse: Pulse | None) -> NoReturn:
    """End this process at once."""
    if pulse is not None:
        pulse.last_word(code)
    logging.shutdown()
    # Not sys.exit: with a peer gone, destroying the process group would wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
