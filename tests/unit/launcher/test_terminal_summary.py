"""The last words of `tandem run`."""

import io
from pathlib import Path

import pytest
from rich.console import Console, Group

from tandem.rundir import evaluations, watched
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import FOREIGN_GENERATION
from tandem.rundir.watched import OVERWRITTEN, Watched
from tandem.wire.status import CheckpointRef
from tandem_cli.local.run_view import job_view
from tandem_cli.report.writing import write
from tandem_cli.terminal import tables
from tandem_cli.terminal.tables import view_record
from tandem_launcher.terminal.summary import RunResult, complete, failed, interrupted, lost_words, result
from tests.support import manifests


def first_line(found: RunResult, seconds: float | None, before: int | None = None) -> str:
    told = complete("digits", found, "runs/digits", seconds, evaluates=True, before=before)
    return words(told).splitlines()[0]


def words(shown: Group) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(shown)
    return file.getvalue()


def test_what_is_to_be_typed_is_quoted_where_a_path_has_a_space() -> None:
    assert "tandem report 'runs/a b'\n" in words(complete("digits", RunResult(step=1), "runs/a b", 1.0, evaluates=True))
    assert "tandem report runs/ab\n" in words(complete("digits", RunResult(step=1), "runs/ab", 1.0, evaluates=True))


def test_a_run_that_took_fewer_steps_than_announced_is_not_called_complete() -> None:
    early = "stopped early after step 40 of 100: the loss has not fallen"
    assert first_line(RunResult(step=40, stopped_early=early), 25.2) == f"digits {early} in 25 s"


@pytest.mark.parametrize(
    ("steps", "seconds", "before", "words"),
    [
        (920, 25.2, None, "digits is complete: 920 steps in 25 s"),
        (1, 7.0, None, "digits is complete: 1 step in 7 s"),
        (2_300, 15.0, 560, "digits is complete: 2,300 steps, the last 1,740 in 15 s"),
        (2_300, 5.0, 2_300, "digits is complete: 2,300 steps; what was left took 5 s"),
        (2_300, None, 2_300, "digits is complete: 2,300 steps"),
        (None, 5.0, None, "digits is complete in 5 s"),
    ],
)
def test_the_time_is_that_of_the_steps_it_is_told_with(
    steps: int | None, seconds: float | None, before: int | None, words: str
) -> None:
    assert first_line(RunResult(step=steps), seconds, before) == words


@pytest.mark.parametrize(
    ("found", "own_command", "lost"),
    [
        (RunResult(step=10_000, made=12_500), False, "2,500 steps since the last save, up to step 12,500"),
        (RunResult(step=10_000, made=12_500), True, "2,500 steps since the last save, up to step 12,500"),
        (RunResult(made=1), False, "1 step since the start, up to step 1"),
        (RunResult(made=12_500), True, ""),
        (RunResult(step=20, made=20), False, ""),
        (RunResult(), False, ""),
    ],
)
def test_a_run_that_was_stopped_or_failed_says_which_steps_are_lost(
    found: RunResult, own_command: bool, lost: str
) -> None:
    stopped = words(interrupted("digits", found, "runs/digits", "tandem run", evaluates=False, own_command=own_command))
    ended = words(failed("digits", "the disk is full", "", [], "", lost=lost_words(found, own_command)))
    for text in (stopped, ended):
        assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  lost ")] == (
            [lost] if lost else []
        )


class TestWhatWasPromisedAndNotDone:
    """A run that ends well without it says so in its last lines: nobody looks into tables of one that is complete."""

    @pytest.fixture
    def run_dir(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
        monkeypatch.chdir(tmp_path)
        found = RunDir(tmp_path / "runs" / "a")
        found.create()
        spec = {"trainer": {"command": ["train.py"]}, "evaluators": {"command": ["score.py"], "watch": "out/*.pt"}}
        found.write_job(manifests.job("a", **spec))
        return found

    @staticmethod
    def said(run_dir: RunDir) -> str:
        return words(complete("a", result(run_dir), "runs/a", 1.0, evaluates=True))

    def test_a_pattern_that_matched_nothing_and_where_a_match_lies(self, run_dir: RunDir, tmp_path: Path) -> None:
        assert "evaluators.watch: out/*.pt matched nothing in" in self.said(run_dir)
        (tmp_path / "last.pt").touch()
        assert f"{tmp_path}/last.pt is outside of it" in self.said(run_dir).replace("\n", "")
        (run_dir.path / "last.pt").touch()
        assert "last.pt is there: give that as the pattern" in self.said(run_dir)

    def test_a_script_that_made_a_folder_of_the_variables_name(self, run_dir: RunDir, tmp_path: Path) -> None:
        (tmp_path / "$TANDEM_RUN_DIR" / "out").mkdir(parents=True)
        (tmp_path / "$TANDEM_RUN_DIR" / "out" / "last.pt").touch()
        assert "$TANDEM_RUN_DIR/out/last.pt is outside of it" in self.said(run_dir)

    def test_states_of_a_file_that_were_overwritten_and_the_way_out(self, run_dir: RunDir) -> None:
        for step in (1, 2, 3):
            one = Watched(step=step, path="last.pt", fingerprint="", at=1.0)
            (run_dir.path / "last.pt").write_text(str(step))
            looks = watched.fingerprint(run_dir.path / "last.pt")
            assert watched.record(run_dir, one.model_copy(update={"fingerprint": looks[0]}))
            if step < 3:
                evaluations.record_skipped_evaluation(run_dir, one.reference, OVERWRITTEN)
        assert "2 of 3 states of last.pt were overwritten" in self.said(run_dir)
        assert "ckpt-{step}.pt" in self.said(run_dir)
        page = write(run_dir.path, png=False).page.read_text("utf-8")
        assert f"last.pt: skipped: {OVERWRITTEN}" in page, "the table names the file"

    def test_the_best_state_of_a_file_is_named_where_its_content_is_and_is_not_where_it_is_gone(
        self, run_dir: RunDir
    ) -> None:
        path = run_dir.path / "last.pt"
        path.write_text("best")
        state = watched.fingerprint(path)
        assert state is not None
        assert watched.record(run_dir, Watched(step=1, path="last.pt", fingerprint=state.fingerprint, at=1.0))
        replace_json(
            run_dir.best_file,
            {"name": "step-000000001", "step": 1, "generation": 0, "metric": "accuracy", "value": 0.5},
        )
        assert result(run_dir).best_path == "last.pt"
        path.unlink()
        assert result(run_dir).best_path == "watched/step-000000001/last.pt"
        path.write_text("another")
        (run_dir.path / "watched" / "step-000000001" / "last.pt").unlink()
        assert result(run_dir).best_path == ""
        assert "step-000000001, which your script has overwritten or deleted" in self.said(run_dir)

    def test_which_checkpoint_could_not_be_evaluated_and_why(self, run_dir: RunDir) -> None:
        one = CheckpointRef(name="step-000000020", step=20, generation=FOREIGN_GENERATION)
        evaluations.record_failed_evaluation(
            run_dir, one, "the program ended with exit code 1: OSError: image 7.png is truncated"
        )
        assert "step-000000020: its evaluation failed: the program ended" in self.said(run_dir)
        assert "7.png is truncated" in self.said(run_dir)

    def test_status_and_report_say_it_too(self, run_dir: RunDir) -> None:
        sentence = "evaluators.watch: out/*.pt matched nothing in"
        assert sentence not in " ".join(job_view(run_dir.path).job.missed), "it may still come"
        run_dir.mark_done(CheckpointRef(name="step-000000020", step=20, generation=1))
        seen = job_view(run_dir.path)
        assert any(line.plain.lstrip().startswith(f"missed{' ' * 6}") for line in tables.job_lines(seen, None, 0.0))
        assert sentence in view_record(seen)["missed"][0]
        assert f"Missed: {sentence}" in write(run_dir.path, png=False).page.read_text("utf-8")

    def test_a_run_directory_that_was_emptied(self, run_dir: RunDir) -> None:
        run_dir.job_file.unlink()
        assert "something has emptied the run directory" in self.said(run_dir)
