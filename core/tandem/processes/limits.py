"""Limits of a process (`ulimit`) and of its container, in the words of errors that they cause.

`explain` names the limit behind an error, where there is one. `oom_kills` is how often the kernel has killed a process
for lack of memory: a process that was killed by SIGKILL while it grew was killed by the kernel.
"""

import errno
import os
import re
import resource
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
THREAD_FAILURE = re.compile(
    r"can't start new thread|(?:fork|[Tt]hread|pthread_create|what\(\)).*Resource temporarily unavailable"
)
"""Messages of Python, shells and C++ about a thread or process that cannot be started. Others of this errno are about
files, sockets and locks."""
MAX_OPEN_FILES = 2**16
"""Open files up to which the limit of a run's processes is raised."""


def explain(error: BaseException) -> str:
    """Return a phrase about the limit of this process that an error has met, such as `a process may open 64 files:
    ulimit -n`; empty if there is no such limit."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number == errno.EMFILE or "Too many open files" in text:
        return _limit(resource.RLIMIT_NOFILE, "a process may open {:,} files: ulimit -n")
    if number == errno.EFBIG:
        return _limit(resource.RLIMIT_FSIZE, "a file may have {size}: ulimit -f")
    if THREAD_FAILURE.search(text) or (number == errno.EAGAIN and _is_of_fork(error)):
        return _describe_process_limit()
    if number == errno.ENOMEM or isinstance(error, MemoryError) or any(part in text for part in ALLOCATION_FAILURES):
        return _limit(resource.RLIMIT_AS, "a process may use {size} of address space: ulimit -v")
    return ""


def _limit(kind: int, text: str) -> str:
    soft_limit, _ = resource.getrlimit(kind)
    return "" if soft_limit == resource.RLIM_INFINITY else text.format(soft_limit, size=size(soft_limit))


def _is_of_fork(error: BaseException) -> bool:
    """Return whether an error was raised by a call that starts a process, such as os.fork."""
    calls = traceback.extract_tb(error.__traceback__)
    return bool(calls) and any(name in (calls[-1].line or "") for name in ("fork", "spawn"))


def _describe_process_limit() -> str:
    """Describe the limit of processes that is met first; empty if there is none."""
    group_limit, (user_limit, _) = process_limit(), resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not apply the limit of a user to root.
    has_user_limit = os.geteuid() != 0 and user_limit != resource.RLIM_INFINITY
    if group_limit is not None and not (has_user_limit and user_limit < group_limit):
        return f"there may be {group_limit:,} processes and threads: pids.max of its control group"
    return f"this user may have {user_limit:,} processes and threads: ulimit -u" if has_user_limit else ""


def raise_open_files() -> None:
    """Raise the number of files that this process, and those that it starts, may open, as far as it may."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MAX_OPEN_FILES)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard_limit))


class OomKills(NamedTuple):
    """Numbers of processes that the kernel has killed for lack of memory."""

    group: int | None
    """Number in this process's control group, by its limit or the machine's; None where it is not counted."""
    machine: int
    """Number on this machine, by the limit of a container or of the machine."""


def oom_kills() -> OomKills | None:
    """Read the kernel's counters; None where it does not count."""
    machine = _oom_counter(VMSTAT)
    return None if machine is None else OomKills(_group_oom_kills(), machine)


def _group_oom_kills() -> int | None:
    for folder, version in _own_groups("memory"):
        name = {2: "memory.events", 1: "memory.oom_control"}[version]
        for group in (folder, *folder.parents):
            # In a container the path may be that on the host; then the group is the topmost folder.
            if group.is_relative_to(CGROUP) and (count := _oom_counter(group / name)) is not None:
                return count
    return None


def _oom_counter(file: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
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


def describe_kill(code: int | None, kills_before: OomKills | None) -> str:
    """Return a sentence about a process that the kernel has killed for lack of memory; empty if another one did.

    Args:
        code: exit code, or minus the signal.
        kills_before: `oom_kills` shortly before.
    """
    kills = oom_kills()
    if code not in (-signal.SIGKILL, 128 + signal.SIGKILL) or kills is None or kills_before is None:
        return ""
    is_of_group = None not in (kills.group, kills_before.group) and kills.group != kills_before.group
    if not is_of_group and kills.machine <= kills_before.machine:
        return ""
    limit = memory_limit() if is_of_group else None
    scope = "of this machine" if limit is None else f"limit of {size(limit)}"
    return f"killed by the kernel (SIGKILL): the memory {scope} is used up"
