"""Files that are whole or not there, also when the writer is killed or the disk is full."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.rundir.durable import (
    MAX_JSON_BYTES,
    TEMPORARY,
    commit_folder,
    create_json,
    read_json,
    read_json_or_none,
    replace_json,
    temporary_beside,
)
from tests.support.waiting import until

PATIENCE_SECONDS = 60.0


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(TEMPORARY)]


# JSON files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    replace_json(tmp_path / "a.json", {"b": [1, None, "ü"]})
    assert read_json(tmp_path / "a.json") == {"b": [1, None, "ü"]}
    replace_json(tmp_path / "a.json", 2)
    assert read_json(tmp_path / "a.json") == 2
    assert leftovers(tmp_path) == []


def test_create_never_replaces(tmp_path: Path) -> None:
    assert create_json(tmp_path / "a.json", 1)
    assert not create_json(tmp_path / "a.json", 2)
    assert read_json(tmp_path / "a.json") == 1
    assert leftovers(tmp_path) == []


def test_not_a_number_is_no_json_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace_json(tmp_path / "a.json", float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_nfs_made_and_denied_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS is a boundary we do not own: its client may repeat a request whose answer was lost."""
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert create_json(tmp_path / "a.json", 1)
    assert not create_json(tmp_path / "a.json", 2)


def test_a_replacement_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_json(tmp_path / "folder", 1)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 200_000])
def test_garbage_is_an_error_of_one_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_json(tmp_path / "a.json")
    assert read_json_or_none(tmp_path / "a.json") is None


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ValueError, match="larger than"):
        read_json(tmp_path / "a.json")


def test_a_missing_file_is_none_where_that_is_normal(tmp_path: Path) -> None:
    assert read_json_or_none(tmp_path / "a.json") is None
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "a.json")


def test_one_of_many_creators_wins(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from tandem.rundir.durable import create_json
folder, me = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while not (folder / "go").exists(): pass
print(*[n for n in range(50) if create_json(folder / f"{n}.json", me, durable=False)])
"""
    racers = [start(code, tmp_path, me) for me in range(3)]
    for racer in racers:
        racer.stdout.readline()
    (tmp_path / "go").touch()
    won = [racer.communicate(timeout=PATIENCE_SECONDS)[0].split() for racer in racers]
    assert sorted(int(n) for names in won for n in names) == list(range(50))
    for me, names in enumerate(won):
        assert all(read_json(tmp_path / f"{n}.json") == me for n in names)


def test_a_reader_never_sees_a_file_half_written_and_a_kill_changes_nothing(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tandem.rundir.durable import replace_json
n = 0
while True:
    n += 1
    replace_json(Path(sys.argv[1]), {"n": n, "filler": [n] * 20_000}, durable=False)
"""
    path = tmp_path / "a.json"
    for _ in range(5):
        writer = start(code, path)
        try:
            until(path.exists, "the file")
            first = read_json(path)["n"]
            for _ in range(30):
                seen = read_json(path)
                assert set(seen["filler"]) == {seen["n"]}
            until(lambda least=first + 5: read_json(path)["n"] > least, "later contents")  # type: ignore[misc]
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.communicate(timeout=PATIENCE_SECONDS)
        seen = read_json(path)
        assert set(seen["filler"]) == {seen["n"]}
        path.unlink()


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from pathlib import Path
from tandem.rundir.durable import Lines, create_json, replace_json
"""
"""A limit on file sizes: writes come back short or fail, as on a full disk."""


def test_a_full_disk_leaves_the_old_content_and_no_leftover(tmp_path: Path) -> None:
    replace_json(tmp_path / "a.json", "old")
    code = f"""{FULL_DISK}
folder = Path(sys.argv[1])
for write in (replace_json, create_json):
    try:
        write(folder / ("a.json" if write is replace_json else "b.json"), "x" * 5000)
    except OSError as error:
        print(error.errno)
"""
    assert len(start(code, tmp_path).communicate(timeout=PATIENCE_SECONDS)[0].split()) == 2
    assert read_json(tmp_path / "a.json") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# Folders


def test_a_folder_is_committed_under_a_name_that_was_never_used(tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    (aside / "state").mkdir(parents=True)
    (aside / "state/x").write_text("1")
    commit_folder(aside, tmp_path / "final")
    assert (tmp_path / "final/state/x").read_text() == "1"
    assert not aside.exists()


@pytest.mark.parametrize("taken_by", ["a file inside", "nothing inside", "a file"])
def test_a_name_that_is_taken_is_not_replaced(tmp_path: Path, taken_by: str) -> None:
    aside, final = tmp_path / "aside", tmp_path / "final"
    aside.mkdir()
    (aside / "new").touch()
    if taken_by == "a file":
        final.write_text("old")
    else:
        final.mkdir()
        if taken_by == "a file inside":
            (final / "old").touch()
    with pytest.raises(FileExistsError, match="already committed"):
        commit_folder(aside, final)
    assert (aside / "new").exists()
    assert not (final / "new").exists()


def test_temporary_names_are_never_the_same_and_are_passed_over(tmp_path: Path) -> None:
    names = {temporary_beside(tmp_path / "a").name for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(TEMPORARY) for name in names)


# Lines


def test_a_line_torn_by_a_full_disk_is_not_joined_to_the_next(tmp_path: Path) -> None:
    code = f"""{FULL_DISK}
log = Lines(Path(sys.argv[1]))
log.append(b'{{"n": 1}}')
try:
    log.append(b"x" * 5000)
except OSError:
    print("full")
Path(sys.argv[1]).write_bytes(Path(sys.argv[1]).read_bytes()[:500])
log.append(b'{{"n": 2}}')
"""
    assert start(code, tmp_path / "a.jsonl").communicate(timeout=PATIENCE_SECONDS)[0] == "full\n"
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [lines[0], lines[-1]] == ['{"n": 1}', '{"n": 2}']
    assert set(lines[1]) == {"x"}
