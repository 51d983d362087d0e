"""A group that grows and shrinks saves first, so that no step is made twice."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import Elastic
from tests.support.manifests import images
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(240)
TRAINER = images({"model": "baby-cnn", "data": {"name": "digits"}, "epochs": 100_000, "globalBatchSize": 64})


def steps(group: Elastic) -> list[tuple[int, int]]:
    """Generation and number of every step that was made."""
    found = []
    for path in sorted(group.rundir.log.glob("train-g*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found += [(int(path.stem.removeprefix("train-g")), r["step"]) for r in records if r["kind"] == "step"]
    return found


def trains(group: Elastic, size: int) -> None:
    """Wait until a group of that size has made some steps."""

    def there() -> bool:
        snapshot = group.snapshot()
        if snapshot is None or snapshot.status.world_size != size:
            return False
        return sum(1 for generation, _ in steps(group) if generation == snapshot.status.generation) > 5

    until(there, f"training with {size}")


def test_a_newcomer_and_a_smaller_target_cost_no_step(tmp_path: Path) -> None:
    # Nobody is lost here, however long a busy machine keeps an agent from saying that it lives.
    elasticity = {"lostAfterSeconds": 60.0}
    spec: dict[str, Any] = {"trainer": TRAINER, "checkpoint": {"everySteps": 10**9}, "elasticity": elasticity}
    with Elastic(tmp_path, replicas=2, **spec).start("worker-0") as group:
        trains(group, 1)
        group.start_agent("worker-1")
        trains(group, 2)
        group.set_target(1)
        trains(group, 1)
        snapshot = group.snapshot()
        assert [view.reason for view in snapshot.generations] == ["Started", "MemberJoined", "TargetChanged"]
        counted = Counter(step for _, step in steps(group))
        assert max(counted.values()) == 1, "no step was made twice"
        assert set(counted) == set(range(1, max(counted) + 1)), "no step is missing"
        assert not any(event.text.startswith("failure") for event in snapshot.events)
        assert not any("did not save within" in view.detail for view in snapshot.generations), "nobody ran into a limit"
