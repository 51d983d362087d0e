"""The batch script of a job that holds one more node: it ends with the life of the training that it began in."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tandem_cli.slurm.platform import OnSlurm
from tandem_launcher.slurm import extension, jobs, scheduler
from tandem_launcher.slurm.jobs import Submission
from tandem_launcher.slurm.scheduler import QueuedJob, SlurmError

SHOWN = "JobId=7 JobName=digits JobState={state} Reason=None Restarts={restarts} BatchFlag=1\n"


@pytest.mark.parametrize(
    ("shown", "life"),
    [
        (SHOWN.format(state="RUNNING", restarts=0), "0"),
        (SHOWN.format(state="RUNNING", restarts=2), "2"),
        (SHOWN.format(state="SUSPENDED", restarts=2), "2"),
        (SHOWN.format(state="PENDING", restarts=2), ""),
        (SHOWN.format(state="COMPLETING", restarts=0), ""),
    ],
)
def test_a_requeue_is_another_life_and_what_does_not_run_has_none(
    shown: str, life: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "run", lambda *_: shown)
    assert scheduler.life("7") == life


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    jobs.record_submission(tmp_path, Submission("7"))
    monkeypatch.setattr(extension, "POLL_SECONDS", 0.0)
    return tmp_path


def lives(monkeypatch: pytest.MonkeyPatch, answers: list[str | None]) -> Iterator[str]:
    """Have SLURM say so, one after the other; None: it does not answer."""
    left = iter(answers)

    def life(job: str) -> str:
        assert job == "7"
        said = next(left)
        if said is None:
            raise SlurmError("SLURM does not answer")
        return said

    monkeypatch.setattr(scheduler, "life", life)
    return (one or "" for one in left)


def test_it_holds_its_node_while_that_life_of_the_training_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = lives(monkeypatch, ["0", None, "0", "1", "1"])
    assert extension.hold(path, "9") == "job 7 was requeued and has new nodes"
    assert list(left) == ["1"]
    assert jobs.extensions(path) == ["9"]


def test_it_ends_at_once_if_the_training_does_not_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives(monkeypatch, [""])
    assert extension.hold(path, "9") == "job 7 does not run"
    assert jobs.extensions(path) == []


def test_one_that_runs_is_stopped_by_its_training_and_one_that_waits_leaves_the_queue(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in ("9", "10"):
        extension.register(path, job)
    queue = [("7", "RUNNING"), ("9", "RUNNING"), ("10", "PENDING")]
    waits = [QueuedJob(job, state, "Resources", "gpu", "", "N/A") for job, state in queue]
    monkeypatch.setattr(scheduler, "queue", lambda ids: [job for job in waits if job.id in ids])
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(scheduler, "cancel", lambda job: done.append(("cancel", job)))
    monkeypatch.setattr(scheduler, "signal_batch", lambda job, name: done.append((name, job)))
    words = jobs.describe_state(path)[1]
    assert words.endswith(
        "; job 10, for one more node, waits in partition gpu: all suitable nodes are busy (Resources)"
    )
    jobs.stop(path, immediately=False)
    assert done == [("INT", "7"), ("cancel", "10")]
    jobs.stop(path, immediately=True)
    assert done[2:] == [("cancel", "7"), ("cancel", "9"), ("cancel", "10")]


def test_a_job_that_slurm_was_just_putting_back_into_the_queue_is_stopped_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CACHE_SECONDS", 0.01)
    states = ["COMPLETING", "COMPLETING", "PENDING"]
    cancelled: list[str] = []

    def queue(ids: Sequence[str]) -> list[QueuedJob]:
        state = states.pop(0) if len(states) > 1 else states[0]
        return [] if cancelled else [QueuedJob("7", state, "BeginTime", "gpu", "", "N/A")]

    monkeypatch.setattr(scheduler, "queue", queue)
    monkeypatch.setattr(scheduler, "cancel", cancelled.append)
    OnSlurm(path)._stop(immediately=False)
    assert cancelled == ["7"]


def test_its_folder_may_hold_other_files(path: Path) -> None:
    extension.register(path, "10")
    extension.register(path, "9")
    (path / "slurm" / "extensions" / ".nfs0001").touch()
    assert jobs.extensions(path) == ["9", "10"]
    extension.unregister(path, "9")
    extension.unregister(path, "9")
    assert jobs.extensions(path) == ["10"]


def test_variables_that_describe_the_job_stay_inside() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0", "SLURM_CONF": "/c", "PATH": "/bin", "SBATCH_QOS": "q"}
    assert extension.outer_environment(given) == {"SLURM_CONF": "/c", "PATH": "/bin", "SBATCH_QOS": "q"}
