"""What an agent keeps of its ranks goes when it goes, however it goes."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.processes import limits
from tandem.processes.exitcode import ExitCode
from tandem.wire.protocol import Failure, RankReport
from tandem_trainer.agent import local_ranks
from tandem_trainer.agent.local_ranks import LocalRanks, remove_stale_folders
from tandem_trainer.agent.warm import forkserver
from tandem_trainer.pulse import debugger_slot
from tests.support.waiting import until


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_ranks, "_memory_folder", lambda: str(tmp_path))
    return tmp_path


def grows_old(folder: Path) -> None:
    long_ago = time.time() - 60
    os.utime(folder, (long_ago, long_ago))


def test_the_folder_of_a_killed_agent_is_removed_by_the_next_one(memory: Path) -> None:
    code = f"""
import os
from tandem_trainer.agent import local_ranks
local_ranks._memory_folder = lambda: {str(memory)!r}
local_ranks.LocalRanks(1, 2)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    (left,) = memory.iterdir()
    remove_stale_folders()
    assert left.exists(), "too young to be judged"
    grows_old(left)
    remove_stale_folders()
    assert not left.exists()


def test_the_folder_of_a_living_agent_stays(memory: Path) -> None:
    ranks = LocalRanks(1, 1)
    grows_old(ranks.folder)
    remove_stale_folders()
    assert ranks.folder.exists()
    ranks.close()
    assert list(memory.iterdir()) == []


def test_what_another_user_puts_there_hangs_nobody_and_stays(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, link, file, mine = (memory / f"tandem-g000001-{name}" for name in ("pipe", "link", "file", "mine"))
    target = memory / "target"
    os.mkfifo(pipe)
    target.mkdir()
    link.symlink_to(target)
    file.touch()
    mine.mkdir()
    for one in (pipe, target, file, mine):
        grows_old(one)
    os.utime(link, (0, 0), follow_symlinks=False)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    remove_stale_folders()
    assert mine.exists(), "the folder of another user"
    monkeypatch.setattr(os, "geteuid", lambda: me)
    remove_stale_folders()
    assert not mine.exists()
    assert [one.exists() for one in (pipe, link, target, file)] == [True] * 4


OURS = (
    *(ExitCode.DIVERGED, ExitCode.REWOUND, ExitCode.OUT_OF_MEMORY),
    *(ExitCode.SUPERSEDED, ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.CONFIGURATION),
)
"""Exit codes that mean something where Tandem says them."""
RANK = """
import os, sys, time
from tandem.wire.protocol import SCRIPT
from tandem_trainer.pulse import Pulse
pulse = Pulse.open_for_rank(phase=sys.argv[1])
pulse.beat(step=5, loss=float("nan"))
sys.stdin.read()
if len(sys.argv) > 3:
    pulse.last_word(int(sys.argv[3]))
os._exit(int(sys.argv[2]))
"""


def steps(ranks: LocalRanks, phase: str, code: int, announced: int | None = None) -> tuple[RankReport, RankReport]:
    """What is reported of a rank that makes steps, while it does and once it has ended with a code.

    Args:
        announced: what Tandem, in the rank, says before; None: nothing.
    """
    environment = os.environ | {"TANDEM_PULSE": str(ranks.folder), "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", RANK, phase, str(code), *([] if announced is None else [str(announced)])]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as rank:
        until(lambda: ranks.watch() or (ranks.is_event_driven and ranks.reports()[0].step == 5), "its steps")
        (before,) = ranks.reports()
        rank.stdin.close()
        until(lambda: ranks.watch() or ranks._codes, "its end")
        (following,) = ranks.reports()
    return before, following


LOSES_PEER = """
from tandem_trainer.pulse import Pulse
Pulse.record_failure(RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer"))
"""


def test_a_script_that_logs_its_steps_obeys_no_orders_and_its_exit_code_is_its_own(memory: Path) -> None:
    ranks = LocalRanks(1, 1)
    running, ended = steps(ranks, "script", ExitCode.PREEMPTED)
    assert (running.phase, running.step, running.script, running.saves) == ("train", 5, True, False)
    assert (running.loss, running.loss_is_finite) == (None, False)
    assert ended.phase == "script", "no step is due of it any more"
    assert ranks.verdict() == "WorkerFailed", "75 means nothing in a script"
    ranks.close()


def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_told_from_others(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [7]
    monkeypatch.setattr(local_ranks, "oom_kills", lambda: limits.OomKills(None, counts[0]))
    monkeypatch.setattr(limits, "oom_kills", lambda: limits.OomKills(None, counts[0]))
    errors = []
    for kills in (0, 1):
        ranks = LocalRanks(1, 1)
        counts[0] += kills
        ranks.reports()
        ranks.record_exit_codes({0: -signal.SIGKILL})
        failure = ranks.failure()
        errors.append(failure[1].error)
        ranks.close()
    assert errors[0] == ""
    assert errors[1].startswith("killed by the kernel (SIGKILL): the memory ")


def test_a_session_that_trains_saves_when_asked_and_its_exit_code_is_ours(memory: Path) -> None:
    ranks = LocalRanks(1, 1)
    running, ended = steps(ranks, "starting", ExitCode.PREEMPTED, announced=ExitCode.PREEMPTED)
    assert (running.phase, running.script, running.saves) == ("train", False, True)
    assert ended.phase == "train"
    assert ranks.verdict() == "MembershipChanged"
    ranks.close()


@pytest.mark.parametrize(("announced", "is_complete"), [(None, False), (ExitCode.DONE, True)])
def test_a_session_is_complete_when_it_says_so_and_not_because_its_process_ended_with_zero(
    memory: Path, announced: ExitCode | None, is_complete: bool
) -> None:
    ranks = LocalRanks(1, 1, first_rank=3)
    steps(ranks, "starting", ExitCode.DONE, announced=announced)
    assert ranks.verdict() == (None if is_complete else "WorkerFailed")
    assert list(ranks.stopped_early()) == ([] if is_complete else [0])
    found = ranks.failure()
    assert (found is None) == is_complete
    if found is not None:
        assert (found[1].code, found[1].passing) == (ExitCode.DONE, False)
        assert "exit code 0 after step 5, before its session had ended" in found[1].error
        assert "call session.stop(reason)" in found[1].error
    ranks.close()


def test_a_session_whose_last_checkpoint_is_there_may_end_in_any_way(memory: Path) -> None:
    """As with os._exit, which runs no exit function."""
    ranks = LocalRanks(1, 1)
    script = RANK.replace("sys.stdin.read()", "pulse.all_steps_taken()")
    variables = os.environ | {"TANDEM_PULSE": str(ranks.folder), "RANK": "0", "LOCAL_RANK": "0"}
    subprocess.run([sys.executable, "-c", script, "starting", "0"], env=variables, check=True)
    until(lambda: ranks.stopped_early() == {} and ranks._codes, "its end")
    assert ranks.verdict() is None
    ranks.close()


def test_a_script_of_ones_own_is_complete_when_it_ends_with_zero(memory: Path) -> None:
    ranks = LocalRanks(1, 1)
    steps(ranks, "script", ExitCode.DONE)
    assert (ranks.verdict(), ranks.failure(), ranks.stopped_early()) == (None, None, {})
    ranks.close()


def failure(ranks: LocalRanks) -> Failure:
    found = ranks.failure()
    return found[1]


def assert_plain_failure(ranks: LocalRanks, code: ExitCode) -> None:
    """The code is told as it is, and means nothing."""
    assert (ranks.last_verdict(), ranks.final_code()) == ("WorkerFailed", None)
    told = failure(ranks)
    assert (told.code, told.announced, told.consequence) == (code, False, False)
    ranks.close()


@pytest.mark.parametrize("code", OURS)
@pytest.mark.parametrize("announced", [None, ExitCode.DONE, ExitCode.FAILED])
def test_a_number_of_ours_that_nobody_has_announced_is_a_failure(
    memory: Path, code: ExitCode, announced: ExitCode | None
) -> None:
    ranks = LocalRanks(1, 1)
    steps(ranks, "starting", code, announced)
    assert ranks.verdict() == "WorkerFailed"
    assert_plain_failure(ranks, code)


@pytest.mark.parametrize("code", OURS)
def test_so_is_one_of_a_program_that_knows_nothing_of_a_pulse(memory: Path, code: ExitCode) -> None:
    ranks = LocalRanks(1, 1)
    ranks.record_exit_codes({0: code})
    assert_plain_failure(ranks, code)


@pytest.mark.parametrize("code", OURS)
def test_an_announced_one_means_what_it_says(memory: Path, code: ExitCode) -> None:
    ranks = LocalRanks(1, 1)
    steps(ranks, "starting", code, announced=code)
    final = code in (ExitCode.DIVERGED, ExitCode.CONFIGURATION)
    assert ranks.verdict() == ("WorkerFailed" if final else "MembershipChanged")
    assert ranks.final_code() == (code if final else None)
    told = failure(ranks)
    assert told.announced
    assert told.consequence == (code in (ExitCode.SUPERSEDED, ExitCode.PREEMPTED, ExitCode.PEER_LOST))
    ranks.close()


@pytest.mark.parametrize("phase", ["script", "starting"])
def test_a_rank_pauses_while_a_debugger_is_attached_and_not_when_it_has_ended_meanwhile(
    memory: Path, phase: str
) -> None:
    ranks = LocalRanks(1, 1)
    debugger_slot(ranks.folder / "rank-0").put("attached")
    running, ended = steps(ranks, phase, 1)
    assert (running.phase, running.step, running.pauses) == ("debugger", 5, True)
    assert (ended.phase, ended.pauses) == ("script" if phase == "script" else "train", False)
    ranks.close()


def test_a_rank_that_a_debugger_could_attach_to_pauses_no_more_than_any_other(memory: Path) -> None:
    ranks = LocalRanks(1, 1)
    debugger_slot(ranks.folder / "rank-0").put("listens", "4711")
    running, _ = steps(ranks, "starting", 0)
    assert (running.phase, running.pauses) == ("train", False)
    ranks.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Says how ranks have ended, as the fork server does; they are no children of the agent."""
    reads, writes = os.pipe()
    monkeypatch.setattr(local_ranks, "_exit_code", lambda _: None)
    monkeypatch.setattr(forkserver, "endings", forkserver.Endings(reads))

    def say(pid: int, status: int) -> None:
        os.write(writes, struct.pack("2i", pid, status))

    yield say
    os.close(writes)
    assert forkserver.endings.read() == {}
    assert forkserver.endings.descriptor is None, "a pipe without a server is always readable"


@pytest.mark.parametrize(
    ("phase", "number", "closed_first", "noted"),
    [
        ("starting", signal.SIGKILL, False, -signal.SIGKILL),
        ("starting", signal.SIGTERM, False, None),
        ("starting", signal.SIGKILL, True, None),
        ("script", signal.SIGKILL, False, None),
    ],
    ids=["killed", "ended by torchrun", "killed by the agent", "a script: torchrun says how"],
)
def test_of_a_forked_rank_that_was_killed_the_fork_server_says_how(
    memory: Path,
    server: Callable[[int, int], None],
    phase: str,
    number: signal.Signals,
    closed_first: bool,
    noted: int | None,
) -> None:
    ranks = LocalRanks(1, 1)
    environment = os.environ | {"TANDEM_PULSE": str(ranks.folder), "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", RANK, phase, "0"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as rank:
        until(lambda: ranks.watch() or (ranks.is_event_driven and ranks.reports()[0].step == 5), "its steps")
        if closed_first:
            ranks.order("abort")
        rank.send_signal(number)
        rank.wait()
    if not closed_first:
        # The generation is closed before this agent has looked at its ranks.
        ranks.order("abort")
    ranks.watch()
    assert ranks._codes
    server(rank.pid, number)
    ranks.watch()
    failure = ranks.failure()
    assert (failure and failure[1].code) == noted
    ranks.close()


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.FAILED])
def test_a_rank_that_ended_with_zero_is_why_another_one_lost_its_connection(memory: Path, code: ExitCode) -> None:
    ranks = LocalRanks(1, 2, first_rank=2)
    for local_rank, ends in ((1, code), (0, ExitCode.FAILED)):
        variables = os.environ | {"TANDEM_PULSE": str(ranks.folder), "RANK": str(2 + local_rank)}
        script = RANK.replace("sys.stdin.read()", LOSES_PEER if local_rank == 0 else "pass")
        command = [sys.executable, "-c", script, "script", str(int(ends))]
        subprocess.run(command, env=variables | {"LOCAL_RANK": str(local_rank)}, check=False)
    until(lambda: ranks.watch() or len(ranks._codes) == 2, "both ends")
    ranks.record_exit_codes({0: ExitCode.FAILED, 1: code})
    failed = ranks.failure()
    failure = failed[1]
    if code == ExitCode.DONE:
        assert (failure.rank, failure.code, failure.consequence, failure.passing) == (3, 0, False, False)
        assert failure.error == "it ended with exit code 0 while other ranks still worked"
    else:
        assert (failure.rank, failure.step) == (3, 5)
    ranks.close()
