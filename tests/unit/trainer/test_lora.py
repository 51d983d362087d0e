"""Adapters beside frozen weights: what learns, what a checkpoint holds, which base it is for, and what is exported."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.job.causal_lm import Lora
from tandem.job.footprint import FootprintRequest
from tandem.job.tasks import Optimizer
from tandem.job.trainer import Trainer
from tandem_trainer.checkpoint.state import CheckpointMismatch, load_weights, weights
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.export import export, task_of_run, write_beside
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.footprint import footprint
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tandem_trainer.language.lora import adapt, digest, merged, tensor_plan
from tests.support import manifests
from tests.support.language import logits, pretrained, tuned
from tests.support.worlds.small_run import SmallRun

LORA = {"rank": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("base"))


def task(model: Path, lora: dict[str, Any] = LORA, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(model), "length": 64, "lora": lora, **given}))


def test_adapters_alone_learn_and_are_all_that_the_optimizer_and_a_checkpoint_know(base: Path) -> None:
    made = task(base)
    torch.manual_seed(0)
    model = made.model()
    made.initialize(model)
    before = {name: one.clone() for name, one in model.named_parameters()}
    model = tuned(made)
    changed = {name for name, one in model.named_parameters() if not one.equal(before[name])}
    adapters = {name for name in before if ".lora_A." in name or ".lora_B." in name}
    assert changed == adapters
    # Two matrices beside each of the seven of both blocks.
    assert len(adapters) == 2 * 7 * 2
    assert weights(model).keys() == adapters | {"lora_base.digest"}
    state = TrainState(model, made.optimizer(model, Optimizer())).contents({})
    assert {name for group in state.loop["optimizers"][""]["groups"] for name in group} == adapters


def test_a_model_with_fresh_adapters_is_the_base(base: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = task(base)
    model = made.model()
    made.initialize(model)
    torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_a_checkpoint_comes_back_over_the_same_base_in_whatever_files_and_over_no_other(
    base: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = tuned(task(base))
    kept = {name: one.clone() for name, one in weights(model).items()}
    for name in ("moved", "other"):
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / name, max_shard_size="40KB")
    moved = task(tmp_path / "moved")
    again = moved.model()
    moved.load_frozen(again)
    load_weights(again, kept)
    assert logits(again).equal(logits(model))

    file = sorted((tmp_path / "other").glob("*.safetensors"))[0]
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    other = task(tmp_path / "other")
    strange = other.model()
    other.load_frozen(strange)
    before = {name: one.clone() for name, one in weights(strange).items()}
    with pytest.raises(CheckpointMismatch, match="adapters belong to other pretrained weights"):
        load_weights(strange, kept)
    assert all(one.equal(before[name]) for name, one in weights(strange).items())


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
    assert digest(one) == digest(dict(reversed(one.items())))
    for other in (
        {"a": torch.zeros(3, 2), "b": one["b"]},
        {"a": one["a"].int(), "b": one["b"]},
        {"c": one["a"], "b": one["b"]},
        {"a": one["a"].index_fill(0, torch.tensor([0]), 1.0), "b": one["b"]},
    ):
        assert digest(other) != digest(one)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["nothing"]}, "targets: .*nothing"),
        ({"targets": ["lm_head"]}, "lm_head is not a linear layer inside"),
        ({"targets": ["embed_tokens"]}, "embed_tokens is not a linear layer inside"),
    ],
)
def test_layers_that_cannot_have_adapters_are_told(base: Path, lora: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        task(base, lora).model()


def test_named_layers_alone_have_adapters(base: Path) -> None:
    model = task(base, {"targets": ["q_proj", "v_proj"], "rank": 2, "alpha": 3}).model()
    learning = [name for name, one in model.named_parameters() if one.requires_grad]
    assert len(learning) == 2 * 2 * 2
    assert all(".q_proj." in name or ".v_proj." in name for name in learning)
    assert model.get_submodule("model.layers.0.self_attn.q_proj").scaling == {"default": 1.5}


def test_the_layers_of_gpt_2_have_adapters_too_and_merge() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 60, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**size)).eval()
    names, before = {name for name, _ in model.named_parameters()}, logits(model)
    adapt(model, Lora(rank=2))
    assert logits(model).equal(before)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    applied = logits(model)
    assert not torch.allclose(applied, before, atol=1e-2)
    assert merged(model).keys() == names
    torch.testing.assert_close(logits(model), applied, rtol=1e-5, atol=1e-5)


def test_what_is_dropped_of_inputs_is_split_as_the_inputs_are(base: Path) -> None:
    made = task(base, {"rank": 4, "dropout": 0.1})
    plan = made.tensor_plan(made.model(), 2)
    assert plan["model.layers.0.self_attn.o_proj.lora_dropout.default"] == "rowwise"
    assert "model.layers.0.self_attn.q_proj.lora_dropout.default" not in plan
    plan = task(base).tensor_plan(task(base).model(), 2)
    assert plan["model.layers.0.self_attn.q_proj.lora_B.default"] == "colwise"
    assert plan["model.layers.0.self_attn.o_proj.lora_A.default"] == "rowwise"
    assert not any("dropout" in name for name in plan)
    assert "model.layers.0.self_attn.q_proj.lora_A.default" not in plan


def test_adapters_beside_a_layer_that_is_whole_are_whole(base: Path) -> None:
    """Such a layer has a part of the heads, so the gradients of all that is beside it are added up, too."""
    made = task(base, {"rank": 4, "dropout": 0.1})
    whole = "replicated_with_grad_allreduce"
    q_proj = "model.layers.0.self_attn.q_proj"
    assert tensor_plan(made.model(), Lora(rank=4, dropout=0.1), {q_proj: whole}, 2) == {
        f"{q_proj}.{part}": whole for part in ("base_layer", "lora_A.default", "lora_B.default")
    }


def test_adapters_of_a_model_in_bfloat16_are_in_float32(tmp_path: Path) -> None:
    model = tuned(task(pretrained(tmp_path / "half", dtype="bfloat16")))
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}


def test_tandem_plan_counts_frozen_weights_without_gradients_and_moments(base: Path) -> None:
    sizes = []
    for lora in (None, LORA):
        parameters = {"pretrained": str(base), "length": 64} | ({} if lora is None else {"lora": lora})
        trainer = Trainer.model_validate({"task": "causal-lm", "parameters": parameters})
        sizes.append(footprint(FootprintRequest(trainer=trainer, micro_batches=(2,)), lambda words: None))
    full, frozen = sizes
    adapters = 4 * sum(one.numel() for one in task(base).model().parameters() if one.requires_grad)
    assert full.gradients == full.parameters
    assert frozen.parameters == full.parameters + adapters
    assert frozen.gradients == adapters
    assert frozen.optimizer == pytest.approx(2 * adapters, rel=0.02)
    assert frozen.passes[0].flops < full.passes[0].flops


def test_operations_leave_out_the_gradients_of_frozen_weights(base: Path) -> None:
    made, full = task(base), FineTuning(FineTuningConfig.model_validate({"pretrained": str(base), "length": 64}))
    adapters = sum(one.numel() for one in made.model().parameters() if one.requires_grad)
    weights = sum(one.numel() for one in full.model().parameters())
    mine, others = made.flops_per_sample(), full.flops_per_sample()
    assert others - mine == 64 * (2 * weights - 6 * adapters)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_exported_as_a_folder_adapters_are_merged_and_exported_for_peft_they_are_not(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = pretrained(tmp_path / "base", kind)
    parameters = {"pretrained": str(base), "length": 64, "lora": LORA}
    run = SmallRun(tmp_path / "run")
    run.rundir.write_job(manifests.job("tuned", trainer={"task": "causal-lm", "parameters": parameters}))
    run.begin(1)
    model = tuned(task(base))
    name = run.save(10, weights=weights(model)).name
    checkpoint, manifest = run.rundir.checkpoint(name), run.rundir.manifest(name)
    applied = logits(model)
    found = {}
    for form, name in (("safetensors", "model"), ("peft", "adapter_model")):
        folder = tmp_path / form
        folder.mkdir()
        made = task_of_run(run.rundir.path)
        answer = export(checkpoint, manifest.digest, folder / f"{name}.safetensors", form, None, made)
        write_beside(made, form, folder, answer["dtypes"])
        found[form] = folder
    opened = AutoModelForCausalLM.from_pretrained(found["safetensors"])
    torch.testing.assert_close(logits(opened), applied, rtol=1e-5, atol=1e-5)
    assert load_file(found["safetensors"] / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()

    config = json.loads((found["peft"] / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of peft, about what transformers renames.
        opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), found["peft"])
    torch.testing.assert_close(logits(opened), applied, rtol=1e-5, atol=1e-5)
