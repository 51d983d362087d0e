"""The language model that ships with Tandem: its transformer, its passages, its scores, and what it writes."""

import math
from pathlib import Path

import pytest
import torch

from tandem.evaluation import GeometricMean, Mean
from tandem_trainer.causal_lm import CausalLM, CausalLMConfig, write
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.models.minigpt import MiniGPT, Shape, flops_per_token, rotate, rotations
from tandem_trainer.task import configured

SMALL = {"layers": 2, "width": 32, "heads": 2, "length": 16}


def task(**given: object) -> CausalLM:
    return CausalLM(CausalLMConfig.model_validate({**SMALL, **given}))


def test_a_byte_is_predicted_from_those_before_it_alone() -> None:
    torch.manual_seed(0)
    for positions in ("rotary", "learned"):
        model = task(positions=positions).model().eval()
        tokens = torch.randint(0, 256, (2, 16))
        changed = tokens.clone()
        changed[:, 9:] = 7
        before, after = model(tokens), model(changed)
        assert before.shape == (2, 16, 256)
        torch.testing.assert_close(before[:, :9], after[:, :9])
        assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_it_knows_the_order_of_what_came_before(positions: str) -> None:
    torch.manual_seed(0)
    model = task(positions=positions).model().eval()
    # Fresh weights are so small that each layer adds next to nothing.
    for parameter in model.parameters():
        parameter.data *= 10
    there, back = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(there)[:, -1], model(back)[:, -1])


def test_rotary_attention_sees_how_far_apart_two_tokens_are_and_not_where() -> None:
    cosines, sines = rotations(12, 8)
    query, key = torch.randn(1, 1, 1, 8).expand(1, 1, 12, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 12, 8)
    scores = (rotate(query, cosines, sines) @ rotate(key, cosines, sines).transpose(2, 3))[0, 0]
    for distance in range(12):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    torch.testing.assert_close(rotate(query, cosines, sines).norm(dim=-1), query.norm(dim=-1))
    assert scores[5, 5] != scores[5, 2]


def test_tied_weights_are_saved_once() -> None:
    tied, own = task().model(), task(tied=False).model()
    assert sum(one.numel() for one in own.parameters()) - sum(one.numel() for one in tied.parameters()) == 256 * 32
    names = set(tied.state_dict())
    assert not {name for name in names if name.startswith("head")}
    assert "cosines" not in names
    assert flops_per_token(tied) == flops_per_token(own)


def test_a_width_that_does_not_divide_into_heads_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match="not a multiple of twice the 3 heads"):
        MiniGPT(Shape(vocabulary=2, length=2, layers=1, heads=3, width=32))
    _, ((path, message),) = configured(CausalLM, {"width": 30, "heads": 4})
    assert path == ("spec", "trainer", "parameters")
    assert "width must be a multiple of twice the 4 heads" in message


def test_passages_to_evaluate_with_are_the_last_and_no_byte_is_predicted_twice(tmp_path: Path) -> None:
    file = tmp_path / "text"
    content = bytes(index % 251 for index in range(16 * 20 + 5))
    file.write_bytes(content)
    made = task(text=str(file), heldOut=0.25)
    train, test = (made.data(split).tensors[0] for split in ("train", "test"))
    assert (train.shape, test.shape) == ((15, 17), (5, 17))
    assert bytes(torch.cat([train, test])[:, 1:].flatten().tolist()) == content[1 : 16 * 20 + 1]


def test_without_a_file_it_reads_english() -> None:
    made = task()
    train, test = made.data("train"), made.data("test")
    assert len(train) > 8 * len(test) > 1000
    assert b" statement" in bytes(train.tensors[0].flatten().tolist())


def test_a_text_that_is_missing_or_too_short_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"text: .*nowhere cannot be read: No such file"):
        task(text=str(tmp_path / "nowhere")).data("train")
    file = tmp_path / "short"
    for content in (b"", b"too short for two passages"):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="two are needed"):
            task(text=str(file)).data("train")


def test_the_loss_is_the_mean_of_a_passage_and_bits_follow_from_it() -> None:
    torch.manual_seed(0)
    made = task()
    model, batch = made.model().eval(), [made.data("test").tensors[0][:3]]
    with torch.inference_mode():
        losses, metrics = made.loss(model, batch), made.metrics(model, batch)
    assert losses.shape == (3,)
    assert metrics["loss"] == Mean.from_samples(losses)
    # A fresh model knows nothing of 256 bytes.
    assert losses.mean().item() == pytest.approx(math.log(256), abs=0.5)
    bits, right, perplexity = metrics["bitsPerByte"], metrics["accuracy"], metrics["perplexity"]
    assert isinstance(bits, Mean)
    assert isinstance(right, Mean)
    assert isinstance(perplexity, GeometricMean)
    assert float(perplexity.log_total) / float(perplexity.count) == pytest.approx(losses.mean().item(), rel=1e-6)
    assert float(bits.total) / float(bits.count) == pytest.approx(losses.mean().item() / math.log(2), rel=1e-5)
    assert (bits.count, right.count) == (48, 48)
    assert 0 <= float(right.total) <= 48


def test_it_learns_a_text_by_heart_and_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"the quick brown fox jumps. " * 12)
    torch.manual_seed(0)
    made = task(text=str(file))
    model, (passages,) = made.model(), made.data("train").tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        made.loss(model, [passages]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert write(model, made.tokenizer, b"the quick brown", 12, temperature=0) == b" fox jumps. "
    once, again = (write(model, made.tokenizer, b"", 20, temperature=1.0, seed=3) for _ in range(2))
    assert once == again
    assert len(once) == 20


def test_bits_of_a_byte_count_the_bytes_of_the_text_whatever_a_token_is(tmp_path: Path) -> None:
    """A model that knows nothing takes log2(vocabulary) bits for each token."""
    file = tmp_path / "text"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    made = task(text=str(file), tokenizer="bpe", vocabulary=300, heldOut=0.5)
    assert made.model().embedding.num_embeddings == made.tokenizer.vocabulary <= 300
    passages = torch.cat([made.data(split).tensors[0] for split in ("train", "test")])
    model = made.model()
    for parameter in model.parameters():
        parameter.data.zero_()
    with torch.inference_mode():
        bits = made.metrics(model, [passages])["bitsPerByte"]
    assert isinstance(bits, Mean)
    following = passages[:, 1:]
    assert bits.count == len(made.tokenizer.decode(following.flatten().tolist()))
    assert float(bits.total) == pytest.approx(following.numel() * math.log2(made.tokenizer.vocabulary), rel=1e-6)
    assert made.flops_per_sample() == flops_per_token(model) * 16
    assert made.tokens_per_sample() == 16


def test_it_writes_text_in_pieces_of_words_as_well(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"the quick brown fox jumps. " * 60)
    made = task(text=str(file), tokenizer="bpe", vocabulary=300)
    torch.manual_seed(0)
    assert len(write(made.model().eval(), made.tokenizer, b"the quick", 30, temperature=1.0)) > 30


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_keys_and_values_that_are_kept_change_nothing_up_to_the_longest_sequence_and_beyond(positions: str) -> None:
    torch.manual_seed(3)
    config = CausalLMConfig(length=32, layers=2, heads=2, width=32, positions=positions)  # type: ignore[arg-type]
    made = CausalLM(config)
    model = made.model().eval()
    assert isinstance(model, MiniGPT)
    tokens = made.tokenizer.encode(b"the quick brown").tolist()
    begin = len(tokens)
    caches = model.caches()
    with torch.inference_mode():
        for _ in range(40):
            logits = model(torch.tensor([tokens[-32:]]))[0, -1]
            if len(tokens) <= 32:
                kept = model(torch.tensor([tokens[caches[0].length :]]), caches)[0, -1]
                assert torch.allclose(kept, logits, atol=1e-5)
            tokens.append(int(logits.argmax()))
    assert caches[0].length == 32
    assert write(model, made.tokenizer, b"the quick brown", 40, temperature=0) == made.tokenizer.decode(tokens[begin:])
