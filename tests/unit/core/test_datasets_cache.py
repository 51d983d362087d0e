"""What a user keeps from one run to the next is that user's alone: torch runs the compiled kernels that it finds."""

import os
import stat
from pathlib import Path

import pytest

from tandem.job.datasets import cache_folder, private_folder
from tandem_launcher.local.local_run import KERNELS, inherited


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tandem"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_compiled_kernels_are_kept_where_nobody_else_can_write(cache: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        kernels = inherited({}, tmp_path)[KERNELS]
    finally:
        os.umask(before)
    assert kernels == str(cache / "kernels")
    assert mode(Path(kernels)) == 0o700


def test_a_folder_that_others_could_read_is_closed(cache: Path) -> None:
    folder = cache / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert private_folder(folder) == folder
    assert mode(folder) == 0o700


def test_a_folder_of_another_user_is_not_taken(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "kernels").mkdir(parents=True)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert private_folder(cache / "kernels") is None
    assert inherited({}, tmp_path)[KERNELS] == str(tmp_path / "kernels"), "kept for this run alone"


def test_neither_is_a_link_nor_a_place_that_cannot_be_made(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (cache / "kernels").symlink_to(tmp_path / "theirs")
    assert private_folder(cache / "kernels") is None
    (tmp_path / "file").touch()
    assert private_folder(tmp_path / "file" / "kernels") is None


def test_a_folder_that_the_user_names_is_taken(cache: Path, tmp_path: Path) -> None:
    assert inherited({KERNELS: "elsewhere"}, tmp_path)[KERNELS] == "elsewhere"
    assert not cache.exists()


@pytest.mark.parametrize("home", ["", None])
def test_without_a_cache_of_its_own_it_is_the_usual_one(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert cache_folder() == Path.home() / ".cache" / "tandem"
