"""Ranks that survive: a member is lost at any point of a step, and the others keep their process and their step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tests.support import EXAMPLES
from tests.support.elastic import Elastic
from tests.support.local_run import LocalRun
from tests.support.manifests import images
from tests.support.survivors import (
    TASK,
    check_continued,
    check_played,
    check_same_end,
    lose_a_node,
    records,
    shrink_and_grow,
    start_regrouping,
    stop_one,
    trains,
    write_slopes,
)
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.full("core", "coordinator", "trainer")
"""What test_session_regroup shows of a loop as well, or what takes minutes of failures."""


def start(folder: Path, faults: list[str]) -> LocalRun:
    """Train the task of these tests."""
    trainer = {
        "task": "slopes:Slopes",
        "parameters": {"folder": str(folder), "faults": faults},
        "loop": {"epochs": 10, "globalBatchSize": 25, "emaDecay": 0.9},
    }
    return start_regrouping(folder, TASK, trainer)


@pytest.mark.gate(
    "tests/integration/test_session_regroup.py"
    "::test_killed_at_any_point_of_a_step_the_loop_of_the_other_rank_takes_it_again",
    "tests/integration/test_regroup.py::test_the_others_train_while_a_joiner_prepares_itself",
)
def test_killed_at_any_point_of_a_step_the_other_rank_takes_it_again_and_none_other(tmp_path: Path) -> None:
    points = ["read", "forward", "forward-done", "backward-5.weight", "backward-0.weight", "update", "update-done"]
    points += ["vote", "vote-done"]
    faults = [f"{number % 2}:{point}:{3 + 4 * number}" for number, point in enumerate(points)]
    faults += ["1:save:50", "0:save-done:100"]
    with start(tmp_path / "disturbed", faults) as run, start(tmp_path / "calm", []) as calm:
        assert calm.ends() == 0, calm.output
        assert run.ends() == 0, run.output
        assert run.leavings() == {}
    check_played(tmp_path / "disturbed", faults)
    check_same_end(run, calm)
    continued = [record for record in records(run.run_dir) if "continues" in record]
    assert len(continued) == len(faults), json.dumps(records(run.run_dir), indent=1)


@pytest.mark.full("core", "coordinator", "trainer", "cli", "examples")
def test_the_example_takes_each_step_once_though_a_rank_is_killed(tmp_path: Path) -> None:
    with LocalRun(tmp_path, manifest=EXAMPLES / "digits-regroup.yaml") as run:
        run.reaches(100)
        rank = run.rank_of("worker-1")
        rank.kill()
        assert run.ends(240) == 0, run.output
        steps = run.final_step()
        assert f"digits-regroup is complete: {steps:,} steps in " in run.output
    assert [record["step"] for record in run.logged("step")] == [*range(1, steps + 1)]
    assert all("continues" in record for record in records(run.run_dir)[1:])


def spec(**elasticity: Any) -> dict[str, Any]:
    """A task that goes on for long, without a checkpoint."""
    config = {"model": "baby-cnn", "data": {"name": "digits"}, "epochs": 100_000, "globalBatchSize": 64}
    return {
        "trainer": images(config),
        "checkpoint": {"everySteps": 10**9},
        "elasticity": {"onMembershipChange": "Regroup", **elasticity},
    }


def slopes(path: Path, folder: Path, warm: bool) -> Elastic:
    """Train the task of these tests for long, with two workers; without a warm start, each rank looks for its code
    anew."""
    write_slopes(folder, TASK)
    trainer = {
        "task": "slopes:Slopes",
        "parameters": {"folder": str(folder), "faults": []},
        "loop": {"epochs": 100_000, "globalBatchSize": 25},
    }
    group = Elastic(path, replicas=2, **spec(warmStart=warm) | {"trainer": trainer})
    group.folder = folder
    group.extra["PYTHONPATH"] = str(folder)
    return group.start("worker-0", "worker-1")


def step(group: Elastic, size: int) -> list[int]:
    """The steps that a group of this size reports; 0 while there is none."""
    snapshot = group.snapshot()
    if snapshot is None or snapshot.status.world_size != size:
        return [0]
    return [rank.step for member in snapshot.members for rank in member.ranks]


@pytest.mark.parametrize("killed", ["rank", pytest.param("agent", marks=FULL)])
def test_the_others_train_while_a_joiner_prepares_itself(tmp_path: Path, killed: str) -> None:
    folder = tmp_path / "code"
    with slopes(tmp_path, folder, warm=True) as group:
        trains(group, 2)
        (survivor,) = group.ranks_of("worker-0")
        (folder / "wait").touch()
        if killed == "rank":
            group.kill_rank("worker-1")
        else:
            group.kill_agent("worker-1")
        until(lambda: len(records(group.rundir)) == 2, "the other rank alone")
        trains(group, 1)
        if killed == "agent":
            group.start_agent("worker-1")
        until((folder / "waits").exists, "a rank that builds its model")
        snapshot = group.snapshot()
        first = max(rank.step for member in snapshot.members for rank in member.ranks)
        until(lambda: max(step(group, 1)) > first + 100, "steps meanwhile")
        (folder / "go").touch()
        trains(group, 2)
        assert group.ranks_of("worker-0") == [survivor]
        snapshot = group.snapshot()
        assert snapshot is not None
        lost = "WorkerFailed" if killed == "rank" else "MemberLost"
        assert [view.reason for view in snapshot.generations] == ["Started", lost, "MemberJoined"]
        check_continued(group)


@FULL
def test_ranks_that_fail_while_they_prepare_themselves_fail_as_members_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    with slopes(tmp_path, folder, warm=False) as group:
        trains(group, 2)
        stays = group.ranks_of("worker-0")
        # From now on nobody who starts can build the model.
        (folder / "slopes.py").write_text("raise OSError('the disk with the code is gone')")
        group.kill_rank("worker-1")
        # It is not tried again for ever: the failures have a culprit, which is left out.
        assert group.agents["worker-1"].wait(SECONDS) == ExitCode.LEFT_OUT
        trains(group, 1)
        assert group.ranks_of("worker-0") == stays
        assert "the disk with the code is gone" in group.output("coordinator")
        check_continued(group)


@FULL
def test_a_group_that_shrinks_and_grows_keeps_who_stays(tmp_path: Path) -> None:
    with Elastic(tmp_path, replicas=2, **spec(lostAfterSeconds=60.0)).start("worker-0", "worker-1") as group:
        shrink_and_grow(group)


@FULL
@pytest.mark.parametrize("lost", ["worker-0", "worker-2"])
def test_a_node_is_lost_and_the_others_go_on_from_their_step(tmp_path: Path, lost: str) -> None:
    workers = ("worker-0", "worker-1", "worker-2")
    with Elastic(tmp_path, replicas=3, **spec()).start(*workers) as group:
        lose_a_node(group, lost)


@FULL
def test_a_rank_that_was_stopped_goes_on_with_the_other_one(tmp_path: Path) -> None:
    with Elastic(tmp_path, replicas=2, **spec(hangSeconds=3.0)).start("worker-0", "worker-1") as group:
        stop_one(group)
