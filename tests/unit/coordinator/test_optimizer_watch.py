"""An optimizer state that is of another step than its checkpoint is named, and nothing else is."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tandem.rundir.checkpoint import COUNTERS, OPTIMIZER, WEIGHTS
from tandem.wire.status import OPTIMIZER_DIFFERS, Corruption
from tandem_coordinator.run_watcher import RunDirectory
from tests.support import checkpoints, manifests
from tests.support.worlds.small_run import SmallRun

MOMENTS = {"a/exp_avg": torch.ones(4), "a/step": torch.tensor(50.0)}


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    return made


def found(run: SmallRun, moments: dict[str, Tensor] | bytes | None, claimed: Any) -> list[Corruption]:
    """What the coordinator says of a checkpoint with these moments, whose manifest claims this."""
    files = {WEIGHTS: save({"a": torch.ones(4)})}
    if moments is not None:
        files[OPTIMIZER] = moments if isinstance(moments, bytes) else save(moments)
    checkpoints.commit(run.rundir, 50, 1, files=files, created_at=time.time(), loop={COUNTERS: claimed})
    job = run.rundir.read_job()
    directory = RunDirectory(run.rundir, job.spec.evaluation, job=job)
    directory.poll(time.time())
    return [*directory.poll(time.time()).corruptions]


def test_moments_of_another_step_are_named_once(run: SmallRun) -> None:
    (one,) = found(run, MOMENTS, {"a/step": 100.0})
    assert one == Corruption(
        reason=OPTIMIZER_DIFFERS,
        message="step-000000050 of generation 1 holds an optimizer state after 50 updates of a, and the optimizer had "
        "made 100",
    )


def test_where_nothing_is_to_be_compared_nothing_is_named(run: SmallRun) -> None:
    job = run.rundir.read_job()
    run.rundir.write_job(manifests.job(elasticity={"onCorruption": "Off"}))
    assert found(run, MOMENTS, {"a/step": 100.0}) == []
    run.rundir.write_job(job)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32])
def test_moments_of_their_step_are_not(run: SmallRun, dtype: torch.dtype) -> None:
    assert found(run, MOMENTS | {"a/step": torch.tensor(50).to(dtype)}, {"a/step": 50.0}) == []


@pytest.mark.parametrize(
    ("moments", "claimed"),
    [
        (MOMENTS, {}),
        (MOMENTS, None),
        (MOMENTS, {"b/step": 3.0}),
        (MOMENTS, {"a/exp_avg": 3.0}),
        (MOMENTS | {"a/step": torch.tensor(True)}, {"a/step": 3.0}),
        (None, {"a/step": 100.0}),
        (b"", {"a/step": 100.0}),
        (b"\xff" * 40, {"a/step": 100.0}),
        (b"\x02\0\0\0\0\0\0\0[]", {"a/step": 100.0}),
        (b'\x0c\0\0\0\0\0\0\0{"a/step":1}', {"a/step": 100.0}),
    ],
)
def test_what_cannot_be_compared_is_not(run: SmallRun, moments: Any, claimed: Any) -> None:
    assert found(run, moments, claimed) == []
