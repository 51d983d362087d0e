"""Becomes a shell with the variables of a process of a run on this node: `tandem shell` has srun start it.

python -m tandem_cli.slurm.shell RUN_DIR NAME
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tandem.errors import UserError
from tandem.launch import REPLICA, RUN_DIR
from tandem_cli.local import processes
from tandem_cli.local.platform import become
from tandem_cli.local.processes import RANK
from tandem_cli.output import tell


def _found(path: Path, name: str) -> Iterator[tuple[tuple[int, float], psutil.Process]]:
    """The processes of that name, the first rank before the others and before those that are none."""
    where = os.path.realpath(path)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            variables = process.environ()
            if variables.get(REPLICA) == name and os.path.realpath(variables.get(RUN_DIR, "")) == where:
                rank = variables.get(RANK, "")
                yield (int(rank) if rank.isdecimal() else sys.maxsize, process.create_time()), process


def main() -> int:
    """Entry point. Returns only where there is no shell."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    try:
        found = min(_found(path, name), default=None, key=lambda one: one[0])
        if found is None:
            raise UserError(f"{name} of {path} is not running on {os.uname().nodename} now; try again")
        return become(processes.surroundings_of(found[1], name))
    except UserError as error:
        tell(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
