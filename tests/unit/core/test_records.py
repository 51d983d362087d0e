"""Records of logs: what is damaged costs a value or a line, and what a newer version says costs nothing."""

import json
import math
from typing import Any, get_args

import pytest

from tandem.rundir import records
from tandem.rundir.records import COORDINATOR, EVALUATOR, TRAINING, Kinds

LOGS = {
    "training": (TRAINING, records.TrainingRecord),
    "coordinator": (COORDINATOR, records.CoordinatorRecord),
    "evaluator": (EVALUATOR, records.EvaluatorRecord),
}
NEEDED = {"kind", "time", "step", "generation", "name", "checkpoint", "reason"}
"""Without these a line may be no record."""


def line(**fields: Any) -> bytes:
    return json.dumps({"time": 5.0, **fields}).encode()


def parsed(kinds: Kinds[Any], **fields: Any) -> Any:
    found = kinds.parse(line(**fields))
    assert found is not None
    return found


@pytest.mark.parametrize("value", ["x", None, [], {}, True, 10**400, -1, 1.5, math.nan], ids=str)
@pytest.mark.parametrize("log", LOGS)
def test_a_damaged_value_costs_that_value_alone(log: str, value: object) -> None:
    kinds, union = LOGS[log]
    for record in get_args(union):
        if issubclass(record, records.Rewound | records.TroublesRecord | records.LedgerRecord):
            continue
        sound = {"kind": record.model_fields["kind"].default, "step": 3, "generation": 2}
        sound |= {"name": "step-000000003", "checkpoint": "step-000000003"}
        sound |= {"reason": "RanksDiffer"} if issubclass(record, records.CorruptionRecord) else {}
        for name, field in record.model_fields.items():
            if name in NEEDED:
                continue
            found = parsed(kinds, **sound, **{field.alias: value})
            assert isinstance(found, record)
            own = getattr(found, name)
            kept = own == value or (name == "loss" and not math.isfinite(own or 0.0))
            assert own is None or kept, f"{record.__name__}.{name}: {own}"


@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        (TRAINING, {"kind": "step", "step": "x"}),
        (TRAINING, {"kind": "step", "step": 1, "time": 0}),
        (TRAINING, {"kind": "step", "step": 1, "time": 1e12}),
        (TRAINING, {"kind": "step", "step": 1, "time": True}),
        (TRAINING, {"kind": "checkpoint", "step": 1, "name": "../elsewhere"}),
        (TRAINING, {}),
        (COORDINATOR, {"kind": "generation", "generation": -1}),
        (EVALUATOR, {"kind": "evaluated"}),
    ],
)
def test_a_line_without_what_makes_it_a_record_is_none(kinds: Kinds[Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a record"):
        kinds.parse(line(**fields))


@pytest.mark.parametrize("log", LOGS)
def test_a_kind_of_a_newer_version_is_passed_over_and_no_damage(log: str) -> None:
    assert LOGS[log][0].parse(line(kind="something-new", step=1)) is None


def test_a_field_of_a_newer_version_is_passed_over() -> None:
    assert parsed(TRAINING, kind="step", step=1, loss=0.5, novelty=3).loss == 0.5


def test_a_loss_may_be_infinite_or_nan_and_nothing_else_may() -> None:
    found = parsed(TRAINING, kind="step", step=1, loss=math.inf, lr=math.inf)
    assert (found.loss, found.lr) == (math.inf, None)
    assert math.isnan(parsed(TRAINING, kind="step", step=1, loss=math.nan).loss)


def test_of_values_by_name_the_sound_ones_count() -> None:
    sample = parsed(COORDINATOR, kind="sample", trainerCpu={"0": 0.5, "1": "x", "2": -1}, gpu=5)
    assert sample.trainer_cpu == {"0": 0.5, "1": None, "2": None}
    assert sample.gpu is None


@pytest.mark.parametrize("log", LOGS)
def test_what_is_written_is_read_as_it_was(log: str) -> None:
    kinds, union = LOGS[log]
    examples: dict[str, Any] = {"time": 5.25, "step": 3, "generation": 2, "loss": 0.1, "lines": 4, "number": 1}
    examples |= {"name": "step-000000003", "checkpoint": "step-000000003", "why": "a\nb", "members": ["worker-0"]}
    examples |= {"bad_step": 3, "resume_before": 2, "skip_from": 1, "skip_to": 2, "phases": {"data": 0.5}}
    for record in get_args(union):
        given = {name: value for name, value in examples.items() if name in record.model_fields}
        if record is records.CorruptionRecord:
            given["reason"] = "RanksDiffer"
        made = record(**given)
        assert kinds.parse(made.model_dump_json(exclude_none=True).encode()) == made
