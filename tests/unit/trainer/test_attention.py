"""Documents in one row without padding: each model computes for them what it computes for each alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tandem_trainer.language import fine_tuning
from tandem_trainer.language.attention import ATTENTION, attend, register, stays_within
from tandem_trainer.language.fine_tuning import NO_TARGET, FineTuning, FineTuningConfig
from tandem_trainer.language.packing import Padded, Unpadded, mask
from tandem_trainer.models.dropout import key_dropout
from tests.support.language import pretrained

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
KINDS = ["qwen2", "llama", "qwen3", "mistral", "gemma3_text", "gpt_neox", "opt", "phi3", "mixtral"]
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 7 + [0] * 4, [1] * 16, [1] * 3 + [0] * 13])


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(GPT2 if kind == "gpt2" else SHAPE))
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 64, DOCUMENTS.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def the_librarys_own_again() -> Iterator[None]:
    yield
    AttentionInterface.register(ATTENTION, sdpa_attention_forward)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [*KINDS, "gpt2"])
def test_a_model_computes_for_documents_in_one_row_what_it_computes_for_each_alone(kind: str) -> None:
    model = model_of(kind)
    assert stays_within(model)
    layout, given = Unpadded(DOCUMENTS), tokens()
    with torch.inference_mode():
        together = iter(model(**layout.inputs(given)).logits[0].split([5, 7, 16, 3]))
        for row, documents in enumerate(DOCUMENTS):
            for number in range(1, int(documents.max()) + 1):
                alone = model(input_ids=given[row, documents == number][None]).logits[0]
                torch.testing.assert_close(next(together), alone, rtol=0, atol=1e-5)


def test_a_model_that_makes_attention_in_its_own_way_keeps_its_rows() -> None:
    assert not stays_within(model_of("falcon"))


@pytest.mark.parametrize("change", [lambda given: given.clone(), lambda given: given.float()])
def test_a_model_that_gives_a_layer_another_mask_keeps_its_rows(change: Callable[[Tensor], Tensor]) -> None:
    model = model_of("qwen2")

    def hook(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        return given, named | {"attention_mask": change(named["attention_mask"])}

    model.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
    assert not stays_within(model)
    assert AttentionInterface()[ATTENTION] is attend


def test_gradients_are_those_of_padded_rows() -> None:
    found = []
    for layout in (Unpadded(DOCUMENTS), Padded(DOCUMENTS)):
        model = model_of("qwen2").train()
        register()
        logits = model(**layout.inputs(tokens())).logits[0 if isinstance(layout, Unpadded) else DOCUMENTS > 0]
        logits.logsumexp(dim=-1).sum().backward()
        found.append([one.grad for one in model.parameters()])
    for own, padded in zip(*found, strict=True):
        torch.testing.assert_close(own, padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [None, mask(DOCUMENTS[:1])])
def test_with_a_mask_or_without_one_attention_is_the_librarys(given: Tensor | None) -> None:
    model = model_of("qwen2")
    inputs = {"input_ids": tokens()[:1], "attention_mask": given, "use_cache": False}
    with torch.inference_mode():
        theirs = model(**inputs).logits
        register()
        assert torch.equal(model(**inputs).logits, theirs)
        assert model.generate(tokens()[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_values_go_to_one_row_and_back() -> None:
    layout, values = Unpadded(DOCUMENTS), torch.arange(48).view(3, 16) + 1
    laid = layout.arrange(values)
    assert laid.shape == (1, 31)
    assert torch.equal(layout.restore(laid), torch.where(DOCUMENTS > 0, values, 0))
    inputs = layout.inputs(values)
    assert inputs["attention_mask"].tolist() == [[[[5, 7, 16, 3]]]]
    assert inputs["position_ids"][0].tolist() == [*range(5), *range(7), *range(16), *range(3)]
    assert layout.restore(laid > 3).dtype is torch.bool


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("pretrained"))


def task(base: Path, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(base), "length": 64, **given}))


def begun(made: FineTuning) -> nn.Module:
    model = made.model()
    made.initialize(model)
    return model


def batch_of(made: FineTuning, rows: int = 3) -> dict[str, Tensor]:
    data = made.data("train")
    # Long ones and short ones.
    return made.collate([data[number * (len(data) - 1) // (rows - 1)] for number in range(rows)])


@pytest.mark.parametrize("chunk", [None, 0])
@pytest.mark.parametrize("packing", [True, False])
def test_losses_metrics_and_gradients_do_not_depend_on_padding(base: Path, packing: bool, chunk: int | None) -> None:
    found = []
    for is_padded in (False, True):
        made = task(base, packing=packing, lossChunk=chunk)
        model = begun(made)
        made.data("test")
        batch = batch_of(made)
        if is_padded:
            made._stays_within = False
        assert isinstance(made.layout(model, batch["documents"]), Padded if is_padded else Unpadded)
        made.loss_sum(model.train(), batch, 3).backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in model.parameters()]
        with torch.inference_mode():
            losses, metrics = made.loss(model.eval(), batch), made.metrics(model, batch)
        assert losses.shape == (3,)
        found.append([losses, *gradients, *(torch.tensor(float(metrics[name].total)) for name in ("loss", "accuracy"))])
    for own, padded in zip(*found, strict=True):
        torch.testing.assert_close(own, padded, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_compiled_models_and_those_that_drop_by_sample_keep_their_rows(base: Path) -> None:
    made = task(base)
    model = begun(made)
    documents = batch_of(made)["documents"]
    model.compile()
    assert isinstance(made.layout(model, documents), Padded)

    made = task(base, lora={"rank": 2, "dropout": 0.1})
    model = begun(made)
    key_dropout(model)
    assert isinstance(made.layout(model.train(), documents), Padded)
    assert isinstance(made.layout(model.eval(), documents), Unpadded)


def test_a_pipeline_keeps_its_rows(base: Path) -> None:
    made = task(base)
    model = begun(made)
    made.pipeline_parts(model)
    batch = batch_of(made)
    assert "attention_mask" not in made.layout(model, batch["documents"]).inputs(batch["tokens"])


def test_documents_that_a_window_is_shorter_than_keep_their_rows(tmp_path: Path) -> None:
    base = pretrained(tmp_path / "model", use_sliding_window=True, sliding_window=32, max_window_layers=0)
    made = task(base, packing=False)
    model = begun(made)
    documents = batch_of(made)["documents"]
    assert isinstance(made.layout(model, documents), Padded)
    assert "attention_mask" not in made.layout(model, documents).inputs(documents)
    made = task(base, packing=False, length=32)
    assert isinstance(made.layout(begun(made), documents), Unpadded)


def test_what_is_not_learned_does_not_count(base: Path) -> None:
    made = task(base)
    model = begun(made).train()
    batch = batch_of(made)
    targets = torch.full_like(batch["targets"], NO_TARGET)
    assert made.loss_sum(model, batch | {"targets": targets}, 3).item() == 0.0


def test_where_there_is_a_gpu_rows_are_kept_and_nothing_is_looked_at(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = task(base)
    with monkeypatch.context() as within:
        within.setattr(torch.cuda, "is_available", lambda: True)
        within.setattr(fine_tuning, "stays_within", pytest.fail)
        model = made.model()
    assert isinstance(made.layout(model, DOCUMENTS), Padded)
