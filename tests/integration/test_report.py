"""`tandem report` as a user starts it, on a run that `tandem run` really makes."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.processes.distribution import install_command
from tandem_cli.report.reading import read
from tests.support.local_run import LocalRun
from tests.support.processes import tandem
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(400)

EPOCHS, STEPS, EVERY = 20, 20 * 23, 100
SHORT = ["--set", f"trainer.loop.epochs={EPOCHS}", "--set", f"checkpoint.everySteps={EVERY}"]
SHORT += ["--set", "workers.replicas=1", "--set", "workers.processesPerReplica=2"]
SHORT += ["--set", "evaluators.processesPerReplica=1"]


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """A run that has begun to train."""
    with LocalRun(tmp_path_factory.mktemp("report"), *SHORT) as run:
        until(lambda: list(run.path.glob("log/train-g*.jsonl")), "the training log")
        yield run


def test_a_run_can_be_reported_while_it_goes_on_and_when_it_is_over(going: LocalRun) -> None:
    rank = until(lambda: going.rank_of("worker-0"), "a rank")
    rank.suspend()
    try:
        early = tandem("report", str(going.path), "--no-png", "--to", str(going.path.parent / "early.html"))
    finally:
        rank.resume()
    assert early.returncode == 0, early.stderr
    assert ">Running<" in (going.path.parent / "early.html").read_text("utf-8")

    going.ends()
    late = tandem("report", str(going.path))
    assert late.returncode == 0, late.stderr
    assert f"report    {going.path}/report.html" in late.stdout
    page = (going.path / "report.html").read_text("utf-8")
    assert ">Succeeded<" in page
    assert f"of {STEPS:,}" in page
    assert len(list((going.path / "report").glob("*.png"))) >= 5


def test_everything_that_real_processes_log_is_understood(going: LocalRun) -> None:
    going.ends()
    run = read(going.path)
    assert run.faults == ()
    assert run.model_steps.step.tolist() == list(range(1, STEPS + 1))
    assert run.total_steps == STEPS
    assert {use.kind for use in run.uses} >= {"trainer", "evaluator"}
    assert len(run.rates) > 0
    assert set(run.rates.phases) == {"data", "compute", "checkpoint"}
    assert (run.rates.seconds > 0).all()
    assert all(sum(values) <= 1.2 * run.rates.seconds.sum() for values in run.rates.phases.values())
    saved = [c.step for c in run.checkpoints]
    assert sorted(saved + [step for step, _ in run.unsaved]) == [*range(EVERY, STEPS, EVERY), STEPS]
    assert len(saved) >= 2
    assert all(c.stall_seconds is not None and c.size and c.generation == 1 for c in run.checkpoints)
    assert run.checkpoints[-1].evaluation is not None
    assert run.checkpoints[-1].on_disk
    assert run.works
    assert {work.checkpoint for work in run.works} <= {c.name for c in run.checkpoints}
    assert len(run.best.evaluation.per_class_f1) == 10
    assert (run.generations[0].reason, run.generations[0].world_size) == ("Started", 2)


class TestMistakesOfTheUser:
    def refused(self, answer: subprocess.CompletedProcess[str]) -> str:
        assert answer.returncode == 2
        assert "Traceback" not in answer.stderr
        assert answer.stderr.count("\n") == 1
        return answer.stderr

    def test_a_folder_that_is_not_there_is_named_with_the_runs_that_are(self, tmp_path: Path) -> None:
        (tmp_path / "runs" / "digits").mkdir(parents=True)
        (tmp_path / "runs" / "digits" / "job.json").write_text("{}")
        message = self.refused(tandem("report", "runs/digit", cwd=tmp_path))
        assert message == "error: runs/digit does not exist. Runs here: runs/digits\n"

    def test_a_folder_with_something_else_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        message = self.refused(tandem("report", str(tmp_path), cwd=tmp_path))
        assert "is not a run directory: it has neither job.json nor log/coordinator.jsonl" in message

    def test_an_output_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "job.json").write_text("{}")
        (tmp_path / "file").write_text("")
        message = self.refused(tandem("report", "run", "--to", "file/page.html", cwd=tmp_path))
        assert re.match(r"error: the report cannot be written to file.*: ", message)

    def test_a_lack_of_resvg_is_answered_with_the_command_that_mends_it(self, tmp_path: Path) -> None:
        lack = "import sys; sys.modules['resvg_py'] = None; "
        message = self.refused(tandem("report", "run", cwd=tmp_path, before=lack))
        assert message == f"error: tandem report needs resvg_py; install it with: {install_command('report')}\n"
