"""The rooms of the repository, and who may enter which."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.support import ROOT
from tests.support.reach import PACKAGES

TRACKED = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
).stdout.split("\0")[:-1]
TEXTS = [name for name in TRACKED if Path(name).suffix in {".md", ".py", ".toml", ".yaml", ".yml", ".json", ".txt", ""}]

MACHINE_PATH = re.compile(r"(?<![\w$}./-])/(work|root|home|Users|mnt|opt)/[A-Za-z]")
REGISTRY = re.compile(
    r"\b(docker\.io|ghcr\.io|quay\.io|gcr\.io|registry\.k8s\.io|pypi\.org|nvcr\.io|[a-z0-9-]+\.azurecr\.io)/"
)


LIGHT = ("tandem_cli.main", "tandem_cli.commands.validate", "tandem.rundir.layout", "tandem.processes.launch")


def test_operator_is_no_package_for_it_would_shadow_the_standard_librarys() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    command = [sys.executable, "-c", "import collections, operator; operator.itemgetter"]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=60)


def test_who_imports_whom_is_as_agreed() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count, too; those for type checkers alone do not."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    # A circle is an error with the names of its modules.
    assert set(TopologicalSorter(imports).static_order()) == graph.modules


@pytest.mark.parametrize("module", LIGHT)
def test_what_is_started_often_loads_nothing_heavy(module: str) -> None:
    heavy = {"torch", "numpy", "matplotlib", "kopf", "kubernetes", "aiohttp"}
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for name in TEXTS:
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{name}:{number}: {line.strip()}")
    return found


def test_no_file_names_a_path_of_one_machine() -> None:
    assert lines_that_match(MACHINE_PATH) == []
    assert MACHINE_PATH.search("see /home/someone/x")


def test_no_file_names_a_registry() -> None:
    assert lines_that_match(REGISTRY) == []
    assert REGISTRY.search("image: ghcr.io/someone/trainer:1")


def test_modules_are_small_enough_to_be_read() -> None:
    modules = [name for name in TRACKED if name.endswith(".py") and (ROOT / name).is_file()]
    long = [name for name in modules if len((ROOT / name).read_text(encoding="utf-8").splitlines()) > 700]
    assert long == []


def test_no_test_imports_another() -> None:
    tests = [name for name in TRACKED if re.fullmatch(r"tests/.*/test_\w+\.py", name) and (ROOT / name).is_file()]
    pattern = re.compile(r"^\s*(?:from|import) tests\.(?!support\b|soak\b|full\b)", re.MULTILINE)
    assert [name for name in tests if pattern.search((ROOT / name).read_text(encoding="utf-8"))] == []


def test_what_tests_share_imports_no_test() -> None:
    shared = [name for name in TRACKED if name.startswith("tests/support/") and name.endswith(".py")]
    pattern = re.compile(r"^\s*(?:from|import) (?:tests\.(?:unit|integration|cluster)|benchmarks)\b", re.MULTILINE)
    assert [name for name in shared if (ROOT / name).is_file() and pattern.search((ROOT / name).read_text())] == []


def test_each_folder_of_unit_tests_is_named_after_a_room() -> None:
    rooms = {name.partition("/")[0] for name in TRACKED if "/" in name} | {"repository"}
    folders = {Path(name).parts[2] for name in TRACKED if name.startswith("tests/unit/") and name.count("/") > 2}
    assert folders <= rooms
    assert not [name for name in TRACKED if re.fullmatch(r"tests/unit/test_\w+\.py", name) and (ROOT / name).is_file()]


ROOMS = ("core", "cli", "launcher", "coordinator", "trainer", "evaluator", "operator")
TOPICS = {
    "benchmarks/soak_verdict": "the soak is in tests/soak",
    "cli/secrecy": "secrets are hidden by core, the command line and the coordinator together",
    "coordinator/same_numbers": "compares what the screen, the page, the report and the metrics show",
    "tools/generated": "compares the files that all tools generate",
}
"""Unit tests that are named after no module, and why."""


def names_of_modules(room: str) -> set[str]:
    """How a test may call a module or package of a room: its name, with or without those of the packages around it."""
    found = set()
    for name in TRACKED:
        if name.startswith(f"{room}/") and name.endswith(".py"):
            parts = [part.strip("_") for part in Path(name).with_suffix("").parts]
            ends = {len(parts), len(parts) - 1}
            found |= {"_".join(parts[begin:end]) for end in ends for begin in range(1, end)}
    return found


@pytest.mark.parametrize("room", [*ROOMS, "benchmarks", "tools"])
def test_each_unit_test_is_named_after_a_module_or_package_of_its_room(room: str) -> None:
    """As `test_MODULE.py` or `test_MODULE_topic.py`."""
    modules = names_of_modules(room)
    tests = {found[1] for name in TRACKED if (found := re.fullmatch(rf"tests/unit/{room}/test_(\w+)\.py", name))}
    named = {test for test in tests if any(f"{test}_".startswith(f"{module}_") for module in modules)}
    assert tests - named == {topic.partition("/")[2] for topic in TOPICS if topic.startswith(f"{room}/")}


def test_one_function_alone_starts_modules() -> None:
    """`tandem.processes.launch.module_command`. Any other command looks for modules in the working folder first, and
    takes the user's `random.py` for Python's."""
    found = [
        f"{name}:{node.lineno}"
        for name in TRACKED
        if name.startswith(ROOMS) and name.endswith(".py") and (ROOT / name).is_file()
        for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8")))
        if isinstance(node, ast.List | ast.Tuple) and _starts_a_module([ast.unparse(part) for part in node.elts])
    ]
    assert not found


def _starts_a_module(words: list[str]) -> bool:
    """Whether the elements of a list are a command with a module of a known name, or this Python with any module."""
    if "'-m'" not in words:
        return False
    before, after = words[: words.index("'-m'")], words[words.index("'-m'") + 1 :]
    return "sys.executable" in before or bool(after and re.match(r"'\w", after[0]))


LISTED = re.compile(r"^(?:    )?([a-z0-9_]+(?:\.[a-z]+)?)/?  +\S", re.MULTILINE)
"""A line of a package's docstring that says what a module of it is."""


def packages_with_lists() -> dict[str, set[str]]:
    """Packages whose docstring lists their modules, each with the names in that list."""
    found = {}
    for name in TRACKED:
        if name.startswith(ROOMS) and name.endswith("/__init__.py"):
            described = ast.get_docstring(ast.parse((ROOT / name).read_text("utf-8")), clean=False) or ""
            if listed := set(LISTED.findall(described)):
                found[str(Path(name).parent)] = listed
    return found


@pytest.mark.parametrize(("package", "listed"), packages_with_lists().items())
def test_the_list_of_a_packages_modules_is_complete(package: str, listed: set[str]) -> None:
    inside = [Path(name).relative_to(package) for name in TRACKED if Path(name).is_relative_to(package)]
    modules = {path.stem for path in inside if len(path.parts) == 1 and path.suffix == ".py"}
    folders = {path.parts[0] for path in inside if len(path.parts) > 1}
    others = {path.name for path in inside if len(path.parts) == 1 and path.suffix != ".py"}
    assert {name for name in modules if not name.startswith("__")} | folders <= listed | others
    assert listed <= modules | folders | others


def test_packages_with_lists_are_found() -> None:
    assert {"core/tandem/rundir", "launcher/tandem_launcher/local"} <= packages_with_lists().keys()
