"""`tandem evaluate` as a user types it: on a run that is over, with its own task and with other programs."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.local_run import LocalRun, evaluations
from tests.support.processes import tandem
from tests.support.worlds.small_run import messy

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
    import sys
    from pathlib import Path

    from tandem.evaluation import Mean, checkpoints

    print("what the program prints")
    for checkpoint in checkpoints():
        if checkpoint.step == 300:
            raise SystemExit("no data for this one")
        size = Path(checkpoint.weights).stat().st_size
        checkpoint.report(size=Mean(size, 1), words=float(len(sys.argv)))
"""


def test_another_program_evaluates_all_checkpoints_and_the_run_stays_as_it_is(tmp_path: Path) -> None:
    run = messy(tmp_path / "run")
    (tmp_path / "score.py").write_text(dedent(PROGRAM))
    before = {path: path.stat().st_mtime_ns for path in run.rundir.path.rglob("*") if path.is_file()}

    done = tandem("evaluate", "run", "all", "-o", "json", "--", "score.py", "hard", cwd=tmp_path)

    answers = json.loads(done.stdout)
    assert [answer["step"] for answer in answers if "failed" not in answer] == [100, 200, 400, 500, 600]
    weights = run.rundir.checkpoint("step-000000600") / "weights.safetensors"
    assert answers[-1]["metrics"] == {"size": weights.stat().st_size, "words": 2.0}
    assert answers[0]["recorded"] == {"accuracy": 0.6, "loss": 0.5, "macroF1": 0.6}
    failed = next(answer for answer in answers if "failed" in answer)
    assert failed["checkpoint"] == "step-000000300"
    assert failed["failed"] == "the program ended with exit code 1: no data for this one"
    assert done.returncode == 1
    assert "what the program prints" in done.stderr
    after = {path: path.stat().st_mtime_ns for path in run.rundir.path.rglob("*") if path.is_file()}
    assert after == before


def test_a_damaged_checkpoint_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    run = messy(tmp_path / "run")
    (tmp_path / "score.py").write_text(dedent(PROGRAM))
    run.damage("step-000000600")
    damaged = tandem("evaluate", "run", "600", "score.py", cwd=tmp_path)
    assert damaged.returncode == 1
    assert damaged.stdout.startswith("step-000000600  not evaluated: ")
    missing = tandem("evaluate", "run", "650", "score.py", cwd=tmp_path)
    assert missing.returncode == 2
    assert "has no checkpoint of step 650. The nearest: step-000000600, step-000000700" in missing.stderr


def test_a_built_in_task_scores_as_it_did_beside_training(tmp_path: Path) -> None:
    with LocalRun(tmp_path, "--set", "trainer.loop.epochs=1") as run:
        assert run.ends() == 0
        (recorded,) = [one for one in evaluations(run.run_dir.path) if one["step"] == run.final_step()]
    done = tandem("evaluate", run.run_dir.path, "final", "--shards=2", "-o", "json", cwd=tmp_path)
    (answer,) = json.loads(done.stdout)
    assert answer["metrics"] == pytest.approx(recorded["metrics"])
    assert tandem("evaluate", run.run_dir.path, cwd=tmp_path).stdout.endswith("  as recorded\n")
