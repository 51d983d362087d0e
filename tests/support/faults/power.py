"""What a disk holds after a power cut, in the two worst cases that POSIX allows for what was not synced.

  names    every name is there, as in a journal that was written at the last moment, but of each file only what its
           last fsync saw; the rest reads as zeros
  synced   a file's bytes, and the names in a folder, are those of the last fsync of this file, of this folder

So a missing fsync shows, without a disk that loses power. Not covered: folders of which one was written at the last
moment and another was not; journals keep the order of names. A disk that lies about having synced is played by `lose`.
"""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.rundir.durable import TEMPORARY

CASES = ("names", "synced")


def lose(folder: Path) -> None:
    """Take the last byte from every large file of a save below a folder: the disk had said that it was written."""
    for path in folder.glob(f"{TEMPORARY}*/**/*.safetensors"):
        os.truncate(path, path.stat().st_size - 1)


class Disk:
    """Remembers what was synced below a folder. What is there when it is made counts as synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        # An open file's number is not given to another one.
        self._held: list[int] = []
        for folder, _, files in os.walk(root):
            self._remember(self._hold(folder))
            for name in files:
                self._remember(self._hold(Path(folder, name)))

    def install(self, paused: Callable[[Callable[[], None]], None]) -> None:
        """See what this process syncs and makes from now on; for good, so only in a process of its own.

        Args:
            paused: runs something that is no step of the writer.
        """
        sync, mkdir, open_ = os.fsync, os.mkdir, os.open

        def synced(descriptor: int) -> None:
            sync(descriptor)
            paused(lambda: self._held.append(os.dup(descriptor)))
            paused(lambda: self._remember(descriptor))

        def made(path: Any, *arguments: Any, **options: Any) -> None:
            mkdir(path, *arguments, **options)
            paused(lambda: self._held.append(os.open(path, os.O_RDONLY)))

        def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            descriptor = open_(path, flags, *arguments, **options)
            if flags & os.O_CREAT:
                paused(lambda: self._held.append(os.dup(descriptor)))
            return descriptor

        os.fsync, os.mkdir, os.open = synced, made, opened

    def cut(self, case: str) -> None:
        """Leave below the folder what a power cut would leave."""
        after = self._root.with_name(f"{self._root.name}.after")
        if case == "names":
            self._as_named(self._root, after)
        else:
            self._as_synced(self._root.stat().st_ino, after)
        shutil.rmtree(self._root)
        after.rename(self._root)

    def _as_named(self, source: Path, target: Path) -> None:
        target.mkdir()
        for path in source.iterdir():
            if path.is_dir():
                self._as_named(path, target / path.name)
            else:
                facts = path.stat()
                synced = self._contents.get(facts.st_ino, b"")
                (target / path.name).write_bytes(synced[: facts.st_size].ljust(facts.st_size, b"\0"))

    def _as_synced(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, child in self._names.get(number, {}).items():
            # A folder that was never synced is empty, but it is no file.
            if child < 0:
                self._as_synced(-child, target / name)
            else:
                (target / name).write_bytes(self._contents.get(child, b""))

    def _hold(self, path: Any) -> int:
        self._held.append(os.open(path, os.O_RDONLY))
        return self._held[-1]

    def _remember(self, descriptor: int) -> None:
        """A folder's names with the numbers of what they name, those of folders negative; or a file's bytes."""
        facts = os.fstat(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            self._names[facts.st_ino] = {}
            for name in os.listdir(descriptor):
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                number = -found.st_ino if stat.S_ISDIR(found.st_mode) else found.st_ino
                self._names[facts.st_ino][name] = number
        else:
            # Through another descriptor: this one may be for writing alone.
            self._contents[facts.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
