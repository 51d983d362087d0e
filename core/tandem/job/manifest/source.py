"""YAML as kubectl reads it, with the position of every value.

PyYAML composes the text into nodes with positions, and this module makes plain data of the nodes itself, because
PyYAML's own constructor differs from kubectl in important ways: it reads `1e-3` as text (YAML 1.1 requires a dot),
`1:30` as 90, `2026-01-01` as a date, and silently keeps the last of two equal keys. `yes` and `on` stay booleans, as in
kubectl.

Rejected: ruamel.yaml (positions and YAML 1.2 at once, but a second YAML library next to the one kopf brings along), and
PyYAML's SafeLoader with patched constructors (loses the positions).

A manifest is untrusted text: its size, its depth and the expansion of its aliases are bounded.

PyYAML's messages name the token that its scanner expected (`expected <block end>, but found '<scalar>'`), and often
mark the position where it gave up instead of the mistake. They are translated here; unknown messages are passed on.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from tandem.errors import ManifestError, Problem
from tandem.job.manifest.fields import Path, dotted

Mark = yaml.Mark

_QUOTE = "a quote that is never closed: the text that begins here has no quote at its end"
_INDENTED = "indented differently from the lines above it in the same group"
_TOO_FAR = "a field cannot begin here: the line above has a value already, or lacks its colon, or is indented less"
_SECOND_COLON = "a second colon in one line; put a value that has a colon in it into quotes"
_ESCAPES = "a \\ between double quotes begins an escape such as \\n; write \\\\, or put the text into single quotes"


def describe_yaml_error(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[Mark | None, str]:
    """The position of a YAML error, and a sentence without its full stop.

    Args:
        lines: lines of the text.
    """
    problem, context = str(error.problem), str(error.context or "")
    mark = error.problem_mark or error.context_mark
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    if "'\\t'" in problem or "\t" in line[: len(line) - len(line.lstrip())]:
        return mark, "a tab; YAML is indented with spaces"
    if "quoted scalar" in context and ("end of stream" in problem or "document separator" in problem):
        return error.context_mark or mark, _QUOTE
    if "flow" in context and ("expected ',' or" in problem or "'<stream end>'" in problem):
        return _unclosed(error, lines)
    if match := re.search(r"undefined alias '(.*)'", problem):
        return (
            mark,
            f"*{match[1]} refers to the anchor &{match[1]}, which is not defined above; put a text into quotes",
        )
    if match := re.search(r"found character '(.*)' that cannot start any token", problem):
        return mark, f"a value cannot begin with {match[1]}; put it into quotes"
    if "mapping values are not allowed" in problem:
        is_a_field = mark is not None and mark.line and re.fullmatch(r"\s*[\w./-]+", line[: mark.column])
        return mark, _TOO_FAR if is_a_field else _SECOND_COLON
    if "block mapping" in context and mark is not None and line[: mark.column].strip():
        return mark, "more text after a complete value; put the whole value into quotes"
    for pattern, message in _MESSAGES.items():
        if pattern in problem or pattern in context:
            return mark, message
    return mark, f"not YAML: {problem}" + (f" {context}" if context else "")


_MESSAGES = {
    "unknown escape character": _ESCAPES,
    "escape sequence of": _ESCAPES,
    "could not find expected ':'": "a name without a colon after it",
    "while parsing a block mapping": _INDENTED,
    "while parsing a block collection": _INDENTED,
    "block sequence entries are not allowed here": "a list cannot begin here; put its first - on a line of its own",
    "sequence entries are not allowed here": "a list cannot begin here; put its first - on a line of its own",
    "'<stream end>'": "the text ends where a value is missing",
}
"""Messages by parts of PyYAML's problem or context; the first match counts."""


def _unclosed(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[Mark | None, str]:
    start = error.context_mark
    if start is None:
        return error.problem_mark, "brackets that are never closed"
    opening = lines[start.line][start.column : start.column + 1] if start.line < len(lines) else ""
    description = {"[": "a list whose ]", "{": "a group whose }"}.get(opening, "brackets of which the last")
    return start, f"{description} is missing, or a comma between two entries"


MAX_BYTES = 2**19
"""Larger files are not read. The largest manifests in use have some 20 KiB; PyYAML takes seconds for more than this."""
MAX_VALUES = 20_000
"""Maximum number of names and values, also after aliases are expanded: a bomb of nested aliases ends here."""
MAX_DEPTH = 100

_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Line breaks of YAML."""

_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9_]*|0b[01]+|0o?[0-7_]*[0-7]|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL = re.compile(r"^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")
_TRUE = re.compile(r"^(y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON)$")
_FALSE = re.compile(r"^(n|N|no|No|NO|false|False|FALSE|off|Off|OFF)$")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")


class _Resolver(BaseResolver):
    """The implicit types of plain scalars. The first match counts."""


for _kind, _pattern in {
    "null": _NULL,
    "bool": re.compile(f"{_TRUE.pattern}|{_FALSE.pattern}"),
    "int": _INTEGER,
    "float": re.compile(f"{_FLOAT.pattern}|{_SPECIAL.pattern}"),
    "merge": re.compile(r"^<<$"),
}.items():
    _Resolver.add_implicit_resolver(_TAG + _kind, _pattern, None)


class _Composer(Reader, Scanner, Parser, Composer, _Resolver):
    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)
        self._depth = self._nodes = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node as PyYAML does, with bounds: deep nesting would take quadratic time."""
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH or self._nodes > MAX_VALUES:
            message = _TOO_DEEP if self._depth > MAX_DEPTH else _TOO_MANY
            raise _TooMuch(None, None, message, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _TooMuch(yaml.MarkedYAMLError):
    """A bound is exceeded."""


_TOO_DEEP = f"nested too deeply: more than {MAX_DEPTH} levels"
_TOO_MANY = f"too much for a manifest: more than {MAX_VALUES:,} names and values"


@dataclass(frozen=True)
class Place:
    """Position of a value: line and column from 1, and its width in the line in characters."""

    line: int
    column: int
    width: int
    text: str = ""
    """The value as written; empty for groups and lists."""


@dataclass
class Source:
    """One YAML document: its data and the position of each key and value."""

    file: str
    lines: list[str]
    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    """Positions of the names of fields."""
    values: dict[Path, Place] = field(default_factory=dict)
    """Positions of the values."""

    def problem(self, place: Place, path: Path, message: str, **more: str) -> Problem:
        """Create a problem at a position of this document; `more` are further texts of the Problem."""
        excerpt = self.lines[place.line - 1] if place.line <= len(self.lines) else ""
        problem = Problem(place.line, place.column, self.file, dotted(path), message, place.text, excerpt=excerpt)
        return replace(problem, width=place.width, **more)  # type: ignore[arg-type]


def parse(text: bytes, file: str) -> Source:
    """Parse the one YAML document of a file.

    Raises:
        ManifestError: it is not UTF-8, not YAML, empty, too large, or more than one document; or a key stands twice.
    """
    if len(text) > MAX_BYTES:
        raise _file_error(file, f"larger than a manifest can be ({MAX_BYTES:,} bytes)")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise ManifestError([Problem(line, 1, file, "", f"not UTF-8 text: byte 0x{text[error.start]:02x}")]) from None
    source = Source(file, _BREAK.split(decoded))
    documents = _documents(source, decoded)
    if not documents:
        raise _file_error(file, "empty: there is no manifest in it")
    if len(documents) > 1:
        place = _place(documents[1], decoded)
        message = "a second document begins here; a file holds one job"
        raise ManifestError([source.problem(place, (), message, given="")])
    reader = _Reader(source, decoded)
    source.data = reader.value(documents[0], ())
    if reader.problems:
        raise ManifestError(sorted(reader.problems))
    return source


def parse_value(text: str) -> Any:
    """Parse one YAML value, as after `--set path=`.

    Raises:
        ValueError: the text is not one value. The message gives the reason.
    """
    if _NULL.match(text.strip()):
        return None
    try:
        return parse(text.encode(), "").data
    except ManifestError as error:
        raise ValueError(error.problems[0].message) from None


def _file_error(file: str, message: str) -> ManifestError:
    return ManifestError([Problem(0, 0, file, "", message)])


def _documents(source: Source, text: str) -> list[Node]:
    """The documents that are not empty; kubectl skips empty ones too."""
    documents: list[Node] = []
    try:
        composer = _Composer(text)
        while composer.check_node():
            node = composer.get_node()
            if node is not None and not (isinstance(node, ScalarNode) and node.tag == _TAG + "null"):
                documents.append(node)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{int(error.character):04X} is not allowed in YAML"
        raise ManifestError([source.problem(Place(line, 1, 1), (), message)]) from None
    except yaml.MarkedYAMLError as error:
        is_bound = isinstance(error, _TooMuch)
        mark, message = (
            (error.problem_mark, str(error.problem)) if is_bound else describe_yaml_error(error, source.lines)
        )
        place = Place(mark.line + 1, mark.column + 1, 1) if mark else Place(1, 1, 1)
        raise ManifestError([source.problem(place, (), message)]) from None
    return documents


def _place(node: Node, text: str) -> Place:
    start, end = node.start_mark, node.end_mark
    written = text[start.index : end.index] if isinstance(node, ScalarNode) else ""
    if start.line == end.line:
        width = max(1, end.column - start.column)
    else:
        width = max(1, len(text[start.index :].split("\n", 1)[0].rstrip()))
    return Place(start.line + 1, start.column + 1, width, written)


class _Reader:
    """Converts nodes to data, and records positions and mistakes."""

    def __init__(self, source: Source, text: str) -> None:
        self.source, self.text = source, text
        self.problems: list[Problem] = []
        self.count = 0
        self.open: set[int] = set()

    def value(self, node: Node, path: Path) -> Any:
        """The data of a node."""
        place = _place(node, self.text)
        self.source.values[path] = place
        self.count += 1
        if self.count > MAX_VALUES:
            raise _file_error(self.source.file, f"{_TOO_MANY} once its aliases are expanded")
        if isinstance(node, ScalarNode):
            return self._scalar(node, path, place)
        if id(node) in self.open:
            self._note(place, path, "an alias that contains itself")
            return None
        if len(path) > MAX_DEPTH:
            raise _file_error(self.source.file, _TOO_DEEP)
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(node, path)
        finally:
            self.open.remove(id(node))
            self.source.values[path] = place  # a merged group wrote its own place there

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            place = _place(key, self.text)
            if key.tag == _TAG + "merge":
                for part in self._merged(value, path):
                    merged = part | merged
                continue
            if not isinstance(key, ScalarNode) or key.tag != _TAG + "str":
                self._note(place, path, "a name must be text; put it into quotes")
                continue
            name = key.value
            inner = (*path, name)
            if name in result:
                first = self.source.keys[inner].line
                self._note(place, inner, f"{dotted(inner)} appears twice, first in line {first}")
                continue
            self.source.keys[inner] = place
            result[name] = self.value(value, inner)
        return merged | result

    def _merged(self, node: Node, path: Path) -> Iterator[dict[str, Any]]:
        parts = node.value if isinstance(node, SequenceNode) else [node]
        for part in parts:
            if isinstance(part, MappingNode):
                value = self.value(part, path)
                assert isinstance(value, dict)
                yield value
            else:
                self._note(_place(part, self.text), path, "<< takes a group of fields, or a list of them")

    def _scalar(self, node: ScalarNode, path: Path, place: Place) -> Any:
        text = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool" if _TRUE.match(text) or _FALSE.match(text):
                return bool(_TRUE.match(text))
            case "int" if _INTEGER.match(text):
                return self._integer(text, path, place)
            case "float" if _FLOAT.match(text):
                return self._float(text, path, place)
            case "float":
                self._note(place, path, f"{text} is not a number that JSON and Kubernetes know")
            case _:
                self._note(place, path, f"the tag {node.tag} is not supported here")
        return None

    def _integer(self, text: str, path: Path, place: Place) -> int | None:
        plain = text.replace("_", "")
        sign, digits = (-1, plain[1:]) if plain[0] == "-" else (1, plain.lstrip("+"))
        base = 8 if len(digits) > 1 and digits.isdecimal() and digits[0] == "0" else 0
        # The length first: Python refuses to read very long numbers.
        if len(digits) > 80 or not -(2**63) <= (number := sign * int(digits, base)) < 2**63:
            self._note(place, path, "a whole number that does not fit into 64 bits")
            return None
        return number

    def _float(self, text: str, path: Path, place: Place) -> float | int | None:
        number = float(text.replace("_", ""))
        if not math.isfinite(number):
            self._note(place, path, "a number too large for floating point")
            return None
        # kubectl sends JSON, where 1e3 and 5.0 are the whole numbers 1000 and 5.
        return int(number) if number.is_integer() and abs(number) < 2**53 else number

    def _note(self, place: Place, path: Path, message: str) -> None:
        self.problems.append(self.source.problem(place, path, message))


def short_json(value: Any) -> str:
    """Format a value in one short line, for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
