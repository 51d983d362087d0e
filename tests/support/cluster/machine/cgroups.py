"""The control groups of the nodes: one tree for each node, in which its kubelet puts the pods.

On cgroup v1 a node has a group in every hierarchy, on v2 in the only one.
"""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
PREFIX = "tandem-cluster-"
KILL_SECONDS = 10.0


def group(node: str) -> str:
    """The name of a node's group; the pattern of all nodes' groups for `*`."""
    return PREFIX + node


def make(node: str) -> None:
    """Make a node's groups."""
    for hierarchy in hierarchies():
        folder = hierarchy / group(node)
        folder.mkdir(exist_ok=True)
        if hierarchy == ROOT:
            controllers = (ROOT / "cgroup.controllers").read_text().split()
            (ROOT / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in controllers))
        # A new cpuset of cgroup v1 is empty, and takes no process until it is filled.
        if hierarchy.name == "cpuset":
            for item in ("cpuset.cpus", "cpuset.mems"):
                (folder / item).write_text((hierarchy / item).read_text())


def kill(pattern: str) -> None:
    """End every process in the groups of such a name (`*` for any characters) with SIGKILL.

    Raises:
        TimeoutError: some do not end.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while processes := list(_processes(pattern)):
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"these processes of {pattern} do not end: {processes}")
        time.sleep(0.05)


def remove() -> None:
    """Remove the groups of all nodes; nothing runs in them any more."""
    for hierarchy in hierarchies():
        for top in hierarchy.glob(group("*")):
            folders = [path for path in top.rglob("*") if path.is_dir()]
            for folder in sorted([top, *folders], reverse=True):
                _remove(folder)


def hierarchies() -> Iterator[Path]:
    """Where groups can be made. A controller may be mounted under two names: each of its groups is there once."""
    if (ROOT / "cgroup.controllers").exists():
        yield ROOT
        return
    for path in sorted(ROOT.iterdir()):
        if path.is_dir() and not path.is_symlink() and (path / "cgroup.procs").exists():
            yield path


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        try:
            folder.rmdir()
            return
        except OSError as error:
            # The last threads of a process that has ended may still be there for a moment.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _processes(pattern: str) -> Iterator[psutil.Process]:
    for hierarchy in hierarchies():
        for members in hierarchy.glob(f"{pattern}/**/cgroup.procs"):
            try:
                pids = members.read_text().split()
            except OSError:  # the group went away meanwhile
                continue
            for pid in pids:
                try:
                    process = psutil.Process(int(pid))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield process
                except psutil.NoSuchProcess:
                    pass
