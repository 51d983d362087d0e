"""The reference page of logs: every kind of line that a run directory holds, for people who read them by a program."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import Any, get_args

from tandem.model import Model
from tandem.rundir import records
from tandem.rundir.records import Record

HEAD = """\
<!-- Generated from core/tandem/rundir/records.py by `make generate`; do not edit. -->
# Logs of a run

The folder `log/` of a run directory holds what happened, for people, reports and your own programs; no process of a
job depends on it. Each file has one writer and one JSON object a line: `kind` says what it is, `time` is in seconds
since the epoch. A value that is not known is absent, and a loss may be `NaN` or `Infinity`.

A line may be torn by a crash or a full disk, and the last one may not be complete yet: pass over what is not JSON. Pass
over kinds and fields that are not listed here, too: a newer version may write them. Where two generations log the same
step, the later one counts.

    jq -r 'select(.kind == "step") | [.step, .loss] | @tsv' runs/digits/log/train-g000001.jsonl

What the processes of `tandem run` print is beside it, in `log/worker-0.txt`, `log/coordinator.txt` and so on.
"""
LOGS = (
    ("log/train-g000007.jsonl", "Written by rank 0 of generation 7.", records.TrainingRecord),
    ("log/coordinator.jsonl", "Written by the coordinator.", records.CoordinatorRecord),
    ("log/evaluator-NAME.jsonl", "Written by each process that evaluates.", records.EvaluatorRecord),
)
TYPES = {
    "Whole": "whole number",
    "Count": "whole number",
    "int": "whole number",
    "Number": "number",
    "float | None": "number",
    "Anything": "number",
    "Amount": "number, not negative",
    "Seconds": "seconds",
    "Moment": "time",
    "Amounts": "object: number by name",
    "Text": "text",
    "Texts": "list of text",
    "PlainName": "text",
}
"""What the annotations of fields are called; everything else is text."""


@dataclass(frozen=True)
class Described:
    """A field."""

    name: str
    kind: str
    meaning: str


def logs_page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *(line for log in LOGS for line in _log(*log))])


def _log(path: str, writer: str, union: Any) -> Iterator[str]:
    yield f"## `{path}`\n\n{writer}\n"
    for record in get_args(union):
        yield f"### `{record.model_fields['kind'].default}`\n\n{_words(record.__doc__)}\n"
        if fields := list(described(record)):
            yield "| field | type | meaning |\n|---|---|---|"
            yield from (f"| `{field.name}` | {field.kind} | {field.meaning} |" for field in fields)
            yield ""


def described(record: type[Record]) -> Iterator[Described]:
    """Its fields, but for those that every line has."""
    for base in reversed(record.__mro__):
        if base in (Record, Model) or not issubclass(base, Model):
            continue
        body = ast.parse(dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, [*body.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name = statement.target.id
            if name == "kind" or name not in record.model_fields:
                continue
            meaning = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            alias = record.model_fields[name].alias or name
            yield Described(alias, TYPES.get(ast.unparse(statement.annotation), "text"), _words(str(meaning)))


def _words(text: str | None) -> str:
    return " ".join((text or "").split())
