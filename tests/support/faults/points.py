"""Every step that this process takes on the disk is a numbered point, and a fault is played at one of them.

Python announces what it is about to do to files through audit events (PEP 578), whichever way it is asked: so opening,
making folders, renaming, unlinking, listing are seen without a list of the functions that the writer happens to use
today. Writing and syncing are not announced; the functions of `os` and the files of `io` that do it are replaced.

A point comes *before* its step. So a death at point N leaves what the N-1 steps before have done.

Rejected: strace's fault injection (not on every machine, and ptrace is forbidden in many containers), a preloaded
library (needs a compiler), a file system in user space (needs root and a module).
"""

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CREATE, WRITE, SYNC, MKDIR, LINK = "create", "write", "sync", "mkdir", "link"
RENAME, UNLINK, RMDIR, TOUCH, TRUNCATE, READ = "rename", "unlink", "rmdir", "touch", "truncate", "read"
GROWING = {CREATE, WRITE, MKDIR, LINK}
"""What a full disk refuses."""
CHANGING = GROWING | {SYNC, RENAME, UNLINK, RMDIR, TOUCH, TRUNCATE}
"""What a disk that has become read-only refuses, and after which a dead writer leaves something else than before."""

_AUDITED = {
    "os.mkdir": MKDIR,
    "os.link": LINK,
    "os.symlink": LINK,
    "os.rename": RENAME,
    "os.remove": UNLINK,
    "os.rmdir": RMDIR,
    "os.utime": TOUCH,
    "os.truncate": TRUNCATE,
    "os.listdir": READ,
    "os.scandir": READ,
}
_WRITING = ("write", "pwrite")
_SYNCING = ("fsync", "fdatasync")
_UNFORESEEN = ("writev", "pwritev", "sendfile", "copy_file_range", "posix_fallocate", "splice", "sync")
"""Other ways to write. A writer that takes one would slip through, so it is stopped: teach this module about it."""
_OPEN_TO_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when."""

    kind: str
    """`kill`; `torn` (half of what is written, then killed); `error` (this step fails); `failing` (this step and all
    later ones of the kinds in `refused`); `names`, `synced` (power cut) and `lost` (see tests.support.faults.power for
    these); `read-only` (the real file system is made so)."""
    point: int
    """Before which step, counted from 1."""
    number: int = 0
    """errno of the error."""
    refused: frozenset[str] = frozenset()
    """Kinds of steps that fail from there on."""


class Died(BaseException):
    """The fault could not be played; the machinery is broken."""


class Points:
    """Counts the steps below a folder, tells of each, and plays one fault.

    Args:
        root: only what happens below it counts.
        tell: called with kind and place of each step before it is taken; may wait, to let others go first.
        harm: changes what is on the disk as the fault of this kind does.
        remount: makes the file system read-only; False if it cannot be done at this point.
    """

    def __init__(
        self,
        root: Path,
        fault: Fault | None,
        tell: Callable[[str, str], None],
        harm: Callable[[str], None],
        remount: Callable[[], bool],
    ) -> None:
        self._root, self._fault, self._tell, self._harm, self._remount = str(root), fault, tell, harm, remount
        self._watching = False
        self._count = 0

    def install(self) -> None:
        """Watch this process from the next `watch` on; for good, so only in a process of its own."""
        sys.addaudithook(self._heard)
        for names, kind in ((_WRITING, WRITE), (_SYNCING, SYNC), (_UNFORESEEN, "")):
            for name in names:
                if hasattr(os, name):
                    setattr(os, name, self._watched(getattr(os, name), kind))
        io.open = builtins.open = self._opened(io.open)

    def watch(self, whether: bool) -> None:
        """Count from here on, or not any more."""
        self._watching = whether

    def paused(self, action: Callable[[], None]) -> None:
        """Do something that is no step of the writer."""
        before, self._watching = self._watching, False
        try:
            action()
        finally:
            self._watching = before

    def pass_one(self, kind: str, place: str) -> None:
        """A step is about to be taken.

        Raises:
            OSError: it fails.
        """
        # What is done to play a fault is no step of the writer.
        self._watching = False
        try:
            self._count += 1
            self._tell(kind, place)
            fault = self._fault
            if fault is None or self._count < fault.point:
                return
            if fault.kind == "read-only":
                if self._remount():
                    self._fault = None
            elif self._count == fault.point or (fault.kind == "failing" and kind in fault.refused):
                self._play(fault)
        finally:
            self._watching = True

    def _play(self, fault: Fault) -> None:
        if fault.kind in ("error", "failing"):
            raise OSError(fault.number, os.strerror(fault.number))
        if fault.kind in ("names", "synced", "lost"):
            self._harm(fault.kind)
        if fault.kind not in ("torn", "lost"):
            die()

    def _write(self, place: str, half: Callable[[], Any]) -> None:
        """Something is about to be written; a fault in the middle of it leaves half of it behind."""
        try:
            self.pass_one(WRITE, place)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                half()
            raise
        fault = self._fault
        if fault is not None and fault.kind == "torn" and self._count == fault.point:
            half()
            die()

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            path, mode, flags = arguments
            changes = flags & _OPEN_TO_CHANGE if isinstance(flags, int) else mode not in (None, "r", "rb")
            self._maybe(CREATE if changes else READ, path)
        elif event in _AUDITED:
            self._maybe(_AUDITED[event], arguments[0])

    def _maybe(self, kind: str, path: object) -> None:
        # A folder's descriptor, or a name beside one, is shutil's way through a folder that it deletes.
        if isinstance(path, int):
            place = f"<{path}>"
        else:
            place = os.fsdecode(path)  # type: ignore[arg-type]
            if place.startswith("/") and not place.startswith(self._root):
                return
        self.pass_one(kind, place)

    def _watched(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def step(descriptor: int, *arguments: Any) -> Any:
            if not self._watching:
                return original(descriptor, *arguments)
            if not kind:
                raise Died(f"{original.__name__} is not watched")
            if kind == SYNC:
                self.pass_one(kind, f"<{descriptor}>")
            else:
                content, *rest = arguments
                self._write(f"<{descriptor}>", lambda: original(descriptor, content[: len(content) // 2], *rest))
            return original(descriptor, *arguments)

        return step

    def _opened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        points = self

        class Watched(io.FileIO):
            """A file whose writes are points."""

            def write(self, content: Any) -> int:
                if not points._watching:
                    return super().write(content)
                points._write(str(self.name), lambda: super(Watched, self).write(content[: len(content) // 2]))
                return super().write(content)

        def step(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
            if not points._watching or "b" not in mode or not set(mode) & set("wxa+") or isinstance(file, int):
                return original(file, mode, buffering, *arguments, **options)
            raw = Watched(file, mode.replace("b", ""))
            return raw if buffering == 0 else io.BufferedWriter(raw)

        return step


def die() -> None:
    """As if the power of the process were gone: nothing is flushed, closed or cleared up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise Died("still alive")
