"""Waiting for a job to be recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.launch import wait_for_job
from tandem.rundir.layout import RunDir
from tests.support import manifests

JOB = manifests.job("digits")


class Clock:
    """Time that passes only while somebody sleeps; at `at` seconds something happens."""

    def __init__(self, at: float, happens: Callable[[], None]) -> None:
        self.now, self._at, self._happens = 0.0, at, happens

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        if before < self._at <= self.now:
            self._happens()
        assert self.now < 1000, "waits for ever"


@pytest.mark.parametrize(("after", "said"), [(0.2, 0), (9.0, 0), (60.0, 1)])
def test_the_job_is_taken_as_soon_as_it_is_there_and_a_long_wait_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, said: int
) -> None:
    rundir, words = RunDir(tmp_path), list[str]()
    clock = Clock(after, lambda: rundir.write_job(JOB))
    monkeypatch.setattr(launch, "time", clock)
    assert wait_for_job(rundir, words.append) == JOB
    assert clock.now < after + 1
    assert len(words) == said
    assert all(str(rundir.job_file) in line for line in words)


def test_what_an_earlier_job_of_that_name_has_recorded_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(uid: str) -> DistributedTrainingJob:
        return JOB.model_copy(
            update={"metadata": JOB.metadata.model_copy(update={"annotations": {launch.UID_ANNOTATION: uid}})}
        )

    rundir, words = RunDir(tmp_path), list[str]()
    rundir.write_job(of("old"))
    rundir.mark_failed("Diverged", "the earlier one", 71)
    monkeypatch.setattr(launch, "time", Clock(100.0, lambda: rundir.write_job(of("new"))))
    assert wait_for_job(rundir, words.append, "new") == of("new")
    assert len(words) == 2
    assert "earlier job" in words[0]


def test_a_job_that_has_failed_before_it_was_recorded_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path)
    monkeypatch.setattr(launch, "time", Clock(5.0, lambda: rundir.mark_failed("NoResult", "it did not start", 1)))
    assert wait_for_job(rundir, list[str]().append) is None


def test_what_is_no_job_is_not_waited_for_either(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.job_file.write_text("{}")
    with pytest.raises(ValueError, match="apiVersion"):
        wait_for_job(rundir, list[str]().append)
