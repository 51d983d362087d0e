"""Fine-tuning of a pretrained language model: what is learned of each sample, packing, losses, and what is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.evaluation import GeometricMean, Mean
from tandem.job.causal_lm import TextSource
from tandem.job.trainer import Trainer
from tandem_trainer.causal_lm import CausalLM
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language import reading
from tandem_trainer.language.fine_tuning import NO_TARGET, FineTuning, FineTuningConfig
from tandem_trainer.language.packing import BatchLayout, Padded, Unpadded, mask, pack_rows, positions
from tandem_trainer.language.token_bytes import token_bytes
from tandem_trainer.task import class_of, configured
from tandem_trainer.task_check import mistakes_of
from tests.support import manifests
from tests.support.language import config, pretrained, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("pretrained"))


def task(model: Path, **given: Any) -> FineTuning:
    return FineTuning(FineTuningConfig.model_validate({"pretrained": str(model), "length": 64, **given}))


def lines(path: Path, *samples: Any) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in samples))
    return str(path)


def learned(rows: Any) -> list[str]:
    """What is learned of each row, as text."""
    words = tokenizer()
    return [words.decode(targets[targets != NO_TARGET].tolist()) for _, targets, _ in rows]


def test_documents_fill_rows_by_best_fit_the_longest_first() -> None:
    assert pack_rows([3, 7, 5, 2, 8, 1], 10) == [[4, 3], [1, 0], [2, 5]]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (2000,), generator=generator).tolist()
    rows = pack_rows(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(2000))
    assert all(sum(lengths[number] for number in row) <= 64 for row in rows)
    assert len(rows) <= 1.02 * sum(lengths) / 64


def test_positions_begin_anew_and_a_token_sees_its_own_document_alone() -> None:
    documents = torch.tensor([[1, 1, 1, 2, 2, 0, 0]])
    assert positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    seen = mask(documents)[0, 0]
    assert seen[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert seen[4].nonzero().flatten().tolist() == [3, 4]
    assert seen[6].nonzero().flatten().tolist() == [5, 6]


@pytest.mark.parametrize("layout", [Padded, Unpadded])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_logits_of_packed_documents_are_those_of_each_alone(
    tmp_path: Path, kind: str, layout: Callable[[torch.Tensor], BatchLayout]
) -> None:
    made = task(pretrained(tmp_path / "model", kind))
    network = made.model().eval()
    made.initialize(network)
    rows = made.data("test")
    batch = made.collate([next(row for row in rows if row[2].max() > 1)])
    with torch.inference_mode():
        together = made._compute_logits(network, layout(batch["documents"]).inputs(batch["tokens"]))[0]
        contaminated = network(input_ids=batch["tokens"]).logits[0]
        for number in range(1, int(batch["documents"].max()) + 1):
            mine = batch["documents"][0] == number
            alone = network(input_ids=batch["tokens"][:, mine]).logits[0]
            torch.testing.assert_close(together[mine[: len(together)]], alone, rtol=0, atol=1e-5)
            assert number == 1 or not torch.allclose(contaminated[mine], alone, atol=1e-2)


def test_losses_of_packed_rows_and_of_padded_ones_have_one_mean(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"prompt": "ask " * n, "completion": "say " * (9 - n)} for n in range(8)))
    means = {}
    for packing in (True, False):
        made = task(model, packing=packing, data={"path": path, "test": path})
        network = made.model().eval()
        made.initialize(network)
        rows = made.data("test")
        batch = made.collate([rows[number] for number in range(len(rows))])
        with torch.inference_mode():
            losses, metrics = made.loss(network, batch), made.metrics(network, batch)
        perplexity, accuracy = metrics["perplexity"], metrics["accuracy"]
        assert isinstance(perplexity, GeometricMean)
        assert isinstance(accuracy, Mean)
        assert losses.shape == (len(rows),)
        loss = metrics["loss"]
        assert isinstance(loss, Mean)
        assert (loss.total, loss.count) == (pytest.approx(losses.double().sum().item(), rel=1e-6), len(rows))
        assert loss.moments is not None
        assert perplexity.count == accuracy.count == int((batch["targets"] != NO_TARGET).sum())
        # The mean over rows is the mean over the tokens that are learned.
        mean = float(perplexity.log_total) / float(perplexity.count)
        assert losses.double().mean().item() == pytest.approx(mean, rel=1e-5)
        means[packing] = mean
    assert means[True] == pytest.approx(means[False], rel=1e-5)


def test_bits_per_byte_are_of_the_text_that_is_learned(model: Path, tmp_path: Path) -> None:
    texts = ["It costs 5 €, naïve 漢字.\n", "plain"]
    path = lines(tmp_path / "a.jsonl", *({"prompt": "asked", "completion": text} for text in texts))
    made = task(model, data={"path": path, "test": path})
    network = made.model().eval()
    made.initialize(network)
    rows = made.data("test")
    with torch.inference_mode():
        metrics = made.metrics(network, made.collate([rows[number] for number in range(len(rows))]))
    bits, perplexity = metrics["bitsPerByte"], metrics["perplexity"]
    assert isinstance(bits, Mean)
    assert isinstance(perplexity, GeometricMean)
    assert bits.count == sum(len(text.encode()) for text in texts)
    assert bits.total == pytest.approx(float(perplexity.log_total) / math.log(2))


def test_bytes_of_tokens_that_are_written_as_sentencepiece_does() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {"<s>": 0, "▁": 1, "▁été": 2, "<0xE6>": 3, "<0xBC>": 4, "<0xA2>": 5, "s": 6}
    made = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    words = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    assert token_bytes(words, 9).tolist() == [0, 1, 6, 1, 1, 1, 1, 0, 0]
    made.decoder = decoders.WordPiece()
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=made), 9) is None


def test_bits_per_byte_that_a_tokenizer_does_not_give_are_refused_before_a_start(model: Path, tmp_path: Path) -> None:
    from tokenizers import decoders

    def mistakes(folder: Path, **evaluators: Any) -> list[Any]:
        trainer = {"task": "causal-lm", "parameters": {"pretrained": str(folder), "length": 64}}
        return mistakes_of(manifests.job("test", trainer=trainer, evaluators=evaluators))

    # Of Qwen2, transformers makes a byte-level tokenizer whatever the file says.
    other = pretrained(tmp_path / "other", "llama")
    words = tokenizer()
    words.backend_tokenizer.decoder = decoders.WordPiece()
    words.save_pretrained(other)
    assert mistakes(model, metric="bitsPerByte") == []
    (mistake,) = mistakes(other, metric="bitsPerByte")
    assert mistake["path"] == ("spec", "evaluators", "metric")
    assert "does not say how many bytes of text a token stands for; use loss" in mistake["message"]
    assert mistakes(other, metric="perplexity") == mistakes(other, metric="bitsPerByte", replicas=0) == []
    assert mistakes(tmp_path / "gone", metric="bitsPerByte") == [], "a name on a hub is not looked up"


def test_tokens_of_a_row_are_counted_without_padding_and_those_that_are_learned(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"prompt": "ask " * n, "completion": "say " * (9 - n)} for n in range(8)))
    made = task(model, data={"path": path, "test": path})
    assert made.tokens_per_sample() is None
    batch = made.collate(list(made.data("train")))
    rows = len(batch["tokens"])
    assert made.tokens_per_sample() == pytest.approx(int((batch["documents"] > 0).sum()) / rows)
    assert made.learned_per_sample() == pytest.approx(int((batch["targets"] != NO_TARGET).sum()) / rows)


def test_gradients_do_not_depend_on_the_micro_batches(model: Path) -> None:
    made = task(model)
    rows = made.data("train")
    batch = [rows[number] for number in (0, len(rows) // 2, len(rows) - 1)]
    found = []
    for parts in ([batch], [batch[:1], batch[1:]]):
        network = made.model().train()
        made.initialize(network)
        for part in parts:
            made.loss_sum(network, made.collate(part), len(part)).backward()
        found.append(torch.cat([one.grad.flatten() for one in network.parameters() if one.grad is not None]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_tied_weights_are_in_the_state_once_and_come_back_tied(model: Path) -> None:
    made = task(model)
    network = made.model()
    assert "lm_head.weight" not in network.state_dict()
    network.load_state_dict({name: torch.ones_like(one) for name, one in network.state_dict().items()})
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    assert network.get_output_embeddings().weight.eq(1).all()


def test_the_model_has_the_types_that_it_was_saved_with_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    half = pretrained(tmp_path / "half", dtype="bfloat16")
    for given, expected in ({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32):
        made = task(half, **given)
        network = made.model()
        made.initialize(network)
        assert {parameter.dtype for parameter in network.parameters()} == {expected}
        assert all(parameter.isfinite().all() for parameter in network.parameters())


def test_a_long_text_is_cut_into_pieces_and_each_token_is_predicted_once(model: Path, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40
    data = {"path": lines(tmp_path / "a.jsonl", {"text": text}, {"text": "short"}), "test": 0.5}
    rows = task(model, data=data, packing=False).data("train")
    assert len(rows) > 1
    words = tokenizer()
    assert "".join(learned(rows)) == words.decode([*words(text)["input_ids"][1:], words.eos_token_id])


def test_of_a_prompt_and_its_completion_the_completion_is_learned(model: Path, tmp_path: Path) -> None:
    sample = {"prompt": "What is it?", "completion": " A fox."}
    data = {"path": lines(tmp_path / "a.jsonl", sample, sample)}
    rows = task(model, data=data | {"test": 0.5}, packing=False).data("train")
    assert learned(rows) == [" A fox.<|end|>"]
    ((tokens, _, _),) = list(rows)
    assert tokenizer().decode(tokens.tolist()) == "What is it? A fox.<|end|>"


def test_of_a_conversation_the_answers_are_learned_up_to_the_token_that_ends_them(model: Path, tmp_path: Path) -> None:
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Ciao.")]
    sample = {"messages": [{"role": role, "content": content} for role, content in said]}
    rows = task(model, data={"path": lines(tmp_path / "a.jsonl", sample, sample), "test": 0.5}).data("train")
    assert learned(rows) == ["Hello.<|end|>Ciao.<|end|>"]
    ((tokens, _, _),) = list(rows)
    assert tokenizer().decode(tokens.tolist()) == tokenizer().apply_chat_template(sample["messages"], tokenize=False)


def test_a_template_that_does_not_tell_where_answers_end_is_refused(model: Path, tmp_path: Path) -> None:
    made = task(model, data={"path": lines(tmp_path / "a.jsonl", *[{"messages": TWO_ANSWERS}] * 4)})
    made.tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}last:{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UnusableInput, match=r"a\.jsonl, line 1: .*does not tell where answers begin and end"):
        made.data("train")
    made.tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="no chat template"):
        made.data("train")


TWO_ANSWERS = [
    {"role": role, "content": word}
    for role, word in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
]


def test_slices_and_shares_are_of_the_samples_of_the_source(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", *({"prompt": "n", "completion": str(number)} for number in range(20)))
    data = {"path": path, "start": 5, "end": 15, "test": 0.2}
    made = task(model, data=data, packing=False)
    assert learned(made.data("train")) == [f"{number}<|end|>" for number in range(5, 13)]
    assert learned(made.data("test")) == [f"{number}<|end|>" for number in range(13, 15)]
    other = lines(tmp_path / "b.jsonl", {"prompt": "n", "completion": "x"})
    made = task(model, data=data | {"test": other}, packing=False)
    assert (len(made.data("train")), learned(made.data("test"))) == (10, ["x<|end|>"])


def test_parquet_and_plain_text_are_read_as_json_lines_are(model: Path, tmp_path: Path) -> None:
    from pyarrow import table
    from pyarrow.parquet import write_table

    texts = [f"Sample number {number}." for number in range(6)]
    write_table(table({"body": texts}), tmp_path / "a.parquet")
    path = lines(tmp_path / "a.jsonl", *({"body": text} for text in texts))
    found = [
        learned(task(model, data={"path": one, "text": "body"}, packing=False).data("train"))
        for one in (str(tmp_path / "a.parquet"), path)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 5
    (tmp_path / "a.txt").write_text("The quick brown fox. " * 200)
    made = task(model, data={"path": str(tmp_path / "a.txt")}, packing=False)
    train, test = made.data("train"), made.data("test")
    assert len(train) > 3 <= 5 * len(test)
    assert ("The quick brown fox. " * 200).endswith("".join(learned(train) + learned(test)))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"text": "a"}\n\n{"text": \n', "line 3: this is not JSON"),
        (b'{"text": "a"}\n[1]\n', "line 2: this is not a JSON object"),
        (b'{"text": "a"}\n{"body": "b"}\n', "line 2: there is no column text, only body"),
        (b'{"text": 7}\n{"text": "a"}\n{"text": "a"}\n', "line 1: the column text holds no text"),
        (b'{"messages": [{"content": "a"}]}\n' * 3, "line 1: message 0 of messages is not an object with role"),
        (b'{"body": "a"}\n' * 2, "line 1: there is no column messages, prompt and completion, or text"),
        (
            b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2,
            r"line 1: chosen and rejected are preferences, .* TRL's DPOTrainer does, and elastic\(trainer\)",
        ),
        (b"\n", "no sample is left to train"),
        (b'{"messages": [{"role": "user"}]}\n' * 2, "line 1: message 0 of messages has no content"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}\n' * 2,
            "line 1: no message of messages has the role assistant, whose words are learned; asistant is no role",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}, {"role": "asistant", "content": "b"}]}\n' * 2,
            "line 1: a message of messages has the role asistant; did you mean assistant",
        ),
        (b'{"text": "a"}\n{"text": "b\\ud800"}\n', r"line 2: \\ud800 is half of a character"),
        ('{"text": "a"}\n'.encode("utf-16"), r"a\.jsonl: this is UTF-16; save it as UTF-8"),
        ('{"text": "a"}\n'.encode("utf-16-be"), r"a\.jsonl: this is UTF-16; save it as UTF-8"),
        ('{"text": "a"}\n'.encode("utf-32"), r"a\.jsonl: this is UTF-32; save it as UTF-8"),
        (
            b'{"messages": [{"role": "user", "content": "a"}]}\n' * 2,
            r"no sample is left to train with, .* learned: of 2, 2 without anything that is learned",
        ),
        (
            (json.dumps({"prompt": "a " * 2000, "completion": "b"}) + "\n").encode() * 3,
            "of 3, 3 cut off at length before what is learned",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_told_of_with_its_number(
    model: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    made = task(model, data={"path": str(tmp_path / "a.jsonl"), "test": str(tmp_path / "a.jsonl")})
    with pytest.raises(UnusableInput, match=why):
        made.data("train")


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
        b'{"text": "a"}\r\n{"text": "b"}\r\n',
        b'\n{"text": "a"}\n\n \n{"text": "b"}\n\n',
        b'{"text": "a"}\n{"text": "b"}',
        '{"text": "a\u2028c"}\n{"text": "b"}\n'.encode(),
    ],
    ids=["byte order mark", "line ends of Windows", "blank lines", "no last line end", "U+2028"],
)
def test_files_as_other_programs_write_them_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    found = list(reading.read_rows(TextSource(path=str(tmp_path / "a.jsonl")), None))
    assert [row.columns["text"][0] for row in found] == ["a", "b"]


def test_what_is_cut_off_and_what_pads_is_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [{"prompt": "a " * 100, "completion": "b"}, {"prompt": "a", "completion": "b " * 100}]
    samples += [{"prompt": "a", "completion": "b"}] * 2
    with caplog.at_level("INFO"):
        task(model, data={"path": lines(tmp_path / "a.jsonl", *samples), "test": 0.25}).data("train")
    assert "documents=2 rows=2 " in caplog.text
    assert "truncated=2" in caplog.text
    assert "nothing_to_learn=1" in caplog.text


def test_samples_that_nothing_is_learned_from_are_counted_with_the_reasons(model: Path, tmp_path: Path) -> None:
    """They are left out, which the run says where people look, and not in a log alone."""
    prompts = [{"prompt": "a " * 100, "completion": "b"}, *[{"prompt": "a", "completion": "b"}] * 9]
    asked = {"messages": [{"role": "user", "content": "a"}]}
    answered = {"messages": [*asked["messages"], {"role": "assistant", "content": "b"}]}
    cut = {"path": lines(tmp_path / "a.jsonl", *prompts), "test": 0.1}
    unanswered = {"path": lines(tmp_path / "b.jsonl", *[asked] * 2, *[answered] * 8), "test": 0.1}
    made = task(model, data=cut)
    assert made.filtered_samples() == "", "nothing was read yet"
    made.data("train")
    made.data("test")
    assert made.filtered_samples() == "of 9, 1 cut off at length before what is learned"
    made = task(model, data={"mixture": [{"path": cut["path"], "start": 1}, unanswered]})
    made.data("train")
    reason = "of 9, 2 without anything that is learned, such as words of the role assistant"
    assert made.filtered_samples() == f"{tmp_path / 'b.jsonl'}: {reason}"


def test_pretrained_models_and_the_small_one_are_classes_of_their_own(model: Path) -> None:
    assert class_of(Trainer(task="causal-lm")) is CausalLM
    assert class_of(Trainer(task="causal-lm", parameters={"pretrained": "m"})) is FineTuning
    _, ((_, message),) = configured(FineTuning, {"pretrained": "m", "layers": 2})
    assert "layers belongs to the small model" in message
    _, ((_, message),) = configured(FineTuning, {"pretrained": "m", "data": {"path": "a", "dataset": {"id": "b"}}})
    assert "exactly one of path and dataset" in message


def test_a_model_that_cannot_be_had_or_is_none_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnusableInput, match=r"pretrained: \./nowhere is no folder"):
        FineTuning(FineTuningConfig(pretrained="./nowhere")).model()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UnusableInput, match="some/model is no folder here, and the hub could not be asked"):
        FineTuning(FineTuningConfig(pretrained="some/model")).model()
    config().save_pretrained(tmp_path / "bare")
    made = FineTuning(FineTuningConfig(pretrained=str(tmp_path / "bare"), length=64))
    with pytest.raises(UnusableInput, match="bare has no tokenizer that can be read"):
        made.data("train")
    with pytest.raises(UnusableInput, match="bare has no weights that can be read, as safetensors"):
        made.initialize(made.model())
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="is not a causal language model"):
        FineTuning(FineTuningConfig(pretrained=str(tmp_path / "other"))).model()
    monkeypatch.setattr("tandem_trainer.language.fine_tuning.is_installed", lambda: False)
    _, ((_, message),) = configured(FineTuning, {"pretrained": "m"})
    assert "pip install 'tandem-training[language]'" in message


def test_a_tokenizer_of_another_model_is_told_of(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model", vocab_size=500)
    with pytest.raises(ConfigurationError, match="and the model knows only 500"):
        task(folder).data("train")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = pretrained(tmp_path / "model", "llama")
    AutoModel.from_config(config("llama")).save_pretrained(folder)
    made = task(folder)
    with pytest.raises(UnusableInput, match=r"lack lm_head\.weight"):
        made.initialize(made.model())


def test_rows_that_do_not_suit_the_model_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="length: 129 is more than the 128 positions"):
        task(model, length=129).model()
    sliding = tmp_path / "sliding"
    config(use_sliding_window=True, sliding_window=32, max_window_layers=0).save_pretrained(sliding)
    with pytest.raises(ConfigurationError, match="sees 32 tokens at most"):
        task(sliding).model()
    task(sliding, packing=False).model()


def test_operations_count_each_weight_that_a_token_meets(model: Path, tmp_path: Path) -> None:
    made = task(model)
    weights = sum(parameter.numel() for parameter in made.model().parameters())
    assert made.flops_per_sample() == 64 * (6 * weights + 12 * 2 * 32 * 64)
    assert math.isclose(made.flops_per_sample() or 0, 1.6e7, rel_tol=0.5)
    assert task(model, packing=False).flops_per_sample() is None


def test_the_first_samples_are_looked_at_before_a_job_starts(model: Path, tmp_path: Path) -> None:
    """60 of 90 conversations with a misspelt role would pass, and nobody would miss them."""
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]}
    given = lines(tmp_path / "a.jsonl", *[good] * 30, *[bad] * 60)
    parameters = {"pretrained": str(model), "data": {"path": given}}
    (told,) = mistakes_of(manifests.job("test", trainer={"task": "causal-lm", "parameters": parameters}))
    assert told["path"] == ("spec", "trainer", "parameters", "data", "path")
    assert "a.jsonl, line 31: no message of messages has the role assistant" in told["message"]
