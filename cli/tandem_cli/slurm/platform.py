"""A run on SLURM, for the commands that work on every platform.

Its run directory is on a disk that this machine shares, so most is as for a run of this machine.
"""

import time

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.errors import UserError
from tandem.formatting import several
from tandem.stacks import Inspection, RankStacks
from tandem_cli.local import run_view
from tandem_cli.local.known import is_alive
from tandem_cli.local.platform import OnThisMachine
from tandem_cli.output import echo
from tandem_cli.platforms import PlatformError, ShowAttachment, ShowPage
from tandem_cli.slurm import execution, jobs


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

    def inspect(self, rank: int | None) -> Inspection:
        self._need_running()
        return execution.inspect(self.path, rank)

    def attach(self, one: RankStacks, show: ShowAttachment) -> int:
        found, node = execution.attach(self.path, one)
        show(found)
        forward = f"ssh -N -L {found.port}:127.0.0.1:{found.port} {node}"
        echo(f"that is an address of {node}; to reach it from here: {forward}", err=True)
        return 0

    def shell(self, who: str) -> int:
        if not is_alive(self.path):
            return super().shell(who)
        return execution.shell(self.path, who)

    def scale(self, replicas: int) -> str:
        if not is_alive(self.path):
            raise UserError(f"{self.path} is not running; submit it with --set workers.replicas={replicas}")
        found = run_view.endpoint(self.path)
        if found is None:
            raise UserError(f"{self.path} has no coordinator yet, or is another user's; try again once it runs")
        try:
            with CoordinatorClient(*found) as coordinator:
                coordinator.wish(replicas)
        except Refused as error:
            raise UserError(str(error)) from error
        except Unreachable as error:
            raise PlatformError(str(error)) from error
        return f"{self.path} goes on with {several(replicas, 'worker')}; it asks SLURM for nodes that it lacks"

    def _stop(self, at_once: bool) -> None:
        jobs.stop(self.path, at_once)
        while found := jobs.queued(self.path):
            time.sleep(jobs.REMEMBERED_SECONDS)
            if any(job.waits for job in found):
                # SLURM was about to put it back into the queue when it was asked.
                jobs.stop(self.path, at_once)
