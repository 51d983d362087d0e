"""Which points of a run are final, so that they can be sent to somebody who keeps them for ever."""

from pathlib import Path

import pytest

from tandem.rundir import evaluations
from tandem.rundir.durable import replace_json
from tandem.rundir.evaluations import BASE
from tandem.rundir.lineage import Rewind
from tandem_coordinator.tracking.__main__ import problem_of
from tandem_coordinator.tracking.curves import EVALUATION, LOSS, SETTLE_SECONDS, Curves, Point, key
from tests.support.worlds.tracked_run import BEGAN, TrackedRun

NOW = BEGAN + 10_000.0
SCRIPT = {"trainer": {"command": ["train.py"]}}


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    return TrackedRun(tmp_path / "run")


def losses(points: list[Point]) -> dict[int, int]:
    """By step, the generation that took it."""
    found = [point for point in points if point.key == LOSS]
    assert len({point.step for point in found}) == len(found), "each step once"
    return {point.step: int(point.value) for point in found}


def test_a_step_is_final_once_a_checkpoint_has_it(run: TrackedRun) -> None:
    curves = Curves(run.rundir, run.job)
    run.begin(1)
    run.steps(1, 1, 120)
    assert losses([*curves.training(NOW)]) == {}
    run.save(1, 100)
    assert losses([*curves.training(NOW)]) == dict.fromkeys(range(1, 101), 1)
    run.steps(1, 121, 130)
    assert losses([*curves.training(NOW)]) == {}
    run.save(1, 130)
    assert losses([*curves.training(NOW)]) == dict.fromkeys(range(101, 131), 1)


def test_steps_that_are_taken_again_are_those_of_the_generation_that_counts(run: TrackedRun) -> None:
    curves = Curves(run.rundir, run.job)
    run.begin(1)
    run.steps(1, 1, 120)
    saved = run.save(1, 100)
    run.steps(1, 121, 130)
    before = losses([*curves.training(NOW)])
    run.begin(2, saved, at=130.0)
    run.steps(2, 101, 105)
    run.begin(3, saved, at=140.0)
    run.steps(3, 101, 200)
    run.save(3, 200)
    after = losses([*curves.training(NOW)])
    assert (before, after) == (dict.fromkeys(range(1, 101), 1), dict.fromkeys(range(101, 201), 3))
    assert losses([*Curves(run.rundir, run.job).training(NOW)]) == before | after, "whoever begins later finds the same"


def test_all_is_final_at_the_end(run: TrackedRun) -> None:
    run.begin(1)
    run.steps(1, 1, 30)
    assert losses([*Curves(run.rundir, run.job).training(NOW, is_over=True)]) == dict.fromkeys(range(1, 31), 1)


def test_who_goes_back_behind_a_checkpoint_is_told_apart(run: TrackedRun) -> None:
    curves = Curves(run.rundir, run.job)
    run.begin(1)
    run.steps(1, 1, 200)
    first = run.save(1, 100)
    run.save(1, 200)
    assert len(losses([*curves.training(NOW)])) == 200
    assert curves.repeated_from() is None
    rewind = Rewind(number=1, generation=1, bad_step=150, resume_before=101, skip_from=100, skip_to=160)
    run.rundir.record_rewind(rewind)
    run.begin(2, first, at=300.0)
    run.steps(2, 101, 150)
    assert losses([*curves.training(NOW)]) == {}
    assert curves.repeated_from() == (2, 100, BEGAN + 300.0)


def test_scores_of_the_base_model_are_given_once_under_names_of_their_own(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "run")
    curves = Curves(run.rundir, run.job, has_base=True)
    run.begin(1)
    run.save(1, 100, accuracy=0.75)
    assert not any(point.key.startswith("base/") for point in curves.evaluations(NOW))
    folder = evaluations.folder(run.rundir, BASE)
    folder.mkdir(parents=True)
    replace_json(folder / "g000000.json", {"metrics": {"loss": 0.9, "accuracy": 0.5}, "finishedAt": BEGAN + 7})
    expected = {Point("base/loss", 0, 0.9, BEGAN + 7), Point("base/accuracy", 0, 0.5, BEGAN + 7)}
    assert expected == {point for point in curves.evaluations(NOW) if point.key.startswith("base/")}
    assert not any(point.key.startswith("base/") for point in curves.evaluations(NOW + 100))


def test_a_script_that_says_nothing_of_its_checkpoints_is_waited_for(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "run", **SCRIPT)
    curves = Curves(run.rundir, run.job)
    run.log(1, {"kind": "start", "step": 0, "time": BEGAN})
    run.steps(1, 1, 100)
    assert losses([*curves.training(BEGAN + 50.0 + SETTLE_SECONDS)]) == dict.fromkeys(range(1, 51), 1)
    run.log(2, {"kind": "start", "step": 80, "time": BEGAN})
    run.steps(2, 81, 120, at=30.0)
    assert losses([*curves.training(BEGAN + 50.0 + SETTLE_SECONDS)]) == dict.fromkeys(range(51, 81), 1)
    assert losses([*curves.training(NOW)]) == dict.fromkeys(range(81, 121), 2)


def test_what_a_script_logs_besides_has_its_own_name(tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "run", **SCRIPT)
    run.log(
        1,
        {"kind": "start", "step": 0, "time": BEGAN},
        {"kind": "values", "step": 1, "values": {"perplexity": 3.0, "broken": "NaN"}, "time": BEGAN},
        {"kind": "rate", "step": 1, "throughput": 100.0, "epoch": 0.5, "time": BEGAN},
    )
    found = {point.key: point.value for point in Curves(run.rundir, run.job).training(NOW)}
    assert found["perplexity"] == 3.0
    assert (found["train/throughput"], found["train/epoch"]) == (100.0, 0.5)
    assert key("per class/f1 (macro)") == "per class/f1 _macro_"


def test_evaluations_come_by_the_step_of_their_checkpoint_and_the_best_is_known(run: TrackedRun) -> None:
    curves = Curves(run.rundir, run.job)
    run.begin(1)
    first, second = run.save(1, 100, accuracy=0.9), run.save(1, 200, accuracy=0.8)
    found = {(point.key, point.step): point.value for point in curves.evaluations(NOW)}
    assert found[EVALUATION + "accuracy", 100] == 0.9
    assert found[EVALUATION + "accuracy", 200] == 0.8
    assert curves.best().checkpoint == first
    assert curves.is_evaluated(second)


def test_evaluations_of_checkpoints_that_do_not_count_are_left_out(run: TrackedRun) -> None:
    run.begin(1)
    saved = run.save(1, 100)
    run.begin(2, saved)
    run.save(1, 150, accuracy=0.9)
    curves = Curves(run.rundir, run.job)
    assert [*curves.evaluations(NOW)] == []
    assert curves.best() is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "API request to http://h:1/x failed with exception HTTPConnectionPool(host='h', port=1): Max retries "
            "exceeded with url: /x (Caused by NewConnectionError(\"HTTPConnection(host='h', port=1): Failed to "
            'establish a new connection: [Errno 111] Connection refused"))',
            "[Errno 111] Connection refused",
        ),
        (
            "HTTPConnectionPool(host='h', port=1): Max retries exceeded with url: /x (Caused by ConnectTimeoutError("
            "<HTTPConnection(host='h', port=1) at 0x7f>, 'Connection to h timed out. (connect timeout=20)'))",
            "Connection to h timed out. (connect timeout=20",
        ),
        ("PERMISSION_DENIED: no\nmore", "PERMISSION_DENIED: no"),
        ("", "ConnectionError"),
    ],
)
def test_what_went_wrong_is_said_in_a_few_words(error: str, said: str) -> None:
    assert problem_of(ConnectionError(error)) == said
