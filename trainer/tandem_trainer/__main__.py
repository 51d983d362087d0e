"""One training process: `torchrun … -m tandem_trainer`, or alone, `python -m tandem_trainer`.

Its exit code says how it ended (tandem.exitcode), and so does its last word to its agent.
"""

import logging
import os
import sys
import traceback

from pydantic import ValidationError

from tandem.exitcode import ExitCode
from tandem.launch import GENERATION, REPLICA, RUN_DIR
from tandem.memory import keep_freed_memory
from tandem.rundir import RunDir
from tandem_trainer.checkpoint.saving import SaveFailed
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.group import Group
from tandem_trainer.loop import train
from tandem_trainer.mistake import ConfigurationError
from tandem_trainer.pulse import Pulse, Watchdog

log = logging.getLogger("tandem_trainer")

PEER_LOST = ("by peer", "Broken pipe", "Connection refused", "Socket Timeout", "NCCL", "Timed out waiting", "store")
"""What torch's collectives say when another rank is gone; they have no type of exception for it."""


def main() -> None:
    """Train, and leave with the exit code that says how it went."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    keep_freed_memory()
    pulse = Pulse.open_for_rank()
    if pulse is not None:
        Watchdog(pulse).start()
    code = _run(pulse)
    if pulse is not None:
        pulse.last_word(code)
    logging.shutdown()
    # Not sys.exit: with a peer gone, destroying the process group would wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(pulse: Pulse | None) -> ExitCode:
    path = os.environ.get(RUN_DIR)
    if not path:
        log.error("set %s to the run directory; tandem run and the operator do", RUN_DIR)
        return ExitCode.CONFIGURATION
    rundir = RunDir(path)
    try:
        job = rundir.read_job()
    except (OSError, ValueError, ValidationError) as error:
        log.error("%s holds no job: %s", rundir.job_file, error)  # noqa: TRY400 - the sentence is enough
        return ExitCode.CONFIGURATION
    rundir.create()
    group: Group | None = None
    try:
        group = Group.join()
        generation = int(os.environ.get(GENERATION, "0")) or _next_generation(rundir, group)
        members = [str(view["replica"]) for view in group.gather({"replica": os.environ.get(REPLICA, "alone")})]
        code = train(job, rundir, group, generation, list(dict.fromkeys(members)), pulse)
        group.leave()
    except ConfigurationError as error:
        log.error("configuration: %s", error)  # noqa: TRY400
        rundir.mark_failed("ConfigurationError", str(error), ExitCode.CONFIGURATION)
        return ExitCode.CONFIGURATION
    except Superseded as error:
        log.warning("%s", error)
        return ExitCode.SUPERSEDED
    except SaveFailed as error:
        log.error("%s", error)  # noqa: TRY400
        return ExitCode.FAILED
    except RuntimeError as error:
        if (group is None or group.world_size > 1) and any(sign in str(error) for sign in PEER_LOST):
            log.warning("another rank is gone: %s", str(error).splitlines()[0])
            return ExitCode.PEER_LOST
        traceback.print_exc()
        return ExitCode.FAILED
    except Exception:
        traceback.print_exc()
        return ExitCode.FAILED
    return code


def _next_generation(rundir: RunDir, group: Group) -> int:
    """Without a coordinator: one more than the newest there is."""
    return int(group.tell({"generation": rundir.newest_generation() + 1})["generation"])


if __name__ == "__main__":
    main()
