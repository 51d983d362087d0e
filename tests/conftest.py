"""What holds for every test, whatever its tier: signals, random choices, the order of files, skips, durations."""

import gc
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Before torch is imported, here and in all processes that inherit it. Several runs share few cores, and at the end of
# each kernel OpenMP's threads spin for one that has no core: three runs beside each other took 400 s, and 230 s so.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests.support import reach, tiers
from tests.support.cluster import ELSEWHERE
from tests.support.pace import pace

# Drawn anew at each run, a failure would come and go. `--hypothesis-profile=random` is for the soak and the full tier.
# Each says `derandomize`: Hypothesis has another default in CI.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", derandomize=False, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fixed")

# A shell ignores SIGINT for what it starts in the background, nohup ignores SIGHUP, and both are inherited: no process
# that a test starts could then be interrupted. A handler, unlike SIG_IGN, ends with `exec`.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

LONGEST_FIRST = (
    *("test_documents", "test_session_regroup", "test_session", "test_trainer", "test_sweep", "test_bucket_commands"),
    *("test_warm", "test_coordinator", "test_strategies", "test_cluster_commands", "test_end", "test_rendezvous"),
    *("test_trace", "test_run_screen", "test_evaluator_program", "test_code", "test_client"),
    *("test_checkpoints_command", "test_regroup", "test_pods_without_a_volume", "test_run", "test_checkpoint_faults"),
    *("test_same_meaning", "test_log", "test_agreement", "test_validate", "test_debug", "test_plan", "test_goodput"),
    *("test_operator_troubles", "test_operator_faults", "test_signals", "test_chart", "test_hostile_objects"),
)
"""Files that take long. Workers take files in this order, so that all of them end at about the same time."""
DESELECTED = pytest.StashKey[int]()
"""How many tests the change does not reach."""
NO_GPU = "tests/gpu/"
"""Tests that are skipped on most machines, and say so."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tandem")
    group.addoption("--tier", help="write down how long this tier took, in runs/tests")
    group.addoption("--began", type=float, help="when the tier began, in Unix time, if that was before pytest")
    group.addoption(
        "--touched-since",
        metavar="COMMIT",
        help="only the tests that the changes since COMMIT reach, and those marked smoke",
    )


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes are named by their length: made anew by each worker, they may differ (gzip writes the second into them),
    and two workers that know a test by two names refuse to begin."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "full(*rooms): in the full tier alone; a change of one of the rooms makes it necessary again"
    )
    config.addinivalue_line(
        "markers", "gate(*tests): in the gate and not in `make test`, where these tests prove the same with less"
    )
    config.addinivalue_line("markers", "smoke: proves for its tier that a job trains at all; runs whatever changed")
    config.addinivalue_line("markers", "property: a Hypothesis test (set by itself)")
    config.addinivalue_line("markers", "alone: on the cluster, nothing else may run beside it")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config), "tandem-record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
    if (commit := config.getoption("--touched-since")) is not None:
        _keep_touched(config, items, commit)

    def turn(item: pytest.Item) -> tuple[int, str]:
        name = item.path.stem
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST), str(item.path)

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collections, which take a quarter of the time while modules are imported, and find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Rarely afterwards, too: collections were a tenth of the unit tests' time.
        gc.set_threshold(200_000, 20, 100)
        gc.enable()


def _keep_touched(config: pytest.Config, items: list[pytest.Item], commit: str) -> None:
    files = reach.changed_files(commit)
    if files is None:
        return
    change = reach.Change(files)
    verdicts: dict[tuple[Path, tuple[str, ...] | None], bool] = {}
    selected, deselected = [], []
    for item in items:
        mark = item.get_closest_marker("full")
        key = item.path, mark.args if mark else None
        if key not in verdicts:
            verdicts[key] = change.touches(*key)
        (selected if verdicts[key] or item.get_closest_marker("smoke") else deselected).append(item)
    if deselected:
        config.stash[DESELECTED] = len(deselected)
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that keeps the record how many tests it has left out; each collects all of them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(DESELECTED, 0)


class Record:
    """Keeps how long tests took, and fails a run in CI that has skipped any."""

    def __init__(self, config: pytest.Config) -> None:
        self._tier: str | None = config.getoption("--tier")
        self._began: float = config.getoption("--began") or time.time()
        looked = time.time()
        self._pace = pace() if self._tier else 1.0
        self._began_but_for_that = self._began + (time.time() - looked)
        self._outcomes = Counter[str]()
        self._tests: defaultdict[str, float] = defaultdict(float)
        self._skipped: list[str] = []
        self._deselected = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        if report.skipped and not report.nodeid.startswith(NO_GPU):
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            if not reason.endswith(ELSEWHERE):
                self._skipped.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._deselected = max(self._deselected, getattr(node, "workeroutput", {}).get("deselected", 0))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._skipped and os.environ.get("CI") == "true" and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._tier:
            self._run(session.config.stash.get(DESELECTED, 0)).save()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._skipped and os.environ.get("CI") == "true":
            terminalreporter.section("skipped, though in CI nothing may be", red=True)
            terminalreporter.write_line("\n".join(self._skipped))

    def _run(self, deselected: int) -> tiers.Run:
        files: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self._tests.items():
            files[name.partition("::")[0]] += seconds
        took = time.time() - self._began_but_for_that
        return tiers.Run(
            tier=self._tier or "",
            started=self._began,
            seconds=round(took, 1),
            passed=self._outcomes["passed"],
            failed=self._outcomes["failed"],
            skipped=self._outcomes["skipped"],
            deselected=max(self._deselected, deselected),
            pace=round((self._pace + pace()) / 2, 2),
            files=_longest(files, 300),
            slowest=_longest(self._tests, 60),
        )


def _longest(seconds: dict[str, float], most: int) -> dict[str, float]:
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return {name: round(value, 2) for name, value in ordered[:most]}
