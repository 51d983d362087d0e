"""Python processes that have imported torch already, for tests that start many: forked as an agent's ranks are.

What is forked is started by its stub (tandem_trainer.agent.warm), and goes on as it would after a cold start. Its
variables can be seen from outside, as those of a process that was executed: `tandem run` finds its processes by them.
"""

import atexit
import ctypes
import functools
import json
import os
import sys
from pathlib import Path

from tandem_launcher.local import starter
from tandem_trainer.agent.warm import stub
from tests.support import ROOT
from tests.support.waiting import SECONDS
from tests.support.warm_starter import ADDRESS, SETTINGS
from tests.support.zygote import Forked

_ENV_START, _ENV_END = 47, 48
"""Fields of /proc/PID/stat after the name."""


def warm_command(*arguments: str) -> list[str]:
    """Start Python with these arguments, warm; in this environment."""
    return [sys.executable, "-I", "-S", stub.__file__, *arguments]


def warm_environment(*imports: str) -> dict[str, str]:
    """The variable that a warm command needs.

    Args:
        imports: modules that are imported beforehand, as well as those of every rank.
    """
    return {stub.ADDRESS: address(*imports)}


@functools.cache
def address(*imports: str) -> str:
    """The name of the socket of the fork server of this test session that has these modules, too; it ends with it."""
    # pyarrow, which pandas and with it scikit-learn import, starts a thread otherwise, and nothing could be forked.
    variables = os.environ | {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    (reads, until), (told, tells) = os.pipe(), os.pipe()
    with os.fdopen(reads, "rb") as stdin, os.fdopen(tells, "wb") as output, os.fdopen(os.dup(2), "wb") as errors:
        server = Forked("tests.support.warm", imports, variables, output, errors=errors, stdin=stdin)
    atexit.register(_end, server, until)
    with os.fdopen(told) as said:
        address = said.readline().strip()
    assert address, f"nothing can be forked with {imports}"
    return address


def _end(server: Forked, until: int) -> None:
    os.close(until)
    server.wait(SECONDS)


def main() -> None:
    """Be the fork server with the modules in the arguments, forked by the zygote."""
    serve(sys.argv[1:])


def serve(imports: list[str]) -> None:
    """Be the fork server, until standard input ends; in each process that is forked, become what was asked for."""
    from tandem_trainer.agent.torchrun import AGENT_MODULES, RANK_MODULES, preload, run_and_exit
    from tandem_trainer.agent.warm import forkserver

    assert preload((*AGENT_MODULES, *imports))
    request = forkserver.fork_server(lambda: preload(RANK_MODULES))
    if request is None:
        print(os.environ[stub.ADDRESS], flush=True)
        sys.stdin.read()
        return
    sys.path.remove(str(ROOT))
    if settings := os.environ.pop(SETTINGS, ""):
        del os.environ[stub.ADDRESS], os.environ[ADDRESS]
        forkserver._name("python")
        started = json.loads(settings)
        if started["background"]:
            starter.step_back(os.getpid())
        if started["cores"]:
            os.sched_setaffinity(0, started["cores"])
    _show_variables()
    run_and_exit(request.arguments)


def _show_variables() -> None:
    """Write the variables to where the kernel looks for them, over those with which the server was executed."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    content = b"".join(b"%s=%s\0" % pair for pair in os.environb.items())[: end - start]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))
