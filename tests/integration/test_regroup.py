"""Ranks that survive: a member is lost at any point of a step, and the others keep their process and their step."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tandem.processes.exitcode import ExitCode
from tandem.rundir.checkpoint import WEIGHTS
from tandem_trainer.sample_audit import audit
from tests.support import EXAMPLES
from tests.support.elastic import Elastic
from tests.support.local_run import LocalRun
from tests.support.manifests import images, manifest
from tests.support.ranks import sample_ids
from tests.support.survivors import check_continued, losses, records, shrink_and_grow, stop_one, trains
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.timeout(300)
STEPS = 160
TASK = """
    import os
    import signal
    import time
    from dataclasses import dataclass
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import Dataset
    from tandem_trainer.checkpoint.saving import Saver
    from tandem_trainer.process_group import Group
    from tandem_trainer.task import Task


    @dataclass
    class Config:
        folder: str
        faults: list[str]


    class Faults:
        '''Kills this rank at points, each once, after so many steps or more: `RANK:POINT:STEP`.'''

        step = 0

        def __init__(self, config):
            self.config = config

        def at(self, point):
            for fault in self.config.faults:
                rank, where, step = fault.split(":")
                if rank == os.environ["RANK"] and where == point and self.step >= int(step):
                    self.play(fault)

        def play(self, fault):
            try:
                (Path(self.config.folder) / fault.replace(":", "-")).touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

        def around(self, owner, name):
            '''Play faults before and after a method.'''
            original = getattr(owner, name)

            def method(*arguments, **options):
                self.at(name)
                result = original(*arguments, **options)
                self.at(f"{name}-done")
                return result

            setattr(owner, name, method)


    class Lines(Dataset):
        def __init__(self, samples, faults):
            self.samples, self.faults = samples, faults

        def __len__(self):
            return self.samples

        def __getitem__(self, index):
            self.faults.at("read")
            slope = (index % 17) / 17
            return {"points": torch.arange(8.0) * slope + (index % 13) / 130, "slope": torch.tensor(slope)}


    class Slopes(Task[Config]):
        def data(self, split):
            self.faults = Faults(self.config)
            return Lines(400, self.faults)

        def model(self):
            for wait in Path(self.config.folder).glob("wait"):
                wait.rename(wait.with_name("waits"))
                while not wait.with_name("go").exists():
                    time.sleep(0.05)
            return nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
            )

        def optimizer(self, model, settings):
            faults, optimizer = self.faults, super().optimizer(model, settings)

            def count(optimizer, *_):
                faults.at("update")

            def taken(optimizer, *_):
                faults.at("update-done")
                faults.step = round(float(next(iter(optimizer.state.values()))["step"]))

            optimizer.register_step_pre_hook(count)
            optimizer.register_step_post_hook(taken)
            for name, parameter in model.named_parameters():
                if name in ("0.weight", "5.weight"):
                    parameter.register_hook(lambda gradient, name=name: faults.at(f"backward-{name}"))
            faults.around(Group, "vote")
            faults.around(Saver, "save")
            return optimizer

        def loss(self, model, batch):
            self.faults.at("forward")
            losses = (model(batch["points"]).squeeze(1) - batch["slope"]).square()
            self.faults.at("forward-done")
            return losses
"""


def start(folder: Path, faults: list[str], **spec: Any) -> LocalRun:
    """Train the task of these tests."""
    folder.mkdir()
    (folder / "slopes.py").write_text(dedent(TASK))
    trainer = {
        "task": "slopes:Slopes",
        "parameters": {"folder": str(folder), "faults": faults},
        "loop": {"epochs": 10, "globalBatchSize": 25, "emaDecay": 0.9},
    }
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


def test_killed_at_any_point_of_a_step_the_other_rank_takes_it_again_and_none_other(tmp_path: Path) -> None:
    points = ["read", "forward", "forward-done", "backward-5.weight", "backward-0.weight", "update", "update-done"]
    points += ["vote", "vote-done"]
    faults = [f"{number % 2}:{point}:{3 + 4 * number}" for number, point in enumerate(points)]
    faults += ["1:save:50", "0:save-done:100"]
    with start(tmp_path / "disturbed", faults) as run, start(tmp_path / "calm", []) as calm:
        assert calm.ends() == 0, calm.output
        assert run.ends() == 0, run.output
        assert run.leavings() == {}
    left = {fault for fault in faults if not (tmp_path / "disturbed" / fault.replace(":", "-")).exists()}
    assert not left, "faults that were not played"
    audited = audit(run.run_dir)
    assert not audited.problems
    assert not audited.unknown
    assert audited.steps == STEPS
    assert sample_ids(run.run_dir) == sample_ids(calm.run_dir)
    expected, found = losses(calm), losses(run)
    assert list(found) == list(range(1, STEPS + 1)), "no loss is lost with a rank"
    torch.testing.assert_close(list(found.values()), list(expected.values()), rtol=1e-6, atol=1e-6)
    weights = [load_file(each.run_dir.checkpoint(f"step-{STEPS:09}") / WEIGHTS) for each in (run, calm)]
    learned = [{name: value for name, value in each.items() if "running" not in name} for each in weights]
    torch.testing.assert_close(*learned, rtol=1e-6, atol=1e-6)
    continued = [record for record in records(run.run_dir) if "continues" in record]
    assert len(continued) == len(faults), json.dumps(records(run.run_dir), indent=1)


def test_the_example_takes_each_step_once_though_a_rank_is_killed(tmp_path: Path) -> None:
    with LocalRun(tmp_path, manifest=EXAMPLES / "digits-regroup.yaml") as run:
        run.reaches(100)
        rank = run.rank_of("worker-1")
        assert rank is not None
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


def slopes(path: Path, folder: Path, **elasticity: Any) -> Elastic:
    """Train the task of these tests for long, with two workers."""
    folder.mkdir()
    (folder / "slopes.py").write_text(dedent(TASK))
    trainer = {
        "task": "slopes:Slopes",
        "parameters": {"folder": str(folder), "faults": []},
        "loop": {"epochs": 100_000, "globalBatchSize": 25},
    }
    # Cold, so that each rank looks for its code anew.
    whole = spec(warmStart=False, **elasticity) | {"trainer": trainer}
    group = Elastic(path, replicas=2, **whole)
    group.extra["PYTHONPATH"] = str(folder)
    return group.start("worker-0", "worker-1")


def step(group: Elastic, size: int) -> list[int]:
    """The steps that a group of this size reports; 0 while there is none."""
    snapshot = group.snapshot()
    if snapshot is None or snapshot.status.world_size != size:
        return [0]
    return [rank.step for member in snapshot.members for rank in member.ranks]


@pytest.mark.parametrize("killed", ["rank", "agent"])
def test_the_others_train_while_a_joiner_prepares_itself(tmp_path: Path, killed: str) -> None:
    folder = tmp_path / "code"
    with slopes(tmp_path, folder) as group:
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
        assert snapshot is not None
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


def test_ranks_that_fail_while_they_prepare_themselves_fail_as_members_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    with slopes(tmp_path, folder) as group:
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


def test_a_group_that_shrinks_and_grows_keeps_who_stays(tmp_path: Path) -> None:
    with Elastic(tmp_path, replicas=2, **spec(lostAfterSeconds=60.0)).start("worker-0", "worker-1") as group:
        shrink_and_grow(group)


@pytest.mark.parametrize("lost", ["worker-0", "worker-2"])
def test_a_node_is_lost_and_the_others_go_on_from_their_step(tmp_path: Path, lost: str) -> None:
    workers = ("worker-0", "worker-1", "worker-2")
    with Elastic(tmp_path, replicas=3, **spec()).start(*workers) as group:
        trains(group, 3)
        stay = {worker: group.ranks_of(worker) for worker in workers if worker != lost}
        group.kill_agent(lost)
        trains(group, 2)
        assert {worker: group.ranks_of(worker) for worker in stay} == stay
        check_continued(group)


def test_a_rank_that_was_stopped_goes_on_with_the_other_one(tmp_path: Path) -> None:
    with Elastic(tmp_path, replicas=2, **spec(hangSeconds=3.0)).start("worker-0", "worker-1") as group:
        stop_one(group)
