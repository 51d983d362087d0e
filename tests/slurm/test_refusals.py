"""What SLURM refuses, and why a job waits, in sentences. Nothing trains here."""

import re

import pytest

from tests.support.disks import small_disk
from tests.support.slurm.run import DIGITS, SlurmRun
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)


def test_a_partition_that_does_not_exist_is_named(run: SlurmRun) -> None:
    done = run.tandem("submit", "--slurm", DIGITS, "--profile", "away")
    assert done.returncode == 2
    assert "there is no such partition here" in done.stderr
    assert "train.sh requests partition away" in done.stderr
    assert not run.queue()
    assert "it was not submitted: there is no such partition here" in run.tandem("ls").stdout


def test_nodes_that_are_larger_than_any_are_said_and_leave_no_job(run: SlurmRun) -> None:
    done = run.tandem("submit", "--slurm", DIGITS, "--set", "workers.resources={requests: {memory: 999Gi}}")
    assert done.returncode == 2
    assert "no nodes of this partition satisfy the job's request" in done.stderr
    assert not run.queue()


def test_a_full_disk_is_said_before_anything_is_submitted(run: SlurmRun) -> None:
    (run.folder / "runs").mkdir()
    with small_disk(run.folder / "runs", "size=9m"):
        done = run.tandem("submit", "--slurm", DIGITS)
    assert done.returncode == 2
    assert "no space: 9.4 MB are free at runs/digits, and a run needs at least 16.0 MB" in done.stderr
    assert not run.queue()


def test_a_job_that_never_starts_says_so(run: SlurmRun) -> None:
    run.submit("--set", "workers.replicas=9")

    def told() -> bool:
        return "so it never starts" in run.tandem("status", "digits").stdout

    until(told, "the reason", pause=1.0, seconds=30, otherwise=lambda: run.tandem("status", "digits").stdout)


def test_a_job_that_waits_says_why_is_not_submitted_twice_and_leaves_the_queue_when_stopped(run: SlurmRun) -> None:
    run.slurm.ask("sbatch", "--partition=main", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    until(lambda: " R " in run.queue(), "a job on all nodes")
    job = run.submit()

    def told() -> bool:
        return "all suitable nodes are busy (Resources)" in run.tandem("status", "digits").stdout

    until(told, "the reason", pause=1.0)
    assert "Pending" in run.tandem("status", "digits").stdout
    again = run.tandem("submit", "--slurm", DIGITS)
    assert again.returncode == 2
    assert f"is the run of job {job}, which is pending" in again.stderr
    second = SlurmRun(run.slurm, run.folder, name="second")
    second.submit("--after", "digits")
    assert run.tandem("stop", "runs/digits").returncode == 0
    assert not run.state()
    assert "CANCELLED" in run.tandem("status", "runs/digits").stdout

    def told_of_second() -> bool:
        return "has failed, so it never starts" in second.tandem("status", second.path).stdout

    until(told_of_second, "the reason", pause=1.0, otherwise=second.state)
    third = run.tandem("submit", "--slurm", DIGITS, "--run-dir", "runs/third", "--after", "runs/digits")
    assert third.returncode == 2
    assert "runs/digits is not complete and not in SLURM's queue, so nothing can wait for it" in third.stderr


def test_an_option_that_srun_does_not_know_is_said(run: SlurmRun) -> None:
    """As --overlap was to SLURM before 20.11."""
    older = run.folder / "older" / "srun"
    older.parent.mkdir()
    older.write_text(f'#!/bin/sh\nexec {run.slurm.bin}/srun --no-such-option "$@"\n')
    older.chmod(0o755)
    run.profile("main", env={"PATH": f"{older.parent}:{run.variables()['PATH']}"})
    run.submit()
    why = ": srun: unrecognized option '--no-such-option'"

    def told() -> bool:
        said = " ".join(run.tandem("status", "digits").stdout.split())
        return why in said and re.search(r"worker-(\d) cannot be started on n\1: ", said) is not None

    until(told, "the reason", pause=1.0, seconds=90, otherwise=lambda: run.tandem("status", "digits").stdout)


def test_a_controller_that_is_away_is_said(run: SlurmRun) -> None:
    run.slurm.stop_controller()
    try:
        done = run.tandem("submit", "--slurm", DIGITS)
    finally:
        run.slurm.start("slurmctld")
    assert done.returncode == 2
    assert "SLURM does not answer" in done.stderr
