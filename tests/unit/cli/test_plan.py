"""`tandem plan`: the formulas of memory, time and costs, what is recommended, and how mistakes are told."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.errors import UserError
from tandem.job.footprint import Footprint, Moment, Pass
from tandem.job.resource import Workers
from tandem.job.tasks import FsdpSettings, Loop, Optimizer
from tandem_cli.commands.plan import allowed, mirror_note, sheet_values, table
from tandem_cli.main import application
from tandem_cli.planning.memory import (
    MicroBatches,
    PlannedStrategy,
    batch_of,
    bytes_of,
    format_bytes,
    memory,
    state_of,
    unsharded_bytes,
    worker_memory,
    world_sizes,
)
from tandem_cli.planning.plan import Plan, PlanBudget, batches, degree_of, planned
from tandem_cli.planning.speed import DEVICES, Speed, cost, step_time, steps_of
from tests.support import ROOT
from tests.support.documents import blocks

GIB = 2**30
PASS = Pass(
    samples=8,
    moments=(Moment(activations=44, gradients=0), Moment(activations=40, gradients=20)),
    accumulating=50,
    flops=900.0,
)
LARGE = Moment(activations=480, gradients=20)
MODEL = Footprint(
    parameters=100,
    parameter_count=25,
    gradients=80,
    optimizer=160,
    buffers=7,
    average=100,
    casts=10,
    data=3,
    samples=640,
    blocks=(30, 40, 20),
    passes=(PASS,),
)


def plan(*words: str) -> str:
    result = CliRunner().invoke(application(["plan"]), ["plan", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_the_classic_table_of_a_model_of_seven_billion() -> None:
    rows = json.loads(plan("--parameters", "7e9", "--workers", "1,8", "--json"))["rows"]
    single, ddp, fsdp = rows
    assert [(row["strategy"], row["workers"]) for row in rows] == [("single", 1), ("ddp", 8), ("fsdp", 8)]
    for row in (single, ddp):
        parts = [round(row["memory"][name] / GIB, 1) for name in ("parameters", "optimizer", "gradients", "peak")]
        assert parts == [26.1, 52.2, 26.1, 104.3]
        assert not row["fits"]
    assert round(fsdp["memory"]["peak"] / GIB, 1) == 13.0
    assert fsdp["fits"]


def test_the_classic_table_as_people_read_it() -> None:
    lines = plan("--parameters", "7e9", "--workers", "8", "--device-memory", "80GB").splitlines()
    heads, ddp, fsdp = (line.split() for line in lines if line.startswith(("STRATEGY", "ddp ", "fsdp ")))
    assert heads == ["STRATEGY", "WORKERS", "PARAMETERS", "GRADIENTS", "OPTIMIZER", "PEAK", "FITS"]
    assert ddp[:10] == ["ddp", "8", "26.1", "GiB", "26.1", "GiB", "52.2", "GiB", "104.3", "GiB"]
    assert fsdp[8:12] == ["13.0", "GiB", "59.5", "GiB"]
    assert lines[-1] == (
        "→ ddp on 8 workers lacks 31.8 GiB; fsdp on 8 workers fits with 59.5 GiB to spare, without activations."
    )


def test_a_data_sheet_that_nobody_asked_for_is_named() -> None:
    words = ("--parameters", "7e9", "--workers", "8")
    assert "memory is that of an h100, the default of --device" in plan(*words).splitlines()
    assert "memory is that of an l4" in plan(*words, "--device", "L4").splitlines()
    assert "h100" not in plan(*words, "--device-memory", "80GB")
    taken = sheet_values(None, None, 3e12, None, needs_speed=True)
    assert taken == "memory, bandwidth are those of an h100, the default of --device"
    assert sheet_values("a100", "1GB", None, "1GB", needs_speed=True) == "peak is that of an a100"
    assert sheet_values(None, "1GB", None, None, needs_speed=False) == ""


def test_in_a_narrow_terminal_the_parts_of_the_peak_are_left_out() -> None:
    made = planned({1: state_of(7_000_000_000)}, None, [1, 8], 8, PlanBudget(80 * 10**9, 2 * GIB, None))
    wide, narrow = table(made), table(made, 60)
    assert max(map(len, wide)) > 60 >= max(map(len, narrow))
    assert table(made, 120) == wide
    assert [line.split()[:2] for line in narrow] == [line.split()[:2] for line in wide]
    assert narrow[0].split() == ["STRATEGY", "WORKERS", "PEAK", "FITS"]


def test_a_single_rank_has_only_the_gradients_of_the_peak() -> None:
    peak = memory(PlannedStrategy.SINGLE, 1, MODEL, PASS)
    assert (peak.gradients, peak.activations, peak.casts) == (20, 30, 10)
    assert peak.total == 100 + 160 + 60 + 107 + 3


def test_gradients_exist_all_the_time_where_they_are_accumulated_and_under_ddp() -> None:
    for peak in (memory(PlannedStrategy.SINGLE, 1, MODEL, PASS, passes=2), memory(PlannedStrategy.DDP, 4, MODEL, PASS)):
        assert (peak.gradients, peak.activations) == (80, 40)
        assert peak.total == 100 + 80 + 160 + 50 + 107 + 3


def test_fsdp_shares_the_state_and_gathers_two_blocks_and_the_gradients_of_one() -> None:
    peak = memory(PlannedStrategy.FSDP, 4, MODEL, PASS, passes=2)
    assert (peak.parameters, peak.gradients, peak.optimizer, peak.buffers) == (25, 20, 40, 7 + 25)
    assert (peak.activations, peak.casts) == (40, 10)
    assert peak.gathered == (100 - 90) + (30 + 40) + 2 * 40


@pytest.mark.parametrize(("shards", "gradients", "activations"), [(2, 10, 30), (4, 5, 30), (10, 0, 34)])
def test_fsdp_without_accumulation_has_its_share_of_the_gradients_at_the_peak_of_that_share(
    shards: int, gradients: int, activations: int
) -> None:
    peak = memory(PlannedStrategy.FSDP, shards, MODEL, PASS)
    assert (peak.gradients, peak.activations, peak.casts) == (gradients, activations, 10)


def test_fsdp_in_half_precision_gathers_half_and_casts_nothing() -> None:
    """Gradients are computed in half, too, and sent in full; copies of weights that a gradient exists of are gone."""
    peak = memory(PlannedStrategy.FSDP, 2, MODEL, PASS, precision="bfloat16")
    assert (peak.casts, peak.gradients, peak.activations) == (0, 10, 40 - 10 * (80 - 20) // 80)
    assert peak.gathered == (100 - 90) // 2 + (30 + 40) // 2 + 3 * 40 // 2
    accumulating = memory(PlannedStrategy.FSDP, 2, MODEL, PASS, 2, precision="bfloat16")
    assert (accumulating.casts, accumulating.gradients, accumulating.activations) == (0, 40, 50 - 10)
    alone = memory(PlannedStrategy.TENSOR, 1, MODEL, PASS, precision="bfloat16")
    assert alone == memory(PlannedStrategy.TENSOR, 1, MODEL, PASS), "nothing is gathered"


@pytest.mark.parametrize(
    ("options", "blocks", "whole"),
    [
        (FsdpSettings(), (10, 10), 80 + 2 * 80),
        (FsdpSettings(), (), 100 + 2 * 100),
        (FsdpSettings(prefetch=2), (30, 40, 20), 10 + 90 + 80),
        (FsdpSettings(reshard_after_forward=False), (30, 40, 10, 10), 10 + 90 + 80),
    ],
    ids=["most is in no block", "no blocks", "two under way", "kept after the forward pass"],
)
def test_what_fsdp_gathers_follows_from_blocks_and_options(
    options: FsdpSettings, blocks: tuple[int, ...], whole: int
) -> None:
    assert max(unsharded_bytes(MODEL.model_copy(update={"blocks": blocks}), options)) == whole


def test_gradients_of_a_large_embedding_are_whole_when_activations_are_gone() -> None:
    """Its weight is in no block, and used by the first and the last layer."""
    model = MODEL.model_copy(update={"blocks": (10, 10)})
    peak = memory(PlannedStrategy.FSDP, 4, model, PASS, passes=2)
    assert (peak.activations, peak.gathered) == (0, 80 + 2 * 80)
    deep = PASS.model_copy(update={"accumulating": 400})
    peak = memory(PlannedStrategy.FSDP, 4, model, deep, passes=2)
    assert (peak.activations + peak.casts, peak.gathered) == (400, 80 + 20 + 2 * 10)


def test_with_the_state_in_the_memory_of_the_machine_a_device_has_what_is_gathered() -> None:
    usual = memory(PlannedStrategy.FSDP, 4, MODEL, PASS, passes=2)
    for passes in (1, 2):
        offloaded = memory(PlannedStrategy.FSDP, 4, MODEL, PASS, passes, FsdpSettings(cpu_offload=True))
        assert (offloaded.parameters, offloaded.gradients, offloaded.optimizer, offloaded.buffers) == (0, 0, 0, 7)
        assert (offloaded.gathered, offloaded.activations) == (usual.gathered, usual.activations)


def test_the_size_of_a_model_alone_tells_nothing_of_what_is_gathered() -> None:
    assert unsharded_bytes(state_of(25), FsdpSettings()) == (0, 0)


def test_ranks_without_locks_share_the_weights_and_nothing_else() -> None:
    one = memory(PlannedStrategy.SINGLE, 1, MODEL, PASS)
    assert worker_memory(1, MODEL, PASS, 1) == one
    three = worker_memory(3, MODEL, PASS, 1)
    assert (three.parameters, three.gradients, three.optimizer) == (100, 3 * 20, 3 * 160)
    assert (three.activations, three.casts, three.data) == (3 * 30, 3 * 10, 3 * 3)
    # Buffers of 7 bytes of the model and of its average for each rank; the 93 bytes of weights in that once.
    assert three.buffers == 93 + 3 * 14
    assert worker_memory(3, MODEL, PASS, 2).gradients == 3 * 80


def test_a_job_without_locks_is_planned_for_the_ranks_of_its_worker() -> None:
    plan = made(10_000, strategy="hogwild")
    assert [(row.name, row.batch) for row in plan.rows] == [
        ("single on 1 worker", MicroBatches(16, 1)),
        ("hogwild on 2 ranks, as the job says,", MicroBatches(8, 1)),
        ("hogwild on 4 ranks", MicroBatches(4, 1)),
    ]
    assert plan.notes[0].startswith("Sizes are those of all ranks of the worker together")
    assert made(200, 4, strategy="hogwild").recommendation.endswith("Take fewer ranks, or a machine with more memory.")


@pytest.mark.parametrize(
    ("resources", "size"),
    [
        ({"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}}, 2 * GIB),
        ({"requests": {"memory": "512M"}}, 512 * 10**6),
        ({"limits": {"memory": 4096}}, 4096),
        ({"limits": {"cpu": 2}}, None),
    ],
)
def test_the_memory_of_a_worker_is_what_its_container_may_take(resources: dict[str, Any], size: int | None) -> None:
    assert allowed(Workers.parse({"resources": resources})) == size


def test_a_process_with_several_devices_is_not_planned_and_the_plan_says_so() -> None:
    plan = made(10_000, strategy="model")
    assert {row.strategy for row in plan.rows} == {PlannedStrategy.SINGLE, PlannedStrategy.DDP, PlannedStrategy.FSDP}
    assert "model is not planned: one process would have several devices." in plan.notes


def test_without_a_trace_all_state_counts_and_activations_do_not() -> None:
    peak = memory(PlannedStrategy.SINGLE, 1, MODEL, None)
    assert (peak.gradients, peak.activations) == (80, 0)


@pytest.mark.parametrize(
    ("world", "most", "batch"),
    [
        (1, None, MicroBatches(64, 1)),
        (3, None, MicroBatches(22, 1)),
        (3, 8, MicroBatches(8, 3)),
        (100, 8, MicroBatches(1, 1)),
        (1, 60, MicroBatches(32, 2)),
    ],
)
def test_a_share_is_cut_as_the_loop_cuts_it(world: int, most: int | None, batch: MicroBatches) -> None:
    assert batch_of(Loop(global_batch_size=64, micro_batch_size=most), world) == batch


def test_each_size_of_a_micro_batch_is_traced_once() -> None:
    assert batches(Loop(global_batch_size=64, micro_batch_size=16), (1, 2, 4, 8)) == (16, 8)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("79.5 GiB", int(79.5 * GIB)), ("16Gi", 16 * GIB), ("1tb", 10**12), ("512 B", 512)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert bytes_of(text, "--device-memory") == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("80", "the unit is missing; take one of B, KB"),
        ("80 parsecs", "the unit parsecs is not known"),
        ("much", "'much' is not a size"),
        ("-3GB", "is not a size"),
        ("0GB", "is not positive"),
    ],
)
def test_a_wrong_size_is_told_with_what_is_right(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        bytes_of(text, "--device-memory")
    assert str(caught.value).startswith("--device-memory: ")


@pytest.mark.parametrize("text", ["0", "1,0", "-2", "two", "", "1,,2"])
def test_no_workers_are_an_error(text: str) -> None:
    with pytest.raises(UserError, match="is not a number of workers; write positive integers"):
        list(world_sizes(text))


def test_sizes_are_shown_in_the_units_of_memory() -> None:
    assert [format_bytes(size) for size in (36, 1024, 3 * 2**20 + 2**19, 26.1 * GIB)] == [
        "36 B",
        "1.0 KiB",
        "3.5 MiB",
        "26.1 GiB",
    ]


SPEED = Speed(flops=1000.0, utilization=0.5, bandwidth=100.0)


def test_time_is_operations_over_what_of_the_peak_is_reached() -> None:
    time = step_time(PlannedStrategy.SINGLE, 1, MODEL, PASS, 2, SPEED)
    assert (time.compute, time.communication, time.step) == (3.6, 0.0, 3.6)


def test_ddp_sends_gradients_once_a_step_behind_the_last_backward_pass() -> None:
    time = step_time(PlannedStrategy.DDP, 4, MODEL, PASS, 2, SPEED)
    assert time.communication == pytest.approx(2 * 3 / 4 * 80 / 100)
    assert time.step == pytest.approx(3.6)
    slow = step_time(PlannedStrategy.DDP, 4, MODEL, PASS, 2, Speed(1000.0, 0.5, 10.0))
    assert slow.step == pytest.approx(3.6 + 12.0 - 2 / 3 * 1.8)


def test_fsdp_moves_parameters_twice_and_gradients_once_in_each_pass() -> None:
    time = step_time(PlannedStrategy.FSDP, 4, MODEL, PASS, 2, Speed(1000.0, 0.5, 10.0))
    assert time.communication == pytest.approx(3 / 4 * (200 + 80) * 2 / 10)
    assert time.step == pytest.approx(time.communication)


def test_a_run_costs_its_steps_times_its_devices() -> None:
    assert steps_of(Loop(epochs=3, global_batch_size=64), 640) == 30
    assert steps_of(Loop(epochs=3, global_batch_size=64, drop_last=True), 639) == 27
    assert steps_of(Loop(epochs=3, global_batch_size=64, max_steps=5), 640) == 5
    assert cost(7200, 0.5, 4, 2.5) == pytest.approx(10.0)


def test_precision_decides_which_peak_of_a_device_counts() -> None:
    assert DEVICES["h100"].peak("float32") == 67e12
    assert DEVICES["h100"].peak("bfloat16") == 989e12


def test_what_ranks_add_up_that_split_matrices_hides_behind_nothing() -> None:
    traced = PASS.model_copy(update={"added_up": 300})
    time = step_time(PlannedStrategy.TENSOR, 1, MODEL, traced, 2, SPEED, tensor=3)
    assert time.communication == pytest.approx(2 * 2 / 3 * 300 * 2 / 100)
    assert time.step == pytest.approx(time.compute + time.communication)


def made(
    device_memory: int, wanted: int = 2, footprint: Footprint = MODEL, per_worker: int = 1, **loop: object
) -> Plan:
    given = Loop.model_validate({"global_batch_size": 16, "optimizer": Optimizer(), **loop})
    known = {}
    for tensor in (1, degree_of(given)):
        passes = tuple(PASS.model_copy(update={"samples": one}) for one in batches(given, (1, 2, 4), tensor))
        known[tensor] = footprint.model_copy(update={"passes": passes if footprint.passes else ()})
    return planned(known, given, (1, 2, 4), wanted, PlanBudget(device_memory, 10, SPEED, 3.0), per_worker)


@pytest.mark.parametrize(
    ("device_memory", "wanted", "sentence"),
    [
        (10_000, 2, "ddp on 2 workers, as the job says, fits with 9.3 KiB to spare; fsdp is not needed."),
        (10_000, 1, "single on 1 worker fits with 9.3 KiB to spare."),
        (10_000, 3, "ddp on 4 workers fits with 9.3 KiB to spare; fsdp is not needed."),
        (450, 4, "ddp on 4 workers, as the job says, lacks 60 B; fsdp on 4 workers fits with 135 B to spare."),
        (400, 2, "fsdp on 2 workers lacks 10 B; fsdp on 4 workers fits with 85 B to spare."),
        (50, 2, "Nothing fits: fsdp on 4 workers, which takes least, lacks 265 B. Take more workers with fsdp,"),
    ],
)
def test_the_simplest_strategy_that_fits_is_recommended(device_memory: int, wanted: int, sentence: str) -> None:
    assert made(device_memory, wanted).recommendation.startswith(sentence)


def test_an_optimizer_of_whole_matrices_may_be_split_like_any_other() -> None:
    found = made(50, optimizer=Optimizer(name="muon"), strategy="fsdp", tensor_parallel=2)
    assert {row.strategy for row in found.rows} == {
        PlannedStrategy.SINGLE,
        PlannedStrategy.DDP,
        PlannedStrategy.FSDP,
        PlannedStrategy.TENSOR,
    }
    assert found.notes == ()


FSDP_BY_HALVES = {"strategy": "fsdp", "tensor_parallel": 2}


def test_the_strategy_of_the_job_is_named_also_where_a_simpler_one_fits() -> None:
    assert made(10_000, strategy="fsdp").recommendation == (
        "ddp on 2 workers fits with 9.3 KiB to spare; fsdp, as the job says, is not needed."
    )
    assert made(10_000, 4, **FSDP_BY_HALVES).recommendation == (
        "ddp on 4 workers fits with 9.3 KiB to spare; fsdp is not needed; fsdp+tensor, as the job says, is not needed."
    )


def test_ranks_that_split_matrices_share_samples_and_are_planned_where_they_divide_the_ranks() -> None:
    rows = [row for row in made(10_000, **FSDP_BY_HALVES).rows if row.strategy is PlannedStrategy.TENSOR]
    assert [(row.workers, row.tensor, row.batch) for row in rows] == [
        (2, 2, MicroBatches(16, 1)),
        (4, 2, MicroBatches(8, 1)),
    ]
    two, four = (row.memory for row in rows)
    assert (two.parameters, two.gathered) == (100, 0), "two that split matrices share no state"
    assert (four.parameters, four.gathered) == (50, 160)


def test_no_row_for_ranks_that_cannot_split_matrices_evenly_and_a_note_that_says_so() -> None:
    plan = made(10_000, strategy="fsdp", tensor_parallel=3)
    assert not any(row.tensor > 1 for row in plan.rows)
    assert plan.notes == ("tensorParallel 3 needs a multiple of 3 ranks, and none is planned for.",)


def test_copies_in_each_worker_share_the_state_over_its_ranks_alone() -> None:
    def parameters(**more: object) -> list[int]:
        rows = made(10_000, strategy="fsdp", fsdp=FsdpSettings.model_validate(more), per_worker=2).rows
        return [row.memory.parameters for row in rows if row.strategy is PlannedStrategy.FSDP]

    assert parameters() == [50, 25]
    assert parameters(shard_within="Worker") == [50, 50]


def test_where_activations_are_most_of_it_a_smaller_micro_batch_is() -> None:
    small = MODEL.model_copy(
        update={"parameters": 1, "gradients": 1, "optimizer": 2, "average": 0, "data": 0, "casts": 0, "blocks": (1,)}
    )
    assert "set loop.microBatchSize below 4, or" in made(20, footprint=small).recommendation
    assert "Activations of one sample" in made(20, footprint=small, micro_batch_size=1).recommendation


def test_what_the_numbers_do_not_say_is_noted() -> None:
    notes = made(10_000, footprint=MODEL.model_copy(update={"passes": (), "untraced": "x"}), compile=True).notes
    assert notes[0].startswith("Activations are not counted and times are not known, because x.")
    assert notes[1].startswith("The step is traced without loop.compile")
    assert made(10_000, global_batch_size=3).notes == (
        "globalBatchSize 3 is less than 4 workers: some have nothing to do.",
    )


def test_one_of_a_job_and_a_size_is_planned() -> None:
    for words in ([], ["examples/digits.yaml", "--parameters", "7e9"]):
        with pytest.raises(UserError, match="either a job's manifest, or --parameters"):
            plan(*words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--parameters", "-1"], "--parameters: give a number above 0, not -1"),
        (["--parameters", "0.5"], "--parameters: 0.5 is less than one parameter"),
        (["--parameters", "7e9", "--workers", "0"], "--workers: '0' is not a number of workers"),
        (["--parameters", "7e9", "--device-memory", "80XB"], "--device-memory: 80XB: the unit XB is not known"),
        (["--parameters", "7e9", "--device", "abacus"], "--device: abacus is unknown; choose one of h200, h100"),
        (["--parameters", "7e9", "--utilization", "40"], "--utilization: 40.0 is out of range"),
        (["--parameters", "7e9", "--strategies", "ddp"], "--strategies: for a model of which only the size is known"),
        (["examples/minigpt.yaml", "--strategies", "ddp,fsdb"], "--strategies: 'fsdb' is not a strategy; choose from"),
        (["examples/minigpt.yaml", "--strategies", "fsdp+tensor"], "--strategies: fsdp+tensor needs tensorParallel"),
        (["examples/minigpt.yaml", "--strategies", "ddp,hogwild"], "--strategies: hogwild is planned alone"),
        (["examples/minigpt.yaml", "--strategies", "ddp,dp"], "--strategies: dp is not planned: one process would"),
        (["examples/digits-hogwild.yaml", "--strategies", "ddp"], "--strategies: hogwild is planned alone"),
        (["--parameters", "7e9", "--peak-flops", "inf"], "--peak-flops: give a number above 0, not inf"),
    ],
)
def test_a_wrong_option_is_told_with_what_is_right(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*words)
    assert str(caught.value).startswith(told)


@pytest.mark.full("cli", "trainer")
def test_where_no_strategy_can_be_planned_each_is_named_with_its_reason() -> None:
    of_ranks = ("examples/minigpt.yaml", "--set", "trainer.loop.syncBatchNorm=true", "--workers", "1")
    with pytest.raises(UserError) as caught:
        plan(*of_ranks, "--strategies", "pipeline,pipeline+fsdp")
    lines = str(caught.value).splitlines()
    assert lines[0] == "--strategies: there is nothing to plan"
    assert [line.partition(": strategy")[0] for line in lines[1:]] == [
        "pipeline is not planned: this job cannot take pipeline",
        "pipeline+fsdp is not planned: this job cannot take pipeline+fsdp",
    ]
    with pytest.raises(UserError, match="this job cannot take pipeline: strategy: pipeline does not go"):
        plan(*of_ranks, "--strategies", "pipeline")


SCRIPT = """\
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {name: a}
spec:
  trainer:
    command: [python, train.py]
"""


def test_a_script_has_no_model_that_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SCRIPT)
    with pytest.raises(UserError) as caught:
        plan(str(tmp_path / "job.yaml"))
    assert "the model of a script is unknown" in str(caught.value)
    assert "job.yaml:6:" in str(caught.value)


def test_a_wrong_manifest_is_told_as_everywhere(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SCRIPT.replace("command", "comand"))
    with pytest.raises(UserError, match=r"job.yaml:6:5.*unknown field comand"):
        plan(str(tmp_path / "job.yaml"))


def test_the_state_of_a_model_is_four_numbers_for_each_parameter() -> None:
    footprint = state_of(10)
    assert (footprint.parameters, footprint.gradients, footprint.optimizer) == (40, 40, 80)


def test_the_documentation_shows_the_classic_table_as_it_is() -> None:
    page = blocks(ROOT / "docs" / "plan.md")
    at = next(at for at, block in enumerate(page) if block.text.startswith("tandem plan --parameters 7e9"))
    words, shown_there = page[at].text.split(), page[at + 1]
    assert plan(*words[2:]).rstrip() == shown_there.text.rstrip()


def test_mirrors_take_four_times_the_share_of_a_process_and_half_of_that_without_a_neighbour() -> None:
    footprint = state_of(2**28)
    note = "Mirrors (elasticity.mirror) take memory of the host for each"
    assert mirror_note(footprint, [1, 2, 8], 1) == f"{note} worker: 6.0 GiB with 1, 6.0 GiB with 2, 1.5 GiB with 8."
    assert mirror_note(footprint, [2, 4], 2) == f"{note} process: 3.0 GiB with 2, 3.0 GiB with 4."
