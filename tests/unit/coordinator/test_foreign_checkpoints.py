"""Which files count as a checkpoint that a script has written in a way of its own."""

import os
from pathlib import Path

import pytest

from tandem_coordinator import foreign_checkpoints
from tandem_coordinator.foreign_checkpoints import ForeignCheckpoints


@pytest.fixture(autouse=True)
def at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_checkpoints, "POLL_SECONDS", 0.0)


def written(path: Path, at: int, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(at, at))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "snapshot.pt",
        "out/epoch_3.pth",
        "checkpoint-500/model.safetensors",
        "lightning/version_0/last.ckpt",
        "step-100/__0_0.distcp",
        "global_step7/zero_pp_rank_0.pt",
        "out/ckpt.txt",
        "my_Checkpoint_12.json",
        "state.pkl",
    ],
)
def test_names_that_frameworks_give(tmp_path: Path, name: str) -> None:
    watch = ForeignCheckpoints(tmp_path, frozenset({"log"}))
    assert watch.poll() is None
    written(tmp_path / name, 5)
    assert watch.poll() is None, "it may be half written"
    assert watch.poll() == (5, name)


@pytest.mark.parametrize(
    "name", ["notes.txt", "checkpoint/notes.txt", "backpt.txt", "log/old.pt", "a/b/c/too-deep.pt", "snapshot.pt.tmp"]
)
def test_what_is_none(tmp_path: Path, name: str) -> None:
    watch = ForeignCheckpoints(tmp_path, frozenset({"log"}))
    written(tmp_path / name, 5)
    written(tmp_path / "empty.pt", 6, b"")
    (tmp_path / "link.pt").symlink_to(written(tmp_path.parent / "elsewhere.pt", 9))
    os.mkfifo(tmp_path / "pipe.pt")
    assert watch.poll() is None
    assert watch.poll() is None


def test_a_file_that_is_written_again_and_again_counts_when_it_rests(tmp_path: Path) -> None:
    watch = ForeignCheckpoints(tmp_path, frozenset())
    for at in (1, 2, 3):
        written(tmp_path / "snapshot.pt", at)
        watch.poll()
    assert watch.poll() == (3, "snapshot.pt")
    written(tmp_path / "snapshot.pt", 4)
    assert watch.poll() == (3, "snapshot.pt")
    assert watch.poll() == (4, "snapshot.pt")


def test_a_folder_that_is_huge_or_gone_costs_no_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_checkpoints, "MAX_ENTRIES", 10)
    for number in range(50):
        written(tmp_path / f"{number}.txt", number)
    assert ForeignCheckpoints(tmp_path, frozenset()).poll() is None
    assert ForeignCheckpoints(tmp_path / "nowhere", frozenset()).poll() is None
