"""What is shown of a run between two starts of its script, and of its script's last words."""

import tracemalloc
from pathlib import Path

from tandem.processes.supervision import Child
from tandem.wire.status import Progress, Snapshot, Status
from tandem_cli.local.run_output import Logs
from tandem_cli.log_lines import MAX_READ_BYTES
from tandem_launcher.local.child import last_lines
from tandem_launcher.local.local_run import describe_wait, with_end

LOG = """
--- 2026-11-23 08:47:20 worker-1, start 1
2026-11-23 08:47:24,835 level=INFO event=joined generation=1 index=1 replicas=2 reason=Started
usage: args.py [-h] [--epochs EPOCHS]
args.py: error: unrecognized arguments: --bogus=3
2026-11-23 08:47:37,662 level=INFO event=rank-ended generation=1 local_rank=0 code=2
E1123 08:47:37.691000 15310 .venv/lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)
"""


def test_the_scripts_own_words_are_shown_and_not_those_of_its_agent(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.txt"
    log.write_text(LOG)
    assert last_lines(log, 1, of_ranks=True) == ["args.py: error: unrecognized arguments: --bogus=3"]
    assert "torch/distributed" in last_lines(log, 1)[0]


JOINED = "2026-11-23 08:47:24,835 level=INFO event=joined generation={} index=1 replicas=2 reason=Started"
ERROR = ["Traceback (most recent call last):", "ValueError: wrong"]


def test_an_error_that_ends_two_generations_is_shown_once(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.txt"
    log.write_text("\n".join(["", "--- now", JOINED.format(1), *ERROR, JOINED.format(2), *ERROR, ""]))
    assert last_lines(log, 15, of_ranks=True) == ERROR
    assert len(last_lines(log, 15)) == 6
    with log.open("a") as file:
        file.write(JOINED.format(3) + "\n")
    assert last_lines(log, 15, of_ranks=True) == [*ERROR, *ERROR], "the newest generation has printed nothing"


def test_of_several_ranks_in_one_log_the_one_that_failed_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.txt"
    lines = [f"[rank {rank}] {line}" for line in ERROR for rank in (2, 3)]
    log.write_text("\n".join(["", "--- now", JOINED.format(1), *lines, ""]))
    assert last_lines(log, 15, of_ranks=True, rank=3) == [f"[rank 3] {line}" for line in ERROR]
    assert last_lines(log, 15, of_ranks=True, rank=4) == last_lines(log, 15, of_ranks=True) == lines


def test_where_the_script_says_nothing_its_agent_does(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.txt"
    log.write_text("\n--- now\n2026-11-23 08:47:37,662 level=INFO event=rank-ended code=2\n")
    assert last_lines(log, 5, of_ranks=True) == ["2026-11-23 08:47:37,662 level=INFO event=rank-ended code=2"]


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.txt"
    log.write_text(f"--- now\n{'x' * 10_000}\n")
    assert last_lines(log, 1) == ["x" * 500 + " …"]


def test_the_time_until_the_next_start_is_shown() -> None:
    status = Status(phase="Restarting", message="rank 0 failed; starts again in 4 s", progress=Progress(step=3))
    snapshot = Snapshot(job="mine", time=0.0, status=status)
    agent = Child(name="worker-0", role="agent", running=True)
    assert describe_wait([agent], snapshot, done=False) == "starts again in 4 s"


def test_a_line_without_an_end_is_never_held_whole(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    log = tmp_path / "log" / "worker-0.txt"
    with log.open("wb") as file:
        for _ in range(64):
            file.write(b"x" * MAX_READ_BYTES)
    logs = Logs(tmp_path, (), "", None)
    tracemalloc.start()
    (first,) = logs.lines()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * MAX_READ_BYTES
    assert first.text.endswith("(this line is longer than 1 MiB; the rest is not shown)")
    with log.open("ab") as file:
        file.write(b"the rest\nthe next\nnot yet")
    assert [line.text for line in logs.lines()] == ["the next"]
    with log.open("ab") as file:
        file.write(b" ended\n")
    assert [line.text for line in logs.lines()] == ["not yet ended"]


def test_while_what_is_left_is_evaluated_the_steps_are_those_of_the_whole_run() -> None:
    end = Progress(step=92, total_steps=92, percent=100.0)
    behind = Progress(step=80, total_steps=92)
    for known in (None, Progress(step=92), behind):
        snapshot = Snapshot(job="mine", time=0.0, status=Status(progress=known))
        assert with_end(snapshot, end).status.progress == end
        assert with_end(snapshot, None) == snapshot
    heard = Snapshot(job="mine", time=0.0, status=Status(progress=end.model_copy(update={"epoch": 4.0})))
    assert with_end(heard, end) == heard
