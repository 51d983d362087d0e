"""The process that sends: `python -m tandem_coordinator.tracking [--once]`, next to the coordinator.

It follows the run directory, which holds everything, and so needs no queue: where the server is away for an hour, it
reads an hour of logs afterwards. Standard output has one JSON object per line, for its parent: `failing` is the reason
why the server has not received everything, and is empty otherwise. It ends by itself when the job has ended and
everything is sent, and when its standard input is closed, because its parent is gone then.

SIGTERM has it send what is final now, and exit. In a pod it tries for FINAL_SEND_SECONDS, because only the same job
could send it later; on a machine where a user waits it tries once, and `tandem track` sends the rest.
"""

import argparse
import fcntl
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from tandem.job.tracking import QUIET, URI, Mlflow, database, tracking_uri, without_password
from tandem.processes.distribution import install_command
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import POD, RUN_DIR
from tandem.rundir.layout import RunDir

POLL_SECONDS = 2.0
"""Time between two polls of the run directory, in seconds."""
MAX_RETRY_SECONDS = 60.0
"""Maximum time between two attempts to reach a server, in seconds; the first ones are 1, 2, 4, … seconds."""
FINAL_SEND_SECONDS, FINAL_RETRY_SECONDS = 90.0, 5.0
"""Time to send what remains after SIGTERM, of the two minutes that the operator grants; and the time between two
attempts then, in seconds."""
NICENESS = 10
"""Nice value: training has priority."""
REQUEST_SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Settings of MLflow's requests. By itself it would retry for minutes, and report nothing meanwhile."""
MAX_PROBLEM_LENGTH = 200
LOCK_FILE, LOCK_SECONDS = "lock", 10.0
"""Lock file, and the time to wait for it, in seconds: the process of a coordinator that has just died may still be
about to exit."""


def main() -> None:
    """Send until SIGTERM, or the end of the parent."""
    parser = argparse.ArgumentParser(prog="python -m tandem_coordinator.tracking", description="Send a run to MLflow.")
    parser.add_argument("--once", action="store_true", help="send what is final now, and leave")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s level=%(levelname)s %(message)s")
    os.nice(NICENESS)
    for name, value in {**QUIET, **REQUEST_SETTINGS}.items():
        os.environ.setdefault(name, value)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.once:
        stop.set()
    else:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    code = _serve(RunDir(os.environ[RUN_DIR]), stop)
    sys.stdout.flush()
    # Not sys.exit: MLflow's threads would be waited for.
    os._exit(code)


def _serve(rundir: RunDir, stop: threading.Event) -> ExitCode:
    job = rundir.read_job()
    uri = tracking_uri(job.spec.tracking.mlflow or Mlflow(), rundir.path, os.environ, POD in os.environ)
    if uri is None:
        return _fail(f"no MLflow server is known; set spec.tracking.mlflow.uri, or {URI} in its env")
    if importlib.util.find_spec("mlflow") is None:
        return _fail(f"mlflow is not installed where the coordinator runs ({install_command('mlflow')})")
    if database(uri) is not None and importlib.util.find_spec("sqlalchemy") is None:
        return _fail(f"only mlflow-skinny is installed, which needs a server in place of {without_password(uri)}")
    if (lock := _lock(rundir.tracking)) is None:
        _report("another process sends this run already")
        return ExitCode.FAILED
    from tandem_coordinator.tracking.sender import Sender  # MLflow takes seconds to import

    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    sender, failures = Sender(rundir, job, uri), 0
    grace, deadline = (FINAL_SEND_SECONDS if POD in os.environ else 0.0), None
    try:
        while True:
            is_leaving = stop.is_set()
            if is_leaving and deadline is None:
                deadline = time.monotonic() + grace
            try:
                has_ended = sender.send()
                if has_ended or is_leaving:
                    sender.end()
                _report("")
                if is_leaving:
                    return ExitCode.DONE
                failures = 0
                if has_ended:
                    # The coordinator writes the last record of the ledger when it leaves.
                    stop.wait()
                    continue
            except Exception as error:
                failures += 1
                _report(f"{without_password(uri)}: {problem_of(error)}")
                if deadline is not None:
                    if time.monotonic() + FINAL_RETRY_SECONDS > deadline:
                        return ExitCode.FAILED
                    time.sleep(FINAL_RETRY_SECONDS)
                    continue
            stop.wait(min(MAX_RETRY_SECONDS, 2.0 ** (failures - 1)) if failures else POLL_SECONDS)
    finally:
        os.close(lock)


def _exit_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(ExitCode.FAILED)


def _lock(folder: Path) -> int | None:
    """Take the lock; returns its descriptor, which the kernel releases with this process, or None while another process
    has it."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                return None
            time.sleep(0.1)
        except OSError:
            # A disk without locks. Two processes would do no harm (mlflow_run).
            return lock


def _fail(problem: str) -> ExitCode:
    _report(problem)
    return ExitCode.CONFIGURATION


def _report(problem: str) -> None:
    """Report the problem to the parent; empty if there is none."""
    print(json.dumps({"failing": problem}), flush=True)


def problem_of(error: Exception) -> str:
    """Describe an error. For a server that cannot be reached, MLflow nests three exceptions."""
    text, is_nested, cause = without_password(str(error).strip()).partition("(Caused by ")
    if is_nested:
        text = re.split(r": |, ['\"]", cause)[-1].rstrip("')\"")
    return (text.split("\n")[0] or type(error).__name__)[:MAX_PROBLEM_LENGTH]


if __name__ == "__main__":
    main()
