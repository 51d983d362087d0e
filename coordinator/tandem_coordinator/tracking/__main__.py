"""The process that sends: `python -m tandem_coordinator.tracking [--once]`, beside the coordinator.

It follows the run directory, which holds everything, and so needs no queue: where the server is away for an hour, it
reads an hour of logs afterwards. Standard output has one JSON object a line, for its parent: `failing` says why the
server has not got everything, and is empty while it has. It ends by itself when the job has ended and all is sent, and
when its standard input is closed, because its parent is gone then.

SIGTERM has it send what is final now, and leave. In a pod it tries for LEAVE_SECONDS, for nobody but the same job could
send it later; on a machine where a user waits it tries once, and `tandem track` sends the rest.
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

from tandem.distribution import install
from tandem.exitcode import ExitCode
from tandem.launch import POD, RUN_DIR
from tandem.rundir.layout import RunDir
from tandem.tracking import QUIET, URI, Mlflow, database, tracking_uri, without_password

LOOK_SECONDS = 2.0
"""Between two looks at the run directory."""
MAX_PAUSE = 60.0
"""Between two tries to reach a server that is away; the first pauses are 1, 2, 4, … seconds."""
LEAVE_SECONDS, LEAVE_PAUSE = 90.0, 5.0
"""Of the two minutes that the operator grants; and between two tries then."""
NICENESS = 10
"""Training goes first."""
REQUESTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""MLflow itself would try for minutes, and say nothing meanwhile."""
MAX_WORDS = 200
LOCK, LOCK_SECONDS = "lock", 10.0
"""The process of a coordinator that has just died may still be about to leave."""


def main() -> None:
    """Send until SIGTERM, or the end of the parent."""
    parser = argparse.ArgumentParser(prog="python -m tandem_coordinator.tracking", description="Send a run to MLflow.")
    parser.add_argument("--once", action="store_true", help="send what is final now, and leave")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s level=%(levelname)s %(message)s")
    os.nice(NICENESS)
    for name, value in {**QUIET, **REQUESTS}.items():
        os.environ.setdefault(name, value)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.once:
        stop.set()
    else:
        threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    code = _serve(RunDir(os.environ[RUN_DIR]), stop)
    sys.stdout.flush()
    # Not sys.exit: MLflow's threads would be waited for.
    os._exit(code)


def _serve(rundir: RunDir, stop: threading.Event) -> ExitCode:
    job = rundir.read_job()
    uri = tracking_uri(job.spec.tracking.mlflow or Mlflow(), rundir.path, os.environ, POD in os.environ)
    if uri is None:
        return _told(f"no MLflow server is known; set spec.tracking.mlflow.uri, or {URI} in its env")
    if importlib.util.find_spec("mlflow") is None:
        return _told(f"mlflow is not installed where the coordinator runs ({install('mlflow')})")
    if database(uri) is not None and importlib.util.find_spec("sqlalchemy") is None:
        return _told(f"only mlflow-skinny is installed, which needs a server in place of {without_password(uri)}")
    if (lock := _locked(rundir.tracking)) is None:
        _tell("another process sends this run already")
        return ExitCode.FAILED
    from tandem_coordinator.tracking.sender import Sender  # MLflow takes seconds to import

    logging.getLogger("alembic").setLevel(logging.ERROR)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    sender, failures = Sender(rundir, job, uri), 0
    patience, deadline = (LEAVE_SECONDS if POD in os.environ else 0.0), None
    try:
        while True:
            leaving = stop.is_set()
            if leaving and deadline is None:
                deadline = time.monotonic() + patience
            try:
                ended = sender.send()
                if ended or leaving:
                    sender.end()
                _tell("")
                if leaving:
                    return ExitCode.DONE
                failures = 0
                if ended:
                    # The coordinator writes the last record of the ledger when it leaves.
                    stop.wait()
                    continue
            except Exception as error:
                failures += 1
                _tell(f"{without_password(uri)}: {words(error)}")
                if deadline is not None:
                    if time.monotonic() + LEAVE_PAUSE > deadline:
                        return ExitCode.FAILED
                    time.sleep(LEAVE_PAUSE)
                    continue
            stop.wait(min(MAX_PAUSE, 2.0 ** (failures - 1)) if failures else LOOK_SECONDS)
    finally:
        os.close(lock)


def _leave_with_the_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(ExitCode.FAILED)


def _locked(folder: Path) -> int | None:
    """A descriptor of the lock, which the kernel gives up with this process; None while another one has it."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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


def _told(why: str) -> ExitCode:
    _tell(why)
    return ExitCode.CONFIGURATION


def _tell(failing: str) -> None:
    """Say how it gets on; a parent that is gone does not hear it."""
    print(json.dumps({"failing": failing}), flush=True)


def words(error: Exception) -> str:
    """What went wrong. Of a server that is not reached, MLflow tells three exceptions in one another."""
    text, is_nested, cause = without_password(str(error).strip()).partition("(Caused by ")
    if is_nested:
        text = re.split(r": |, ['\"]", cause)[-1].rstrip("')\"")
    return (text.split("\n")[0] or type(error).__name__)[:MAX_WORDS]


if __name__ == "__main__":
    main()
