"""What nodes change on the machine outside of the cluster's folder, and how it is put back once nothing runs."""

import json
import shutil
import subprocess
from pathlib import Path

import psutil

from tests.support.cluster.machine.places import STATE

SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What a kubelet sets for the whole machine."""
VOLUMES = Path("/tmp/hostpath_pv")
"""Where the host-path provisioner makes volumes. It is built in."""
LOG_LINKS = Path("/var/log/containers")
"""Where a kubelet links the log of each container. It is built in."""
_NOTE = "before.json"


def remember() -> None:
    """Note how the machine is before the first node starts."""
    settings = {name: _sysctl(name).read_text().strip() for name in SYSCTLS if _sysctl(name).exists()}
    volumes = [path.name for path in VOLUMES.glob("*")]
    (STATE / _NOTE).write_text(json.dumps({"sysctls": settings, "volumes": volumes}))


def remove() -> None:
    """Put everything back: mounts, sockets, links, volumes, settings."""
    for mount in reversed(psutil.disk_partitions(all=True)):
        if mount.mountpoint.startswith(f"{STATE}/"):
            # Lazy, because a mount may hold others that this process does not see.
            subprocess.run(["umount", "--lazy", mount.mountpoint], check=True)
    for node in STATE.glob("node-*/"):
        remove_sockets(node)
    for link in LOG_LINKS.glob("*.log"):
        if link.is_symlink() and link.readlink().is_relative_to(STATE):
            link.unlink()
    note = STATE / _NOTE
    if note.exists():
        _restore(json.loads(note.read_text()))


def remove_sockets(node: Path) -> None:
    """Remove the sockets of a node's containers, given its folder: each of containerd's shims listens in a folder that
    is built in, and notes the address. To be done when nothing of the node runs, and before its containerd, which would
    drop the notes of shims that are gone, starts again."""
    for note in node.glob("run/*/*/*/address"):
        Path(note.read_text().removeprefix("unix://")).unlink(missing_ok=True)


def _restore(before: dict[str, dict[str, str] | list[str]]) -> None:
    for path in VOLUMES.glob("*"):
        if path.name not in before["volumes"]:
            shutil.rmtree(path)
    if VOLUMES.is_dir() and not any(VOLUMES.iterdir()):
        VOLUMES.rmdir()
    settings = before["sysctls"]
    assert isinstance(settings, dict)
    for name, value in settings.items():
        if _sysctl(name).read_text().strip() != value:
            _sysctl(name).write_text(value)


def _sysctl(name: str) -> Path:
    return Path("/proc/sys", name)
