"""One job on a real SLURM of three nodes: to its end, slice after slice, through preemption and a cancel."""

import json
from pydoc_data.topics import topics

import psutil
import pytest

from tandem.rundir.ownership import ENDPOINT
from tests.support import EXAMPLES
from tests.support.planned import planned_samples
from tests.support.ranks import sample_ids
from tests.support.slurm.run import ENDLESS, SlurmRun, repeated, saved
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(240)
BRIEF = ("--set", "trainer.loop.epochs=30")


@pytest.mark.smoke
def test_a_job_on_two_nodes_is_trained_and_evaluated_to_its_end(run: SlurmRun) -> None:
    job = run.submit(*BRIEF)
    until((run.path / ENDPOINT).exists, "the coordinator's address", otherwise=run.output)
    nobody_sees(json.loads((run.path / ENDPOINT).read_text())["token"], run, job)
    assert (run.path / ENDPOINT).stat().st_mode & 0o777 == 0o600
    run.gone()

    assert run.run_dir.done() is not None, run.output()
    until(lambda: (run.path / "best.json").exists() and not run.queue(), "the end of the evaluators")
    steps = max(sample_ids(run.run_dir))
    assert sample_ids(run.run_dir) == planned_samples(steps)
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
    run.slurm.start_requeued(job)
    step = run.trains(2, after=first)
    assert not repeated(run)
    run.slurm.update(job, NumNodes="1")
    run.trains(1, after=step)
    assert run.tandem("stop", "digits", "--now").returncode == 0
    assert "CANCELLED" in run.tandem("status", "digits").stdout
    digests = sample_ids(run.run_dir)
    assert digests == planned_samples(max(digests))
