"""A task of the user's own under `tandem run`: exact after a kill, evaluated, and clear about what is wrong with it."""

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tests.support.local_run import LocalRun, evaluations
from tests.support.manifests import job, manifest, run_directory
from tests.support.ranks import losses, run, sample_ids
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)
STEPS = 32
"""Four epochs of eight."""
FULL = pytest.mark.full("cli", "core", "trainer")

TASK = """
    import os
    import random
    import time
    from dataclasses import dataclass
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import Dataset
    from tandem_trainer.task import Max, Mean, Task

    class Lines(Dataset):
        '''Noisy lines, drawn when they are read.'''

        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return self.samples

        def __getitem__(self, index):
            slope = (index % 17) / 17
            return {"points": torch.arange(8.0) * slope + random.random() / 10, "slope": torch.tensor(slope)}

    @dataclass
    class Config:
        width: int
        gate: str = ""
        metric: str = "error"

    class Slopes(Task[Config]):
        parts = 0

        def model(self):
            return nn.Sequential(nn.Linear(8, self.config.width), nn.Dropout(0.2), nn.Linear(self.config.width, 1))

        def data(self, split):
            return Lines(200 if split == "train" else 50)

        def loss(self, model, batch):
            # Two parts of 8 are a step of one of two ranks.
            self.parts += torch.is_grad_enabled()
            while self.config.gate and self.parts > 2 * 12 and not Path(self.config.gate).exists():
                time.sleep(0.01)
            return (model(batch["points"]).squeeze(1) - batch["slope"]).square()

        def metrics(self, model, batch):
            errors = (model(batch["points"]).squeeze(1) - batch["slope"]).abs()
            if self.config.metric == "nonsense":
                return {"error": Mean("small", len(errors))}
            return {self.config.metric: Mean(errors.sum(), len(errors)), "largest": Max(errors.max())}
"""


def spec(**changes: Any) -> dict[str, Any]:
    """What the manifest says."""
    trainer = {
        "task": "slopes:Slopes",
        "parameters": {"width": 16},
        "loop": {"epochs": 4, "globalBatchSize": 25, "microBatchSize": 8, "loaderWorkers": 1, "emaDecay": 0.9},
    }
    return {
        "trainer": {**trainer, **changes.pop("trainer", {})},
        "workers": {"replicas": 1, "processesPerReplica": 2},
        "evaluators": {"policy": "Every", "metric": "error", "goal": "Minimize"},
        "checkpoint": {"everySteps": 10, "keepLast": 10},
        **changes,
    }


def written(folder: Path, module: str = TASK, **changes: Any) -> Path:
    """A module and its manifest, in a folder of their own."""
    folder.mkdir()
    (folder / "slopes.py").write_text(dedent(module))
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest("slopes", **spec(**changes))))
    return folder / "job.yaml"


def test_killed_it_is_the_undisturbed_run_and_its_own_metric_names_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gated = {"trainer": {"parameters": {"width": 16, "gate": str(gate)}}}
    with LocalRun(tmp_path / "b", manifest=written(tmp_path / "b", **gated), cwd=tmp_path / "b") as killed:
        until(killed.run_dir.checkpoint_names, "a checkpoint")
        rank = killed.rank_of("worker-0")
        rank.kill()
        gate.touch()
        assert killed.ends() == 0, killed.output
        assert killed.leavings() == {}
    starts = [line["step"] for line in killed.logged("start")]
    assert len(starts) == 2
    assert starts[1] >= 10
    monkeypatch.chdir(tmp_path / "b")
    undisturbed = run_directory(tmp_path / "a", job("slopes", **spec()))
    run(undisturbed, 2)
    assert sample_ids(killed.run_dir) == sample_ids(undisturbed)
    assert list(losses(undisturbed)) == list(range(1, STEPS + 1))
    torch.testing.assert_close(list(losses(killed.run_dir).values()), list(losses(undisturbed).values()))
    weights = [load_file(one.checkpoint(f"step-{STEPS:09}") / WEIGHTS) for one in (killed.run_dir, undisturbed)]
    torch.testing.assert_close(*weights)

    scores = {one["step"]: one["metrics"] for one in evaluations(killed.path)}
    # On a busy machine a save is left out while the one before is still being written; the log says which.
    saved = sorted(one.step for one in killed.run_dir.committed())
    left_out = {line["step"] for line in killed.logged("skipped")}
    assert left_out.union(saved) == {10, 20, 30, STEPS}
    assert sorted(scores) == saved
    assert all(metrics.keys() == {"error", "largest", "loss"} for metrics in scores.values())
    best = json.loads(killed.run_dir.best_file.read_text())
    assert best["metric"] == "error"
    assert best["value"] == min(metrics["error"] for metrics in scores.values())
    assert f"slopes is complete: {STEPS} steps" in killed.output


@pytest.mark.full("evaluator", "trainer")
def test_a_metric_that_is_no_number_fails_evaluations_with_one_sentence_and_harms_no_training(tmp_path: Path) -> None:
    task = {"parameters": {"width": 16, "metric": "nonsense"}}
    changed = {"trainer": task, "checkpoint": {"everySteps": 100}}
    with LocalRun(tmp_path / "a", manifest=written(tmp_path / "a", **changed), cwd=tmp_path / "a") as started:
        assert started.ends() == 0, started.output
        assert started.final_step() == STEPS
        assert len(started.logged("start")) == 1
        (failed,) = (started.path / "evaluations" / f"step-{STEPS:09}").glob("*.failed.json")
        assert "slopes:Slopes.metrics: error holds 'small', which is not a number" in failed.read_text()
        assert "failed" in started.output


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        pytest.param({"task": "slope:Slopes"}, "job.yaml:22:11: .*: Python finds no module slope in", marks=FULL),
        (
            {"task": "slopes:Slope"},
            "job.yaml:22:11: .*: the module slopes has no class Slope; did you mean slopes:Slopes",
        ),
        pytest.param(
            {"parameters": {"width": "16"}},
            'job.yaml:.*spec.trainer.parameters.width: input should be a valid integer, not "16"',
            marks=FULL,
        ),
    ],
)
def test_what_is_wrong_with_it_is_told_with_its_line_before_anything_starts(
    tmp_path: Path, trainer: dict[str, Any], words: str
) -> None:
    file = written(tmp_path / "a", trainer=trainer)
    with LocalRun(tmp_path / "a", manifest=file, cwd=tmp_path / "a") as started:
        assert started.ends() == ExitCode.USAGE, started.output
        assert not started.path.exists()
    assert re.search(words, started.output), started.output


@pytest.mark.full("trainer", "core")
def test_a_rank_that_cannot_import_it_ends_the_job_with_one_sentence_and_no_restart(tmp_path: Path) -> None:
    """As on a cluster, whose image nobody sees before."""
    module = 'import os\nif "RANK" in os.environ:\n    import no_such_package\n' + dedent(TASK)
    with LocalRun(tmp_path / "a", manifest=written(tmp_path / "a", module), cwd=tmp_path / "a") as started:
        assert started.ends() == ExitCode.USAGE, started.output
    failed = started.run_dir.failed() or {}
    assert failed["reason"] == "ConfigurationError"
    assert failed["message"] == ("spec.trainer.task: slopes:Slopes imports no_such_package, which is not installed")
    assert "Traceback" not in started.output
    assert started.logged("start") == []
