"""Everybody who asks which checkpoint is the best gets the same answer: evaluators, reports, lists, the coordinator."""

import time
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.rundir.durable import read_json_or_none
from tandem.rundir.evaluations import deciding_scores, rank
from tandem_cli.checkpoints.inventory import take_inventory
from tandem_cli.report.reading import read
from tandem_coordinator.run_watcher import RunDirectory
from tandem_evaluator.evaluation import TaskScoring
from tandem_evaluator.publication import Publication
from tests.support.worlds.small_run import SmallRun

FEW = st.sampled_from([0.1, 0.2, 0.3])
SCORES = st.fixed_dictionaries({"accuracy": FEW, "loss": st.one_of(st.none(), FEW)})
EVALUATION = {
    "confusion": [[9, 1], [1, 9]],
    "samples": 20,
    "perClassF1": [None, None],
    "startedAt": 1.0,
    "finishedAt": 2.0,
}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(SCORES, SCORES), max_size=5), st.booleans(), st.sampled_from(["accuracy", "loss"]))
def test_all_views_of_a_run_name_the_same(
    tmp_path_factory: Any, scores: list[tuple[dict[str, Any], dict[str, Any]]], holds_out: bool, metric: str
) -> None:
    run = SmallRun(tmp_path_factory.mktemp("run"), evaluators={"metric": metric}, keepBest=1)
    run.begin(1)
    for step, (test, validation) in enumerate(scores, start=1):
        reference = run.save(step)
        more = {"validation": {"samples": 10, "metrics": {**validation, "macroF1": 0.5}}} if holds_out else {}
        told = {"checkpoint": reference.name, "step": step, "generation": 1}
        run.evaluate(reference, test["accuracy"], test["loss"], **EVALUATION, **told, **more)

    evaluators = run.rundir.read_job().spec.evaluation
    data = SimpleNamespace(total=20, classes=2, held_out=0)
    Publication(run.rundir, evaluators, TaskScoring(data)).update_best()  # type: ignore[arg-type]
    hint = read_json_or_none(run.rundir.best_file) or {}
    listed = [entry for entry in take_inventory(run.rundir).entries if entry.is_best]
    seen = RunDirectory(run.rundir, evaluators).poll(time.time()).best
    shown = read(run.rundir.path).best
    kept = [entry.step for entry in take_inventory(run.rundir).entries if "keepBest" in entry.keep_reasons]

    expected = _best(scores, holds_out, metric)
    assert hint.get("step") == expected
    assert [entry.step for entry in listed] == kept == ([] if expected is None else [expected])
    assert (seen.step if seen else None, shown.step if shown else None) == (expected, expected)


def _best(scores: list[tuple[dict[str, Any], dict[str, Any]]], holds_out: bool, metric: str) -> int | None:
    """By hand: the score, then the loss, then the step, of what decides."""
    sign = 1 if metric == "loss" else -1
    decides = [(pair[holds_out], step) for step, pair in enumerate(scores, start=1) if pair[0]["loss"] is not None]
    ranked = [(sign * one[metric], one["loss"], step) for one, step in decides if one["loss"] is not None]
    return min(ranked)[2] if ranked else None


def test_what_is_no_number_decides_nothing() -> None:
    for strange in (None, [], {"metrics": None}, {"metrics": {"loss": "1", "accuracy": True}}, {"validation": 7}):
        assert rank(deciding_scores(strange if isinstance(strange, dict) else {}), "accuracy", "Maximize", 1, 1) is None
    held_out = {"metrics": {"loss": 1.0, "accuracy": 0.9}, "validation": {"metrics": {"loss": float("nan")}}}
    assert deciding_scores(held_out) == {}
