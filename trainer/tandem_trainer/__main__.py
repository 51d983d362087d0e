"""One training process: `torchrun … -m tandem_trainer`, or alone, `python -m tandem_trainer`.

Its exit code, which it also announces to its agent, tells how it ended (tandem.processes.exitcode).
"""

import os
import sys

# In a rank that starts cold, Python searches the folder of the job's code before its own modules. Move the folder to
# the end of the path, as in a warm rank: no file of the user's hides a module that is imported here. The name is
# tandem.rundir.code's, which would be imported too late.
if os.path.basename(sys.path[0]).lstrip(".").startswith("tandem-code-"):  # noqa: PTH119
    sys.path.append(sys.path.pop(0))

import logging

from pydantic import ValidationError

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR, STANDBY
from tandem.rundir.durable import is_transient
from tandem.rundir.layout import RunDir
from tandem_trainer.ending import code_of, leave
from tandem_trainer.malloc import keep_freed_memory
from tandem_trainer.process_group import Group
from tandem_trainer.pulse import Pulse, Watchdog
from tandem_trainer.train import train

log = logging.getLogger("tandem_trainer")


def main() -> None:
    """Train, and exit with the code of the outcome."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    keep_freed_memory()
    pulse = Pulse.open_for_rank()
    if pulse is not None:
        Watchdog(pulse).start()
    leave(_run(pulse), pulse)


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
        return ExitCode.FAILED if is_transient(error) else ExitCode.CONFIGURATION
    rundir.create()
    group: Group | None = None
    try:
        group = Group.join() if not os.environ.get(STANDBY) else None
        return train(job, rundir, group, pulse)
    except Exception as error:
        return code_of(error, rundir, has_peers=group is None or group.world_size > 1)


if __name__ == "__main__":
    main()
