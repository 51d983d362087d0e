"""The words of the code: names that the field knows, and docstrings and documents that name only what exists."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT, vocabulary
from tests.support.reach import PACKAGES

ALLOWED = {
    "core": 35,
    "coordinator": 9,
    "trainer": 8,
    "evaluator": 1,
    "operator": 3,
    "cli": 12,
    "launcher": 2,
    "benchmarks": 4,
    "tools": 0,
}
"""How many names of a room may still be in the old dialect, most because they are written to disk. These numbers only
become smaller."""
DOTTED = re.compile(r"(?<![\w./@:-])(tandem(?:_[a-z]+)?(?:\.\w+)+)(?![\w/-]|\.\w)")
"""A module of Tandem, or what stands in it, as texts name it."""
NOT_MODULES = re.compile(
    r"tandem\.(dev|coordinator|operator|agent|slurm|log|pausing|cache|yaml|svg|png|idx"
    r"|id|job|checkpoint|step|generation|digest)$"
)
"""Loggers, the API group, the functions of a script, files, tags of an MLflow run."""
QUOTED = re.compile(r"`([a-z]+(?:_[a-z0-9]+)+)(?:\(\))?`|`([A-Z]\w*[a-z]\w*\.\w+)(?:\(\))?`")
"""`snake_case` and `Class.attribute` in a docstring or comment: names that somebody could look for."""
COMMENT = re.compile(r"(?:^|  )# .*$", re.MULTILINE)
FOREIGN = frozenset({"sched_runtime", "preexec_fn", "is_shard"})
"""Names of Linux, Python and torch that no code here uses."""


@pytest.mark.parametrize("room", vocabulary.ROOMS)
def test_the_dialect_does_not_grow(room: str) -> None:
    offences = vocabulary.offences(room)
    names = [offence for offence in offences if offence.kind == "name"]
    docstrings = [offence for offence in offences if offence.kind == "docstring"]
    assert not docstrings, "\n".join(map(str, docstrings))
    assert len(names) <= ALLOWED[room], "\n".join(map(str, names))


def test_texts_name_modules_that_exist() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = [(path, text) for path in sources() for text in texts_of(path)]
    texts += [(page, page.read_text(encoding="utf-8")) for page in pages]
    lost = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts
        for name in DOTTED.findall(text)
        if not NOT_MODULES.match(name) and not exists(name)
    ]
    assert not lost, "\n".join(lost)


def test_docstrings_and_comments_name_functions_and_fields_that_exist() -> None:
    lost = []
    for path in sources():
        for text in texts_of(path):
            for snake, attribute in QUOTED.findall(text):
                parts = (attribute or snake).split(".")
                if not identifiers().union(FOREIGN).issuperset(parts):
                    lost.append(f"{path.relative_to(ROOT)}: {attribute or snake}")
    assert not lost, "\n".join(lost)


def test_docstrings_explain_arguments_that_exist() -> None:
    lost = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {name}"
        for path in sources()
        for node in vocabulary.nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name in explained(ast.get_docstring(node) or "")
        if name not in arguments(node)
    ]
    assert not lost, "\n".join(lost)


def test_docstrings_name_exceptions_that_exist() -> None:
    lost = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for text in texts_of(path)
        for line in raised(text)
        for name in line
        if name not in identifiers() and not hasattr(builtins, name)
    ]
    assert not lost, "\n".join(lost)


@cache
def sources() -> tuple[Path, ...]:
    """The product's modules."""
    return tuple(path for room in vocabulary.ROOMS for path in sorted((ROOT / room).rglob("*.py")))


@cache
def texts_of(path: Path) -> tuple[str, ...]:
    """The comments and docstrings of a module."""
    comments = COMMENT.findall(path.read_text(encoding="utf-8"))
    strings = [
        node.value.value
        for node in vocabulary.nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return (*comments, *strings)


@cache
def identifiers() -> frozenset[str]:
    """Every name that stands in code of this repository outside of docstrings and comments, also in strings."""
    found = {path.stem for path in sources()}
    others = [path for room in ("tests", "examples", "charts", "images") for path in sorted((ROOT / room).rglob("*"))]
    for path in sources():
        found |= names_in(path)
    for path in others:
        if path.is_file() and path.suffix in {".yaml", ".tpl", ".json", ".js", ".Dockerfile", ""}:
            found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(found)


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
            yield from name.split(".")
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str() as name):
            yield name
        case ast.Assign(value=ast.Constant(value=str() as text)) | ast.Constant(value=str() as text):
            if len(text) < 200:
                yield from re.findall(r"\w+", text)
        case _:
            pass


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something that is defined in one."""
    first, *rest = name.split(".")
    folder = ROOT / PACKAGES.get(first, "nowhere") / first
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    module = folder / "__init__.py"
    if rest and (folder / f"{rest[0]}.py").exists():
        module = folder / f"{rest.pop(0)}.py"
    if not module.exists():
        return False
    return not rest or rest[0] in names_in(module)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Every name that stands in the code of a module, also in strings."""
    return frozenset(name for node in vocabulary.nodes(path) for name in _names(node))


def explained(docstring: str) -> list[str]:
    """The names under `Args:`."""
    _, colon, section = docstring.partition("\nArgs:\n")
    lines = section.split("\n\n")[0].splitlines() if colon else []
    return [match[1] for line in lines if (match := re.match(r" {4}\*{0,2}(\w+):", line))]


def raised(docstring: str) -> list[list[str]]:
    """The names under `Raises:`, by line."""
    _, colon, section = docstring.partition("Raises:\n")
    lines = section.split("\n\n")[0].splitlines() if colon else []
    return [
        re.findall(r"\w+", match[1]) for line in lines if (match := re.match(r" +((?:[A-Z]\w+, )*[A-Z]\w+):", line))
    ]


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """The parameters of a function; of a class those of its constructor, and its fields."""
    if isinstance(node, ast.ClassDef):
        fields = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        made = [arguments(item) for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return fields.union(*made) if made or not node.bases else fields | explained_elsewhere(node)
    every = node.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs]
    return {arg.arg for arg in (*named, *filter(None, (every.vararg, every.kwarg)))}


def explained_elsewhere(node: ast.ClassDef) -> set[str]:
    """A class that takes its constructor from another one explains that one's arguments."""
    return set(explained(ast.get_docstring(node) or "")) if not node.body[1:] else set()


def test_a_public_class_name_stands_once_in_the_product() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        if path.is_relative_to(ROOT / "benchmarks") or path.is_relative_to(ROOT / "tools"):
            continue
        for node in vocabulary.nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
