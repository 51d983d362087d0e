"""Tokenizers: a text as numbers, and back. All of them are exact: the bytes of the tokens are the bytes of the text.

So bits per byte can be compared between tokenizers, and between models, which losses and perplexities per token cannot.

Each process trains `BytePairs` for itself (byte-level BPE as in GPT-2, https://arxiv.org/abs/1508.07909): the same text
gives the same tokens with any number of threads, and a text of 0.5 MB takes 0.2 s (measured with tokenizers 0.23 on two
cores). So there is no file that ranks and evaluators would have to wait for, and nothing that a run could lose. For a
large text, which would take each process minutes, use a file that was trained once.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tandem.rundir.durable import is_transient
from tandem_trainer.failure import ConfigurationError, UnusableInput

if TYPE_CHECKING:
    import tokenizers

EXTRA = "language"
"""Extra of the distribution that installs the package `tokenizers`."""
PIECE = 2**16
"""Number of characters that are tokenized at once: the library holds some hundred bytes for each token meanwhile."""


class Tokenizer(Protocol):
    """Converts a text to tokens and back."""

    vocabulary: int
    """Number of different tokens; they are numbered from 0."""
    lengths: Tensor
    """Bytes of each token, [vocabulary], int64, on the CPU."""

    def encode(self, content: bytes) -> Tensor:
        """Encode a text. [tokens], integers.

        Raises:
            ConfigurationError: the tokens would not be exact.
        """

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Decode tokens; the text may end within a character."""


class Bytes:
    """Tokenizer whose tokens are single bytes."""

    vocabulary = 256

    def __init__(self) -> None:
        self.lengths = torch.ones(self.vocabulary, dtype=torch.int64, device="cpu")

    def encode(self, content: bytes) -> Tensor:
        """Return the bytes as tokens. [bytes], uint8."""
        # `frombuffer` rejects an empty buffer.
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the tokens as bytes."""
        return bytes(tokens)


class BytePairs:
    """Byte-level BPE of the library `tokenizers`: frequent pieces of words are tokens, and so is each single byte."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", source: str) -> None:
        """
        Args:
            tokenizer: a byte-level tokenizer.
            source: where it comes from, for messages: a field of the manifest and its value.
        """
        self._tokenizer, self._source = tokenizer, source
        pieces = {number: _bytes(token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items()}
        pieces |= {number: token.content.encode() for number, token in tokenizer.get_added_tokens_decoder().items()}
        self.vocabulary = max(pieces, default=-1) + 1
        self._pieces = [pieces.get(number, b"") for number in range(self.vocabulary)]
        self.lengths = torch.tensor([len(piece) for piece in self._pieces], dtype=torch.int64, device="cpu")

    @classmethod
    def trained(cls, content: bytes, vocabulary: int) -> "BytePairs":
        """Train a tokenizer; the same text and version of the library always give the same tokens.

        Args:
            content: UTF-8; a character that is cut off at the end is ignored.
            vocabulary: maximum number of tokens.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # Sorted, because the order determines the tokens' numbers, and that of a set differs between processes.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_parts(content.decode(errors="ignore")), trainer)
        return cls(tokenizer, "spec.trainer.parameters.tokenizer: bpe")

    @classmethod
    def read(cls, path: Path, field: str) -> "BytePairs":
        """Load a tokenizer from a `tokenizer.json`.

        Args:
            field: field of the manifest, for messages.

        Raises:
            UnusableInput: the file cannot be read.
            ConfigurationError: it is not a tokenizer.
        """
        from tokenizers import Tokenizer

        try:
            content = path.expanduser().read_text("utf-8")
        except OSError as error:
            if is_transient(error):
                raise
            raise UnusableInput(f"{field}: {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{field}: {path} is no tokenizer.json: {error}") from error
        try:
            tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise ConfigurationError(f"{field}: {path} is no tokenizer.json: {error}") from error
        return cls(tokenizer, f"{field}: {path}")

    def encode(self, content: bytes) -> Tensor:
        """Encode a text. [tokens], int32."""
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{self._source} needs a text in UTF-8, and byte {error.start} of it is invalid; use tokenizer: bytes"
            ) from error
        tokens: list[int] = []
        for part in _parts(text):
            # Without special tokens such as a beginning of the text, which are not part of it.
            tokens += self._tokenizer.encode(part, add_special_tokens=False).ids
        if self.decode(tokens) != content:
            raise ConfigurationError(
                f"{self._source} changes the text, so its bits per byte would be meaningless; use a byte-level BPE "
                "that "
                "neither normalizes nor adds a space, as those of GPT-2 and Llama 3"
            )
        return torch.tensor(tokens, dtype=torch.int32, device="cpu")

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Decode tokens to bytes."""
        return b"".join(self._pieces[token] for token in tokens)

    def json(self) -> str:
        """Return the tokenizer as the content of a `tokenizer.json`."""
        return self._tokenizer.to_str()


def is_installed() -> bool:
    """Return whether the library is installed that `BytePairs` needs."""
    return find_spec("tokenizers") is not None


def _parts(text: str) -> Iterator[str]:
    """Split a text into parts that end with a line, where it has lines."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end


def _alphabet() -> dict[str, int]:
    """Map the characters with which byte-level BPE represents bytes to these bytes: printable characters stand for
    themselves, the others are numbered from 256, as in GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


ALPHABET = _alphabet()


def _bytes(token: str) -> bytes:
    """Return a token's bytes; empty if it has other characters, which the check in `encode` detects."""
    return bytes(ALPHABET[letter] for letter in token) if all(letter in ALPHABET for letter in token) else b""
