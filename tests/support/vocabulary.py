"""The project's language: names that no identifier may have, and docstrings that begin with what the thing is or does.

    python -m tests.support.vocabulary operator    every offence in a room: file, line, name or first words

Readers know PyTorch, Kubernetes and Prometheus, and look for the names that these use. Words such as `told`, `heard`,
`kept` name an event of a story instead of a value: `reported`, `snapshot`, `train_state` name the value. Only bindings
count (definitions, arguments, assignments), so a field of somebody else's API is free.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support import ROOT

ROOMS = ("core", "coordinator", "trainer", "evaluator", "operator", "cli", "launcher", "benchmarks", "tools")
_PARTS = "told heard kept said asked ours theirs mine wished begun most least lacking lacks fallen giving whom"
PARTS = frozenset(_PARTS.split())
"""Parts of a name (between underscores) that are banned wherever they stand in it."""
_WHOLE = (
    "one found why what who whose there here where at of to rest given known named shown seen aside made taken drawn "
    "learned settled gone counted spent listed moved apart thing things away again some each others whole near held "
    "left left_out left_over say beside at_once going_on added_up fed over began words wanted look look_at"
)
WHOLE = frozenset(_WHOLE.split())
"""Names that are banned as a whole, with or without an underscore before them."""
_FIRST_WORDS = (
    "of that which what who whose whom where when while how why for from to in on at by with without under over after "
    "before until since as if because than so such beside besides between among within the same it they these those "
    "nothing nobody"
)
FIRST_WORDS = frozenset(_FIRST_WORDS.split())
"""Words that no docstring begins with. ("The …" is fine: `the same` is told apart below.)"""


@dataclass(frozen=True)
class Offence:
    """One place that does not speak the field's language.

    Args:
        what: `name` or `docstring`.
        text: the name, or the docstring's first line.
    """

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.kind}: {self.text}"


def offences(room: str) -> list[Offence]:
    """All offences in the product code of a room."""
    return [each for path in sorted((ROOT / room).rglob("*.py")) for each in of_file(path)]


def of_file(path: Path) -> list[Offence]:
    names = [Offence(path, line, "name", name) for name, line in _bindings(path) if is_banned(name)]
    texts = [Offence(path, line, "docstring", text) for text, line in _docstrings(path) if is_riddle(text)]
    return sorted(names + texts, key=lambda each: each.line)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a module, flat."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def is_banned(name: str) -> bool:
    """Whether no identifier may have this name."""
    bare = name.strip("_").lower()
    return bare in WHOLE or bool(PARTS.intersection(bare.split("_")))


def is_riddle(text: str) -> bool:
    """Whether a docstring begins with a preposition or a relative word."""
    words = text.lower().split(maxsplit=2)
    if not words:
        return False
    first = words[0].strip("`,.:;(")
    return (first in FIRST_WORDS and first != "the") or words[:2] == ["the", "same"]


def _bindings(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case _:
                pass


def _docstrings(path: Path) -> Iterator[tuple[str, int]]:
    """Docstrings of modules, classes, functions, and those that stand under an assignment."""
    for node in nodes(path):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)) if before is None or isinstance(
                    before, ast.Assign | ast.AnnAssign
                ):
                    yield next(iter(text.strip().splitlines()), ""), statement.lineno
                case _:
                    pass


def main(rooms: list[str]) -> int:
    """Print the offences of rooms, or the counts of all of them."""
    for room in rooms or ROOMS:
        listed = offences(room)
        if rooms:
            print(*listed, sep="\n")
        counts = {kind: sum(each.kind == kind for each in listed) for kind in ("name", "docstring")}
        print(f"{room}: {counts['name']} names, {counts['docstring']} docstrings")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
