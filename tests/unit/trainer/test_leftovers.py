"""What a rank has started ends with it, and not what began a session of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tandem_trainer.agent.warm.leftovers import end_leftovers
from tests.support.processes import alive
from tests.support.waiting import until

RANK = """
import subprocess, sys
helper = subprocess.Popen(["sleep", "600"])
writer = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(helper.pid, writer.pid, flush=True)
sys.stdin.read()
sys.exit(int(sys.argv[1]))
"""


class Rank:
    """A session leader with a process beside it, and one that began a session of its own."""

    def __init__(self, code: int) -> None:
        command = [sys.executable, "-c", RANK, str(code)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        self.helper, self.writer = (int(word) for word in self.process.stdout.readline().split())

    def ends(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.stdin.close()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        for pid in (self.helper, self.writer):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    made = Rank(request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("rank", "kill"), [(1, False), (75, False), (0, True)], indirect=["rank"])
def test_what_a_rank_that_failed_or_was_killed_has_started_ends_with_it(rank: Rank, kill: bool) -> None:
    rank.ends(kill)
    end_leftovers(rank.process.pid)
    until(lambda: not alive(rank.helper), "the end of the process beside it")
    assert alive(rank.writer), "a checkpoint is written to its end"


@pytest.mark.parametrize("rank", [0], indirect=True)
def test_what_a_script_leaves_running_behind_a_good_end_goes_on(rank: Rank) -> None:
    end_leftovers(rank.process.pid)
    assert alive(rank.process.pid), "it has not ended"
    rank.ends()
    end_leftovers(rank.process.pid)
    assert alive(rank.helper)


def test_of_a_process_that_is_no_child_or_is_reaped_nothing_is_touched() -> None:
    end_leftovers(os.getppid())
    ended = subprocess.Popen(["false"])
    ended.wait()
    end_leftovers(ended.pid)
