"""Durable, atomic file writes: write to a temporary file, fsync, rename, fsync the folder.

Works on local disks and on NFS; uses neither flock nor inotify, which NFS lacks. A reader that does not find a file, or
finds one of another size than it hoped for, has met a normal moment of a shared disk, not an error.

Records are made by hard link, checkpoints are committed by rename, leases by exclusive creation, and several ranks
write one file at different offsets. Object stores that are mounted as a disk, and some cloud volumes, lack one of
these, and then fail in the middle of a run with an error that says nothing. A disk that is full, read-only or does not
answer is none of this module's business: it may be another one a minute later.
"""

import errno
import gzip
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = ".tmp-"
"""Prefix of names that are not committed; readers pass over them, and retention removes old ones."""

MAX_JSON_BYTES = 64 * 2**20
"""Refuse to read a JSON file larger than this: nothing of ours comes near."""


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that nobody else uses."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable that somebody else has written."""
    _sync(path)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_aside(path: Path, data: bytes, durable: bool) -> Path:
    aside = temporary_beside(path)
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    return aside


def encode(value: object) -> bytes:
    """JSON as it stands in the run directory: UTF-8, sorted keys, indented, a newline at the end."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def replace_json(path: Path, value: object, durable: bool = True) -> None:
    """Write or replace a JSON file; readers see the old content or the new, nothing between."""
    aside = _write_aside(path, encode(value), durable)
    try:
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def create_json(path: Path, value: object, durable: bool = True) -> bool:
    """Create a JSON file that must not exist yet. Returns False, and changes nothing, if it does.

    A hard link is the exclusive create that also never shows a half-written file; O_EXCL alone would. An NFS client
    that lost the answer to its request sends it again and is then told that the file exists, though it is its own: so
    the two are compared.
    """
    aside = _write_aside(path, encode(value), durable)
    try:
        os.link(aside, path)
    except FileExistsError:
        if not _is_same(aside, path):
            return False
    finally:
        aside.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)
    return True


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Does not wait for who writes into a pipe that has its name.

    Raises:
        FileNotFoundError, IsADirectoryError: there is none, or a folder.
        ValueError: it is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError(f"{path} is no file")


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file.

    Args:
        most: bytes that it may have.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is too large, or not JSON.
    """
    with open_regular(path) as file:
        # As much is taken from memory as is asked for, however little there is.
        data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    if len(data) > most:
        raise ValueError(f"{path} is larger than {most} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def read_json_or_none(path: Path, most: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file that may be missing, too large, half gone or garbage; None then."""
    try:
        return read_json(path, most)
    except (OSError, ValueError):
        return None


def listed(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing if the folder is not there."""
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def commit_file(aside: Path, final: Path) -> None:
    """Give a complete file its name, replacing what is there. On the disk when this returns."""
    sync_file(aside)
    aside.replace(final)
    sync_folder(final.parent)


def commit_folder(aside: Path, final: Path) -> None:
    """Give a complete, synced folder its name, which must never have been used.

    Raises:
        FileExistsError: the name is taken; nothing was changed.
    """
    if final.exists():  # rename would quietly replace an empty folder
        raise FileExistsError(f"{final} is already committed")
    for folder in [aside, *(child for child in aside.rglob("*") if child.is_dir())]:
        sync_folder(folder)
    try:
        aside.rename(final)
    except OSError as error:
        if final.exists():
            raise FileExistsError(f"{final} is already committed") from error
        raise
    sync_folder(final.parent)


class Lines:
    """A JSON-lines log with one writer. A line torn by a crash is passed over, and never joined to the next one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._torn = self._file.tell() > 0

    def append(self, *lines: bytes) -> None:
        """Append lines, given without their ends, with one write.

        Raises:
            OSError: the disk is full or gone; what was torn is passed over by readers, and a later append stands alone.
        """
        data = b"".join(line + b"\n" for line in lines)
        if self._torn:
            data = b"\n" + data
        self._torn = True
        written = self._file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be appended", self._file.name)
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, gzip.BadGzipFile)
LASTING_NUMBERS = (errno.ELOOP, errno.ENAMETOOLONG)


def may_pass(error: BaseException) -> bool:
    """Whether it is of the disk, the network or the machine, and not of the file that was asked for."""
    return isinstance(error, OSError) and not isinstance(error, LASTING) and error.errno not in LASTING_NUMBERS


UNABLE = (
    *(errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EMLINK, errno.EBADF),
    # What was made a moment ago is not there, or has become something else.
    *(errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ESPIPE),
)
"""What a disk says that lacks something. All else, as of a mount whose server is away, it may say for a while only."""
HALF = 4096


def lacks(folder: Path) -> str:
    """What a disk cannot do, as a sentence with what to do about it; empty if it can do everything, or says nothing."""
    place = folder / f"{TEMPORARY}probe-{secrets.token_hex(6)}"
    try:
        place.mkdir(parents=True)
    except OSError:
        return ""
    try:
        for what, can in ABILITIES.items():
            if not _is_able(can, place):
                return (
                    f"the disk of the run directory {folder} has no {what}, which checkpoints need; take a local disk, "
                    "NFS or another file system of POSIX"
                )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return ""


def _is_able(can: Callable[[Path], bool], place: Path) -> bool:
    try:
        return can(place)
    except OSError as error:
        return error.errno not in UNABLE


def _hard_links(place: Path) -> bool:
    (place / "linked").write_bytes(b"1")
    os.link(place / "linked", place / "link")
    with suppress(FileExistsError):
        os.link(place / "linked", place / "link")
        return False
    return (place / "link").read_bytes() == b"1"


def _exclusive_creation(place: Path) -> bool:
    (place / "exclusive").open("xb").close()
    with suppress(FileExistsError):
        (place / "exclusive").open("xb").close()
        return False
    return True


def _rename_of_folders(place: Path) -> bool:
    (place / "aside").mkdir()
    (place / "aside" / "file").write_bytes(b"1")
    (place / "aside").rename(place / "final")
    (place / "other").mkdir()
    with suppress(OSError):
        (place / "other").rename(place / "final")
        return False
    sync_folder(place)
    return (place / "final" / "file").read_bytes() == b"1" and not (place / "aside").exists()


def _replacing_by_rename(place: Path) -> bool:
    (place / "old").write_bytes(b"old")
    (place / "new").write_bytes(b"new")
    (place / "new").replace(place / "old")
    return (place / "old").read_bytes() == b"new"


def _writing_at_offsets(place: Path) -> bool:
    descriptors = [os.open(place / "parts", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644) for _ in range(2)]
    try:
        os.pwrite(descriptors[1], b"2" * HALF, HALF)
        os.pwrite(descriptors[0], b"1" * HALF, 0)
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return (place / "parts").read_bytes() == b"1" * HALF + b"2" * HALF


ABILITIES: dict[str, Callable[[Path], bool]] = {
    "hard links": _hard_links,
    "exclusive creation of files": _exclusive_creation,
    "rename of folders": _rename_of_folders,
    "replacing of files by rename": _replacing_by_rename,
    "writing of a file in parts": _writing_at_offsets,
}
"""In the words of the sentence."""
