"""The trainer's processes on GPUs: the curve of a processor, low precision, compiled code, the same bits again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.file_names import OBJECT_STATES
from tandem_trainer.checkpoint.reader import read_contents
from tandem_trainer.checkpoint.state import join
from tests.support.ranks import Ranks, losses, make_rundir, records, sample_ids

pytestmark = pytest.mark.timeout(600)

CONFIG: dict[str, Any] = {"model": "cnn", "data": {"name": "digits"}, "globalBatchSize": 100}
STEPS = 20
SECONDS = 500.0
"""The first use of a GPU, and what is compiled for it, may take a minute."""


def trained(path: Path, steps: int = STEPS, ranks: int = 1, **config: Any) -> RunDir:
    """Train to the end of so many steps, and from there on if the folder holds fewer."""
    rundir = make_rundir(path, CONFIG | config | {"maxSteps": steps})
    rundir.done_file.unlink(missing_ok=True)
    with Ranks(rundir, ranks) as processes:
        codes, output = processes.finish(SECONDS)
    assert codes == [0] * ranks, output
    return rundir


def assert_same_curve(ours: RunDir, theirs: RunDir, tolerance: float) -> None:
    assert sample_ids(ours) == sample_ids(theirs)
    assert len(losses(ours)) == STEPS
    torch.testing.assert_close(
        [*losses(ours).values()], [*losses(theirs).values()], rtol=tolerance, atol=tolerance / 10
    )


def test_a_gpu_learns_the_curve_of_a_processor_with_the_same_units_dropped_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trained(tmp_path / "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    theirs = trained(tmp_path / "processor")
    # A GPU adds in another order, and may use TF32 in convolutions.
    assert_same_curve(ours, theirs, 3e-2)


def test_a_rank_on_each_gpu_and_one_alone_learn_the_same_curve(tmp_path: Path, gpus: int) -> None:
    if gpus < 2:
        pytest.skip("there is one GPU here, and NCCL wants one for each rank")
    assert_same_curve(trained(tmp_path / "many", ranks=gpus), trained(tmp_path / "alone"), 1e-2)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_low_precision_learns_about_the_same_curve(tmp_path: Path, precision: str) -> None:
    ours = trained(tmp_path / "low", precision=precision, gradientClipNorm=1.0)
    theirs = trained(tmp_path / "full", gradientClipNorm=1.0)
    assert_same_curve(ours, theirs, 1e-1)


def scaler_of(rundir: RunDir) -> dict[str, Any]:
    """What the newest checkpoint holds of the loss's scaler."""
    manifest = rundir.committed()[0]
    contents = read_contents(rundir.checkpoint(manifest.name), manifest)
    state: dict[str, Any] = join(contents.loop[OBJECT_STATES]["scaler"], contents.others)
    return state


def test_float16_goes_on_with_the_scale_of_its_checkpoint(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "undisturbed", precision="float16")
    resumed = trained(tmp_path / "resumed", STEPS // 2, precision="float16")
    half = scaler_of(resumed)
    resumed = trained(tmp_path / "resumed", precision="float16")
    assert [record["step"] for record in records(resumed, "start")] == [0, STEPS // 2]
    assert scaler_of(resumed) == scaler_of(undisturbed)
    assert scaler_of(resumed)["_growth_tracker"] > half["_growth_tracker"], "it counts the steps since it last changed"
    assert_same_curve(resumed, undisturbed, 3e-2)


def test_a_deterministic_run_is_the_same_to_the_last_bit_with_a_restart_in_it(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "undisturbed", deterministic=True)
    trained(tmp_path / "resumed", STEPS // 2, deterministic=True)
    resumed = trained(tmp_path / "resumed", deterministic=True)
    assert [record["step"] for record in records(resumed, "start")] == [0, STEPS // 2]
    assert losses(resumed) == losses(undisturbed)
    ours, theirs = (
        read_contents(run.checkpoint(manifest.name), manifest)
        for run in (resumed, undisturbed)
        for manifest in run.committed()[:1]
    )
    for mine, other in ((ours.weights, theirs.weights), (ours.optimizer, theirs.optimizer)):
        assert mine.keys() == other.keys()
        assert [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch compiles for a GPU with a C compiler, which is not here")
def test_compiled_code_learns_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    theirs = trained(tmp_path / "plain")
    assert [*cache.glob("fxgraph/*/*")] == []
    ours = trained(tmp_path / "compiled", compile=True)
    assert [*cache.glob("fxgraph/*/*")], "nothing was compiled"
    assert_same_curve(ours, theirs, 3e-2)
