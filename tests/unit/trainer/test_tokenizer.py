"""Tokenizers: their tokens are the text, byte by byte, in every process the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_trainer.causal_lm import CausalLM, CausalLMConfig
from tandem_trainer.data import tokenizer
from tandem_trainer.data.tokenizer import ALPHABET, BytePairs, Bytes, Tokenizer
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.task import configured, sentence

TEXT = ("The quick brown fox jumps over the lazy dog. Größe, 12 % – ☃ 🦊\r\n\n\tthe fox, the dog\0\n" * 40).encode()

DIGEST = """
import hashlib

from tandem_trainer.causal_lm import CausalLM, CausalLMConfig
task = CausalLM(CausalLMConfig.model_validate({"tokenizer": "bpe", "vocabulary": 600}))
digest = hashlib.sha256(task.tokenizer.json().encode()).hexdigest()
"""
"""Of the tokens of the English that ships inside Python."""


@pytest.fixture(scope="module")
def pairs() -> BytePairs:
    return BytePairs.trained(TEXT, 400)


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_tokens_are_the_text_byte_by_byte(kind: str, pairs: BytePairs) -> None:
    made: Tokenizer = Bytes() if kind == "bytes" else pairs
    for content in (TEXT, b"", b"\n", "unheard of: žluťoučký kůň 💡".encode(), TEXT * 30):
        tokens = made.encode(content)
        assert made.decode(tokens.tolist()) == content
        assert int(made.lengths[tokens.long()].sum()) == len(content)
        assert tokens.numel() == 0 or int(tokens.max()) < made.vocabulary
    assert made.lengths.shape == (made.vocabulary,)


def test_frequent_pieces_are_one_token(pairs: BytePairs) -> None:
    assert 256 < pairs.vocabulary <= 400
    assert len(pairs.encode(b" quick brown fox")) == 3
    assert len(pairs.encode(TEXT)) < len(TEXT) / 2
    assert sorted(ALPHABET.values()) == list(range(256))


def test_every_process_finds_the_same_tokens_with_any_number_of_threads() -> None:
    command = [sys.executable, "-c", f"{DIGEST}print(digest)"]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    other = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    here: dict[str, str] = {}
    exec(DIGEST, here)
    assert other.stdout.strip() == here["digest"]


def test_what_the_model_is_evaluated_with_does_not_make_tokens(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"one two three four. " * 90 + b"zebra" * 40)
    task = CausalLM(
        CausalLMConfig.model_validate({"text": str(file), "tokenizer": "bpe", "vocabulary": 300, "length": 8})
    )
    assert task.tokenizer.encode(b" three").numel() == 1
    assert task.tokenizer.encode(b"zebra").numel() > 2


def test_a_file_that_was_made_of_it_gives_the_same_tokens(pairs: BytePairs, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(pairs.json(), "utf-8")
    read = BytePairs.read(tmp_path / "tokenizer.json", "here")
    assert read.encode(TEXT).tolist() == pairs.encode(TEXT).tolist()
    assert read.lengths.tolist() == pairs.lengths.tolist()


def test_marks_that_a_file_adds_count_as_what_they_stand_for(pairs: BytePairs) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_str(pairs.json())
    library.add_special_tokens(["<|end|>"])
    made = BytePairs(library, "here")
    content = b"the fox<|end|>the dog"
    tokens = made.encode(content).tolist()
    assert made.vocabulary == pairs.vocabulary + 1
    assert pairs.vocabulary in tokens
    assert made.decode(tokens) == content


def test_a_file_that_changes_the_text_is_refused(pairs: BytePairs) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import normalizers, pre_tokenizers

    lower, spaced = Library.from_str(pairs.json()), Library.from_str(pairs.json())
    lower.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # type: ignore[assignment]
    for library in (lower, spaced):
        with pytest.raises(
            ConfigurationError, match="here changes the text, so its bits per byte would be meaningless"
        ):
            BytePairs(library, "here").encode(TEXT)


def test_a_file_that_is_none_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"^here: .*nowhere cannot be read: No such file"):
        BytePairs.read(tmp_path / "nowhere", "here")
    for content in (b"{}", b"\xff", b"no JSON"):
        (tmp_path / "wrong").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"^here: .*wrong is no tokenizer\.json: "):
            BytePairs.read(tmp_path / "wrong", "here")


def test_a_text_that_is_not_utf_8_needs_bytes(pairs: BytePairs) -> None:
    with pytest.raises(ConfigurationError, match="byte 3 of it is invalid; use tokenizer: bytes"):
        pairs.encode(b"abc\xff")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vocabulary": 300}, "vocabulary and tokenizerFile belong to tokenizer: bpe"),
        ({"tokenizerFile": "a.json"}, "vocabulary and tokenizerFile belong to tokenizer: bpe"),
        ({"tokenizer": "bpe", "vocabulary": 300, "tokenizerFile": "a.json"}, "not both"),
        ({"tokenizer": "bpe", "vocabulary": 256}, "vocabulary: input should be greater than or equal to 257"),
        ({"tokenizer": "words"}, "tokenizer: input should be 'bytes' or 'bpe'"),
    ],
)
def test_parameters_that_do_not_fit_together_are_told_of(given: dict[str, object], said: str) -> None:
    _, ((path, message),) = configured(CausalLM, given)
    assert said in sentence(path, message)


def test_a_library_that_is_missing_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    _, ((path, message),) = configured(CausalLM, {"tokenizer": "bpe"})
    assert sentence(path, message) == (
        "spec.trainer.parameters.tokenizer: must be bytes where the package tokenizers is not installed "
        "(pip install 'tandem-training[language]'), not \"bpe\""
    )
    assert configured(CausalLM, {"tokenizer": "bytes"})[1] == []
