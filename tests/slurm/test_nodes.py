"""A running job on a real SLURM gets a node in place of one that failed, and more or fewer when its user says so."""

import subprocess

import pytest

from tests.support.planned import planned_samples
from tests.support.ranks import sample_ids
from tests.support.slurm.run import SlurmRun, repeated, saved
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
WHOLE = (
    *("--profile", "whole", "--set", "evaluators.replicas=0", "--set", "workers.maxReplicas=3"),
    *("--set", "trainer.loop.epochs=100000", "--set", "checkpoint.everySteps=20"),
)


def test_a_node_that_failed_is_replaced_while_the_job_runs(run: SlurmRun) -> None:
    job = run.submit(*WHOLE)
    run.on({"n0", "n1"})
    until(lambda: saved(run), "a checkpoint", otherwise=run.output)
    first = saved(run)
    run.slurm.kill("n1")
    step = run.on({"n0", "n2"}, after=first)
    assert run.state() == "RUNNING None"
    assert f"{job}\n" in run.slurm.ask("squeue", "--noheader", "--format=%i", "--states=RUNNING")
    told = [line.split()[:3] for line in run.tandem("status", "digits").stdout.splitlines()]
    assert ["worker-1", "running", "n2"] in told
    assert "rank 1 · worker-1" in run.tandem("debug", "digits", "1").stdout
    # The group became smaller and larger; what it did since its last checkpoint was made again, and nothing before.
    assert all(one > first for one in repeated(run))
    assert "is stopped; saved after step" in run.tandem("stop", "digits").stdout
    assert not run.queue()
    assert saved(run) >= step
    digests = sample_ids(run.run_dir)
    assert digests == planned_samples(max(digests))


@pytest.mark.full("cli", "coordinator")
def test_a_user_adds_a_node_and_gives_it_back(run: SlurmRun) -> None:
    run.submit(*WHOLE)
    step = run.on({"n0", "n1"})
    assert "scaled to 3 workers" in run.tandem("scale", "digits", "3").stdout
    step = run.on({"n0", "n1", "n2"}, after=step)
    assert "replicas must be from 1 to 3, not 4" in run.tandem("scale", "digits", "4").stderr
    run.tandem("scale", "digits", "2")
    step = run.on({"n0", "n1"}, after=step)
    until(lambda: "n2" not in run.queue(), "the node back", otherwise=run.queue)
    run.on({"n0", "n1"}, after=step)
    assert not repeated(run)
    digests = sample_ids(run.run_dir)
    assert digests == planned_samples(max(digests))


@pytest.mark.full("cli", "coordinator")
def test_a_node_more_does_not_outlive_a_head_that_is_killed(run: SlurmRun) -> None:
    job = run.submit(*WHOLE)
    step = run.on({"n0", "n1"})
    run.tandem("scale", "digits", "3")
    run.on({"n0", "n1", "n2"}, after=step)
    run.slurm.ask("scancel", "--batch", "--signal=KILL", job)
    until(lambda: not run.queue(), "an empty queue", otherwise=run.queue)


@pytest.mark.full("cli", "coordinator")
def test_where_compute_nodes_may_submit_nothing_the_status_says_so_and_the_user_submits(run: SlurmRun) -> None:
    job = run.submit(*WHOLE)
    step = run.on({"n0", "n1"})
    with run.slurm.closed("all"):
        run.tandem("scale", "digits", "3")

        def told() -> bool:
            return "no further node can be requested: " in run.tandem("status", "digits").stdout

        until(told, "the reason", pause=1.0, otherwise=run.output)
    words = ["sbatch", f"--chdir={run.folder}", str(run.path / "slurm" / "extend.sh")]
    subprocess.run(["env", *(f"{name}={value}" for name, value in run.variables().items()), *words], check=True)
    run.on({"n0", "n1", "n2"}, after=step)
    run.slurm.ask("scancel", job)
    until(lambda: not run.queue(), "an empty queue", otherwise=run.queue)
