"""Becomes a shell with the environment of a process of a run on this node; `tandem shell` starts it by srun.

python -m tandem_cli.slurm.shell RUN_DIR NAME
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tandem.errors import UserError
from tandem.processes.launch import REPLICA, RUN_DIR
from tandem_cli.local.platform import exec_shell
from tandem_cli.output import print_error
from tandem_launcher.local import processes
from tandem_launcher.local.processes import RANK


def _matches(path: Path, name: str) -> Iterator[tuple[tuple[int, float], psutil.Process]]:
    """Yield the processes of that name with a sort key: ranks in order, then other processes."""
    run_dir = os.path.realpath(path)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            if variables.get(REPLICA) == name and os.path.realpath(variables.get(RUN_DIR, "")) == run_dir:
                rank = variables.get(RANK, "")
                yield (int(rank) if rank.isdecimal() else sys.maxsize, process.create_time()), process


def main() -> int:
    """Entry point. Returns only if no shell could be started."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    try:
        match = min(_matches(path, name), default=None, key=lambda pair: pair[0])
        if match is None:
            raise UserError(f"{name} of {path} is not running on {os.uname().nodename}; try again")
        return exec_shell(processes.context_of(match[1], name))
    except UserError as error:
        print_error(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
