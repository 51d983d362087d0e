"""Tokenizers: a text as numbers, and back. All of them are exact: the bytes of the tokens are the bytes of the text.

So bits per byte can be compared between tokenizers, and between models, which losses and perplexities per token cannot.

`BytePairs` (byte-level BPE, as GPT-2 had it, https://arxiv.org/abs/1508.07909) is trained by each process for itself:
the same text gives the same tokens with any number of threads, and a text of 0.5 MB takes 0.2 s (measured with
tokenizers 0.23 on two cores). So there is no file that ranks and evaluators would have to wait for, and nothing that a
run could lose. Of a large text, where each process would take minutes, give a file that was trained once.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tandem.rundir.durable import may_pass
from tandem_trainer.failure import ConfigurationError, UnusableInput

if TYPE_CHECKING:
    import tokenizers

EXTRA = "language"
"""Of the distribution, that brings the package `tokenizers`."""
PIECE = 2**16
"""Letters that are cut into tokens at once: the library keeps some hundred bytes for each token meanwhile."""


class Tokenizer(Protocol):
    """Cuts a text into tokens."""

    vocabulary: int
    """Different tokens: they are numbered from 0."""
    lengths: Tensor
    """[vocabulary], int64, on the CPU: bytes of each token."""

    def encode(self, content: bytes) -> Tensor:
        """The tokens of a text. [tokens], integers.

        Raises:
            ConfigurationError: it cannot be told as tokens exactly.
        """

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text that tokens stand for, which may end within a letter."""


class Bytes:
    """Each byte is a token."""

    vocabulary = 256

    def __init__(self) -> None:
        self.lengths = torch.ones(self.vocabulary, dtype=torch.int64, device="cpu")

    def encode(self, content: bytes) -> Tensor:
        """The bytes. [bytes], uint8."""
        # Of no bytes no tensor can be made in this way.
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The same bytes."""
        return bytes(tokens)


class BytePairs:
    """Frequent pieces of words are a token, and so is each single byte: byte-level BPE of the library `tokenizers`."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", source: str) -> None:
        """
        Args:
            tokenizer: a byte-level one.
            source: where it comes from, for messages: a field of the manifest and what stands there.
        """
        self._tokenizer, self._source = tokenizer, source
        pieces = {number: _bytes(token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items()}
        pieces |= {number: token.content.encode() for number, token in tokenizer.get_added_tokens_decoder().items()}
        self.vocabulary = max(pieces, default=-1) + 1
        self._pieces = [pieces.get(number, b"") for number in range(self.vocabulary)]
        self.lengths = torch.tensor([len(piece) for piece in self._pieces], dtype=torch.int64, device="cpu")

    @classmethod
    def trained(cls, content: bytes, vocabulary: int) -> "BytePairs":
        """Learn the tokens of a text: with the same text and version of the library always the same.

        Args:
            content: UTF-8, as far as it is whole: a letter that is cut off at its end is passed over.
            vocabulary: the most tokens there may be.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        # Sorted, because the numbers of tokens follow from the order, and that of a set is another in each process.
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_parts(content.decode(errors="ignore")), trainer)
        return cls(tokenizer, "spec.trainer.parameters.tokenizer: bpe")

    @classmethod
    def read(cls, path: Path, field: str) -> "BytePairs":
        """Take the tokens that a file lists: a `tokenizer.json`.

        Args:
            field: of the manifest, for messages.

        Raises:
            UnusableInput: the file cannot be read.
            ConfigurationError: it is no tokenizer.
        """
        from tokenizers import Tokenizer

        try:
            content = path.expanduser().read_text("utf-8")
        except OSError as error:
            if may_pass(error):
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
        """The tokens of a text. [tokens], int32."""
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{self._source} needs a text in UTF-8, and byte {error.start} of this one is none; take tokenizer: "
                "bytes"
            ) from error
        found: list[int] = []
        for part in _parts(text):
            # Without marks of a beginning, which are no part of the text.
            found += self._tokenizer.encode(part, add_special_tokens=False).ids
        if self.decode(found) != content:
            raise ConfigurationError(
                f"{self._source} changes the text, so its bits per byte mean nothing; take a byte-level BPE that "
                "neither normalizes nor adds a space, as those of GPT-2 and Llama 3"
            )
        return torch.tensor(found, dtype=torch.int32, device="cpu")

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The bytes of the tokens."""
        return b"".join(self._pieces[token] for token in tokens)

    def json(self) -> str:
        """What a `tokenizer.json` of it holds."""
        return self._tokenizer.to_str()


def is_installed() -> bool:
    """Whether the library is there that `BytePairs` needs."""
    return find_spec("tokenizers") is not None


def _parts(text: str) -> Iterator[str]:
    """A text in parts that end with a line, where it has lines."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end


def _alphabet() -> dict[str, int]:
    """By the letters in which byte-level BPE writes bytes down, the bytes: those that can be seen stand for themselves,
    and the others are numbered from 256, as in GPT-2's `bytes_to_unicode`."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + index): byte for index, byte in enumerate(others)}


ALPHABET = _alphabet()


def _bytes(token: str) -> bytes:
    """What a token stands for; nothing where it is written in other letters, which the check of the text finds."""
    return bytes(ALPHABET[letter] for letter in token) if all(letter in ALPHABET for letter in token) else b""
