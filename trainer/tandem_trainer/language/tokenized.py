"""Samples as tokens, each with whether it is learned.

Whole texts are learned token by token, and one that is longer than a row is cut into pieces, each of which begins with
the last token of the one before: so every token is predicted once. Of a prompt and its completion the completion is
learned, of a conversation what the assistant says, with the token that ends it; such a sample is cut off where the row
ends.

What is learned and what is not are tokenized apart. So no token lies on both sides of a boundary, and the model sees
what it will see when it is asked: a prompt that was tokenized alone. Where the answers of a conversation begin and end
follows from the chat template itself, which is asked for the conversation up to there.
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
from tandem_trainer.language.reading import ASSISTANT, FIELD, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

AT_ONCE = 512
"""Samples that the library is given at a time, which cuts them in all threads."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a row are what. Either `text`, or `prompt` and `completion`, or `messages`."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None


def columns_of(row: Row, text: str | None, prompt: str | None, completion: str | None, messages: str | None) -> Columns:
    """The columns that the job names, or else those that the first row has.

    Raises:
        UnusableInput: it has none that are known.
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
        raise row.wrong(
            "chosen and rejected are preferences, which this task does not learn from; TRL's DPOTrainer does, and "
            "elastic(trainer) of tandem_trainer.adapters.transformers runs it under Tandem"
        )
    raise row.wrong(
        f"there is no column messages, prompt and completion, or text, only {', '.join(row.columns) or 'none'}; "
        "name the columns in data"
    )


@dataclass(frozen=True)
class Part:
    """A stretch of a sample."""

    text: str
    """As it is tokenized."""
    is_learned: bool
    """Whether its tokens are."""
    begins: bool = False
    """Whether the tokenizer's mark of a beginning stands before it."""
    ends: bool = False
    """Whether the token that ends a text follows it."""


def parts_of(row: Row, columns: Columns, tokenizer: "PreTrainedTokenizerBase") -> list[Part]:
    """A sample, cut at the boundaries of what is learned.

    Raises:
        UnusableInput: a column holds something else.
        ConfigurationError: the chat template is missing, or does not tell where answers end.
    """
    if columns.messages is not None:
        return _of_conversation(row, row.messages(columns.messages), tokenizer)
    if columns.prompt is not None:
        assert columns.completion is not None
        prompt, completion = row.text(columns.prompt), row.text(columns.completion)
        return [Part(prompt, False, begins=True), Part(completion, True, ends=True)]
    assert columns.text is not None
    return [Part(row.text(columns.text), True, begins=True, ends=True)]


def check(row: Row, columns: Columns) -> None:
    """See whether a sample holds what its columns promise.

    Raises:
        UnusableInput: it does not.
    """
    if columns.messages is not None:
        row.messages(columns.messages)
    for column in (columns.text, columns.prompt, columns.completion):
        if column is not None:
            row.text(column)


def _of_conversation(row: Row, messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase") -> list[Part]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"{FIELD}: {row.place} is a conversation, and the tokenizer of the model has no chat template; take an "
            "instruct model, or texts"
        )

    def written(count: int, asks: bool = False) -> str:
        """The first messages; `asks`: up to where the assistant begins to speak."""
        try:
            return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asks))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise row.wrong(f"the chat template refuses this conversation: {error}") from error

    whole, at = written(len(messages)), 0
    found: list[Part] = []
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = written(place, asks=True), written(place + 1)
        if not (after.startswith(before) and whole.startswith(after)):
            raise row.wrong(
                "the chat template writes an answer otherwise once more follows, or not after the words that ask for "
                "one, so it does not tell where answers begin and end; take a template that does, or prompts and "
                "completions"
            )
        found += [Part(whole[at : len(before)], False), Part(whole[len(before) : len(after)], True)]
        at = len(after)
    return [part for part in (*found, Part(whole[at:], False)) if part.text]


class Documents:
    """Tokens of many samples, one after the other.

    Args:
        tokens: [all tokens], int32.
        learned: [all tokens], bool.
        begins: [documents + 1], int64: where each begins, and the end of the last.
    """

    def __init__(self, tokens: npt.NDArray[Any], learned: npt.NDArray[Any], begins: npt.NDArray[Any]) -> None:
        self.tokens, self.learned, self.begins = tokens, learned, begins

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        found: list[int] = np.diff(self.begins).tolist()
        return found

    def __getitem__(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Tokens of one, and which of them are learned."""
        part = slice(self.begins[number], self.begins[number + 1])
        return self.tokens[part], self.learned[part]

    @property
    def targets(self) -> int:
        """Tokens that are predicted and learned: the first one of a document is not predicted."""
        return int(np.count_nonzero(self.learned)) - int(np.count_nonzero(self.learned[self.begins[:-1]]))

    def taken(self, start: int, end: int) -> "Documents":
        """Some of them."""
        first, last = self.begins[start], self.begins[end]
        return Documents(self.tokens[first:last], self.learned[first:last], self.begins[start : end + 1] - first)


def joined(parts: Sequence[Documents]) -> Documents:
    """Documents of several sources, one source after the other."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(one.tokens) for one in parts)], dtype=np.int64)
    begins = [one.begins[:-1] + start for one, start in zip(parts, starts[:-1], strict=True)]
    return Documents(
        np.concatenate([one.tokens for one in parts]),
        np.concatenate([one.learned for one in parts]),
        np.concatenate([*begins, starts[-1:]]),
    )


@dataclass
class Losses:
    """What of the samples is not trained on."""

    samples: int = 0
    """Samples seen."""
    truncated: int = 0
    """Samples that were longer than a row."""
    tokens: int = 0
    """Their tokens that were cut off."""
    empty: int = 0
    """Samples without a token to learn."""
    cut_before: int = 0
    """Those among them that have some behind the place where they were cut off."""


class Encoder:
    """Makes documents of samples.

    Args:
        length: tokens of the longest.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", length: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        self.lost = Losses()

    def documents(self, samples: Iterable[tuple[Sequence[Part], bool]]) -> Documents:
        """
        Args:
            samples: the parts of each, and whether it is cut into pieces where it is too long.
        """
        tokens: list[npt.NDArray[Any]] = []
        learned: list[npt.NDArray[Any]] = []
        remaining = iter(samples)
        while some := list(islice(remaining, AT_ONCE)):
            for (numbers, marks), (_, in_pieces) in zip(self._encoded([parts for parts, _ in some]), some, strict=True):
                self.lost.samples += 1
                pieces = list(self._pieces(numbers, marks, in_pieces))
                self.lost.empty += not pieces
                self.lost.cut_before += not pieces and bool(marks[1:].any())
                tokens += [piece for piece, _ in pieces]
                learned += [mark for _, mark in pieces]
        begins = np.cumsum([0, *(len(one) for one in tokens)], dtype=np.int64)
        if not tokens:
            return Documents(np.empty(0, np.int32), np.empty(0, bool), begins)
        return Documents(np.concatenate(tokens), np.concatenate(learned), begins)

    def _encoded(self, samples: list[Sequence[Part]]) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Tokens of samples, and which are learned."""
        numbers = {True: self._cut(samples, True), False: self._cut(samples, False)}
        end = self._tokenizer.eos_token_id
        for parts in samples:
            tokens: list[int] = []
            learned: list[bool] = []
            for part in parts:
                found = next(numbers[part.begins])
                if end is not None and part.begins and not part.ends and found[-1:] == [end]:
                    found = found[:-1]
                if end is not None and part.ends and found[-1:] != [end]:
                    found = [*found, end]
                marks = [part.is_learned] * len(found)
                if part.is_learned and end in found:
                    # Nobody reads on where a turn has ended.
                    last = len(found) - found[::-1].index(end)
                    marks[last:] = [False] * (len(found) - last)
                tokens += found
                learned += marks
            yield np.array(tokens, dtype=np.int32), np.array(learned, dtype=bool)

    def _cut(self, samples: list[Sequence[Part]], begins: bool) -> Iterator[list[int]]:
        texts = [part.text for parts in samples for part in parts if part.begins == begins]
        if not texts:
            return iter(())
        return iter(self._tokenizer(texts, add_special_tokens=begins, verbose=False)["input_ids"])

    def _pieces(
        self, tokens: npt.NDArray[Any], learned: npt.NDArray[Any], in_pieces: bool
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        if not in_pieces and len(tokens) > self._length:
            self.lost.truncated += 1
            self.lost.tokens += len(tokens) - self._length
            tokens, learned = tokens[: self._length], learned[: self._length]
        for begin in range(0, max(1, len(tokens) - 1), self._length - 1):
            part = slice(begin, begin + self._length)
            if learned[part][1:].any():
                yield tokens[part], learned[part]


def refuse_none(documents: Documents, lost: Losses, what: str, source: str = "") -> None:
    """
    Args:
        lost: what was not made a document.
        what: they are for, in words.
        source: which they are of, where there are several.

    Raises:
        UnusableInput: there are none.
    """
    if len(documents):
        return
    of = f" of {source}" if source else ""
    message = f"{FIELD}: no sample{of} is left to {what} with, of which a token could be learned"
    if lost.samples:
        unanswered = lost.empty - lost.cut_before
        reasons = {
            f"{number(lost.cut_before)} were cut off at length before what is learned": lost.cut_before,
            f"{number(unanswered)} have nothing that is learned, such as words of the role {ASSISTANT}": unanswered,
        }
        message += f": of {number(lost.samples)}, {' and '.join(why for why, count in reasons.items() if count)}"
    raise UnusableInput(message)
