"""`compile: true`: the same training, by code that torch compiles when the first step is taken."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.rundir.checkpoint import WEIGHTS
from tandem_trainer.checkpoint.format import parse
from tests.support.ranks import losses, make_rundir, records, run

CONFIG: dict[str, Any] = {"model": "baby-cnn", "data": {"name": "digits"}, "globalBatchSize": 100}
STEPS = 12


# Compiling takes 20 s of a processor from an empty cache.
@pytest.mark.full("trainer")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for processors with g++, which is not here")
def test_compiled_ranks_learn_the_same_curve_go_on_from_checkpoints_of_others_and_others_from_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    reference = make_rundir(tmp_path / "reference", CONFIG | {"maxSteps": STEPS})
    run(reference)
    graphs = []
    for end, compiles in ((4, False), (8, True), (STEPS, False)):
        rundir = make_rundir(tmp_path / "run", CONFIG | {"compile": compiles, "maxSteps": end})
        rundir.done_file.unlink(missing_ok=True)
        run(rundir, 2)
        graphs.append(len([*cache.glob("fxgraph/*/*")]))
    assert graphs == [0, 2, 2], "the forward and the backward pass of the whole model, by the second run alone"
    assert [record["step"] for record in records(rundir, "start")] == [0, 4, 8]
    curve, expected = losses(rundir), losses(reference)
    assert list(curve) == list(expected) == list(range(1, STEPS + 1))
    torch.testing.assert_close([*curve.values()], [*expected.values()], rtol=1e-4, atol=1e-5)
    names = [
        parse(memoryview(bytearray((one.checkpoint(manifest.name) / WEIGHTS).read_bytes()))).keys()
        for one in (reference, rundir)
        for manifest in one.committed()
    ]
    assert reference.committed()
    assert {manifest.step for manifest in rundir.committed()} >= {4, 8, STEPS}, "and one for each minute"
    assert all(one == names[0] for one in names), "a compiled model has the names of the model"
