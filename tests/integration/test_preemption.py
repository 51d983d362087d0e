"""SIGTERM to some members: the group saves, those leave, the rest go on smaller, and nothing is computed twice."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tests.support.elastic import Elastic
from tests.support.manifests import images
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.timeout(240)
TRAINER = images({"model": "baby-cnn", "data": {"name": "digits"}, "epochs": 100_000, "globalBatchSize": 64})
LEAVING = [
    pytest.param(["worker-2"], marks=pytest.mark.full("core", "coordinator", "trainer")),
    pytest.param(["worker-0"], marks=pytest.mark.full("core", "coordinator", "trainer")),
    ["worker-0", "worker-2"],
]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Elastic]:
    """Three members, whose next checkpoint would be due in a thousand years."""
    # Nobody is lost here, however long a busy machine keeps an agent from saying that it lives.
    elasticity = {"lostAfterSeconds": 60.0}
    spec: dict[str, Any] = {"trainer": TRAINER, "checkpoint": {"everySteps": 10**9}, "elasticity": elasticity}
    with Elastic(tmp_path, replicas=3, **spec).start("worker-0", "worker-1", "worker-2") as elastic:
        trains(elastic, 3)
        yield elastic


def steps(group: Elastic) -> list[tuple[int, int, float]]:
    """Generation, step and time of every step, in order."""
    found = []
    for path in sorted(group.rundir.log.glob("train-g*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                found.append((int(path.stem.removeprefix("train-g")), record["step"], record["time"]))
    return found


def trains(group: Elastic, size: int) -> None:
    """Wait until a group of that size makes steps."""
    since = time.time()

    def there() -> bool:
        snapshot = group.snapshot()
        if snapshot is None or snapshot.status.world_size != size:
            return False
        made = steps(group)
        return bool(made) and made[-1][0] == snapshot.status.generation and made[-1][2] > since

    until(there, f"training with {size}")


@pytest.mark.parametrize("leaving", LEAVING, ids=" ".join)
def test_the_group_saves_those_leave_and_the_rest_go_on_without_computing_anything_twice(
    group: Elastic, leaving: list[str]
) -> None:
    for name in leaving:
        group.agents[name].terminate()
    for name in leaving:
        assert group.agents.pop(name).wait(SECONDS) == ExitCode.PREEMPTED
        assert "Traceback" not in group.output(name)
    trains(group, 3 - len(leaving))
    # The coordinator hears of the first step with the next heartbeat.
    snapshot = until(lambda: (s := group.snapshot()) and s.status.phase == "Running" and s, "the phase Running")
    assert snapshot.generations[-1].reason == "Preempted"
    assert all(name in snapshot.generations[-1].detail for name in leaving)
    counted = Counter(step for _, step, _ in steps(group))
    assert set(counted) == set(range(1, max(counted) + 1)), "no step is missing"
    assert max(counted.values()) == 1, "no step was made twice"
    records = group.rundir.generation_records()
    assert records[1].resumed_from.step == max(step for generation, step, _ in steps(group) if generation == 1)
    assert not any(event.text.startswith("failure") for event in snapshot.events)


SLOW_LOOK = """
import subprocess
import time

look = subprocess.Popen._internal_poll

def slow_look(self, *arguments, **named):
    if not self._waitpid_lock.acquire(False):
        return None
    time.sleep(0.3)
    self._waitpid_lock.release()
    return look(self, *arguments, **named)

subprocess.Popen._internal_poll = slow_look
"""
"""What Popen.poll is like where the processor is taken away between the taking of its lock and the `try` after it."""


def test_all_leave_though_the_signal_comes_while_they_look_at_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_LOOK)
    with Elastic(tmp_path, trainer=TRAINER, checkpoint={"everySteps": 10**9}) as elastic:
        elastic.extra["PYTHONPATH"] = str(tmp_path)
        elastic.start("worker-0", "worker-1")
        trains(elastic, 2)
        for agent in elastic.agents.values():
            agent.terminate()
        for name, agent in elastic.agents.items():
            assert agent.wait(SECONDS) == ExitCode.PREEMPTED
            assert "Traceback" not in elastic.output(name)
            assert "did not exit after" not in elastic.output(name), "its rank has ended, and is seen to have"
        assert elastic.rundir.committed(), "the group has saved"


def test_who_waits_for_others_leaves_when_asked(tmp_path: Path) -> None:
    with Elastic(tmp_path, workers={"replicas": 2, "minReplicas": 2}).start("worker-0") as elastic:
        until(lambda: (seen := elastic.snapshot()) is not None and seen.members, "that it has arrived")
        agent = elastic.agents.pop("worker-0")
        agent.terminate()
        assert agent.wait(SECONDS) == ExitCode.PREEMPTED
        assert "Traceback" not in elastic.output("worker-0")
