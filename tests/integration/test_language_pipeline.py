"""Stages of a pretrained model learn what one rank alone learns, and go on from checkpoints of other strategies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.language import pretrained
from tests.support.ranks import Ranks, kill_when_saved, losses, records, run, sample_ids

pytestmark = [pytest.mark.timeout(300), pytest.mark.full("trainer")]

STEPS = 50
LOOP = {"globalBatchSize": 6, "maxSteps": STEPS, "epochs": 99, "gradientClipNorm": 1.0, "emaDecay": 0.9}
PIPELINE = {"strategy": "pipeline", "pipeline": {"stages": 2, "chunks": 3}}
GPIPE = {"schedule": "gpipe"}
ZERO_BUBBLE = {"schedule": "zeroBubble", "splitAt": ["model.layers.0", "model.layers.1", "model.norm"]}
LORA = {"rank": 4, "dropout": 0.1}


def job(path: Path, kind: str, loop: dict[str, Any], processes: int = 1, **parameters: Any) -> RunDir:
    """A run directory with a job that trains on short texts, several in a row."""
    model, data = path.parent / "model", path.parent / "texts.jsonl"
    if not model.exists():
        pretrained(model, kind)
        texts = (
            "".join(f"{word} {number} " for word in ("one", "and", "two")[: 1 + number % 3]) for number in range(90)
        )
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trainer = {
        "task": "causal-lm",
        "parameters": {"pretrained": str(model), "length": 32, "data": {"path": str(data)}, **parameters},
        "loop": LOOP | {"optimizer": {"name": "sgd", "learningRate": 0.1}} | loop,
    }
    more: dict[str, Any] = {"workers": {"processesPerReplica": processes}, "checkpoint": {"everySteps": 5}}
    return manifests.run_directory(path, manifests.job("test", trainer=trainer, **more))


@pytest.mark.parametrize(
    ("kind", "loop", "ranks"),
    [
        pytest.param("qwen2", {"activationCheckpointing": True}, 4, id="tied-and-data"),
        pytest.param("llama", {"pipeline": ZERO_BUBBLE}, 2, id="zero-bubble"),
        pytest.param("qwen2", {"pipeline": GPIPE | {"chunks": 4}}, 2, id="gpipe"),
        pytest.param("qwen2", {"fsdp": {}}, 4, id="tied-and-split"),
        pytest.param("llama", {"fsdp": {}, "pipeline": GPIPE | {"stages": 2, "chunks": 3}}, 4, id="gpipe-split"),
        pytest.param("llama", {"tensorParallel": 2}, 4, id="tensor"),
    ],
)
def test_they_learn_what_one_rank_alone_learns(tmp_path: Path, kind: str, loop: dict[str, Any], ranks: int) -> None:
    alone, stages = (
        job(tmp_path / "alone", kind, {}),
        job(tmp_path / "stages", kind, PIPELINE | loop, ranks, lossChunk=20),
    )
    run(alone)
    run(stages, ranks)
    assert len(losses(alone)) == STEPS
    assert losses(alone)[STEPS] < 0.8 * losses(alone)[1]
    assert sample_ids(stages) == sample_ids(alone)
    assert losses(stages) == pytest.approx(losses(alone), abs=1e-4)
    found, wanted = (load_file(of.checkpoint(of.checkpoint_names()[-1]) / WEIGHTS) for of in (stages, alone))
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in wanted.items()}
    for name, one in wanted.items():
        assert found[name].sub(one).abs().max() < 1e-4, name


@pytest.mark.parametrize(
    ("loop", "ranks"),
    [
        pytest.param({"strategy": "fsdp", "tensorParallel": 2}, 2, id="tensor"),
        pytest.param({"strategy": "fsdp", "tensorParallel": 2, "microBatchSize": 2}, 4, id="fsdp-and-tensor"),
        pytest.param(PIPELINE | {"tensorParallel": 2}, 4, id="pipeline-and-tensor"),
        pytest.param(PIPELINE | {"fsdp": {}, "tensorParallel": 2}, 8, id="all"),
    ],
)
def test_weights_between_split_matrices_learn_from_all_heads(
    tmp_path: Path, loop: dict[str, Any], ranks: int
) -> None:  # fmt: skip
    """The norms of queries and keys in Qwen3, which see the heads of their rank alone. Losses would hardly tell."""
    few: dict[str, Any] = {"optimizer": {"name": "sgd", "learningRate": 0.5}, "maxSteps": 4}
    alone, split = job(tmp_path / "alone", "qwen3", few), job(tmp_path / "split", "qwen3", few | loop, ranks)
    run(alone)
    run(split, ranks)
    begun = load_file(tmp_path / "model" / "model.safetensors")
    found, wanted = (load_file(of.checkpoint(of.checkpoint_names()[-1]) / WEIGHTS) for of in (split, alone))
    assert {name for name in found if name.endswith(("q_norm.weight", "k_norm.weight"))}
    for name in found.keys() & begun.keys():
        moved, apart = wanted[name].sub(begun[name]).norm(), found[name].sub(wanted[name]).norm()
        assert moved > 0, name
        assert apart < 0.01 * moved, (name, float(apart / moved))


@pytest.mark.parametrize(("loop", "ranks"), [({"strategy": "fsdp"}, 4), (PIPELINE, 4)], ids=["fsdp", "pipeline"])
def test_a_plan_that_lacks_a_layer_between_split_matrices_fails_the_job(
    tmp_path: Path, loop: dict[str, Any], ranks: int
) -> None:  # fmt: skip
    """Apertus has weights in its activation function."""
    rundir = job(tmp_path / "split", "apertus", loop | {"tensorParallel": 2}, ranks)
    with Ranks(rundir, ranks) as group:
        codes, output = group.finish()
    assert ExitCode.CONFIGURATION in codes, output
    assert "mlp.act_fn.alpha_p and " in output
    assert rundir.checkpoint_names() == []


@pytest.mark.parametrize(
    ("kind", "lora", "loop", "ranks"),
    [
        pytest.param("qwen2", LORA, {}, 2, id="dropout"),
        pytest.param("qwen2", LORA, {"fsdp": {}}, 4, id="split"),
        pytest.param("llama", LORA | {"quantizeBase": "nf4"}, {"pipeline": ZERO_BUBBLE}, 2, id="stages-without-any"),
        pytest.param("qwen2", LORA | {"targets": ["layers.0.mlp.up_proj"]}, {}, 4, id="frozen-last"),
        pytest.param("llama", LORA | {"targets": ["layers.1.mlp.up_proj"]}, {"pipeline": GPIPE}, 2, id="frozen-first"),
    ],
)
def test_their_adapters_learn_what_those_of_one_rank_learn(
    tmp_path: Path, kind: str, lora: dict[str, Any], loop: dict[str, Any], ranks: int
) -> None:
    """Over frozen weights, also through stages in which nothing learns."""
    adam = {"optimizer": {"name": "adamw", "learningRate": 0.01}}
    alone = job(tmp_path / "alone", kind, adam, lora=lora)
    stages = job(tmp_path / "stages", kind, adam | PIPELINE | loop, ranks, lora=lora)
    run(alone)
    run(stages, ranks)
    assert len(losses(alone)) == STEPS
    assert losses(alone)[STEPS] < 0.95 * losses(alone)[1]
    assert losses(stages) == pytest.approx(losses(alone), abs=1e-4)
    found, wanted = (load_file(of.checkpoint(of.checkpoint_names()[-1]) / WEIGHTS) for of in (stages, alone))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert all(".lora_" in name or name == "lora_base.digest" for name in found)


@pytest.mark.parametrize("parameters", [{}, {"lora": LORA}], ids=["weights", "adapters"])
def test_they_go_on_from_another_strategy_and_it_from_them(tmp_path: Path, parameters: dict[str, Any]) -> None:
    """Killed in between."""
    longer = {"optimizer": {"name": "adamw", "learningRate": 0.003}, "maxSteps": 100}
    undisturbed = job(tmp_path / "undisturbed", "qwen2", longer, **parameters)
    run(undisturbed)
    for loop, ranks, processes in (({"strategy": "fsdp"}, 2, 1), (PIPELINE, 2, 2), ({"strategy": "ddp"}, 2, 1)):
        killed = job(tmp_path / "killed", "qwen2", longer | loop, processes, **parameters)
        kill_when_saved(killed, ranks)
        assert not killed.ended()
    run(job(tmp_path / "killed", "qwen2", longer | PIPELINE, 2, **parameters), 2)
    assert [record["worldSize"] for record in records(killed, "start")] == [2, 2, 2, 2]
    assert all(record["step"] > 0 for record in records(killed, "start")[1:])
    assert sample_ids(killed) == sample_ids(undisturbed)
    assert losses(killed) == pytest.approx(losses(undisturbed), abs=1e-4)
