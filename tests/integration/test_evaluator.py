"""Real evaluator processes on a run directory with real checkpoints."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import UID, UID_ANNOTATION, environment
from tandem.rundir.checkpoint import FILE, WEIGHTS
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.watched import Finder
from tandem_trainer import data, models
from tests.support.bad_surroundings import whole_mnist
from tests.support.disks import unreadable
from tests.support.evaluator_run import Run, ends
from tests.support.manifests import images
from tests.support.waiting import until

DIGITS = {"name": "digits"}
SLOW = {"name": "synthetic", "samples": 10_000}
"""2,000 test images: a pass of the larger network takes seconds, a hundred times what it takes to see that it began."""


def until_idle(run: Run, name: str) -> None:
    """Until a process has loaded everything and found nothing to do."""
    until(lambda: any(line["state"] == "idle" for line in run.log(name, "usage")), f"{name} is idle")


def whole_pass(run: Run, seed: int) -> dict[str, Any]:
    """The merged result as one process without any of our code would have it, by scikit-learn."""
    settings = run.job.spec.trainer.images
    samples = data.load(settings.data, "test")
    model = models.build(settings.model, samples.channels, samples.image_size, samples.classes)
    model.load_state_dict(run.weights(seed, samples.channels, samples.image_size))
    with torch.inference_mode():
        logits = torch.cat([model.eval()(part) for part in torch.split(samples.images, 500)])
    true, predicted = samples.labels.numpy(), logits.argmax(dim=1).numpy()
    return {
        "samples": len(samples),
        "confusion": confusion_matrix(true, predicted, labels=range(10)).tolist(),
        "loss": log_loss(true, logits.double().softmax(dim=1).numpy(), labels=range(10)),
        "accuracy": accuracy_score(true, predicted),
        "macroF1": f1_score(true, predicted, average="macro"),
    }


def assert_is_whole(merged: Any, expected: dict[str, Any]) -> None:
    assert merged["samples"] == expected["samples"]
    assert merged["confusion"] == expected["confusion"]
    for metric in ("loss", "accuracy", "macroF1"):
        assert merged["metrics"][metric] == pytest.approx(expected[metric], abs=1e-6), metric


def killed_in_the_middle(run: Run) -> Path:
    """Have evaluator-0-0 begin the first shard and die. Returns its claim, made to last as long as the test does."""
    with run.evaluator() as victim:
        claim = Path(until(lambda: run.claims("evaluator-0-0"), "the victim works")[0])
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    assert not list(run.rundir.evaluations.glob("*/*.shard-*")), "it died in the middle"
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"until": time.time() + 3600}))
    return claim


@pytest.mark.full("core", "evaluator")
def test_two_processes_share_every_checkpoint_and_leave_when_all_is_merged(tmp_path: Path) -> None:
    shards = 4
    run = Run(tmp_path / "run", DIGITS, {"replicas": 2, "processesPerReplica": 2, "policy": "Every"}, model="baby-cnn")
    with run.evaluator("evaluator-0") as one, run.evaluator("evaluator-1") as other:
        for name in ("evaluator-0-0", "evaluator-1-0"):
            until_idle(run, name)
        references = [run.checkpoint(10 * seed, run.weights(seed, image_size=8)) for seed in range(1, 31)]
        run.rundir.mark_done(references[-1])
        for process in (one, other):
            code, output = ends(process)
            assert code == ExitCode.DONE, output

    for seed in (1, 30):
        assert_is_whole(run.merged(references[seed - 1]), whole_pass(run, seed))
    results = [run.shard(reference, shard, shards) for reference in references for shard in range(shards)]
    assert {result["evaluator"] for result in results} == {"evaluator-0-0", "evaluator-1-0"}
    scores = {reference.step: run.merged(reference)["metrics"]["accuracy"] for reference in references}
    best = read_json_or_none(run.rundir.best_file)
    assert best["step"] == min(scores, key=lambda step: (-scores[step], step))
    assert (best["metric"], best["value"]) == ("accuracy", max(scores.values()))
    assert not list(run.rundir.leases.iterdir())

    lines = run.log("evaluator-0-0", "evaluated") + run.log("evaluator-1-0", "evaluated")
    assert sorted((line["step"], line["shard"]) for line in lines) == [
        (reference.step, shard) for reference in references for shard in range(shards)
    ], "each shard is done once"
    usage = run.log("evaluator-0-0", "usage")
    assert usage[0]["state"] == "starting"
    assert [line["cpuSeconds"] for line in usage] == sorted(line["cpuSeconds"] for line in usage)
    assert len(run.log("evaluator-0-0", "end")) == 1


def test_the_shard_of_a_killed_process_is_redone_by_another(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", SLOW, {"processesPerReplica": 2})
    reference = run.checkpoint(10, run.weights(1))
    run.rundir.mark_done(reference)
    claim = killed_in_the_middle(run)
    with run.evaluator(index=1) as survivor:
        until(lambda: run.shard(reference, 1, 2), "the other shard is done")
        until(lambda: run.log("evaluator-0-1", "usage")[-1]["state"] == "idle", "it waits for the claimed one")
        assert survivor.poll() is None
        claim.write_text(json.dumps(json.loads(claim.read_text()) | {"until": time.time() - 1}))
        code, output = ends(survivor)
    assert code == ExitCode.DONE, output
    assert_is_whole(run.merged(reference), whole_pass(run, 1))
    assert {run.shard(reference, shard, 2)["evaluator"] for shard in range(2)} == {"evaluator-0-1"}


@pytest.mark.full("core", "evaluator")
def test_a_killed_process_that_is_started_again_goes_on_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", SLOW, {"processesPerReplica": 1})
    reference = run.checkpoint(10, run.weights(1))
    run.rundir.mark_done(reference)
    killed_in_the_middle(run)
    with run.evaluator() as again:
        code, output = ends(again)
    assert code == ExitCode.DONE, output
    assert_is_whole(run.merged(reference), whole_pass(run, 1))


def test_bad_checkpoints_are_reported_and_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", DIGITS, {"policy": "Every"}, model="baby-cnn")
    good = run.weights(1, image_size=8)
    sound = run.checkpoint(10, good)
    truncated, flipped, unlisted, misfit, diverged = (run.checkpoint(step, good) for step in (20, 30, 40, 50, 60))

    path = run.rundir.checkpoint(truncated.name) / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    path = run.rundir.checkpoint(flipped.name) / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    (run.rundir.checkpoint(unlisted.name) / FILE).unlink()
    run.rundir.set_aside(misfit.name, ".stale")
    misfit = run.checkpoint(50, {"other.weight": torch.zeros(3)})
    run.rundir.set_aside(diverged.name, ".stale")
    diverged = run.checkpoint(60, {name: torch.full_like(value, math.nan) for name, value in good.items()})
    final = run.checkpoint(70, good)
    run.rundir.mark_done(final)

    with run.evaluator() as process:
        code, output = ends(process)
    assert code == ExitCode.DONE, output
    assert "Traceback" not in output

    for reference in (truncated, flipped, unlisted):
        assert not run.rundir.checkpoint(reference.name).exists()
        assert (run.rundir.checkpoints / f"{reference.name}.bad").is_dir()
        assert run.merged(reference) is None
    assert run.rundir.checkpoint(misfit.name).is_dir(), "it is whole, only not for us"
    assert run.merged(misfit) is None
    why = {line["checkpoint"]: line["why"] for line in run.log("evaluator-0-0", "bad")}
    assert "bytes instead of" in why[truncated.name]
    assert "checksum" in why[flipped.name]
    assert "no manifest" in why[unlisted.name]
    assert "not those of the job's model" in why[misfit.name]
    assert len(why) == 4

    assert run.merged(diverged)["metrics"]["loss"] is None
    assert "not finite" in run.merged(diverged)["note"]
    assert run.merged(sound)["metrics"] == run.merged(final)["metrics"]
    assert read_json_or_none(run.rundir.best_file)["step"] == 10, "of equals the earlier"


@pytest.mark.full("core", "evaluator")
def test_latest_skips_what_it_cannot_keep_up_with_and_the_final_one_is_evaluated(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", SLOW, {"policy": "Latest", "metric": "loss"})
    run.rundir.job_file.rename(tmp_path / "job.json")
    with run.evaluator() as process:
        (tmp_path / "job.json").rename(run.rundir.job_file)  # it may start before the job is recorded
        weights = {seed: run.weights(seed) for seed in range(1, 6)}
        references = [run.checkpoint(10, weights[1])]
        until(lambda: run.claims("evaluator-0-0"), "it works on the first")
        references += [run.checkpoint(10 * seed, weights[seed]) for seed in (2, 3, 4)]
        until(lambda: run.log("evaluator-0-0", "evaluated"), "the first is evaluated")
        until(lambda: references[3].name in str(run.claims("evaluator-0-0")), "it works on the newest")
        final = run.checkpoint(50, weights[5])
        run.rundir.evaluations.joinpath(final.name).mkdir()
        (run.rundir.evaluations / final.name / "g000001.skipped.json").write_text('{"why": "", "at": 0.0}')
        run.rundir.mark_done(final)
        code, output = ends(process)
    assert code == ExitCode.DONE, output
    first, second, third, newest = references
    assert [run.skipped(one) for one in references] == [False, True, True, False]
    assert [line["step"] for line in run.log("evaluator-0-0", "skipped")] == [30, 20]
    assert [line["step"] for line in run.log("evaluator-0-0", "evaluated")] == [10, 40, 50]
    assert all(run.merged(one) for one in (first, newest, final))
    assert not run.merged(second)
    assert not run.merged(third)
    assert any(line["state"] == "evaluating" for line in run.log("evaluator-0-0", "usage"))


@pytest.mark.parametrize(
    ("uid", "found", "expected"),
    [("a-pods", "", "waits"), ("a-pods", "state-5.pt", "loaded"), ("", "", "loaded")],
    ids=["a pod", "a pod, and a checkpoint of a script that does not use Tandem", "tandem run"],
)
def test_in_a_pod_torch_is_loaded_when_ranks_have_it(tmp_path: Path, uid: str, found: str, expected: str) -> None:
    looks_at_a_run_without_ranks = """
import os, sys
from tandem.rundir.layout import RunDir
from tandem_evaluator.__main__ import main
from tandem_evaluator.evaluator_log import EvaluatorLog

def tell(*_):
    print("loaded" if "torch" in sys.modules else "waits", flush=True)
    os._exit(0)

looks = iter(range(3))
RunDir.newest_generation = lambda rundir: tell() if next(looks) == 2 else 0
EvaluatorLog.doing = tell
main(["--index", "0"])
"""
    run = Run(tmp_path / "run", DIGITS, {})
    variables = environment(run.job, run.rundir.path, "evaluator-0")
    variables[UID] = uid
    if uid:
        body = run.job.dump()
        body["metadata"]["annotations"] = {UID_ANNOTATION: uid}
        run.rundir.job_file.write_text(json.dumps(body))
    if found:
        torch.save({}, run.rundir.path / found)
        finder = Finder(run.rundir, "state-*.pt", 0.0)
        # Two looks find it the same.
        for ended in (False, True):
            finder.look(ended)
        assert finder.recorded
    words = [sys.executable, "-c", looks_at_a_run_without_ranks]
    done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{expected}\n"


def test_sigterm_gives_back_the_claim_and_asks_to_be_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", SLOW, {})
    run.checkpoint(10, run.weights(1))
    with run.evaluator() as process:
        until(lambda: run.claims("evaluator-0-0"), "it works")
        process.send_signal(signal.SIGTERM)
        code, output = ends(process)
    assert code == ExitCode.PREEMPTED, output
    assert not list(run.rundir.leases.iterdir())
    assert len(run.log("evaluator-0-0", "end")) == 1
    assert not list(run.rundir.evaluations.glob("*/*")), "it did not finish its shard first"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trainer": images({"data": {"name": "mnist", "path": "nowhere",
                                                                          "download": False}})}, "nowhere"),
        ({"trainer": {"command": ["python", "train.py"]}, "evaluators": {"replicas": 0}}, "trains by a command"),
        ({"evaluators": {"replicas": 0}}, "evaluation is turned off"),
        ({"trainer": {"tusk": 1}}, "is not a valid job"),
    ],
    ids=["no data", "a command", "no evaluators", "not a job"],
)  # fmt: skip
def test_a_job_that_cannot_be_evaluated_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    run = Run(tmp_path / "run", DIGITS, {})
    body = run.job.dump()
    run.rundir.job_file.write_text(json.dumps(body | {"spec": body["spec"] | change}))
    with run.evaluator() as process:
        code, output = ends(process)
    assert code == ExitCode.CONFIGURATION, output
    assert says in output
    assert len(output.strip().splitlines()) == 1, output


def test_a_disk_that_fails_is_no_mistake_in_the_job(tmp_path: Path) -> None:
    whole_mnist(tmp_path)
    unreadable(tmp_path / "data" / "t10k-labels-idx1-ubyte")
    run = Run(tmp_path / "run", {"name": "mnist", "path": str(tmp_path / "data"), "download": False}, {})
    with run.evaluator() as process:
        code, output = ends(process)
    assert code == ExitCode.FAILED, output
    assert output.strip().endswith("the data cannot be read: [Errno 5] Input/output error")
    assert len(output.strip().splitlines()) == 1, output
