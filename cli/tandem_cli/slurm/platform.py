"""The platform `slurm`: a run on a SLURM cluster.

Its run directory is on a disk that this machine shares, so most commands work as for a local run.
"""

import time

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.stacks import Inspection, RankStacks
from tandem_cli.local import run_view
from tandem_cli.local.known import is_alive
from tandem_cli.local.platform import OnThisMachine
from tandem_cli.output import echo
from tandem_cli.platforms import PlatformError, ShowAttachment, ShowPage
from tandem_cli.slurm import execution
from tandem_launcher.slurm import jobs


class OnSlurm(OnThisMachine):
    """The run in a run directory whose processes run on SLURM."""

    def page(self, port: int, show: ShowPage) -> int:
        endpoint, token = self._endpoint()
        show(endpoint, token, False)
        host, _, number = endpoint.rpartition(":")
        echo(
            "to open it on your own machine, first run: "
            f"ssh -N -L {number}:{host}:{number} LOGIN-NODE, with localhost in place of {host}",
            err=True,
        )
        return 0

    def inspect(self, rank: int | None) -> Inspection:
        self._need_running()
        return execution.inspect(self.path, rank)

    def attach(self, stacks: RankStacks, show: ShowAttachment) -> int:
        attachment, node = execution.attach(self.path, stacks)
        show(attachment)
        forward = f"ssh -N -L {attachment.port}:127.0.0.1:{attachment.port} {node}"
        echo(f"the address is on {node}; to reach it from here: {forward}", err=True)
        return 0

    def shell(self, process: str) -> int:
        if not is_alive(self.path):
            return super().shell(process)
        return execution.shell(self.path, process)

    def scale(self, replicas: int) -> str:
        if not is_alive(self.path):
            raise UserError(f"{self.path} is not running; submit it with --set workers.replicas={replicas}")
        endpoint = run_view.endpoint(self.path)
        if endpoint is None:
            raise UserError(f"{self.path} has no coordinator yet, or is another user's; try again once it runs")
        try:
            with CoordinatorClient(*endpoint) as coordinator:
                coordinator.wish(replicas)
        except CoordinatorRefused as error:
            raise UserError(str(error)) from error
        except Unreachable as error:
            raise PlatformError(str(error)) from error
        return f"{self.path} scaled to {count_noun(replicas, 'worker')}; it requests missing nodes from SLURM"

    def _stop(self, immediately: bool) -> None:
        jobs.stop(self.path, immediately)
        while queue := jobs.queued(self.path):
            time.sleep(jobs.CACHE_SECONDS)
            if any(job.waits for job in queue):
                # SLURM was requeuing the job when it got the request.
                jobs.stop(self.path, immediately)
