"""Which GPU a rank measures, and how busy it says that one is; NVML and CUDA are played."""

import sys
from types import SimpleNamespace

import pytest

from tandem_trainer.gpu import Gpu
from tests.support.nvml import Nvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """CUDA is in use."""
    played = Nvml()
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 4)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "pynvml", played)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return played


@pytest.mark.parametrize(
    ("visible", "rank", "busy"),
    [
        (None, "2", 0.93),
        ("2,3", "0", 0.93),
        ("2,3", "1", 0.94),
        ("GPU-b, GPU-a", "1", 0.91),
        ("GPU-d", "0", 0.94),
    ],
)
def test_a_rank_measures_its_own_gpu(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, rank: str, busy: float
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: len(visible.split(",")))
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert Gpu().sample() == (busy, round(busy * 100) * 2**20)


def test_a_gpu_that_is_lost_is_not_asked_again(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    gpu = Gpu()
    assert gpu.sample()[0] == 0.91
    nvml.lost.add("GPU-a")
    assert gpu.sample() == (None, None)
    nvml.lost.clear()
    assert gpu.sample() == (None, None)


def test_a_name_that_nvml_does_not_know_is_no_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Gpu().sample() == (None, None)
