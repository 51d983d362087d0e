"""A run directory is taken by the coordinator of a job only where its disk can hold one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tandem_coordinator.__main__ import CannotStart, _take
from tests.support.manifests import job

SCRIPT = job(trainer={"command": ["python", "train.py"]})


def refused(*given: Any, **more: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_disk_without_hard_links_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refused)
        with pytest.raises(CannotStart, match="has no hard links, which checkpoints need; take a local disk"):
            _take(rundir, SCRIPT)
    assert list(rundir.path.iterdir()) == []
    assert _take(rundir, SCRIPT), "on another disk it is"


def test_a_run_directory_that_is_the_jobs_already_is_not_tried_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    assert _take(rundir, SCRIPT)
    rundir.create()
    rundir.write_job(SCRIPT)
    monkeypatch.setattr(os, "link", refused)
    assert not _take(rundir, SCRIPT), "a coordinator that starts again is in a hurry"
