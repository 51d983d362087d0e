"""A rank that hangs: noticed within the hang time, where it hung is written down, and training goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from tandem.snapshot import GenerationView
from tests.support import SCRIPTS
from tests.support.elastic import Elastic
from tests.support.waiting import until

HANG_SECONDS = 3.0
pytestmark = pytest.mark.timeout(240)


def hangs_and_goes_on(group: Elastic) -> tuple[int, int, GenerationView]:
    """Stop a rank and see the group go on; the rank's process, its generation, and what the coordinator says of it."""
    last = until(lambda: next((s for s in group.steps() if s.step == 100), None), "100 steps")
    (stuck,) = group.ranks_of("worker-1")
    stopped = time.time()
    os.kill(stuck, signal.SIGSTOP)
    first = group.step_after(stopped + 0.5, world=2, generation=last.generation)
    # The coordinator counts from the last step that it heard of, up to two heartbeats before.
    assert HANG_SECONDS - 1.0 <= first.at - stopped < HANG_SECONDS + 8.0
    snapshot = group.snapshot()
    assert snapshot is not None
    view = snapshot.generations[-1]
    assert view.reason == "Hung"
    return stuck, last.generation, view


def test_a_stopped_rank_is_noticed_its_stacks_are_saved_and_the_group_goes_on(tmp_path: Path) -> None:
    with Elastic(tmp_path, elasticity={"hangSeconds": HANG_SECONDS}).start("worker-0", "worker-1") as group:
        stuck, generation, view = hangs_and_goes_on(group)
        assert "rank 1" in view.detail
        assert "stopped" in view.detail
        stacks = {path.name: path.read_text() for path in group.rundir.stacks(generation).iterdir()}
        assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
        assert "T (stopped)" in stacks["rank-1.txt"], "what the kernel says of the culprit"
        for text in stacks.values():
            assert "steps.py" in text, "the line that hangs"
            assert "in all_reduce" in text or "time.sleep" in text or "<module>" in text
            assert "after step" in text
        until(lambda: not Path(f"/proc/{stuck}").exists(), "the end of the stopped rank")


def test_a_rank_in_an_endless_loop_is_found_by_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "loops.py"
    script.write_text(
        (SCRIPTS / "steps.py")
        .read_text()
        .replace(
            "            time.sleep(0.02)\n",
            "            if step == 60 and rank == 1 and generation == '1':\n"
            "                while True:\n"
            "                    pass  # the mistake\n"
            "            time.sleep(0.02)\n",
        )
    )
    trainer = {"command": [str(script)]}
    elasticity = {"hangSeconds": HANG_SECONDS}
    with Elastic(tmp_path, trainer=trainer, elasticity=elasticity).start("worker-0", "worker-1") as group:
        first = group.step_after(time.time(), world=2, generation=1)
        assert first.step > 55
        number = next(n for n, line in enumerate(script.read_text().splitlines(), start=1) if "the mistake" in line)
        text = (group.rundir.stacks(1) / "rank-1.txt").read_text()
        assert f'loops.py", line {number}' in text or f'loops.py", line {number - 1}' in text


def test_a_stopped_rank_of_a_script_that_knows_nothing_of_tandem_is_noticed_too(tmp_path: Path) -> None:
    elasticity = {"hangSeconds": HANG_SECONDS}
    with Elastic(tmp_path, aware=False, elasticity=elasticity).start("worker-0", "worker-1") as group:
        stuck, generation, view = hangs_and_goes_on(group)
        assert "rank 1 (worker-1) has been stopped" in view.detail
        text = (group.rundir.stacks(generation) / "rank-1.txt").read_text()
        assert "T (stopped)" in text
        assert "steps.py" in text
        until(lambda: not Path(f"/proc/{stuck}").exists(), "the end of the stopped rank")
