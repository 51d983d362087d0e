"""One process with several GPUs: by samples and by layers it learns what one GPU learns."""

from pathlib import Path

import pytest

from tests.gpu.test_training import assert_same_curve, trained

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("strategy", ["dp", "model"])
def test_several_gpus_of_one_process_learn_the_curve_of_one(
    tmp_path: Path, gpus: int, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    if gpus < 2:
        pytest.skip("there is one GPU here, and this is for several")
    clipped = {"gradientClipNorm": 1.0, "emaDecay": 0.9}
    ours = trained(tmp_path / "many", steps=10, strategy=strategy, **clipped)
    ours = trained(tmp_path / "many", strategy=strategy, **clipped)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert_same_curve(ours, trained(tmp_path / "one", **clipped), 3e-2)
