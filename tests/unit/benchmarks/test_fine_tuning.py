"""The benchmark beside TRL: all sides take the plan's documents, and only those that train alike are compared."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.fine_tuning.plain_loop import collate, documents
from benchmarks.fine_tuning.record import Record, Resumed, Score, Step, read
from benchmarks.fine_tuning.sides import Run
from benchmarks.fine_tuning.verdict import STEPS, admitted, at_equal_time, compared, evaluated, gap, without_gap
from benchmarks.fine_tuning.work import BATCH, LENGTH, MODEL, Plan, document_digest, plan, prepare, split
from benchmarks.goals import Outcome, Verdict
from benchmarks.throughput.processors import Use
from benchmarks.throughput.sides import Measurement

TWO_STEPS = Plan([0, 1, 2, 3], ["x", "y"], [["a", "b"], ["c", "d"]], [4, 4], [6, 6], 1.0)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    prepare(folder, count=40, held_out=10, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return folder


def steps(*losses: float) -> list[Step]:
    return [Step(number, 10.0 + number, loss, ["a"], 8) for number, loss in enumerate(losses, start=1)]


def run(tokens: float = 100.0, peak: float = 500.0, padding: float = 0.5, held_out: float = 3.0) -> Run:
    return Run(Measurement(tokens, Use(10 / tokens, 0.0), 5.0), steps(1.0, 1.0), padding, peak, held_out, [])


def outcomes(verdicts: list[Verdict]) -> list[Outcome]:
    return [verdict.outcome for verdict in verdicts]


def test_the_plain_loop_makes_the_same_tokens_and_batches_as_tandem(work: Path, tmp_path: Path) -> None:
    made = plan(work, packing=False, seed=0, steps=6)
    made.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == made
    rows = documents(work, AutoTokenizer.from_pretrained(work / MODEL))
    for step in range(made.steps):
        batch = collate([rows[row] for row in made.order[step * BATCH : (step + 1) * BATCH]])
        assert split(batch["input_ids"], batch["attention_mask"], None) == made.documents[step]
        assert batch["attention_mask"].sum() == made.tokens[step] == made.widths[step] < batch["input_ids"].numel()


def test_packed_rows_hold_the_same_documents_and_none_are_padded(work: Path) -> None:
    apart, packed = (plan(work, packing, seed=1, steps=1) for packing in (False, True))
    assert packed.padding == apart.padding == 0
    assert apart.widths[0] < packed.widths[0] <= BATCH * LENGTH
    assert set(apart.documents[0]) <= {one for step in plan(work, False, 0, 5).documents for one in step}


def test_documents_are_found_in_padded_rows_and_in_one_row_of_all() -> None:
    rows = torch.tensor([[5, 6, 0], [7, 8, 9]])
    padded = split(rows, torch.tensor([[1, 1, 0], [1, 1, 1]]), None)
    assert padded == [document_digest([5, 6]), document_digest([7, 8, 9])]
    assert split(torch.tensor([[5, 6, 7, 8, 9]]), None, torch.tensor([[0, 1, 0, 1, 2]])) == padded


def test_a_record_adds_up_micro_batches_and_leaves_out_a_line_that_is_being_written(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    record.saw(["a"], 4, 0.5)
    record.saw(["b"], 6, 0.25)
    record.stepped(1)
    record.scored(1, 2.5)
    record.close()
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"step": 2, "at"')
    (step,), (score,) = read(tmp_path / "record.jsonl")
    assert (step.step, step.documents, step.width, step.loss) == (1, ["a", "b"], 10, 0.75)
    assert (score.step, score.loss) == (1, 2.5)


def test_sides_are_compared_only_where_documents_and_losses_are_the_same() -> None:
    of = replace(TWO_STEPS, documents=[["a"]] * STEPS)
    same = steps(*[2.0] * STEPS)
    assert admitted(of, {"ours": same, "theirs": steps(*[2.0 + 1e-6] * STEPS)}) == []
    (problem,) = admitted(of, {"ours": same, "theirs": steps(*[2.0] * (STEPS - 1), 2.001)})
    assert problem == f"theirs: its loss at step {STEPS} is 5.0e-04 of it away from that of ours"
    assert admitted(of, {"ours": same, "theirs": steps(*[2.0] * 3, float("nan"), *[2.0] * (STEPS - 4))})
    other = [*same[:4], replace(same[4], documents=["b"]), *same[5:]]
    assert admitted(of, {"ours": other, "theirs": same}) == ["ours: step 5 has other documents"]
    assert admitted(of, {"ours": same[:3], "theirs": same}) == ["ours: 3 steps"]


def test_each_row_has_a_verdict_and_only_times_need_many_rounds() -> None:
    met, missed, unjudged = Outcome.MET, Outcome.MISSED, Outcome.UNJUDGED
    assert outcomes(compared([run()] * 6, [run()] * 6, "TRL", packing=False)) == [met] * 5
    assert outcomes(compared([run()], [run()], "TRL", packing=False)) == [unjudged] * 2 + [met] * 3
    worse = run(tokens=90.0, peak=600.0, padding=0.6, held_out=3.1)
    assert outcomes(compared([worse] * 6, [run()] * 6, "TRL", packing=False)) == [missed] * 5
    assert outcomes(compared([run(99.5)] * 6, [run()] * 6, "TRL", packing=True))[:2] == [missed] * 2
    assert missed in outcomes(compared([run(), None], [run()] * 2, "TRL", packing=False))


def test_with_evaluation_the_last_score_counts_and_what_was_known_when_the_first_was_done() -> None:
    early = replace(run(), scores=[Score(1, 12.0, 4.0), Score(2, 13.0, 3.0)])
    late = replace(run(), scores=[Score(1, 12.5, 4.0), Score(2, 16.0, 3.0)])
    assert (early.evaluated_seconds, late.evaluated_seconds) == (2.0, 5.0)
    assert at_equal_time(early, late) == (3.0, 4.0)
    assert outcomes(evaluated([early] * 6, [late] * 6)) == [Outcome.MET] * 2
    assert outcomes(evaluated([late] * 6, [early] * 6)) == [Outcome.MISSED] * 2
    assert outcomes(evaluated([early] * 2, [late] * 2)) == [Outcome.UNJUDGED] * 2
    assert outcomes(evaluated([early, None], [late] * 2)) == [Outcome.MISSED]


def test_what_was_taken_back_by_a_kill_does_not_count_as_repeated() -> None:
    first, second = Step(1, 0.0, 1.0, ["a", "b"], 8), Step(2, 0.0, 1.0, ["c", "d"], 8)
    assert gap(TWO_STEPS, [[first, second]]) == (0, 0, 0)
    assert gap(TWO_STEPS, [[first, second], [second]]) == (0, 0, 1)
    assert gap(TWO_STEPS, [[first], [replace(second, documents=["b", "c"])]]) == (1, 1, 0)


def test_a_document_that_is_lost_or_repeated_is_a_goal_missed() -> None:
    assert without_gap("Tandem", [Resumed(0, 0, 5, 4.0, 9.0)]).outcome is Outcome.MET
    assert without_gap("Tandem", [Resumed(0, 0, 5, 4.0, 9.0), Resumed(1, 0, 5, 4.0, 9.0)]).outcome is Outcome.MISSED
