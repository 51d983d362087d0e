"""Groups whose ranks keep their process and their state when the membership changes, and how they are watched."""

import os
import signal
from typing import Any

from tandem.rundir.layout import RunDir
from tandem_trainer.sample_audit import audit
from tests.support.elastic import Elastic
from tests.support.local_run import LocalRun
from tests.support.waiting import until


def losses(run: LocalRun) -> dict[int, float]:
    """The loss of each step that has one."""
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
    audited = audit(group.rundir)
    assert not audited.problems
    assert audited.steps > 10
    assert not group.rundir.checkpoint_names()
    assert all("continues" in record for record in records(group.rundir)[1:])


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
    assert snapshot is not None
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
