"""A file of a disk that fails."""

from pathlib import Path


def unreadable(path: Path) -> Path:
    """Make a file that is there and whose bytes are answered with EIO, as those of a bad disk or mount are."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")
    return path
