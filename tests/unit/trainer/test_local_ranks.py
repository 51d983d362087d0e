"""What an agent keeps of its ranks goes when it goes, however it goes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem_trainer import local_ranks
from tandem_trainer.local_ranks import LocalRanks, remove_leavings


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_ranks, "_memory_folder", lambda: str(tmp_path))
    return tmp_path


def grows_old(folder: Path) -> None:
    long_ago = time.time() - 60
    os.utime(folder, (long_ago, long_ago))


def test_the_folder_of_a_killed_agent_is_removed_by_the_next_one(memory: Path) -> None:
    code = f"""
import os
from tandem_trainer import local_ranks
local_ranks._memory_folder = lambda: {str(memory)!r}
local_ranks.LocalRanks(1, 2)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    (left,) = memory.iterdir()
    remove_leavings()
    assert left.exists(), "too young to be judged"
    grows_old(left)
    remove_leavings()
    assert not left.exists()


def test_the_folder_of_a_living_agent_stays(memory: Path) -> None:
    ranks = LocalRanks(1, 1)
    grows_old(ranks.folder)
    remove_leavings()
    assert ranks.folder.exists()
    ranks.close()
    assert list(memory.iterdir()) == []


def test_what_another_user_puts_there_hangs_nobody_and_stays(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, link, file, mine = (memory / f"tandem-g000001-{name}" for name in ("pipe", "link", "file", "mine"))
    target = memory / "target"
    os.mkfifo(pipe)
    target.mkdir()
    link.symlink_to(target)
    file.touch()
    mine.mkdir()
    for one in (pipe, target, file, mine):
        grows_old(one)
    os.utime(link, (0, 0), follow_symlinks=False)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    remove_leavings()
    assert mine.exists(), "the folder of another user"
    monkeypatch.setattr(os, "geteuid", lambda: me)
    remove_leavings()
    assert not mine.exists()
    assert [one.exists() for one in (pipe, link, target, file)] == [True] * 4
