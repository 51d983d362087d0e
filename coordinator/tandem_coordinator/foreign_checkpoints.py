"""Detects checkpoints that scripts write themselves, by the file names that frameworks use.

Only when the newest one was written matters: shortly after it, a group that grows loses next to nothing (see
`forming`). A file counts once it has stayed the same from one look to the next, because until then it may be half
written. Only the run directory is looked at, two folders deep and within a limit of entries: it may hold anything, on a
disk that is slow.
"""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 1.0
"""Between two looks, each of which lists folders."""
DEPTH = 2
"""Folders within folders of the run directory."""
MAX_ENTRIES = 2_000
"""So many are looked at."""

_FILE = re.compile(
    r"\.(pt|pth|ckpt|safetensors|distcp|bin|npz|msgpack|h5|tar|pkl|pickle)$|"
    r"(^|[^a-z])(ckpt|checkpoint|snapshot)[^.]*\.(txt|json|yaml|csv)$",
    re.ASCII | re.IGNORECASE,
)
"""Of torch, transformers, Lightning, DeepSpeed, torch.distributed.checkpoint and others, and of scripts that note down
how far they are."""
_ENTRY = 256
"""Names longer than this are nobody's checkpoint."""


class ForeignCheckpoints:
    """The newest checkpoint of another kind in a folder. Used by one thread.

    Args:
        folder: the run directory.
        ours: names in it that hold nothing of the script's.
    """

    def __init__(self, folder: Path, ours: frozenset[str]) -> None:
        self._folder, self._ours = folder, ours
        self._looked = float("-inf")
        self._seen: tuple[int, str] | None = None
        self._newest: tuple[int, str] | None = None

    @property
    def seen(self) -> tuple[int, str] | None:
        """The newest one at the last look, whether it rests or not."""
        return self._seen

    @property
    def looked(self) -> float:
        """When that began, on the monotonic clock."""
        return self._looked

    def look(self) -> tuple[int, str] | None:
        """Which one it is: when it was written, in nanoseconds of the disk's clock, and its path in the folder; None if
        there is none."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return self._newest
        self._looked = now
        found = max(self._all(), default=None)
        if found == self._seen:
            self._newest = found
        self._seen = found
        return self._newest

    def _all(self) -> Iterator[tuple[int, str]]:
        left = MAX_ENTRIES
        folders = [(self._folder, 0)]
        while folders:
            folder, depth = folders.pop()
            # A folder may be gone, or somebody else's.
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return
                    if (depth == 0 and entry.name in self._ours) or len(entry.name) > _ENTRY:
                        continue
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode) and depth < DEPTH:
                            folders.append((Path(entry.path), depth + 1))
                        elif stat.S_ISREG(status.st_mode) and status.st_size and _FILE.search(entry.name):
                            yield status.st_mtime_ns, os.path.relpath(entry.path, self._folder)
