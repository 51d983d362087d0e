"""Reads samples of text from a file (plain text, JSON lines, Parquet) or from a data set on the hub, with their
locations.

Each sample is a row with columns. A sample that cannot be read ends the job with a message that names the file and the
line: nobody would notice if it were skipped.
"""

import codecs
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tandem.errors import join_names
from tandem.job.causal_lm import HubDataset, TextSource
from tandem.rundir.durable import is_transient
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.hub import failure_reason, first_line, is_commit, with_retries

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
"""Roles of chat templates."""
_HEADER_BYTES = 64
"""Bytes of a file by which its encoding is recognized."""
SURROGATE = re.compile(r"[\ud800-\udfff]")
"""One half of a surrogate pair, which is no character by itself."""
PARQUET_BATCH = 1024
"""Rows of Parquet that are in memory at once."""


def commit_of(dataset: HubDataset) -> str | None:
    """Return the current commit of a data set's branch; None if the hub does not answer, or if the id is a folder."""
    if is_commit(dataset.revision):
        return dataset.revision
    if Path(dataset.id).exists():
        return None
    try:
        from huggingface_hub import HfApi

        return with_retries(dataset.id, lambda: HfApi().dataset_info(dataset.id, revision=dataset.revision)).sha
    except Exception:  # no common base class; `read_rows` reports it
        return None


@dataclass(frozen=True)
class SampleRow:
    """A sample as it was read."""

    location: str
    """Location of the sample, for messages."""
    columns: Mapping[str, Any]
    """Values by column name."""

    def text(self, column: str) -> str:
        """Return the text in a column.

        Raises:
            UnusableInput: the column has none.
        """
        value = self.columns.get(column)
        if not isinstance(value, str):
            raise self.error(f"the column {column} holds no text" if column in self.columns else self._missing(column))
        return value

    def messages(self, column: str) -> list[dict[str, Any]]:
        """Return the conversation in a column.

        Raises:
            UnusableInput: the column has none.
        """
        value = self.columns.get(column)
        if column not in self.columns:
            raise self.error(self._missing(column))
        if not isinstance(value, list) or not value:
            raise self.error(f"the column {column} holds no list of messages")
        for number, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise self.error(f"message {number} of {column} is not an object with role and content")
            if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
                raise self.error(f"message {number} of {column} has no content")
        roles = {str(message["role"]) for message in value}
        if ASSISTANT not in roles and (unknown := sorted(roles - ROLES)):
            raise self.error(
                f"no message of {column} has the role {ASSISTANT}, whose words are learned; {join_names(unknown)} is "
                "no role that is known"
            )
        if misspelled := get_close_matches(ASSISTANT, roles - ROLES, n=1, cutoff=0.8):
            raise self.error(f"a message of {column} has the role {misspelled[0]}; did you mean {ASSISTANT}?")
        return value

    def error(self, problem: str) -> UnusableInput:
        """Build an error about this sample."""
        return UnusableInput(f"{FIELD}: {self.location}: {problem}")

    def _missing(self, column: str) -> str:
        return f"there is no column {column}, only {', '.join(self.columns) or 'none'}"


def format_of(path: str, specified: str | None) -> str:
    """Return the format of a file.

    Raises:
        ConfigurationError: the suffix of the name is unknown.
    """
    file_format = specified or FORMATS.get(Path(path).suffix.lower())
    if file_format is None:
        raise ConfigurationError(
            f"{FIELD}.format: the name {path} does not tell the format; set format: text, jsonl or parquet"
        )
    return file_format


def whole_text(path: str) -> str:
    """Read a file of plain text.

    Raises:
        UnusableInput: the file cannot be read.
    """
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if other := _other_encoding(content[:_HEADER_BYTES]):
        raise UnusableInput(f"{FIELD}: {path}: {other}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UnusableInput(f"{FIELD}: {path}, line {line}: this is not UTF-8 text") from error


def read_rows(data: TextSource, source: str | None, start: int = 0, end: int | None = None) -> Iterator[SampleRow]:
    """Iterate over samples.

    Args:
        data: source of the samples.
        source: a file of JSON lines or Parquet, or the split of a data set on the hub; None: the source's `path` or
            `split`.
        start: first sample.
        end: sample after the last; None: to the end.

    Raises:
        UnusableInput: the samples cannot be read.
        ConfigurationError: a library is not installed.
    """
    if data.dataset is not None:
        return _read_hub(data.dataset, source or data.dataset.split, start, end)
    path = source or data.path
    assert path is not None
    read = _read_json_lines if format_of(path, data.format) == "jsonl" else _read_parquet
    return itertools.islice(read(path), start, end)


def _read_json_lines(path: str) -> Iterator[SampleRow]:
    try:
        with Path(path).expanduser().open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and (other := _other_encoding(line[:_HEADER_BYTES])):
                    raise UnusableInput(f"{FIELD}: {path}: {other}")
                if not line.strip():
                    continue
                location = f"{path}, line {number}"
                try:
                    columns = json.loads(line)
                except ValueError as error:
                    raise UnusableInput(f"{FIELD}: {location}: this is not JSON: {error}") from error
                if not isinstance(columns, dict):
                    raise UnusableInput(f"{FIELD}: {location}: this is not a JSON object with columns")
                # Only an escape can write half a character, so most lines need no search.
                if b"\\u" in line and (surrogate := SURROGATE.search(json.dumps(columns, ensure_ascii=False))):
                    problem = f"\\u{ord(surrogate[0]):04x} is half of a character, and the other half is not there"
                    raise UnusableInput(f"{FIELD}: {location}: {problem}")
                yield SampleRow(location, columns)
    except OSError as error:
        raise _unreadable(path, error) from error


def _other_encoding(beginning: bytes) -> str:
    """Return which other encoding a file has, and what to do; empty if its beginning shows none."""
    has_mark = beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
    # In UTF-16, every second byte of Latin letters is zero.
    if has_mark or (len(beginning) > 1 and beginning.count(0) * 3 > len(beginning)):
        is_32 = beginning.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
        return f"this is {'UTF-32' if is_32 else 'UTF-16'}; save it as UTF-8"
    return ""


def _read_parquet(path: str) -> Iterator[SampleRow]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigurationError(f"{FIELD}: to read {path}, install pyarrow (pip install pyarrow)") from error
    try:
        number = 0
        for batch in ParquetFile(Path(path).expanduser()).iter_batches(PARQUET_BATCH):
            for columns in batch.to_pylist():
                number += 1
                yield SampleRow(f"{path}, row {number}", columns)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ArrowException as error:
        raise UnusableInput(f"{FIELD}: {path} is not a Parquet file that can be read: {first_line(error)}") from error


def _read_hub(source: HubDataset, split: str, start: int, end: int | None) -> Iterator[SampleRow]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            f"{FIELD}.dataset: to load {source.id}, install datasets (pip install datasets)"
        ) from error
    try:
        # Progress bars of many ranks in one log are unreadable.
        datasets.disable_progress_bars()
        table = with_retries(
            source.id,
            lambda: datasets.load_dataset(source.id, source.config, split=split, revision=source.revision),
        )
    except Exception as error:  # network, hub or data: no common base class
        prefix = f"{reason}: " if (reason := failure_reason(error)) else ""
        message = f"{FIELD}.dataset: {source.id} ({split}) cannot be loaded: {prefix}{first_line(error)}"
        raise UnusableInput(message) from error
    for number in range(start, min(end or len(table), len(table))):
        yield SampleRow(f"{source.id} ({split}), sample {number}", table[number])


def _unreadable(path: str, error: OSError) -> Exception:
    if is_transient(error):
        return error
    return UnusableInput(f"{FIELD}: {path} cannot be read: {error.strerror or error}")
