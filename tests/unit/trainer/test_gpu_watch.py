"""What an agent knows of the GPUs of ranks that say nothing of theirs; NVML is played, the processes are real."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem_trainer.agent import gpu_watch
from tandem_trainer.agent.gpu_watch import GpuUse, GpuWatch
from tandem_trainer.agent.local_ranks import LocalRanks
from tests.support.nvml import Nvml
from tests.support.waiting import until

USER = """
import sys
opened = [open(name) for name in sys.argv[1:]]
print("ready", flush=True)
for line in sys.stdin:
    opened.append(open(line.strip()))
"""
"""A process that opens files: those of its arguments at once, and those that it is told."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """That of this machine, which is asked all the time."""
    played = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", played)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_watch, "SAMPLE_SECONDS", 0.02)
    monkeypatch.setattr(gpu_watch, "MAX_SEARCH_SHARE", 0.5)
    return played


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands for CUDA's driver."""
    path = tmp_path / "driver"
    path.touch()
    monkeypatch.setattr(gpu_watch, "DRIVER", str(path))
    return str(path)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process, and waits for it to be ready."""
    with ExitStack() as stack:

        def begin(*files: str, before: tuple[str, ...] = (), **variables: str) -> "subprocess.Popen[str]":
            command = [*before, sys.executable, "-c", USER, *files]
            pipe = subprocess.PIPE
            one = subprocess.Popen(command, env=os.environ | variables, stdin=pipe, stdout=pipe, text=True)
            stack.enter_context(one)
            stack.callback(one.stdin.close if one.stdin else lambda: None)
            assert one.stdout.readline() == "ready\n"
            return one

        yield begin


def seen(watch: GpuWatch, pids: dict[int, int], *ranks: int) -> dict[int, GpuUse]:
    """What is known once something is known of these ranks."""
    return until(lambda: found if (found := watch.poll(pids)).keys() >= {*ranks} else None, "what the watch sees")


@pytest.mark.parametrize(
    ("visible", "busy"),
    [
        (None, [0.91, 0.92]),
        ("2,3", [0.93, 0.94]),
        ("GPU-b, GPU-a", [0.92, 0.91]),
        ("GPU-d", [0.94, 0.94]),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_among_those_that_it_may_see(
    nvml: Nvml, driver: str, start: Start, monkeypatch: pytest.MonkeyPatch, visible: str | None, busy: list[float]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pids = {rank: start(driver).pid for rank in range(2)}
    found = seen(GpuWatch(), pids, 0, 1)
    assert [found[rank].busy for rank in range(2)] == busy
    assert [found[rank].memory_bytes for rank in range(2)] == [round(one * 100) * 2**20 for one in busy]


def test_a_program_may_choose_for_the_process_that_it_starts(nvml: Nvml, driver: str, start: Start) -> None:
    """The shell stays above it, and does not compute."""
    program = start(driver, before=("sh", "-c", 'CUDA_VISIBLE_DEVICES=3 "$@"; exit 0', "sh"))
    assert seen(GpuWatch(), {1: program.pid}, 1)[1].busy == 0.94


def test_a_gpu_that_no_process_computes_on_is_not_reported(nvml: Nvml, driver: str, start: Start) -> None:
    idle, busy = start(), start(driver)
    watch, pids = GpuWatch(), {0: idle.pid, 1: busy.pid}
    assert seen(watch, pids, 1).keys() == {1}
    idle.stdin.write(f"{driver}\n")
    idle.stdin.flush()
    assert seen(watch, pids, 0)[0].busy == 0.91
    busy.kill()
    busy.wait()
    until(lambda: watch.poll(pids).keys() == {0}, "that it has ended")
    assert set(nvml.asked) == {"GPU-a", "GPU-b"}


def test_a_gpu_that_is_lost_is_not_asked_again(nvml: Nvml, driver: str, start: Start) -> None:
    watch, pids = GpuWatch(), {rank: start(driver).pid for rank in range(2)}
    seen(watch, pids, 0, 1)
    nvml.lost.add("GPU-a")
    until(lambda: watch.poll(pids).keys() == {1}, "its end")
    nvml.lost.clear()
    nvml.asked.clear()
    until(lambda: watch.poll(pids) and len(nvml.asked) > 3, "more of the other one")
    assert set(nvml.asked) == {"GPU-b"}


def test_nobody_is_asked_while_all_ranks_speak_for_themselves(nvml: Nvml, driver: str, start: Start) -> None:
    watch, pids = GpuWatch(), {0: start(driver).pid}
    assert watch.poll({}) == {}
    assert watch._thread is None
    seen(watch, pids, 0)
    assert watch.poll({}) == {}
    nvml.asked.clear()
    assert seen(watch, {1: start(driver).pid}, 1).keys() == {1}
    assert nvml.asked.count("GPU-a") <= 1, "the one sample that was on its way"


def test_where_all_ranks_have_spoken_within_a_second_nvml_is_not_even_loaded(
    nvml: Nvml, driver: str, start: Start
) -> None:
    watch = GpuWatch()
    watch.poll({0: start(driver).pid})
    watch.poll({})
    until(lambda: watch._changed._waiters, "its thread's sleep")  # type: ignore[attr-defined]
    assert nvml.begun == 0


@pytest.mark.parametrize("broken", ["no pynvml", "no driver"])
def test_where_there_is_no_nvml_it_is_asked_for_once(
    nvml: Nvml, driver: str, start: Start, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "no pynvml":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.broken = True
    watch, pids = GpuWatch(), {0: start(driver).pid}
    assert watch.poll(pids) == {}
    thread = watch._thread
    assert thread is not None
    until(lambda: not thread.is_alive(), "the end of its thread")
    assert watch.absent
    assert watch.poll(pids) == {}
    assert watch._thread is thread
    assert nvml.begun == (0 if broken == "no pynvml" else 1)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_who_may_see_no_gpu_asks_for_none(
    nvml: Nvml, driver: str, start: Start, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    watch = GpuWatch()
    assert watch.absent
    assert watch.poll({0: start(driver).pid}) == {}
    assert watch._thread is None


RANK = """
import sys
from tandem_trainer.pulse import Pulse
opened = open(sys.argv[1])
if sys.argv[2] == "says":
    from tandem_trainer.gpu import Gpu
    Gpu.sample = lambda gpu: (0.25, 7)
if sys.argv[2] != "has no pulse":
    Pulse.open_for_rank(phase="script" if sys.argv[2] != "is ours" else "train")
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_rank_says_itself_counts_and_one_without_a_pulse_is_reported_of_for_its_gpu(
    nvml: Nvml, driver: str
) -> None:
    kinds = ["says", "says nothing", "has no pulse", "is ours", "has not started"]
    watch = GpuWatch()
    ranks = LocalRanks(1, len(kinds), first_rank=10, gpus=watch)
    with ExitStack() as stack:
        pids = {}
        for local_rank, kind in enumerate(kinds[:-1]):
            numbers = {"LOCAL_RANK": str(local_rank), "RANK": str(10 + local_rank), "TANDEM_PULSE": str(ranks.folder)}
            one = subprocess.Popen(
                [sys.executable, "-c", RANK, driver, kind],
                env=os.environ | numbers,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(one)
            stack.callback(one.stdin.close if one.stdin else lambda: None)
            assert one.stdout.readline() == "ready\n"
            pids[local_rank] = one.pid
        ranks.started(pids)

        def told() -> dict[int, tuple[float | None, int | None]] | None:
            ranks.watch()
            found = {one.rank: (one.gpu, one.gpu_memory_bytes) for one in ranks.reports()}
            return found if len(found) == 4 and None not in (found[10][0], found[11][0]) else None

        said = until(told, "reports of GPUs")
        assert said == {10: (0.25, 7), 11: (0.92, 92 * 2**20), 12: (0.93, 93 * 2**20), 13: (None, None)}
        mute = next(one for one in ranks.reports() if one.rank == 12)
        assert (mute.step, mute.phase, mute.script, mute.saves, mute.cpu) == (0, "script", True, False, None)
        assert mute.used_before is not None

    def watched() -> set[int]:
        ranks.watch()
        assert 13 in [one.rank for one in ranks.reports()]
        return {*watch._pids}

    until(lambda: watched() == {2}, "the end of those whose end is seen")
    until(lambda: 12 not in [one.rank for one in ranks.reports()], "the end of a rank without a pulse")
    ranks.close()
    assert set(nvml.asked) <= {"GPU-a", "GPU-b", "GPU-c"}
    assert watch._pids == {}
