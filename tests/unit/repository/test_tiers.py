"""Tiers: their budgets, what a change touches, and what holds for every test (tests/conftest.py)."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT, pace, tiers
from tests.support.tiers import Run

CLUSTER_TEST = ROOT / "tests/cluster/test_operator_node.py"
ROOMS = ("operator", "coordinator")


def run(tier: str, seconds: float, started: float = 0.0, pace: float = 1.0) -> Run:
    return Run(tier, started, seconds, passed=1, failed=0, skipped=0, pace=pace)


def test_a_tier_may_take_half_as_long_again_as_its_budget() -> None:
    budget = tiers.BUDGETS["check"]
    assert not tiers.is_over(run("check", 1.49 * budget))
    assert tiers.is_over(run("check", 1.51 * budget))
    assert "OVER" in tiers.verdict([run("check", 2 * budget)])[0]


def test_a_slow_machine_counts_as_slow_and_a_slow_tier_as_too_slow_on_any() -> None:
    budget = tiers.BUDGETS["test"]
    assert not tiers.is_over(run("test", 2.9 * budget, pace=2.0))
    assert tiers.is_over(run("test", 3.1 * budget, pace=2.0))
    assert "at pace 2.0" in tiers.verdict([run("test", budget, pace=2.0)])[0]


def test_a_pace_is_how_long_work_takes_and_never_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WORK", "pass")
    assert pace.pace() == 1.0
    monkeypatch.setattr(pace, "REFERENCE", 1e-6)
    assert pace.pace() > 100
    monkeypatch.setattr(pace, "WORK", "raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="has failed"):
        pace.pace()


def test_a_tier_is_not_judged_by_the_record_of_one_whose_name_begins_alike(tmp_path: Path) -> None:
    run("e2e", 1, started=2000.0).keep(tmp_path)
    run("e2e-full", 2, started=1000.0).keep(tmp_path)
    found = tiers.newest("e2e", tmp_path)
    assert found is not None
    assert found.tier == "e2e"


def test_the_newest_run_is_judged_and_only_some_are_kept(tmp_path: Path) -> None:
    for number in range(tiers.KEPT + 5):
        run("test", number, started=1000.0 * number).keep(tmp_path)
    assert len(list(tmp_path.iterdir())) == tiers.KEPT
    found = tiers.newest("test", tmp_path)
    assert found is not None
    assert found.seconds == tiers.KEPT + 4
    assert tiers.newest("check", tmp_path) is None


def test_which_rooms_a_change_reaches_follows_from_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    others = ("cli", "coordinator", "trainer", "evaluator", "operator")
    room = {"tandem": "core"} | {f"tandem_{name}": name for name in others}
    forbidden = {
        room[source]: {room[name] for name in contract["forbidden_modules"] if name in room}
        - {room[ignored.partition(" -> ")[2].partition(".")[0]] for ignored in contract.get("ignore_imports", ())}
        for contract in contracts
        for source in contract["source_modules"]
        if source in room
    }
    assert set(forbidden) == set(room.values())
    assert tiers.contracts(forbidden) == {name: tiers.REACH[name] for name in forbidden}


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("operator/tandem_operator/reconcile.py", True),
        ("core/tandem/job.py", True),
        ("evaluator/tandem_evaluator/loop.py", False),
        ("docs/operator.md", False),
        ("tests/cluster/test_operator_node.py", True),
        ("tests/cluster/test_kueue.py", False),
        ("tests/support/waiting.py", True),
        ("tests/support/cluster/machine/modules/kubernetes/go.mod", True),
        ("tests/support/cluster/kueue/module/go.mod", False),
        ("pyproject.toml", True),
    ],
)
def test_a_change_touches_tests_of_the_rooms_it_reaches_and_tests_made_of_it(changed: str, touched: bool) -> None:
    assert tiers.is_touched(CLUSTER_TEST, ROOMS, [changed]) is touched


def test_what_a_commit_unknown_to_this_clone_has_changed_is_not_known() -> None:
    assert tiers.changes_since("0" * 40) is None
    assert tiers.changes_since("") is None


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
