"""`tandem bench`: which jobs are compared, what is read of their runs, and what is shown."""

import csv
import io
import sys
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tandem.errors import UserError
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import StrategyName
from tandem.processes.launch import TRACE
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef
from tandem_cli.bench.measurement import Measurement, Unmeasured, measure
from tandem_cli.bench.picture import draw_results
from tandem_cli.bench.results import BenchResults, Conditions, TrialRun
from tandem_cli.bench.variants import TRACE_STEPS, Variant, comparison, traced, warm_up
from tandem_cli.commands.bench import write
from tandem_trainer.strategies import passes
from tests.support import manifests
from tests.support.manifests import images

BEGAN = 1000.0


def job(loop: dict[str, Any] | None = None, **spec: Any) -> DistributedTrainingJob:
    return manifests.job(trainer={"task": "causal-lm", "loop": loop or {}}, **spec)


def run_directory(
    path: Path, losses: list[float], seconds: float = 0.5, tokens: int | None = None, starts: int = 1
) -> RunDir:
    """A complete run of 8 samples a step."""
    rundir = manifests.run_directory(path, job())
    end = records.TrainingEnd(
        time=BEGAN + 100, peak_memory={"0": 500.0, "1": 700.0}, peak_gpu_memory={"0": 90.0, "1": 80.0}
    )
    steps = [
        records.Step(time=BEGAN + seconds * number, step=number, samples=8, loss=loss)
        for number, loss in enumerate(losses, 1)
    ]
    for generation in range(1, starts + 1):
        written = [records.Start(time=BEGAN, step=0, tokens_per_sample=tokens), *steps, end]
        rundir.training_log(generation).write_bytes(b"".join(record.line() + b"\n" for record in written))
    rundir.mark_done(CheckpointRef(name="step-000000001", step=1, generation=1))
    return rundir


def found(speed: float, **changed: Any) -> Measurement:
    plain: dict[str, Any] = {
        "samples_per_second": speed,
        "tokens_per_second": None,
        "seconds": 10.0,
        "steps": 50,
        "peak_memory": 500e6,
        "peak_gpu_memory": None,
        "final_loss": 1.5,
        "seconds_to_target": None,
        "samples_to_target": None,
    }
    return Measurement(**(plain | changed))


def results(*runs: tuple[str, int, Measurement | None], **changed: Any) -> BenchResults:
    """What came of these runs, each of a strategy and a number of workers."""
    plain: dict[str, Any] = {
        "job": "lm",
        "steps": 60,
        "warm_up_steps": 10,
        "rounds": 2,
        "cores": 8,
        "threads_per_rank": 1,
        "load_before": 0.1,
    }
    made = [
        TrialRun(Variant(strategy, workers, workers, job()), 1, one, "" if one else "it has no luck", "runs/x")
        for strategy, workers, one in runs
    ]
    return BenchResults(Conditions(**(plain | changed)), tuple(made))


def variants_of(job: DistributedTrainingJob, strategies: str | None, workers: str | None, steps: int) -> list[Variant]:
    """Where the job can take all of them."""
    compared = comparison(job, strategies, workers, steps)
    assert compared.left_out == ()
    return compared.variants


def text(shown: BenchResults) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown.table())
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_each_strategy_is_trained_with_each_number_of_workers() -> None:
    compared = variants_of(job(), "ddp,fsdp", "2,1", 60)
    assert [(one.strategy, one.workers) for one in compared] == [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]
    assert [one.job.spec.trainer.settings_of_loop.strategy for one in compared] == ["ddp", "ddp", "fsdp", "fsdp"]
    assert [one.job.spec.workers.replicas for one in compared] == [1, 2, 1, 2]


def test_without_words_the_job_is_compared_with_one_worker_of_it() -> None:
    compared = variants_of(job({"strategy": "fsdp"}, workers={"replicas": 3, "maxReplicas": 4}), None, None, 60)
    assert [(one.strategy, one.workers) for one in compared] == [("fsdp", 1), ("fsdp", 3)]


def test_ranks_are_those_of_all_workers() -> None:
    (one,) = variants_of(job(workers={"processesPerReplica": 2}), "ddp", "3", 60)
    assert one.ranks == 6


def test_a_run_has_just_so_many_steps_and_nothing_beside_them() -> None:
    given = job({"epochs": 2, "maxSteps": 7}, checkpoint={"everySeconds": 5.0}, evaluators={"replicas": 3})
    (one,) = variants_of(given, "ddp", "2", 60)
    spec = one.job.spec
    assert (spec.trainer.settings_of_loop.max_steps, spec.trainer.settings_of_loop.epochs) == (60, 60)
    assert spec.evaluation.processes == 0
    assert spec.checkpoint.interval_seconds is None
    assert (spec.checkpoint.every_steps or 0) > 60
    assert spec.workers.min_replicas == 2, "a group with fewer would be measured as one of two"
    assert spec.elasticity.max_restarts == 0


def test_the_built_in_task_keeps_its_settings() -> None:
    given = manifests.job(trainer=images({"data": {"name": "digits"}}))
    one, same = (*variants_of(given, "fsdp", "1", 60), *variants_of(given, None, "1", 60))
    assert same.strategy == "ddp"
    trainer, loop = one.job.spec.trainer, one.job.spec.trainer.settings_of_loop
    assert (trainer.images.data.name, loop.strategy, loop.max_steps) == ("digits", "fsdp", 60)


def test_options_of_another_strategy_are_left_out_and_those_of_this_one_stay() -> None:
    given = job({"strategy": "fsdp", "fsdp": {"prefetch": 3}})
    ddp, fsdp = variants_of(given, "ddp,fsdp", "2", 60)
    assert ddp.job.spec.trainer.settings_of_loop.fsdp is None
    assert fsdp.job.spec.trainer.settings_of_loop.fsdp.prefetch == 3


def test_split_matrices_are_a_strategy_of_their_own() -> None:
    given = job({"strategy": "fsdp", "fsdp": {"prefetch": 3}, "tensorParallel": 2}, workers={"processesPerReplica": 2})
    compared = variants_of(given, "ddp,fsdp,fsdp+tensor", "2", 60)
    loops = [one.job.spec.trainer.settings_of_loop for one in compared]
    assert [(loop.strategy, loop.tensor_parallel) for loop in loops] == [("ddp", 1), ("fsdp", 1), ("fsdp", 2)]
    assert [loop.fsdp and loop.fsdp.prefetch for loop in loops] == [None, 3, 3]
    (own,) = variants_of(given, None, "2", 60)
    assert (own.name, own.job.spec.trainer.settings_of_loop.tensor_parallel) == ("fsdp+tensor, 2 workers", 2)
    short = traced(own, Path("trace.json")).job.spec.trainer.settings_of_loop
    assert (short.strategy, short.tensor_parallel, short.max_steps) == ("fsdp", 2, TRACE_STEPS)


@pytest.mark.parametrize(
    ("strategies", "workers", "told"),
    [
        ("ddp,foo", "1", f"'foo' is not a strategy; choose from {', '.join(get_args(StrategyName))}, fsdp\\+tensor"),
        ("ddp", "0", "'0' is not a number of workers"),
        ("hogwild", "2", "this job cannot take hogwild with 2 workers: strategy: hogwild is for"),
        ("fsdp,fsdp+tensor", "1", "needs tensorParallel: set it, with strategy fsdp"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(strategies: str, workers: str, told: str) -> None:
    given = job({"strategy": "fsdp"}, workers={"processesPerReplica": 2})
    with pytest.raises(UserError, match=told) as refused:
        variants_of(given, strategies, workers, 60)
    assert "\n" not in str(refused.value)


def test_what_a_strategy_cannot_have_is_left_out_with_the_reason() -> None:
    compared = comparison(job(workers={"processesPerReplica": 2}), "ddp,hogwild", "1,2", 60)
    assert [(one.strategy, one.workers) for one in compared.variants] == [("ddp", 1), ("ddp", 2), ("hogwild", 1)]
    (why,) = compared.left_out
    assert why.startswith("hogwild with 2 workers: strategy: hogwild is for the processes of one worker")
    shown = results(("ddp", 1, found(100.0)), left_out=compared.left_out)
    assert f"left out: {why}" in shown.notes
    assert shown.record()["leftOut"] == compared.left_out


def test_a_script_is_refused() -> None:
    with pytest.raises(UserError, match="needs a job with a task"):
        variants_of(manifests.job(trainer={"command": ["train.py"]}), None, None, 60)


def test_the_warm_up_is_a_quarter_of_few_steps() -> None:
    assert [warm_up(steps) for steps in (5, 12, 40, 60, 1000)] == [1, 3, 10, 10, 10]


def test_a_traced_run_is_short_and_names_its_file(tmp_path: Path) -> None:
    given = job()
    (one,) = variants_of(given, "ddp", "1", 60)
    short = traced(one, tmp_path / "trace.json").job.spec.trainer
    assert short.settings_of_loop.max_steps == TRACE_STEPS > passes.SKIPPED_STEPS + passes.RECORDED_STEPS
    assert [(variable.name, variable.value) for variable in short.env] == [(TRACE, str(tmp_path / "trace.json"))]


def test_speed_leaves_the_warm_up_out(tmp_path: Path) -> None:
    one = measure(run_directory(tmp_path, [2.0] * 20, seconds=0.5, tokens=64), warm_up=10)
    assert (one.samples_per_second, one.tokens_per_second) == (16.0, 1024.0)
    assert (one.seconds, one.steps, one.final_loss) == (5.0, 10, 2.0)


def test_memory_is_that_of_the_rank_that_has_most(tmp_path: Path) -> None:
    one = measure(run_directory(tmp_path, [2.0] * 20), warm_up=10)
    assert (one.peak_memory, one.peak_gpu_memory) == (700.0, 90.0)


def test_a_target_is_reached_by_the_mean_of_five_losses(tmp_path: Path) -> None:
    # The low one in the beginning is chance.
    rundir = run_directory(tmp_path, [3.0, 0.5, 3.0, 3.0, 3.0, *[1.0] * 10], seconds=0.5)
    one = measure(rundir, warm_up=3, target=1.0)
    assert (one.seconds_to_target, one.samples_to_target) == (5.0, 80)
    assert measure(rundir, warm_up=3, target=0.9).seconds_to_target is None
    assert measure(rundir, warm_up=3).samples_to_target is None


def test_a_run_that_did_not_end_well_has_no_numbers(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path, [2.0] * 20)
    rundir.mark_failed("RestartBudgetExhausted", "too many failures", 1)
    with pytest.raises(Unmeasured, match="too many failures"):
        measure(rundir, warm_up=10)


def test_nor_has_one_that_is_not_complete_or_was_formed_twice(tmp_path: Path) -> None:
    with pytest.raises(Unmeasured, match="did not complete"):
        measure(manifests.run_directory(tmp_path / "new", job()), warm_up=10)
    with pytest.raises(Unmeasured, match="formed 2 times"):
        measure(run_directory(tmp_path / "twice", [2.0] * 20, starts=2), warm_up=10)
    with pytest.raises(Unmeasured, match="4 steps"):
        measure(run_directory(tmp_path / "short", [2.0] * 4), warm_up=10)


def test_a_row_is_the_median_of_its_runs() -> None:
    shown = results(("ddp", 1, found(100.0)), ("ddp", 1, found(130.0)), ("ddp", 1, found(110.0)), rounds=3)
    (row,) = shown.rows
    assert (row.samples_per_second, row.lowest_samples_per_second, row.highest_samples_per_second) == (110, 100, 130)
    assert "100–130" in text(shown)


def test_efficiency_compares_with_one_worker_of_the_same_strategy() -> None:
    runs = [("ddp", 1, 100.0), ("ddp", 2, 150.0), ("fsdp", 1, 50.0), ("fsdp", 2, 90.0)]
    shown = results(*((strategy, workers, found(speed)) for strategy, workers, speed in runs))
    assert [row.efficiency for row in shown.rows] == [1.0, 0.75, 1.0, 0.9]
    assert "75 %" in text(shown)


def test_more_than_is_possible_is_explained() -> None:
    """160 % of the speed of one worker is nothing that workers can add."""
    shown = results(("ddp", 1, found(100.0)), ("ddp", 2, found(320.0)), ("fsdp", 1, found(100.0)))
    (note,) = (note for note in shown.notes if "100 %" in note)
    assert note.startswith("ddp on 2 workers has an efficiency above 100 %: ")
    assert not any("100 %" in note for note in results(("ddp", 1, found(100.0)), ("ddp", 2, found(203.0))).notes)


def test_efficiency_is_unknown_without_one_worker_or_on_another_device() -> None:
    assert results(("ddp", 2, found(150.0))).rows[0].efficiency is None
    shown = results(("ddp", 1, found(100.0)), ("ddp", 2, found(900.0, peak_gpu_memory=1e9)))
    assert [row.efficiency for row in shown.rows] == [1.0, None]


def test_a_failed_run_is_a_row_with_its_reason() -> None:
    shown = results(("ddp", 1, found(100.0)), ("fsdp", 1, None))
    assert [run.variant.strategy for run in shown.failed] == ["fsdp"]
    assert "failed" in text(shown)
    assert "fsdp, 1 worker, round 1: it has no luck; see runs/x/log" in shown.notes
    assert shown.rows[1].failure == "it has no luck"
    assert shown.record()["runs"][1]["failure"] == "it has no luck"


def test_a_target_that_one_run_missed_was_not_reached() -> None:
    reached = found(100.0, seconds_to_target=3.0, samples_to_target=80)
    shown = results(
        ("ddp", 1, reached), ("ddp", 1, reached), ("fsdp", 1, reached), ("fsdp", 1, found(9.0)), target_loss=2.5
    )
    assert [row.seconds_to_target for row in shown.rows] == [3.0, None]
    assert "time to 2.5" in text(shown)
    assert "not reached" in text(shown)


def test_columns_in_which_nothing_is_known_are_left_out() -> None:
    assert "tokens/s" not in text(results(("ddp", 1, found(1.0))))
    assert "tokens/s" in text(results(("ddp", 1, found(1.0, tokens_per_second=64.0))))


def test_it_says_what_keeps_numbers_from_being_good() -> None:
    crowded = " ".join(results(("ddp", 3, found(1.0, seconds=0.5)), cores=2, load_before=4.0).notes)
    assert "3 ranks share 2 cores" in crowded
    assert "load 4.0 on 2 cores" in crowded
    assert "measured over 0.5 s" in crowded
    quiet = " ".join(results(("ddp", 2, found(1.0)), cores=2).notes)
    assert not any(word in quiet for word in ("share", "load", "over"))


def test_the_csv_has_a_line_for_each_row() -> None:
    shown = results(("ddp", 1, found(100.0)), ("ddp", 2, found(150.0)), ("fsdp", 2, None))
    lines = list(csv.DictReader(io.StringIO(shown.csv())))
    assert [line["samplesPerSecond"] for line in lines] == ["100.0", "150.0", ""]
    assert [line["efficiency"] for line in lines] == ["1.0", "0.75", ""]
    assert [line["failure"] for line in lines] == ["", "", "it has no luck"]


def test_the_picture_has_a_panel_for_speed_memory_and_efficiency() -> None:
    runs = [("ddp", 1, 100.0), ("ddp", 2, 150.0), ("fsdp", 1, 50.0), ("fsdp", 2, 90.0)]
    svg = draw_results(results(*((strategy, workers, found(speed)) for strategy, workers, speed in runs)))
    root = ElementTree.fromstring(svg)
    panels = [group.get("data-title", "") for group in root.iter() if group.get("class") == "panel"]
    assert [panel.split(" (")[0].split(":")[0] for panel in panels] == [
        "Samples a second",
        "Peak memory of a rank",
        "Efficiency",
    ]
    assert "var(--" not in svg, "no page around it sets its colours"
    curves = [group.get("data-label") for group in root.iter() if group.get("class") == "curve"]
    assert curves == ["ddp", "fsdp"] * 3


def test_without_a_number_there_is_no_picture(tmp_path: Path) -> None:
    shown = results(("ddp", 1, None))
    assert draw_results(shown) == ""
    assert write(shown, tmp_path) == ()
    assert {path.name for path in tmp_path.iterdir()} == {"bench.csv", "bench.json"}


def test_files_are_written_where_nothing_is_installed_that_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = results(("ddp", 1, found(100.0)))
    assert [path.name for path in write(shown, tmp_path / "all")] == ["bench.png", "bench.svg"]
    for name in ("tandem_cli.report.raster", "tandem_cli.bench.picture"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert write(shown, tmp_path / "some") == ()
    assert {path.name for path in (tmp_path / "some").iterdir()} == {"bench.csv", "bench.json"}
