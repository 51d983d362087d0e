"""Tiers: their budgets and records, and what holds for every test (tests/conftest.py)."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, pace, tiers
from tests.support.tiers import Run, Stage, table


def run(tier: str, seconds: float, started: float = 0.0, pace: float = 1.0, **more: int) -> Run:
    return Run(tier, started, seconds, **{"passed": 1, "failed": 0, "skipped": 0, **more}, pace=pace)


def test_a_budget_warns_at_the_pace_of_the_machine_and_fails_nothing() -> None:
    budget = tiers.BUDGETS["check"]
    quick, slow = run("check", 0.9 * budget), run("check", 1.5 * budget)
    slow_machine = run("check", 1.5 * budget, pace=2.0)
    assert "OVER" not in Stage("unit", 1, 0, quick).row[-1]
    assert Stage("unit", 1, 0, slow).row[-1] == "passed, OVER ITS BUDGET 1.5 times"
    assert "OVER" not in Stage("unit", 1, 0, slow_machine).row[-1]


def test_the_table_has_a_row_for_each_stage_and_says_what_failed() -> None:
    chosen = run("check", 60.0, passed=30, failed=2, deselected=68)
    lines = table(
        [Stage("setup", 30, 0), Stage("unit", 66, 1, chosen), Stage("SLURM", 0, 0, note="nothing")]
    ).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["stage", "setup", "unit", "SLURM", "all"]
    assert "32 of 100" in lines[2]
    assert "1.0 of 3.0" in lines[2]
    assert lines[2].rstrip().endswith("FAILED")
    assert lines[3].rstrip().endswith("passed, nothing")
    assert lines[4].split() == ["all", "1.6", "FAILED"]


def test_a_pace_is_how_long_work_takes_and_never_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WORK", "pass")
    assert pace.pace() == 1.0
    monkeypatch.setattr(pace, "REFERENCE", 1e-6)
    assert pace.pace() > 100
    monkeypatch.setattr(pace, "WORK", "raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="has failed"):
        pace.pace()


def test_a_tier_is_not_judged_by_the_record_of_one_whose_name_begins_alike(tmp_path: Path) -> None:
    run("e2e", 1, started=2000.0).save(tmp_path)
    run("e2e-full", 2, started=1000.0).save(tmp_path)
    assert tiers.newest("e2e", folder=tmp_path).tier == "e2e"


def test_the_newest_run_is_judged_and_only_some_are_kept(tmp_path: Path) -> None:
    for number in range(tiers.MAX_RECORDS + 5):
        run("test", number, started=1000.0 * number).save(tmp_path)
    assert len(list(tmp_path.iterdir())) == tiers.MAX_RECORDS
    assert tiers.newest("test", folder=tmp_path).seconds == tiers.MAX_RECORDS + 4
    assert tiers.newest("check", folder=tmp_path) is None


@pytest.fixture
def pytest_on(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """pytest with the settings of tests/conftest.py, on a test of this text."""

    def called(text: str, *options: str, ignoring: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options]

        def ignore() -> None:
            if ignoring:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            [*command, str(tmp_path / "test_it.py")],
            cwd=ROOT,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=ignore,
        )

    return called


SKIPS = "import pytest\ndef test_it(): pytest.skip('no reason at all')\n"


def test_a_skip_fails_in_ci_and_only_there(pytest_on: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert pytest_on(SKIPS, CI="").returncode == 0
    in_ci = pytest_on(SKIPS, CI="true")
    assert in_ci.returncode == 1
    assert "test_it: Skipped: no reason at all" in in_ci.stdout


def test_processes_of_tests_can_be_interrupted_though_the_shell_ignored_it(
    pytest_on: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    text = """
import signal, subprocess, sys
SHOWN = "import signal; print(signal.getsignal(signal.SIGINT).__name__, int(signal.getsignal(signal.SIGHUP)))"
def test_it():
    shown = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True).stdout
    assert shown == "default_int_handler 0\\n"
"""
    result = pytest_on(text, ignoring=True)
    assert result.returncode == 0, result.stdout


def test_random_examples_are_the_same_in_each_run(pytest_on: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    text = """
from hypothesis import given, settings, strategies as st
@settings(max_examples=5)
@given(st.integers())
def test_it(number): print("drawn", number)
"""

    def drawn(*options: str, **environment: str) -> list[str]:
        said = pytest_on(text, "-s", *options, **{"CI": "", **environment}).stdout
        return [line for line in said.splitlines() if "drawn" in line]

    first = drawn()
    assert len(first) == 5
    assert drawn() == first
    assert any(drawn("--hypothesis-profile=random") != first for _ in range(5))
    # Where Hypothesis knows that it is in CI, too.
    assert drawn(CI="true") == first
    assert any(drawn("--hypothesis-profile=random", CI="true") != first for _ in range(5))


def _marks(decorators: list[ast.expr]) -> set[str]:
    """Names of the marks of a function; of parameters there may be others without one."""
    called = (one.func if isinstance(one, ast.Call) else one for one in decorators)
    return {name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "").lower() for name in called}


def _proofs(path: Path) -> Iterator[str]:
    """The tests that `gate` marks of a file name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "gate":
            assert node.args, f"{path}: what proves it in `make test`?"
            for argument in node.args:
                assert isinstance(argument, ast.Constant), path
                yield str(argument.value)


def test_what_runs_in_the_gate_alone_names_tests_of_make_test_that_prove_the_same() -> None:
    named = {name for path in (ROOT / "tests" / "integration").glob("test_*.py") for name in _proofs(path)}
    assert named
    for name in named:
        file, _, test = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test.rpartition("::")[2] in functions, f"there is no {name}"
        assert not _marks(functions[test.rpartition("::")[2]].decorator_list) & {"full", "gate", "all"}, name
