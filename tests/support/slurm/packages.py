"""Debian's SLURM, unpacked into a folder of the cache: nothing is installed.

What apt would install for the controller, the node daemon, the commands and the accounting is downloaded with apt's own
client and unpacked with dpkg-deb. Where apt has no lists yet, as in a new container, they are fetched first.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem" / "slurm"
WANTED = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "mariadb-server-core")
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")


class NoSlurm(Exception):  # noqa: N818 - it is what is the case
    """SLURM cannot be had here, and why."""


def unpacked() -> Path:
    """The folder with SLURM's files, as they would lie below `/`.

    Raises:
        NoSlurm: this is no Debian, nobody's root, or apt cannot reach its archive.
    """
    if os.geteuid() != 0:
        raise NoSlurm("slurmd runs the jobs of others, so it needs root")
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NoSlurm("there is no apt-get: this is no Debian")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # What is unpacked depends on what is installed, and that changes with the image of the machine.
        packages = _packages()
        folder = CACHE / hashlib.sha256(repr(packages).encode()).hexdigest()[:16]
        if not folder.exists():
            _unpack(packages, folder)
        return folder


def _packages() -> list[str]:
    """What apt would install, as `name=version`."""
    words = ["apt-get", "install", "--simulate", "--no-install-recommends", "--quiet", *WANTED]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        _run(["apt-get", "update", "--quiet"])
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoSlurm(f"apt has no {' '.join(WANTED)}: {done.stderr.strip()[-300:]}")
    return sorted(
        "=".join(found) for found in re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", done.stdout, re.MULTILINE)
    )


def _unpack(packages: list[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        place = Path(temporary)
        try:
            _run(["apt-get", "download", "--quiet", *packages], place)
        except NoSlurm:
            # The lists are older than the archive.
            _run(["apt-get", "update", "--quiet"])
            _run(["apt-get", "download", "--quiet", *packages], place)
        whole = place / "root"
        for package in place.glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(whole)])
        whole.rename(folder)


def _run(words: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoSlurm(f"{' '.join(words[:2])}: {done.stderr.strip()[-300:]}")
