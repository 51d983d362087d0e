"""The platform `local`: a run of this machine."""

import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem.wire.stacks import Inspection, RankStacks
from tandem_cli import bucket
from tandem_cli.local import run_view
from tandem_cli.local.known import is_alive
from tandem_cli.local.run_output import Logs
from tandem_cli.log_lines import Line, LogSelection, Notify
from tandem_cli.output import echo
from tandem_cli.platforms import IsClosed, Run, ShowAttachment, ShowPage
from tandem_cli.view import JobEvent, JobView
from tandem_launcher.local import processes
from tandem_launcher.local.processes import ProcessContext, parent_process
from tandem_launcher.recorded_status import own_command
from tandem_launcher.terminal.summary import saved_words

POLL_SECONDS = 0.1
START_SECONDS = 5.0
"""Timeout for the process of a run to be recorded, in seconds."""
PLAIN_SHELL = "/bin/sh"


class OnThisMachine(Run):
    """The run in a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def view(self, events: tuple[JobEvent, ...] | None = None) -> JobView:
        return run_view.job_view(self.path)

    def is_over(self, view: JobView) -> bool:
        return not is_alive(self.path)

    def run_dir(self, checkpoints: Sequence[str] = ()) -> RunDir:
        return RunDir(self.path)

    def log(
        self, selection: LogSelection, follow: bool, notify: Notify, is_closed: IsClosed = lambda: False
    ) -> Iterator[Line]:
        logs, is_empty = Logs(self.path, selection.names, selection.role, selection.tail), True
        for line in logs.lines():
            yield line
            is_empty = False
        if follow:
            yield from logs.follow(lambda: is_closed() or not is_alive(self.path))
        elif is_empty:
            notify(f"the logs of {self.path} are empty so far")

    def page(self, port: int, show: ShowPage) -> int:
        show(*self._endpoint(), True)
        return 0

    def inspect(self, rank: int | None) -> Inspection:
        self._need_running()
        return processes.inspect(self.path, rank)

    def attach(self, stacks: RankStacks, show: ShowAttachment) -> int:
        show(processes.attach(self.path, stacks.rank))
        return 0

    def shell(self, process: str) -> int:
        if is_alive(self.path):
            context = processes.process_context(self.path, process)
            owner = f"of {process}" if context.rank is None else f"of {process} (rank {context.rank})"
            echo(f"a shell with the variables {owner}, in {context.folder}; `exit` leaves it", err=True)
        else:
            context = processes.rundir_context(self.path)
            echo(f"{self.path} is not running: this is a shell in its run directory; `exit` leaves it", err=True)
        return exec_shell(context)

    def scale(self, replicas: int) -> str:
        raise UserError(
            "the number of workers of a local run cannot change while it runs. To continue with "
            f"{count_noun(replicas, 'worker')}: tandem stop {shlex.quote(str(self.path))}, then tandem run with --set "
            f"workers.replicas={replicas}"
        )

    def stop(self, immediately: bool) -> str:
        if not is_alive(self.path):
            raise UserError(f"{self.path} is not running")
        self._stop(immediately)
        return f"{self.path} is stopped; {saved_in(RunDir(self.path))}"

    def _stop(self, immediately: bool) -> None:
        """Send SIGINT once or twice, as Ctrl-C does; return when all processes have ended."""
        deadline = time.monotonic() + START_SECONDS
        while (process := parent_process(self.path)) is None:
            # A run records its process a moment after its start, and it may be ending.
            if not is_alive(self.path):
                return
            if time.monotonic() > deadline:
                raise UserError(f"{self.path} is ending, or has only just started; try again")
            time.sleep(POLL_SECONDS)
        try:
            for _ in range(2 if immediately else 1):
                process.send_signal(signal.SIGINT)
                # Two signals that arrive together count as one.
                time.sleep(POLL_SECONDS)
        except psutil.NoSuchProcess:
            return
        while is_alive(self.path):
            time.sleep(POLL_SECONDS)

    def _need_running(self) -> None:
        if not is_alive(self.path):
            stacks = f"{self.path}/stacks"
            raise UserError(
                f"{self.path} is not running, so there are no stacks. Stacks of ranks that hung are in {stacks}"
            )

    def _endpoint(self) -> tuple[str, str]:
        """Return the address and token of its coordinator."""
        file = self.path / ENDPOINT
        if not file.exists():
            raise UserError(
                f"{self.path} is not running, so it has no live page. For its results: tandem report "
                f"{shlex.quote(str(self.path))}"
            )
        if (endpoint := run_view.endpoint(self.path)) is None:
            raise UserError(f"{file} cannot be read; only the user who started the run can read it")
        return endpoint


class InBucket(OnThisMachine):
    """A view of a run in a bucket, which tells what the run has written, and nothing of its processes."""

    copies_run_dir = True

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path)
        self._url = url

    def run_dir(self, checkpoints: Sequence[str] = ()) -> RunDir:
        return bucket.view(self._url)

    def log(
        self, selection: LogSelection, follow: bool, notify: Notify, is_closed: IsClosed = lambda: False
    ) -> Iterator[Line]:
        raise self._error("has no output of processes; `tandem events` and `tandem report` show what it has")

    def page(self, port: int, show: ShowPage) -> int:
        raise self._error("has no live page; for its results: tandem report URL")

    def inspect(self, rank: int | None) -> Inspection:
        raise self._error("has no processes here; run the command where the run is, or name its job")

    def shell(self, process: str) -> int:
        raise self._error("has no processes here; run the command where the run is, or name its job")

    def scale(self, replicas: int) -> str:
        raise self._error("cannot be scaled there; name its job")

    def stop(self, immediately: bool) -> str:
        raise self._error("cannot be stopped there; run the command where the run is, or name its job")

    def _error(self, reason: str) -> UserError:
        return UserError(f"{self._url} is a run in a bucket, and {reason}")


def saved_in(rundir: RunDir) -> str:
    """Describe the newest checkpoint of a stopped run."""
    saved = rundir.committed()
    return saved_words(saved[0].step if saved else None, own_command(rundir.path))


def exec_shell(context: ProcessContext) -> int:
    """Replace this process by the user's shell.

    Raises:
        UserError: the shell cannot be started.
    """
    program = os.environ.get("SHELL") or PLAIN_SHELL
    try:
        os.chdir(context.folder)
        os.execvpe(program, [program], context.variables)  # noqa: S606 - it is the user's own shell
    except OSError as error:
        raise UserError(f"the shell {program} cannot be started in {context.folder}: {error.strerror}") from error
