"""`tandem run --pin`: trainers and evaluators have cores of their own, every process and every thread of them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem_launcher.local.guardian import MARK
from tandem_launcher.local.placement import usable_cores
from tests.support.local_run import LocalRun
from tests.support.waiting import until

ROLES = ("coordinator", "worker", "evaluator")
ENDLESS = ("trainer.loop.epochs=5000", "workers.replicas=1", "evaluators.processesPerReplica=2")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    """A run with one worker and two evaluators, that goes on for as long as it is let."""
    with LocalRun(tmp_path, "--pin", *(word for field in ENDLESS for word in ("--set", field)), warm=False) as made:
        yield made


def cores_of(process: psutil.Process) -> set[frozenset[int]]:
    """The cores on which each thread of a process may run."""
    found = set()
    for thread in process.threads():
        with suppress(ProcessLookupError):
            found.add(frozenset(os.sched_getaffinity(thread.id)))
    return found


def cores_by_role(run: LocalRun) -> dict[str, set[frozenset[int]]]:
    """The cores on which the processes of each role may run, with what these have started."""
    found: dict[str, set[frozenset[int]]] = {role: set() for role in ROLES}
    for process in run.processes():
        with suppress(psutil.Error):
            role = process.environ()[MARK].split("/")[1].partition("-")[0]
            found[role] |= cores_of(process)
    return found


@pytest.mark.full("core", "cli")
@pytest.mark.skipif(len(usable_cores()) < 2, reason="a machine with one core has none to set aside")
def test_trainers_and_evaluators_never_share_a_core(run: LocalRun) -> None:
    run.reaches(1)
    until(
        lambda: len([*run.run_dir.evaluations.glob("step-*/*.json")]) > 0, "an evaluation", otherwise=lambda: run.output
    )
    assert run.rank_of("worker-0") is not None
    found = cores_by_role(run)
    (workers,), (evaluators,) = found["worker"], found["evaluator"]
    assert workers
    assert evaluators
    assert not workers & evaluators
    assert workers | evaluators <= set(usable_cores())
    others = found["coordinator"] | cores_of(psutil.Process(run.process.pid))
    assert others == {evaluators}, "nor does anything else take a core of the trainers"
