"""Adapters are trained by `tandem run`, evaluated, resumed under other strategies after kills, merged by an export, and
refused over another base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir, checkpoint_name
from tests.support import manifests
from tests.support.language import pretrained
from tests.support.local_run import LocalRun, evaluations
from tests.support.processes import tandem
from tests.support.ranks import kill_when_saved, losses, run

pytestmark = [pytest.mark.timeout(300), pytest.mark.full("trainer", "evaluator", "cli")]

LORA = {"rank": 4, "dropout": 0.1}
LOOP = {"globalBatchSize": 8, "epochs": 20, "optimizer": {"name": "adamw", "learningRate": 0.01}}


def trainer(model: Path, **loop: Any) -> dict[str, Any]:
    parameters = {"pretrained": str(model), "length": 64, "lora": LORA, "lossChunk": 50}
    return {"task": "causal-lm", "parameters": parameters, "loop": LOOP | loop}


def test_they_go_on_after_a_kill_on_other_ranks_under_another_strategy_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    model = pretrained(tmp_path / "model")

    def job(path: Path, **loop: Any) -> RunDir:
        of = manifests.job("test", trainer=trainer(model, maxSteps=40, **loop), checkpoint={"everySteps": 5})
        return manifests.run_directory(path, of)

    undisturbed = job(tmp_path / "undisturbed")
    run(undisturbed)
    killed = job(tmp_path / "killed", strategy="fsdp")
    kill_when_saved(killed, 2, saves=2)
    job(killed.path)
    run(killed, 2)
    assert losses(killed) == pytest.approx(losses(undisturbed), abs=1e-4)
    ends = [load_file(one.checkpoint(checkpoint_name(40)) / WEIGHTS) for one in (undisturbed, killed)]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


def test_they_are_evaluated_over_their_base_merged_and_refused_over_another(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, path = pretrained(tmp_path / "model"), tmp_path / "job.yaml"
    job = manifests.manifest(
        "tuned", trainer=trainer(model, maxSteps=20), evaluators={"policy": "Every"}, checkpoint={"everySteps": 10}
    )
    path.write_text(json.dumps(job))
    with LocalRun(tmp_path, manifest=path) as started:
        assert started.ends(200) == 0, started.output
    scores = {one["step"]: one["metrics"] for one in evaluations(started.path)}
    assert scores[20]["perplexity"] < scores[10]["perplexity"]

    folder = tmp_path / "exported"
    answer = tandem("checkpoints", "export", str(started.path), "final", "--to", str(folder), "--format", "folder")
    assert answer.returncode == 0, answer.stderr
    merged = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert merged.keys() == before.keys()
    assert {name for name, one in merged.items() if not one.equal(before[name])} == {
        name for name in merged if "_proj.weight" in name
    }

    tensors = load_file(model / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with LocalRun(tmp_path, "--set", "trainer.loop.maxSteps=30", manifest=path) as again:
        assert again.ends(200) != 0
    assert "adapters belong to other pretrained weights" in again.output


def test_ranks_that_split_matrices_drop_what_one_rank_alone_drops(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "model")

    def job(path: Path, processes: int = 1, **loop: Any) -> RunDir:
        workers = {"processesPerReplica": processes}
        of = manifests.job("test", trainer=trainer(model, maxSteps=12, **loop), workers=workers)
        return manifests.run_directory(path, of)

    alone, split = job(tmp_path / "alone"), job(tmp_path / "split", 2, strategy="fsdp", tensorParallel=2)
    run(alone)
    run(split, 2)
    assert losses(split) == pytest.approx(losses(alone), abs=1e-3)
