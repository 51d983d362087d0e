"""What the ranks of a run do now: found through /proc, asked without harm, and told with the reason where they cannot
be asked."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.processes.launch import GENERATION, PULSE, REPLICA, RUN_DIR
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.stacks import RankStacks
from tandem_trainer.debugger import DebuggerSlot
from tandem_trainer.inspection import attach, frames, inspect
from tandem_trainer.pulse import PulseView, debugger_slot
from tandem_trainer.stacks import is_stopped
from tests.support.debug_adapter import DebugClient
from tests.support.waiting import until

RANK = """
import sys, threading, time
from tandem_trainer.pulse import Pulse
from tandem_trainer.stacks import answer_with_stacks
pulse = Pulse.open_for_rank()
pulse.beat(step=7, phase="train")
if "deaf" not in sys.argv:
    answer_with_stacks(pulse.stacks)
def waits_here():
    while True:
        time.sleep(0.01)
        print("on", flush=True)
def beside():
    threading.Event().wait()
threading.Thread(target=beside, daemon=True).start()
waits_here()
"""
Start = Callable[..., "subprocess.Popen[str]"]
LINE = RANK.splitlines().index('        print("on", flush=True)') + 1


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that is a rank, and its agent's end of the pulse."""
    started: list[tuple[subprocess.Popen[str], PulseView]] = []

    def begin(rank: int, *words: str, run_dir: Path = tmp_path, generation: int = 1) -> "subprocess.Popen[str]":
        folder = tmp_path / f"pulses-{len(started)}"
        folder.mkdir()
        view = PulseView(folder, 0)
        own = {RUN_DIR: str(run_dir), PULSE: str(folder), GENERATION: str(generation), REPLICA: f"worker-{rank}"}
        script = tmp_path / "rank.py"
        script.write_text(RANK)
        process = subprocess.Popen(
            [sys.executable, str(script), *words],
            env=os.environ | own | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append((process, view))
        assert process.stdout.readline() == "on\n"
        # As the agent does after the first beat.
        view.unlink()
        return process

    yield begin
    for process, view in started:
        process.kill()
        process.communicate()
        view.close()


def only(found: list[RankStacks], rank: int) -> RankStacks:
    (one,) = [one for one in found if one.rank == rank]
    return one


def goes_on(process: "subprocess.Popen[str]") -> bool:
    """Whether it still prints half a second later."""
    assert process.stdout is not None
    return all(process.stdout.readline() == "on\n" for _ in range(50)) and process.poll() is None


def test_all_threads_of_a_rank_are_told_and_it_goes_on_again_and_again(start: Start, tmp_path: Path) -> None:
    process = start(3)
    for _ in range(5):
        one = only(inspect(tmp_path, 3).ranks, 3)
        assert (one.pid, one.replica, one.step, one.phase, one.trouble) == (process.pid, "worker-3", 7, "train", "")
        assert one.threads[0].number == process.pid
        assert "waits_here" in [frame.function for frame in one.threads[0].frames]
        assert "beside" in [frame.function for thread in one.threads[1:] for frame in thread.frames]
        assert goes_on(process)
    answers = [file for file in Path(f"/proc/{process.pid}/fd").iterdir() if ".stacks" in str(file.readlink())]
    assert [file.stat().st_size for file in answers] == [0], "what is read does not stay in memory"


def test_without_a_rank_each_says_where_its_main_thread_is(start: Start, tmp_path: Path) -> None:
    start(0)
    start(1)
    found = inspect(tmp_path)
    assert [one.rank for one in found.ranks] == [0, 1]
    for one in found.ranks:
        asked, *others = one.threads
        assert "waits_here" in [frame.function for frame in asked.frames]
        assert all(not thread.frames for thread in others)


def test_a_rank_that_cannot_answer_is_named_and_not_ended(start: Start, tmp_path: Path) -> None:
    process = start(0, "deaf")
    one = only(inspect(tmp_path, 0).ranks, 0)
    assert one.trouble == "it is just starting, and cannot be asked yet"
    assert goes_on(process)


def test_a_stopped_rank_stays_stopped_and_is_told(start: Start, tmp_path: Path) -> None:
    process = start(0)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(process.pid), "it is stopped")
    assert f"kill -CONT {process.pid}" in only(inspect(tmp_path, 0).ranks, 0).trouble
    assert is_stopped(process.pid)


def test_ranks_of_other_runs_are_left_alone_and_of_two_generations_the_newer_one_counts(
    start: Start, tmp_path: Path
) -> None:
    start(0, run_dir=tmp_path / "elsewhere")
    old, new = start(0, generation=1), start(0, generation=2)
    found = inspect(tmp_path)
    assert [one.pid for one in found.ranks] == [new.pid] != [old.pid]


def test_a_program_that_says_nothing_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(600)"]
    variables = os.environ | {RUN_DIR: str(tmp_path), "RANK": "4", REPLICA: "worker-4"}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        one = only(inspect(tmp_path, 4).ranks, 4)
        assert (one.pid, one.replica, one.threads) == (process.pid, "worker-4", [])
        assert one.trouble.startswith("it has not reported yet")
        assert process.poll() is None
        process.kill()


def test_the_order_of_the_workers_is_told_where_the_generation_has_recorded_it(start: Start, tmp_path: Path) -> None:
    record = GenerationRecord(generation=2, world_size=2, members=["b", "a"], started_at=time.time())
    RunDir(tmp_path).generations.mkdir(parents=True)
    RunDir(tmp_path).record_generation(record)
    start(0, generation=2)
    assert inspect(tmp_path).members == ["b", "a"]


def test_a_run_without_processes_has_no_ranks(tmp_path: Path) -> None:
    assert inspect(tmp_path).ranks == []


def test_frames_stand_as_python_prints_them() -> None:
    text = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "a b.py", line 3 in inner\n'
        '  File "<string>", line ??? in outer\n'
        "  ...\n"
    )
    (outer, inner) = frames(text)
    assert (outer.function, outer.line, inner.file, inner.line, inner.function) == ("outer", 0, "a b.py", 3, "inner")


def test_a_debugger_stops_a_rank_in_code_that_already_runs_and_it_goes_on_when_it_leaves(
    start: Start, tmp_path: Path
) -> None:
    process = start(3)
    assert slot(process).state == "none", "nothing listens before somebody asks"
    found = attach(tmp_path, 3)
    assert (found.pid, found.replica, found.trouble, found.folder) == (process.pid, "worker-3", "", str(Path.cwd()))
    assert {at.ip for at in listening(process.pid)} == {"127.0.0.1"}
    assert attach(tmp_path, 3).port == found.port is not None
    assert prints(process)
    for leaves in (True, False):
        with DebugClient(found.port) as debugger:
            debugger.attach(str(tmp_path / "rank.py"), LINE)
            frames = debugger.stopped()
            assert [(frame["name"], frame["line"]) for frame in frames] == [("waits_here", LINE), ("<module>", 16)]
            assert debugger.evaluate("pulse.rank", frames[1]) == "3"
            until(lambda: slot(process).state == "attached", "the agent is told")
            assert not prints(process)
            if leaves:
                debugger.request("disconnect", terminateDebuggee=False)
        until(lambda: slot(process).state == "listens", "the agent is told that it left")
        assert prints(process)


def test_a_rank_without_debugpy_says_so_and_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "debugpy.py").write_text("raise ModuleNotFoundError('debugpy')")
    process = start(0)
    for _ in range(2):
        found = attach(tmp_path, 0)
        assert found.port is None
        assert found.trouble.startswith("debugpy is not installed there")
    assert goes_on(process)


def test_a_rank_that_cannot_be_asked_for_a_debugger_is_told_and_opens_none_later(start: Start, tmp_path: Path) -> None:
    process = start(0)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(process.pid), "it is stopped")
    assert f"kill -CONT {process.pid}" in attach(tmp_path, 0).trouble
    assert "did not answer" in str(slot(process).request(0.1))
    assert slot(process).state == "none"
    assert attach(tmp_path, 9) is None


def prints(process: "subprocess.Popen[str]") -> bool:
    """Whether it prints something new within half a second."""
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while os.read(descriptor, 65536):
            pass
    os.set_blocking(descriptor, True)
    return bool(select.select([descriptor], [], [], 0.5)[0])


def slot(process: "subprocess.Popen[str]") -> DebuggerSlot:
    files = {str(file.readlink()): file for file in Path(f"/proc/{process.pid}/fd").iterdir()}
    return debugger_slot(next(file for name, file in files.items() if name.endswith("rank-0 (deleted)")))


def listening(pid: int) -> list[Any]:
    """Where a process and what it has started listen."""
    return [
        one.laddr
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid and (one.pid == pid or of_rank(one.pid, pid))
    ]


def of_rank(pid: int, rank: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).environ().get(PULSE) == psutil.Process(rank).environ()[PULSE]
    return False
