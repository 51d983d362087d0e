"""Children that end with their parent, and the guardian that sees to the rest. Real processes, but none of Tandem's."""

import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tandem.processes.launch import PULSE
from tandem_launcher.local.child import Process, last_lines
from tandem_launcher.local.guardian import MARK, marked, sweep
from tests.support.waiting import until

SECONDS = 10.0


@pytest.fixture
def mark() -> Iterator[str]:
    """The mark of a run, and nothing that carries it afterwards."""
    value = secrets.token_hex(8)
    yield value
    sweep(value, seconds=5.0)


def sleeper(mark: str, code: str = "", pulse: Path | None = None) -> subprocess.Popen[bytes]:
    environment = {MARK: mark} | ({PULSE: str(pulse)} if pulse else {})
    body = f"{code}\nimport time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", body], env=os.environ | environment, start_new_session=True)


class TestSweeping:
    def test_kills_what_carries_the_mark_and_nothing_else(self, mark: str) -> None:
        mine, other = sleeper(f"{mark}/worker-0/1"), sleeper(f"{mark}0/worker-0/1")
        until(lambda: marked(mark), "the child is seen")
        assert sweep(mark) == []
        assert mine.wait(SECONDS) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()
        other.wait()

    def test_can_be_confined_to_one_life_of_one_child(self, mark: str) -> None:
        first, tenth = sleeper(f"{mark}/worker-1/1"), sleeper(f"{mark}/worker-1/10")
        until(lambda: len(marked(mark)) == 2, "both are seen")
        sweep(f"{mark}/worker-1/1")
        assert first.wait(SECONDS) == -signal.SIGKILL
        assert tenth.poll() is None
        tenth.kill()
        tenth.wait()

    def test_reaches_descendants_that_cleared_their_environment(self, mark: str, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        code = f"""
import subprocess, sys
hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={{}}, start_new_session=True)
open({str(file)!r}, "w").write(str(hidden.pid))
"""
        parent = sleeper(mark, code)
        until(lambda: file.exists() and file.read_text(), "the hidden one runs")
        hidden = psutil.Process(int(file.read_text()))
        sweep(mark)
        parent.wait(SECONDS)
        until(lambda: not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE, "the hidden one is dead")

    def test_goes_on_until_those_that_keep_forking_are_gone(self, mark: str) -> None:
        code = """
import os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end = time.time() + 1.5
while time.time() < end:
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.005)
    else:
        break
"""
        parent = sleeper(mark, code)
        until(lambda: marked(mark), "it runs")
        assert sweep(mark) == []
        assert marked(mark) == []
        parent.wait(SECONDS)

    def test_lets_trackers_remove_shared_memory_first(self, mark: str, tmp_path: Path) -> None:
        file = tmp_path / "name"
        code = f"""
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
open({str(file)!r}, "w").write(memory.name)
"""
        parent = sleeper(mark, code)
        until(lambda: file.exists() and file.read_text(), "the memory is there")
        memory = Path("/dev/shm") / file.read_text()
        assert memory.exists()
        sweep(mark)
        parent.wait(SECONDS)
        assert not memory.exists()

    def test_removes_the_pulse_files_of_ranks(self, mark: str, tmp_path: Path) -> None:
        pulses, other = tmp_path / "tandem-g000001-x", tmp_path / "home"
        for folder in (pulses, other):
            folder.mkdir()
            (folder / "rank").touch()
        ranks = [sleeper(mark, pulse=folder) for folder in (pulses, other)]
        until(lambda: len(marked(mark)) == 2, "both run")
        sweep(mark)
        assert [rank.wait(SECONDS) for rank in ranks] == [-signal.SIGKILL] * 2
        assert not pulses.exists()
        assert other.exists(), "no folder but one that is named as ours is ever removed"


@pytest.fixture
def child(mark: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Builds a child from Python code."""
    made = []

    def build(code: str, **options: object) -> Process:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        made.append(Process("child", command, dict(os.environ), tmp_path / "log.txt", mark, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for process in made:
        process.close()


def said(log: Path) -> list[str]:
    return last_lines(log, 10)


class TestAChild:
    def test_leads_a_session_of_its_own_without_a_terminal(self, child: Callable[..., Process], tmp_path: Path) -> None:
        process = child("import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '')")
        process.start()
        until(lambda: process.ended() is not None, "it ends")
        assert said(tmp_path / "log.txt") == ["True True"]

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux has the idle class")
    def test_in_the_background_gives_way_in_every_manner(self, child: Callable[..., Process], tmp_path: Path) -> None:
        process = child(
            """
            import os
            from pathlib import Path
            group = Path("/proc/self/autogroup")
            print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)
            print(group.read_text().split()[-1] if group.exists() else 19)
            """,
            background=True,
        )
        process.start()
        until(lambda: process.ended() is not None, "it ends")
        assert said(tmp_path / "log.txt") == ["19 True", "19"]

    @pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="Linux lets root alone take it back")
    def test_steps_back_and_forward_while_it_runs(self, child: Callable[..., Process]) -> None:
        process = child("import time; time.sleep(600)")
        process.start()
        until(
            lambda: process.pid is not None and "time.sleep" in Path(f"/proc/{process.pid}/cmdline").read_text(),
            "it runs",
        )
        assert process.pid is not None
        process.step_back()
        assert (os.getpriority(os.PRIO_PROCESS, process.pid), os.sched_getscheduler(process.pid)) == (19, os.SCHED_IDLE)
        process.step_forward()
        assert (os.getpriority(os.PRIO_PROCESS, process.pid), os.sched_getscheduler(process.pid)) == (0, os.SCHED_OTHER)
        assert not process.background

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux has affinity")
    def test_keeps_to_its_cores(self, child: Callable[..., Process], tmp_path: Path) -> None:
        core = max(os.sched_getaffinity(0))
        process = child("import os; print(os.sched_getaffinity(0))", cores=(core,))
        process.start()
        until(lambda: process.ended() is not None, "it ends")
        assert said(tmp_path / "log.txt") == [f"{{{core}}}"]

    def test_that_is_killed_takes_along_what_it_started(self, child: Callable[..., Process], mark: str) -> None:
        process = child("""
            import subprocess, sys, time
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            time.sleep(600)
        """)
        process.start()
        until(lambda: len(marked(mark)) == 2, "both run")
        process.kill()
        until(lambda: process.ended() is not None, "it ends")
        assert marked(mark) == []

    def test_keeps_one_log_over_its_lives_of_which_the_last_counts(
        self, child: Callable[..., Process], tmp_path: Path
    ) -> None:
        process = child("import os; print('life', os.environ['TANDEM_LOCAL'].rpartition('/')[2])")
        for _ in range(2):
            process.start()
            until(lambda: process.ended() is not None, "it ends")
        assert said(tmp_path / "log.txt") == ["life 2"]
        assert "life 1" in (tmp_path / "log.txt").read_text()

    def test_that_cannot_be_started_says_so_in_its_log(self, mark: str, tmp_path: Path) -> None:
        process = Process("child", ["/no/such/program"], {}, tmp_path / "log.txt", mark)
        process.start()
        until(lambda: process.ended() is not None, "it ends")
        assert process.ended() == 1
        assert said(tmp_path / "log.txt") == ["cannot start /no/such/program: No such file or directory"]


PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from tandem_launcher.local.child import Process
mark, folder, guarded = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "guarded"
if guarded:
    read, write = os.pipe()
    scratch = folder / "scratch"
    scratch.mkdir()
    (scratch / "left").touch()
    subprocess.Popen([sys.executable, "-m", "tandem_launcher.local.guardian", mark, str(scratch)], stdin=read,
                     start_new_session=True)
    os.close(read)
code = '''
import subprocess, sys, time
if sys.argv[1] == "guarded":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
'''
Process("child", [sys.executable, "-c", code, sys.argv[3]], dict(os.environ), folder / "log.txt", mark).start()
time.sleep(600)
"""


class TestAParentThatIsKilled:
    @staticmethod
    def started(mark: str, folder: Path, how: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PARENT, mark, str(folder), how], start_new_session=True)

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone does this")
    def test_takes_its_direct_children_along_even_without_a_guardian(self, mark: str, tmp_path: Path) -> None:
        parent = self.started(mark, tmp_path, "alone")
        # While it becomes its command its mark cannot be read for a moment.
        until(lambda: any("sleep" in " ".join(one.cmdline()) for one in marked(mark)), "it has become its command")
        parent.kill()
        parent.wait()
        until(lambda: not marked(mark), "nothing is left")

    @pytest.mark.parametrize("group", [False, True], ids=["the parent", "its whole process group"])
    def test_leaves_nothing_to_the_guardian(self, mark: str, tmp_path: Path, group: bool) -> None:
        parent = self.started(mark, tmp_path, "guarded")
        until(lambda: len(marked(mark)) == 2, "child and grandchild run")
        if group:
            os.killpg(parent.pid, signal.SIGKILL)
        else:
            parent.kill()
        parent.wait()
        until(lambda: not marked(mark), "nothing is left")
        until(lambda: not (tmp_path / "scratch").exists(), "temporary files are gone")
        guardians = lambda: [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]  # noqa: E731
        until(lambda: not [p for p in guardians() if p.status() != psutil.STATUS_ZOMBIE], "the guardian is gone")
