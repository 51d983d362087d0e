"""How a training process ends: which exit code an error means, and how to leave with it."""

import logging
import os
import re
import sys
import traceback
from typing import NoReturn

import torch.distributed as dist

from tandem.exitcode import ExitCode
from tandem.rundir import RunDir
from tandem_trainer.checkpoint.saving import SaveFailed
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.course import WentBack
from tandem_trainer.group import PeerFault
from tandem_trainer.mistake import ConfigurationError
from tandem_trainer.pulse import Pulse

log = logging.getLogger("tandem_trainer")

GLOO = re.compile(r"^\[[^\]]*\bgloo/[^\]]*:\d+\]|^Gloo connectFullMesh failed")
"""How what gloo says begins, with the place in its source: it has no type of exception. Read off torch 2.15 with peers
that were killed, had ended or were late, in each kind of collective. NCCL and the store have one, `DistError`."""
FRAMES = 8
"""So many of the innermost frames say where a rank missed its peers."""


def code_of(error: Exception, rundir: RunDir, has_peers: bool) -> ExitCode:
    """The exit code for what ended training; says on the log what it was, and on the disk if trying again is no use.

    Args:
        has_peers: whether there are other ranks, or may be.
    """
    match error:
        case ConfigurationError():
            log.error("configuration: %s", error)
            rundir.mark_failed(error.reason, str(error), ExitCode.CONFIGURATION)
            return ExitCode.CONFIGURATION
        case WentBack():
            return error.code
        case Superseded():
            log.warning("%s", error)
            return ExitCode.SUPERSEDED
        case PeerFault():
            log.warning("another rank cannot go on: %s", error)
            return ExitCode.PEER_LOST
        case SaveFailed():
            log.error("%s", error)
            return ExitCode.FAILED
        case _ if has_peers and _peer_is_lost(error):
            log.warning("another rank is gone: %s", next(iter(str(error).splitlines()), ""))
            traceback.print_exception(error, limit=-FRAMES)
            return ExitCode.PEER_LOST
        case _:
            traceback.print_exception(error)
            return ExitCode.FAILED


def _peer_is_lost(error: BaseException | None) -> bool:
    """Whether a collective or the store has failed, also if the script has made another error of it."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and GLOO.match(str(error))):
            return True
        error = error.__cause__
    return False


def leave(code: int, pulse: Pulse | None) -> NoReturn:
    """End this process at once."""
    if pulse is not None:
        pulse.last_word(code)
    logging.shutdown()
    # Not sys.exit: with a peer gone, destroying the process group would wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
