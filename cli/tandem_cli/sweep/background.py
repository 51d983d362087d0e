"""A driver in the background: a process of its own, in a session of its own, whose output goes into the sweep's
folder."""

import subprocess
import time

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.processes.launch import module_command
from tandem_cli.log_lines import printable_line
from tandem_cli.sweep.definition import LOG, SweepFolder

POLL_SECONDS = 0.1
START_SECONDS = 60.0
"""Timeout for a driver to hold its sweep, in seconds."""
ERROR = "error: "


class DriverProcess(subprocess.Popen[bytes]):
    """The process of a driver. It outlives the one that has started it, so Python need not warn of that."""

    def __del__(self) -> None:
        self.poll()


def start_in_background(folder: SweepFolder) -> None:
    """Start a driver that outlives this process, and return once it holds the sweep.

    Raises:
        UserError: a driver holds it already, or the new one has ended; the message is its last one.
    """
    if folder.is_running:
        raise UserError(f"{folder.path} is running, in process {folder.driver()}")
    path = folder.path / LOG
    try:
        log = path.open("ab")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    with log:
        driver = DriverProcess(
            module_command("tandem_cli.main", "sweep", str(folder.path.resolve())),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not (folder.is_running and folder.driver() == driver.pid):
        code = driver.poll()
        if code == 0:
            return  # it had nothing to do
        if code is not None:
            lines = [printable_line(line) for line in path.read_text(errors="replace").splitlines() if line.strip()]
            last = one_line(lines[-1]).removeprefix(ERROR) if lines else f"exit code {code}"
            raise UserError(f"the sweep did not start: {last}")
        if time.monotonic() > deadline:
            raise UserError(f"the sweep did not start in {START_SECONDS:g} s; see {path}")
        time.sleep(POLL_SECONDS)
