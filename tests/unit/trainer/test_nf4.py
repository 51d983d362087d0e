"""Weights of four bits under adapters: how they are rounded, that gradients pass through, and what is exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tandem.job.causal_lm import Lora
from tandem.job.footprint import FootprintRequest
from tandem.job.trainer import Trainer
from tandem_trainer.checkpoint.state import load_weights, weights
from tandem_trainer.export import export, task_of_run, write_beside
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.footprint import footprint
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tandem_trainer.language.lora import adapt
from tandem_trainer.language.nf4 import LEVELS, Nf4Linear, block_of, dequantize, level_pairs, quantize
from tandem_trainer.train import averaged
from tests.support import manifests
from tests.support.language import logits, pretrained, tuned
from tests.support.worlds.small_run import SmallRun

LORA = {"rank": 4, "quantizeBase": "nf4"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("base"))


def task(model: Path, lora: dict[str, Any] = LORA, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(model), "length": 64, "lora": lora, **given}))


def restored(weight: Tensor) -> Tensor:
    return dequantize(quantize(weight), level_pairs(), weight.shape[1], torch.float32)


def test_a_weight_becomes_the_nearest_level_of_its_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 192)
    weight[1] = 0.0
    scale = weight.view(5, 3, 64).abs().amax(dim=-1, keepdim=True)
    every = torch.tensor(LEVELS) * scale.unsqueeze(-1)
    nearest = (weight.view(5, 3, 64, 1) - every).abs().argmin(dim=-1)
    expected = torch.gather(every.expand(5, 3, 64, 16), 3, nearest.unsqueeze(-1)).view(5, 192)
    assert torch.equal(restored(weight), expected)
    assert torch.equal(restored(weight)[1], torch.zeros(192))
    assert quantize(weight).nbytes == 5 * (192 / 2 + 4 * 3)
    # A level is a level: what was rounded once is the same when it is rounded again.
    assert torch.equal(restored(restored(weight)), restored(weight))


def test_rows_are_rounded_each_for_itself_so_that_ranks_may_hold_some_of_them() -> None:
    weight = torch.randn(7, 96)
    assert torch.equal(quantize(weight)[2:5], quantize(weight[2:5].clone()))
    assert [block_of(columns) for columns in (64, 896, 96, 33, 62)] == [64, 64, 48, None, 62]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_and_passes_gradients_on_as_one_with_the_rounded_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, dtype=dtype)
    made = Nf4Linear(layer)
    made.packed.copy_(quantize(layer.weight))
    plain = made.to_linear()
    assert plain.weight.dtype == dtype
    inputs = [torch.randn(3, 5, 96).to(dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    outputs = [module(one) for module, one in zip((made, plain), inputs, strict=True)]
    for one in outputs:
        one.float().square().sum().backward()
    assert made.packed.grad is None
    with torch.no_grad():
        evaluated = made.eval()(inputs[0])
    assert torch.equal(made.weight(dtype), plain.weight)
    # Products of 16 bits are added up in an order that depends on how memory is aligned.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for found, expected in ((outputs[0], outputs[1]), (inputs[0].grad, inputs[1].grad), (evaluated, outputs[1])):
        assert (found - expected).norm() <= rounding * expected.norm()


def test_adapters_learn_over_it_and_are_all_that_a_checkpoint_holds(base: Path) -> None:
    made = task(base)
    model = tuned(made)
    layers = [name for name, one in model.named_modules() if isinstance(one, Nf4Linear)]
    assert len(layers) == 2 * 7
    kept = {name: one.clone() for name, one in weights(model).items()}
    assert all(".lora_" in name or name == "lora_base.digest" for name in kept)

    again = made.model()
    made.load_frozen(again)
    load_weights(again, kept)
    assert torch.equal(logits(again), logits(model))
    plain = task(base, {"rank": 4})
    whole = plain.model()
    plain.load_frozen(whole)
    load_weights(whole, kept)
    assert not torch.equal(logits(whole), logits(model))


def test_an_export_is_the_model_that_was_evaluated(tmp_path: Path, base: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = SmallRun(tmp_path / "run")
    parameters = {"pretrained": str(base), "length": 64, "lora": LORA}
    run.rundir.write_job(manifests.job("tuned", trainer={"task": "causal-lm", "parameters": parameters}))
    run.begin(1)
    model = tuned(task(base))
    name = run.save(10, weights=weights(model)).name
    manifest, folder = run.rundir.manifest(name), tmp_path / "exported"
    folder.mkdir()
    made, checkpoint = task_of_run(run.rundir.path), run.rundir.checkpoint(name)
    answer = export(checkpoint, manifest.digest, folder / "model.safetensors", "safetensors", None, made)
    write_beside(made, "safetensors", folder, answer["dtypes"])
    assert load_file(folder / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    opened = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-5, atol=1e-5)


def test_an_average_leaves_the_codes_as_they_are(base: Path) -> None:
    model = tuned(task(base))
    average = averaged(model, 0.9)
    assert average is not None
    for _ in range(3):
        average.update_parameters(model)
    for name, one in average.module.named_parameters():
        if name.endswith(".packed"):
            assert torch.equal(one, model.get_parameter(name))


def test_tandem_plan_counts_half_a_byte_for_a_weight(base: Path) -> None:
    sizes = []
    for lora in ({"rank": 4}, LORA):
        parameters = {"pretrained": str(base), "length": 64, "lora": lora}
        trainer = Trainer.model_validate({"task": "causal-lm", "parameters": parameters})
        sizes.append(footprint(FootprintRequest(trainer=trainer, micro_batches=(2,)), lambda words: None))
    plain, rounded = sizes
    matrices = sum(
        one.packed.shape[0] * one.in_features for one in task(base).model().modules() if isinstance(one, Nf4Linear)
    )
    packed = sum(one.packed.nbytes for one in task(base).model().modules() if isinstance(one, Nf4Linear))
    assert rounded.parameters == plain.parameters - 4 * matrices + packed
    assert rounded.optimizer == plain.optimizer
    assert rounded.untraced == ""


def test_what_cannot_be_rounded_is_told(base: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 60, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    with pytest.raises(ConfigurationError, match="quantizeBase is for linear layers, and GPT2LMHeadModel has none"):
        adapt(GPT2LMHeadModel(GPT2Config(**size)), Lora.model_validate({"rank": 2, "quantizeBase": "nf4"}))
    made = task(base)
    with pytest.raises(ConfigurationError, match="quantizeBase does not go together with tensorParallel"):
        made.tensor_plan(made.model(), 2)
