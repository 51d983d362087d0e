"""Samples as tokens, each with a flag whether it is a training target.

In a whole text, every token is a target; a text that is longer than a row is cut into pieces, each of which begins with
the last token of the one before: so every token is predicted once. In a prompt with a completion, the completion is
learned; in a conversation, the messages of the assistant, with the token that ends each. Such a sample is truncated at
the end of the row.

Learned and other segments are tokenized separately. So no token lies on both sides of a boundary, and the model gets
what it will get when it is used: a prompt that was tokenized alone. The chat template itself tells where the answers of
a conversation begin and end: it is applied to the conversation up to each of them.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandem.formatting import number
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.reading import ASSISTANT, FIELD, SampleRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BATCH_SAMPLES = 512
"""Samples that the library tokenizes at a time, in all threads."""


@dataclass(frozen=True)
class Columns:
    """Roles of a row's columns. Either `text`, or `prompt` and `completion`, or `messages`."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None


def columns_of(
    row: SampleRow, text: str | None, prompt: str | None, completion: str | None, messages: str | None
) -> Columns:
    """Return the columns that the job names, or else known columns of the first row.

    Raises:
        UnusableInput: the row has no known columns.
    """
    if text or prompt or messages:
        return Columns(text, prompt, completion, messages)
    if "messages" in row.columns:
        return Columns(messages="messages")
    if "prompt" in row.columns and "completion" in row.columns:
        return Columns(prompt="prompt", completion="completion")
    if "text" in row.columns:
        return Columns(text="text")
    if {"chosen", "rejected"} <= row.columns.keys():
        raise row.error(
            "chosen and rejected are preferences, which this task does not learn from; TRL's DPOTrainer does, and "
            "elastic(trainer) of tandem_trainer.adapters.transformers runs it under Tandem"
        )
    raise row.error(
        f"there is no column messages, prompt and completion, or text, only {', '.join(row.columns) or 'none'}; "
        "name the columns in data"
    )


@dataclass(frozen=True)
class Segment:
    """A segment of a sample."""

    text: str
    """Text of the segment."""
    is_learned: bool
    """Whether its tokens are training targets."""
    has_start: bool = False
    """Whether the tokenizer's start token precedes it."""
    has_end: bool = False
    """Whether the end-of-text token follows it."""


def segments_of(row: SampleRow, columns: Columns, tokenizer: "PreTrainedTokenizerBase") -> list[Segment]:
    """Split a sample into segments that are learned or not.

    Raises:
        UnusableInput: a column holds something else.
        ConfigurationError: the chat template is missing, or does not tell where answers end.
    """
    if columns.messages is not None:
        return _conversation_segments(row, row.messages(columns.messages), tokenizer)
    if columns.prompt is not None:
        assert columns.completion is not None
        prompt, completion = row.text(columns.prompt), row.text(columns.completion)
        return [Segment(prompt, False, has_start=True), Segment(completion, True, has_end=True)]
    assert columns.text is not None
    return [Segment(row.text(columns.text), True, has_start=True, has_end=True)]


def check(row: SampleRow, columns: Columns) -> None:
    """Check that a sample has the values that its columns promise.

    Raises:
        UnusableInput: it has not.
    """
    if columns.messages is not None:
        row.messages(columns.messages)
    for column in (columns.text, columns.prompt, columns.completion):
        if column is not None:
            row.text(column)


def _conversation_segments(
    row: SampleRow, messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase"
) -> list[Segment]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"{FIELD}: {row.location} is a conversation, and the tokenizer of the model has no chat template; take an "
            "instruct model, or texts"
        )

    def rendered(count: int, with_prompt: bool = False) -> str:
        """Render the first messages; `with_prompt`: up to where the assistant begins to speak."""
        try:
            return str(
                tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=with_prompt)
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise row.error(f"the chat template refuses this conversation: {error}") from error

    full_text, position = rendered(len(messages)), 0
    segments: list[Segment] = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = rendered(index, with_prompt=True), rendered(index + 1)
        if not (after.startswith(before) and full_text.startswith(after)):
            raise row.error(
                "the chat template writes an answer otherwise once more follows, or not after the words that ask for "
                "one, so it does not tell where answers begin and end; take a template that does, or prompts and "
                "completions"
            )
        segments += [
            Segment(full_text[position : len(before)], False),
            Segment(full_text[len(before) : len(after)], True),
        ]
        position = len(after)
    return [segment for segment in (*segments, Segment(full_text[position:], False)) if segment.text]


class Documents:
    """Tokens of many samples, concatenated.

    Args:
        tokens: [all tokens], int32.
        is_learned: [all tokens], bool.
        starts: [documents + 1], int64: start of each document, and the end of the last.
    """

    def __init__(self, tokens: npt.NDArray[Any], is_learned: npt.NDArray[Any], starts: npt.NDArray[Any]) -> None:
        self.tokens, self.is_learned, self.starts = tokens, is_learned, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        counts: list[int] = np.diff(self.starts).tolist()
        return counts

    def __getitem__(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the tokens of a document, and which of them are learned."""
        part = slice(self.starts[number], self.starts[number + 1])
        return self.tokens[part], self.is_learned[part]

    @property
    def targets(self) -> int:
        """Number of tokens that are predicted and learned: the first token of a document is not predicted."""
        return int(np.count_nonzero(self.is_learned)) - int(np.count_nonzero(self.is_learned[self.starts[:-1]]))

    def select(self, start: int, end: int) -> "Documents":
        """Return a range of the documents."""
        first, last = self.starts[start], self.starts[end]
        return Documents(self.tokens[first:last], self.is_learned[first:last], self.starts[start : end + 1] - first)


def concatenate(parts: Sequence[Documents]) -> Documents:
    """Concatenate the documents of several sources."""
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(len(part.tokens) for part in parts)], dtype=np.int64)
    starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
    return Documents(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.is_learned for part in parts]),
        np.concatenate([*starts, offsets[-1:]]),
    )


@dataclass
class EncodingStats:
    """Counts of samples and tokens that are not trained on."""

    samples: int = 0
    """Samples encoded."""
    truncated: int = 0
    """Samples that were longer than a row."""
    tokens: int = 0
    """Tokens cut off from these samples."""
    empty: int = 0
    """Samples without a token to learn."""
    cut_before: int = 0
    """Samples among these that have such tokens after the cut."""

    def filtered(self) -> str:
        """Describe how many samples nothing is learned from, and why; empty if there are none."""
        unanswered = self.empty - self.cut_before
        reasons = {
            f"{number(self.cut_before)} cut off at length before what is learned": self.cut_before,
            f"{number(unanswered)} without anything that is learned, such as words of the role {ASSISTANT}": unanswered,
        }
        described = " and ".join(reason for reason, count in reasons.items() if count)
        return described and f"of {number(self.samples)}, {described}"


class Encoder:
    """Encodes samples as documents.

    Args:
        tokenizer: tokenizer of the model.
        length: maximum tokens of a document.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", length: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        self.stats = EncodingStats()

    def documents(self, samples: Iterable[tuple[Sequence[Segment], bool]]) -> Documents:
        """Encode samples.

        Args:
            samples: segments of each sample, and whether a long sample is cut into pieces instead of truncated.
        """
        tokens: list[npt.NDArray[Any]] = []
        is_learned: list[npt.NDArray[Any]] = []
        remaining = iter(samples)
        while batch := list(islice(remaining, BATCH_SAMPLES)):
            for (sample_tokens, sample_flags), (_, in_pieces) in zip(
                self._encoded([parts for parts, _ in batch]), batch, strict=True
            ):
                self.stats.samples += 1
                pieces = list(self._pieces(sample_tokens, sample_flags, in_pieces))
                self.stats.empty += not pieces
                self.stats.cut_before += not pieces and bool(sample_flags[1:].any())
                tokens += [piece for piece, _ in pieces]
                is_learned += [piece_flags for _, piece_flags in pieces]
        starts = np.cumsum([0, *(len(piece) for piece in tokens)], dtype=np.int64)
        if not tokens:
            return Documents(np.empty(0, np.int32), np.empty(0, bool), starts)
        return Documents(np.concatenate(tokens), np.concatenate(is_learned), starts)

    def _encoded(self, samples: list[Sequence[Segment]]) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Encode samples: the tokens of each, and which of them are learned."""
        encoded = {True: self._tokenize(samples, True), False: self._tokenize(samples, False)}
        end = self._tokenizer.eos_token_id
        for segments in samples:
            tokens: list[int] = []
            is_learned: list[bool] = []
            for segment in segments:
                segment_tokens = next(encoded[segment.has_start])
                if end is not None and segment.has_start and not segment.has_end and segment_tokens[-1:] == [end]:
                    segment_tokens = segment_tokens[:-1]
                if end is not None and segment.has_end and segment_tokens[-1:] != [end]:
                    segment_tokens = [*segment_tokens, end]
                flags = [segment.is_learned] * len(segment_tokens)
                if segment.is_learned and end in segment_tokens:
                    # What follows the end of a turn is never generated.
                    last = len(segment_tokens) - segment_tokens[::-1].index(end)
                    flags[last:] = [False] * (len(segment_tokens) - last)
                tokens += segment_tokens
                is_learned += flags
            yield np.array(tokens, dtype=np.int32), np.array(is_learned, dtype=bool)

    def _tokenize(self, samples: list[Sequence[Segment]], has_start: bool) -> Iterator[list[int]]:
        texts = [part.text for parts in samples for part in parts if part.has_start == has_start]
        if not texts:
            return iter(())
        return iter(self._tokenizer(texts, add_special_tokens=has_start, verbose=False)["input_ids"])

    def _pieces(
        self, tokens: npt.NDArray[Any], is_learned: npt.NDArray[Any], in_pieces: bool
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        if not in_pieces and len(tokens) > self._length:
            self.stats.truncated += 1
            self.stats.tokens += len(tokens) - self._length
            tokens, is_learned = tokens[: self._length], is_learned[: self._length]
        for first in range(0, max(1, len(tokens) - 1), self._length - 1):
            piece = slice(first, first + self._length)
            if is_learned[piece][1:].any():
                yield tokens[piece], is_learned[piece]


def refuse_empty(documents: Documents, stats: EncodingStats, purpose: str, source: str = "") -> None:
    """Refuse a source without documents.

    Args:
        documents: documents of the source.
        stats: counts of its samples.
        purpose: use of the documents, as a verb.
        source: name of the source, if there are several.

    Raises:
        UnusableInput: there are no documents.
    """
    if len(documents):
        return
    of_source = f" of {source}" if source else ""
    message = f"{FIELD}: no sample{of_source} is left to {purpose} with, of which a token could be learned"
    if filtered := stats.filtered():
        message += f": {filtered}"
    raise UnusableInput(message)
