"""Groups whose ranks keep their process and their state when the membership changes, and how they are watched."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tandem_trainer.sample_audit import audit
from tests.support import SCRIPTS
from tests.support.elastic import Elastic
from tests.support.local_run import LocalRun
from tests.support.manifests import manifest
from tests.support.ranks import sample_ids
from tests.support.waiting import until

STEPS = 160
"""Steps of a run that ends: ten epochs of 400 lines in batches of 25."""


TASK = (SCRIPTS / "slopes.py").read_text()


def write_slopes(folder: Path, code: str) -> None:
    """Write `slopes.py`, beside the faults that it plays."""
    folder.mkdir(exist_ok=True)
    (folder / "slopes.py").write_text(code)
    shutil.copy(SCRIPTS / "faults_of_steps.py", folder)


def start_regrouping(folder: Path, code: str, trainer: dict[str, Any], **spec: Any) -> LocalRun:
    """Train `slopes.py` with two workers that regroup."""
    write_slopes(folder, code)
    whole = {
        "trainer": trainer,
        # Both, or a rank would take all steps while the other one prepares itself.
        "workers": {"replicas": 2, "minReplicas": 2},
        "evaluators": {"replicas": 0},
        "checkpoint": {"everySteps": 30},
        "elasticity": {"onMembershipChange": "Regroup", "maxRestarts": 100, "heartbeatSeconds": 0.1},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest("slopes", **whole | spec)))
    return LocalRun(folder, manifest=folder / "job.yaml", cwd=folder)


def check_played(folder: Path, faults: list[str]) -> None:
    assert not {fault for fault in faults if not (folder / fault.replace(":", "-")).exists()}


def check_steps(run: LocalRun, steps: int = STEPS) -> None:
    """Assert that each step was taken with its samples, and none of them is in doubt."""
    audited = audit(run.run_dir)
    assert not audited.problems
    assert not audited.unknown
    assert audited.steps == steps


def check_same_end(run: LocalRun, calm: LocalRun) -> None:
    """Compare a disturbed run with an undisturbed one: samples, losses, weights and their average."""
    check_steps(run)
    assert sample_ids(run.run_dir) == sample_ids(calm.run_dir)
    expected, measured = losses(calm), losses(run)
    assert list(measured) == list(range(1, STEPS + 1)), "no loss is lost with a rank"
    torch.testing.assert_close(list(measured.values()), list(expected.values()), rtol=1e-6, atol=1e-6)
    for file in (WEIGHTS, "average.safetensors"):
        paths = [each.run_dir.checkpoint(f"step-{STEPS:09}") / file for each in (run, calm)]
        if paths[1].exists():
            weights = [load_file(path) for path in paths]
            learned = [{name: value for name, value in each.items() if "running" not in name} for each in weights]
            torch.testing.assert_close(*learned, rtol=1e-6, atol=1e-6)


def losses(run: LocalRun) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.logged("step") if "loss" in line}


def records(run_dir: RunDir) -> list[dict[str, Any]]:
    return [record.dump() for record in run_dir.generation_records()]


def trains(group: Elastic, size: int) -> None:
    """Wait until the coordinator has heard from all ranks of a group of this size that they take steps."""

    def there() -> bool:
        snapshot = group.snapshot()
        if snapshot is None or snapshot.status.world_size != size:
            return False
        return sum(1 for member in snapshot.members if member.ranks and member.ranks[0].step) == size

    until(there, f"training with {size}")


def check_continued(group: Elastic) -> None:
    """Assert that each step was taken once, and that no generation but the first has read a checkpoint."""
    until(lambda: audit(group.rundir).steps > 10, "steps")
    assert not audit(group.rundir).problems
    assert not group.rundir.checkpoint_names()
    assert all("continues" in record for record in records(group.rundir)[1:])


def lose_a_node(group: Elastic, lost: str) -> None:
    """Lose one of three nodes: the others keep their processes and their steps."""
    trains(group, 3)
    stay = {worker: group.ranks_of(worker) for worker in group.agents if worker != lost}
    group.kill_agent(lost)
    trains(group, 2)
    assert {worker: group.ranks_of(worker) for worker in stay} == stay
    check_continued(group)


def shrink_and_grow(group: Elastic) -> None:
    """Preempt the second of two workers, have it come back, and give it up: the first one keeps its process."""
    trains(group, 2)
    (survivor,) = group.ranks_of("worker-0")
    leaving = group.agents.pop("worker-1")
    leaving.terminate()
    trains(group, 1)
    leaving.wait(30)
    group.start_agent("worker-1")
    trains(group, 2)
    group.set_target(1)
    trains(group, 1)
    assert group.ranks_of("worker-0") == [survivor]
    snapshot = group.snapshot()
    reasons = [view.reason for view in snapshot.generations]
    assert reasons == ["Started", "Preempted", "MemberJoined", "TargetChanged"]
    check_continued(group)


def stop_one(group: Elastic) -> None:
    """Stop the second of two ranks by SIGSTOP: both go on in another generation, with their processes."""
    trains(group, 2)
    ranks = [group.ranks_of(worker) for worker in ("worker-0", "worker-1")]
    os.kill(ranks[1][0], signal.SIGSTOP)
    until(lambda: len(records(group.rundir)) == 2, "another generation")
    trains(group, 2)
    # Its stacks were asked for, which needs a process that runs.
    assert [group.ranks_of(worker) for worker in ("worker-0", "worker-1")] == ranks
    check_continued(group)
