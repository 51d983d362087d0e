"""`tandem run` on a terminal: the picture while it runs, whatever its size, and what is left of it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun
from tests.support.terminal import CTRL_C, Terminal
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

FIELDS = ("workers.replicas=1", "evaluators.processesPerReplica=1", "checkpoint.everySteps=40")
STEPS_IN_EPOCH = 23
TIME = r"\d+ (d|h|min|s)( \d+ (h|min|s))?"
COUNT = r"\d[\d,]*"
NUMBER = r"\d[\d.e-]*"
TRAINING = (
    rf"  digits  training +{TIME}",
    rf"  step {COUNT} of 115,000 · epoch {NUMBER} · about {TIME} left",
    rf"  loss        {NUMBER}  [▁▂▃▄▅▆▇█]+",
    r"  throughput  [\d.,]+ samples/s",
    r"  workers     1/1 · world size 1 · generation \d+ · no restarts",
    rf"  checkpoint  step {COUNT}",
    rf"  evaluated   step {COUNT} · accuracy {NUMBER} % · .+",
    r"  trainers    .+ of \d+ cores?",
    r"  .*/run +Ctrl-C saves and leaves",
)
"""Lines of a run of 5,000 epochs."""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def start(epochs: int, folder: Path, terminal: Terminal) -> LocalRun:
    words = [word for field in (f"trainer.loop.epochs={epochs}", *FIELDS) for word in ("--set", field)]
    return LocalRun(folder, *words, terminal=terminal)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a run that is complete, and then goes on for more epochs. The tests of it follow each other."""
    return tmp_path_factory.mktemp("screen")


def lines_like(pattern: str, lines: list[str]) -> list[str]:
    return [line for line in lines if re.fullmatch(pattern, line)]


def ends(run: LocalRun, terminal: Terminal) -> int:
    """Follow a run on its terminal to the end; returns the exit code."""

    def over() -> bool:
        terminal.look()
        return run.process.poll() is not None

    until(over, "the end of the run", otherwise=lambda: "\n".join(terminal.look()))
    return run.process.wait()


def assert_nothing_is_left_of_the_picture(lines: list[str], terminal: Terminal) -> None:
    assert "Ctrl-C saves and leaves" in terminal.written, "there was one"
    assert len(lines_like("live page: tandem open .+", lines)) == 1, "what was there before still is"
    for word in ("━", "Ctrl-C", "  loss  ", "  workers  ", "/metrics"):
        assert not [line for line in lines if word in line]
    assert terminal.is_as_before


def test_a_complete_run_leaves_its_result_alone_on_the_terminal(folder: Path, terminal: Terminal) -> None:
    with start(4, folder, terminal) as run:
        assert ends(run, terminal) == 0
    assert "restarting" not in terminal.written
    left = terminal.all_lines()
    assert left[0].startswith("live page: tandem open ")
    (result,) = lines_like(rf"digits is complete: {4 * STEPS_IN_EPOCH} steps in {TIME}", left)
    labels = ["best", "evaluated", "restarts", "logs", "next"]
    assert [word for line in left[left.index(result) :] if (word := line[:14].strip()) in labels] == labels
    assert_nothing_is_left_of_the_picture(left, terminal)


def test_it_shows_how_training_goes_in_windows_of_any_size_and_after_ctrl_c_only_how_to_go_on(
    folder: Path, terminal: Terminal
) -> None:
    with start(5000, folder, terminal) as run:
        until(
            lambda: (lines := terminal.look()) and all(len(lines_like(one, lines)) == 1 for one in TRAINING),
            "a picture of the training",
            otherwise=lambda: "\n".join(terminal.look()),
        )
        for columns, lines in ((50, 20), (120, 40), (64, 12), (50, 24), (80, 24)):
            terminal.resize(columns, lines)
            mark = len(terminal.written)
            until(lambda at=mark: (terminal.look(), "Ctrl-C" in terminal.written[at:])[1], "a new picture")
            shown = terminal.look()
            for once in (r"  digits  training .+", r"  loss .+", r"  workers .+", r".+ Ctrl-C saves and leaves"):
                assert len(lines_like(once, shown)) == 1, "\n".join(shown)
            assert not [line for line in shown if len(line) > columns]
            assert re.fullmatch(r"  .+Ctrl-C saves and leaves", [line for line in shown if line][-1])
        before = len(terminal.written)
        terminal.press(CTRL_C)
        assert ends(run, terminal) == 130
        left = terminal.all_lines()
        (saved, *_) = run.run_dir.committed()
    assert re.search(rf"  saving, at step {COUNT}; Ctrl-C again leaves at once", terminal.written)
    assert "restarting" not in terminal.written[before:]
    step = f"{saved.step:,}"
    (stopped,) = lines_like(f"digits was stopped; saved after step {step}", left)
    after = left[left.index(stopped) :]
    assert [word for line in after if (word := line[:14].strip()) in ("saved", "go on with")] == ["saved", "go on with"]
    assert_nothing_is_left_of_the_picture(left, terminal)


def test_after_kill_9_the_guardian_gives_the_terminal_back(tmp_path: Path, terminal: Terminal) -> None:
    with start(5000, tmp_path, terminal) as run:
        until(lambda: lines_like(r"  digits  starting .+", terminal.look()), "a picture")
        assert not terminal.is_as_before
        run.process.kill()
        until(lambda: terminal.look() and terminal.is_as_before, "a terminal as it was before")
    assert_nothing_is_left_of_the_picture(terminal.all_lines(), terminal)
