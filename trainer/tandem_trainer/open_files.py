"""Closes files that a script left open, before its process exits without finalizing the interpreter.

Python closes what is open when it ends, and so writes what is still in buffers. A rank that leaves with `os._exit`
would lose that: the last lines of a log, a whole small file, the directory of a zip archive, what C has printed. It
would also leave temporary files behind that Python deletes. Rejected: taking the interpreter apart after all (seconds
with torch, and threads of gloo may abort the process meanwhile).
"""

import ctypes
import gc
import io
import os
import stat
import sys
import threading
import time
from contextlib import suppress

CLOSE_SECONDS = 5.0
"""A pipe that nobody reads, or a disk that does not answer, keeps a rank for so long at most."""
WRAPS = ("buffer", "fileobj", "_fp")
"""Where a text file, a compressed one of gzip, and one of bz2 and lzma, keep what they write to."""
OWNERS = (("zipfile", "ZipFile"), ("shelve", "Shelf"), ("tempfile", "_TemporaryFileWrapper"))
"""What is no file, has one, and does more than close it when it is closed: it goes first."""


def close_files() -> None:
    """Close what is open for writing. Returns after twice CLOSE_SECONDS in any case."""
    _in_time([threading.Thread(target=_close_owners, daemon=True), threading.Thread(target=_flush_c, daemon=True)])
    outermost = _open_files()
    # Pipes and sockets may wait for who reads them. The files on a disk must not wait for that.
    kinds = [[one for one in outermost if _is_on_disk(one) == on_disk] for on_disk in (True, False)]
    _in_time([threading.Thread(target=_close, args=(files,), daemon=True) for files in kinds if files])


def _in_time(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _close_owners() -> None:
    kinds = tuple(kind for module, name in OWNERS if (kind := getattr(sys.modules.get(module), name, None)) is not None)
    for owner in [one for one in gc.get_objects() if issubclass(type(one), kinds)]:
        with suppress(Exception):
            owner.close()


def _flush_c() -> None:
    """Write what is in the buffers of C's own files, such as what a library has printed with printf."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _open_files() -> list[io.IOBase]:
    """The outermost file of each that is open for writing and has a buffer."""
    # The type alone is asked: some modules put objects there that import what they stand for when they are touched.
    found: list[io.IOBase] = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase)]
    inner = {id(layer) for one in found for layer in _layers(one)[1:]}
    return [one for one in found if id(one) not in inner and _is_written(one)]


def _layers(file: object) -> list[io.IOBase]:
    """A file and those that it writes to, the outermost first."""
    found: list[io.IOBase] = []
    while isinstance(file, io.IOBase) and all(file is not one for one in found):
        found.append(file)
        file = next((inside for name in WRAPS if (inside := _attribute(file, name)) is not None), None)
    return found


def _attribute(file: io.IOBase, name: str) -> object:
    # What was detached or closed raises.
    with suppress(Exception):
        return getattr(file, name, None)
    return None


def _is_written(file: io.IOBase) -> bool:
    with suppress(Exception):
        is_standard = file.fileno() <= 2
        return not (is_standard or isinstance(file, io.RawIOBase) or file.closed) and file.writable()
    return False


def _is_on_disk(file: io.IOBase) -> bool:
    with suppress(Exception):
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    return False


def _close(files: list[io.IOBase]) -> None:
    for file in files:
        for layer in _layers(file):
            with suppress(Exception):
                layer.close()
