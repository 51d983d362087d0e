"""Copies of files that another process writes to: a whole one, or none."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.rundir import file_copy
from tandem.rundir.file_copy import SourceChanged, copy

CHUNK = 1000
OLD, NEW = b"o" * (3 * CHUNK), b"n" * (3 * CHUNK)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_copy, "CHUNK_BYTES", CHUNK)


@pytest.fixture(autouse=True)
def no_reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every disk that tests run on."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "ioctl", refuse)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "last.pt"
    path.write_bytes(OLD)
    return path


def in_the_middle(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act once, after the first chunk."""
    original, acts = file_copy._copy_chunk, [act]

    def copy_chunk(source: int, target: int, length: int) -> int:
        copied = original(source, target, length)
        if acts:
            acts.pop()()
        return copied

    monkeypatch.setattr(file_copy, "_copy_chunk", copy_chunk)


def test_a_copy_has_the_bytes_and_the_time_of_its_source(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == OLD
    assert (tmp_path / "copy").stat().st_mtime_ns == source.stat().st_mtime_ns
    source.write_bytes(NEW)
    assert (tmp_path / "copy").read_bytes() == OLD


def test_a_folder_is_copied_with_its_folders_and_symbolic_links(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_bytes(OLD)
    (folder / "empty").touch()
    (folder / "link").symlink_to("inner/weights")
    copy(folder, tmp_path / "copy")
    assert (tmp_path / "copy" / "link").readlink() == Path("inner/weights")
    assert (tmp_path / "copy" / "link").read_bytes() == OLD
    assert (tmp_path / "copy" / "empty").read_bytes() == b""


def _truncate_and_write(path: Path) -> None:
    path.write_bytes(NEW)


def _write_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(NEW)


def _write_over_and_set_the_time_back(path: Path) -> None:
    times = path.stat()
    time.sleep(0.02)  # the kernel's clock for files has ticks of up to 10 ms
    _write_over(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(NEW)


def _replace(path: Path) -> None:
    aside = path.with_name("aside")
    aside.write_bytes(NEW)
    aside.replace(path)


WRITERS = [_truncate_and_write, _write_over, _write_over_and_set_the_time_back, _append, _replace, Path.unlink]


@pytest.mark.parametrize("write", WRITERS, ids=lambda writer: writer.__name__)
def test_a_source_that_is_written_to_during_the_copy_is_not_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    os.utime(source, (1.0, 1.0))
    in_the_middle(monkeypatch, lambda: write(source))
    with pytest.raises(SourceChanged):
        copy(source, tmp_path / "copy")


def test_a_file_of_a_folder_that_is_written_to_after_it_was_copied_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(OLD)
        os.utime(folder / name, (1.0, 1.0))

    def overwrite_both() -> None:
        for name in ("a", "b"):
            (folder / name).write_bytes(NEW)

    original = file_copy._copy_file
    calls: list[Path] = []

    def copy_file(source: Path, *arguments: object) -> object:
        result = original(source, *arguments)  # type: ignore[arg-type]
        calls.append(source)
        if len(calls) == 2:
            overwrite_both()
        return result

    monkeypatch.setattr(file_copy, "_copy_file", copy_file)
    with pytest.raises(SourceChanged):
        copy(folder, tmp_path / "copy")


def test_a_kernel_without_copy_file_range_copies_by_sendfile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == OLD


def test_blocks_are_shared_where_the_file_system_can(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most disks that tests run on cannot, so the answer is a stand-in."""

    def clone(target: int, request: int, source: int) -> int:
        assert request == file_copy.FICLONE
        os.sendfile(target, source, 0, len(OLD))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    monkeypatch.setattr(file_copy, "_copy_chunk", None)
    copy(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == OLD


@pytest.mark.parametrize("place", ["ioctl", "chunk"])
def test_a_full_disk_is_an_error_and_no_reason_to_try_another_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "ioctl":
        monkeypatch.setattr(fcntl, "ioctl", full)
    else:
        monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        copy(source, tmp_path / "copy")


def test_a_pipe_is_refused_and_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        copy(tmp_path / "pipe", tmp_path / "copy")
