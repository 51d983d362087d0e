"""The share of a process of its pod's GPUs, and a model that is held in half the memory."""

import os

import pytest
import torch
from torch import nn

from tandem.job.resource import Evaluators
from tandem.processes.launch import VISIBLE_GPUS
from tandem_evaluator.device import Compute, compute_of, memory_exceeded
from tandem_evaluator.preparation import choose_gpus
from tandem_trainer.failure import ConfigurationError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("visible", "of_pod", "processes", "shares"),
    [
        (None, "4", 4, ["0", "1", "2", "3"]),
        (None, "4", 2, ["0,1", "2,3"]),
        (None, "1", 3, ["0", "0", "0"]),
        ("GPU-a,GPU-b", "0", 2, ["GPU-a", "GPU-b"]),
        ("2,5,7", "0", 2, ["2", "5,7"]),
        ("", "2", 2, ["", ""]),
        (None, "0", 2, ["", ""]),
    ],
)
def test_the_processes_of_a_pod_divide_its_gpus(
    visible: str | None, of_pod: str, processes: int, shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, share in enumerate(shares):
        monkeypatch.setenv("TANDEM_EVALUATOR_GPUS", of_pod)
        # Set in any case, so that it is restored afterwards.
        monkeypatch.setenv(VISIBLE_GPUS, visible or "")
        if visible is None:
            monkeypatch.delenv(VISIBLE_GPUS)
        owned = choose_gpus(processes, index)
        assert owned == pytest.approx(sum(1 / shares.count(share) for name in share.split(",") if name))
        assert os.environ[VISIBLE_GPUS] == share


def test_a_gpu_that_torch_cannot_use_is_refused_unless_cpus_will_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(VISIBLE_GPUS, "0")
    with pytest.raises(ConfigurationError, match="torch cannot use any here: it may be a build for CPUs"):
        compute_of(Evaluators())
    assert compute_of(Evaluators(fallback="CPU")) == Compute(CPU)
    assert "evaluating on CPUs (fallback)" in capsys.readouterr().out
    monkeypatch.setenv(VISIBLE_GPUS, "")
    assert compute_of(Evaluators(precision="bfloat16")) == Compute(CPU, "bfloat16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(VISIBLE_GPUS, "3")
    assert compute_of(Evaluators()) == Compute(torch.device("cuda", 0))


def test_with_bfloat16_matrices_take_half_the_memory_and_the_forward_pass_agrees_within_its_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).eval()
    data = torch.randn(16, 64)
    with torch.inference_mode():
        exact = model(data)
    compute = Compute(CPU, "bfloat16")
    placed = compute.placed(model)
    kinds = {name: tensor.dtype for name, tensor in placed.state_dict().items()}
    assert kinds["0.weight"] == kinds["2.weight"] == torch.bfloat16
    assert kinds["1.weight"] == kinds["0.bias"] == torch.float32
    with compute.context():
        assert torch.allclose(placed(data).float(), exact, atol=0.05)


def test_too_little_memory_is_one_sentence() -> None:
    text = "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 2.00 GiB."
    assert memory_exceeded(torch.OutOfMemoryError(text)) == (
        "the GPU of the evaluator has too little memory: CUDA out of memory, Tried to allocate 4.00 GiB; "
        "precision: bfloat16 halves that of the weights"
    )
