"""`tandem submit --code` on a real cluster: a folder of this machine runs in the pods without an image of its own."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.support import coded
from tests.support.cluster.operated import Job, Operator
from tests.support.cluster.pods import Namespace
from tests.support.processes import tandem
from tests.support.waiting import until

SECONDS = 60.0
"""Far above what it takes: other tests run beside this one. The figure that counts is printed."""


def submit(namespace: Namespace, folder: Path, name: str, steps: int = 5000) -> str:
    file = folder.parent / f"{name}.json"
    file.write_text(json.dumps(coded.manifest(name, steps)))
    result = tandem("submit", str(file), "--code", str(folder), "-n", namespace.name)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def logs(namespace: Namespace, name: str) -> str:
    result = tandem("logs", name, "-n", namespace.name)
    return result.stdout + result.stderr


@pytest.mark.timeout(600)
def test_an_edited_line_runs_on_the_cluster_within_seconds_and_every_pod_has_the_same_digest(
    namespace: Namespace, operator: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = coded.write(tmp_path / "code", value=1)
    assert "the code was sent in" in submit(namespace, folder, "first", steps=10)
    # The nodes may have to pull the image first.
    started = "first-step value=1"
    until(lambda: started in logs(namespace, "first"), "a first step", 300.0, Job(namespace, "first").describe)

    edited = time.time()
    (folder / "parts" / "setting.py").write_text("VALUE = 2\n")
    said = submit(namespace, folder, "second")
    (digest,) = set(re.findall(r"sha256:[0-9a-f]{64}", said))
    job = Job(namespace, "second")
    # A look takes a second of a core, which the pods need: the log has the time in it.
    until(
        lambda: logs(namespace, "second").count("first-step value=2 answer=42 sum=2") == 2,
        "a first step of both",
        otherwise=job.describe,
        pause=5.0,
    )
    seconds = max(float(at) for at in re.findall(r"first-step .*at=([\d.]+)", logs(namespace, "second"))) - edited
    with capsys.disabled():
        print(f"\nfrom the edit of a line to the first step with it: {seconds:.1f} s")
    assert seconds < SECONDS

    def of_pods() -> dict[str, str]:
        found = re.findall(r"(\S+-\d+) +│.*event=code digest=(\S+)", logs(namespace, "second"))
        return dict(found)

    expected = dict.fromkeys(("worker-0", "worker-1", "evaluator-0"), digest)
    until(
        lambda: of_pods() == expected,
        "the digest in the log of every pod",
        60.0,
        otherwise=lambda: logs(namespace, "second") + job.describe(),
    )
    told = logs(namespace, "second")
    assert told.count("event=install ") == 1, "the packages of requirements.txt are installed once for all pods"
    again = submit(namespace, folder, "second")
    assert "unchanged" in again
    assert "the code is on the job's volume already" in again


@pytest.mark.timeout(300)
def test_requirements_that_cannot_be_installed_end_the_job_with_pips_words(
    namespace: Namespace, operator: Operator, tmp_path: Path
) -> None:
    folder = coded.write(tmp_path / "code")
    (folder / "requirements.txt").write_text("--no-index\nno-such-package==9\n")
    submit(namespace, folder, "lacking")
    job = Job(namespace, "lacking")
    job.becomes(lambda: job.status.get("phase") == "Failed", "a job that failed")
    assert "requirements.txt cannot be installed: No matching distribution found for no-such-package==9" in str(
        job.status["message"]
    )
    assert not job.status.get("restarts"), "no restart helps"
