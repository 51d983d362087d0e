"""What is wrong with the YAML itself, in words for a person who does not know how YAML is parsed.

PyYAML says what its scanner expected (`expected <block end>, but found '<scalar>'`) and often marks the place where it
gave up instead of the one where the mistake is. What it says is looked up here; what is not known here is passed on.
"""

import re

import yaml

Mark = yaml.Mark

_QUOTE = "a quote that is never closed: the text that begins here has no quote at its end"
_INDENTED = "indented in another way than the lines above it that belong to the same group"
_TOO_FAR = "a field cannot begin here: the line above has a value already, or lacks its colon, or is indented less"
_SECOND_COLON = "a second colon in one line; put a value that has a colon in it into quotes"
_ESCAPES = "a \\ between double quotes begins an escape such as \\n; write \\\\, or put the text into single quotes"


def in_words(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[Mark | None, str]:
    """Where the mistake is, and a sentence without its full stop.

    Args:
        lines: of the text.
    """
    problem, context = str(error.problem), str(error.context or "")
    here = error.problem_mark or error.context_mark
    line = lines[here.line] if here is not None and here.line < len(lines) else ""
    if "'\\t'" in problem or "\t" in line[: len(line) - len(line.lstrip())]:
        return here, "a tab; YAML is indented with spaces"
    if "quoted scalar" in context and ("end of stream" in problem or "document separator" in problem):
        return error.context_mark or here, _QUOTE
    if "flow" in context and ("expected ',' or" in problem or "'<stream end>'" in problem):
        return _unclosed(error, lines)
    if found := re.search(r"undefined alias '(.*)'", problem):
        return (
            here,
            f"*{found[1]} stands for what is marked with &{found[1]}, and nothing above is; put a text into quotes",
        )
    if found := re.search(r"found character '(.*)' that cannot start any token", problem):
        return here, f"a value cannot begin with {found[1]}; put it into quotes"
    if "mapping values are not allowed" in problem:
        is_a_field = here is not None and here.line and re.fullmatch(r"\s*[\w./-]+", line[: here.column])
        return here, _TOO_FAR if is_a_field else _SECOND_COLON
    if "block mapping" in context and here is not None and line[: here.column].strip():
        return here, "more text after a value that is complete; put the whole value into quotes"
    for words, message in _KNOWN.items():
        if words in problem or words in context:
            return here, message
    return here, f"not YAML: {problem}" + (f" {context}" if context else "")


_KNOWN = {
    "unknown escape character": _ESCAPES,
    "escape sequence of": _ESCAPES,
    "could not find expected ':'": "a name without a colon after it",
    "while parsing a block mapping": _INDENTED,
    "while parsing a block collection": _INDENTED,
    "block sequence entries are not allowed here": "a list cannot begin here; put its first - on a line of its own",
    "sequence entries are not allowed here": "a list cannot begin here; put its first - on a line of its own",
    "'<stream end>'": "the text ends where a value is missing",
}
"""Sentences by what PyYAML says, first in the problem, then in the context."""


def _unclosed(error: yaml.MarkedYAMLError, lines: list[str]) -> tuple[Mark | None, str]:
    start = error.context_mark
    if start is None:
        return error.problem_mark, "brackets that are never closed"
    opening = lines[start.line][start.column : start.column + 1] if start.line < len(lines) else ""
    what = {"[": "a list whose ]", "{": "a group whose }"}.get(opening, "brackets of which the last")
    return start, f"{what} is missing, or a comma between two entries"
