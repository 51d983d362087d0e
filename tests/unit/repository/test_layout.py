"""The rooms of the repository, and who may enter which."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

TRACKED = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
).stdout.split("\0")[:-1]
TEXTS = [name for name in TRACKED if Path(name).suffix in {".md", ".py", ".toml", ".yaml", ".yml", ".json", ".txt", ""}]

MACHINE_PATH = re.compile(r"(?<![\w$}./-])/(work|root|home|Users|mnt|opt)/[A-Za-z]")
REGISTRY = re.compile(
    r"\b(docker\.io|ghcr\.io|quay\.io|gcr\.io|registry\.k8s\.io|pypi\.org|nvcr\.io|[a-z0-9-]+\.azurecr\.io)/"
)


LIGHT = ("tandem_cli.main", "tandem_cli.commands.validate", "tandem.rundir.layout", "tandem.launch")


def test_operator_is_no_package_for_it_would_shadow_the_standard_librarys() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    command = [sys.executable, "-c", "import collections, operator; operator.itemgetter"]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=60)


def test_who_imports_whom_is_as_agreed() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout


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
    pattern = re.compile(r"^\s*(?:from|import) tests\.(?!support\b|soak\b)", re.MULTILINE)
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
