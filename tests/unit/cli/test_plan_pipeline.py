"""`tandem plan` of a pipeline: the order of passes, what a rank holds, and how long a step takes."""

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from tandem.errors import UserError
from tandem.job.footprint import Footprint, Moment, Pass, StageFootprint, StageMemory, StagePass
from tandem.job.strategies import micro_batches
from tandem.job.tasks import FsdpSettings, Loop, Optimizer, Pipeline
from tandem_cli.planning.memory import MicroBatches, PlannedStrategy
from tandem_cli.planning.pipeline import Sharding, memory, order, peak_moment, step_time
from tandem_cli.planning.plan import Plan, PlanBudget, batches, joined, planned, staged_batches
from tandem_cli.planning.speed import Speed

SPEED = Speed(flops=1000.0, utilization=0.5, bandwidth=100.0)
PASS = Pass(samples=8, moments=(Moment(activations=40, gradients=20),), accumulating=50, flops=900.0)
MODEL = Footprint(
    parameters=100,
    parameter_count=25,
    gradients=80,
    optimizer=160,
    buffers=7,
    average=100,
    samples=640,
    blocks=(50, 50),
)


def options(schedule: Any, stages: int = 2) -> Pipeline:
    return Pipeline(stages=stages, schedule=schedule)


def stage(parameters: int = 50, samples: tuple[int, ...] = (2,), **changed: Any) -> StageFootprint:
    plain = {"kept": 10, "forward": 12, "peak": 15, "sent": 5, "flops": 100.0}
    passes = tuple(StagePass(samples=one, **plain | changed) for one in samples)
    return StageFootprint(parameters=parameters, gradients=parameters, buffers=0, passes=passes)


def told(schedule: str, place: int, chunks: int, per_rank: int = 1, stages: int = 2) -> str:
    steps = order(options(schedule, stages), place, chunks, per_rank)
    return " ".join(f"{'F' if one.is_forward else 'B'}{one.stage}" for one in steps)


def test_gpipe_does_all_forward_passes_first() -> None:
    assert told("gpipe", 0, 3) == "F0 F0 F0 B0 B0 B0"


def test_1f1b_is_ahead_by_as_many_as_ranks_follow() -> None:
    assert told("1f1b", 0, 3) == "F0 F0 B0 F0 B0 B0"
    assert told("1f1b", 1, 3) == "F0 B0 F0 B0 F0 B0"
    assert told("1f1b", 0, 2, stages=4) == "F0 F0 B0 B0", "never more than there are"


@pytest.mark.parametrize(("schedule", "kind"), [("interleaved1f1b", ScheduleInterleaved1F1B),
                                                ("zeroBubble", ScheduleInterleavedZeroBubble)])  # fmt: skip
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 4), (4, 8), (2, 2)])
def test_several_stages_of_a_rank_take_turns_as_in_torch(schedule: str, kind: Any, ranks: int, chunks: int) -> None:
    theirs = object.__new__(kind)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = 2, ranks, chunks
    theirs.microbatches_per_round = chunks // max(1, chunks // ranks)
    for place in range(ranks):
        found = [one for one in theirs._calculate_single_rank_operations(place) if one is not None]
        kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B"}
        wanted = [f"{kinds[one.computation_type.name]}{one.stage_index // ranks}" for one in found
                  if one.computation_type.name in kinds]  # fmt: skip
        assert told(schedule, place, chunks, 2, ranks) == " ".join(wanted)


def test_a_rank_holds_what_has_passed_forward_and_not_yet_backward() -> None:
    one = stage()
    assert peak_moment(options("1f1b"), 0, 4, [one], 2) == (10 + 15, 0, 50)
    assert peak_moment(options("1f1b"), 1, 4, [one], 2) == (15, 0, 50)


def test_gradients_come_into_being_with_the_first_backward_pass() -> None:
    assert peak_moment(options("gpipe"), 0, 4, [stage()], 2) == (2 * 10 + 15, 0, 50)
    assert peak_moment(options("gpipe"), 0, 4, [stage(5)], 2) == (3 * 10 + 15, 0, 0)
    assert peak_moment(options("1f1b"), 1, 1, [stage()], 2) == (0, 0, 50), "once all is over"


def test_where_stages_are_gathered_in_half_precision_no_copies_of_weights_are_made() -> None:
    casting = stage(kept=10, forward=12, peak=15, uncast=StageMemory(kept=6, forward=9, peak=11))
    model = MODEL.model_copy(update={"stages": (casting, casting)})
    plain, whole, half = (
        memory(model, options("gpipe"), 3, 2, sharding)
        for sharding in (None, Sharding(2, FsdpSettings()), Sharding(2, FsdpSettings(), is_half=True))
    )
    assert (plain.activations, whole.activations, half.activations) == (6 + 11, 6 + 11, 6 + 11)
    assert (plain.casts, whole.casts, half.casts) == (4 + 4, 4 + 4, 0), "of each micro-batch"
    assert half.gathered < whole.gathered


def test_with_zero_bubble_gradients_between_layers_stay_until_those_of_weights_are_computed() -> None:
    assert peak_moment(options("zeroBubble"), 0, 4, [stage(), stage()], 2) == (3 * 10 + 15 + 10, 0, 100)
    assert peak_moment(options("zeroBubble"), 1, 4, [stage(), stage()], 2).activations > 15 + 10 + 2 * 10


def test_the_rank_that_has_most_counts() -> None:
    footprint = MODEL.model_copy(update={"stages": (stage(70), stage(30, kept=30, peak=40))})
    peak = memory(footprint, options("1f1b"), 4, 2)
    assert (peak.parameters, peak.gradients, peak.activations) == (70, 70, 10 + 15)
    assert peak.optimizer == 160 * 70 // 80
    assert peak.buffers == 7 + round(100 * 77 / 107), "what is in no stage is on the first rank"
    assert memory(footprint, options("gpipe"), 40, 2).parameters == 30


def test_a_step_takes_what_the_slowest_rank_computes_and_the_bubble() -> None:
    footprint = MODEL.model_copy(update={"gradients": 100, "stages": (stage(), stage(flops=200.0))})
    fast = Speed(1000.0, 0.5, 1e9)
    compute = 200 * 4 / 500
    assert step_time(footprint, options("1f1b"), 4, 2, 1, fast).step == pytest.approx(compute * (1 + 1 / 4))
    two = footprint.model_copy(update={"stages": (stage(), stage(), stage(), stage())})
    assert step_time(two, options("interleaved1f1b"), 4, 2, 1, fast).step == pytest.approx(compute * (1 + 1 / 8))
    assert step_time(two, options("zeroBubble"), 4, 2, 1, fast).step == pytest.approx(compute * (1 + 1 / 24))
    slow = step_time(footprint, options("1f1b"), 4, 2, 3, SPEED)
    assert slow.communication == pytest.approx((2 * 4 * 5 + 2 * 2 / 3 * 50) / 100)


def test_gradients_of_a_weight_that_two_ranks_hold_are_sent_once_more() -> None:
    """Of 80 bytes of gradients the two ranks hold 50 each, so 20 are on both."""
    apart = MODEL.model_copy(update={"gradients": 100, "stages": (stage(), stage())})
    shared = apart.model_copy(update={"gradients": 80})
    times = [step_time(one, options("1f1b"), 4, 2, 1, SPEED) for one in (apart, shared)]
    assert times[1].communication - times[0].communication == pytest.approx(20 / 100)
    assert times[1].step > times[0].step


def made(footprint: Footprint = MODEL, **loop: object) -> Plan:
    given = Loop.model_validate({"global_batch_size": 16, "optimizer": Optimizer(), "strategy": "pipeline", **loop})
    passes = tuple(PASS.model_copy(update={"samples": one}) for one in batches(given, (1, 2, 3, 4)))
    chunks = staged_batches(given, (1, 2, 3, 4))
    untraced = footprint.untraced
    stages = () if untraced else (stage(samples=chunks), stage(samples=chunks))
    staged = MODEL.model_copy(update={"stages": stages, "untraced": untraced}) if chunks else None
    known = {1: footprint.model_copy(update={"passes": () if untraced else passes})}
    return planned(known, given, (1, 2, 3, 4), 4, PlanBudget(10_000, 10, SPEED, 3.0), 2, staged)


def test_a_pipeline_is_planned_where_its_ranks_divide_those_there_are() -> None:
    rows = made().rows
    mine = [row for row in rows if row.strategy is PlannedStrategy.PIPELINE]
    assert [(row.workers, row.batch) for row in mine] == [(2, MicroBatches(2, 8)), (4, MicroBatches(1, 8))]
    assert [row.workers for row in rows] == sorted(row.workers for row in rows)
    assert [row.is_own for row in mine] == [False, True]
    assert all(row.time and row.cost for row in mine)


def test_several_strategies_are_planned_beside_each_other_in_the_order_in_which_they_are_named() -> None:
    loop = Loop(global_batch_size=16, optimizer=Optimizer(), strategy="pipeline", fsdp=FsdpSettings())
    names = {"fsdp": {"strategy": "fsdp"}, "pipeline": {}, "pipeline+fsdp": {"fsdp": FsdpSettings()}}
    plans = {name: made(**options) for name, options in names.items()}
    found = joined(plans, loop, 4)
    labels = {workers: [row.label for row in found.rows if row.workers == workers] for workers in (1, 2, 3, 4)}
    assert labels == {1: ["single"], 2: [*names], 3: ["fsdp"], 4: [*names]}
    assert [row.label for row in found.rows if row.is_own] == ["pipeline+fsdp"]
    assert found.recommendation.startswith("fsdp on 4 workers fits with ")
    assert found.recommendation.endswith("; pipeline+fsdp, as the job says, is not needed.")
    assert "pipeline has no row for 3 ranks: they make no whole number of its groups." in found.notes
    backwards = joined(dict(reversed(plans.items())), loop, 4)
    assert backwards.recommendation == found.recommendation, "the simplest one is named first"


def test_strategies_of_which_none_has_a_row_are_refused_with_the_reason() -> None:
    loop = Loop(global_batch_size=16, optimizer=Optimizer(), strategy="pipeline")
    with pytest.raises(UserError, match=r"nothing to plan. A pipeline of 5 stages needs a multiple of 5 ranks"):
        joined({"pipeline": without_single(made(pipeline=Pipeline(stages=5, chunks=5)))}, loop, 4)


def test_rows_that_are_not_shown_say_nothing() -> None:
    loop = Loop(global_batch_size=3, optimizer=Optimizer(), strategy="pipeline")
    plans = {"ddp": made(global_batch_size=3), "pipeline": made(global_batch_size=3)}
    less = "globalBatchSize 3 is less than 4 workers: some have nothing to do."
    assert less in joined(plans, loop, 4).notes
    assert less not in joined({"pipeline": plans["pipeline"]}, loop, 4).notes, "two pipelines share it"
    found = joined({"pipeline": made(global_batch_size=1)}, loop.model_copy(update={"global_batch_size": 1}), 4).notes
    assert "globalBatchSize 1 is less than the 2 data-parallel groups of pipeline on 4 workers: some have" in str(found)


def test_pipelines_that_do_not_lie_in_a_worker_as_the_job_wants_it_are_not_planned() -> None:
    plan = made(fsdp=FsdpSettings(shard_within="Worker"), pipeline=Pipeline(stages=4, chunks=4))
    assert not any(row.strategy is PlannedStrategy.PIPELINE for row in plan.rows)
    assert any("its 4 ranks do not divide the 2 processes of a worker" in note for note in plan.notes)
    within = made(fsdp=FsdpSettings(shard_within="Worker"))
    assert [row.workers for row in within.rows if row.strategy is PlannedStrategy.PIPELINE] == [2, 4]


def test_a_strategy_without_a_row_and_one_without_a_plan_say_why() -> None:
    loop = Loop(global_batch_size=16, optimizer=Optimizer())
    one = made()
    alone = replace(one, rows=tuple(row for row in one.rows if row.workers == 1))
    notes = joined({"fsdp": alone, "ddp": alone}, loop, 1, ["pipeline is not planned: x"]).notes
    assert "fsdp has no row: it is for more than one worker." in notes
    assert "ddp has no row: it is for more than one worker." in notes
    assert "pipeline is not planned: x" in notes


def without_single(plan: Plan) -> Plan:
    """As one for more than one rank alone."""
    return replace(plan, rows=tuple(row for row in plan.rows if row.workers > 1))


def test_no_pipeline_is_planned_where_none_can_be_made_and_the_plan_says_so() -> None:
    plan = made(pipeline=Pipeline(stages=5, chunks=5))
    assert not any(row.strategy is PlannedStrategy.PIPELINE for row in plan.rows)
    assert "A pipeline of 5 stages needs a multiple of 5 ranks, and none is planned for." in plan.notes
    assert "The pipeline is not planned, because x." in made(MODEL.model_copy(update={"untraced": "x"})).notes


@pytest.mark.parametrize(
    ("most", "copies", "found"), [(None, 1, (8, 2)), (None, 2, (8, 1)), (1, 1, (16, 1)), (100, 1, (8, 2))]
)
def test_a_share_is_cut_into_micro_batches_of_one_size(most: int | None, copies: int, found: tuple[int, int]) -> None:
    assert micro_batches(Loop(global_batch_size=16, micro_batch_size=most, strategy="pipeline"), copies) == found
