"""`tandem run` and `tandem sweep` whose processes are forked from one that has imported torch
(tests.support.warm_starter)."""

import sys

from tandem_cli import main as command_line
from tandem_launcher.local import starter
from tests.support import ROOT, warm_starter
from tests.support.warm import address

IMPORTS = (
    *("tandem_coordinator.coordinator", "tandem_coordinator.server", "tandem_coordinator.run_sender"),
    *("tandem_evaluator.crew", "tandem_evaluator.loop", "tandem_evaluator.evaluation"),
    *("tandem_evaluator.base_model", "tandem_evaluator.program", "sklearn.datasets", "sklearn.metrics"),
)
"""What its processes import beside what ranks do."""
_CODE = f"""
import sys
from tandem_launcher.local import starter
starter.__file__ = {warm_starter.__file__!r}
if sys.argv[1] == "sweep":
    from tandem_cli.local import submission
    submission.module_command = lambda module, *words: [*sys.orig_argv[:4], *words]
from tandem_cli.main import main
main()
"""
WARM_TANDEM = (sys.executable, "-P", "-c", _CODE)
"""The command line, whose `tandem run` starts its processes warm, also for a sweep; in this environment."""


def main() -> None:
    """Be this `tandem run` in a process that was forked (tests.support.zygote)."""
    starter.__file__ = warm_starter.__file__
    sys.path.remove(str(ROOT))
    command_line.main()


def warm_run_environment() -> dict[str, str]:
    """The variable that `WARM_TANDEM` needs."""
    return {warm_starter.ADDRESS: address(*IMPORTS)}
