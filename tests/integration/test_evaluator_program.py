"""Programs of the user's own as evaluators, beside training: killed, crashing on one checkpoint, and to the end."""

import json
import os
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tandem.formatting import count_noun
from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.durable import read_json_or_none
from tandem_trainer import data, models
from tests.support import EXAMPLES, manifests
from tests.support.evaluator_run import Run, ends
from tests.support.local_run import LocalRun
from tests.support.waiting import until

DIGITS = {"name": "digits"}
PROGRAM = """
    import os, sys, time
    from pathlib import Path

    import torch
    from safetensors.torch import load_file
    from tandem.evaluation import Mean, checkpoints
    from tandem.job.tasks import Data
    from tandem_trainer import data, models

    samples = data.load(Data(name="digits"), "test")
    model = models.build("baby-cnn", 1, 8, 10).eval()
    for checkpoint in checkpoints():
        model.load_state_dict(load_file(checkpoint.weights))
        if (gate := Path(os.environ["GATE"])).exists():
            gate.rename(f"{gate}.reached")
            time.sleep(600)
        mine = slice(checkpoint.shard, None, checkpoint.shards)
        with torch.inference_mode():
            found = model(samples.images[mine].contiguous()).argmax(dim=1)
        right = int((found == samples.labels[mine]).sum())
        checkpoint.report(accuracy=Mean(right, len(found)), process=os.getpid())
"""


def program_run(folder: Path, processes: int) -> Run:
    """A run with a job whose evaluators run PROGRAM."""
    script = folder / "score.py"
    script.write_text(dedent(PROGRAM))
    env = [{"name": "GATE", "value": str(folder / "gate")}]
    evaluators = {"command": ["python", str(script)], "processesPerReplica": processes, "policy": "Every", "env": env}
    return Run(folder / "run", DIGITS, evaluators, model="baby-cnn")


def serially(run: Run, name: str) -> float:
    """The accuracy that a plain script would have computed."""
    samples = data.load(run.job.spec.trainer.images.data, "test")
    model = models.build("baby-cnn", 1, 8, 10).eval()
    model.load_state_dict(load_file(run.rundir.checkpoint(name) / WEIGHTS))
    with torch.inference_mode():
        right = int((model(samples.images).argmax(dim=1) == samples.labels).sum())
    return right / len(samples)


def test_scores_of_a_program_that_is_killed_in_the_middle_are_those_of_one_serial_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluator is killed with its program at work; another one takes the shard over."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    run = program_run(tmp_path, 2)
    references = [run.checkpoint(10 * seed, run.weights(seed, image_size=8)) for seed in range(1, 5)]
    run.rundir.mark_done(references[-1])
    (tmp_path / "gate").touch()
    with run.evaluator() as victim:
        until((tmp_path / "gate.reached").exists, "the program is at work")
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    environments = psutil.process_iter(["environ"])
    programs = [one for one in environments if (one.info["environ"] or {}).get("GATE") == str(tmp_path / "gate")]
    with run.evaluator() as again, run.evaluator(index=1) as other:
        for process in (again, other):
            code, output = ends(process)
            assert code == ExitCode.DONE, output
    for one in programs:
        one.kill()
    for reference in references:
        assert run.merged(reference)["metrics"]["accuracy"] == serially(run, reference.name)
    best = read_json_or_none(run.rundir.best_file)
    scores = {one.step: run.merged(one)["metrics"]["accuracy"] for one in references}
    assert best["step"] == min(scores, key=lambda step: (-scores[step], step))
    processes = {run.shard(one, 0, 2)["metrics"]["process"]["value"] for one in references}
    assert len(processes) <= 2, "a program stays alive between checkpoints"


def test_a_damaged_checkpoint_never_reaches_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    run = program_run(tmp_path, 1)
    sound, damaged = (run.checkpoint(step, run.weights(step, image_size=8)) for step in (10, 20))
    path = run.rundir.checkpoint(damaged.name) / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run.rundir.mark_done(sound)
    with run.evaluator() as process:
        code, output = ends(process)
    assert code == ExitCode.DONE, output
    assert run.merged(sound)
    assert not run.merged(damaged)
    assert run.rundir.checkpoint(f"{damaged.name}.bad").is_dir()


CRASHES = """
    import tandem.evaluation
    for checkpoint in tandem.evaluation.checkpoints():
        if checkpoint.step == 200:
            raise ValueError("a sample of 200 is odd")
        checkpoint.report(accuracy=checkpoint.step / 1000, gone=float("inf"))
"""


@pytest.mark.full("core", "coordinator", "evaluator")
def test_a_program_that_crashes_on_the_last_checkpoint_harms_neither_training_nor_the_others(tmp_path: Path) -> None:
    """How many there are before depends on the machine: a save that is due while another one is written is skipped."""
    script = tmp_path / "score.py"
    script.write_text(dedent(CRASHES))
    words = [
        *("--set", f"evaluators.command=[python, {script}]"),
        *("--set", "evaluators.processesPerReplica=1"),
        *("--set", "workers.replicas=1"),
        *("--set", "trainer.loop.maxSteps=200"),
        *("--set", "checkpoint.everySteps=50"),
        *("--set", "checkpoint.keepLast=10"),
    ]
    with LocalRun(tmp_path, *words) as run:
        assert run.ends() == 0, run.output
        *others, last = run.run_dir.checkpoint_names()
        assert f"evaluated   {count_noun(len(others), 'checkpoint')}, none skipped, 1 failed" in run.output
        notes = list(run.run_dir.evaluations.glob("*/*.failed.json"))
        assert [path.parent.name for path in notes] == [last] == ["step-000000200"]
        why = read_json_or_none(notes[0])["why"]
        assert why == "its evaluation failed: the program ended with exit code 1: ValueError: a sample of 200 is odd"
        best = read_json_or_none(run.run_dir.best_file)
        assert best["name"] == others[-1]
        result = read_json_or_none(run.run_dir.evaluations / best["name"] / "g000001.json")
        assert result["metrics"] == {"accuracy": best["step"] / 1000, "gone": None}
        assert run.leavings() == {}


@pytest.mark.full("core", "cli", "coordinator", "trainer", "evaluator", "examples")
def test_the_language_model_is_scored_by_its_own_program_while_it_trains(tmp_path: Path) -> None:
    """The example word for word, but for its length."""
    words = ["--set", 'trainer.args=[--steps, "60"]', "--set", "checkpoint.everySteps=20"]
    with LocalRun(tmp_path, *words, manifest=EXAMPLES / "language-model.yaml") as run:
        assert run.ends() == 0, run.output
        assert "language-model is complete: 60 steps" in run.output
        best: Any = read_json_or_none(run.run_dir.best_file)
        assert (best["metric"], best["step"]) == ("bitsPerByte", 60)
        assert f"bitsPerByte {best['value']:.3f}" in run.output
        assert run.leavings() == {}


SAVES = """
    import sys, time
    from pathlib import Path
    import torch

    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    done = max((int(path.stem.split("-")[1]) for path in folder.glob("ckpt-*.pt")), default=0)
    for step in range(done + 1, 13):
        time.sleep(0.25)
        aside = folder / "aside.tmp"
        torch.save({"step": step}, aside)
        aside.rename(folder / f"ckpt-{step}.pt")
        if step > 3:
            (folder / f"ckpt-{step - 3}.pt").unlink()
"""
SCORES = """
    import os, sys
    import torch
    from tandem.evaluation import checkpoints

    assert sys.argv[1:] == [os.environ["TANDEM_RUN_DIR"]]
    for checkpoint in checkpoints():
        checkpoint.report(closeness=torch.load(checkpoint.weights, weights_only=True)["step"] / 12)
"""


def start_script(folder: Path, script: str, program: str, watch: str) -> LocalRun:
    """Start a plain script, and a program that evaluates each of the files that it writes."""
    (folder / "saves.py").write_text(dedent(script))
    (folder / "scores.py").write_text(dedent(program))
    evaluators = {"command": ["python", str(folder / "scores.py")], "args": ["$TANDEM_RUN_DIR"], "watch": watch}
    job = manifests.manifest(
        "plain",
        trainer={"command": ["python", str(folder / "saves.py")], "args": ["$TANDEM_RUN_DIR/out"]},
        evaluators={**evaluators, "policy": "Every", "metric": "closeness", "goal": "Maximize"},
    )
    (folder / "job.json").write_text(json.dumps(job))
    return LocalRun(folder, manifest=folder / "job.json")


def test_checkpoints_of_a_plain_script_are_evaluated_though_it_is_killed_and_deletes_its_old_ones(
    tmp_path: Path,
) -> None:
    with start_script(tmp_path, SAVES, SCORES, "out/ckpt-*.pt") as run:
        until((run.path / "out" / "ckpt-5.pt").exists, "some checkpoints")
        rank = run.rank_of("worker-0")
        rank.kill()
        assert run.ends() == 0, run.output
        assert f"best        {run.path}/out/ckpt-12.pt" in run.output
        found = {path.parent.name: read_json_or_none(path) for path in run.run_dir.evaluations.glob("*/g000000.json")}
        assert all(result["metrics"]["closeness"] == result["step"] / 12 for result in found.values())
        assert "step-000000012" in found
        assert {path.name for path in (run.path / "watched").glob("*/*")} == {"record.json"}, "links are let go"
        assert run.leavings() == {}


OVERWRITES = """
    import hashlib, os, time
    from pathlib import Path
    import torch

    run = Path(os.environ["TANDEM_RUN_DIR"])
    with (run / "written").open("w") as written:
        for number in range(1, 31):
            torch.save({"number": number, "weight": torch.full((1000,), float(number))}, run / "last.pt")
            print(hashlib.sha256((run / "last.pt").read_bytes()).hexdigest(), file=written, flush=True)
            # As fast as states of one file are found.
            while len(list(run.glob("watched/step-*/record.json"))) < number:
                time.sleep(0.02)
"""
CHECKSUMS = """
    import hashlib
    import torch
    from tandem.evaluation import checkpoints

    for checkpoint in checkpoints():
        checksum = hashlib.sha256(checkpoint.weights.read_bytes()).hexdigest()
        number = torch.load(checkpoint.weights, weights_only=True)["number"]
        checkpoint.report(checksum=int(checksum[:12], 16), closeness=-abs(number - 20))
"""


def test_each_of_thirty_saves_into_one_file_is_evaluated_and_the_best_is_kept(tmp_path: Path) -> None:
    with start_script(tmp_path, OVERWRITES, CHECKSUMS, "last.pt") as run:
        assert run.ends() == 0, run.output
        results = [read_json_or_none(path) for path in run.run_dir.evaluations.glob("*/g000000.json")]
        checksums = {result["step"]: result["metrics"]["checksum"] for result in results}
        written = (run.path / "written").read_text().split()
        assert checksums == {number: int(checksum[:12], 16) for number, checksum in enumerate(written, 1)}
        assert len(set(checksums.values())) == 30
        assert "evaluated   30 checkpoints, none skipped" in run.output
        assert f"best        {run.path}/watched/step-000000020/last.pt" in run.output
        files = [path.name for path in (run.path / "watched").glob("*/*")]
        assert (files.count("record.json"), files.count("last.pt"), len(files)) == (30, 1, 31)
        assert run.leavings() == {}
