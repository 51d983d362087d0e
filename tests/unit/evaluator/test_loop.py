"""The loop of one evaluator process, in this process: how it ends, and what it makes of a disk that fails."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import FILE, WEIGHTS
from tandem.rundir.durable import read_json_or_none
from tandem.wire.status import CheckpointRef
from tandem_evaluator import loop
from tandem_evaluator.evaluation import Evaluation, TaskScoring
from tandem_evaluator.evaluator_log import EvaluatorLog
from tandem_evaluator.loop import Evaluator
from tandem_evaluator.preparation import scoring_of
from tandem_trainer.checkpoint.lending import Library
from tests.support import manifests
from tests.support.buckets import memory, pod_of
from tests.support.evaluator_run import Run

NAME = "evaluator-0-0"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run", {"name": "digits"}, {}, model="baby-cnn")


@pytest.fixture
def log(run: Run) -> Iterator[EvaluatorLog]:
    with EvaluatorLog(run.rundir, NAME) as log:
        yield log


@pytest.fixture
def evaluator(run: Run, log: EvaluatorLog) -> Evaluator:
    evaluation = Evaluation.load(run.job.spec.trainer.images)
    return Evaluator(run.rundir, run.job.spec.evaluation, NAME, TaskScoring(evaluation), log)


def checkpoint(run: Run, step: int) -> CheckpointRef:
    return run.checkpoint(step, run.weights(step, image_size=8))


def why_bad(run: Run, log: EvaluatorLog) -> dict[str, str]:
    """What the log says of checkpoints that were passed over, once it is written: its writer is a thread."""
    log.close()
    return {line["checkpoint"]: line["why"] for line in run.log(NAME, "bad")}


def test_a_run_that_ended_without_a_checkpoint_needs_nothing(run: Run, evaluator: Evaluator) -> None:
    run.rundir.mark_failed("Configuration", "the model does not suit the data", 78)
    assert evaluator.run() == ExitCode.DONE


def test_a_job_that_failed_has_its_newest_checkpoint_evaluated(run: Run, evaluator: Evaluator) -> None:
    older, newest = checkpoint(run, 10), checkpoint(run, 20)
    run.rundir.mark_failed("Diverged", "the loss stayed NaN", 65)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(newest)
    assert run.skipped(older)


def test_a_final_checkpoint_of_another_model_is_a_failure(
    run: Run, evaluator: Evaluator, capsys: pytest.CaptureFixture[str]
) -> None:
    older = checkpoint(run, 10)
    final = run.checkpoint(20, {"other.weight": torch.zeros(3)})
    run.rundir.mark_done(final)
    assert evaluator.run() == ExitCode.FAILED
    assert f"giving-up checkpoint={final.name}" in capsys.readouterr().out
    assert run.rundir.checkpoint(final.name).is_dir(), "it is whole, only not for this job"
    assert run.merged(older), "the newest that can be read stands in for it"


def test_a_broken_final_checkpoint_is_set_aside_and_the_one_before_stands_in(
    run: Run, evaluator: Evaluator, log: EvaluatorLog
) -> None:
    older, final = checkpoint(run, 10), checkpoint(run, 20)
    (run.rundir.checkpoint(final.name) / WEIGHTS).write_bytes(b"")
    run.rundir.mark_done(final)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(older)
    assert "bytes instead of" in why_bad(run, log)[final.name]
    assert (run.rundir.checkpoints / f"{final.name}.bad").is_dir()


@pytest.mark.parametrize("file", [WEIGHTS, FILE])
def test_a_checkpoint_that_is_damaged_on_this_disk_alone_is_received_again(
    run: Run, evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    final = checkpoint(run, 10)
    with memory() as url, pod_of(f"{url} {file}", run.rundir, tmp_path):
        path = run.rundir.checkpoint(final.name) / file
        path.write_bytes(bytes(path.stat().st_size))
        run.rundir.mark_done(final)
        assert evaluator.run() == ExitCode.DONE
    assert run.merged(final)
    assert run.rundir.set_aside_names() == []


def failing_reads(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[Path]:
    """Reading one checkpoint's weights gives an I/O error so many times."""
    read, failed = Library.weights, list[Path]()

    def failing(library: Library, folder: Path, manifest: Any) -> Any:
        if folder.name == name and len(failed) < times:
            failed.append(folder)
            raise OSError(errno.EIO, "Input/output error")
        return read(library, folder, manifest)

    monkeypatch.setattr(Library, "weights", failing)
    monkeypatch.setattr(loop, "READ_AGAIN_SECONDS", (0.0, 0.0, 0.0))
    return failed


def test_an_input_output_error_that_goes_away_is_nobodys_fault(
    run: Run, evaluator: Evaluator, log: EvaluatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = checkpoint(run, 10)
    run.rundir.mark_done(final)
    failed = failing_reads(monkeypatch, final.name, times=3)
    assert evaluator.run() == ExitCode.DONE
    assert len(failed) == 3
    assert run.merged(final)
    assert why_bad(run, log) == {}


def test_a_final_checkpoint_that_cannot_be_read_is_kept_and_the_process_fails(
    run: Run, evaluator: Evaluator, log: EvaluatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = checkpoint(run, 10)
    run.rundir.mark_done(final)
    failing_reads(monkeypatch, final.name, times=1000)
    assert evaluator.run() == ExitCode.FAILED
    assert "Input/output error" in why_bad(run, log)[final.name]
    assert run.rundir.checkpoint(final.name).is_dir()
    assert not list(run.rundir.leases.iterdir())


def test_a_disk_that_comes_back_is_waited_for(
    run: Run, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    final = checkpoint(run, 10)
    run.rundir.mark_done(final)
    names, failed = run.rundir.checkpoint_names, list[None]()

    def checkpoint_names() -> list[str]:
        if len(failed) < 2:
            failed.append(None)
            raise OSError(errno.ESTALE, "Stale file handle")
        return names()

    monkeypatch.setattr(run.rundir, "checkpoint_names", checkpoint_names)
    monkeypatch.setattr(loop, "MAX_POLL_SECONDS", 0.01)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(final)
    assert capsys.readouterr().out.count("Stale file handle") == 2


def test_a_disk_that_stays_away_is_given_up(
    run: Run, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checkpoint_names() -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(run.rundir, "checkpoint_names", checkpoint_names)
    monkeypatch.setattr(loop, "MAX_POLL_SECONDS", 0.01)
    monkeypatch.setattr(loop, "PATIENCE_SECONDS", 0.1)
    assert evaluator.run() == ExitCode.FAILED
    assert "giving-up" in capsys.readouterr().out


def test_a_checkpoint_whose_name_was_used_again_meanwhile_is_left_to_the_next_look(
    run: Run, evaluator: Evaluator
) -> None:
    """Between look and read a newer generation took the name over: its weights must not count for the old one."""
    ten, old = checkpoint(run, 10), checkpoint(run, 20)
    run.generation(2, resumed_from=ten)
    run.rundir.set_aside(old.name, ".stale")
    new = run.checkpoint(20, run.weights(99, image_size=8), generation=2)
    evaluator.evaluate(old, 0)
    assert not run.merged(old)
    run.rundir.mark_done(new)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(new)
    assert not run.merged(old)


def test_a_claim_won_after_another_process_has_finished_the_shard_is_given_back(run: Run, evaluator: Evaluator) -> None:
    reference = checkpoint(run, 10)
    checkpoint(run, 20)
    run.rundir.mark_failed("Stopped", "for the test", 1)
    held = evaluator.claim(reference, 0)
    assert held is not None
    with held:
        assert evaluator.claim(reference, 0) is None, "another process sees it claimed"
        evaluator.evaluate(reference, 0)
    assert evaluator.claim(reference, 0) is None
    assert not list(run.rundir.leases.iterdir())


def test_the_score_is_known_before_retention_may_have_the_checkpoint(run: Run, evaluator: Evaluator) -> None:
    reference = checkpoint(run, 10)
    held = evaluator.claim(reference, 0)
    assert held is not None
    with held:
        evaluator.evaluate(reference, 0)
        assert run.merged(reference)
        assert read_json_or_none(run.rundir.best_file)["name"] == reference.name


def test_a_claim_on_a_checkpoint_that_has_vanished_is_given_back(run: Run, evaluator: Evaluator) -> None:
    reference = checkpoint(run, 10)
    run.rundir.set_aside(reference.name, ".deleted")
    assert evaluator.claim(reference, 0) is None
    assert not list(run.rundir.leases.iterdir())


def test_one_that_was_stopped_asks_to_be_started_again(run: Run, evaluator: Evaluator) -> None:
    reference = checkpoint(run, 10)
    evaluator.stop()
    assert evaluator.run() == ExitCode.PREEMPTED
    assert not run.merged(reference)


def test_best_is_there_even_if_the_process_that_merged_died_before_it_wrote_it(run: Run, evaluator: Evaluator) -> None:
    final = checkpoint(run, 10)
    run.rundir.mark_done(final)
    assert evaluator.run() == ExitCode.DONE
    run.rundir.best_file.unlink()
    assert evaluator.run() == ExitCode.DONE
    assert read_json_or_none(run.rundir.best_file)["name"] == final.name


def test_a_log_that_cannot_be_written_stops_nothing(
    run: Run, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    final = checkpoint(run, 10)
    run.rundir.mark_done(final)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tandem.rundir.durable.Lines.append", full)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(final)
    assert caplog.text.count("No space left") == 1


def of_another(monkeypatch: pytest.MonkeyPatch, run: Run, other: CheckpointRef, times: int) -> None:
    """The memory behind the weights that are scored is that of another checkpoint so many times."""
    digest, scored = Library.digest, list[str]()

    def stale(library: Library) -> str:
        scored.append(digest(library))
        return run.rundir.manifest(other.name).entry(WEIGHTS).digest if len(scored) <= times else scored[-1]

    monkeypatch.setattr(Library, "digest", stale)


def corruptions(run: Run, log: EvaluatorLog) -> list[tuple[str, str]]:
    log.close()
    return [(line["reason"], line["message"]) for line in run.log(NAME, "corruption")]


def test_what_was_scored_with_the_weights_of_another_checkpoint_is_scored_again(
    run: Run, evaluator: Evaluator, log: EvaluatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, final = checkpoint(run, 10), checkpoint(run, 20)
    run.rundir.mark_done(final)
    of_another(monkeypatch, run, other, times=1)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(final)["weights"] == run.rundir.manifest(final.name).entry(WEIGHTS).digest
    why = f"{NAME} scored shard 0 of {final.name} with other weights than those of that checkpoint; its result does not"
    ((reason, message),) = corruptions(run, log)
    assert (reason, message[: len(why)]) == ("ScoresDiffer", why)
    assert why_bad(run, log) == {}


def test_where_nothing_is_to_be_compared_any_weights_count(
    run: Run, log: EvaluatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, final = checkpoint(run, 10), checkpoint(run, 20)
    run.rundir.mark_done(final)
    of_another(monkeypatch, run, other, times=1000)
    job = manifests.job(elasticity={"onCorruption": "Off"})
    job = job.model_copy(update={"spec": run.job.spec.model_copy(update={"elasticity": job.spec.elasticity})})
    assert Evaluator(run.rundir, job.spec.evaluation, NAME, scoring_of(job), log).run() == ExitCode.DONE
    assert "weights" not in run.merged(final)
    assert corruptions(run, log) == []


def test_a_process_that_scores_other_weights_twice_leaves_the_checkpoint_to_others(
    run: Run, evaluator: Evaluator, log: EvaluatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, final = checkpoint(run, 10), checkpoint(run, 20)
    run.rundir.mark_done(final)
    of_another(monkeypatch, run, other, times=1000)
    assert evaluator.run() == ExitCode.FAILED
    assert not run.merged(final)
    assert "twice" in why_bad(run, log)[final.name]


def test_a_result_of_other_weights_is_not_merged_whoever_published_it(
    run: Run, evaluator: Evaluator, log: EvaluatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluator that compares nothing, or took another checkpoint for this one."""
    other, final = checkpoint(run, 10), checkpoint(run, 20)
    with monkeypatch.context() as patched:
        of_another(patched, run, other, times=1000)
        patched.setattr(Evaluator, "_weights_digest", lambda *_: "")
        patched.setattr(Evaluator, "merge", lambda *_: None)
        evaluator.evaluate(final, 0)
    assert run.shard(final, 0, 1)
    run.rundir.mark_done(final)
    assert evaluator.run() == ExitCode.DONE
    assert run.merged(final)["weights"] == run.rundir.manifest(final.name).entry(WEIGHTS).digest
    assert [reason for reason, _ in corruptions(run, log)] == ["ScoresDiffer"]


def test_weights_whose_memory_changes_meanwhile_are_not_those_of_the_checkpoint(run: Run) -> None:
    manifest = run.rundir.manifest(checkpoint(run, 10).name)
    library = Library()
    weights = library.weights(run.rundir.checkpoint(manifest.name), manifest)
    assert library.digest() == manifest.entry(WEIGHTS).digest
    next(iter(weights.values())).view(-1)[0] += 1
    assert library.digest() != manifest.entry(WEIGHTS).digest
