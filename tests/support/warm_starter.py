"""Starts a child of `tandem run` as tandem_launcher.local.starter does, and forks what imports torch from a process
that has imported it: the agents, coordinators and evaluators of `LocalRun`.

Runs by path in an isolated interpreter, as the starter does. The process stays as the stub of what was forked
(tandem_trainer.agent.warm.stub): it takes its signals, and ends as it ends.
"""

import json
import os
import sys
from pathlib import Path

ADDRESS = "TANDEM_TESTS_FORK_SERVER"
"""Variable with the name of the socket of the tests' fork server."""
SETTINGS = "TANDEM_TESTS_SETTINGS"
"""Variable with what the starter was told, for the process that is forked."""
PROGRAMS = ("tandem_trainer.agent", "tandem_coordinator", "tandem_evaluator")
ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    # At the end: beside the starter is a module that is called as one of Python's own.
    sys.path += [str(ROOT / "launcher/tandem_launcher/local"), str(ROOT / "trainer/tandem_trainer/agent/warm")]
    import starter  # type: ignore[import-not-found]
    import stub  # type: ignore[import-not-found]

    command = sys.argv[2:]
    if command[1:3] != ["-P", "-m"] or command[3] not in PROGRAMS:
        starter.main()
    starter.die_with(json.loads(sys.argv[1])["parent"])
    os.environ |= {stub.ADDRESS: os.environ[ADDRESS], SETTINGS: sys.argv[1]}
    sys.argv = [stub.__file__, *command[1:]]
    stub.main()
