"""Which GPU a rank measures, and how busy it says that one is; NVML and CUDA are played."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem_trainer.gpu import Gpu, open_driver
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


def test_a_driver_is_found_among_the_open_files_of_a_process_while_it_is_open(tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    driver.touch()
    files = Path("/proc/self/fd")
    assert open_driver(files.iterdir(), {str(driver)}) is None
    with driver.open() as opened:
        closed = files / str(os.dup(opened.fileno()))
        os.close(int(closed.name))
        found = open_driver([closed, *files.iterdir()], {str(driver)})
        assert found == files / str(opened.fileno())
        assert open_driver(files.iterdir()) is None, "it is none of those that are drivers"
    assert open_driver([found], {str(driver)}) is None


def test_ranks_are_not_forked_from_a_process_with_a_driver_of_any_gpu(tmp_path: Path) -> None:
    (tmp_path / "driver").touch()
    code = """
import sys
from tandem_trainer import gpu
from tandem_trainer.agent.warm import forkserver
gpu.DRIVERS.add(sys.argv[1])
said = [forkserver.available()]
with open(sys.argv[1]):
    said.append(forkserver.available())
print(said)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "driver")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[True, False]"
