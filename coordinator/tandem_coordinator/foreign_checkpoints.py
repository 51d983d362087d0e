"""Detects checkpoints that scripts write themselves, by the file names that frameworks use.

Only the time of the newest one matters: shortly after it, a group that grows loses next to nothing (see `closing`). A
file counts once it has stayed the same from one search to the next, because until then it may be incomplete. Only the
run directory is searched, two folders deep and up to a limit of entries: it may hold anything, on a slow disk.
"""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 1.0
"""Time between two searches, in seconds; each of them lists folders."""
MAX_DEPTH = 2
"""Levels of folders below the run directory that are searched."""
MAX_ENTRIES = 2_000
"""Maximum number of entries that are examined."""

_FILE = re.compile(
    r"\.(pt|pth|ckpt|safetensors|distcp|bin|npz|msgpack|h5|tar|pkl|pickle)$|"
    r"(^|[^a-z])(ckpt|checkpoint|snapshot)[^.]*\.(txt|json|yaml|csv)$",
    re.ASCII | re.IGNORECASE,
)
"""File names of checkpoints of torch, transformers, Lightning, DeepSpeed, torch.distributed.checkpoint and others, and
of scripts that record their progress."""
_MAX_NAME_LENGTH = 256
"""Maximum length of a checkpoint's name, in characters."""


class ForeignCheckpoints:
    """The newest checkpoint of another kind in a folder. Used by one thread.

    Args:
        folder: the run directory.
        excluded: names in it that hold nothing of the script's.
    """

    def __init__(self, folder: Path, excluded: frozenset[str]) -> None:
        self._folder, self._excluded = folder, excluded
        self._polled_at = float("-inf")
        self._candidate: tuple[int, str] | None = None
        self._newest: tuple[int, str] | None = None

    @property
    def candidate(self) -> tuple[int, str] | None:
        """The newest checkpoint at the last search, whether it is still being written or not."""
        return self._candidate

    @property
    def polled_at(self) -> float:
        """Start of the last search, on the monotonic clock."""
        return self._polled_at

    def poll(self) -> tuple[int, str] | None:
        """Find the newest checkpoint; returns its modification time, in nanoseconds of the disk's clock, and its path
        in the folder. None if there is none."""
        now = time.monotonic()
        if now - self._polled_at < POLL_SECONDS:
            return self._newest
        self._polled_at = now
        newest = max(self._all(), default=None)
        if newest == self._candidate:
            self._newest = newest
        self._candidate = newest
        return self._newest

    def _all(self) -> Iterator[tuple[int, str]]:
        remaining = MAX_ENTRIES
        folders = [(self._folder, 0)]
        while folders:
            folder, depth = folders.pop()
            # A folder may be gone, or somebody else's.
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    remaining -= 1
                    if remaining < 0:
                        return
                    if (depth == 0 and entry.name in self._excluded) or len(entry.name) > _MAX_NAME_LENGTH:
                        continue
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                            folders.append((Path(entry.path), depth + 1))
                        elif stat.S_ISREG(status.st_mode) and status.st_size and _FILE.search(entry.name):
                            yield status.st_mtime_ns, os.path.relpath(entry.path, self._folder)
