"""Pieces of files get to the disk whole, past the page cache where that is possible, and with the right checksums."""

import errno
import fcntl
import mmap
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.checkpoint import CHUNK_BYTES
from tandem_trainer.checkpoint.writer import BLOCK, write_pieces
from tests.support.checkpoints import hash_file

SIZE = 2 * CHUNK_BYTES + 3 * BLOCK + 5
"""Two whole chunks, and a third one whose end fills no block."""


@pytest.fixture(scope="module")
def memory() -> memoryview:
    """Staged bytes, as the writer maps them."""
    staged = mmap.mmap(-1, SIZE)
    staged[:] = random.Random(0).randbytes(SIZE)
    return memoryview(staged)


class Disk:
    """Listens to what is written, and refuses what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.past_the_cache, self.through_it = 0, 0
        self.refuse_to_open = self.refuse_to_write = 0
        self._open, self._write = os.open, os.pwrite
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "pwrite", self.write)

    def open(self, path: Path, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT and self.refuse_to_open:
            raise OSError(self.refuse_to_open, os.strerror(self.refuse_to_open))
        return self._open(path, flags, *rest, **more)

    def write(self, descriptor: int, content: memoryview, at: int) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and at >= CHUNK_BYTES and self.refuse_to_write:
            raise OSError(self.refuse_to_write, os.strerror(self.refuse_to_write))
        written = self._write(descriptor, content, at)
        if direct:
            self.past_the_cache += written
        else:
            self.through_it += written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def stored(folder: Path, memory: memoryview) -> dict[str, str]:
    """Write a file in one piece: what is there must be what was staged, and have the checksums that were given."""
    region = {"path": "state/one", "start": 0, "size": SIZE, "offset": 0}
    checksums = write_pieces(folder, [region], memory)["state/one"]
    assert (folder / "state/one").read_bytes() == memory
    assert [checksums[str(number)] for number in range(3)] == hash_file(folder / "state/one").xxh3
    return checksums


def knows_how(folder: Path) -> bool:
    """Whether the file system of a folder lets one write past the cache."""
    with suppress(OSError):
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        return True
    return False


def test_all_but_the_last_bytes_go_past_the_cache(tmp_path: Path, memory: memoryview, disk: Disk) -> None:
    stored(tmp_path, memory)
    assert (disk.past_the_cache, disk.through_it) == ((SIZE - 5, 5) if knows_how(tmp_path) else (0, SIZE))


def test_a_file_system_that_does_not_know_how_is_written_to_all_the_same(
    tmp_path: Path, memory: memoryview, disk: Disk
) -> None:
    disk.refuse_to_open = errno.EINVAL
    stored(tmp_path, memory)
    assert (disk.past_the_cache, disk.through_it) == (0, SIZE)


def test_a_disk_of_larger_blocks_is_written_to_all_the_same(tmp_path: Path, memory: memoryview, disk: Disk) -> None:
    disk.refuse_to_write = errno.EINVAL
    stored(tmp_path, memory)
    assert disk.through_it == (SIZE - CHUNK_BYTES if knows_how(tmp_path) else SIZE)


@pytest.mark.parametrize("trouble", ["refuse_to_open", "refuse_to_write"])
def test_a_disk_that_is_full_is_not_asked_twice(tmp_path: Path, memory: memoryview, disk: Disk, trouble: str) -> None:
    disk_knows_how = knows_how(tmp_path)
    setattr(disk, trouble, errno.ENOSPC)
    if trouble == "refuse_to_write" and not disk_knows_how:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    with pytest.raises(OSError, match="No space left") as raised:
        stored(tmp_path, memory)
    assert raised.value.errno == errno.ENOSPC
    assert disk.through_it == 0


def test_two_parts_write_one_file(tmp_path: Path, memory: memoryview) -> None:
    second = {"path": "state/one", "start": CHUNK_BYTES, "size": SIZE - CHUNK_BYTES, "offset": CHUNK_BYTES}
    first = {"path": "state/one", "start": 0, "size": CHUNK_BYTES, "offset": 0}
    found = write_pieces(tmp_path, [second], memory)["state/one"] | write_pieces(tmp_path, [first], memory)["state/one"]
    assert (tmp_path / "state/one").read_bytes() == memory
    assert [found[str(number)] for number in range(3)] == hash_file(tmp_path / "state/one").xxh3


def test_an_empty_file_is_made(tmp_path: Path, memory: memoryview) -> None:
    assert write_pieces(tmp_path, [{"path": "empty", "start": 0, "size": 0, "offset": 0}], memory) == {}
    assert (tmp_path / "empty").read_bytes() == b""
