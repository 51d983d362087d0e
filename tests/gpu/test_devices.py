"""One process with several GPUs: by samples and by layers it learns what one GPU learns."""

from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tests.support.ranks import Ranks, losses, make_rundir

pytestmark = pytest.mark.timeout(600)

CONFIG: dict[str, Any] = {"model": "cnn", "data": {"name": "digits"}, "globalBatchSize": 100, "gradientClipNorm": 1.0}


def trained(path: Path, steps: int, **config: Any) -> RunDir:
    """Train to the end of so many steps, and from there on if the folder holds fewer."""
    rundir = make_rundir(path, CONFIG | {"emaDecay": 0.9, "maxSteps": steps} | config)
    rundir.done_file.unlink(missing_ok=True)
    with Ranks(rundir, 1) as processes:
        codes, output = processes.finish(500)
    assert codes == [0], output
    return rundir


@pytest.mark.parametrize("strategy", ["dp", "model"])
def test_several_gpus_of_one_process_learn_the_curve_of_one(
    tmp_path: Path, gpus: int, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    if gpus < 2:
        pytest.skip("there is one GPU here, and this is for several")
    trained(tmp_path / "many", 10, strategy=strategy)
    ours = losses(trained(tmp_path / "many", 20, strategy=strategy))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert ours == pytest.approx(losses(trained(tmp_path / "one", 20)), rel=3e-2, abs=3e-3)
