"""Liger's kernels are put into a model that is on a GPU, and are refused elsewhere."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language import kernels
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tests.support.language import pretrained


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the package is called with, which imports Triton and is of use on a GPU alone."""
    calls: list[dict[str, Any]] = []
    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    made = {name: ModuleType(name) for name in names}
    vars(made[names[1]])["_apply_liger_kernel_to_instance"] = lambda **given: calls.append(given)
    vars(made[names[2]])["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"qwen2": None}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    return calls


def test_a_model_is_given_all_but_the_losses(patched: list[dict[str, Any]]) -> None:
    model = nn.Linear(2, 2)
    kernels.install(model, "qwen2")
    assert patched == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    with pytest.raises(ConfigurationError, match="liger has no kernels for models of type strange"):
        kernels.install(model, "strange")


def test_a_rank_on_a_processor_refuses_them_and_an_evaluator_does_not_ask(
    tmp_path: Path, patched: list[dict[str, Any]]
) -> None:
    base = str(pretrained(tmp_path / "base"))
    task = FineTuning(FineTuningConfig.model_validate({"pretrained": base, "length": 64, "kernels": "liger"}))
    model = task.model()
    task.load_frozen(model)
    with pytest.raises(ConfigurationError, match="liger is for GPUs, and this rank trains on a cpu"):
        task.settle(model)
    assert not patched


def test_without_the_package_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"liger-kernel, which is not installed.*tandem-training\[kernels\]"):
        kernels.install(nn.Linear(2, 2), "qwen2")
