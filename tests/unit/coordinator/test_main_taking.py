"""A run directory is taken by the coordinator of a job only where its disk can hold one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import UID_ANNOTATION
from tandem.rundir.layout import RunDir
from tandem_coordinator.__main__ import CannotStart, _changed_settings, _claim_rundir
from tests.support.manifests import images, job, manifest, run_directory

SCRIPT = job(trainer={"command": ["python", "train.py"]})


def refused(*given: Any, **more: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_disk_without_hard_links_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refused)
        with pytest.raises(CannotStart, match="does not support hard links, which checkpoints need; use a local disk"):
            _claim_rundir(rundir, SCRIPT)
    assert list(rundir.path.iterdir()) == []
    assert _claim_rundir(rundir, SCRIPT), "on another disk it is"


def test_a_run_directory_that_is_the_jobs_already_is_not_tried_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    assert _claim_rundir(rundir, SCRIPT)
    rundir.create()
    rundir.write_job(SCRIPT)
    monkeypatch.setattr(os, "link", refused)
    assert not _claim_rundir(rundir, SCRIPT), "a coordinator that starts again is in a hurry"


GO_ON = "tandem submit FILE --set spec.checkpoint.onExisting=Resume"
BEGIN_ANEW = "tandem submit FILE --set spec.checkpoint.onExisting=Fresh"
KEPT_OF_A_POD = 500
"""Characters of a container's last words that reach the status of a job."""


def trains(**config: Any) -> DistributedTrainingJob:
    return job("digits", trainer=images(config))


def refusal(rundir: RunDir, of: DistributedTrainingJob) -> str:
    with pytest.raises(CannotStart) as told:
        _claim_rundir(rundir, of)
    return str(told.value)


def test_who_is_refused_is_told_what_to_type(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "digits", trains())
    (rundir.checkpoints / "step-000000500").mkdir()
    assert BEGIN_ANEW in refusal(rundir, trains(seed=7))
    unwilling = manifest("digits", checkpoint={"onExisting": "Refuse"})
    unwilling["metadata"]["annotations"] = {UID_ANNOTATION: "another object"}
    told = refusal(rundir, DistributedTrainingJob.parse(unwilling))
    assert GO_ON in told
    assert BEGIN_ANEW in told
    rundir.job_file.write_text("{")
    assert BEGIN_ANEW in refusal(rundir, trains())


def test_what_to_type_is_not_lost_behind_all_that_differs(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "digits", trains())
    (rundir.checkpoints / "step-000000500").mkdir()
    other = {
        "model": "baby-cnn",
        "seed": 7,
        "globalBatchSize": 32,
        "dropLast": True,
        "initialWeights": "weights.safetensors",
        "data": {"name": "mnist", "validation": 0.1},
        "optimizer": {"name": "sgd"},
    }
    told = refusal(rundir, trains(**other))
    assert "and 5 more); undo that" in told
    assert BEGIN_ANEW in told.replace(str(rundir.path), "/tandem/digits")[:KEPT_OF_A_POD]


def test_what_ranks_read_at_their_start_and_has_changed_since_is_named(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    before, now = ({"checkpoint": {"everySteps": steps, "keepLast": keep}} for steps, keep in ((10, 3), (20, 4)))
    assert _changed_settings(rundir, job(**before)) == "", "there is nothing yet"
    rundir.create()
    rundir.write_job(job(**before))
    assert _changed_settings(rundir, job(**before, elasticity={"hangSeconds": 7})) == ""
    assert _changed_settings(rundir, job(**now)) == "the job has changed checkpoint.everySteps, checkpoint.keepLast"
