"""`tandem submit | status | logs | events` on a real cluster, where the operator makes the pods."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rundir.layout import RunDir
from tests.support import ROOT
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, sample_digests, training_records
from tests.support.cluster.pods import Namespace
from tests.support.planned import planned_samples
from tests.support.processes import TANDEM, tandem
from tests.support.waiting import until

DIGITS = "examples/digits.yaml"


def said(namespace: Namespace, *words: str, code: int = 0) -> str:
    """What a command prints; of one that is refused, its errors."""
    result = tandem(*words, "-n", namespace.name)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stderr if code else result.stdout


class Following:
    """A command that goes on, and what it has printed so far."""

    def __init__(self, namespace: Namespace, *words: str) -> None:
        self._process = subprocess.Popen(
            [TANDEM, *words, "-n", namespace.name],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self._process.stdout)

    def shows(self, *words: str, seconds: float = 90.0) -> str:
        """Wait for a line with all of these words."""
        return until(
            lambda: next((line for line in list(self.lines) if all(word in line for word in words)), None),
            f"a line with {words}",
            seconds,
            otherwise=lambda: "\n".join(self.lines[-40:]),
        )

    def ends(self, seconds: float) -> int:
        """Wait for its end; the exit code."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail("it goes on\n" + "\n".join(self.lines[-40:]))
        self._reader.join(10)
        return code

    def close(self) -> None:
        """Not to be left behind."""
        self._process.kill()
        self._process.wait(30)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def follow(namespace: Namespace) -> Iterator[object]:
    all_of_them: list[Following] = []

    def start(*words: str) -> Following:
        all_of_them.append(Following(namespace, *words))
        return all_of_them[-1]

    yield start
    for one in all_of_them:
        one.close()


@pytest.mark.timeout(900)
@pytest.mark.full("cli", "operator")
def test_a_job_is_submitted_followed_over_a_lost_pod_and_told_of_to_its_end(
    namespace: Namespace, operator: Operator, images: Images, follow: type[Following], tmp_path: Path
) -> None:
    assert "would be created" in said(namespace, "submit", DIGITS, "--dry-run")
    assert "no job digits" in said(namespace, "status", "digits", code=2)
    longer = ("--set", "spec.trainer.loop.epochs=400", "--set", "spec.elasticity.growAfterSeconds=5")
    assert said(namespace, "submit", DIGITS, *longer).startswith(f"created in namespace {namespace.name}: digits:")
    assert said(namespace, "submit", DIGITS, *longer).startswith("unchanged")

    job = Job(namespace, "digits")
    logs, watched = follow("logs", "digits", "--follow"), follow("status", "digits", "--watch")
    job.becomes(lambda: job.status.get("worldSize") == 2 and job.trains(), "two workers in one group")
    logs.shows("worker-0", "world=")
    logs.shows("coordinator", "generation 1 with")
    logs.shows("evaluator-0", "merged checkpoint=")
    watched.shows("phase=Running", "step=")

    shown = said(namespace, "status", "digits")
    for pod in (*job.live("worker"), *job.live("evaluator"), *job.live("coordinator")):
        assert pod in shown
    assert "Running" in shown
    assert "generation 1 with" in shown
    record = json.loads(said(namespace, "status", "digits", "-o", "json"))
    assert {pod["name"] for pod in record["pods"]} == {"coordinator", "worker-0", "worker-1", "evaluator-0"}
    assert all(pod["node"].startswith("node-") for pod in record["pods"] if pod["state"] == "running")

    assert f"to {tmp_path}" in said(namespace, "copy", "digits", str(tmp_path / "run"), "--checkpoint", "latest")
    first = RunDir(tmp_path / "run").committed()[0]

    (coordinator,) = job.live("coordinator")
    namespace("exec", coordinator, "--", "python3", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
    logs.shows("coordinator", "the coordinator restarted")
    told = said(namespace, "logs", "digits", "coordinator")
    assert told.count("generation 1 with") == 1, "the log of the container before belongs to it, once"
    assert "the coordinator restarted" in told

    (lost,) = [pod["pod"] for pod in record["pods"] if pod["name"] == "worker-1"]
    namespace("delete", "pod", lost, "--wait=false")
    logs.shows("worker-1 is now digits-worker-1-")
    job.becomes(
        lambda: any(
            "generation " in line and lost in line for line in said(namespace, "events", "digits").splitlines()
        ),
        "an event of a generation without the pod that was lost",
    )

    assert watched.ends(750) == 0
    assert any("digits  Succeeded" in line for line in watched.lines)
    assert logs.ends(60) == 0
    logs.shows("training is complete", seconds=1)
    lines = [line for line in logs.lines if "merged checkpoint=" in line]
    assert len(lines) == len(set(lines)), "a line was shown twice"
    assert "evaluator-0 │" in said(namespace, "logs", "digits", "--role", "evaluator", "--tail", "5")
    assert "Succeeded" in said(namespace, "status")
    records = training_records(job, images, "step")
    assert sample_digests(records) == planned_samples(job.status["progress"]["totalSteps"])

    told = said(namespace, "copy", "digits", str(tmp_path / "run"))
    newest, *_ = RunDir(tmp_path / "run").committed()
    assert (newest.step, newest.name in told) == (job.status["progress"]["totalSteps"], True)
    assert newest.step > first.step
    until(lambda: "pod/tandem-copy" not in namespace("get", "pods", "-o", "name"), "the pod of the copy is gone")
    assert tandem("verify", tmp_path / "run").returncode == 0
    # Steps that its pods took are the same on this machine, and the record is the one that the operator saw.
    head = job.status["provenance"]["head"]
    proof = tandem("prove", tmp_path / "run", "--head", head, "--steps", "1-10")
    assert (proof.returncode, "losses    10 of 10 are the same" in proof.stdout) == (0, True), proof.stdout
    assert (tandem("report", tmp_path / "run").returncode, (tmp_path / "run/report.html").is_file()) == (0, True)


def test_what_the_cluster_refuses_is_told_in_words(namespace: Namespace, operator: Operator) -> None:
    named = ("--set", "metadata.name=refused", "--set", "spec.runPolicy.suspend=true")
    said(namespace, "submit", DIGITS, *named)
    changed = said(namespace, "submit", DIGITS, *named, "--set", "spec.trainer.loop.epochs=3", code=2)
    assert "spec.trainer" in changed
    assert "immutable" in changed or "cannot be changed" in changed

    namespace("scale", "dtj/refused", "--replicas=1")
    conflict = said(namespace, "submit", DIGITS, *named, code=2)
    assert ".spec.workers.replicas" in conflict
    assert "--force" in conflict
    assert said(namespace, "submit", DIGITS, *named, "--force").startswith("changed")

    assert "Suspended" in Job(namespace, "refused").reaches("Suspended")
    assert "no pod of refused has a log" not in said(namespace, "status", "refused")
    namespace("delete", "dtj", "refused", "--wait=false")


def test_namespaces_and_contexts_that_are_not_there(namespace: Namespace, operator: Operator) -> None:
    nowhere = Namespace("tandem-test-nowhere")
    assert 'namespaces "tandem-test-nowhere" not found' in said(nowhere, "submit", DIGITS, code=2)
    assert "there is no context nowhere" in said(namespace, "status", "--context", "nowhere", code=2)
    assert said(nowhere, "status") == ""


def test_a_job_without_what_it_needs_says_so(namespace: Namespace, operator: Operator) -> None:
    gpus = "spec.workers.resources.limits={nvidia.com/gpu: 64}"
    said(namespace, "submit", DIGITS, "--set", "metadata.name=hungry", "--set", gpus)
    job = Job(namespace, "hungry")
    job.becomes(lambda: "Insufficient nvidia.com/gpu" in said(namespace, "status", "hungry"), "the reason")
    job.becomes(lambda: "Insufficient nvidia.com/gpu" in said(namespace, "events", "hungry"), "the event")
    namespace("delete", "dtj", "hungry", "--wait=false")
