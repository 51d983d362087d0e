"""What a task reports of its batches adds up to what one pass would have found, and anything else is told."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from tandem.confidence import mean_interval
from tandem.evaluation import Checkpoint, Confusion, GeometricMean, Histogram, Max, Mean, Min, Sum, added
from tandem.job.tasks import Loop
from tandem.rundir.checkpoint import digest_of
from tandem_evaluator.task_program import TaskEvaluation, UnusableTask
from tandem_trainer.task import Split, Task

INPUTS = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
EDGES = torch.linspace(-50, 50, 9)


class Reporting(Task[None]):
    """Reports what a test gives it."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, split: Split) -> Any:
        return TensorDataset(INPUTS, torch.arange(50) % 2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        out = model(batch[0])
        cells = torch.bincount(batch[1] * 2 + out.argmax(1), minlength=4).view(2, 2)
        return {
            "mean": Mean(out.sum(), len(out)),
            "logarithms": GeometricMean(out.square().sum(), len(out)),
            "sum": Sum(out.sum()),
            "max": Max(out.max()),
            "min": Min(out.min()),
            "matrix": Confusion(cells),
            "bins": Histogram(*torch.histogram(out, EDGES)),
        }


def checkpoint(folder: Path, shard: int = 0, shards: int = 1) -> Checkpoint:
    torch.manual_seed(5)
    save_file(nn.Linear(3, 2).state_dict(), folder / "weights.safetensors")
    return Checkpoint(folder, folder / "weights.safetensors", 1, shard, shards)


def number(value: Any) -> float:
    if isinstance(value, GeometricMean):
        return value.log_total / value.count
    return value.total / value.count if isinstance(value, Mean) else value.value


def test_batches_of_a_shard_add_up_and_so_do_shards(tmp_path: Path) -> None:
    whole = TaskEvaluation(Reporting(None), Loop(global_batch_size=64)).run(checkpoint(tmp_path))
    cut = TaskEvaluation(Reporting(None), Loop(micro_batch_size=7)).run(checkpoint(tmp_path))
    halves = [TaskEvaluation(Reporting(None), Loop()).run(checkpoint(tmp_path, shard, 2)) for shard in (0, 1)]
    for name in ("mean", "logarithms", "sum", "max", "min", "loss"):
        assert number(cut[name]) == pytest.approx(number(whole[name]), rel=1e-5)
    assert cut["matrix"] == whole["matrix"]
    assert cut["bins"] == whole["bins"] == added([half["bins"] for half in halves])
    assert sum(whole["bins"].counts) == 100  # type: ignore[union-attr]
    assert sum(half["loss"].count for half in halves) == 50  # type: ignore[union-attr]
    assert isinstance(cut["loss"], Mean)
    assert mean_interval(cut["loss"]) == pytest.approx(mean_interval(whole["loss"]), rel=1e-5)  # type: ignore[arg-type]
    assert cut["mean"].moments is None, "it was reported without"  # type: ignore[union-attr]
    assert sum(number(half["sum"]) for half in halves) == pytest.approx(number(whole["sum"]), rel=1e-5)


def test_the_weights_that_were_read_are_named(tmp_path: Path) -> None:
    subject = checkpoint(tmp_path)
    TaskEvaluation(Reporting(None), Loop()).run(subject)
    assert subject.scored == digest_of(memoryview(subject.weights.read_bytes()))
    unnamed = checkpoint(tmp_path)
    TaskEvaluation(Reporting(None), Loop(), compares=False).run(unnamed)
    assert unnamed.scored == ""


def test_a_sample_that_cannot_be_read_is_named_in_the_last_line(tmp_path: Path) -> None:
    class Broken(Reporting):
        def data(self, split: Split) -> Any:
            return Subset(super().data(split), [0, 1, 99])

    with pytest.raises(IndexError) as caught:
        TaskEvaluation(Broken(None), Loop()).run(checkpoint(tmp_path))
    *_, last = traceback.format_exception(caught.value)
    assert last.splitlines()[-1].startswith("sample 2 cannot be read: IndexError: ")


def test_a_shard_without_samples_has_a_loss_of_nothing(tmp_path: Path) -> None:
    found = TaskEvaluation(Reporting(None), Loop()).run(checkpoint(tmp_path, 60, 61))
    assert found == {"loss": Mean.from_samples([])}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"f1": Mean("good", 3)}, "f1 holds 'good', which is not a number"),
        ({"f1": Sum(torch.ones(3))}, r"f1 holds a tensor of the shape \(3,\), which is not a number"),
        ({"f1": Max(None)}, "f1 holds None, which is not a number"),
        ({"f1": Mean(True, 3)}, "f1 holds True, which is not a number"),
        ({"f1": 0.5}, r"f1 is 0.5; return Mean\(total, count\), GeometricMean, Sum"),
        ({"f1": GeometricMean("good", 3)}, "f1 holds 'good', which is not a number"),
        ({"f1": Confusion([[1, 2]])}, "f1 holds .*, which is not a square matrix"),
        (
            {"loss": Mean(1, 1)},
            r"loss of 50 samples is Mean\(total=1, count=1\); return Mean.from_samples\(losses\)",
        ),
        ({"loss": Sum(1)}, "loss of 50 samples is Sum"),
        ([1], "returned a list; return a dictionary"),
    ],
)
def test_what_is_no_metric_is_named(tmp_path: Path, metrics: Any, words: str) -> None:
    class Wrong(Reporting):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return metrics

    with pytest.raises(UnusableTask, match=words):
        TaskEvaluation(Wrong(None), Loop()).run(checkpoint(tmp_path))


def test_a_task_whose_metrics_bring_the_loss_runs_its_model_once_a_batch(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(inputs)

    class Asked(Reporting):
        def model(self) -> nn.Module:
            return Counting(3, 2)

    class Bringing(Asked):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            losses = self.loss(model, batch)
            return {"loss": Mean.from_samples(losses), "worst": Max(losses.max())}

    asked = TaskEvaluation(Asked(None), Loop(micro_batch_size=20)).run(checkpoint(tmp_path))
    assert Counting.calls == 6
    brought = TaskEvaluation(Bringing(None), Loop(micro_batch_size=20)).run(checkpoint(tmp_path))
    assert Counting.calls == 9
    assert brought["loss"] == asked["loss"]
    assert set(brought) == {"loss", "worst"}


def test_metrics_that_change_their_kind_do_not_add_up(tmp_path: Path) -> None:
    kinds = iter([Mean(1, 1), Sum(1)])

    class Fickle(Reporting):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"f1": next(kinds)}

    with pytest.raises(UnusableTask, match="f1 of two batches: a Mean and a Sum do not add up"):
        TaskEvaluation(Fickle(None), Loop(micro_batch_size=25)).run(checkpoint(tmp_path))


def test_histograms_with_edges_that_follow_from_the_batch_do_not_add_up(tmp_path: Path) -> None:
    class Floating(Reporting):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"bins": Histogram(*torch.histogram(model(batch[0]), 4))}

    with pytest.raises(UnusableTask, match=r"bins of two batches: histograms of different edges .* use fixed edges"):
        TaskEvaluation(Floating(None), Loop(micro_batch_size=25)).run(checkpoint(tmp_path))
