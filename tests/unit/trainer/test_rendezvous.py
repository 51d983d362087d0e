"""How an agent ends that cannot begin, and what it ends with its ranks."""

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import PULSE, RUN_DIR, UID
from tandem.rundir.layout import RunDir
from tandem_trainer.agent import rendezvous
from tandem_trainer.agent.heartbeat import RanksEnded
from tandem_trainer.agent.local_ranks import LocalRanks
from tandem_trainer.pulse import MIXED, PARKED, SURVIVES, Pulse
from tests.support.processes import alive
from tests.support.waiting import until


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> RunDir:
    """The run directory of an agent whose log is looked at."""
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    monkeypatch.delenv(UID, raising=False)
    monkeypatch.setattr(rendezvous, "log_to_stderr", lambda: None)
    monkeypatch.setattr(rendezvous.log, "propagate", True)
    caplog.set_level(logging.INFO, logger="tandem.agent")
    return RunDir(tmp_path)


def started() -> int | str | None:
    """The exit code of an agent that does not start."""
    parameters = RendezvousParameters("tandem", "127.0.0.1:7070", "digits", 1, 2, "127.0.0.1")
    with pytest.raises(SystemExit) as ended:
        rendezvous.create_handler(parameters)
    return ended.value.code


def test_a_mount_that_is_stale_is_worth_another_try(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(rundir: RunDir) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(rundir.job_file))

    monkeypatch.setattr(RunDir, "read_job", stale)
    assert started() == ExitCode.FAILED
    assert str(rundir.job_file) in caplog.text


def test_what_is_no_job_is_a_mistake_that_stays(rundir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    rundir.job_file.write_text('{"kind": "Pod"}')
    assert started() == ExitCode.CONFIGURATION
    assert "kind" in caplog.text


def test_a_variable_that_is_missing_is_named(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(RUN_DIR)
    assert started() == ExitCode.CONFIGURATION
    assert f"set {RUN_DIR}" in caplog.text


STOPPED = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = subprocess.Popen(["sleep", "600"])
writer = subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(deaf.pid, writer.pid, flush=True)
signal.pause()
"""


def test_what_a_rank_has_started_ends_with_it_where_torchrun_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data server that ignores SIGTERM would keep its port and its memory of a GPU."""
    rank = subprocess.Popen([sys.executable, "-c", STOPPED], text=True, start_new_session=True, stdout=subprocess.PIPE)
    deaf, writer = (int(word) for word in rank.stdout.readline().split())

    def close(context: PContext) -> None:
        os.killpg(rank.pid, signal.SIGTERM)
        rank.wait()
        assert alive(deaf)

    monkeypatch.setattr(PContext, "close", close)
    monkeypatch.setattr(PContext, "wait", PContext.wait)
    rendezvous._wrap_polling(Mock())
    try:
        PContext.close(Mock(pids=lambda: {0: rank.pid}))
        until(lambda: not alive(deaf), "the end of what ignores the signal")
        assert alive(writer), "a checkpoint is written to its end"
    finally:
        rank.stdout.close()
        for pid in (deaf, writer):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_program_that_imports_torchs_agent_first_is_shown_no_error() -> None:
    """As transformers and accelerate do: torch then loads this entry point in the middle of that import."""
    code = (
        "import torch.distributed.elastic.agent.server.api\n"
        "from torch.distributed.elastic.rendezvous.registry import handler_registry\n"
        "print('tandem' in handler_registry._registry)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.fixture
def handler() -> Iterator[rendezvous.TandemRendezvous]:
    """The rendezvous of an agent whose script has begun its newest recorded generation, 1, with a session that can go
    on in another group."""
    made = rendezvous.TandemRendezvous.__new__(rendezvous.TandemRendezvous)
    made._regroups = made._is_script = True
    made._has_failed_in_standby = made._has_ended_parked = False
    made._heartbeat = Mock(is_preparing=False, is_over=False)
    made._rundir = Mock(newest_generation=lambda: 1, generation_record={1: Mock(standby=True)}.get)
    made._generation, made._ranks = 1, LocalRanks(1, 1)
    yield made
    made._ranks.close()


@pytest.mark.parametrize("state", [SURVIVES, PARKED, MIXED])
def test_after_a_mixed_group_all_ranks_run_the_script_from_its_beginning(
    handler: rendezvous.TandemRendezvous, monkeypatch: pytest.MonkeyPatch, state: int
) -> None:
    monkeypatch.setenv(PULSE, str(handler._ranks.folder))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    pulse = Pulse.open_for_rank()
    pulse.set_regroup_state(state)
    assert handler._ranks.survive == (state != MIXED and handler._ranks.all_running)
    assert handler._starts_in_standby() == (state != MIXED)


def test_a_failure_in_standby_counts_until_a_group_has_begun(handler: rendezvous.TandemRendezvous) -> None:
    handler._heartbeat.is_preparing = True  # type: ignore[misc]
    handler._update_standby_failure()
    handler._heartbeat.is_preparing = False  # type: ignore[misc]
    handler._generation = 2
    handler._update_standby_failure()
    assert not handler._starts_in_standby()
    handler._generation = 1
    handler._update_standby_failure()
    assert handler._starts_in_standby()


def test_ranks_that_end_while_they_wait_have_not_failed_in_standby(handler: rendezvous.TandemRendezvous) -> None:
    handler._heartbeat.release_ranks.return_value = Mock(generation=1)  # type: ignore[attr-defined]
    handler._join = Mock(side_effect=RanksEnded)  # type: ignore[method-assign]
    assert not handler._regroup()
    handler._heartbeat.is_preparing = True  # type: ignore[misc]
    handler._update_standby_failure()
    assert not handler._has_failed_in_standby
