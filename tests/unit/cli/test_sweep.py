"""Sweeps: what their file may say, how trials are started, pruned and finished, and what a killed driver leaves."""

import io
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem import Client
from tandem.errors import ManifestError, UserError
from tandem.wire.status import Score, Status
from tandem_cli.platforms import PlatformError, RunNotFoundError
from tandem_cli.sweep import driver as driver_module
from tandem_cli.sweep import figures
from tandem_cli.sweep.definition import SweepFolder, define, find_sweep
from tandem_cli.sweep.driver import Active, Driver, SweepFailedError, promoted
from tandem_cli.sweep.page import sweep_page
from tandem_cli.sweep.study import JOURNAL, Study, Trial, best_of, importances, read_trials
from tandem_cli.sweep.table import trial_record, trial_table
from tandem_coordinator.charts.chart import WIDE
from tests.support import ROOT
from tests.support.processes import tandem
from tests.support.worlds.played_sweep import PlayedClient, PlayedRun

RATE = "trainer.loop.optimizer.learningRate"
BATCH = "trainer.loop.globalBatchSize"
JOB = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "digits.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def spec(**changed: Any) -> dict[str, Any]:
    space = {RATE: {"low": 0.001, "high": 0.1, "log": True}, BATCH: {"values": [32, 64]}}
    fields = {"job": "digits.yaml", "space": space, "budget": {"trials": 6}, "pruner": {"minSteps": 100}}
    return {**fields, **changed}


def written(name: str = "s", **changed: Any) -> str:
    data = {"apiVersion": "tandem.dev/v1alpha1", "kind": "Sweep", "metadata": {"name": name}, "spec": spec(**changed)}
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return str(path)


def recorded(**changed: Any) -> SweepFolder:
    definition = define(written(**changed))
    place = SweepFolder(Path("runs") / definition.name)
    place.record(definition)
    return place


class TestItsFile:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (
                {"space": {"trainer.loop.optimiser.learningRate": {"low": 0.1, "high": 1.0}}},
                f"did you mean spec.{RATE}?",
            ),
            ({"space": {RATE: {"low": 0.1}}}, "a range has low and high"),
            ({"space": {RATE: {"low": 0.2, "high": 0.1}}}, "low must be less than high"),
            ({"space": {RATE: {"low": 0.0, "high": 0.1, "log": True}}}, "begins above 0"),
            ({"space": {RATE: {"values": [0.1], "high": 0.1}}}, "either values, or low and high"),
            ({"space": {RATE: {"values": [0.1, 0.1]}}}, "each value stands once"),
            ({"space": {BATCH: {"values": [32, -1]}}}, f"{BATCH}=-1: "),
            ({"space": {RATE: {"low": -1.0, "high": 0.1}}}, f"{RATE}=-1"),
            ({"sampler": "grid"}, f"a grid needs values, or low, high and step, for {RATE}"),
            ({"sampler": "bayes"}, "one of tpe, random, grid"),
            ({"budget": {"trails": 3}}, "did you mean trials?"),
            ({"job": "other.yaml"}, "other.yaml does not exist"),
            ({"space": {}}, "spec.space"),
        ],
    )
    def test_a_mistake_is_named_before_anything_starts(self, changed: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError) as error:
            define(written(**changed))
        assert message in str(error.value)

    def test_a_mistake_in_the_space_has_its_line(self) -> None:
        with pytest.raises(ManifestError) as error:
            define(written(space={RATE: {"low": 0.1, "high": 1.0}, "trainer.loop.epoch": {"values": [1]}}))
        (problem,) = error.value.problems
        assert (problem.file, "trainer.loop.epoch" in problem.excerpt) == ("s.yaml", True)

    def test_a_name_that_leaves_no_room_for_a_number_is_refused(self) -> None:
        with pytest.raises(ManifestError, match=r"metadata\.name"):
            define(written("s" * 62))

    def test_a_trial_is_the_job_with_its_values_its_name_and_a_label(self) -> None:
        definition = define(written(), ["workers.replicas=3"])
        data = definition.manifest({RATE: 0.01, BATCH: 32}, "s-4")
        assert data["metadata"] == {"name": "s-4", "labels": {"tandem.dev/sweep": "s"}}
        assert data["spec"]["workers"]["replicas"] == 3
        assert data["spec"]["trainer"]["loop"] == {
            **JOB["spec"]["trainer"]["loop"], "globalBatchSize": 32, "optimizer": {"learningRate": 0.01}
        }  # fmt: skip

    def test_the_example_is_valid(self) -> None:
        assert set(define(str(ROOT / "examples/sweeps/digits.yaml")).spec.space) == {RATE, BATCH}


class TestItsFolder:
    def test_the_same_sweep_continues_with_another_budget(self) -> None:
        place = recorded()
        place.record(define(written(budget={"trials": 9}, workers=4)))
        assert (place.definition().spec.budget.trials, place.definition().spec.workers) == (9, 4)
        assert find_sweep("s") == place
        assert find_sweep("other") is None

    @pytest.mark.parametrize(
        ("changed", "part"),
        [({"space": {BATCH: {"values": [16]}}}, "space"), ({"pruner": {"name": "none"}}, "sampler or pruner")],
    )
    def test_another_sweep_is_refused(self, changed: dict[str, Any], part: str) -> None:
        place = recorded()
        with pytest.raises(UserError, match=f"a sweep with another {part}; give the sweep another name"):
            place.record(define(written(**changed)))

    def test_another_job_is_refused(self) -> None:
        place = recorded()
        with pytest.raises(UserError, match="another job"):
            place.record(define(written(), ["workers.replicas=3"]))

    def test_the_folder_of_a_run_is_refused(self) -> None:
        Path("runs/s").mkdir(parents=True)
        Path("runs/s/job.json").write_text("{}")
        with pytest.raises(UserError, match="exists and has no sweep"):
            recorded()

    def test_it_has_one_driver(self) -> None:
        place = recorded()
        with place.locked():
            assert place.is_running
            with pytest.raises(UserError, match="is running, in process"), place.locked():
                pass
        assert not place.is_running
        with pytest.raises(UserError, match="is not running"):
            place.stop()

    def test_a_damaged_record_is_named(self) -> None:
        place = recorded()
        (place.path / "sweep.json").write_text('{"version": 1}')
        with pytest.raises(UserError, match="is damaged, or of a newer version"):
            place.definition()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are done when they are submitted."""

    class Pool:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def submit(self, function: Callable[..., Any], *args: Any) -> Any:
            from concurrent.futures import Future

            task: Future[Any] = Future()
            try:
                task.set_result(function(*args))
            except UserError as error:
                task.set_exception(error)
            return task

        def shutdown(self, **_: Any) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(driver_module, "ThreadPoolExecutor", Pool)
    # The same name is what a played run has instead of a RunHandle.
    monkeypatch.setattr(driver_module, "RunHandle", PlayedRun)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return []


def drive(place: SweepFolder, client: PlayedClient, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(driver_module.time, "sleep", lambda seconds: client.advance())
    made = Driver(place.definition(), place, client, lambda text, mood: lines.append(text))  # type: ignore[arg-type]
    made.run()
    return made


class TestTheDriver:
    def test_the_budget_is_used_and_the_best_trial_is_chosen(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, client = recorded(pruner={"name": "none"}), PlayedClient(lambda number, step: number / 10)
        done = drive(place, client, lines, monkeypatch)
        assert client.submissions == [f"s-{number}" for number in range(6)]
        assert [trial.state for trial in done.trials] == ["Complete"] * 6
        assert (done.best.number, done.best.score) == (5, 0.5)  # type: ignore[union-attr]
        assert lines[1] == "trial 0 complete: accuracy 0.00 %, the best so far"
        assert read_trials(place.definition(), place) == [
            replace(trial, seconds=other.seconds) for trial, other in zip(done.trials, done.trials, strict=True)
        ]

    def test_worse_trials_are_stopped_at_a_rung_and_free_their_place(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, client = recorded(budget={"trials": 9}), PlayedClient(lambda number, step: 0.9 - number / 100)
        done = drive(place, client, lines, monkeypatch)
        states = [trial.state for trial in done.trials]
        assert states == ["Complete"] + ["Pruned"] * 8
        assert all(client.runs[f"s-{number}"].stops == 1 for number in range(1, 9))
        assert done.trials[3].reason == "accuracy 87.00 % at step 100"
        assert all(trial.last_step == 100 for trial in done.trials[1:])

    def test_with_promotion_trials_pause_at_a_rung_and_the_best_continue(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        quality = [0, 4, 8, 3, 7, 2, 6, 1, 5]
        place = recorded(budget={"trials": 9}, pruner={"name": "promotion", "minSteps": 100})
        client = PlayedClient(lambda number, step: quality[number] / 10 + step / 1e6, steps=900)
        done = drive(place, client, lines, monkeypatch)
        assert [trial.state == "Complete" for trial in done.trials] == [number == 2 for number in range(9)]
        # Trial 4 was among the best third of five, and trial 6 of seven.
        assert [client.runs[f"s-{number}"].step for number in range(9)] == [100, 100, 900, 100, 300, 100, 300, 100, 100]
        assert done.best == done.trials[2]
        assert lines[1] == "trial 0 paused: accuracy 0.01 % at step 100"
        assert [done.trials[0].state, done.trials[0].reason] == ["Pruned", "accuracy 0.01 % at step 100"]

    def test_a_paused_trial_continues_though_the_cluster_does_not_answer_at_first(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = itertools.count(step=5.0)
        monkeypatch.setattr(driver_module.time, "monotonic", lambda: next(now))
        resume, calls = PlayedRun.resume, itertools.count()

        def unanswered(run: PlayedRun) -> str:
            if next(calls) == 0:
                raise PlatformError("no answer")
            return resume(run)

        monkeypatch.setattr(PlayedRun, "resume", unanswered)
        place = recorded(budget={"trials": 1}, pruner={"name": "promotion", "minSteps": 100})
        done = drive(place, PlayedClient(), lines, monkeypatch)
        assert "trial 0 waits: no answer" in lines
        assert [trial.state for trial in done.trials] == ["Complete"]

    def test_a_single_trial_with_promotion_trains_to_its_end(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = recorded(budget={"trials": 1}, pruner={"name": "promotion", "minSteps": 100})
        done = drive(place, PlayedClient(), lines, monkeypatch)
        assert [trial.state for trial in done.trials] == ["Complete"]

    def test_a_goal_of_less_is_better_prunes_the_higher_loss(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("digits.yaml").write_text(
            yaml.safe_dump({**JOB, "spec": {**JOB["spec"], "evaluators": {"metric": "loss"}}})
        )
        monkeypatch.setattr(
            PlayedRun,
            "_score",
            lambda run: Score(name="step-1", step=run.step, metric="loss", value=run.score(run.number, run.step)),
        )
        place, client = recorded(), PlayedClient(lambda number, step: 1.0 - number / 10)
        done = drive(place, client, lines, monkeypatch)
        assert done.best is not None
        assert done.best.number == 5
        assert [trial.state for trial in done.trials] == ["Complete"] * 6, "each is better than all before"

    def test_a_trial_that_fails_is_told_and_replaced(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        client = PlayedClient(fails=lambda number: "TrainingFailed: out of memory" if number in (1, 3) else "")
        done = drive(recorded(pruner={"name": "none"}), client, lines, monkeypatch)
        states = [trial.state for trial in done.trials]
        assert (states.count("Complete"), states.count("Failed")) == (6, 2)
        assert "trial 1 failed: TrainingFailed: out of memory" in lines

    def test_a_trial_that_diverges_counts_as_the_worst(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        client = PlayedClient(fails=lambda number: "Diverged" if number < 4 else "")
        done = drive(recorded(pruner={"name": "none"}), client, lines, monkeypatch)
        assert [trial.state for trial in done.trials] == ["Pruned"] * 4 + ["Complete"] * 2
        assert done.trials[0].reason == "no checkpoint has a finite accuracy"

    def test_a_job_that_always_fails_ends_the_sweep(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        client = PlayedClient(fails=lambda number: "no such module")
        with pytest.raises(SweepFailedError, match="the last 3 trials of s failed, the newest because: no such module"):
            drive(recorded(), client, lines, monkeypatch)
        assert len(client.submissions) == 3

    def test_a_cluster_that_does_not_answer_is_asked_again(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = itertools.count(step=5.0)
        monkeypatch.setattr(driver_module.time, "monotonic", lambda: next(now))
        client = PlayedClient(silent=4)
        done = drive(recorded(budget={"trials": 1}), client, lines, monkeypatch)
        assert lines.count("trial 0 waits: no answer") == 1
        assert [trial.state for trial in done.trials] == ["Complete"]

    def test_a_cluster_that_refuses_for_minutes_ends_the_sweep(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = itertools.count(step=5.0)
        monkeypatch.setattr(driver_module.time, "monotonic", lambda: next(now))
        with pytest.raises(SweepFailedError, match="the newest because: no answer"):
            drive(recorded(), PlayedClient(silent=1000), lines, monkeypatch)

    def test_a_job_that_was_deleted_fails(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        def deleted(run: PlayedRun) -> Status:
            raise RunNotFoundError("no such job")

        client = PlayedClient()
        monkeypatch.setattr(PlayedClient, "statuses", lambda client, selector: {})
        monkeypatch.setattr(PlayedRun, "status", deleted)
        with pytest.raises(SweepFailedError, match="its run was deleted"):
            drive(recorded(), client, lines, monkeypatch)

    def test_a_metric_that_no_evaluator_reports_is_named(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            PlayedRun, "_score", lambda run: Score(name="step-1", step=run.step, metric="loss", value=1.0)
        )
        with pytest.raises(SweepFailedError, match="no evaluator reports accuracy; they report loss"):
            drive(recorded(), PlayedClient(), lines, monkeypatch)

    def test_a_grid_takes_each_combination_once(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        space = {RATE: {"low": 0.1, "high": 0.3, "step": 0.1}, BATCH: {"values": [32, 64]}}
        place = recorded(sampler="grid", space=space, budget={"trials": 100}, pruner={"name": "none"})
        done = drive(place, PlayedClient(), lines, monkeypatch)
        taken = [(round(trial.values[RATE], 3), trial.values[BATCH]) for trial in done.trials]
        assert sorted(taken) == sorted(itertools.product([0.1, 0.2, 0.3], [32, 64]))

    def test_the_hours_end_it_and_running_trials_count_with_their_scores(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, client = (
            recorded(budget={"trials": 50, "hours": 0.5}, pruner={"name": "none"}),
            PlayedClient(steps=10_000),
        )
        now = itertools.count(step=60.0)
        monkeypatch.setattr(driver_module.time, "monotonic", lambda: next(now))
        done = drive(place, client, lines, monkeypatch)
        assert [trial.reason for trial in done.trials] == ["the budget of 0.5000 h is used"]
        assert done.best == done.trials[0]

    def test_never_more_workers_than_allowed_and_the_last_ones_go_to_the_leaders(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("digits.yaml").write_text(
            yaml.safe_dump({**JOB, "spec": {**JOB["spec"], "workers": {"replicas": 3, "minReplicas": 1}}})
        )
        client = PlayedClient(lambda number, step: number / 10)
        done = drive(recorded(workers=4, pruner={"name": "none"}), client, lines, monkeypatch)
        assert client.busiest == 4
        assert [client.runs[f"s-{number}"].workers for number in range(6)] == [1, 1, 1, 1, 1, 3]
        assert "trial 5 gets 3 workers" in lines
        assert done.best is not None

    def test_an_interrupted_sweep_continues_its_trials(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        place, client = recorded(pruner={"name": "none"}), PlayedClient()
        first = Driver(place.definition(), place, client, lambda text, mood: None)  # type: ignore[arg-type]
        monkeypatch.setattr(driver_module.time, "sleep", lambda seconds: first.interrupt())
        assert not first.run()
        assert [trial.state for trial in first.trials] == ["Running"]
        done = drive(place, client, lines, monkeypatch)
        assert lines[0].startswith("trial 0 continues: ")
        assert len(done.trials) == len(client.submissions) == 6


class Killed(BaseException):
    """The driver is killed."""


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kills=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    pruner=st.sampled_from(["asha", "promotion"]),
)
def test_a_sweep_that_is_killed_anywhere_repeats_no_trial_and_loses_none(
    kills: list[int], seed: int, pruner: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed before or after each write to the journal, each submission and each stop."""
    monkeypatch.chdir(tmp_path_factory.mktemp("killed"))
    Path("digits.yaml").write_text(yaml.safe_dump(JOB))
    place, lines = recorded(seed=seed, budget={"trials": 4}, pruner={"name": pruner, "minSteps": 100}), list[str]()
    client = PlayedClient(lambda number, step: (number * 7 % 5) / 10 + step / 10_000)
    left = 0

    def deadly(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and seed % 2:
                raise Killed
            result = method(*args, **kwargs)
            if left == 0:
                raise Killed
            return result

        return call

    with monkeypatch.context() as patched:
        for name in ("ask", "note", "report", "end"):
            patched.setattr(Study, name, deadly(getattr(Study, name)))
        # A process that is killed saves nothing and stops nothing.
        patched.setattr(Driver, "_pause", lambda self, pool: None)
        patched.setattr(PlayedClient, "submit", deadly(PlayedClient.submit))
        patched.setattr(PlayedRun, "stop", deadly(PlayedRun.stop))
        for kill in kills:
            left = kill
            with suppress(Killed):
                drive(place, client, lines, monkeypatch)
        left = 0
        done = drive(place, client, lines, monkeypatch)
    trials = done.trials
    assert len(client.submissions) == len(set(client.submissions))
    assert set(client.submissions) == {trial.run for trial in trials}
    assert [trial.state for trial in trials if not trial.is_over] == []
    assert len(trials) == 4
    assert all(run.phase in ("Succeeded", "Suspended") for run in client.runs.values())


class TestTheJournal:
    def test_a_torn_line_and_a_lock_of_a_killed_driver_are_removed(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, client = recorded(budget={"trials": 2}), PlayedClient()
        drive(place, client, lines, monkeypatch)
        journal = place.path / JOURNAL
        with journal.open("ab") as opened:
            opened.write(b'{"op_code": 4, "wor')
        (place.path / f"{JOURNAL}.lock").symlink_to("nowhere")
        place.record(define(written(budget={"trials": 3})))
        assert len(drive(place, client, lines, monkeypatch).trials) == 3

    @pytest.mark.parametrize("content", ["garbage\nmore\n", '{"op_code": 99, "worker_id": "x"}\n{}\n', "[]\n[]\n"])
    def test_one_that_optuna_cannot_read_is_named(self, content: str) -> None:
        place = recorded()
        (place.path / JOURNAL).write_text(content)
        with pytest.raises(UserError, match=r"optuna\.log cannot be read by Optuna"):
            Study(place.definition(), place)
        with pytest.raises(UserError, match=r"optuna\.log cannot be read by Optuna"):
            read_trials(place.definition(), place)

    def test_optuna_reads_it(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        place = recorded(budget={"trials": 2})
        drive(place, PlayedClient(), lines, monkeypatch)
        storage = JournalStorage(JournalFileBackend(str(place.path / JOURNAL)))
        assert len(optuna.load_study(storage=storage, study_name="s").trials) == 2


def trials_of(scores: Sequence[float | None]) -> list[Trial]:
    return [
        Trial(
            number=number,
            values={RATE: 0.001 * (number + 1), BATCH: 32 if number % 2 else 64},
            state="Complete" if number % 3 != 1 else "Pruned",
            run=f"s-{number}",
            score=score,
            step=100,
            last_step=200,
            scores={} if score is None else {100: score, 200: score / 2},
            reason="<b>worse</b>" if number % 3 == 1 else "",
            seconds=3.0,
        )
        for number, score in enumerate(scores)
    ]


class TestWhatIsShown:
    def test_the_best_trial_comes_first(self) -> None:
        from rich.console import Console

        console = Console(width=200, record=True, file=io.StringIO())
        console.print(trial_table(trials_of([0.5, 0.95, 0.75]), "accuracy", "Maximize", False))
        rows = [line.split()[0] for line in console.export_text().splitlines()]
        assert rows == ["trial", "2", "0", "1"]

    def test_a_page_draws_all_pictures_and_escapes_what_it_shows(
        self, lines: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = recorded(pruner={"name": "none"})
        drive(place, PlayedClient(lambda number, step: number / 10 + step / 1000), lines, monkeypatch)
        content = sweep_page(place.definition(), place)
        assert [name in content for name in ("parallel-wide", "history-wide", "curves-narrow", "PED-ANOVA")] == [
            True
        ] * 4
        assert "6 trials: 6 complete. The best accuracy is" in content
        assert importances(place.definition(), place).keys() == {RATE, BATCH}

    def test_a_sweep_without_trials_has_a_page(self) -> None:
        place = recorded()
        assert "No trial has begun." in sweep_page(place.definition(), place)

    @pytest.mark.parametrize("scores", [[0.5], [None, 0.5], [0.5, 0.5, 0.5], [0.1, 0.9, float("1e300")]])
    def test_pictures_exist_from_the_first_score_on(self, scores: list[float | None]) -> None:
        space = define(written()).spec.space
        trials = trials_of(scores)
        assert "nan" not in str(figures.parallel("n", "t", "d", trials, space, "loss", "Minimize", WIDE))
        assert figures.history(trials, "loss", "Minimize")
        assert figures.curves(trials, "loss", "Minimize")

    def test_no_picture_without_a_score(self) -> None:
        trials = trials_of([None])
        assert figures.parallel("n", "t", "d", trials, {}, "loss", "Minimize", WIDE) is None
        assert (figures.history(trials, "loss", "Minimize"), figures.curves(trials, "loss", "Minimize")) == ((), ())

    def test_a_record_is_json(self) -> None:
        (trial,) = trials_of([0.5])
        record = json.loads(json.dumps(trial_record(trial, "runs/s/s-0", is_running=False)))
        assert (record["state"], record["run"], record["lastStep"]) == ("Complete", "runs/s/s-0", 200)


class TestCommands:
    @pytest.fixture
    def place(self, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
        place = recorded(budget={"trials": 3})
        drive(place, PlayedClient(lambda number, step: 0.9 - number / 10), lines, monkeypatch)
        return place

    def test_compare_shows_all_trials(self, place: SweepFolder) -> None:
        text = tandem("compare", "s", "--html", "page.html", cwd=Path.cwd())
        assert [line.split()[0] for line in text.stdout.splitlines()] == ["trial", "0", "1", "2", "page"]
        assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
        data = json.loads(tandem("compare", str(place.path), "-o", "json", cwd=Path.cwd()).stdout)
        assert [trial["state"] for trial in data["trials"]] == ["Complete", "Pruned", "Pruned"]
        assert (data["metric"], data["trials"][1]["run"]) == ("accuracy", "runs/s/s-1")
        assert "a sweep has a page: --html FILE" in tandem("compare", "s", "--png", "x.png", cwd=Path.cwd()).stderr

    def test_validate_checks_its_file(self) -> None:
        done = tandem("validate", written(), cwd=Path.cwd())
        assert "OK s.yaml: s: 6 trials of digits.yaml, 2 fields vary, tpe" in done.stdout
        wrong = tandem("validate", written(space={BATCH: {"values": [0]}}), cwd=Path.cwd())
        assert (wrong.returncode, f"{BATCH}=0: " in wrong.stderr) == (2, True)

    def test_stop_names_a_sweep_that_is_not_running(self, place: SweepFolder) -> None:
        assert "runs/s is not running" in tandem("stop", "s", cwd=Path.cwd()).stderr

    def test_a_sweep_that_continues_keeps_what_it_began_with(self, place: SweepFolder) -> None:
        done = tandem("sweep", "s", "--set", "workers.replicas=2", cwd=Path.cwd())
        assert "--set is for a new sweep; runs/s continues as it began" in done.stderr
        assert "other does not exist" in tandem("sweep", "other", cwd=Path.cwd()).stderr

    def test_a_program_finds_it_again(self, place: SweepFolder) -> None:
        sweep = Client(kubernetes="team").find_sweep("s")
        assert [trial.state for trial in sweep.trials()] == ["Complete", "Pruned", "Pruned"]
        assert (sweep.best(), sweep.wait(0.0)) == (sweep.trials()[0], sweep.trials())
        assert "<th>learningRate</th>" in sweep._repr_html_()
        assert sweep.report() == Path("runs/s/sweep.html")
        with pytest.raises(UserError, match="s has no trial 3; it has 3"):
            sweep.run(3)
        with pytest.raises(UserError, match="there is no sweep called other in runs"):
            Client().find_sweep("other")

    def test_mistakes_in_a_dict_have_no_line(self) -> None:
        with pytest.raises(ManifestError) as error:
            Client().sweep({"space": {RATE: {"low": 1.0}}}, job=JOB)
        assert str(error.value) == f"<job>: spec.space.{RATE}: a range has low and high"


def test_the_best_complete_trial_precedes_a_better_pruned_one() -> None:
    trials = trials_of([0.5, 0.95, 0.75])
    assert best_of(trials, "Maximize") == trials[2]
    assert best_of(trials, "Minimize") == trials[0]
    assert best_of(trials[1:2], "Maximize") == trials[1]
    assert best_of([], "Maximize") is None


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.one_of(st.none(), st.floats(0, 1)))), free=st.integers(0, 20))
def test_promotion_gives_no_more_than_is_free_and_the_best_first(
    sizes: list[tuple[int, float | None]], free: int
) -> None:
    running = [
        Active(number, f"s-{number}", workers, {}, last=None if value is None else (1, value))
        for number, (workers, value) in enumerate(sizes)
    ]
    chosen = promoted(running, free, 5, "Maximize")
    assert sum(size - running[number].workers for number, size in chosen.items()) <= free
    assert all(running[number].workers < size <= 5 for number, size in chosen.items())
    skipped = [a for a in running if a.last is not None and a.workers < 5 and a.number not in chosen]
    assert not skipped or sum(size - running[number].workers for number, size in chosen.items()) == free
