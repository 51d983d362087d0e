"""What becomes of a job on a real SLURM of three nodes when its time is over, and when a node or the disk is lost."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tandem.wire.status import persistent_trouble
from tests.support.cluster.prometheus import configured, program
from tests.support.disks import BALLAST, fill, small_disk
from tests.support.planned import planned_samples
from tests.support.processes import TANDEM
from tests.support.ranks import sample_ids
from tests.support.slurm.run import ENDLESS, GIVEN_UP_SECONDS, SlurmRun, repeated, saved
from tests.support.terminal import Terminal
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


def test_the_time_limit_a_lost_node_and_a_stop_lose_no_sample(run: SlurmRun) -> None:
    job = run.submit(*ENDLESS)
    run.trains(2)
    prometheus_finds(run)
    told = [line.split() for line in run.tandem("status", "digits").stdout.splitlines()]
    assert [line[:3] for line in told if line[:1] in (["worker-0"], ["worker-1"])] == [
        ["worker-0", "running", "n0"],
        ["worker-1", "running", "n1"],
    ]
    ranks_are_looked_into(run)
    # SLURM says so 120 s before, so now.
    run.slurm.update(job, TimeLimit="2")
    until(lambda: run.state().startswith("PENDING"), "the job in the queue again", otherwise=run.output)
    first = saved(run)
    assert first > 0
    assert not list(run.targets.iterdir())
    assert "waits in partition main: it may not start before its begin time" in run.tandem("status", "digits").stdout
    run.slurm.start_requeued(job, TimeLimit="60")
    step = run.trains(2, after=first)

    run.slurm.kill("n1")
    step = run.trains(1)
    until(
        lambda: "event=node-gone name=worker-1 node=n1" in run.output(),
        "SLURM to know",
        GIVEN_UP_SECONDS,
        otherwise=run.output,
    )
    step = run.trains(1, after=step)
    assert run.state().startswith("RUNNING")

    stopped = run.tandem("stop", "digits")
    assert "is stopped; saved after step" in stopped.stdout, stopped.stderr
    assert not run.queue()
    assert saved(run) >= step
    digests = sample_ids(run.run_dir)
    assert digests == planned_samples(max(digests))
    # What the lost node did since the save at the time limit was made again, and nothing before.
    assert all(step > first for step in repeated(run))


def ranks_are_looked_into(run: SlurmRun) -> None:
    """The stacks of both ranks, from their nodes; and a shell beside one of them, on its node."""

    def look() -> bool:
        seen = json.loads(run.tandem("debug", "digits", "-o", "json").stdout or "{}").get("ranks", [])
        has_stacks = all(one["threads"] and one["threads"][0]["frames"] for one in seen)
        return has_stacks and [(one["rank"], one["replica"]) for one in seen] == [(0, "worker-0"), (1, "worker-1")]

    until(look, "the stacks of both ranks", otherwise=lambda: run.tandem("debug", "digits").stderr)
    assert "rank 1 · worker-1" in run.tandem("debug", "digits", "1").stdout
    shell = run.folder / "shell"
    shell.write_text('#!/bin/sh\necho "on $SLURMD_NODENAME, rank $RANK of $WORLD_SIZE"\n')
    shell.chmod(0o755)
    variables = [f"{name}={value}" for name, value in {**run.variables(), "SHELL": str(shell)}.items()]
    until(lambda: (seen := run.snapshot()) and seen.evaluators, "the evaluators", otherwise=run.output)
    for who, said in {"worker-1": "on n1, rank 1 of 2", "evaluator-0": "on n2, rank  of "}.items():
        terminal = Terminal()
        process = terminal.start(["env", *variables, TANDEM, "shell", "digits", who], run.folder)
        until(lambda: terminal.look() and process.poll() is not None, "the end of the shell")  # noqa: B023
        terminal.look()
        terminal.close()
        assert said in terminal.written
        assert process.returncode == 0


def prometheus_finds(run: SlurmRun) -> None:
    """A Prometheus that is told of the folder alone has the use of processors of both nodes, and whose job it is."""
    whose = [{"source_labels": ["user"], "target_label": "namespace"}]
    files = [{"files": [f"{run.targets}/*.json"]}]
    scrape = {
        "job_name": "tandem",
        "honor_labels": True,
        "file_sd_configs": files,
        "metric_relabel_configs": whose,
    }
    configuration = run.folder / "prometheus.yaml"
    configuration.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    subprocess.run([program("promtool"), "check", "config", configuration], check=True, capture_output=True)
    with configured(run.folder, configuration, program("prometheus")) as prometheus:

        def look() -> bool:
            found = prometheus.now('tandem_rank_cpu_cores{job="digits",namespace="root"}')
            return {one["metric"]["rank"] for one in found} == {"0", "1"}

        until(look, "the ranks of both nodes", pause=0.2, otherwise=lambda: str(prometheus.targets()))


def test_a_full_disk_and_the_loss_of_the_first_node_lose_nothing_that_was_saved(run: SlurmRun) -> None:
    # The lines of logs are looked at below, and those of a full disk are torn.
    run.run_dir.checkpoints.mkdir(parents=True)
    with small_disk(run.run_dir.checkpoints, "size=64m") as disk:
        job = run.submit(
            *("--profile", "beside", "--set", "evaluators.replicas=0"),
            *("--set", "trainer.loop.epochs=100000", "--set", "checkpoint.everySteps=5"),
        )
        run.trains(2)
        until(lambda: saved(run), "a checkpoint", otherwise=run.output)
        until(lambda: is_told_of_a_full_disk(run, disk), "the word of it", otherwise=run.output)
        (disk / BALLAST).unlink()
        first = saved(run)
        until(lambda: saved(run) > first, "a checkpoint after it", otherwise=run.output)
        its_first_node_is_lost(run, job)


def is_told_of_a_full_disk(run: SlurmRun, disk: Path) -> bool:
    """Whether the status says so, after the disk was filled once more: old checkpoints are deleted meanwhile."""
    with suppress(OSError):
        fill(disk)
    found = run.snapshot()
    said = persistent_trouble(found.status.troubles) if found else None
    return said is not None and said.text.startswith("the disk is full: the last ")


def its_first_node_is_lost(run: SlurmRun, job: str) -> None:
    """The job is requeued, and goes on."""
    run.slurm.kill("n0")
    first = saved(run)
    until(
        lambda: run.state().startswith("PENDING"),
        "the job in the queue again",
        GIVEN_UP_SECONDS,
        otherwise=lambda: run.queue() + run.output(),
    )
    run.slurm.has_given_up_ending()
    run.slurm.start("n0")
    run.slurm.start_requeued(job)
    run.trains(2, after=first)
    assert all(step > first for step in repeated(run))
    digests = sample_ids(run.run_dir)
    assert digests == planned_samples(max(digests))
