"""Closes files that a script left open, before its process exits without finalizing the interpreter.

Python closes open files when it ends, and so writes their buffers. A rank that leaves with `os._exit` would lose the
last lines of a log, a whole small file, the directory of a zip archive, the output of C code. It would also leave
temporary files behind that Python deletes. Rejected: taking the interpreter apart after all (seconds
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
import weakref
from contextlib import suppress
from itertools import compress
from typing import Any

CLOSE_SECONDS = 5.0
"""Maximum time that a pipe without a reader, or a disk that does not answer, delays the exit, in seconds."""
WRAPS = ("buffer", "fileobj", "_fp")
"""Attributes in which a text file, a compressed file of gzip, and one of bz2 and lzma hold the file below them."""
OWNERS = (("zipfile", "ZipFile"), ("shelve", "Shelf"), ("tempfile", "_TemporaryFileWrapper"))
"""Classes of objects that own a file and do more than close it when they are closed: they are closed first."""


_noted: list[weakref.ref[Any]] = []
"""Files, and owners of files, among the objects that `freeze` has exempted from garbage collections."""
_marker: list[object] | None = None
"""Object that was made after the last `freeze`."""


def freeze() -> None:
    """Exempt all objects that exist from garbage collections, which would copy pages that processes share, and note
    which of them are files.

    `close_files` then looks at what is newer. With torch there are half a million older objects: a rank that looked at
    each of them at its end took a second of a processor for it, and a copy of the pages that it shares with the others.
    """
    global _marker
    _noted.extend(weakref.ref(file) for file in _instances((io.IOBase, *_owners())))
    gc.freeze()
    _marker = []


def close_files() -> None:
    """Close all files that are open for writing. Returns after twice CLOSE_SECONDS in any case."""
    if _marker is not None and not any(candidate is _marker for candidate in gc.get_objects()):
        # The script has exempted its own objects, too.
        gc.unfreeze()
    _in_time([threading.Thread(target=_close_owners, daemon=True), threading.Thread(target=_flush_c, daemon=True)])
    outermost = _open_files()
    # Pipes and sockets may wait for their readers. Files on a disk must not wait for that.
    kinds = [[file for file in outermost if _is_on_disk(file) == on_disk] for on_disk in (True, False)]
    _in_time([threading.Thread(target=_close, args=(files,), daemon=True) for files in kinds if files])


def _in_time(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _close_owners() -> None:
    for owner in _all_of(_owners()):
        with suppress(Exception):
            owner.close()


def _owners() -> tuple[type, ...]:
    return tuple(kind for module, name in OWNERS if (kind := getattr(sys.modules.get(module), name, None)) is not None)


def _flush_c() -> None:
    """Flush the buffers of C's own files, such as the output of a library's printf."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _open_files() -> list[io.IOBase]:
    """Return the outermost file of each stack of files that is open for writing and has a buffer."""
    files = _all_of((io.IOBase,))
    inner = {id(layer) for file in files for layer in _layers(file)[1:]}
    return [file for file in files if id(file) not in inner and _is_written(file)]


def _all_of(kinds: tuple[type, ...]) -> list[Any]:
    """Return all objects of some classes, those that were noted first."""
    noted = [file for reference in _noted if (file := reference()) is not None and issubclass(type(file), kinds)]
    numbers = {id(file) for file in noted}
    return noted + [file for file in _instances(kinds) if id(file) not in numbers]


def _instances(kinds: tuple[type, ...]) -> list[Any]:
    """Return the objects of some classes that garbage collections look at."""
    # Check the type only, and each type once: some modules hold objects that import what they stand for when they are
    # touched, and a metaclass may define how its classes compare.
    objects = gc.get_objects()
    types = dict(zip(map(id, map(type, objects)), map(type, objects), strict=True))
    matching = {number for number, kind in types.items() if issubclass(kind, kinds)}
    return list(compress(objects, map(matching.__contains__, map(id, map(type, objects)))))


def _layers(file: object) -> list[io.IOBase]:
    """Return a file and the files below it, the outermost first."""
    layers: list[io.IOBase] = []
    while isinstance(file, io.IOBase) and all(file is not layer for layer in layers):
        layers.append(file)
        file = next((inner for name in WRAPS if (inner := _attribute(file, name)) is not None), None)
    return layers


def _attribute(file: io.IOBase, name: str) -> object:
    # A detached or closed file raises.
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
