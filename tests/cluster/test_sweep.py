"""A sweep whose trials are jobs on a real cluster."""

import json
from pathlib import Path

import pytest

from tandem import Client
from tests.support import hills, manifests
from tests.support.cluster.operated import Job, Operator, kubectl
from tests.support.cluster.pods import Namespace


@pytest.mark.timeout(600)
def test_trials_are_jobs_that_scores_suspend_and_the_last_one_gets_the_free_worker(
    namespace: Namespace, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workers = {"replicas": 2, "minReplicas": 1}
    job = manifests.manifest("hill", **hills.spec(steps=120, lowest=0.5, workers=workers))
    client = Client(kubernetes=namespace.name)
    sweep = client.sweep(hills.sweep([0.9, 0.1, 0.95]), job=job, name="hills", code=hills.write(tmp_path / "code"))
    trials = sweep.wait(500)
    described = f"{Path('runs/hills/sweep.log').read_text()}\n{Job(namespace, 'hills-2').describe()}"
    assert [trial.state for trial in trials] == ["Complete", "Pruned", "Complete"], described
    best = sweep.best()
    assert best is not None
    assert (best.number, best.step) == (2, 120)
    listed = json.loads(kubectl("get", "dtj", "-n", namespace.name, "-l", "tandem.dev/sweep=hills", "-o", "json"))
    phases = {item["metadata"]["name"]: item["status"]["phase"] for item in listed["items"]}
    assert phases == {"hills-0": "Succeeded", "hills-1": "Suspended", "hills-2": "Succeeded"}
    assert "trial 2 gets 2 workers" in described
