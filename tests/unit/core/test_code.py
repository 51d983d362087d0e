"""Packs in the run directory: what a process does with one, whoever has made it."""

import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir import code
from tandem.rundir.code import Code, CodeError, JobEnded, store_pack, unpack, unpacked, wait_for_pack
from tandem.rundir.layout import RunDir


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders of this machine are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


Member = tuple[str, bytes | str]
"""Name, and content or where a link leads."""


def tar(*members: Member | tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            if isinstance(member[1], str):
                info.type, info.linkname = tarfile.SYMTYPE, member[1]
                archive.addfile(info)
            else:
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return made.getvalue()


def of_type(kind: bytes, name: str = "x", target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def written(folder: Path, content: bytes) -> tuple[Path, str]:
    """A pack, and its digest."""
    path = folder / "pack"
    path.write_bytes(content)
    return path, f"sha256:{hashlib.sha256(content).hexdigest()}"


def attempt(folder: Path, content: bytes) -> str:
    """What is said of a pack, and that nothing of it is left."""
    pack, digest = written(folder, content)
    with pytest.raises(CodeError) as error:
        unpacked(pack, digest)
    assert list((folder / "scratch").iterdir()) == []
    assert "\n" not in str(error.value)
    return str(error.value)


OUTSIDE = "(outside)"
"""A link that leads to a folder elsewhere."""
HOSTILE = [
    ([("../evil", b"x")], "outside of its folder"),
    ([("/tmp/evil", b"x")], "outside of its folder"),
    ([("a/../../evil", b"x")], "outside of its folder"),
    ([("a", "/etc"), ("a/passwd", b"x")], "is behind the link a"),
    ([("a", OUTSIDE), ("a/b", "x")], "is behind the link a"),
    ([("a", OUTSIDE), ("a/b/c/d", "x")], "is behind the link a"),
    ([("a", "b"), ("b", "a")], "leads to itself"),
    ([("link", "../../etc/passwd")], "leads out of its folder"),
    ([("link", "/etc/passwd")], "leads out of its folder"),
    ([("p/q/r/l", "../../../a"), ("a/x", b""), ("e", "p/q/r/l/../../../..")], "leads out of its folder"),
    ([of_type(tarfile.LNKTYPE, target="/etc/passwd")], "neither a file nor a link"),
    ([of_type(tarfile.CHRTYPE)], "neither a file nor a link"),
    ([of_type(tarfile.FIFOTYPE)], "neither a file nor a link"),
    ([of_type(tarfile.DIRTYPE)], "neither a file nor a link"),
]


@pytest.mark.parametrize(("members", "complaint"), HOSTILE)
def test_a_hostile_pack_writes_nowhere_and_leaves_nothing(
    tmp_path: Path, members: list[Member | tarfile.TarInfo], complaint: str
) -> None:
    (tmp_path / "outside").mkdir()
    there: list[Any] = [
        (one[0], str(tmp_path / "outside")) if isinstance(one, tuple) and one[1] == OUTSIDE else one for one in members
    ]
    assert complaint in attempt(tmp_path, gzip.compress(tar(*there)))
    assert not (tmp_path / "evil").exists()
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_kilobyte_that_unpacks_to_gigabytes_is_refused_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_BYTES", 10_000)
    monkeypatch.setattr(code, "_HEADERS", 20_000)
    assert "unpacks to more than" in attempt(tmp_path, gzip.compress(tar(("x", bytes(10_001)))))
    # Zeros after the last member, and a header that claims to be long.
    long = tarfile.TarInfo("x")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 2**33
    head = long.tobuf(tarfile.GNU_FORMAT)
    assert "unpacks to more than" in attempt(tmp_path, gzip.compress(head + bytes(100_000)))


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 3)
    assert "3 files" in attempt(tmp_path, gzip.compress(tar(*((str(number), b"") for number in range(4)))))


NO_PACKS = {
    "empty": b"",
    "text": b"no pack",
    "no-tar": gzip.compress(b"no tar" * 200),
    "cut-off": gzip.compress(tar(("x", b"1")))[:40],
}


@pytest.mark.parametrize("content", NO_PACKS.values(), ids=NO_PACKS)
def test_what_is_no_pack_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    assert "is not a pack" in attempt(tmp_path, content)


def test_damaged_bytes_are_told_with_the_file_to_delete(tmp_path: Path) -> None:
    pack, digest = written(tmp_path, gzip.compress(tar(("x", b"1"))))
    pack.write_bytes(pack.read_bytes()[:-1] + b"?")
    with pytest.raises(CodeError, match=f"{digest} is damaged on the volume.*delete the pack"):
        unpacked(pack, digest)


def test_processes_of_one_machine_share_the_folder_and_make_it_once(tmp_path: Path) -> None:
    pack, digest = written(tmp_path, gzip.compress(tar(("train.py", b"1"))))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(unpacked(pack, digest))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == [found[0].name]
    assert (found[0] / "train.py").read_bytes() == b"1"


def test_a_folder_that_others_may_write_is_not_worked_in(tmp_path: Path) -> None:
    pack, digest = written(tmp_path, gzip.compress(tar(("train.py", b"1"))))
    first = unpacked(pack, digest)
    (first / "train.py").write_text("of somebody else")
    first.chmod(0o777)
    other = unpacked(pack, digest)
    assert other != first
    assert (other / "train.py").read_bytes() == b"1"


def test_a_pack_is_stored_once_under_its_digest(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    pack, digest = written(tmp_path, b"bytes")
    store_pack(run_dir, digest, pack)
    before = run_dir.pack(digest).stat()
    store_pack(run_dir, digest, pack)
    assert run_dir.pack(digest).stat().st_ino == before.st_ino
    assert [path.name for path in run_dir.code.iterdir()] == [f"{digest.removeprefix('sha256:')}.tar.gz"]
    assert run_dir.pack(digest).read_bytes() == b"bytes"


def test_who_waits_for_code_says_so_and_stops_when_the_job_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "FIRST_MESSAGE_SECONDS", 0.0)
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    digest = f"sha256:{'0' * 64}"
    said: list[str] = []

    def say(event: str, **fields: object) -> None:
        said.append(f"{event} {fields['digest']}")
        run_dir.mark_failed("Tried", "somebody ended it", 1)

    with pytest.raises(JobEnded):
        wait_for_pack(run_dir, digest, say)
    assert said == [f"waits-for-code {digest}"]


def test_code_comes_before_packages_and_both_before_what_was_there(tmp_path: Path) -> None:
    found = Code(Path("/code"), (Path("/packages"),), (Path("/packages/bin"),))
    variables = found.variables({"PYTHONPATH": "/mine", "PATH": "/usr/bin"})
    assert variables == {
        "PYTHONPATH": os.pathsep.join(("/code", "/packages", "/mine")),
        "PATH": os.pathsep.join(("/usr/bin", "/packages/bin")),
    }
    assert Code(Path("/code")).variables({}) == {"PYTHONPATH": "/code"}


def test_unpacking_into_a_folder_counts_files_and_links(tmp_path: Path) -> None:
    pack, digest = written(tmp_path, gzip.compress(tar(("a/x", b"1"), ("b", "a/x"))))
    (tmp_path / "out").mkdir()
    with pack.open("rb") as file:
        assert unpack(file, digest, tmp_path / "out") == 2
    assert (tmp_path / "out/b").read_bytes() == b"1"
