"""The pre-flight of real agents: processes that compute and exchange, and members that are wrong or slow."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tandem.processes.exitcode import ExitCode
from tests.support.elastic import Elastic
from tests.support.waiting import SECONDS, until

THREE = ("worker-0", "worker-1", "worker-2")

SITE = """
import sys
if "tandem_trainer.agent.preflight" in sys.orig_argv:
    import torch
    whole = torch.matmul
    def broken(*given, out):
        whole(*given, out=out)
        {damage}
        return out
    torch.matmul = broken
"""


def with_preflight(path: Path, replicas: int, **more: object) -> Elastic:
    return Elastic(path, replicas=replicas, elasticity={"preflight": True}, **more)  # type: ignore[arg-type]


def start_damaged(group: Elastic, replica: str, damage: str) -> None:
    """Start an agent in whose pre-flight alone something happens to each matrix product, as on a device that is bad."""
    site = group.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(damage=damage))
    group.extra["PYTHONPATH"] = str(site)
    group.start_agent(replica)
    del group.extra["PYTHONPATH"]


def preflights(group: Elastic, replica: str) -> list[psutil.Process]:
    """The processes of the pre-flight of one agent."""
    children = psutil.Process(group.agents[replica].pid).children()
    return [child for child in children if "tandem_trainer.agent.preflight" in child.cmdline()]


def has_begun(process: psutil.Process) -> bool:
    return any("libtorch_cpu" in mapped.path for mapped in process.memory_maps())


def said(group: Elastic) -> list[str]:
    snapshot = group.snapshot()
    return [event.text for event in snapshot.events]


@pytest.mark.full("core", "coordinator", "trainer")
def test_a_group_is_tried_out_before_its_ranks_start_and_not_again_when_a_member_goes(tmp_path: Path) -> None:
    with with_preflight(tmp_path, 2).start("worker-0", "worker-1") as group:
        group.step_after(0.0, world=2)
        assert "sum=right" in group.output("worker-0")
        assert "reached=1" in group.output("worker-1")
        assert sum("the pre-flight passed" in text for text in said(group)) == 1
        killed = group.kill_agent("worker-1")
        group.step_after(killed, world=1)
        assert group.output("worker-0").count("event=preflight ") == 1


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("out[7, 7] += 1", "it computed a matrix product with 1 of 512 rows wrong (rank 2)"),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)",
            "rank 2, which ended by SIGKILL during its matrix product",
            marks=pytest.mark.full("core", "coordinator", "trainer"),
        ),
        pytest.param(
            "import time; time.sleep(0.1)",
            "as long as the median of",
            marks=pytest.mark.full("core", "coordinator", "trainer"),
        ),
    ],
    ids=["wrong", "killed", "slow"],
)
def test_the_others_go_on_at_once_without_a_member_whose_device_is_bad(tmp_path: Path, damage: str, why: str) -> None:
    with with_preflight(tmp_path, 3).start("worker-0", "worker-1") as group:
        start_damaged(group, "worker-2", damage)
        assert group.agents["worker-2"].wait(SECONDS) == ExitCode.LEFT_OUT
        group.step_after(0.0, world=2)
        snapshot = group.snapshot()
        first, second = snapshot.generations
        assert (second.generation, second.reason) == (first.generation + 1, "PreflightFailed")
        assert second.members == ["worker-0", "worker-1"]
        assert "worker-2 (node node-of-worker-2) is left out after the pre-flight" in second.detail
        assert why in second.detail
        assert {step.generation for step in group.steps()} == {second.generation}, "nobody has trained with it"


@pytest.mark.full("coordinator", "trainer")
def test_an_agent_that_has_to_go_ends_its_preflight_at_once_and_the_others_begin_another(tmp_path: Path) -> None:
    with with_preflight(tmp_path, 2).start("worker-0", "worker-1") as group:
        (process,) = until(lambda: preflights(group, "worker-1"), "the pre-flight")
        os.kill(process.pid, signal.SIGSTOP)
        agent = group.agents.pop("worker-1")
        os.kill(agent.pid, signal.SIGTERM)
        assert agent.wait(SECONDS) == ExitCode.PREEMPTED
        assert not psutil.pid_exists(process.pid)
        assert group.step_after(0.0, world=1).generation > 1


@pytest.mark.full("coordinator", "trainer")
@pytest.mark.full("core", "coordinator", "trainer")
def test_no_preflight_outlives_an_agent_that_is_killed(tmp_path: Path) -> None:
    with with_preflight(tmp_path, 2).start("worker-0", "worker-1") as group:
        (process,) = until(lambda: preflights(group, "worker-1"), "the pre-flight")
        until(lambda: has_begun(process), "the import of torch")
        os.kill(process.pid, signal.SIGSTOP)
        began = time.time()
        agent = group.agents.pop("worker-1")
        agent.kill()
        agent.wait()
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "its end")
        group.step_after(began, world=1)


@pytest.mark.full("coordinator", "trainer")
@pytest.mark.full("core", "coordinator", "trainer")
def test_replicas_of_several_ranks_try_out_each_of_them(tmp_path: Path) -> None:
    workers = {"replicas": 2, "processesPerReplica": 2}
    with with_preflight(tmp_path, 2, workers=workers).start("worker-0", "worker-1") as group:
        (seen,) = until(lambda: [found] if len(found := preflights(group, "worker-0")) == 2 else [], "two processes")
        assert len(seen) == 2
        group.step_after(0.0, world=4)
        assert "sum=right" in group.output("worker-1")
