"""The words about limits of processes and containers."""

import errno
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.processes import limits
from tandem.processes.limits import describe_kill, explain, memory_limit, oom_kills, process_limit

EXPLAINS = """
import resource
from tandem.processes.limits import explain
resource.setrlimit(resource.RLIMIT_{kind}, ({limit}, {limit}))
try:
    {does}
except (OSError, MemoryError) as error:
    print(explain(error))
"""


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the control groups of this process: lines of /proc/self/cgroup, and files."""
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "OWN_GROUPS", tmp_path / "own")

    def setup(own: str, **files: str) -> None:
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return setup


@pytest.mark.parametrize(
    ("kind", "limit", "does", "words"),
    [
        ("NOFILE", 10, "[open('/dev/null') for _ in range(20)]", "a process may open 10 files: ulimit -n"),
        ("FSIZE", 4096, "open(TARGET, 'wb').write(bytes(9999))", "a file may have 4.1 kB: ulimit -f"),
        ("AS", 2**30, "bytearray(2**31)", "a process may use 1.1 GB of address space: ulimit -v"),
    ],
)
def test_what_a_process_meets_is_said_with_its_number(
    tmp_path: Path, kind: str, limit: int, does: str, words: str
) -> None:
    code = EXPLAINS.format(kind=kind, limit=limit, does=does.replace("TARGET", repr(str(tmp_path / "file"))))
    code = f"import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), "there may be 14 processes and threads: pids.max of the container"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "there may be 14 processes and threads"),
        (ValueError("too many values to unpack"), ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), ""),
    ],
)
def test_errors_of_forks_and_threads_and_others(groups: Callable[..., None], error: Exception, words: str) -> None:
    groups("0::/a", **{"a/pids.max": "14\n"})
    assert explain(error).startswith(words)
    assert bool(explain(error)) == bool(words)


def test_the_smallest_limit_above_a_process_counts(groups: Callable[..., None]) -> None:
    groups("0::/a/b\n", **{"a/b/memory.max": "max\n", "a/memory.max": "2048\n", "memory.max": "4096\n"})
    assert memory_limit() == 2048
    assert process_limit() is None


def test_the_first_version_of_control_groups(groups: Callable[..., None]) -> None:
    unlimited = "9223372036854771712\n"
    groups("7:pids:/\n3:memory:/a\n0::/\n", **{"memory/a/memory.limit_in_bytes": "512\n", "pids/pids.max": "max\n"})
    assert (memory_limit(), process_limit()) == (512, None)
    groups("3:memory:/a\n", **{"memory/a/memory.limit_in_bytes": unlimited})
    assert memory_limit() is None


def test_a_kill_by_the_kernel_is_told_from_another_one(
    tmp_path: Path, groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups("0::/a", **{"a/memory.max": str(2**30)})
    monkeypatch.setattr(limits, "VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    assert oom_kills() == 3
    assert describe_kill(-signal.SIGKILL, 2) == "killed by the kernel (SIGKILL): the memory limit of 1.1 GB is used up"
    assert describe_kill(137, 2)
    assert describe_kill(-signal.SIGKILL, 3) == ""
    assert describe_kill(-signal.SIGTERM, 2) == ""
    assert describe_kill(-signal.SIGKILL, None) == ""
    (tmp_path / "vmstat").unlink()
    assert oom_kills() is None


def test_a_process_without_limits_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert explain(MemoryError()) == ""
