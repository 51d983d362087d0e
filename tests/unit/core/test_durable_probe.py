"""A disk that lacks something is told by what it lacks; one that is full or read-only is not told off."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.durable import unsupported_operation


def test_an_ordinary_disk_can_do_everything_and_nothing_is_left(tmp_path: Path) -> None:
    assert unsupported_operation(tmp_path / "run") == ""
    assert list((tmp_path / "run").iterdir()) == []


def refused(code: int) -> Any:
    def call(*given: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_a_disk_without_hard_links_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
        monkeypatch.setattr(os, "link", refused(code))
        assert "does not support hard links, which checkpoints need; use a local disk" in unsupported_operation(
            tmp_path
        )
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_writes_over_what_is_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda source, target: target.write_bytes(source.read_bytes()))
    assert "does not support hard links" in unsupported_operation(tmp_path)


def test_a_rename_that_copies_folders_into_others_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def merged(source: Path, target: Path) -> Path:
        return target if target.exists() else real(source, target)

    monkeypatch.setattr(Path, "rename", merged)
    assert "does not support renaming folders" in unsupported_operation(tmp_path)


def test_a_disk_that_appends_wherever_it_is_told_to_write_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appended(descriptor: int, content: bytes, at: int) -> int:
        os.lseek(descriptor, 0, os.SEEK_END)
        return os.write(descriptor, content)

    monkeypatch.setattr(os, "pwrite", appended)
    assert "does not support writing a file at different offsets" in unsupported_operation(tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.ENOTCONN, errno.ENOMEM, errno.EHOSTDOWN, errno.EMFILE),
    ],
)
def test_a_disk_that_is_full_or_read_only_or_away_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", refused(code))
    monkeypatch.setattr(os, "pwrite", refused(code))
    assert unsupported_operation(tmp_path) == ""
    monkeypatch.setattr(Path, "mkdir", refused(code))
    assert unsupported_operation(tmp_path) == ""
