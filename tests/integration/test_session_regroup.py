"""Sessions that survive: a member is lost at any point of a step of a user's own loop, and the others go on in it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tandem_trainer.sample_audit import audit
from tests.support.elastic import Elastic
from tests.support.local_run import LocalRun
from tests.support.survivors import (
    check_played,
    check_same_end,
    check_steps,
    lose_a_node,
    records,
    shrink_and_grow,
    start_regrouping,
    stop_one,
    write_slopes,
)

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.full("core", "coordinator", "trainer")
FAULTS = """
    import os
    import sys
    from pathlib import Path

    import torch
    from faults_of_steps import Faults, Lines
    from torch import nn
    from tandem_trainer import elastic_run
    from tandem_trainer.checkpoint.saving import Saver
    from tandem_trainer.process_group import Group
    from tandem_trainer.session import Session

    FOLDER = Path(sys.argv[1])
    faults = Faults(sys.argv[1], sys.argv[2:])
    faults.around(Group, "vote")
    faults.around(Saver, "save")
    faults.around(elastic_run.ElasticRun, "begin")
    faults.around(elastic_run, "record_start")


    class Net(nn.Module):
        def __init__(self, norm=None):
            super().__init__()
            self.frozen = nn.Linear(8, 16).requires_grad_(False)
            self.body = nn.Sequential(norm or nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU())
            self.head = nn.Linear(16, 1)

        def forward(self, points):
            return self.head(self.body(self.frozen(points))).squeeze(1)
"""
LOOP = """
    with Session() as session:
        model = session.distribute(Net())
        for name, parameter in model.named_parameters():
            if name.endswith(("2.weight", "head.weight")):
                point = "backward-" + name.rpartition(".")[0].rpartition(".")[2]
                parameter.register_hook(lambda gradient, point=point: faults.at(point))
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": learning[:2], "weight_decay": 0.0}, {"params": learning[2:], "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-3], total_steps=160)
        average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: old + (new - old) * 0.1)
        seen = {"samples": 0, "losses": torch.zeros(())}
        session.keep(model, optimizer, average=average, schedule=schedule, seen=seen)
        for batch in session.batches(Lines(faults), 25, epochs=10):
            faults.step = batch.step
            seen["samples"] += batch.size
            faults.at("forward")
            losses = (model(batch.data["points"]) - batch.data["slope"]).square()
            faults.at("forward-done")
            batch.mean(losses).backward()
            nn.utils.clip_grad_norm_(learning, 1.0)
            faults.at("update")
            optimizer.step()
            faults.at("update-done")
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model)
            faults.at("end")
        assert seen["samples"] == 4000, seen
        assert schedule.last_epoch == 160, schedule.last_epoch
        assert average.n_averaged == 160, average.n_averaged
        faults.at("after")
"""


def start(folder: Path, faults: list[str], loop: str = LOOP, **spec: Any) -> LocalRun:
    """Train the loop of these tests."""
    trainer = {"command": ["python", str(folder / "slopes.py"), str(folder), *faults]}
    return start_regrouping(folder, dedent(FAULTS) + dedent(loop), trainer, **spec)


@contextmanager
def disturbed(path: Path, faults: list[str], loop: str = LOOP, **spec: Any) -> Iterator[LocalRun]:
    """The loop with faults, from beginning to end."""
    with start(path / "disturbed", faults, loop, **spec) as run:
        assert run.ends() == 0, run.output
        yield run
    check_played(path / "disturbed", faults)


@contextmanager
def both(path: Path, faults: list[str], loop: str, **spec: Any) -> Iterator[tuple[LocalRun, LocalRun]]:
    """A loop with faults, and undisturbed."""
    with disturbed(path, faults, loop, **spec) as run, start(path / "calm", [], loop) as undisturbed:
        assert undisturbed.ends() == 0, undisturbed.output
        yield run, undisturbed


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    """The loop, undisturbed."""
    with start(tmp_path_factory.mktemp("calm"), []) as run:
        assert run.ends() == 0, run.output
        yield run


def test_killed_at_any_point_of_a_step_the_loop_of_the_other_rank_takes_it_again(
    tmp_path: Path, calm: LocalRun
) -> None:
    points = ["read", "forward", "forward-done", "backward-head", "backward-2", "update", "update-done", "end"]
    points += ["vote", "vote-done"]
    faults = [f"{number % 2}:{point}:{3 + 4 * number}" for number, point in enumerate(points)]
    # In the second step DistributedDataParallel agrees on its buckets.
    faults = ["0:forward:1", *faults, "1:save:50", "0:save-done:100"]
    with disturbed(tmp_path, faults) as run:
        assert run.leavings() == {}
    check_same_end(run, calm)
    continued = [record for record in records(run.run_dir) if "continues" in record]
    assert len(continued) == len(faults), json.dumps(records(run.run_dir), indent=1)


@pytest.mark.parametrize(
    "point",
    ["record_start", *(pytest.param(point, marks=FULL) for point in ("begin", "record_start-done", "begin-done"))],
)
def test_killed_while_another_one_regroups_the_last_one_goes_on(tmp_path: Path, point: str) -> None:
    # The first two start a generation without the third, and one of them dies in it.
    faults = ["2:forward:40", f"1:{point}:40"]
    workers = {"replicas": 3, "minReplicas": 1}
    # Statistics of a batch depend on how it is divided.
    plain = LOOP.replace("Net()", "Net(nn.Identity())")
    with both(tmp_path, faults, plain, workers=workers) as (run, undisturbed):
        check_same_end(run, undisturbed)
    assert all("continues" in record for record in records(run.run_dir)[1:])


def test_killed_in_the_last_save_and_after_the_loop_a_run_is_complete_all_the_same(
    tmp_path: Path, calm: LocalRun
) -> None:
    with disturbed(tmp_path, ["1:save:159", "0:after:159"]) as run:
        check_same_end(run, calm)


DIVERGES = LOOP.replace(
    "batch.mean(losses)",
    "nan = batch.step == 70 and os.environ['TANDEM_GENERATION'] in '12'\n"
    "            batch.mean(losses * (torch.nan if nan else 1))",
)


@FULL
def test_training_that_goes_back_does_so_with_processes_that_outlive_their_group(tmp_path: Path) -> None:
    loop = DIVERGES[: DIVERGES.index("        assert seen")]
    with start(tmp_path / "disturbed", ["1:forward:40", "0:update:90"], loop) as run:
        assert run.ends() == 0, run.output
    assert len(run.run_dir.rewind_records()) == 1
    assert not audit(run.run_dir).problems
    taken = [record.get("continues", {}).get("step") for record in records(run.run_dir)]
    assert taken[0] is None
    assert taken[1] is not None, "a kill"
    assert taken[2] is None, "a rewind"
    assert taken[3] is not None, "a kill"


COMPILED = LOOP.replace(
    "model = session.distribute(Net())",
    "counts = []\n"
    "        count = lambda graph, inputs: counts.append(1) or graph.forward\n"
    "        model = torch.compile(session.distribute(Net()), backend=count)",
).replace(
    'faults.at("end")',
    "if batch.step in (50, 159):\n"
    "                (FOLDER / f'compiled-{os.getpid()}-{batch.step}').write_text(str(len(counts)))",
)


@FULL
def test_who_goes_on_compiles_nothing_again(tmp_path: Path) -> None:
    loop = COMPILED.replace("AveragedModel(model,", "AveragedModel(model._orig_mod.module,").replace(
        "update_parameters(model)", "update_parameters(model._orig_mod.module)"
    )
    with both(tmp_path, ["1:forward:60"], loop) as (run, undisturbed):
        check_same_end(run, undisturbed)
    assert all("continues" in record for record in records(run.run_dir)[1:])
    (lived,) = {path.name.split("-")[1] for path in (tmp_path / "disturbed").glob("compiled-*-50")} & {
        path.name.split("-")[1] for path in (tmp_path / "disturbed").glob("compiled-*-159")
    }
    compiled = [int((tmp_path / "disturbed" / f"compiled-{lived}-{step}").read_text()) for step in (50, 159)]
    assert compiled[0] > 0
    assert compiled[0] == compiled[1]


WITH_RANKS = LOOP.replace("learning = [", "assert session.world_size in (1, 2)\n        learning = [")
WITH_ONE_RANK = LOOP.replace(
    "model = session", "os.environ['RANK'] == '0' and print(session.world_size)\n        model = session"
)
ACCUMULATES = """
    with Session() as session:
        model = session.distribute(Net())
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
        session.keep(model, optimizer)
        for batch in session.batches(Lines(faults), 25, epochs=10):
            faults.step = batch.step
            batch.mean((model(batch.data["points"]) - batch.data["slope"]).square()).backward()
            faults.at("update")
            if batch.step % 2:
                optimizer.step()
                optimizer.zero_grad()
"""
REDUCES = LOOP.replace(
    "optimizer.step()",
    "torch.distributed.is_initialized() and torch.distributed.barrier()\n            optimizer.step()",
)
RANK_OF_TORCH = LOOP.replace("model = session", "torch.distributed.get_rank()\n        model = session")
COUNTS = {
    "ranks": (WITH_RANKS, "the script asks for its rank, or the number of ranks, before its loop"),
    "one rank": (WITH_ONE_RANK, "the script asks for its rank, or the number of ranks, before its loop"),
    "accumulation": (ACCUMULATES, "not every optimizer takes a step with each batch"),
    "collectives": (REDUCES, "the loop has collectives of its own"),
}


@pytest.mark.parametrize(
    "name", ["collectives", *(pytest.param(name, marks=FULL) for name in COUNTS if name != "collectives")]
)
def test_a_loop_that_cannot_be_taken_up_restarts_and_says_why(tmp_path: Path, name: str, calm: LocalRun) -> None:
    loop, reason = COUNTS[name]
    if name == "accumulation":
        with both(tmp_path, ["1:update:40"], loop) as (run, undisturbed):
            assert run.leavings() == {}
    else:
        # What they add to the loop changes no number.
        undisturbed = calm
        with disturbed(tmp_path, ["1:update:40"], loop) as run:
            assert run.leavings() == {}
    assert f"this session restarts when its group changes: {reason}" in run.output
    assert not any("continues" in record for record in records(run.run_dir))
    check_same_end(run, undisturbed)


@FULL
def test_a_script_that_cannot_run_alone_up_to_its_loop_restarts_with_its_group(tmp_path: Path) -> None:
    with start(tmp_path / "disturbed", ["1:update:40", "0:update:80"], RANK_OF_TORCH) as run:
        assert run.ends() == 0, run.output
    assert "this session restarts when its group changes: the script failed when it ran alone" in run.output
    check_steps(run)


FAILS_ONCE = """
    if os.environ.get("TANDEM_STANDBY") and not (FOLDER / "failed").exists():
        (FOLDER / "failed").touch()
        raise RuntimeError("failed before its loop")
"""


def test_a_script_that_has_failed_once_alone_begins_again_with_the_others(tmp_path: Path) -> None:
    """The others stand in their loops, so the group is mixed."""
    with start(tmp_path / "disturbed", ["1:update:40", "0:update:80"], FAILS_ONCE + LOOP) as run:
        assert run.ends() == 0, run.output
    assert (tmp_path / "disturbed" / "failed").exists()
    assert len(records(run.run_dir)) == 3, "each group that is not mixed begins"
    check_steps(run)


LEFT = LOOP.replace(
    'faults.at("end")',
    'faults.at("end")\n            if batch.step == 99:\n                session.stop("enough")',
)


def test_a_loop_that_is_left_early_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    loop = LEFT[: LEFT.index("        assert seen")]
    with start(tmp_path / "disturbed", ["1:forward:97", "0:backward-2:99"], loop) as run:
        assert run.ends() == 0, run.output
    done = run.run_dir.done() or {}
    assert "enough" in json.dumps(done), done
    check_steps(run, len({line["step"] for line in run.logged("step")}))
    assert all("continues" in record for record in records(run.run_dir)[1:])


ENDLESS = """
    with Session() as session:
        model = session.distribute(Net())
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
        session.keep(model, optimizer)
        for batch in session.batches(Lines(faults), 25, epochs=100_000, loader_workers=WORKERS):
            for part in batch.parts(8):
                part.mean((model(part.data["points"]) - part.data["slope"]).square()).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def endless(path: Path, replicas: int, loader_workers: int = 0, **elasticity: Any) -> Elastic:
    """Train a loop for long, without a checkpoint."""
    write_slopes(path, dedent(FAULTS) + dedent(ENDLESS).replace("WORKERS", str(loader_workers)))
    spec = {
        "trainer": {"command": ["python", str(path / "slopes.py"), str(path)]},
        "checkpoint": {"everySteps": 10**9},
        "elasticity": {"onMembershipChange": "Regroup", **elasticity},
    }
    workers = [f"worker-{number}" for number in range(replicas)]
    return Elastic(path, replicas=replicas, **spec).start(*workers)


@pytest.mark.parametrize("loader_workers", [pytest.param(0, marks=FULL), 1])
def test_a_group_that_shrinks_and_grows_keeps_the_loops_of_who_stays(tmp_path: Path, loader_workers: int) -> None:
    with endless(tmp_path, 2, loader_workers, lostAfterSeconds=60.0) as group:
        shrink_and_grow(group)


@pytest.mark.parametrize("lost", ["worker-0", pytest.param("worker-2", marks=FULL)])
def test_a_node_is_lost_and_the_loops_of_the_others_go_on(tmp_path: Path, lost: str) -> None:
    with endless(tmp_path, 3) as group:
        lose_a_node(group, lost)


def test_a_loop_that_was_stopped_goes_on_with_the_other_one(tmp_path: Path) -> None:
    with endless(tmp_path, 2, hangSeconds=3.0) as group:
        stop_one(group)
