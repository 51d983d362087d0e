"""One job on a real SLURM of three nodes: to its end, through a time limit, a lost node, preemption and a cancel."""

import json
import subprocess
from pydoc_data.topics import topics

import psutil
import pytest
import yaml

from tandem.manifest.reading import read_job
from tandem.rundir.ownership import ENDPOINT
from tandem.status import lasting
from tandem_trainer.data.loading import load
from tandem_trainer.data.order import Batches, Order, digest
from tests.support import EXAMPLES
from tests.support.cluster.prometheus import configured, program
from tests.support.processes import TANDEM
from tests.support.ranks import records, sample_ids
from tests.support.slurm.run import DIGITS, SlurmRun
from tests.support.small_disk import fill, small_disk
from tests.support.terminal import Terminal
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(240)
ENDLESS = ("--set", "trainer.config.epochs=100000", "--set", "checkpoint.everySteps=1000000")
"""No checkpoint comes but those that a change makes."""
BRIEF = ("--set", "trainer.config.epochs=30")


def undisturbed(steps: int) -> dict[int, str]:
    """The digest of the samples of each step of the example, in a run on a laptop to which nothing happens."""
    config = read_job(DIGITS).spec.trainer.settings
    batches = Batches(Order(len(load(config.data, "train")), config.global_batch_size, config.seed))
    return {step + 1: digest(batches.ids(step)) for step in range(steps)}


def repeated(run: SlurmRun) -> list[int]:
    """Steps that were made more than once."""
    made = [record["step"] for record in records(run.run_dir, "step")]
    return sorted({step for step in made if made.count(step) > 1})


def saved(run: SlurmRun) -> int:
    """The step of the newest checkpoint."""
    return max((one.step for one in run.run_dir.committed()), default=0)


def test_a_job_on_two_nodes_is_trained_and_evaluated_to_its_end(run: SlurmRun) -> None:
    job = run.submit(*BRIEF)
    until((run.path / ENDPOINT).exists, "the coordinator's address", otherwise=run.output)
    nobody_sees(json.loads((run.path / ENDPOINT).read_text())["token"], run, job)
    assert (run.path / ENDPOINT).stat().st_mode & 0o777 == 0o600
    run.gone()

    assert run.run_dir.done() is not None, run.output()
    until(lambda: (run.path / "best.json").exists() and not run.queue(), "the end of the evaluators")
    steps = max(sample_ids(run.run_dir))
    assert sample_ids(run.run_dir) == undisturbed(steps)
    evaluated = {path.name for path in (run.path / "evaluations").iterdir()}
    assert f"step-{steps:09}" in evaluated
    assert (run.folder / "logs" / f"digits_{job}.out").exists()
    assert not (run.path / ENDPOINT).exists()
    told = run.tandem("status", "runs/digits").stdout
    assert "Succeeded" in told
    assert "accuracy" in told
    assert "training is complete" in run.tandem("events", "runs/digits").stdout
    assert "evaluator-0 │" in run.tandem("logs", "runs/digits").stdout


def nobody_sees(token: str, run: SlurmRun, job: str) -> None:
    """The token is in no command line, and in nothing that SLURM shows of a job."""
    words = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    script = run.slurm.ask("scontrol", "write", "batch_script", job, "-")
    shown = run.slurm.ask("scontrol", "show", "job", job) + script
    assert not [line for line in words if token in line]
    assert token not in shown + run.output()


def test_a_language_model_is_trained_and_evaluated_slice_after_slice(run: SlurmRun) -> None:
    words = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    slices = [SlurmRun(run.slurm, run.folder, EXAMPLES / "minigpt.yaml", name) for name in ("first", "second")]
    brief = ("--set", "trainer.loop.epochs=1", "--set", "checkpoint.everySteps=10")
    for place, one in enumerate(slices):
        text = run.folder / f"{one.path.name}.txt"
        text.write_bytes(words[place * 40_000 : (place + 1) * 40_000])
        after = ("--after", "runs/first", "--set", "trainer.loop.initialWeights=runs/first") if place else ()
        one.submit(*brief, "--set", f"trainer.parameters.text={text}", *after)
    first, second = slices
    assert second.state() == "PENDING Dependency"
    told = second.tandem("status", second.path).stdout
    assert "a job that it depends on has not started or ended (Dependency)" in told
    second.gone()

    for one in slices:
        assert one.run_dir.done() is not None, one.output()
        until((one.path / "best.json").exists, "the evaluation", otherwise=one.output)
        assert len(sample_ids(one.run_dir)) == one.run_dir.committed()[0].step
    (record, *_) = second.run_dir.generation_records()
    assert record.world_size == 2
    assert record.origin is not None
    assert record.origin.checkpoint == first.run_dir.committed()[0].reference
    assert "best         step-" in second.tandem("status", second.path).stdout


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
    run.slurm.update(job, StartTime="now", TimeLimit="60")
    step = run.trains(2, after=first)

    run.slurm.kill("n1")
    step = run.trains(1)
    until(lambda: "event=node-gone name=worker-1 node=n1" in run.output(), "SLURM to know", otherwise=run.output)
    step = run.trains(1, after=step)
    assert run.state().startswith("RUNNING")

    stopped = run.tandem("stop", "digits")
    assert "is stopped; saved after step" in stopped.stdout, stopped.stderr
    assert not run.queue()
    assert saved(run) >= step
    digests = sample_ids(run.run_dir)
    assert digests == undisturbed(max(digests))
    # What the lost node did since the save at the time limit was made again, and nothing before.
    assert all(step > first for step in repeated(run))


def ranks_are_looked_into(run: SlurmRun) -> None:
    """The stacks of both ranks, from their nodes; and a shell beside one of them, on its node."""
    seen = json.loads(run.tandem("debug", "digits", "-o", "json").stdout)
    assert [(one["rank"], one["replica"]) for one in seen["ranks"]] == [(0, "worker-0"), (1, "worker-1")]
    assert all(one["threads"][0]["frames"] for one in seen["ranks"])
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


def test_a_job_gives_its_nodes_to_an_urgent_one_goes_on_after_it_and_shrinks(run: SlurmRun) -> None:
    job = run.submit(*ENDLESS, "--profile", "beside")
    run.trains(2)
    urgent = run.slurm.ask(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 600",
    ).strip()
    until(lambda: run.state().startswith("PENDING"), "the job in the queue again", otherwise=run.output)
    first = saved(run)
    assert first > 0, run.output()
    run.slurm.ask("scancel", urgent)
    run.slurm.update(job, StartTime="now")
    step = run.trains(2, after=first)
    assert not repeated(run)
    run.slurm.update(job, NumNodes="1")
    run.trains(1, after=step)
    assert run.tandem("stop", "digits", "--now").returncode == 0
    assert "CANCELLED" in run.tandem("status", "digits").stdout
    digests = sample_ids(run.run_dir)
    assert digests == undisturbed(max(digests))


def test_a_full_disk_and_the_loss_of_the_first_node_lose_nothing_that_was_saved(run: SlurmRun) -> None:
    (run.folder / "runs").mkdir()
    with small_disk(run.folder / "runs", "size=64m") as disk:
        job = run.submit(
            "--profile", "beside", "--set", "trainer.config.epochs=100000", "--set", "checkpoint.everySteps=5"
        )
        run.trains(2)
        until(lambda: saved(run), "a checkpoint", otherwise=run.output)
        # Lines of logs have room, and checkpoints have not.
        ballast = fill(disk, pages=100)
        until(lambda: is_told_of_a_full_disk(run), "the word of it", otherwise=run.output)
        ballast.unlink()
        first = saved(run)
        until(lambda: saved(run) > first, "a checkpoint after it", otherwise=run.output)
        its_first_node_is_lost(run, job)


def is_told_of_a_full_disk(run: SlurmRun) -> bool:
    """Whether the status says so."""
    found = run.snapshot()
    said = lasting(found.status.troubles) if found else None
    return said is not None and said.text.startswith("the disk is full: the last ")


def its_first_node_is_lost(run: SlurmRun, job: str) -> None:
    """The job is requeued, and goes on."""
    run.slurm.kill("n0")
    first = saved(run)
    until(lambda: run.state().startswith("PENDING"), "the job in the queue again", otherwise=run.output)
    run.slurm.start("n0")
    run.slurm.update(job, StartTime="now")
    run.trains(2, after=first)
    assert all(step > first for step in repeated(run))
    digests = sample_ids(run.run_dir)
    assert digests == undisturbed(max(digests))
