"""How busy a GPU is, as NVML tells the rank that uses it or its agent, arrives in the job's status."""

import json
import shlex
import sys
from pathlib import Path

import pynvml
import pytest

from tandem.wire.status import Utilization
from tests.support import manifests
from tests.support.local_run import LocalRun
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

FIELDS = (
    *("trainer.parameters.model=resnet-18", "trainer.loop.epochs=100000", "trainer.loop.globalBatchSize=512"),
    *("workers.replicas=1", "evaluators.processesPerReplica=1", "checkpoint.everySteps=100000"),
)

SCRIPT = """
import torch

numbers = torch.ones(8192, 8192, device="cuda")
while True:
    numbers = (numbers @ numbers).clamp(0, 1)
    torch.cuda.synchronize()
"""
"""It has never heard of Tandem, and holds 268 MB."""


def first_gpu() -> tuple[str, int]:
    """Its name, and how much memory it has, in bytes."""
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = pynvml.nvmlDeviceGetUUID(handle)
        return (name.decode() if isinstance(name, bytes) else name), pynvml.nvmlDeviceGetMemoryInfo(handle).total
    finally:
        pynvml.nvmlShutdown()


def at_work(run: LocalRun) -> Utilization:
    """What the job's status says of its GPU, once that computes."""

    def use() -> Utilization | None:
        assert run.process.poll() is None, run.output
        snapshot = run.status()
        found = snapshot.status.utilization if snapshot else None
        return found if found and (found.gpu or 0) > 0 and found.gpu_memory_bytes else None

    return until(use, "a GPU at work", seconds=300, otherwise=lambda: run.output)


@pytest.mark.parametrize("chosen", ["by number", "by name"])
def test_a_run_says_how_busy_its_gpu_is_and_how_much_memory_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    name, memory = first_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name if chosen == "by name" else "0")
    words = [word for field in FIELDS for word in ("--set", field)]
    with LocalRun(tmp_path, *words, warm=False) as run:
        busy = at_work(run)
        run.interrupt()
        assert run.ends() == 130, run.output
    assert busy.gpu is not None
    assert 0 < busy.gpu <= 1
    assert busy.gpu_memory_bytes is not None
    # The weights of a ResNet-18 and the state of its optimizer are 134 MB.
    assert 134_000_000 < busy.gpu_memory_bytes <= memory
    assert "training runs on CPUs" not in run.output


@pytest.mark.parametrize("start", ["warm", "cold", "by a program"])
def test_so_does_that_of_a_script_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    name, memory = first_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    program = ["sh", "-c", f"{shlex.join([sys.executable, str(script)])}; exit 1"]
    job = manifests.manifest(
        "own",
        trainer={"command": program if start == "by a program" else [str(script)]},
        workers={"replicas": 1},
        elasticity={"warmStart": start == "warm"},
    )
    (tmp_path / "job.json").write_text(json.dumps(job))
    with LocalRun(tmp_path, manifest=tmp_path / "job.json", cwd=tmp_path, warm=False) as run:
        busy = at_work(run)
        run.interrupt()
        run.ends()
    assert busy.gpu is not None
    assert 0 < busy.gpu <= 1
    assert busy.gpu_memory_bytes is not None
    assert 268_000_000 < busy.gpu_memory_bytes <= memory
