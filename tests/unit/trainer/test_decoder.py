"""A pretrained model in parts: they are its forward pass, and a model with another one is refused."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tandem.job.footprint import FootprintRequest
from tandem.job.tasks import Pipeline
from tandem.job.trainer import Trainer
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.footprint import footprint
from tandem_trainer.language.decoder import decoder_parts
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tandem_trainer.language.packing import mask, mask_from_positions, positions
from tandem_trainer.strategies.stages import PrecomputedOutput, cut, inputs_of, run
from tandem_trainer.task_check import mistakes_of
from tests.support import manifests
from tests.support.language import config, pretrained


def task(model: Path, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(model), "length": 64, **given}))


def small(kind: str, **more: Any) -> Any:
    """A model of transformers with random weights."""
    import transformers

    size = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"head_dim": 8, "num_key_value_heads": 2}
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(2)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**size, **known, **more))


def test_a_mask_follows_from_places() -> None:
    documents = torch.tensor([[1, 1, 2, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3]])
    assert torch.equal(mask_from_positions(positions(documents)), mask(documents))


@pytest.mark.parametrize("chunk", [0, 50])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_losses_and_gradients_of_two_stages_are_those_of_the_whole_model(tmp_path: Path, kind: str, chunk: int) -> None:
    """Of rows with several documents, at any cut, where the last row is a repeated one."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": "to be or not " * (1 + n % 4)}) + "\n" for n in range(40)))
    made = task(pretrained(tmp_path / "model", kind), lossChunk=chunk, data={"path": str(data)})
    model = made.model().train()
    made.initialize(model)
    rows = made.data("train")
    batch = made.collate([rows[0], rows[len(rows) - 1], rows[len(rows) // 2]])
    assert batch["documents"].max() > 2
    whole = made.loss(model, batch)
    (whole[:2].sum() * 0.25).backward()  # type: ignore[no-untyped-call]
    expected = {name: one.grad for name, one in model.named_parameters()}
    parts = made.pipeline_parts(model)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert list(parts) == names
    assert {id(one) for part in parts.values() for one in part.parameters()} == {id(one) for one in model.parameters()}
    for first in range(1, len(names)):
        model.zero_grad()
        given, named = inputs_of(made, batch)
        assert "attention_mask" not in named, "stages make their own"
        values = run([*parts.values()][:first], given, named)
        (output,) = run([*parts.values()][first:], values, {})
        torch.testing.assert_close(made.loss(PrecomputedOutput(made, output), batch), whole)
        found = made.stage_loss(PrecomputedOutput(made, output), batch, 3, 2, 0.25)
        torch.testing.assert_close(found, whole[:2].sum() * 0.25)
        found.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close({name: one.grad for name, one in model.named_parameters()}, expected)


@pytest.mark.parametrize("kind", ["Qwen3Config", "MistralConfig", "GemmaConfig", "Olmo2Config", "SmolLM3Config"])
def test_other_models_of_the_same_layout_are_cut(kind: str) -> None:
    model = small(kind).eval()
    tokens, places = torch.arange(12).view(2, 6), positions(torch.tensor([[1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 2]]))
    given = {"input_ids": tokens, "position_ids": places, "use_cache": False}
    whole = model(**given, attention_mask=mask_from_positions(places)).logits
    (logits,) = run([*decoder_parts(model).values()], (), given)
    torch.testing.assert_close(logits, whole)


def test_layers_that_are_computed_again_stay_so(tmp_path: Path) -> None:
    model = task(pretrained(tmp_path / "model")).model()
    calls: list[int] = []
    for number, layer in enumerate(model.model.layers):
        plain = layer.forward

        def counted(*given: Any, number: int = number, plain: Any = plain, **named: Any) -> Tensor:
            calls.append(number)
            found: Tensor = plain(*given, **named)
            return found

        layer.forward = counted
    parts = decoder_parts(model)
    assert calls == [], "layers are not computed to see how they are called"
    run(
        [*parts.values()],
        (),
        {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "position_ids": torch.arange(4)[None]},
    )
    assert calls == [0, 1]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("GPT2Config", "another layout"),
        ("Gemma3TextConfig", "cannot be called one by one"),
        ("Gemma2Config", "does more with hidden states and logits"),
        ("GraniteConfig", "does more"),
    ],
)
def test_a_model_that_does_more_is_refused_with_what_to_take_instead(kind: str, why: str) -> None:
    more = {"embedding_multiplier": 2.0} if kind == "GraniteConfig" else {}
    with pytest.raises(ConfigurationError, match=rf"pipeline cannot cut a \w+, which .*{why}.*; use strategy: fsdp"):
        decoder_parts(small(kind, **more))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"packing": False}, "parameters.packing: strategy: pipeline needs rows of one length"),
    ],
)
def test_parameters_that_do_not_go_with_a_pipeline_are_named(tmp_path: Path, given: Any, why: str) -> None:
    model = pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match=why):
        task(model, **given).pipeline_parts(nn.Linear(1, 1))
    trainer = {"task": "causal-lm", "parameters": {"pretrained": str(model), **given}}
    found = {}
    for strategy in ("ddp", "pipeline"):
        trainer["loop"] = {"strategy": strategy}
        job = manifests.job("stages", trainer=trainer, workers={"processesPerReplica": 2})
        found[strategy] = [one["message"] for one in mistakes_of(job)]
    assert found["ddp"] == []
    (message,) = found["pipeline"]
    assert re.search(why, message)


def test_tandem_plan_sees_its_stages(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "model")
    loop = {"strategy": "pipeline", "pipeline": {"splitAt": ["model.layers.1"]}}
    trainer = Trainer.model_validate(
        {"task": "causal-lm", "parameters": {"pretrained": str(model), "length": 64}, "loop": loop}
    )
    found = footprint(FootprintRequest(trainer=trainer, micro_batches=(2,), by_stage=True), lambda words: None)
    assert found.untraced == ""
    first, last = found.stages
    table = 4 * config().vocab_size * config().hidden_size
    assert first.parameters + last.parameters == found.parameters + table, "tied, it lies on both"
    # Hidden states in float32, and places in int64.
    assert first.passes[0].sent == 2 * 64 * (4 * config().hidden_size + 8)


def test_the_last_stage_never_holds_the_logits_of_a_micro_batch(tmp_path: Path) -> None:
    """Nor keeps a gradient of its weights for each micro-batch that has not passed backward, as tandem plan sees it."""
    model, last = pretrained(tmp_path / "model", "llama", vocab_size=20_000), {}
    loop = {"strategy": "pipeline", "pipeline": {"splitAt": ["model.norm"], "schedule": "gpipe"}}
    for chunk in (0, 64):
        parameters = {"pretrained": str(model), "length": 64, "lossChunk": chunk}
        trainer = Trainer.model_validate({"task": "causal-lm", "parameters": parameters, "loop": loop})
        found = footprint(FootprintRequest(trainer=trainer, micro_batches=(16,), by_stage=True), lambda words: None)
        assert found.untraced == ""
        (last[chunk],) = found.stages[-1].passes
    logits, weights = 16 * 64 * 20_000 * 4, 20_000 * config().hidden_size * 4
    assert last[0].kept > logits
    assert last[0].peak > 2 * logits
    assert last[64].kept < 0.5 * weights
    assert last[64].peak < 0.4 * logits
    assert last[64].flops == pytest.approx(last[0].flops, rel=0.01)


def test_the_last_layer_counts_where_the_model_is_cut(tmp_path: Path) -> None:
    """Whether a stage returns logits or its loss computes them."""
    data = torch.zeros(2, 64, dtype=torch.int64)
    batch = {"tokens": data, "targets": data, "documents": data + 1}
    parts = []
    for chunk in (0, 64):
        made = task(pretrained(tmp_path / "model", vocab_size=20_000), lossChunk=chunk)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        found = cut(made.model(), made, Pipeline(), batch, mode, nullcontext())
        parts.append([len(stage.parts) for stage in found])
    assert parts == [[3, 1], [3, 1]]


def test_tandem_plan_sees_that_adapters_alone_learn_in_stages(tmp_path: Path) -> None:
    loop = {"strategy": "pipeline", "pipeline": {"splitAt": ["model.layers.1"]}}
    found = []
    for more in ({}, {"lora": {"rank": 2, "targets": ["layers.1.mlp.up_proj"]}}):
        parameters = {"pretrained": str(pretrained(tmp_path / "model")), "length": 64, **more}
        trainer = Trainer.model_validate({"task": "causal-lm", "parameters": parameters, "loop": loop})
        answer = footprint(FootprintRequest(trainer=trainer, micro_batches=(2,), by_stage=True), lambda words: None)
        assert answer.untraced == ""
        found.append(answer.stages)
    (all_first, all_last), (first, last) = found
    assert (first.gradients, last.gradients) == (0, 4 * 2 * (config().hidden_size + config().intermediate_size))
    assert first.parameters == all_first.parameters
    assert first.passes[0].flops < all_first.passes[0].flops
    assert last.passes[0].flops < all_last.passes[0].flops
