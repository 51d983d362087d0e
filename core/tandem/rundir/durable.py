"""Durable, atomic file writes: write to a temporary file, fsync, rename, fsync the folder.

Works on local disks and on NFS; uses neither flock nor inotify, which NFS lacks. A file that is missing, or has another
size than expected, is a normal state of a shared disk for a reader, not an error.

Records are created by hard link, checkpoints are committed by rename, leases are acquired by exclusive creation, and
several ranks write one file at different offsets. Object stores that are mounted as a disk, and some cloud volumes,
lack one of these operations, and would fail in the middle of a run with an unspecific error: `unsupported_operation`
probes for them. It ignores a disk that is full, read-only or does not answer: that may pass within a minute.
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
"""Prefix of names that are not committed; readers skip them, and retention removes old ones."""

MAX_JSON_BYTES = 64 * 2**20
"""Maximum size of a JSON file that is read: none of ours comes near."""


def temporary_beside(path: Path) -> Path:
    """A unique temporary path in the same folder."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the content of a file durable that another process has written."""
    _sync(path)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary(path: Path, data: bytes, durable: bool) -> Path:
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def encode(value: object) -> bytes:
    """Encode JSON for the run directory: UTF-8, sorted keys, indented, with a newline at the end."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def replace_json(path: Path, value: object, durable: bool = True) -> None:
    """Write or replace a JSON file; readers see the old content or the new, never a mixture."""
    replace_bytes(path, encode(value), durable)


def replace_bytes(path: Path, data: bytes, durable: bool = True, mode: int | None = None) -> None:
    """Write or replace a file, with the permissions `mode` if given; readers see the old content or the new."""
    temporary = _write_temporary(path, data, durable)
    try:
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def create_json(path: Path, value: object, durable: bool = True) -> bool:
    """Create a JSON file that must not exist yet. Returns False, and changes nothing, if it does.

    A hard link is an exclusive create that never shows a half-written file, unlike O_EXCL. An NFS client that lost the
    response to its request sends it again, and then gets EEXIST for its own file: so the two files are compared.
    """
    temporary = _write_temporary(path, encode(value), durable)
    try:
        os.link(temporary, path)
    except FileExistsError:
        if not _is_same(temporary, path):
            return False
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)
    return True


def _is_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except FileNotFoundError:
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read it. Does not block on a pipe of that name.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no file, or a folder.
        ValueError: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError(f"{path} is no file")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file.

    Args:
        max_bytes: maximum size of the file in bytes.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is too large, or not JSON.
    """
    with open_regular(path) as file:
        # read() allocates as much as it is asked for, however small the file is.
        data = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None


def read_json_or_none(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; None if it is missing, too large, incomplete or damaged."""
    try:
        return read_json(path, max_bytes)
    except (OSError, ValueError):
        return None


def list_folder(folder: Path) -> list[Path]:
    """The paths in a folder, sorted by name; empty if the folder does not exist."""
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def commit_file(temporary: Path, final: Path) -> None:
    """Rename a complete temporary file to its final name, replacing an existing file. Durable on return."""
    sync_file(temporary)
    temporary.replace(final)
    sync_folder(final.parent)


def commit_folder(temporary: Path, final: Path) -> None:
    """Rename a complete, synced folder to its final name, which must never have been used.

    Raises:
        FileExistsError: the name is taken; nothing was changed.
    """
    if final.exists():  # rename would replace an empty folder without an error
        raise FileExistsError(f"{final} is already committed")
    for folder in [temporary, *(child for child in temporary.rglob("*") if child.is_dir())]:
        sync_folder(folder)
    try:
        temporary.rename(final)
    except OSError as error:
        if final.exists():
            raise FileExistsError(f"{final} is already committed") from error
        raise
    sync_folder(final.parent)


class Lines:
    """A JSON-lines log with one writer. A line torn by a crash is skipped by readers, and never joined to the next
    one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._torn = self._file.tell() > 0

    def append(self, *lines: bytes) -> None:
        """Append lines, without their line ends, with one write.

        Raises:
            OSError: the disk is full or gone; readers skip the torn line, and a later append starts a new one.
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


PERMANENT_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, gzip.BadGzipFile)
PERMANENT_ERRNOS = (errno.ELOOP, errno.ENAMETOOLONG, errno.EFBIG)


def is_transient(error: BaseException) -> bool:
    """Whether an error comes from the disk, the network or the machine, and may pass, and not from the file that was
    requested."""
    return (
        isinstance(error, OSError) and not isinstance(error, PERMANENT_ERRORS) and error.errno not in PERMANENT_ERRNOS
    )


UNSUPPORTED_ERRNOS = (
    *(errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EMLINK, errno.EBADF),
    # A file that was created a moment ago is missing, or has another type.
    *(errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ESPIPE),
)
"""Error numbers of a disk that lacks an operation. All others, such as those of a mount whose server is away, may
pass."""
PROBE_BYTES = 4096


def unsupported_operation(folder: Path) -> str:
    """Probe a disk for the operations that checkpoints need. Returns a sentence about the first missing one and what to
    do; empty if there is none, or if the disk cannot be probed."""
    place = folder / f"{TEMPORARY}probe-{secrets.token_hex(6)}"
    try:
        place.mkdir(parents=True)
    except OSError:
        return ""
    try:
        for operation, works in OPERATIONS.items():
            if not _is_supported(works, place):
                return (
                    f"the disk of the run directory {folder} does not support {operation}, which checkpoints need; use "
                    "a local disk, NFS or another POSIX file system"
                )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return ""


def _is_supported(works: Callable[[Path], bool], place: Path) -> bool:
    try:
        return works(place)
    except OSError as error:
        return error.errno not in UNSUPPORTED_ERRNOS


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
    (place / "temporary").mkdir()
    (place / "temporary" / "file").write_bytes(b"1")
    (place / "temporary").rename(place / "final")
    (place / "other").mkdir()
    with suppress(OSError):
        (place / "other").rename(place / "final")
        return False
    sync_folder(place)
    return (place / "final" / "file").read_bytes() == b"1" and not (place / "temporary").exists()


def _replacing_by_rename(place: Path) -> bool:
    (place / "old").write_bytes(b"old")
    (place / "new").write_bytes(b"new")
    (place / "new").replace(place / "old")
    return (place / "old").read_bytes() == b"new"


def _writing_at_offsets(place: Path) -> bool:
    descriptors = [os.open(place / "parts", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644) for _ in range(2)]
    try:
        os.pwrite(descriptors[1], b"2" * PROBE_BYTES, PROBE_BYTES)
        os.pwrite(descriptors[0], b"1" * PROBE_BYTES, 0)
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return (place / "parts").read_bytes() == b"1" * PROBE_BYTES + b"2" * PROBE_BYTES


OPERATIONS: dict[str, Callable[[Path], bool]] = {
    "hard links": _hard_links,
    "exclusive creation of files": _exclusive_creation,
    "renaming folders": _rename_of_folders,
    "replacing files by rename": _replacing_by_rename,
    "writing a file at different offsets": _writing_at_offsets,
}
"""The probes by the operation's name in the sentence of `unsupported_operation`."""
