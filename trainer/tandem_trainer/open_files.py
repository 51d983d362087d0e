"""Files that a script has left open, closed before its process ends without taking the interpreter apart.

Python closes what is open when it ends, and so writes what is still in buffers. A rank that leaves with `os._exit`
would lose that: the last lines of a log, a whole small file. Rejected: taking the interpreter apart after all (seconds
with torch, and threads of gloo may abort the process meanwhile).
"""

import gc
import io
import os
import stat
import threading
from contextlib import suppress

CLOSE_SECONDS = 5.0
"""A pipe that nobody reads, or a disk that does not answer, keeps a rank for so long at most."""
WRAPS = ("buffer", "fileobj", "_fp")
"""Where a text file, a compressed one of gzip, and one of bz2 and lzma, keep what they write to."""


def close_files() -> None:
    """Close what is open for writing. Returns after CLOSE_SECONDS in any case."""
    outermost = _open_files()
    # Pipes and sockets may wait for who reads them. The files on a disk must not wait for that.
    kinds = [[one for one in outermost if _is_on_disk(one) == on_disk] for on_disk in (True, False)]
    threads = [threading.Thread(target=_close, args=(files,), daemon=True) for files in kinds if files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_SECONDS)


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
