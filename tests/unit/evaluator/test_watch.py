"""Checkpoints that a script writes in a way of its own: which are found, when they are complete, what they become."""

import errno
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from tandem.job.resource import Evaluators
from tandem.rundir import evaluations, records, watched
from tandem.rundir.completeness import is_marked_complete
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem_evaluator.choice import View
from tandem_evaluator.loop import Evaluator
from tandem_evaluator.program import ProgramScoring, weights_in
from tandem_evaluator.result import MetricPart, ProgramShard
from tandem_evaluator.scoring import Work
from tandem_evaluator.watch import WatchSurvey

PT, FOLDERS = "*.pt", "checkpoint-*"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    subject = RunDir(tmp_path / "run")
    subject.create()
    return subject


def survey(rundir: RunDir, pattern: str = PT, settle: float = 3600.0) -> WatchSurvey:
    return WatchSurvey(rundir, 1, pattern, settle)


def looked(subject: WatchSurvey, times: int = 2) -> View:
    """The last of some looks: the first sees, the second knows that nothing has changed."""
    views = [subject.scan() for _ in range(times)]
    return views[-1]


def steps(view: View) -> list[int]:
    return [one.reference.step for one in view.states]


def save(path: Path, value: float = 0.0) -> Path:
    torch.save({"weight": torch.full((3,), value)}, path)
    return path


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("out/ckpt_12.pt", 12),
        ("epoch=3-step=1500.ckpt", 1500),
        ("step-000000500", 500),
        ("global_step1000", 1000),
        ("best.pt", None),
        ("model.safetensors", None),
        ("mp3/latest", None),
        ("checkpoint.99", 99),
        ("c" + "9" * 40, None),
    ],
)
def test_the_step_is_the_last_number_in_the_name(name: str, step: int | None) -> None:
    assert watched.step_in(name) == step


def test_a_file_of_torch_is_complete_when_its_directory_is_there_and_two_looks_agree(rundir: RunDir) -> None:
    subject = survey(rundir)
    whole = save(rundir.path / "ckpt-1.pt").read_bytes()
    half = rundir.path / "ckpt-2.pt"
    half.write_bytes(whole[: len(whole) // 2])
    assert steps(subject.scan()) == []
    assert steps(looked(subject, 3)) == [1], "half a file is never taken"
    half.write_bytes(whole)
    assert steps(looked(subject)) == [2, 1]


def test_what_does_not_say_that_it_is_complete_counts_once_it_rests(rundir: RunDir) -> None:
    subject = survey(rundir, "*.bin", settle=60.0)
    path = rundir.path / "model-7.bin"
    path.write_bytes(b"weights")
    assert steps(looked(subject, 3)) == []
    age(path, 61)
    assert steps(looked(subject)) == [7]


def test_when_training_is_over_nothing_is_waited_for(rundir: RunDir) -> None:
    subject = survey(rundir, "*.bin")
    (rundir.path / "model-7.bin").write_bytes(b"weights")
    rundir.mark_failed("Failed", "exit code 1", 1)
    assert subject.scan().unsure, "so no evaluator leaves before the second look"
    view = subject.scan()
    assert (steps(view), view.unsure) == ([7], False)
    assert view.needed.reference.step == 7


@pytest.mark.parametrize("name", ["ckpt-7.pt", "checkpoint-7/model.safetensors", "checkpoint-7/optimizer.pt"])
def test_what_a_killed_script_has_left_half_written_never_counts_however_long_it_rests(
    rundir: RunDir, name: str
) -> None:
    subject = survey(rundir, "c*-7*", settle=60.0)
    path = rundir.path / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({"a": torch.zeros(1000)}, path)
    else:
        torch.save({"a": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for one in (path, path.parent) if path.parent != rundir.path else (path,):
        age(one, 61)
    assert steps(looked(subject, 3)) == []
    rundir.mark_failed("Failed", "exit code 1", 1)
    subject.scan()
    view = subject.scan()
    assert (steps(view), view.unsure) == ([], False), "nobody waits for it, either"
    path.write_bytes(whole)
    assert steps(looked(subject)) == [7]


FORMATS: dict[str, Any] = {
    "dcp": lambda folder: (folder / ".metadata").write_bytes(b"x"),
    "trainer": lambda folder: (folder / "trainer_state.json").write_text("{}"),
}


@pytest.mark.parametrize("complete", FORMATS.values(), ids=FORMATS)
def test_a_folder_is_complete_when_what_is_written_last_is_there(rundir: RunDir, complete: Any) -> None:
    subject = survey(rundir, FOLDERS)
    folder = rundir.path / "checkpoint-40"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"weights")
    assert steps(looked(subject)) == []
    complete(folder)
    assert steps(looked(subject)) == [40]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_half_a_state_of_the_trainer_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "trainer_state.json").write_text(content)
    assert not is_marked_complete(tmp_path)


def test_a_safetensors_file_is_complete_when_it_is_as_long_as_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.ones(3)}, path)
    assert is_marked_complete(path)
    content = path.read_bytes()
    for length in (0, 4, 20, len(content) - 1):
        path.write_bytes(content[:length])
        assert not is_marked_complete(path)


def test_names_that_nobody_has_finished_with_are_passed_over(rundir: RunDir) -> None:
    for name in (".ckpt-1.pt", "ckpt-2.pt.tmp", "ckpt-3.part"):
        save(rundir.path / name)
    assert steps(looked(survey(rundir, "*"), 3)) == []


def test_a_file_that_is_replaced_by_a_rename_is_kept_until_it_is_evaluated(rundir: RunDir) -> None:
    subject = survey(rundir)
    path, aside = rundir.path / "last.pt", rundir.path / "last.tmp"
    contents = []
    for value in (0.25, 0.75):
        contents.append(save(aside, value).read_bytes())
        aside.replace(path)
        looked(subject)
    view = subject.scan()
    assert steps(view) == [2, 1]
    for standing, content in zip(view.states, reversed(contents), strict=True):
        assert subject.open(standing.reference)[0].read_bytes() == content
    done = view.states[1].reference
    evaluations.record_failed_evaluation(rundir, done, "it was a test")
    assert steps(looked(subject)) == [2, 1]
    assert [one.name for one in (rundir.path / "watched" / done.name).iterdir()] == ["record.json"]


def test_a_folder_that_the_script_deletes_is_kept_until_it_is_evaluated(rundir: RunDir) -> None:
    subject = survey(rundir, FOLDERS)
    folder = rundir.path / "checkpoint-40"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights.bin").write_bytes(b"weights")
    (folder / "trainer_state.json").write_text("{}")
    (reference,) = (one.reference for one in looked(subject).states)
    shutil.rmtree(folder)
    assert (subject.open(reference)[0] / "inner" / "weights.bin").read_bytes() == b"weights"


def test_where_a_disk_has_no_hard_links_the_scripts_own_path_is_read(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = save(rundir.path / "ckpt-4.pt")
    subject = survey(rundir)
    (reference,) = (one.reference for one in looked(subject).states)
    assert subject.open(reference)[0] == path
    path.unlink()
    with pytest.raises(FileNotFoundError):
        subject.open(reference)


def test_what_a_crash_has_left_half_recorded_is_removed_in_time(rundir: RunDir) -> None:
    aside = rundir.path / "watched" / ".tmp-step-000000001-1-ab"
    aside.mkdir(parents=True)
    fresh = aside.with_name(".tmp-step-000000002-1-ab")
    fresh.mkdir()
    age(aside, 7200)
    survey(rundir)
    assert (aside.exists(), fresh.exists()) == (False, True)


def test_each_state_of_a_file_that_is_overwritten_is_a_checkpoint(rundir: RunDir) -> None:
    subject = survey(rundir)
    path = save(rundir.path / "last.pt")
    assert steps(looked(subject)) == [1]
    save(path, 1.0)
    age(path, 5)
    view = looked(subject)
    assert steps(view) == [2, 1]
    values = [torch.load(subject.open(state.reference)[0])["weight"][0].item() for state in view.states]
    assert values == [1.0, 0.0]


def test_a_second_evaluator_finds_the_same_checkpoints_under_the_same_names(rundir: RunDir) -> None:
    one, other = survey(rundir), survey(rundir)
    for step in (3, 5):
        save(rundir.path / f"ckpt-{step}.pt")
    save(rundir.path / "last.pt")
    for subject in (one, other, one, other):
        subject.scan()
    assert steps(one.scan()) == steps(other.scan()) == [5, 3, 1] or steps(one.scan()) == steps(other.scan())
    assert len(watched.records(rundir)) == 3


def test_a_link_out_of_the_run_directory_is_no_loop_and_a_deleted_one_is_no_error(
    rundir: RunDir, tmp_path: Path
) -> None:
    (rundir.path / "checkpoint-1").symlink_to(rundir.path)
    (rundir.path / "checkpoint-2").symlink_to(tmp_path / "nothing")
    looked(survey(rundir, FOLDERS), 3)


def test_what_changed_while_it_was_evaluated_has_no_result(rundir: RunDir) -> None:
    path = save(rundir.path / "ckpt-9.pt")

    class Overwriting:
        """A program during which the script writes the same file again."""

        def read(self, folder: Path, manifest: object) -> Path:
            assert folder.read_bytes() == path.read_bytes()
            assert manifest is None
            return folder

        def score(self, read: Path, work: Work, going_on: object) -> ProgramShard:
            path.write_bytes(b"something else")
            return ProgramShard(
                checkpoint=work.reference.name,
                step=9,
                generation=0,
                shard=0,
                shards=1,
                seconds=0.0,
                evaluator="e",
                at=1.0,
                metrics={"accuracy": MetricPart(reducer="mean", value=1.0)},
            )

        def best_changed(self, rundir: RunDir) -> None: ...

    evaluators = Evaluators(command=["true"], watch=PT)
    subject = Evaluator(rundir, evaluators, "evaluator-0-0", Overwriting(), Mock())  # type: ignore[arg-type]
    for _ in range(3):
        subject.step()
    note = read_json_or_none(rundir.evaluations / "step-000000009/g000000.skipped.json")
    assert "overwritten or deleted" in note["why"]
    assert not list(rundir.evaluations.glob("*/*.shard-*"))


def test_a_program_gets_the_path_and_the_best_is_found_by_it(rundir: RunDir, tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_text(
        "import torch\n"
        "from tandem.evaluation import checkpoints\n"
        "for one in checkpoints():\n"
        "    state = torch.load(one.weights, weights_only=True)\n"
        "    one.report(accuracy=float(state['weight'].mean()))\n"
    )
    for step, value in ((10, 0.25), (20, 0.75), (30, 0.5)):
        save(rundir.path / f"ckpt-{step}.pt", value)
    rundir.mark_failed("Failed", "exit code 1", 1)
    evaluators = Evaluators(command=["python", str(script)], watch=PT, policy="Every")

    scoring = ProgramScoring(evaluators)
    try:
        assert Evaluator(rundir, evaluators, "evaluator-0-0", scoring, Mock()).run() == 0
    finally:
        scoring.close()
    best = json.loads(rundir.best_file.read_text())
    assert (best["step"], best["value"]) == (20, 0.75)
    assert watched.checkpoint_path(rundir, best["name"]) == rundir.path / "ckpt-20.pt"


def test_the_weights_of_a_folder_are_its_file_of_weights_where_it_has_a_known_one(tmp_path: Path) -> None:
    assert weights_in(tmp_path) == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert weights_in(tmp_path) == tmp_path / "model.safetensors"


def test_a_file_that_is_overwritten_has_its_states_at_the_steps_that_were_logged_then(rundir: RunDir) -> None:
    """Numbered 1, 2, 3 they would stand at the left edge of every picture over steps."""
    now = time.time()
    log = LogWriter(rundir.training_log(1))
    log.open()
    for step in (10, 20, 30):
        log.append(records.Step(time=now - 100 + step, step=step, loss=1.0))
    log.close()
    subject = survey(rundir, settle=0.0)
    for value, age_seconds in ((1.0, 85.0), (2.0, 75.0), (3.0, 74.0)):
        age(save(rundir.path / "last.pt", value), age_seconds)
        looked(subject)
    assert {one.step for one in watched.records(rundir)} == {10, 20, 21}, "two states of one step"


def test_a_state_that_is_written_after_a_restart_is_the_newest_of_its_file(rundir: RunDir) -> None:
    """The script goes on from an earlier step: at the step that is logged its file would be older than before."""
    now = time.time()
    subject = survey(rundir, settle=0.0)

    def saved(generation: int, step: int, age_seconds: float, value: float, *names: str) -> View:
        log = LogWriter(rundir.training_log(generation))
        log.open()
        log.append(records.Step(time=now - age_seconds - 1, step=step, loss=1.0))
        log.close()
        for name in names:
            age(save(rundir.path / name, value), age_seconds)
        return looked(subject)

    saved(1, 500, 90.0, 0.0, "best.pt")
    needed = replace(saved(2, 400, 80.0, 1.0, "best.pt"), ended=True).needed
    assert needed is not None
    assert needed.reference.step == 501
    saved(2, 700, 70.0, 2.0, "best.pt", "last.pt")
    found = [(one.step, one.path) for one in watched.records(rundir)]
    assert found == [(500, "best.pt"), (501, "best.pt"), (700, "best.pt"), (701, "last.pt")]
