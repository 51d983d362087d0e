"""How an agent ends that cannot begin."""

import errno
import logging
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from tandem.exitcode import ExitCode
from tandem.launch import RUN_DIR, UID
from tandem.rundir.layout import RunDir
from tandem_trainer import rendezvous


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
