"""The words about limits of processes and containers."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tandem.processes import limits
from tandem.processes.limits import OomKills, describe_kill, explain, memory_limit, oom_kills, process_limit

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
        (
            RuntimeError("can't start new thread"),
            "there may be 14 processes and threads: pids.max of its control group",
        ),
        (RuntimeError("sh: fork: retry: Resource temporarily unavailable"), "there may be 14 processes and threads"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), ""),
        (BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 5), ""),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable", "lock"), ""),
        (ValueError("too many values to unpack"), ""),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), ""),
    ],
)
def test_errors_of_forks_and_threads_and_others(groups: Callable[..., None], error: Exception, words: str) -> None:
    groups("0::/a", **{"a/pids.max": "14\n"})
    assert explain(error).startswith(words)
    assert bool(explain(error)) == bool(words)


def test_an_error_of_a_call_is_one_of_processes_if_the_call_starts_one(
    groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups("0::/a", **{"a/pids.max": "14\n"})
    # Its message is that of every other EAGAIN.
    pipe, other = os.pipe()
    os.set_blocking(pipe, False)
    with pytest.raises(BlockingIOError) as read:
        os.read(pipe, 1)
    assert explain(read.value) == ""
    monkeypatch.setattr(subprocess, "_fork_exec", partial(os.read, pipe), raising=False)
    with pytest.raises(BlockingIOError) as started:
        subprocess._fork_exec(1)  # type: ignore[attr-defined]
    assert explain(started.value).startswith("there may be 14 processes")
    os.close(pipe)
    os.close(other)


@pytest.mark.parametrize(
    ("user", "limit", "message"),
    [
        (1000, 9, "this user may have 9 processes and threads: ulimit -u"),
        (1000, 20, "there may be 14 processes and threads: pids.max of its control group"),
        (1000, resource.RLIM_INFINITY, "there may be 14 processes and threads: pids.max of its control group"),
        (0, 9, "there may be 14 processes and threads: pids.max of its control group"),
    ],
)
def test_the_limit_of_processes_that_is_met_first_is_named(
    groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch, user: int, limit: int, message: str
) -> None:
    groups("0::/a", **{"a/pids.max": "14\n"})
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert explain(RuntimeError("can't start new thread")) == message


def test_open_files_are_raised_as_far_as_the_hard_limit_allows() -> None:
    code = """
import resource
from tandem.processes.limits import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 300))
raise_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "(300, 300)"


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


@pytest.mark.parametrize(
    ("own", "counter"),
    [("0::/a", "a/memory.events"), ("3:memory:/a", "memory/a/memory.oom_control"), ("0::/host/a", "memory.events")],
)
def test_a_kill_by_the_kernel_is_told_from_another_one(
    tmp_path: Path, groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch, own: str, counter: str
) -> None:
    limit = "memory.limit_in_bytes" if "oom_control" in counter else "memory.max"
    groups(own, **{counter: "oom 9\noom_kill 2\n", str(Path(counter).with_name(limit)): str(2**30)})
    monkeypatch.setattr(limits, "VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    assert oom_kills() == OomKills(2, 3)
    by_limit = "killed by the kernel (SIGKILL): the memory limit of 1.1 GB is used up"
    assert describe_kill(-signal.SIGKILL, OomKills(1, 2)) == by_limit
    # That of another container, or this one's for lack of memory on the machine.
    by_machine = "killed by the kernel (SIGKILL): the memory of this machine is used up"
    assert describe_kill(137, OomKills(2, 2)) == by_machine
    assert describe_kill(137, OomKills(None, 2)) == by_machine
    assert describe_kill(-signal.SIGKILL, OomKills(2, 3)) == ""
    assert describe_kill(-signal.SIGTERM, OomKills(1, 2)) == ""
    assert describe_kill(-signal.SIGKILL, None) == ""
    (tmp_path / "vmstat").unlink()
    assert oom_kills() is None


def test_a_process_without_limits_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert explain(MemoryError()) == ""
