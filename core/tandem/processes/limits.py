"""Limits of a process (`ulimit`) and of its container, in the words of errors that they cause.

`explain` names the limit behind an error, where there is one. `oom_kills` is how often the kernel has killed a process
for lack of memory: a process that was killed by SIGKILL while it grew was killed by the kernel.
"""

import errno
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tandem.formatting import size

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")
UNLIMITED = 2**60
"""Memory limits of this size in bytes, and larger ones, are none: version 1 of cgroups has no other way to say so."""
ALLOCATION_FAILURES = (
    *("can't allocate memory", "failed to map segment", "Cannot allocate memory", "not enough memory"),
    *("Unable to allocate", "std::bad_alloc", "unable to mmap"),
)
"""Parts of messages of torch, numpy and the loader of shared libraries."""
THREAD_FAILURES = ("can't start new thread", "Resource temporarily unavailable")


def explain(error: BaseException) -> str:
    """Return a phrase about the limit of this process that an error has met, such as `a process may open 64 files:
    ulimit -n`; empty if there is no such limit."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number == errno.EMFILE or "Too many open files" in text:
        return _limit(resource.RLIMIT_NOFILE, "a process may open {:,} files: ulimit -n")
    if number == errno.EFBIG:
        return _limit(resource.RLIMIT_FSIZE, "a file may have {size}: ulimit -f")
    if number == errno.EAGAIN or any(part in text for part in THREAD_FAILURES):
        if (limit := process_limit()) is not None:
            return f"there may be {limit:,} processes and threads: pids.max of the container"
        return _limit(resource.RLIMIT_NPROC, "this user may have {:,} processes and threads: ulimit -u")
    if number == errno.ENOMEM or isinstance(error, MemoryError) or any(part in text for part in ALLOCATION_FAILURES):
        return _limit(resource.RLIMIT_AS, "a process may use {size} of address space: ulimit -v")
    return ""


def _limit(kind: int, text: str) -> str:
    soft_limit, _ = resource.getrlimit(kind)
    return "" if soft_limit == resource.RLIM_INFINITY else text.format(soft_limit, size=size(soft_limit))


def oom_kills() -> int | None:
    """Return the number of processes that the kernel has killed on this machine for lack of memory, by the limit of a
    container or of the machine; None where it does not count."""
    with suppress(OSError, ValueError):
        for line in VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def memory_limit() -> int | None:
    """Return the memory limit of this process's control group in bytes; None if there is none, or if it is unknown."""
    return _group_limit("memory", {2: "memory.max", 1: "memory.limit_in_bytes"})


def process_limit() -> int | None:
    """Return the number of processes and threads that this process's control group may have; None as above."""
    return _group_limit("pids", {2: "pids.max", 1: "pids.max"})


def _group_limit(controller: str, names: Mapping[int, str]) -> int | None:
    """Return the smallest limit of this process's control group and of those above it.

    Args:
        names: name of the file with the limit, by version of cgroups.
    """
    limits = []
    for folder, version in _own_groups(controller):
        for group in (folder, *folder.parents):
            if group.is_relative_to(CGROUP):
                with suppress(OSError, ValueError):
                    limits.append(int((group / names[version]).read_text()))
    smallest = min(limits, default=UNLIMITED)
    return smallest if smallest < UNLIMITED else None


def _own_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's control group, each with its version of cgroups."""
    with suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield CGROUP / path.lstrip("/"), 2
            elif controller in controllers.split(","):
                yield CGROUP / controller / path.lstrip("/"), 1


def describe_kill(code: int | None, kills_before: int | None) -> str:
    """Return a sentence about a process that the kernel has killed for lack of memory; empty if another one did.

    Args:
        code: exit code, or minus the signal.
        kills_before: `oom_kills` shortly before.
    """
    if code not in (-signal.SIGKILL, 128 + signal.SIGKILL) or kills_before is None:
        return ""
    if (oom_kills() or 0) <= kills_before:
        return ""
    limit = memory_limit()
    scope = "of this machine" if limit is None else f"limit of {size(limit)}"
    return f"killed by the kernel (SIGKILL): the memory {scope} is used up"
