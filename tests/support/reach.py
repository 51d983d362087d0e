"""Which tests a change makes necessary again.

A test runs again when the change touches a file that the test is made of (its own file, its `conftest.py`, what it uses
of `tests/support`), or when the change *reaches* code that the test runs:

- The import graph of the product says which modules a changed module reaches: those that import it, directly or not.
  It is the graph that import-linter checks. A file that is no module, such as a template or a deleted module, reaches
  whatever imports its package.
- A test runs the modules that it and its support import, and all code of the rooms whose processes they start. Who
  starts processes of which rooms stands in `STARTS`, once for each piece of support; a mark names more, or all of them
  for a test of the full tier: `pytest.mark.full("operator", "charts")`.

A test whose code cannot be told so runs always: those of the repository itself, and those marked `smoke`, which prove
for each tier that a job trains at all.

Rejected: choosing by coverage (a recovery that is never reached on a good day is covered by nothing); a table of rooms
that reach each other (a change of `tandem.slurm` would run the operator's tests, which cannot see it); marks on every
file (115 of them, each of which can be forgotten; a new file here gets the rooms of what it uses).
"""

import ast
import subprocess
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import grimp

from tests.support import ROOT, SCRIPTS

PACKAGES = {
    "tandem": "core",
    "tandem_cli": "cli",
    "tandem_launcher": "launcher",
    "tandem_coordinator": "coordinator",
    "tandem_trainer": "trainer",
    "tandem_evaluator": "evaluator",
    "tandem_operator": "operator",
}
"""The room of each package: a package `p` lies in `ROOM/p`."""
LOCAL = frozenset({"cli", "launcher", "coordinator", "trainer", "evaluator"})
"""Rooms whose processes `tandem run` starts."""
CLUSTER = frozenset({"operator", "coordinator", "trainer", "evaluator", "charts", "images"})
"""Rooms whose processes a job on a cluster consists of, and what they are installed with."""
STARTS = {
    "tests.support.cluster.helm": frozenset({"charts"}),
    "tests.support.cluster.images": CLUSTER - {"charts"},
    "tests.support.cluster.kueue": CLUSTER,
    "tests.support.cluster.operated": CLUSTER,
    "tests.support.cluster.prometheus": frozenset({"charts", "operator", "coordinator"}),
    "tests.support.coordinator_process": frozenset({"coordinator"}),
    "tests.support.elastic": frozenset({"coordinator", "trainer"}),
    "tests.support.evaluator_run": frozenset({"evaluator", "trainer"}),
    "tests.support.local_run": LOCAL,
    "tests.support.previous": LOCAL,
    "tests.support.processes": frozenset({"cli", "launcher"}),
    "tests.support.ranks": frozenset({"trainer"}),
    "tests.support.recording": LOCAL,
    "tests.support.slurm.run": LOCAL,
    "tests.support.warm": frozenset({"trainer"}),
    "tests.support.warm_run": LOCAL,
}
"""Rooms of which a piece of test support starts processes; a test that uses it runs all of their code."""
TREES = ("charts", "images", "examples", "tools", "benchmarks", "docs")
"""Folders without a package of the product; each reaches the tests that name it, and those in `tests/unit/FOLDER`."""
PAGES = ("README.md",)
"""Pages in the root; each reaches the tests that name it."""
ALWAYS = ("tests/unit/repository",)
MAX_NAME_LENGTH = 80
EVERYTHING = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/support/zygote.txt")
"""Files that touch every test."""


def base() -> str:
    """The commit since which a change is judged: the newest that passed CI, as `.ci/since` records it."""
    return (ROOT / ".ci" / "since").read_text(encoding="utf-8").split()[0]


def changed_files(commit: str) -> list[str] | None:
    """Names of the files that differ from a commit, relative to the repository; None if this clone does not know it."""
    ancestor = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    if not commit or subprocess.run(ancestor, cwd=ROOT, capture_output=True, timeout=60).returncode != 0:
        return None
    names = []
    for command in (["diff", "--no-renames", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"]):
        listed = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        names += listed.stdout.splitlines()
    return sorted(set(names))


class Change:
    """A set of changed files, and all that it reaches."""

    def __init__(self, files: Collection[str]) -> None:
        self.files = frozenset(files)
        self.modules = frozenset().union(*(_downstream(name) for name in self.files))
        """Modules of the product that changed or import, directly or not, one that did."""
        trees = {name.partition("/")[0] for name in self.files} & {*TREES, *PAGES}
        self.rooms = {PACKAGES[module.partition(".")[0]] for module in self.modules} | trees

    def touches(self, path: Path, marked: Collection[str] | None = None) -> bool:
        """Whether the tests of a file have to run again.

        Args:
            path: the test file.
            marked: rooms that a mark names for the test; they replace what `STARTS` says of its support.
        """
        if not self.files:
            return False
        name = path.relative_to(ROOT).as_posix()
        if self.files.intersection(EVERYTHING) or name.startswith(ALWAYS):
            return True
        parts = imported(path)
        if self._changes_one_of(parts):
            return True
        folder = path.parent.name if path.parent.parent.name == "unit" else ""
        rooms = {folder} | _trees(parts) | (started(parts) if marked is None else set(marked))
        return not self.rooms.isdisjoint(rooms) or not self.modules.isdisjoint(_product_modules(parts))

    def _changes_one_of(self, parts: Collection[Path]) -> bool:
        names = {part.relative_to(ROOT).as_posix() for part in parts}
        # What lies beside the code of a package of tests, such as pins of Go modules, belongs to the package.
        packages = {part.parent for part in parts if part.name == "__init__.py"}
        folders = tuple(
            f"{package.relative_to(ROOT).as_posix()}/"
            for package in packages
            if not any(package.glob("*/__init__.py")) and package.parent.name != "tests"
        )
        return any(name in names or (folders and name.startswith(folders)) for name in self.files)


def imported(path: Path) -> frozenset[Path]:
    """The files of tests, benchmarks and tools that a test file is made of: itself, its fixtures, their imports."""
    found: set[Path] = set()
    left = [path]
    conftest = path.with_name("conftest.py")
    if conftest.is_file():
        found.add(conftest)
        left += _parts(_fixture_names(path, conftest))
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _parts(_names(file))
    return frozenset(found)


def started(parts: Collection[Path]) -> set[str]:
    """Rooms of which the files that a test is made of start processes."""
    names = {_module_name(part) for part in parts}
    return set().union(*(rooms for module, rooms in STARTS.items() if module in names))


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def _downstream(name: str) -> frozenset[str]:
    """The modules that a changed file reaches; none if it lies in no package of the product."""
    room, *parts = Path(name).with_suffix("").parts
    if not parts or PACKAGES.get(parts[0]) != room:
        return frozenset()
    graph = _graph()
    module = ".".join(parts).removesuffix(".__init__")
    if name.endswith(".py") and module in graph.modules:
        return frozenset({module} | graph.find_downstream_modules(module))
    while module not in graph.modules:
        module = module.rpartition(".")[0]
    inside = {module} | graph.find_descendants(module)
    return frozenset(inside | graph.find_downstream_modules(module, as_package=True))


def _product_modules(parts: Collection[Path]) -> set[str]:
    """Modules of the product that files of tests import, or name as a program, such as `"tandem_trainer.agent"`."""
    return {name for part in parts for name in _names(part) if name in _graph().modules}


def _trees(parts: Collection[Path]) -> set[str]:
    """Folders without a package that files of tests name, as in `ROOT / "examples"` and `"charts/tandem"`."""
    return {name.partition("/")[0] for part in parts for name in _names(part)} & {*TREES, *PAGES}


def _fixture_names(test: Path, conftest: Path) -> set[str]:
    """What those functions of a `conftest.py` import that a test gets its fixtures from, and its hooks."""
    tree = ast.parse(conftest.read_text(encoding="utf-8"))
    modules = {
        alias.asname or alias.name: {node.module, f"{node.module}.{alias.name}"}
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    left = {node.arg for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))) if isinstance(node, ast.arg)}
    left |= _names(test) | {name for name in functions if name.startswith("pytest_")}
    left &= set(functions)
    names: set[str] = set()
    done: set[str] = set()
    while left:
        done.add(function := left.pop())
        used = {node.id for node in ast.walk(functions[function]) if isinstance(node, ast.Name)}
        used |= {argument.arg for argument in functions[function].args.args}
        names = names.union(*(modules[name] for name in used & set(modules)))
        left |= used & set(functions) - done
    return names


def _parts(names: Collection[str]) -> Iterator[Path]:
    for name in names:
        if name.partition(".")[0] in ("tests", "benchmarks", "tools"):
            place = ROOT / name.replace(".", "/")
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
        elif name.endswith(".py") and (SCRIPTS / name).is_file():
            yield SCRIPTS / name


@cache
def _names(path: Path) -> frozenset[str]:
    """Every dotted name that a file imports, and every string in it that may name a module, a folder or a script."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < MAX_NAME_LENGTH:
            names.add(node.value)
    return frozenset(names)
