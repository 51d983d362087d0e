"""A small file system of its own, which can be filled, and a file of a disk that fails."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs for a while. It needs a root that may mount.

    Args:
        options: of mount, such as `size=4m`.
    """
    words = ["mount", "-t", "tmpfs", "-o", options, "tandem-faults", folder]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        pytest.skip(f"needs a root that may mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=10)


def fill(disk: Path, pages: int = 0) -> Path:
    """Leave so many pages free; returns the file that takes the rest. Once more, it takes what was freed meanwhile."""
    ballast, facts = disk / BALLAST, os.statvfs(disk)
    with ballast.open("ab") as file:
        if (more := facts.f_bavail - pages) > 0:
            os.posix_fallocate(file.fileno(), file.tell(), more * facts.f_frsize)
    return ballast


def unreadable(path: Path) -> Path:
    """Make a file that is there and whose bytes are answered with EIO, as those of a bad disk or mount are."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")
    return path
