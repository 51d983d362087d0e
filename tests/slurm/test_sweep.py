"""A sweep whose trials are jobs on a real SLURM."""

import json

import pytest

from tests.support import hills, manifests
from tests.support.slurm.run import SlurmRun

pytestmark = pytest.mark.timeout(240)


def test_trials_are_submitted_to_slurm_and_the_worse_one_is_cancelled(run: SlurmRun) -> None:
    hills.write(run.folder)
    job = manifests.manifest("hill", **hills.spec(steps=80, lowest=0.5))
    (run.folder / "job.json").write_text(json.dumps(job))
    sweep = {"apiVersion": job["apiVersion"], "kind": "Sweep", "metadata": {"name": "hills"}}
    spec = hills.sweep([0.9, 0.1], job="job.json")
    (run.folder / "sweep.json").write_text(json.dumps(sweep | {"spec": spec}))
    done = run.tandem("sweep", "sweep.json", "--slurm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trial 0 complete: height 0.9720" in done.stdout
    assert "trial 1 pruned: height 0.1" in done.stdout
    assert run.queue() == ""
    rows = json.loads(run.tandem("compare", "hills", "-o", "json").stdout)["trials"]
    assert [(row["state"], row["run"]) for row in rows] == [
        ("Complete", "runs/hills/hills-0"),
        ("Pruned", "runs/hills/hills-1"),
    ]
