"""An evaluator that is asked to leave before its work has begun."""

import subprocess
import sys
from textwrap import dedent

import pytest

from tandem.processes.exitcode import ExitCode

CALLED_BACK = """
    import os, signal, time, weakref
    from tandem_evaluator.__main__ import _leave
    class Lock: ...
    signal.signal(signal.{signal}, _leave)
    def call_back(_):
        os.kill(os.getpid(), signal.{signal})
        time.sleep(0.01)  # in which Python calls the handler
    lock = Lock()
    kept = weakref.ref(lock, call_back)
    del lock
    print("dropped", flush=True)
    try:
        time.sleep(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # as the module does at its end
"""


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", ExitCode.PREEMPTED), ("SIGINT", ExitCode.INTERRUPTED)])
def test_it_leaves_also_where_python_drops_what_a_signal_raises(signal: str, code: ExitCode) -> None:
    command = [sys.executable, "-c", dedent(CALLED_BACK.format(signal=signal))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert "dropped" in done.stdout, "the exception came through, and this test shows nothing"
    assert done.returncode == code, done.stderr
