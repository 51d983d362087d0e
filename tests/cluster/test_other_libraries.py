"""Scripts of torch and of four libraries on a real cluster, each with or without an adapter: they are killed, resume on
other numbers of workers, and are evaluated meanwhile. All of them without, and all with, run on one machine
(tests/integration)."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import SCRIPTS, manifests
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, sample_digests, training_records
from tests.support.cluster.pods import Namespace
from tests.support.processes import tandem
from tests.support.ranks import run, sample_ids

pytestmark = [pytest.mark.timeout(900), pytest.mark.full("trainer", "evaluator", "operator", "images")]
FILES = (*SCRIPTS.glob("adapted_*.py"), *(SCRIPTS / f"{name}.py" for name in ("unchanged", "slow_steps")))
EVALUATE = "evaluate_unchanged.py"
SECONDS = 300.0
"""For what takes a minute where nothing else runs."""
KILL_RANK = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if path.read_text().strip() == "tandem-rank":
        os.kill(int(path.parent.name), signal.SIGKILL)
"""
KILL_ALL = "import os, signal; os.kill(-1, signal.SIGKILL)"
"""But process 1 of the pod, which ends with the others."""


def submitted(namespace: Namespace, folder: Path, name: str, words: list[str], **spec: Any) -> Job:
    """A job of these words after `python`, with the scripts as its code."""
    code = folder / "code"
    code.mkdir()
    for file in (*FILES, SCRIPTS / EVALUATE):
        shutil.copy(file, code)
    whole = manifests.manifest(
        name,
        **{
            "workers": {"replicas": 2},
            "elasticity": {"startAfterSeconds": 300, "growCooldownSeconds": 1, "growAfterSeconds": 1},
            **spec,
            "trainer": {"command": ["python", *words], **spec["trainer"]},
            "evaluators": {"command": ["python", EVALUATE], "metric": "loss", **spec.get("evaluators", {})},
        },
    )
    file = folder / "job.json"
    file.write_text(json.dumps(whole))
    result = tandem("submit", str(file), "--code", str(code), "-n", namespace.name)
    assert result.returncode == 0, result.stdout + result.stderr
    return Job(namespace, name)


def evaluated(job: Job) -> int:
    """The step of the newest checkpoint that was evaluated; 0 if none was."""
    return int((job.status.get("latestEvaluation") or {}).get("step", 0))


def trains_with(job: Job, workers: int, beyond: int) -> int:
    """Wait for a group of this size, and for the evaluation of a checkpoint beyond that step; returns its step."""
    job.becomes(lambda: job.status.get("worldSize") == workers, f"a group of {workers}", SECONDS)
    job.becomes(lambda: evaluated(job) > beyond, f"an evaluation beyond step {beyond}", SECONDS)
    assert not job.status.get("completionTime"), job.describe()
    return evaluated(job)


def is_killed_twice(job: Job) -> None:
    """Its pods, and it goes on with one worker; then the rank of that one, and it goes on with three, to its end."""
    at = trains_with(job, 2, 0)
    with ThreadPoolExecutor() as killers:
        list(killers.map(lambda pod: executed(job, pod, "python", "-c", KILL_ALL), job.live("worker")))
    job.namespace("scale", f"dtj/{job.name}", "--replicas=1")
    at = trains_with(job, 1, at)
    (pod,) = job.becomes(lambda: alone if len(alone := job.live("worker")) == 1 else None, "one worker alone")
    executed(job, pod, "python", "-c", KILL_RANK)
    job.namespace("scale", f"dtj/{job.name}", "--replicas=3")
    trains_with(job, 3, at)
    executed(job, job.live("worker")[0], "sh", "-c", "touch $TANDEM_RUN_DIR/fast")
    assert job.reaches("Succeeded", "Failed", seconds=SECONDS) == "Succeeded", job.describe()


def executed(job: Job, pod: str, *words: str) -> None:
    """Run a command in the pod of a worker. What kills it, too, is no error."""
    job.namespace("exec", pod, "--container=worker", "--", *words, check=False)


@pytest.mark.parametrize(
    ("library", "watch"),
    [
        ("ddp", "state-*.pt"),
        ("trainer", "checkpoint-*"),
        ("accelerate", "state-*"),
    ],
)
def test_an_unchanged_script_is_killed_and_resumes_with_other_numbers_of_workers_and_is_evaluated_meanwhile(
    namespace: Namespace, operator: Operator, libraries: str, tmp_path: Path, library: str, watch: str
) -> None:
    """2, then 1, then 3 workers."""
    words = ["unchanged.py", library, "--steps", "400", "--pause", "0.5"]
    evaluators = {"watch": watch, "settleSeconds": 1, "policy": "Latest"}
    job = submitted(namespace, tmp_path, library, words, trainer={"image": libraries}, evaluators=evaluators)
    is_killed_twice(job)
    namespace("delete", "dtj", job.name, "--wait=false")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapted-sft", ["adapted_trainer.py", "--kind", "sft-lora"]),
        ("adapted-lightning", ["adapted_lightning.py"]),
    ],
)
def test_with_an_adapter_it_takes_the_samples_of_the_undisturbed_run(
    namespace: Namespace,
    operator: Operator,
    images: Images,
    libraries: str,
    tmp_path: Path,
    name: str,
    words: list[str],
) -> None:
    """2, then 1, then 3 workers on the cluster; one process on this machine."""
    epochs = ["--epochs", "40"]
    job = submitted(
        namespace,
        tmp_path,
        name,
        [*words, *epochs, "--pause", "0.5"],
        trainer={"image": libraries},
        evaluators={"policy": "Latest"},
        checkpoint={"everySteps": 2, "storage": {"size": "1Gi"}},
    )
    is_killed_twice(job)
    starts = [(record["step"], record["worldSize"]) for record in training_records(job, images, "start")]
    sizes = [size for _, size in starts]
    assert (sizes[0], sizes[-1]) == (2, 3), starts
    assert 1 in sizes[1:-1], starts
    assert all(step > 0 for step, _ in starts[1:]), "each resumes from a checkpoint"
    undisturbed = manifests.run_directory(
        tmp_path / "one", manifests.job(name, trainer={"command": ["python", words[0]]}, workers={"replicas": 2})
    )
    run(undisturbed, 1, str(SCRIPTS / words[0]), *words[1:], *epochs)
    assert sample_digests(job, images) == sample_ids(undisturbed)
    namespace("delete", "dtj", job.name, "--wait=false")
