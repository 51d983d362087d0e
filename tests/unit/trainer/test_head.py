"""Losses without the logits of all tokens: beside plain ones, with their gradients and their memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.job.footprint import FootprintRequest
from tandem.job.trainer import Trainer
from tandem_trainer.footprint import footprint
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tandem_trainer.language.head import Head, enable_chunked_loss
from tests.support.language import config, pretrained


def task(model: Path, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(model), "length": 64, **given}))


def learned(made: FineTuning, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and the gradients that follow from it."""
    model = made.model().train()
    made.initialize(model)
    rows = made.data("train")
    batch = made.collate([rows[number] for number in (0, len(rows) // 2, len(rows) - 1)])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = made.loss_sum(model, batch, 3)
    (loss / 3).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("chunk", [7, 10_000])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_loss_and_gradients_are_the_plain_ones(tmp_path: Path, kind: str, packing: bool, chunk: int) -> None:
    model = pretrained(tmp_path / "model", kind)  # The last layer of qwen2 has the weights of the embedding.
    loss, gradients = learned(task(model, packing=packing, lossChunk=0))
    other, found = learned(task(model, packing=packing, lossChunk=chunk))
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_they_are_as_close_to_the_true_ones_as_the_plain_ones_are(tmp_path: Path, autocast: bool) -> None:
    model = pretrained(tmp_path / "model", dtype="bfloat16")
    _, true = learned(task(model, dtype="float32", lossChunk=0))
    errors = {}
    for chunk in (0, 50):
        _, gradients = learned(task(model, dtype="float32" if autocast else "bfloat16", lossChunk=chunk), autocast)
        away = [(gradients[name].float() - one).norm() / one.norm() for name, one in true.items()]
        errors[chunk] = torch.stack(away).mean()
    assert errors[50] < 1.05 * errors[0] < 0.05


def test_evaluators_see_the_losses_that_they_would_see_without_chunks(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "model")
    found = []
    for chunk in (0, 7):
        made = task(model, lossChunk=chunk)
        network = made.model().eval()
        made.initialize(network)
        rows = made.data("test")
        batch = made.collate(list(rows))
        with torch.inference_mode():
            metrics = made.metrics(network, batch)
            found.append((made.loss(network, batch), *(tuple(vars(one).values()) for one in metrics.values())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_last_layer_may_have_a_bias_and_frozen_weights() -> None:
    torch.manual_seed(0)
    hidden, targets = torch.randn(2, 9, 8, requires_grad=True), torch.randint(0, 20, (2, 9))
    targets[0, 3:] = -100
    for frozen in (False, True):
        plain = nn.Linear(8, 20)
        plain.weight.requires_grad_(not frozen)
        expected = nn.functional.cross_entropy(plain(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
        wanted = [one for one in (hidden, plain.weight, plain.bias) if one.requires_grad]
        gradients = torch.autograd.grad(3 * expected, wanted)
        plain.__class__, plain.chunk = Head, 4  # type: ignore[assignment]
        found = plain(hidden, targets)
        torch.testing.assert_close(found, expected[None])
        torch.testing.assert_close(torch.autograd.grad(3 * found, wanted), gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_the_weights_are_added_to_those_that_are_there_before_the_backward_pass(
    dtype: torch.dtype, frozen: bool
) -> None:
    torch.manual_seed(0)
    hidden, targets = torch.randn(2, 9, 8, dtype=dtype, requires_grad=True), torch.randint(0, 20, (2, 9))
    targets[0, 3:] = -100
    plain = nn.Linear(8, 20, dtype=dtype).requires_grad_(not frozen)
    for _ in range(2):
        loss = nn.functional.cross_entropy(plain(hidden).float().flatten(0, 1), targets.flatten(), reduction="sum")
        (3 * loss).backward()  # type: ignore[no-untyped-call]
    expected = [one.grad for one in (hidden, plain.weight, plain.bias)]
    hidden.grad = plain.weight.grad = plain.bias.grad = None
    plain.__class__, plain.chunk = Head, 4  # type: ignore[assignment]
    losses = [plain.scaled_loss_sum(hidden, targets, 3.0) for _ in range(2)]  # type: ignore[operator]
    known = [plain.weight.grad, plain.bias.grad]
    assert [one is None for one in known] == [frozen, frozen]
    for one in losses:
        torch.testing.assert_close(one, 3 * loss)
        one.backward()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close([hidden.grad, *known], expected, **close)


def test_in_float16_gradients_of_the_weights_wait_for_a_backward_pass_whose_loss_is_scaled() -> None:
    torch.manual_seed(0)
    hidden, targets = torch.randn(1, 9, 8, requires_grad=True), torch.randint(0, 20, (1, 9))
    head = nn.Linear(8, 20)
    (3 * nn.functional.cross_entropy(head(hidden)[0], targets[0], reduction="sum")).backward()
    assert head.weight.grad is not None
    expected, head.weight.grad = head.weight.grad, None
    head.__class__, head.chunk = Head, 4  # type: ignore[assignment]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head.scaled_loss_sum(hidden, targets, 3.0)  # type: ignore[operator]
    assert head.weight.grad is None
    (loss * 1024).backward()
    torch.testing.assert_close(head.weight.grad / 1024, expected, rtol=0.02, atol=0.02)


def test_logits_of_a_chunk_alone_are_in_memory_as_tandem_plan_sees_it(tmp_path: Path) -> None:
    model = pretrained(tmp_path / "model", vocab_size=20_000)
    peaks = {}
    for chunk in (0, 64):
        parameters = {"pretrained": str(model), "length": 64, "lossChunk": chunk}
        trainer = Trainer.model_validate({"task": "causal-lm", "parameters": parameters})
        (traced,) = footprint(FootprintRequest(trainer=trainer, micro_batches=(16,)), lambda words: None).passes
        peaks[chunk] = traced.accumulating
    logits = 16 * 64 * 20_000 * 4
    assert peaks[0] > 2 * logits
    assert peaks[64] < 0.4 * logits


@pytest.mark.parametrize("kind", ["Gemma2Config", "CohereConfig", "OPTConfig"])
def test_a_model_that_does_more_with_its_logits_stays_as_it_is_and_says_why(kind: str) -> None:
    import transformers

    size = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**size, **known))
    assert "does more" in enable_chunked_loss(model, None)
    assert not isinstance(model.get_output_embeddings(), Head)
    assert model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 60)


def test_an_opened_model_still_gives_logits_and_writes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config("qwen2"))
    asks = torch.tensor([[5, 6, 7]])
    before = model.generate(asks, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert enable_chunked_loss(model, None) == ""
    assert model.generate(asks, max_new_tokens=4, do_sample=False, pad_token_id=0).equal(before)
