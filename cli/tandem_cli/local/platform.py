"""A run of this machine, for the commands that work on every platform."""

import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tandem.errors import UserError
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem.stacks import Inspection, RankStacks
from tandem_cli.local import processes, run_view
from tandem_cli.local.known import is_alive, own_command
from tandem_cli.local.processes import Surroundings, starter
from tandem_cli.local.run_output import Logs
from tandem_cli.log_lines import Choice, Line, Tell
from tandem_cli.output import echo
from tandem_cli.platforms import Run, ShowAttachment, ShowPage
from tandem_cli.terminal.summary import saved_words
from tandem_cli.view import JobEvent, JobView

POLL_SECONDS = 0.1
PLAIN_SHELL = "/bin/sh"


class OnThisMachine(Run):
    """The run in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def look(self, known: tuple[JobEvent, ...] | None = None) -> JobView:
        return run_view.look(self.path)

    def is_over(self, seen: JobView) -> bool:
        return not is_alive(self.path)

    def log(self, choice: Choice, follow: bool, tell: Tell) -> Iterator[Line]:
        found, some = Logs(self.path, choice.names, choice.role, choice.tail), False
        for one in found.lines():
            yield one
            some = True
        if follow:
            yield from found.follow(lambda: not is_alive(self.path))
        elif not some:
            tell(f"nothing is printed yet in {self.path}")

    def page(self, port: int, show: ShowPage) -> int:
        show(*self._endpoint(), True)
        return 0

    def inspect(self, rank: int | None) -> Inspection:
        self._need_running()
        return processes.inspect(self.path, rank)

    def attach(self, one: RankStacks, show: ShowAttachment) -> int:
        show(processes.attach(self.path, one.rank))
        return 0

    def shell(self, who: str) -> int:
        if is_alive(self.path):
            found = processes.surroundings(self.path, who)
            whose = f"of {who}" if found.rank is None else f"of {who} (rank {found.rank})"
            echo(f"a shell with the variables {whose}, in {found.folder}; `exit` leaves it", err=True)
        else:
            found = processes.beside(self.path)
            echo(f"{self.path} is not running: this is a shell in its run directory; `exit` leaves it", err=True)
        return become(found)

    def scale(self, replicas: int) -> str:
        again = f"tandem stop {shlex.quote(str(self.path))}, then tandem run with --set workers.replicas={replicas}"
        raise UserError(f"a run of this machine keeps the workers that it began with; {again}, goes on with {replicas}")

    def stop(self, at_once: bool) -> str:
        if not is_alive(self.path):
            raise UserError(f"{self.path} is not running")
        self._stop(at_once)
        return f"{self.path} is stopped; {saved_in(RunDir(self.path))}"

    def _stop(self, at_once: bool) -> None:
        """As Ctrl-C does, once or twice; returns when nothing of it runs."""
        if (process := starter(self.path)) is None:
            raise UserError(f"{self.path} is just ending, or has not recorded its process yet; try again")
        try:
            for _ in range(2 if at_once else 1):
                process.send_signal(signal.SIGINT)
                # Two that arrive together are one.
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
        """Address and token of its coordinator."""
        file = self.path / ENDPOINT
        if not file.exists():
            raise UserError(
                f"{self.path} is not running, so it has no live page. For its results: tandem report "
                f"{shlex.quote(str(self.path))}"
            )
        if (found := run_view.endpoint(self.path)) is None:
            raise UserError(f"{file} cannot be read; only the user who started the run can read it")
        return found


def saved_in(rundir: RunDir) -> str:
    """What a run that was stopped has saved."""
    saved = rundir.committed()
    return saved_words(saved[0].step if saved else None, own_command(rundir.path))


def become(found: Surroundings) -> int:
    """Become a shell of the user's.

    Raises:
        UserError: it cannot be started.
    """
    program = os.environ.get("SHELL") or PLAIN_SHELL
    try:
        os.chdir(found.folder)
        os.execvpe(program, [program], found.variables)  # noqa: S606 - it is the user's own shell
    except OSError as error:
        raise UserError(f"the shell {program} cannot be started in {found.folder}: {error.strerror}") from error
