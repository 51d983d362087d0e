"""Copies of a file or folder that another process may overwrite at any time: a whole copy, or none.

Nobody can ask a script to stop writing. So each file is compared with itself: inode, size, time of the last change of
content (mtime) and of anything (ctime) after it was opened, between two chunks, and once more when everything is
copied. A write during the copy changes ctime, also one that sets mtime back (`rsync --times`). Each comparison opens
the file, because an NFS client asks the server for these values only then. A writer that maps the file into memory may
change it without changing a time at once; no known library saves like that.

A file system with reflinks (XFS, Btrfs, bcachefs) shares the blocks until one side writes: FICLONE takes no time and no
space, and no write comes in between. Elsewhere `copy_file_range` or `sendfile` copies the bytes inside the kernel.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tandem.rundir.durable import UNSUPPORTED_ERRNOS, open_regular, sync_folder

FICLONE = 0x40049409
"""Request of ioctl(2) that lets a file share the blocks of another."""
CHUNK_BYTES = 8 * 2**20
"""Number of bytes that are copied between two comparisons."""
_UNSUPPORTED = {*UNSUPPORTED_ERRNOS, errno.ENOTTY}

Stamp = tuple[int, int, int, int]


class SourceChanged(Exception):  # noqa: N818 - a state of the source
    """The source was written to during the copy."""


def copy(source: Path, target: Path, proceed: Callable[[], None] = lambda: None) -> None:
    """Copy a file, or a folder with everything below it, with the times of its files. Durable on return.

    Args:
        target: path of the copy, which must not exist.
        proceed: called before each chunk.

    Raises:
        SourceChanged: something was written meanwhile. Part of a copy is left at `target`.
        OSError: it cannot be read or written, or is not a file, for instance a pipe. Part of a copy is left there, too.
    """
    stamps: dict[Path, Stamp] = {}
    _copy(source, target, stamps, proceed)
    for path, stamp in stamps.items():
        if _stamp_of(path) != stamp:
            raise SourceChanged(path)


def _copy(source: Path, target: Path, stamps: dict[Path, Stamp], proceed: Callable[[], None]) -> None:
    if not source.is_dir():
        stamps[source] = _copy_file(source, target, proceed)
        return
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            inside = target / entry.name
            if entry.is_symlink():
                inside.symlink_to(Path(entry.path).readlink())
                times = entry.stat(follow_symlinks=False)
                os.utime(inside, ns=(times.st_atime_ns, times.st_mtime_ns), follow_symlinks=False)
            else:
                _copy(Path(entry.path), inside, stamps, proceed)
    sync_folder(target)


def _copy_file(source: Path, target: Path, proceed: Callable[[], None]) -> Stamp:
    """Copy a file. Returns the stamp that it had."""
    with _opened(source) as file, target.open("xb") as copied:
        before = os.fstat(file.fileno())
        position = before.st_size if _shares_blocks(file.fileno(), copied.fileno()) else 0
        while position < before.st_size:
            proceed()
            count = _copy_chunk(file.fileno(), copied.fileno(), min(CHUNK_BYTES, before.st_size - position))
            if count == 0 or _stamp(os.fstat(file.fileno())) != _stamp(before):
                raise SourceChanged(source)
            position += count
        os.utime(copied.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        os.fsync(copied.fileno())
    return _stamp(before)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, "not a file", str(path)) from error


def _shares_blocks(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def _copy_chunk(source: int, target: int, length: int) -> int:
    try:
        return os.copy_file_range(source, target, length)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return os.sendfile(target, source, None, length)


def _stamp_of(path: Path) -> Stamp | None:
    """The stamp of a file as the server of its disk has it now; None if it is gone."""
    try:
        with _opened(path) as file:
            return _stamp(os.fstat(file.fileno()))
    except FileNotFoundError:
        return None


def _stamp(facts: os.stat_result) -> Stamp:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
