"""Muon takes the same steps whether a rank has whole matrices or a part of each."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.reader import read_contents
from tests.support import manifests
from tests.support.ranks import Ranks, losses, records, run, sample_ids

FULL = pytest.mark.full("trainer")
MUON = {"name": "muon", "learningRate": 0.02, "adamwLearningRate": 0.005, "momentum": 0.9, "weightDecay": 0.1}
MATRICES = 8
"""That get gradients in the script."""


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("rows", 3),
        pytest.param("columns", 2, marks=FULL),
        pytest.param("hybrid", 4, marks=FULL),
        pytest.param("tensor", 4, marks=FULL),
    ],
)
def test_its_steps_are_those_of_whole_matrices_to_the_last_bit(tmp_path: Path, kind: str, ranks: int) -> None:
    with Ranks(RunDir(tmp_path), ranks, "-m", "tests.support.scripts.muon_steps", kind) as group:
        codes, output = group.finish()
    assert codes == [0] * ranks, output
    told = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert told == [[0.0, 0.0, MATRICES]] * ranks


def job(path: Path, loop: dict[str, Any], processes: int = 1) -> RunDir:
    text = path.parent / "text"
    text.write_text("the quick brown fox jumps over the lazy dog, and " * 40)
    trainer = {
        "task": "causal-lm",
        "parameters": {"width": 32, "layers": 2, "heads": 4, "length": 16, "text": str(text)},
        "loop": {"maxSteps": 40, "epochs": 50, "globalBatchSize": 9, "optimizer": MUON, **loop},
    }
    workers = {"processesPerReplica": processes}
    return manifests.run_directory(path, manifests.job("test", trainer=trainer, workers=workers))


@pytest.mark.full("trainer")
def test_a_job_goes_on_with_its_momentum_under_another_strategy(tmp_path: Path) -> None:
    """Up to how bfloat16 rounds, in which updates are computed: with `ddp`, ranks differ from one as much."""
    alone, changed = job(tmp_path / "alone", {}), job(tmp_path / "changed", {"strategy": "fsdp", "maxSteps": 10})
    run(alone)
    run(changed, 3)
    job(changed.path, {"strategy": "fsdp", "tensorParallel": 2, "maxSteps": 20}, 4)
    run(changed, 4)
    manifest = changed.committed()[0]
    contents = read_contents(changed.checkpoint(manifest.name), manifest)
    assert "blocks.0.mlp.gate.weight/momentum_buffer" in contents.optimizer
    job(changed.path, {})
    run(changed)
    assert [record["step"] for record in records(changed, "start")] == [0, 10, 20]
    assert sample_ids(changed) == sample_ids(alone)
    found, wanted = losses(changed), losses(alone)
    assert [found[step] for step in range(1, 6)] == pytest.approx([wanted[step] for step in range(1, 6)], abs=2e-3)
    assert found[40] == pytest.approx(wanted[40], rel=0.25)
    assert found[40] < 0.5 * found[1]
