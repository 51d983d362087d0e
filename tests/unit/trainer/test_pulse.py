"""The pulse between a rank and its agent, with real processes at its two ends where that matters."""

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.wire.protocol import Trouble
from tandem_trainer.pulse import PARKED, RESTARTS, SURVIVES, Pulse, PulseView, RankPlace, Slots
from tandem_trainer.trouble import TroubleCounts
from tests.support.processes import alive
from tests.support.waiting import SECONDS, until

STUCK_RANK = """
import time
from tandem_trainer.pulse import Pulse, Watchdog
pulse = Pulse.open_for_rank()
watchdog = Watchdog(pulse)
watchdog.start()
pulse.beat(step=watchdog.native_id, phase="stuck")
time.sleep(600)  # a collective that never ends holds no interpreter lock, as this does not
"""

BUSY_RANK = """
from tandem_trainer.pulse import Pulse
pulse = Pulse.open_for_rank()
step = 0
while True:
    step += 1
    x = float(step)
    pulse.beat(step=step, total_steps=step, epoch=x, loss=x, throughput=x, phase=str(step))
"""

AGENT = """
import os, subprocess, sys, time
from pathlib import Path
from tandem_trainer.pulse import PulseView
view = PulseView(Path(os.environ["TANDEM_PULSE"]), 0)
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
while (beat := view.beat()) is None or beat.phase != "stuck":
    time.sleep(0.01)
print(rank.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def view(tmp_path: Path) -> Iterator[PulseView]:
    made = PulseView(tmp_path, 0)
    yield made
    made.close()


def start_rank(folder: Path, code: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TANDEM_PULSE": str(folder), "LOCAL_RANK": "0", "RANK": "3", "TANDEM_GENERATION": "7"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


def test_the_agent_reads_what_the_rank_said(view: PulseView) -> None:
    assert view.beat() is None
    pulse = Pulse(view.path, rank=3, generation=7)
    began = time.monotonic()
    pulse.beat(step=12, total_steps=100, epoch=0.5, loss=1.25, throughput=640.0, phase="train")
    ended = time.monotonic()
    beat = view.beat()
    assert (beat.pid, beat.rank, beat.generation) == (os.getpid(), 3, 7)
    assert (beat.step, beat.total_steps, beat.epoch, beat.loss) == (12, 100, 0.5, 1.25)
    assert (beat.throughput, beat.phase) == (640.0, "train")
    assert began <= beat.reported_at <= ended


def test_what_a_rank_does_not_know_is_absent_and_a_loss_of_nan_is_not(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    pulse.beat(step=0)
    beat = view.beat()
    assert (beat.total_steps, beat.epoch, beat.loss, beat.throughput) == (None, None, None, None)
    pulse.beat(step=1, loss=float("nan"))
    beat = view.beat()
    assert beat.loss is not None
    assert beat.loss != beat.loss


def test_a_rank_that_is_told_to_regroup_gets_its_place_in_the_next_generation(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=3, generation=7)
    assert view.regroup_state == RESTARTS
    pulse.set_regroup_state(SURVIVES)
    assert pulse.next_place() is None
    heard: list[str] = []
    pulse.on_regroup = lambda: heard.append(pulse.order)
    view.order("regroup")
    assert not view.has_acknowledged
    pulse.acknowledge_regroup()
    assert (view.has_acknowledged, heard) == (True, ["regroup"])
    pulse.set_regroup_state(PARKED)
    place = RankPlace(9, 1, 2, "worker-0.example", 2_000)
    view.assign(place)
    # It is not asked again for this one, and does not count as waiting until it waits for the one after it.
    assert (pulse.order, view.regroup_state, pulse.next_place()) == ("run", SURVIVES, place)
    pulse.enter(place)
    assert pulse.next_place() is None
    pulse.beat(step=5)
    beat = view.beat()
    assert (beat.rank, beat.generation) == (1, 9)
    view.order("regroup")
    assert not view.has_acknowledged


def test_an_abort_is_not_revoked_by_a_place(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    view.order("abort")
    view.assign(RankPlace(2, 0, 1, "127.0.0.1", 1))
    assert pulse.order == "abort"


def test_outside_of_tandem_there_is_no_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_PULSE", raising=False)
    assert Pulse.open_for_rank() is None


def test_a_file_that_is_no_pulse_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0").write_bytes(bytes(4096))
    monkeypatch.setenv("TANDEM_PULSE", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="rank-0 is not a pulse"):
        Pulse.open_for_rank()


def test_of_a_beat_that_is_written_in_part_nothing_is_seen(view: PulseView) -> None:
    """Whatever part of it another processor has got to see: bytes from one end or the other, words in any order."""
    pulse, chance = Pulse(view.path, rank=0, generation=1), random.Random(1)
    for step in range(1, 5):
        before, old = view.path.read_bytes(), view.beat()
        pulse.beat(step=step, total_steps=step, epoch=float(step), loss=float(step), phase=str(step))
        after, new = view.path.read_bytes(), view.beat()
        assert new.step == step
        changed = range(*span(before, after))
        parts = [list(changed[:count]) for count in range(len(changed))] + [
            list(changed[start:]) for start in range(len(changed))
        ]
        words = range(changed.start // 8, changed.stop // 8 + 1)
        for _ in range(200):
            some = {word for word in words if chance.random() < 0.5}
            parts.append([at for at in changed if at // 8 in some])
        for part in parts:
            content = bytearray(before)
            for at in part:
                content[at] = after[at]
            write(view.path, content)
            assert view.beat() == (new if content == after else old)
        write(view.path, after)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("written", range(7))
def test_a_reader_that_a_writer_overtakes_sees_nothing_older_than_when_it_began(first: int, written: int) -> None:
    """Before its second read of a slot, records are written, and the last of them in part."""
    layout, offsets = struct.Struct("=QQ"), (0, 32)
    memory = Overtaken(64)
    slots = Slots(memory, layout, offsets)
    for number in range(1, first + 3):
        slots.write(number)
    newest = first + 2

    def overtake() -> None:
        for number in range(newest + 1, newest + 1 + written):
            slots.write(number)
        before = bytes(memory)
        slots.write(newest + 1 + written)
        torn = offsets[slots.sequence & 1] + layout.size
        memory[torn : torn + 4] = before[torn : torn + 4]

    memory.between = [lambda: None, overtake]
    assert Slots(memory, layout, offsets).read() == (newest + written,)


class Overtaken(bytearray):
    """Memory in which something happens before each of its first reads."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.between: list[Callable[[], None]] = []

    def __getitem__(self, at: Any) -> Any:
        if self.between:
            self.between.pop(0)()
        return super().__getitem__(at)


def span(before: bytes, after: bytes) -> tuple[int, int]:
    """From the first byte that differs to the last one."""
    different = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    return different[0], different[-1] + 1


def write(path: Path, content: bytes) -> None:
    """Into the file that both have mapped."""
    with path.open("r+b") as file:
        file.write(content)


def test_a_beat_is_never_seen_torn_while_the_rank_writes_without_pause(view: PulseView, tmp_path: Path) -> None:
    rank = start_rank(tmp_path, BUSY_RANK)
    try:
        seen: set[int] = set()
        last = 0
        deadline = time.monotonic() + SECONDS
        while len(seen) < 5_000 and time.monotonic() < deadline:
            beat = view.beat()
            if beat is None or beat.step == 0:
                continue
            assert beat.total_steps == beat.epoch == beat.loss == beat.throughput == beat.step == int(beat.phase)
            assert beat.step >= last, "beats never go back"
            last = beat.step
            seen.add(beat.step)
        assert len(seen) >= 5_000
    finally:
        rank.kill()
        rank.wait()
    beat = view.beat()
    assert beat is not None, "a rank killed while it wrote leaves its last whole beat"
    assert beat.step >= last


def test_processor_use_is_sampled_without_the_training_thread(view: PulseView, tmp_path: Path) -> None:
    rank = start_rank(tmp_path, STUCK_RANK)
    try:
        first = until(view.usage, "a measured use")
        second = until(
            lambda: usage if (usage := view.usage()) and usage.sampled_at > first.sampled_at else None, "a measured use"
        )
        assert 0 < first.cpu_seconds <= second.cpu_seconds
        assert second.gpu is None
    finally:
        rank.kill()
        rank.wait()


def test_a_stuck_rank_obeys_an_abort_at_once_and_says_so(view: PulseView, tmp_path: Path) -> None:
    """Its watchdog is woken by the order: it does not look for one from time to time."""
    rank = start_rank(tmp_path, STUCK_RANK)
    try:
        stuck = until(lambda: (beat := view.beat()) and beat.phase == "stuck" and beat, "phase stuck")
        until(lambda: state(rank.pid, stuck.step) == "S", "the watchdog's sleep")
        woken = times_woken(rank.pid, stuck.step)
        for _ in range(2):
            before = until(view.usage, "a measured use")
            until(lambda before=before: view.usage().sampled_at > before.sampled_at, "the next one")
        assert times_woken(rank.pid, stuck.step) == woken
        assert view.last_word() is None
        view.order("abort")
        assert rank.wait(SECONDS) == ExitCode.SUPERSEDED
        assert view.last_word() == ExitCode.SUPERSEDED
    finally:
        rank.kill()
        rank.wait()


def state(process: int, thread: int) -> str:
    """What a thread is about, in the kernel's letter."""
    return Path(f"/proc/{process}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def times_woken(process: int, thread: int) -> int:
    """How often a thread has gone to sleep so far."""
    status = Path(f"/proc/{process}/task/{thread}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_an_abort_before_the_rank_looks_is_obeyed_too(view: PulseView, tmp_path: Path) -> None:
    view.order("abort")
    rank = start_rank(tmp_path, STUCK_RANK)
    try:
        assert rank.wait(SECONDS) == ExitCode.SUPERSEDED
    finally:
        rank.kill()
        rank.wait()


def test_save_and_leave_reaches_the_loop_and_abort_still_overrides_it(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    assert pulse.order == "run"
    view.order("save-and-leave")
    assert pulse.order == "save-and-leave"
    view.order("abort")
    view.order("run")
    assert pulse.order == "abort", "there is no way back from abort"


def test_no_rank_outlives_its_agent(tmp_path: Path) -> None:
    environment = {**os.environ, "TANDEM_PULSE": str(tmp_path), "LOCAL_RANK": "0"}
    agent = subprocess.Popen([sys.executable, "-c", AGENT, STUCK_RANK], env=environment, stdout=subprocess.PIPE)
    try:
        rank = int(agent.stdout.readline())
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        until(lambda: not alive(rank), "the end of the rank")
    finally:
        agent.kill()
        agent.communicate()


def test_a_beat_costs_microseconds_of_the_processor(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    best = min(_seconds_per_beat(pulse) for _ in range(5))
    assert best < 5e-6, f"{best * 1e6:.1f} µs"


def _seconds_per_beat(pulse: Pulse, count: int = 2_000) -> float:
    start = time.thread_time()
    for step in range(count):
        pulse.beat(step=step, total_steps=count, epoch=0.5, loss=1.0, throughput=2.0)
    return (time.thread_time() - start) / count


def test_a_pause_is_said_with_its_name_and_ends_where_it_began(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    pulse.beat(step=7, total_steps=9, loss=0.5, throughput=3.0)

    def now() -> tuple[str, bool, bool, int, float | None]:
        beat = view.beat()
        return beat.phase, beat.pauses, beat.finishing, beat.step, beat.loss

    with pulse.pausing("validation"):
        assert now() == ("validation", True, False, 7, 0.5)
        with pulse.pausing("upload"):
            assert now()[0] == "upload"
        assert now() == ("validation", True, False, 7, 0.5)
    assert now() == ("train", False, False, 7, 0.5)
    pulse.finish()
    with pulse.pausing("test"):
        assert now() == ("test", True, True, 7, 0.5)
    assert now() == ("finishing", True, True, 7, 0.5)


@pytest.mark.parametrize("name", ["", "train", "stopped", "validation and test", "prüfen", "two\nlines"])
def test_a_pause_needs_a_name_that_can_be_shown_and_means_nothing_else(view: PulseView, name: str) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    with pytest.raises(ValueError, match="cannot name a pause"), pulse.pausing(name):
        pytest.fail("it was taken")


def test_what_went_wrong_reaches_the_agent_in_any_letters(view: PulseView) -> None:
    pulse = Pulse(view.path, rank=0, generation=1)
    assert view.trouble() is None
    troubles = TroubleCounts(pulse)
    troubles.save_failed("kein Platz: \x00\U0001f4be" * 60)
    troubles.save_failed("no space left on device")
    troubles.lines_lost(1_275)
    told = view.trouble()
    assert (told.saves_failed, told.saves_failed_in_a_row, told.lines_lost) == (2, 2, 1_275)
    assert told.why == "no space left on device"
    troubles.save_succeeded()
    assert view.trouble() == Trouble(saves_failed=2, lines_lost=1_275, why="no space left on device")
    pulse.close()


SPAWNING_RANK = """
import subprocess, sys, time
from tandem_trainer.pulse import Pulse
pulse = Pulse.open_for_rank()
works = "import select; [0 for _ in iter(lambda: bool(select.select([0], [], [], 0)[0]), True)]"
child = subprocess.Popen([sys.executable, "-c", works], stdin=subprocess.PIPE)  # until this process is gone
time.sleep(600)
"""


def test_processes_that_a_script_starts_itself_count_as_its_use(view: PulseView, tmp_path: Path) -> None:
    """A rank that only waits for processes that train would otherwise seem to wait for ever."""
    rank = start_rank(tmp_path, SPAWNING_RANK)
    try:
        first = until(view.usage, "a measured use")
        until(lambda: view.usage().cpu_seconds > first.cpu_seconds + 0.5, "the use of its child: itself it sleeps")
    finally:
        rank.kill()
        rank.wait()
