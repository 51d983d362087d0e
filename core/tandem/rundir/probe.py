"""Whether a disk can do what a run directory asks of it: tried out, in a folder that is gone afterwards.

Records are made by hard link, checkpoints are committed by rename, leases by exclusive creation, and several ranks
write one file at different offsets. Object stores that are mounted as a disk, and some cloud volumes, lack one of
these, and then fail in the middle of a run with an error that says nothing. A disk that is full, read-only or does not
answer is none of this module's business: it may be another one a minute later.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.rundir.durable import TEMPORARY, sync_folder

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
