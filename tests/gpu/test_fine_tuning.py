"""Fine-tuning on a GPU: weights and moments of few bits, and Liger's kernels."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.job.tasks import Optimizer
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tandem_trainer.optimizers import torch_optimizer
from tests.support.language import pretrained

LIGER = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")


def task(folder: Path, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(folder), "length": 64, **given}))


def taken(made: FineTuning, device: torch.device, name: str, steps: int = 6) -> tuple[list[float], nn.Module, Any]:
    """The losses of some steps, and what has learned."""
    torch.manual_seed(0)
    model = made.model().to(device).train()
    made.settle(model)
    made.initialize(model)
    optimizer = torch_optimizer(model, Optimizer.model_validate({"name": name, "learningRate": 0.003}))
    rows, found = made.data("train"), []
    for step in range(steps):
        batch = {key: one.to(device) for key, one in made.collate([rows[step % 2]]).items()}
        loss: Tensor = made.loss_sum(model, batch, 1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model, optimizer


def test_weights_and_moments_of_few_bits_learn_as_on_a_processor(tmp_path: Path, device: torch.device) -> None:
    base = pretrained(tmp_path / "base", hidden_size=64, intermediate_size=128)
    lora = {"rank": 64, "quantizeBase": "nf4"}
    ours, model, optimizer = taken(task(base, lora=lora), device, "adamw8bit")
    theirs, _, _ = taken(task(base, lora=lora), torch.device("cpu"), "adamw8bit")
    assert ours == pytest.approx(theirs, rel=2e-2)
    names = TrainState(model, optimizer).contents({}).optimizer
    assert any(name.endswith("/exp_avg.codes") for name in names)


@LIGER
def test_kernels_of_liger_compute_the_same(tmp_path: Path, device: torch.device) -> None:
    base = pretrained(tmp_path / "base", "llama", hidden_size=64, intermediate_size=128)
    plain, _, _ = taken(task(base), device, "adamw")
    ours, _, _ = taken(task(base, kernels="liger"), device, "adamw")
    assert ours == pytest.approx(plain, rel=1e-3)
