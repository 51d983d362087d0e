"""The rules whose mutations are played stand where the list says, and so do their tests."""

from pathlib import Path

import pytest

from tests.support import ROOT, mutations
from tests.support.mutations import MUTATIONS, Mutation, run_tests, selections
from tests.support.waiting import until


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_the_rule_and_its_tests_are_there(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.before != mutation.after
    files = [word for word in mutation.tests.split() if word.endswith(".py")]
    assert files
    assert all((ROOT / Path(word)).is_file() for word in files)


def test_each_mutation_has_a_name_of_its_own() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_without_a_mutation_each_file_runs_once() -> None:
    tests = ("a.py b.py", "b.py -k x", "c.py -k x", "c.py -k y", "c.py -k x")
    chosen = [Mutation("", "", "", "", words) for words in tests]
    assert selections(chosen) == ["a.py", "b.py", "c.py -k 'x or y'"]


HANGS = """
import pathlib, subprocess, time

def test_hangs():
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("child").write_text(str(child.pid))
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass
"""


def test_tests_that_take_too_long_are_no_failures_and_leave_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "SECONDS", 6.0)
    monkeypatch.setattr(mutations, "INTERRUPT_SECONDS", 0.5)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    with pytest.raises(TimeoutError, match=r"test_hangs.py takes more than 6 s"):
        run_tests("test_hangs.py", tmp_path)
    status = Path("/proc", (tmp_path / "child").read_text(), "stat")
    until(
        lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z", "the end of the child"
    )
