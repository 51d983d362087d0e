"""Python processes that have imported torch already, for tests that start many: forked as an agent's ranks are."""

import atexit
import functools
import os
import subprocess
import sys

from tandem_trainer.agent.warm import stub

SERVER = """
import os, sys
from tandem_trainer.agent.torchrun import RANK_MODULES, AGENT_MODULES, preload, run_and_exit
from tandem_trainer.agent.warm import forkserver
assert preload((*AGENT_MODULES, *sys.argv[1:]))
request = forkserver.fork_server(lambda: preload(RANK_MODULES))
if request is not None:
    run_and_exit(request.arguments)
else:
    print(os.environ["TANDEM_FORK_SERVER"], flush=True)
    sys.stdin.read()
"""


@functools.cache
def _address(*imports: str) -> str:
    """Start the fork server of this test session that has these modules, too; it ends with it."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *imports],
        # pyarrow, which pandas and with it scikit-learn import, starts a thread otherwise, and nothing could be forked.
        env=os.environ | {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)
    address = server.stdout.readline().strip()
    assert address, f"nothing can be forked with {imports}"
    return address


def warm_command(*arguments: str) -> list[str]:
    """Start Python with these arguments, warm; in this environment."""
    return [sys.executable, "-I", "-S", stub.__file__, *arguments]


def warm_environment(*imports: str) -> dict[str, str]:
    """The variable that a warm command needs.

    Args:
        imports: modules that are imported beforehand, as well as those of every rank.
    """
    return {stub.ADDRESS: _address(*imports)}
