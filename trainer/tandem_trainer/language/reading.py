"""Reads samples of text from a file (plain text, JSON lines, Parquet) or from a data set on the hub, with their places.

Each sample is a row with columns. What cannot be read ends the job with a sentence that names the file and the line: a
sample that is passed over would be missed by nobody.
"""

import codecs
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.causal_lm import HubDataset, Source
from tandem.errors import enumerated
from tandem.rundir.durable import may_pass
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.hub import asked, first_line, is_commit, why

FIELD = "spec.trainer.parameters.data"
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".md": "text",
}
ASSISTANT = "assistant"
ROLES = {ASSISTANT, "developer", "function", "ipython", "system", "tool", "user"}
"""Those of chat templates."""
_BEGINNING = 64
"""Bytes of a file by which its encoding is known."""
HALF = re.compile(r"[\ud800-\udfff]")
"""Half of a character outside of the first 65,536, which is none by itself."""
BATCH = 1024
"""Rows of Parquet that are in memory at once."""


def commit_of(dataset: HubDataset) -> str | None:
    """The commit that the branch of a data set has now; None where nobody tells, or where the id is a folder."""
    if is_commit(dataset.revision):
        return dataset.revision
    if Path(dataset.id).exists():
        return None
    try:
        from huggingface_hub import HfApi

        return asked(dataset.id, lambda: HfApi().dataset_info(dataset.id, revision=dataset.revision)).sha
    except Exception:  # of a library, which has no common one: `rows` then says what is wrong
        return None


@dataclass(frozen=True)
class Row:
    """A sample as it is read."""

    place: str
    """Where it stands, for messages."""
    columns: Mapping[str, Any]
    """Its values by name."""

    def text(self, column: str) -> str:
        """The text in a column.

        Raises:
            UnusableInput: there is none.
        """
        value = self.columns.get(column)
        if not isinstance(value, str):
            raise self.wrong(f"the column {column} holds no text" if column in self.columns else self._lacks(column))
        return value

    def messages(self, column: str) -> list[dict[str, Any]]:
        """The conversation in a column.

        Raises:
            UnusableInput: there is none.
        """
        value = self.columns.get(column)
        if column not in self.columns:
            raise self.wrong(self._lacks(column))
        if not isinstance(value, list) or not value:
            raise self.wrong(f"the column {column} holds no list of messages")
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise self.wrong(f"message {number} of {column} is no object with role and content")
            if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
                raise self.wrong(f"message {number} of {column} has no content")
        roles = {str(message["role"]) for message in value}
        if ASSISTANT not in roles and (unknown := sorted(roles - ROLES)):
            raise self.wrong(
                f"no message of {column} has the role {ASSISTANT}, whose words are learned; {enumerated(unknown)} is "
                "no role that is known"
            )
        return value

    def wrong(self, why: str) -> UnusableInput:
        """What to say of it."""
        return UnusableInput(f"{FIELD}: {self.place}: {why}")

    def _lacks(self, column: str) -> str:
        return f"there is no column {column}, only {', '.join(self.columns) or 'none'}"


def format_of(path: str, given: str | None) -> str:
    """Which format a file has.

    Raises:
        ConfigurationError: its name does not tell.
    """
    found = given or FORMATS.get(Path(path).suffix.lower())
    if found is None:
        raise ConfigurationError(f"{FIELD}.format: the name {path} does not tell; say format: text, jsonl or parquet")
    return found


def whole_text(path: str) -> str:
    """A file of plain text.

    Raises:
        UnusableInput: it cannot be read.
    """
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if other := _other_encoding(content[:_BEGINNING]):
        raise UnusableInput(f"{FIELD}: {path}: {other}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UnusableInput(f"{FIELD}: {path}, line {line}: this is no text in UTF-8") from error


def rows(data: Source, source: str | None, start: int = 0, end: int | None = None) -> Iterator[Row]:
    """Samples, one after the other.

    Args:
        source: a file of JSON lines or Parquet; of a data set on the hub the split. None: `path`, or its `split`.
        start: the first one.
        end: the one after the last; None: to the end.

    Raises:
        UnusableInput: they cannot be read.
        ConfigurationError: a library is not installed.
    """
    if data.dataset is not None:
        return _of_hub(data.dataset, source or data.dataset.split, start, end)
    path = source or data.path
    assert path is not None
    read = _of_lines if format_of(path, data.format) == "jsonl" else _of_parquet
    return itertools.islice(read(path), start, end)


def _of_lines(path: str) -> Iterator[Row]:
    try:
        with Path(path).expanduser().open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and (other := _other_encoding(line[:_BEGINNING])):
                    raise UnusableInput(f"{FIELD}: {path}: {other}")
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    found = json.loads(line)
                except ValueError as error:
                    raise UnusableInput(f"{FIELD}: {place}: this is no JSON: {error}") from error
                if not isinstance(found, dict):
                    raise UnusableInput(f"{FIELD}: {place}: this is no JSON object with columns")
                # Only an escape can write half a character, so most lines are not looked through.
                if b"\\u" in line and (half := HALF.search(json.dumps(found, ensure_ascii=False))):
                    why = f"\\u{ord(half[0]):04x} is half of a character, and the other half is not there"
                    raise UnusableInput(f"{FIELD}: {place}: {why}")
                yield Row(place, found)
    except OSError as error:
        raise _unreadable(path, error) from error


def _other_encoding(beginning: bytes) -> str:
    """What a file is that is no UTF-8, and what to do; empty where its beginning does not show that it is none."""
    marked = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
    # Of Latin letters in UTF-16 every second byte is zero.
    if marked or (len(beginning) > 1 and beginning.count(0) * 3 > len(beginning)):
        is_32 = beginning.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
        return f"this is {'UTF-32' if is_32 else 'UTF-16'}; save it as UTF-8"
    return ""


def _of_parquet(path: str) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigurationError(f"{FIELD}: to read {path}, install pyarrow (pip install pyarrow)") from error
    try:
        number = 0
        for batch in ParquetFile(Path(path).expanduser()).iter_batches(BATCH):
            for found in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", found)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ArrowException as error:
        raise UnusableInput(f"{FIELD}: {path} is no Parquet file that can be read: {first_line(error)}") from error


def _of_hub(source: HubDataset, split: str, start: int, end: int | None) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            f"{FIELD}.dataset: to load {source.id}, install datasets (pip install datasets)"
        ) from error
    try:
        # Bars of progress of many ranks in one log tell nobody anything.
        datasets.disable_progress_bars()
        table = asked(
            source.id,
            lambda: datasets.load_dataset(source.id, source.config, split=split, revision=source.revision),
        )
    except Exception as error:  # of the network, of the hub, of the data: the library has no common one
        told = f"{reason}: " if (reason := why(error)) else ""
        message = f"{FIELD}.dataset: {source.id} ({split}) cannot be loaded: {told}{first_line(error)}"
        raise UnusableInput(message) from error
    for number in range(start, min(end or len(table), len(table))):
        yield Row(f"{source.id} ({split}), sample {number}", table[number])


def _unreadable(path: str, error: OSError) -> Exception:
    if may_pass(error):
        return error
    return UnusableInput(f"{FIELD}: {path} cannot be read: {error.strerror or error}")
