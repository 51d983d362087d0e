"""`tandem run` with the real coordinator, agents, ranks and evaluators, on real digits."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.processes.supervision import SAVING_SECONDS
from tandem.rundir.lease import is_held
from tandem.rundir.ledger import newest_ledger
from tandem.rundir.records import LedgerRecord
from tandem.rundir.wrong_samples import gallery
from tandem_coordinator.charts.gallery import tiles
from tests.support import ROOT
from tests.support.local_run import DIGITS, Lifetimes, LocalRun, evaluations
from tests.support.planned import planned_samples
from tests.support.ports import reserved_port
from tests.support.processes import TANDEM, tandem
from tests.support.ranks import sample_ids
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

SHORT = ["--set", "trainer.loop.epochs=6", "--set", "checkpoint.everySteps=20"]
SHORT_STEPS = 6 * 23
MIDDLE = ["--set", "trainer.loop.epochs=100", "--set", "checkpoint.everySteps=40"]
MIDDLE_STEPS = 100 * 23
ENDLESS = ["--set", "trainer.loop.epochs=5000", "--set", "checkpoint.everySteps=20"]
PRICED = ["--set", "prices.cpuPerHour=3600", "--set", "prices.currency=EUR"]
ALONE = ["--set", "evaluators.processesPerReplica=1"]
SMALL = ["--set", "workers.replicas=1", *ALONE]
"""Importing torch is most of what a start costs; where it does not matter, there are few processes."""
FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)')


def told(run: LocalRun) -> list[dict[str, str]]:
    """What its plain lines say so far: fields of `name=word`, or of a name and a text in quotation marks."""
    lines = run.output.partition(" is complete: ")[0].rpartition("\n")[0].splitlines()
    for line in lines:
        assert " ".join(f"{name}={value}" for name, value in FIELD.findall(line)) == line, "nothing but fields"
    return [{name: json.loads(v) if v[0] == '"' else v for name, v in FIELD.findall(line)} for line in lines]


LIFETIMES: dict[LocalRun, Lifetimes] = {}
"""Of runs whose processes are watched."""


@contextmanager
def lifetimes(run: LocalRun) -> Iterator[None]:
    """Watch the processes of a run."""
    LIFETIMES[run] = Lifetimes(run)
    with LIFETIMES[run]:
        yield


def expect_ledger(run: LocalRun) -> LedgerRecord:
    """The ledger of a run whose processes were watched.

    How exact it is, tests/unit/coordinator/test_ledger.py says. Here processes take as long to end, and signs of life
    to come, as a busy machine has them.
    """
    ledger, watched = newest_ledger(run.run_dir), LIFETIMES[run]
    existed = ledger.worker_cpus * watched.seconds("worker") + watched.seconds("evaluator")
    assert ledger.cpu_seconds.total == pytest.approx(existed, rel=0.1)
    return ledger


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A run that nothing disturbs, started as a user starts it."""
    with LocalRun(tmp_path_factory.mktemp("complete"), *SHORT, *PRICED, warm=False) as run:
        with lifetimes(run):
            run.ends()
        yield run


class TestFromBeginningToEnd:
    @pytest.mark.smoke
    def test_it_says_that_the_run_is_complete(self, complete: LocalRun) -> None:
        assert complete.process.returncode == 0, complete.output
        assert complete.run_dir.done() is not None
        assert f"digits is complete: {SHORT_STEPS} steps in " in complete.output

    def test_its_samples_are_those_that_the_same_manifest_has_everywhere(self, complete: LocalRun) -> None:
        assert sample_ids(complete.run_dir) == planned_samples(SHORT_STEPS)

    def test_the_final_checkpoint_is_evaluated_and_the_best_one_named(self, complete: LocalRun) -> None:
        merged = {result["step"]: result["metrics"]["accuracy"] for result in evaluations(complete.path)}
        assert SHORT_STEPS in merged
        best = json.loads(complete.run_dir.best_file.read_text())
        assert best["value"] == max(merged.values())
        assert f"checkpoints/{best['name']}" in complete.output
        assert f"accuracy {100 * best['value']:.2f} %" in complete.output

    def test_every_checkpoint_is_evaluated(self, complete: LocalRun) -> None:
        saved = [line["step"] for line in complete.logged("checkpoint")]
        assert saved[-1] == SHORT_STEPS
        assert [result["step"] for result in evaluations(complete.path)] == saved
        assert re.search(rf"evaluated +{len(saved)} checkpoints, none skipped\n", complete.output)

    def test_the_best_one_has_pictures_of_what_it_takes_for_something_else(self, complete: LocalRun) -> None:
        found, best = gallery(complete.run_dir), json.loads(complete.run_dir.best_file.read_text())
        assert found is not None
        wrong = round((1 - best["value"]) * evaluations(complete.path)[0]["samples"])
        assert len(tiles(found)) == len(found.pictures) == min(24, wrong)
        assert all(one.label != one.prediction for one in found.pictures)

    def test_it_says_what_it_waits_for_and_how_far_it_is_in_plain_lines_of_fields(self, complete: LocalRun) -> None:
        assert all(letter.isprintable() for line in complete.output.splitlines() for letter in line)
        lines = told(complete)
        assert all(set(line) == {"time", "event", "text"} or line.keys() >= {"time", "phase"} for line in lines)
        assert lines[0]["text"] == f"live page: tandem open {complete.path}"
        starting = [line["waiting"] for line in lines if line.get("phase") == "Starting"]
        assert "starting: 2 workers importing torch" in starting
        draining = [line for line in lines if line.get("phase") == "Draining"]
        assert draining[0]["waiting"].startswith("training is complete; ")
        steps = [int(line["step"]) for line in lines if "step" in line]
        assert steps == sorted(steps)
        assert 0 < steps[-1] <= SHORT_STEPS
        # What is not known yet is left out: DONE may be seen here before the coordinator has seen it or heard of a
        # step, and the ranks may end before their first vote.
        assert all(int(line["totalSteps"]) == SHORT_STEPS for line in draining if "totalSteps" in line)
        assert all(line["workers"].endswith("/2") for line in draining if "workers" in line)
        for line in draining:
            if "epoch" in line:
                assert float(line["epoch"]) == pytest.approx(int(line["step"]) / 23, abs=0.01)
        assert int(draining[-1]["totalSteps"]) == SHORT_STEPS
        losses = [line["loss"] for line in complete.logged("step")]
        # The first of them may be of a moment at which the ranks were last heard before their first vote.
        shown = [float(line["loss"]) for line in draining if "loss" in line]
        assert all(0.0 < loss <= losses[0] + 0.001 for loss in shown)
        assert float(draining[-1]["loss"]) == pytest.approx(losses[-1], rel=0.01)

    def test_its_ledger_says_what_the_time_of_all_processes_was_for_and_what_it_cost(self, complete: LocalRun) -> None:
        ledger = expect_ledger(complete)
        assert ledger.cpu_seconds.compute > 0
        assert ledger.cpu_seconds.evaluation > 0
        assert ledger.cpu_seconds.recomputed == 0
        assert ledger.cost.total == pytest.approx(ledger.cpu_seconds.total, abs=0.01), "a CPU-second costs 1 EUR"
        shown = tandem("status", complete.path).stdout
        assert re.search(r"cost +[0-9.]+ EUR · compute ", shown), shown

    def test_nothing_is_left(self, complete: LocalRun) -> None:
        assert complete.leavings() == {}

    def test_starting_it_again_changes_nothing_and_says_how_to_start_over(self, complete: LocalRun) -> None:
        before = sorted(complete.path.rglob("*"))
        again = LocalRun(complete.path.parent, *SHORT)
        assert again.ends() == 0
        assert "nothing left to do" in again.output
        assert "--fresh" in again.output
        assert sorted(complete.path.rglob("*")) == before

    def test_how_it_went_is_said_by_the_exit_code_even_if_nobody_reads_the_rest(self, complete: LocalRun) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        command = [TANDEM, "run", str(DIGITS), "--run-dir", str(complete.path), *SHORT]
        try:
            again = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
        finally:
            os.close(writing)
        assert (again.returncode, again.stderr) == (0, b"")

    def test_another_job_is_refused_there(self, complete: LocalRun) -> None:
        other = LocalRun(complete.path.parent, *SHORT, "--set", "trainer.parameters.model=baby-cnn")
        assert other.ends() == 2
        assert 'spec.trainer.parameters.model: there "cnn", now "baby-cnn"' in other.output

    def test_what_was_not_evaluated_is_evaluated_by_the_next_run_without_training(self, complete: LocalRun) -> None:
        name = str((complete.run_dir.done() or {})["final"]["name"])
        for file in (complete.run_dir.evaluations / name).iterdir():
            file.unlink()
        starts = len(complete.logged("start"))
        again = LocalRun(complete.path.parent, *SHORT)
        assert again.ends() == 0, again.output
        assert SHORT_STEPS in {result["step"] for result in evaluations(complete.path)}
        assert len(complete.logged("start")) == starts
        assert again.leavings() == {}


class TestCtrlC:
    def test_saves_and_leaves_the_same_command_goes_on_from_there_and_twice_leaves_at_once(
        self, tmp_path: Path, runs: list[LocalRun]
    ) -> None:
        first = LocalRun(tmp_path, *ENDLESS, *ALONE)
        runs.append(first)
        first.reaches(25)
        meanwhile = LocalRun(tmp_path, *ENDLESS, *ALONE)
        assert meanwhile.ends() == 2
        assert f"another tandem run (process {first.process.pid}) uses" in meanwhile.output
        trains = until(
            lambda: next(
                (
                    line
                    for line in told(first)
                    if line.get("phase") == "Running" and {"trainerCpu", "samplesPerSecond"} <= line.keys()
                ),
                None,
            ),
            "a line of a group that trains",
        )
        assert trains.items() >= {"workers": "2/2", "worldSize": "2", "totalSteps": str(5000 * 23)}.items()
        assert min(float(trains[name]) for name in ("step", "loss", "samplesPerSecond", "trainerCpu")) > 0.0

        first.interrupt()
        assert first.ends() == 130, first.output
        assert re.search(r"saving, at step [\d,]+; Ctrl-C again leaves at once", first.output)
        assert first.leavings() == {}
        assert [path.name for path in first.run_dir.leases.iterdir() if is_held(path)] == [], "all claims are free"
        (saved, *_) = first.run_dir.committed()
        last_step = max(line["step"] for line in first.logged("step"))
        assert saved.step == last_step >= 25, "the step that was finished last is the one that is saved"
        assert f"digits was stopped; saved after step {saved.step:,}" in first.output
        assert f"tandem run {DIGITS}" in first.output

        second = LocalRun(tmp_path, *ENDLESS, *ALONE)
        runs.append(second)
        second.reaches(saved.step + 1)
        assert f"resuming from step {saved.step:,}" in second.output
        assert second.logged("start")[-1]["step"] == saved.step
        until(lambda: second.of("worker-0"), "an agent").suspend()  # it cannot save, and is waited for
        second.interrupt()
        until(lambda: "saving" in second.output or second.process.poll() is not None, "the first is heard")
        second.interrupt()
        assert second.ends(SAVING_SECONDS) == 130, second.output
        assert second.leavings() == {}

    def test_before_anything_was_trained_says_so(self, tmp_path: Path, runs: list[LocalRun]) -> None:
        run = LocalRun(tmp_path, *ENDLESS, *SMALL, warm=False)
        runs.append(run)
        until(lambda: run.of("worker-0"), "an agent is started")
        run.process.send_signal(signal.SIGTERM)
        assert run.ends() == 130, run.output
        assert "nothing was saved yet" in run.output
        assert run.leavings() == {}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A run in which an evaluator, the coordinator and a rank are killed."""
    with LocalRun(tmp_path_factory.mktemp("killed"), *MIDDLE) as run, lifetimes(run):
        run.reaches(40)
        until(run.run_dir.committed, "a checkpoint")
        evaluator = until(lambda: run.of("evaluator-0-1"), "an evaluator")
        coordinator = until(lambda: run.of("coordinator"), "the coordinator")
        evaluator.kill()
        coordinator.kill()
        until(lambda: (now := run.of("coordinator")) and now.pid != coordinator.pid, "another coordinator")
        until(lambda: run.status(), "its answer")
        until(lambda: run.rank_of("worker-1"), "a rank").kill()
        run.ends()
        yield run


@pytest.mark.full("core", "cli", "coordinator", "trainer")
class TestKillingOneAfterTheOther:
    def test_the_run_ends_with_the_same_number_of_steps(self, killed: LocalRun) -> None:
        assert killed.process.returncode == 0, killed.output
        assert killed.final_step() == MIDDLE_STEPS
        assert {line["step"] for line in killed.logged("step")} == set(range(1, MIDDLE_STEPS + 1))

    def test_training_went_on_from_a_checkpoint(self, killed: LocalRun) -> None:
        assert killed.run_dir.generation_records()[1].resumed_from.step > 0

    def test_only_the_killed_rank_made_a_new_generation(self, killed: LocalRun) -> None:
        assert [record.generation for record in killed.run_dir.generation_records()] == [1, 2]

    def test_its_ledger_goes_on_with_another_coordinator(self, killed: LocalRun) -> None:
        spent = expect_ledger(killed).cpu_seconds
        assert min(spent.compute, spent.waiting, spent.evaluation) > 0
        # Not `recomputed`: lost steps that nobody had written down yet count as idle, and here that may be all of them.

    def test_the_end_of_each_child_is_told(self, killed: LocalRun) -> None:
        for name in ("evaluator-0-1", "coordinator"):
            assert f"{name} ended, killed by signal 9; starting it again" in killed.output

    def test_the_final_checkpoint_is_evaluated(self, killed: LocalRun) -> None:
        assert MIDDLE_STEPS in {result["step"] for result in evaluations(killed.path)}

    def test_nothing_is_left(self, killed: LocalRun) -> None:
        assert killed.leavings() == {}


@pytest.mark.full("cli", "coordinator", "trainer")
def test_sigkill_of_its_whole_process_group_leaves_nothing_and_the_next_run_goes_on(
    tmp_path: Path, runs: list[LocalRun]
) -> None:
    own_port = ("--port", str(reserved_port()))
    run = LocalRun(tmp_path, *ENDLESS, *SMALL, *own_port)
    runs.append(run)
    run.reaches(25)
    until(run.run_dir.committed, "a checkpoint")
    ours = {process.environ()["TANDEM_LOCAL"].split("/")[1] for process in run.processes()}
    assert ours == {"coordinator", "worker-0", "evaluator-0-0"}
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    until(lambda: run.leavings() == {}, f"nothing is left, but there is {run.leavings()}")

    again = LocalRun(tmp_path, *ENDLESS, *SMALL, *own_port)
    runs.append(again)
    again.reaches(21)
    assert again.logged("start")[-1]["step"] >= 20


@pytest.mark.full("cli", "examples", "trainer", "evaluator")
def test_an_own_script_runs_unchanged(tmp_path: Path, runs: list[LocalRun]) -> None:
    run = LocalRun(tmp_path, "--set", "trainer.args=[--epochs, '5']", manifest=ROOT / "examples" / "own-script.yaml")
    runs.append(run)
    assert run.ends() == 0, run.output
    assert "test accuracy" in (run.run_dir.log / "worker-0.txt").read_text()
    assert "own-script is complete" in run.output
    assert (run.path / "own_script.pt").exists()
    assert f"best        {run.path}/own_script.pt" in run.output, "it was evaluated by a program that is as plain"
    assert "accuracy 9" in run.output
    assert run.leavings() == {}


@pytest.mark.full("cli", "coordinator")
def test_an_own_script_that_fails_ends_the_run_with_its_last_words(tmp_path: Path, runs: list[LocalRun]) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys\nprint('the disk of my data is not mounted', file=sys.stderr)\nsys.exit(3)\n")
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        "apiVersion: tandem.dev/v1alpha1\nkind: DistributedTrainingJob\nmetadata: {name: broken}\n"
        f"spec: {{trainer: {{command: [python, {script}]}}, elasticity: {{maxRestarts: 1}}}}\n"
    )
    run = LocalRun(tmp_path, manifest=manifest)
    runs.append(run)
    assert run.ends() == 1, run.output
    assert "broken failed: " in run.output
    assert "the disk of my data is not mounted" in run.output
    assert run.leavings() == {}
