"""The reasons of docs/operator.md that no other file here produces, each by a job on a real cluster.

All jobs of a namespace are made at once, so that the tests wait together.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.wire.reasons import Reason
from tests.support.cluster.images import Images
from tests.support.cluster.operated import (
    Job,
    Operator,
    kubectl,
    manifest,
    operated,
    with_a_volume_that_does_not_mount,
)
from tests.support.cluster.pods import Manifest, Namespace, container, restricted
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(400)
Jobs = dict[str, Job]

HANGS = """
import tandem, time
for step in (1, 2, 3):
    tandem.log(step=step)
    time.sleep(1.5)
time.sleep(600)
"""
WRITES = "import os; open(os.environ['TANDEM_RUN_DIR'] + '/last.pt', 'w').write('weights')"
LEAVES_SLOWLY = """
import os, pathlib, signal, sys, time
again = pathlib.Path(os.environ["TANDEM_RUN_DIR"], "again")
if not again.exists():
    again.touch()
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), sys.exit(1)))
    print("leaves slowly", flush=True)
    time.sleep(600)
"""
"""Ends at once at its second start."""


SESSION = """
import os, pathlib, sys, time, torch
from torch.utils.data import TensorDataset
from tandem_trainer import session_data
from tandem_trainer.session import Session

mode, run = sys.argv[1], pathlib.Path(os.environ["TANDEM_RUN_DIR"])
saved = [file.parent for file in run.glob("checkpoints/step-*/manifest.json")]
for file in (file for folder in saved for file in folder.rglob("*") if mode == "damaged"):
    if file.is_file() and file.name != "manifest.json":
        file.write_bytes(bytes(file.stat().st_size))
feed = session_data.feed
if mode == "repeats":
    session_data.feed = lambda *arguments: (batch for once in feed(*arguments) for batch in (once, once))
with Session(str(run)) as session:
    model = session.distribute(torch.nn.Linear(4, 5 if saved and mode == "other" else 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    factor = float("nan") if mode == "diverges" else 1.0
    for step, batch in enumerate(session.batches(TensorDataset(torch.randn(256, 4)), 64, epochs=5000), 1):
        batch.mean(model(batch.data[0]).square().mean(dim=1) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if mode == "early" and step == 12:
            break
        if mode in ("other", "damaged") and not saved and any(run.glob("checkpoints/step-*/manifest.json")):
            raise KeyError("after a checkpoint")
"""
"""Leaves its loop early, has a loss that is NaN, takes each batch twice, or fails once with a checkpoint that it
damages, or that does not fit, at its second start."""


def script(name: str, code: str = "import time; time.sleep(600)", **spec: Any) -> Manifest:
    """A job that runs Python code in one worker."""
    alone: Manifest = {"workers": {"replicas": 1}, "evaluators": {"replicas": 0}}
    return manifest(name, trainer={"command": ["python", "-c", code]}, **{**alone, **spec})


def worker(resources: Manifest | None = None, **spec: Any) -> Manifest:
    """One worker with requests or limits, and a template of its pod."""
    return {"replicas": 1, "template": {"spec": spec}, **({"resources": resources} if resources else {})}


def evaluated(name: str, command: list[str]) -> Manifest:
    """A job that writes one checkpoint, and a program that evaluates it."""
    return script(name, WRITES, evaluators={"command": command, "watch": "last.pt", "drainSeconds": 6})


def all_jobs(images: Images) -> dict[str, Manifest]:
    """A job for each reason."""
    node = json.loads(kubectl("get", "nodes", "-o", "json"))["items"][0]["metadata"]["name"]
    waits = container("setup", images.operator, "python3", "-c", "import time; time.sleep(600)")
    labelled = {"metadata": {"labels": {"tandem.dev/job": "another"}}}
    elsewhere = script("image")
    elsewhere["spec"]["trainer"]["image"] = "localhost:5000/nobody/has-this:1"
    missing = script("missing")
    missing["spec"]["trainer"]["command"] = ["python", "/tandem/missing/nobody-has-this.py"]
    return {
        Reason.INVALID_SPEC: script("invalid", workers={"replicas": 1, "template": labelled}),
        Reason.REFUSED: script("privileged", workers=worker(hostNetwork=True)),
        Reason.POD_REJECTED: script("rejected", workers=worker({"requests": {"cpu": "500"}}, nodeName=node)),
        Reason.LIMIT_EXCEEDED: script("memory", workers=worker({"limits": {"memory": "24Mi"}})),
        Reason.NOT_QUEUED: script("queue", runPolicy={"queueName": "nowhere"}),
        Reason.INVALID_CONFIGURATION: missing,
        Reason.EVALUATION_UNFINISHED: evaluated("unfinished", ["sleep", "600"]),
        "ImagePullBackOff": elsewhere,
        "PodInitializing": script("init", workers=worker(initContainers=[waits])),
    }


@pytest.fixture(scope="module")
def jobs(namespace: Namespace, operator: Operator, images: Images) -> Iterator[Jobs]:
    made = {}
    for reason, whole in all_jobs(images).items():
        made[str(reason)] = Job(namespace, whole["metadata"]["name"])
        made[str(reason)].apply(whole)
    yield made
    for job in made.values():
        namespace("delete", "dtj", job.name, "--ignore-not-found", "--wait=false")


def conditions(job: Job) -> dict[str, tuple[str, str, str]]:
    """Status, reason and message of each condition."""
    return {
        one["type"]: (one["status"], one["reason"], one.get("message", "")) for one in job.status.get("conditions", [])
    }


def has(job: Job, reason: str, *words: str) -> None:
    """Wait for a condition with that reason and these words."""

    def is_there() -> bool:
        return any(
            found == reason and all(word in message for word in words) for _, found, message in conditions(job).values()
        )

    job.becomes(is_there, f"the reason {reason} with {words}")


@pytest.mark.parametrize(
    ("reason", "words", "phases"),
    [
        # After six of these ends the job fails.
        (Reason.LIMIT_EXCEEDED, "OOMKilled", ("Pending", "Starting")),
        (Reason.INVALID_SPEC, "tandem.dev/job", ("", "Pending")),
        (Reason.REFUSED, "violates PodSecurity", ("Pending",)),
        (Reason.POD_REJECTED, "cpu", ("Pending", "Starting")),
        (Reason.INVALID_CONFIGURATION, "nobody-has-this.py", ("Failed",)),
        ("PodInitializing", "setup", ("Pending", "Starting")),
        ("ImagePullBackOff", "nobody/has-this", ("Pending", "Starting")),
        (Reason.EVALUATION_UNFINISHED, "made no progress for 6 s", ("Succeeded",)),
        # While an image is pulled, that comes first.
        (Reason.NOT_QUEUED, "nowhere", ("Pending", "Starting", "Running")),
    ],
)
def test_a_job_says_its_reason(jobs: Jobs, reason: str, words: str, phases: tuple[str, ...]) -> None:
    job = jobs[str(reason)]
    has(job, str(reason), words)
    assert job.phase in phases, job.describe()


def test_a_job_that_is_suspended_resumed_and_completed(namespace: Namespace, operator: Operator) -> None:
    job = Job(namespace, "slowly")
    job.apply(script("slowly", LEAVES_SLOWLY))
    has(job, Reason.COORDINATOR_STARTS)
    has(job, Reason.COORDINATOR_ANSWERED)
    (pod,) = job.pods("worker")
    worker_pod = pod["metadata"]["name"]
    until(lambda: "leaves slowly" in namespace("logs", worker_pod, check=False), "the script's first start")
    suspend = '{{"spec": {{"runPolicy": {{"suspend": {}}}}}}}'
    namespace("patch", "dtj/slowly", "--type=merge", "-p", suspend.format("true"))
    has(job, Reason.SAVING, "1 worker to save and leave")
    has(job, "Suspended")
    namespace("patch", "dtj/slowly", "--type=merge", "-p", suspend.format("false"))
    has(job, Reason.RESUMED)
    job.reaches("Succeeded")
    assert conditions(job)["Complete"][:2] == ("True", Reason.COMPLETED)
    namespace("delete", "dtj", "slowly", "--wait=false")


def test_a_number_of_processes_that_changes_holds_the_job(namespace: Namespace, operator: Operator) -> None:
    def gpus(count: int) -> Manifest:
        limits = {"resources": {"limits": {"nvidia.com/gpu": count}}}
        return script("gpus", workers=worker(containers=[{"name": "worker", **limits}]))

    job = Job(namespace, "gpus")
    job.apply(gpus(64))
    has(job, "Unschedulable")
    job.apply(gpus(32))
    has(job, Reason.PROCESSES_CHANGED, "64 processes", "32")
    job.apply(gpus(64))
    has(job, "Unschedulable")
    namespace("delete", "dtj", "gpus", "--wait=false")


@pytest.fixture
def strict(images: Images, tmp_path: Path) -> Iterator[Namespace]:
    """An operator that allows one field of templates, and waits for the start of a pod for seconds."""
    start = "from tandem_operator import pod_starts as p, __main__ as m; p.MAX_START_SECONDS = 12.0; m.main()"
    allowed = ("spec.volumes", "spec.containers.volumeMounts")
    options = [f"--template-field={field}" for field in allowed]
    with restricted() as namespace, operated(namespace, images, tmp_path, *options, program=("-c", start)):
        yield namespace


@pytest.mark.full("operator")
def test_a_template_that_is_not_allowed_and_a_pod_that_does_not_begin(strict: Namespace) -> None:
    late, refused = Job(strict, "late"), Job(strict, "refused")
    late.apply(with_a_volume_that_does_not_mount("late"))
    refused.apply(script("refused", workers=worker(nodeSelector={"disk": "fast"})))
    has(refused, Reason.TEMPLATE_REFUSED, "workers.template sets spec.nodeSelector.disk")
    assert refused.pods("worker") == []
    has(late, "FailedMount", "not-there")
    has(late, Reason.NOT_BEGUN, "not-there")


@pytest.mark.full("coordinator", "operator")
def test_a_script_that_hangs_three_times_at_one_step_fails_with_that_reason(
    namespace: Namespace, operator: Operator
) -> None:
    job = Job(namespace, "hangs")
    job.apply(script("hangs", HANGS, elasticity={"hangSeconds": 2}))
    job.reaches("Failed")
    status, reason, message = conditions(job)["Failed"]
    assert (status, reason) == ("True", Reason.HUNG)
    assert "3 times at this step" in message
    namespace("delete", "dtj", "hangs", "--wait=false")


@pytest.mark.full("trainer", "coordinator", "operator")
@pytest.mark.parametrize(
    ("mode", "phase", "reason", "words"),
    [
        ("early", "Succeeded", Reason.STOPPED_EARLY, "the script left its loop"),
        ("diverges", "Failed", Reason.DIVERGED, "the loss became NaN at step 1"),
        ("repeats", "Failed", Reason.NUMBERS_WRONG, "took other samples than seed and order give it"),
        ("other", "Failed", Reason.CHECKPOINT_DOES_NOT_FIT, "do not fit the model"),
        ("damaged", "Failed", Reason.CHECKPOINTS_DAMAGED, "all remaining checkpoints are damaged"),
    ],
)
def test_a_session_says_why_it_has_ended(
    namespace: Namespace, operator: Operator, mode: str, phase: str, reason: Reason, words: str
) -> None:
    job = Job(namespace, mode)
    whole = script(
        mode,
        SESSION,
        checkpoint={"everySteps": 5, "storage": {"size": "1Gi"}},
        elasticity={"onCorruption": "Stop"},
    )
    whole["spec"]["trainer"]["args"] = [mode]
    job.apply(whole)
    job.reaches(phase)
    ended = conditions(job)["Complete" if phase == "Succeeded" else "Failed"]
    assert ended[:2] == ("True", reason)
    assert words in ended[2]
    if mode == "diverges":
        assert any(event.startswith("Rewound: ") for event in job.events()), "a trouble of the coordinator is an Event"
    namespace("delete", "dtj", mode, "--wait=false")
