"""The base model is prepared once, evaluated as a checkpoint is, and never becomes one."""

import json
import os
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tandem.processes.exitcode import ExitCode
from tandem.rundir import evaluations, lease
from tandem.rundir.checkpoint import WEIGHTS, Manifest, verified_bytes
from tandem.rundir.durable import read_json
from tandem.rundir.evaluations import BASE
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_evaluator.base_model import BaseWeights, write
from tandem_evaluator.claim import claim_file
from tandem_evaluator.loop import Evaluator
from tandem_evaluator.program import ProgramScoring
from tandem_evaluator.scoring import ProgramFailed
from tandem_trainer.task import Split, Task
from tests.support import manifests

SCRIPT = """
    from tandem.evaluation import Completions, Mean, checkpoints
    for checkpoint in checkpoints():
        assert checkpoint.weights.read_bytes() == b"weights"
        name = checkpoint.folder.name
        texts = Completions([(checkpoint.shard, f"prompt {checkpoint.shard}", f"{name} says hello")])
        checkpoint.report(perplexity=Mean(9 * 10, 10), texts=texts)
"""
PREPARES = """
    import sys, time
    from pathlib import Path
    from tandem.rundir.checkpoint import FILE, Manifest, FileEntry, checksum
    from tandem.rundir.durable import commit_folder, encode
    folder, counter = Path(sys.argv[1]), Path(sys.argv[2])
    with counter.open("a") as file:
        file.write("x")
    time.sleep(0.3)
    aside = folder.with_name(".tmp-base")
    aside.mkdir()
    (aside / "weights.safetensors").write_bytes(b"weights")
    entry = FileEntry(path="weights.safetensors", size=7, xxh3=[checksum(b"weights")])
    manifest = Manifest(name="base", step=0, generation=0, created_at=1.0, world_size=1, files=[entry])
    (aside / FILE).write_bytes(encode(manifest.sealed()))
    commit_folder(aside, folder)
"""


class Pretrained(Task[None]):
    """Begins with weights that `model` does not make."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def initialize(self, model: nn.Module) -> None:
        nn.init.constant_(model.weight, 7.0)

    def data(self, split: Split) -> Any:
        raise AssertionError

    loss = data  # type: ignore[assignment]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    script = tmp_path / "evaluate.py"
    script.write_text(dedent(SCRIPT))
    job = manifests.job(
        "tuned",
        trainer={"task": "causal-lm", "parameters": {"pretrained": "model"}},
        evaluators={
            "command": ["python", str(script)],
            "metric": "perplexity",
            "processesPerReplica": 2,
            "policy": "Latest",
        },
    )
    found = manifests.run_directory(tmp_path / "run", job)
    found.record_generation(GenerationRecord(generation=1, world_size=1, started_at=1.0))
    return found


def preparing(rundir: RunDir, script: str = PREPARES) -> BaseWeights:
    path, counter = rundir.path.parent / "prepare.py", rundir.path.parent / "prepared"
    path.write_text(dedent(script))
    return BaseWeights(rundir, [sys.executable, str(path), str(rundir.checkpoint(BASE.name)), str(counter)])


def evaluator(rundir: RunDir, number: int, base: BaseWeights) -> tuple[Evaluator, ProgramScoring]:
    evaluators = rundir.read_job().spec.evaluation
    scoring = ProgramScoring(evaluators)
    return Evaluator(rundir, evaluators, f"evaluator-{number}", scoring, Mock(), base), scoring


def test_its_weights_are_those_that_training_begins_with_under_checksums(rundir: RunDir) -> None:
    write(rundir, Pretrained(None))
    folder = rundir.checkpoint(BASE.name)
    manifest = Manifest.load(folder)
    assert manifest.reference == BASE
    verified_bytes(folder, manifest.entry(WEIGHTS))
    assert torch.equal(load_file(folder / WEIGHTS)["weight"], torch.full((2, 3), 7.0))
    write(rundir, Pretrained(None))
    assert sorted(path.name for path in rundir.checkpoints.iterdir()) == ["base"], "the second one leaves nothing"


def test_it_is_no_checkpoint_to_anybody_else(rundir: RunDir) -> None:
    write(rundir, Pretrained(None))
    assert rundir.checkpoint_names() == []
    assert rundir.committed() == []
    assert rundir.all_set_aside() == []


def test_several_evaluators_prepare_it_once_evaluate_their_shards_and_remove_it(rundir: RunDir) -> None:
    rundir.mark_failed("Diverged", "there is no checkpoint", 65)
    made = [evaluator(rundir, number, preparing(rundir)) for number in range(2)]
    codes: list[ExitCode] = []
    threads = [threading.Thread(target=lambda one=one: codes.append(one.run())) for one, _ in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for _, scoring in made:
        scoring.close()
    assert codes == [ExitCode.DONE] * 2
    result = read_json(evaluations.folder(rundir, BASE) / evaluations.merged_name(BASE))
    assert result["metrics"] == {"perplexity": 9.0}
    assert [one["text"] for one in result["completions"]] == ["base says hello"] * 2
    assert [one["prompt"] for one in result["completions"]] == ["prompt 0", "prompt 1"]
    assert (rundir.path.parent / "prepared").read_text() == "x"
    assert not rundir.checkpoint(BASE.name).exists()
    assert not rundir.best_file.exists()
    assert not list(rundir.leases.iterdir())


def test_one_that_cannot_be_loaded_fails_for_good_with_the_reason_and_the_job_goes_on(rundir: RunDir) -> None:
    rundir.mark_failed("Diverged", "there is no checkpoint", 65)
    script = PREPARES.replace("time.sleep(0.3)", 'sys.exit("the hub is\\naway\\x1b[2J")')
    subject, scoring = evaluator(rundir, 0, preparing(rundir, script))
    assert subject.run() == ExitCode.DONE
    scoring.close()
    note = read_json(evaluations.folder(rundir, BASE) / evaluations.failed_name(BASE))
    assert note["why"] == "its evaluation failed: the base model cannot be loaded: away\ufffd[2J"
    assert (rundir.path.parent / "prepared").read_text() == "xx", "it was tried twice"


def test_whoever_is_asked_to_leave_leaves(rundir: RunDir) -> None:
    looks = iter([True, True, False])
    preparing(rundir, "import time; time.sleep(60)").prepare("one", lambda: next(looks, False))
    assert not rundir.checkpoint(BASE.name).exists()


def test_a_failure_is_told_by_its_exit_code_where_nothing_else_tells_it(rundir: RunDir) -> None:
    with pytest.raises(ProgramFailed, match="its process ended with exit code 3"):
        preparing(rundir, "raise SystemExit(3)").prepare("one", lambda: True)


def test_a_result_that_is_there_is_not_made_again(rundir: RunDir) -> None:
    folder = evaluations.folder(rundir, BASE)
    folder.mkdir()
    (folder / evaluations.merged_name(BASE)).write_text(json.dumps({"metrics": {"perplexity": 3.0}}))
    rundir.mark_failed("Diverged", "there is no checkpoint", 65)
    subject, scoring = evaluator(rundir, 0, preparing(rundir))
    assert subject.run() == ExitCode.DONE
    scoring.close()
    assert not (rundir.path.parent / "prepared").exists()


def test_what_a_killed_evaluator_leaves_does_not_hold_up_the_next(rundir: RunDir) -> None:
    rundir.mark_failed("Diverged", "there is no checkpoint", 65)
    assert lease.acquire(rundir.leases / "evaluate-base-weights.json", "evaluator-0", 600.0)
    assert lease.acquire(claim_file(rundir, BASE, 1, 2), "evaluator-0", 600.0)
    (rundir.checkpoints / ".tmp-base-77-killed").mkdir()
    subject, scoring = evaluator(rundir, 0, preparing(rundir))
    assert subject.run() == ExitCode.DONE
    scoring.close()
    assert evaluations.evaluation_progress(rundir, BASE) == "merged"


def test_weights_that_are_damaged_are_set_aside_and_written_again(rundir: RunDir) -> None:
    rundir.mark_failed("Diverged", "there is no checkpoint", 65)
    base = preparing(rundir)
    base.prepare("evaluator-0", lambda: True)
    (rundir.checkpoint(BASE.name) / WEIGHTS).write_bytes(b"WEIGHTS")
    subject, scoring = evaluator(rundir, 0, base)
    assert subject.run() == ExitCode.DONE
    scoring.close()
    assert evaluations.evaluation_progress(rundir, BASE) == "merged"
    assert (rundir.path.parent / "prepared").read_text() == "xx"


def test_its_process_does_not_import_from_the_jobs_code_what_tandem_needs(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/tmp/tandem-code-0123", "/tmp/packages"]))
    with pytest.raises(ProgramFailed, match=r"loaded: /tmp/packages$"):
        preparing(rundir, 'import os, sys; sys.exit(os.environ["PYTHONPATH"])').prepare("one", lambda: True)
