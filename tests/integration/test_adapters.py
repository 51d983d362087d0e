"""Scripts in the loops of other libraries, made elastic by an adapter, as real processes."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tests.support import EXAMPLES, SCRIPTS, manifests
from tests.support.elastic import Elastic
from tests.support.local_run import LocalRun, evaluations
from tests.support.ranks import Ranks, kill_when_saved, last_line, losses, records, run, sample_ids
from tests.support.waiting import until

ALL = pytest.mark.full("core", "trainer")
TRAINER = str(SCRIPTS / "adapted_trainer.py")
LIBRARY = ("tandem_trainer.adapters.transformers", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
"""What that script imports, which takes longer than all of its steps."""
LIGHTNING = str(SCRIPTS / "adapted_lightning.py")
ACCELERATE = str(SCRIPTS / "adapted_accelerate.py")


def rundir_of(path: Path, **checkpoint: Any) -> RunDir:
    """A job of two replicas: eight samples in a global batch, of 42 in an epoch."""
    trainer = {"command": ["python", TRAINER]}
    return manifests.run_directory(
        path, manifests.job("adapted", trainer=trainer, workers={"replicas": 2}, checkpoint=checkpoint)
    )


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((TRAINER, "--kind", "trainer"), id="trainer-loss-of-tokens"),
        pytest.param((TRAINER, "--kind", "mean"), id="trainer-loss-of-samples", marks=ALL),
        pytest.param((TRAINER, "--kind", "sft"), id="sft", marks=ALL),
        pytest.param((TRAINER, "--kind", "lora"), id="trainer-of-peft", marks=ALL),
        pytest.param((ACCELERATE,), id="accelerate", marks=ALL),
        pytest.param((ACCELERATE, "--accumulate", "2"), id="accelerate-that-accumulates", marks=ALL),
        pytest.param((ACCELERATE, "--lora"), id="accelerate-of-peft", marks=ALL),
        pytest.param((LIGHTNING,), id="lightning", marks=ALL),
    ],
)
def test_killed_and_resumed_on_other_numbers_of_ranks_it_is_the_undisturbed_run(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Samples, losses, learning rates, and the library's own count of steps and epochs; 2, then 1, then 3 ranks."""
    undisturbed, rundir = rundir_of(tmp_path / "one"), rundir_of(tmp_path / "killed", everySteps=2, keepLast=100)
    imports = LIBRARY if command[0] == TRAINER else ()
    expected = run(undisturbed, 1, *command, imports=imports)
    assert len(losses(undisturbed)) == 18
    for size in (2, 1):
        kill_when_saved(rundir, size, *command, "--pause", "0.3", imports=imports)
    output = run(rundir, 3, *command, imports=imports)
    starts = [(record["step"], record["worldSize"]) for record in records(rundir, "start")]
    assert [size for _, size in starts] == [2, 1, 3]
    assert 0 < starts[1][0] < starts[2][0] < 18
    assert sample_ids(rundir) == sample_ids(undisturbed)
    ours, theirs = losses(rundir), losses(undisturbed)
    torch.testing.assert_close([ours[step] for step in theirs], list(theirs.values()), rtol=1e-3, atol=1e-4)
    assert rates(rundir) == pytest.approx(rates(undisturbed))
    assert last_line(output) == last_line(expected)
    assert rundir.done() is not None
    # Of a model of peft, checkpoints have a digest in the place of what does not learn.
    weights = load_file(rundir.checkpoint(rundir.committed()[0].name) / WEIGHTS)
    is_of_peft = "lora" in " ".join(command)
    assert ("tandem_base.digest" in weights) == is_of_peft
    assert any("lora_A" in name for name in weights) == is_of_peft
    assert not any("base_layer" in name for name in weights)


@ALL
def test_lightning_goes_on_between_two_epochs(tmp_path: Path) -> None:
    undisturbed, rundir = rundir_of(tmp_path / "one"), rundir_of(tmp_path / "killed", everySteps=6, keepLast=100)
    expected = run(undisturbed, 1, LIGHTNING)
    kill_when_saved(rundir, 2, LIGHTNING, "--pause", "0.5")
    assert last_line(run(rundir, 1, LIGHTNING)) == last_line(expected)
    assert records(rundir, "start")[1]["step"] == 6
    assert sample_ids(rundir) == sample_ids(undisturbed)


def rates(rundir: RunDir) -> list[float]:
    found = {record["step"]: record["lr"] for record in records(rundir, "step")}
    return [found[step] for step in sorted(found)]


@ALL
def test_asked_to_leave_it_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path, everySeconds=3600)
    with Ranks(rundir, 2, TRAINER, "--epochs", "60", "--pause", "0.02", imports=LIBRARY) as ranks:
        until(lambda: len(losses(rundir)) > 5, "steps")
        ranks.processes[1].send_signal(signal.SIGTERM)
        codes, output = ranks.finish()
    assert codes == [ExitCode.PREEMPTED] * 2, output
    assert "after the loop" not in output
    (saved,) = rundir.committed()
    assert saved.step == max(losses(rundir))
    goal = saved.step + 6
    ended = last_line(run(rundir, 1, TRAINER, "--epochs", "60", "--stop-at", str(goal), imports=LIBRARY))
    assert f"step={goal} epoch={goal / 6:.3f}" in ended


@ALL
def test_a_callback_that_stops_it_stops_the_run_early(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path)
    assert "step=4 " in last_line(run(rundir, 2, TRAINER, "--stop-at", "4", imports=LIBRARY))
    done = rundir.done()
    assert done["totalSteps"] == 4
    assert done["stoppedEarly"] == "stopped early after step 4 of 18: a callback told the Trainer to stop"
    assert rundir.committed()[0].step == 4


@ALL
@pytest.mark.parametrize(
    ("command", "step"),
    [
        pytest.param((TRAINER, "--stop-at", "4"), 4, id="trainer"),
        pytest.param((LIGHTNING, "--stop-at", "4"), 4, id="lightning"),
        pytest.param((ACCELERATE, "--break-at", "4"), 4, id="accelerate"),
    ],
)
def test_after_an_early_end_the_code_that_follows_is_tried_again_without_a_step(
    tmp_path: Path, command: tuple[str, ...], step: int
) -> None:
    expected = run(rundir_of(tmp_path / "undisturbed"), 2, *command, imports=LIBRARY if command[0] == TRAINER else ())
    script, *arguments = command
    with Elastic(tmp_path, trainer={"command": ["python", script], "args": arguments}) as group:
        (group.rundir.path / "fail").touch()
        group.start("worker-0", "worker-1")
        assert [agent.wait(120) for agent in group.agents.values()] == [0, 0], group.output("worker-0")
        assert [record["step"] for record in records(group.rundir, "start")] == [0, step]
        assert len(records(group.rundir, "step")) == step
        output = group.output("worker-0")
        assert output.count("RuntimeError: there is no room for the report\n") == 1
        assert last_line(output) == last_line(expected)
        done = group.rundir.done()
        assert (done["totalSteps"], done["plannedSteps"]) == (step, 18)
        assert done["stoppedEarly"].startswith(f"stopped early after step {step} of 18")


MISTAKEN = f"""
import runpy, sys
import torch.nn.functional

def mistaken(*args, **named):
    raise KeyError("image")

torch.nn.functional.mse_loss = torch.nn.functional.cross_entropy = mistaken
sys.path.insert(0, {str(SCRIPTS)!r})
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script whose loss raises an error in the first batch."""


@ALL
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(TRAINER, id="trainer"),
        pytest.param(LIGHTNING, id="lightning"),
        pytest.param(ACCELERATE, id="accelerate"),
    ],
)
def test_a_mistake_in_the_first_batch_is_found_after_two_failures(tmp_path: Path, script: str, replicas: int) -> None:
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    trainer = {"command": ["python", str(tmp_path / "mistaken.py")], "args": [script]}
    elasticity = {"maxRestarts": 10}
    with Elastic(tmp_path, replicas, trainer=trainer, elasticity=elasticity) as group:
        group.start(*(f"worker-{number}" for number in range(replicas)))
        failed = until(group.rundir.failed, "the end of the job")
        assert failed["reason"] == "RepeatedFailure", failed
        assert "KeyError: 'image'" in failed["message"]
        assert group.rundir.newest_generation() == 2


@pytest.mark.full("examples", "trainer")
def test_the_example_of_trainer_is_evaluated_while_it_trains(tmp_path: Path) -> None:
    words = ["--set", 'trainer.args=["--steps", "40"]', "--set", "checkpoint.everySteps=20"]
    with LocalRun(tmp_path, *words, manifest=EXAMPLES / "huggingface-trainer.yaml") as run:
        assert run.ends(240) == 0, run.output
        assert "huggingface-trainer is complete: 40 steps in " in run.output
    values = {name for record in records(run.run_dir, "values") for name in record["values"]}
    assert "train_loss" in values
    assert evaluations(run.path)
