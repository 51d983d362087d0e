"""A run on SLURM, for the commands that work on every platform.

Its run directory is on a disk that this machine shares, so most is as for a run of this machine.
"""

import time

from tandem_cli.local.platform import OnThisMachine
from tandem_cli.output import echo
from tandem_cli.platforms import ShowPage
from tandem_cli.slurm import jobs


class OnSlurm(OnThisMachine):
    """The run in a folder, whose processes SLURM has."""

    def page(self, port: int, show: ShowPage) -> int:
        endpoint, token = self._endpoint()
        show(endpoint, token, False)
        host, _, number = endpoint.rpartition(":")
        echo(
            "open it on your own machine, after: "
            f"ssh -N -L {number}:{host}:{number} LOGIN-NODE, with localhost in place of {host}",
            err=True,
        )
        return 0

    def _stop(self, at_once: bool) -> None:
        jobs.stop(self.path, at_once)
        while jobs.queued(self.path):
            time.sleep(jobs.REMEMBERED_SECONDS)
