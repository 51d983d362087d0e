"""A micro-batch that does not fit into memory is halved, and the learning curve stays."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from tandem.processes.exitcode import ExitCode
from tests.support.local_run import LocalRun
from tests.support.manifests import job, manifest, run_directory
from tests.support.ranks import records, run

pytestmark = pytest.mark.timeout(300)

TASK = """
    from dataclasses import dataclass

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from tandem_trainer.task import Task

    @dataclass
    class Config:
        fits: int

    class Sums(Task[Config]):
        def model(self):
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def data(self, split):
            points = torch.linspace(-1, 1, 256).reshape(64, 4)
            return TensorDataset(points, points.sum(1))

        def loss(self, model, batch):
            points, sums = batch
            if len(points) > self.config.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return (model(points).squeeze(1) - sums).square()

    class Refusing(torch.autograd.Function):
        # Has room for four samples forward, and for two backward.

        @staticmethod
        def forward(ctx, values):
            ctx.samples = len(values)
            if len(values) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return values.clone()

        @staticmethod
        def backward(ctx, gradients):
            if ctx.samples > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
            return gradients

    class Tight(nn.Module):
        def forward(self, values):
            # Not where the model is cut into stages, which computes nothing.
            return Refusing.apply(values) if torch.is_grad_enabled() else values

    class Staged(Sums):
        def model(self):
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Tight(), nn.Linear(8, 8), Tight(), nn.Linear(8, 1))

    class Roomy(Sums):
        def model(self):
            rest = nn.Identity
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), rest(), nn.Linear(8, 8), rest(), nn.Linear(8, 1))
"""
LOOP = {"epochs": 3, "globalBatchSize": 16, "optimizer": {"name": "sgd", "learningRate": 0.1}}


def written(
    folder: Path, fits: int, name: str = "Sums", workers: dict[str, int] | None = None, **loop: Any
) -> Path:  # fmt: skip
    """The module and its manifest, in a folder of their own."""
    folder.mkdir(exist_ok=True)
    (folder / "sums.py").write_text(dedent(TASK))
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest("sums", **spec(fits, name, workers, **loop))))
    return folder / "job.yaml"


def spec(fits: int, name: str = "Sums", workers: dict[str, int] | None = None, **loop: Any) -> dict[str, Any]:
    """What the manifest says."""
    return {
        "trainer": {"task": f"sums:{name}", "parameters": {"fits": fits}, "loop": LOOP | loop},
        "workers": workers or {"replicas": 1, "processesPerReplica": 2},
        "evaluators": {"replicas": 0},
        "elasticity": {"maxRestarts": 0},
        "checkpoint": {"everySteps": 4},
    }


def losses(of: LocalRun) -> list[float]:
    return [line["loss"] for line in of.logged("step")]


@pytest.mark.full("trainer")
def test_it_is_halved_until_it_fits_and_the_curve_is_that_of_small_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = written(tmp_path / "b", 3)
    with LocalRun(tmp_path / "b", manifest=tight, cwd=tmp_path / "b") as halved:
        assert halved.ends() == 0, halved.output
    monkeypatch.chdir(tmp_path / "b")
    undisturbed = run_directory(tmp_path / "a", job("sums", **spec(100, microBatchSize=2)))
    run(undisturbed, 2)
    assert losses(halved) == pytest.approx([line["loss"] for line in records(undisturbed, "step")], abs=1e-5)
    assert len(losses(halved)) == 12
    assert [(one.samples, one.limit) for one in halved.run_dir.misfits()] == [(8, 4), (4, 2)]
    assert "8 samples in one forward pass did not fit into memory (CUDA out of memory." in halved.output
    assert "the next generation takes 4 at the most" in halved.output
    assert "out of memory: the micro-batch was halved 2 times, to 2 samples at the most" in halved.output
    assert "in the restart budget" not in halved.output, "maxRestarts is 0"

    further = written(tmp_path / "b", 3, epochs=4)
    with LocalRun(tmp_path / "b", manifest=further, cwd=tmp_path / "b") as longer:
        assert longer.ends() == 0, longer.output
    assert len(longer.run_dir.misfits()) == 2, "what was learnt has been forgotten"
    assert len(losses(longer)) == 16


@pytest.mark.full("trainer", "coordinator")
def test_a_single_sample_that_does_not_fit_ends_the_job_with_advice(tmp_path: Path) -> None:
    with LocalRun(tmp_path / "a", manifest=written(tmp_path / "a", 0), cwd=tmp_path / "a") as one:
        assert one.ends() == ExitCode.FAILED, one.output
    failed = one.run_dir.failed() or {}
    assert "1 sample in one forward pass did not fit into memory" in failed["message"]
    assert "strategy: fsdp" in failed["message"]
    assert [misfit.limit for misfit in one.run_dir.misfits()] == [4, 2, 1]


@pytest.mark.full("trainer", "coordinator")
def test_micro_batches_of_a_pipeline_are_halved_whichever_pass_they_do_not_fit_into(tmp_path: Path) -> None:
    roomy = written(tmp_path / "a", 100, "Roomy", {"replicas": 1})
    with LocalRun(tmp_path / "a", manifest=roomy, cwd=tmp_path / "a") as alone:
        assert alone.ends() == 0, alone.output
    stages = {"strategy": "pipeline", "pipeline": {"stages": 2, "chunks": 2}}
    staged = written(tmp_path / "b", 100, "Staged", {"replicas": 1, "processesPerReplica": 2}, **stages)
    with LocalRun(tmp_path / "b", manifest=staged, cwd=tmp_path / "b") as halved:
        assert halved.ends() == 0, halved.output
    assert [(one.samples, one.limit) for one in halved.run_dir.misfits()] == [(8, 4), (4, 2)]
    assert losses(halved) == pytest.approx(losses(alone), abs=1e-5)
    assert len(losses(halved)) == 12
