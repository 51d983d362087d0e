"""A rank that hangs: noticed within the hang time, where it hung is written down, and training goes on."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tandem.wire.status import GenerationView
from tests.support.elastic import HEARTBEAT_SECONDS, SCRIPT, Elastic
from tests.support.waiting import until

HANG_SECONDS = 3.0
pytestmark = pytest.mark.timeout(240)


def hangs_and_goes_on(group: Elastic) -> tuple[int, int, GenerationView]:
    """Stop a rank and see the group go on; the rank's process, its generation, and what the coordinator says of it."""
    last = until(lambda: next((s for s in group.steps() if s.step == 100), None), "100 steps")
    (stuck,) = group.ranks_of("worker-1")
    stopped = time.time()
    os.kill(stuck, signal.SIGSTOP)
    group.step_after(stopped + 0.5, world=2, generation=last.generation)
    snapshot = group.snapshot()
    view = snapshot.generations[-1]
    assert view.reason == "Hung"
    # By the watch's own clock, which goes on with each report, and by two heartbeats at most.
    still = re.search(r"for (\d+) s; ", view.detail)
    assert still is not None, view.detail
    assert HANG_SECONDS <= int(still[1]) <= HANG_SECONDS + 2 * HEARTBEAT_SECONDS
    return stuck, last.generation, view


def lines_of(script: Path, first: str, last: str) -> range:
    """Numbers of a script's lines from the one that holds some words to the one that holds others."""
    lines = script.read_text().splitlines()
    numbers = [next(n for n, line in enumerate(lines, start=1) if words in line) for words in (first, last)]
    return range(numbers[0], numbers[1] + 1)


def line_in(script: Path, stacks: str) -> int:
    """The line that a rank's main thread is in, by its stacks."""
    main = stacks.partition(", stack (most recent call first):\n")[2].partition("\n\n")[0]
    found = re.search(rf'{script.name}", line (\d+) in <module>', main)
    assert found is not None, stacks
    return int(found[1])


def test_a_stopped_rank_is_noticed_its_stacks_are_saved_and_the_group_goes_on(tmp_path: Path) -> None:
    with Elastic(tmp_path, elasticity={"hangSeconds": HANG_SECONDS}).start("worker-0", "worker-1") as group:
        stuck, generation, view = hangs_and_goes_on(group)
        assert "rank 1" in view.detail
        assert "stopped" in view.detail
        stacks = {path.name: path.read_text() for path in group.rundir.stacks(generation).iterdir()}
        assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
        assert "T (stopped)" in stacks["rank-1.txt"], "what the kernel says of the culprit"
        for text in stacks.values():
            # To answer, the stopped one is continued, and both may go on to another line of the same loop.
            assert line_in(SCRIPT, text) in lines_of(SCRIPT, "while step < total", "time.sleep")
            assert "after step" in text
        until(lambda: not Path(f"/proc/{stuck}").exists(), "the end of the stopped rank")


@pytest.mark.full("coordinator", "trainer")
def test_a_rank_in_an_endless_loop_is_found_by_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "loops.py"
    script.write_text(
        SCRIPT.read_text().replace(
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
        assert group.step_after(time.time(), world=2, generation=1).step > 55
        stacks = [(group.rundir.stacks(1) / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
        assert line_in(script, stacks[0]) in lines_of(script, "dist.all_reduce", "dist.all_reduce")
        assert re.search(r"first\):\n  File .* in all_reduce\n", stacks[0]), "where the other one waits for it"
        assert line_in(script, stacks[1]) in lines_of(script, "while True", "the mistake")


def test_a_script_whose_ranks_wait_for_ever_is_warned_of_with_its_stacks_and_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\nprint('begins', flush=True)\ntime.sleep(1000)  # the mistake\n")
    trainer = {"command": [str(script)]}
    seconds = HANG_SECONDS / 2
    elasticity = {"hangSeconds": seconds}
    with Elastic(tmp_path, trainer=trainer, elasticity=elasticity).start("worker-0", "worker-1") as group:
        files = [group.rundir.stacks(1) / f"rank-{rank}.txt" for rank in (0, 1)]
        until(lambda: all(file.exists() and file.stat().st_size for file in files), "the stacks")
        for file in files:
            assert line_in(script, file.read_text()) == 3
        snapshot = until(group.snapshot, "the status")
        (told,) = [event.text for event in snapshot.events if event.kind == "warning"]
        assert told.startswith("no rank has used a processor or a GPU for ")
        written = [file.stat().st_mtime_ns for file in files]
        time.sleep(2 * seconds)
        snapshot = until(group.snapshot, "the status")
        assert snapshot.status.generation == 1
        assert [file.stat().st_mtime_ns for file in files] == written


def test_a_stopped_rank_of_a_script_that_knows_nothing_of_tandem_is_noticed_too(tmp_path: Path) -> None:
    elasticity = {"hangSeconds": HANG_SECONDS}
    with Elastic(tmp_path, aware=False, elasticity=elasticity).start("worker-0", "worker-1") as group:
        stuck, generation, view = hangs_and_goes_on(group)
        assert "rank 1 (worker-1) has been stopped" in view.detail
        text = (group.rundir.stacks(generation) / "rank-1.txt").read_text()
        assert "T (stopped)" in text
        assert line_in(SCRIPT, text) in lines_of(SCRIPT, "while step < total", "time.sleep")
        until(lambda: not Path(f"/proc/{stuck}").exists(), "the end of the stopped rank")
