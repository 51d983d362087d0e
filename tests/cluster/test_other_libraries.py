"""Scripts of torch and of four libraries on a real cluster, as their users write them and with an adapter: they are
killed, resume on other numbers of workers, and are evaluated meanwhile."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import SCRIPTS, manifests
from tests.support.cluster.images import Images
from tests.support.cluster.operated import LOOK_SECONDS, Job, Operator, sample_digests, training_records
from tests.support.cluster.pods import Namespace
from tests.support.libraries import SAVED
from tests.support.processes import tandem
from tests.support.ranks import run, sample_ids
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(900), pytest.mark.full("trainer", "evaluator", "operator", "images")]
EVALUATE = "evaluate_unchanged.py"
FILES = (*SCRIPTS.glob("adapted_*.py"), *(SCRIPTS / name for name in ("unchanged.py", "slow_steps.py", EVALUATE)))
SECONDS = 300.0
"""For what takes seconds where nothing else runs."""
KILL_RANK = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if path.read_text().strip() == "tandem-rank":
        os.kill(int(path.parent.name), signal.SIGKILL)
"""
KILL_ALL = "import os, signal; os.kill(-1, signal.SIGKILL)"
"""But process 1 of the pod, which ends with the others."""


@contextmanager
def submitted(namespace: Namespace, folder: Path, name: str, words: list[str], **spec: Any) -> Iterator[Job]:
    """A job of these words after `python`, with the scripts as its code; gone at the end."""
    code = folder / "code"
    code.mkdir()
    for file in FILES:
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
    yield Job(namespace, name)
    namespace("delete", "dtj", name, "--wait=false")


def trains_with(job: Job, workers: int) -> None:
    """Wait for a group of this size, and for the evaluation of a checkpoint that it has made itself."""

    def step(of: str) -> int:
        status = job.status
        assert not status.get("completionTime"), job.describe()
        return int((status.get(of) or {}).get("step", 0)) if status.get("worldSize") == workers else -1

    until(lambda: step("latestCheckpoint") >= 0, f"a group of {workers}", SECONDS, job.describe, LOOK_SECONDS)
    found = step("latestCheckpoint")
    what = f"an evaluation beyond step {found} of a group of {workers}"
    until(lambda: step("latestEvaluation") > found, what, SECONDS, job.describe, LOOK_SECONDS)


def is_killed_twice(job: Job) -> None:
    """Its pods, and it goes on with one worker; then the rank of that one, and it goes on with three, to its end."""
    trains_with(job, 2)
    with ThreadPoolExecutor() as killers:
        list(killers.map(lambda pod: executed(job, pod, "python", "-c", KILL_ALL), job.live("worker")))
    job.namespace("scale", f"dtj/{job.name}", "--replicas=1")
    trains_with(job, 1)
    (pod,) = job.becomes(lambda: alone if len(alone := job.live("worker")) == 1 else None, "one worker alone")
    executed(job, pod, "python", "-c", KILL_RANK)
    job.namespace("scale", f"dtj/{job.name}", "--replicas=3")
    trains_with(job, 3)
    executed(job, job.live("worker")[0], "sh", "-c", "touch $TANDEM_RUN_DIR/fast")
    assert job.reaches("Succeeded", "Failed", seconds=SECONDS) == "Succeeded", job.describe()


def executed(job: Job, pod: str, *words: str) -> None:
    """Run a command in the pod of a worker. What kills it, too, is no error."""
    job.namespace("exec", pod, "--container=worker", "--", *words, check=False)


@pytest.mark.parametrize(("library", "watch"), SAVED.items())
def test_an_unchanged_script_is_killed_and_resumes_with_other_numbers_of_workers_and_is_evaluated_meanwhile(
    namespace: Namespace, operator: Operator, libraries: str, tmp_path: Path, library: str, watch: str
) -> None:
    """2, then 1, then 3 workers."""
    words = ["unchanged.py", library, "--steps", "600", "--pause", "0.5"]
    evaluators = {"watch": watch, "settleSeconds": 1, "policy": "Latest"}
    trainer = {"image": libraries}
    with submitted(namespace, tmp_path, library, words, trainer=trainer, evaluators=evaluators) as job:
        is_killed_twice(job)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapted-trainer", ["adapted_trainer.py", "--kind", "trainer"]),
        ("adapted-sft", ["adapted_trainer.py", "--kind", "sft-lora"]),
        ("adapted-lightning", ["adapted_lightning.py"]),
        ("adapted-accelerate", ["adapted_accelerate.py"]),
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
    words = [*words, "--epochs", "60"]
    slowly = [*words, "--pause", "1"]
    more = {
        "trainer": {"image": libraries},
        "evaluators": {"policy": "Latest"},
        "checkpoint": {"everySteps": 1, "storage": {"size": "1Gi"}},
    }
    with submitted(namespace, tmp_path, name, slowly, **more) as job:
        is_killed_twice(job)
        records = training_records(job, images, "start", "step")
    starts = [(record["step"], record["worldSize"]) for record in records if record["kind"] == "start"]
    sizes = [size for _, size in starts]
    assert (sizes[0], sizes[-1]) == (2, 3), starts
    assert 1 in sizes[1:-1], starts
    assert all(step > 0 for step, _ in starts[1:]), "each resumes from a checkpoint"
    undisturbed = manifests.run_directory(
        tmp_path / "one", manifests.job(name, trainer={"command": ["python", words[0]]}, workers={"replicas": 2})
    )
    run(undisturbed, 1, str(SCRIPTS / words[0]), *words[1:])
    assert sample_digests(records) == sample_ids(undisturbed)
