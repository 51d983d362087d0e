"""What `--code DIR` packs, leaves out and refuses."""

import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import UserError
from tandem.rundir.code import unpack
from tandem_cli import packing
from tandem_cli.packing import copy_packed, packed
from tests.support import manifests


def names(folder: Path) -> set[str]:
    with packed(folder) as pack:
        return set(pack.names)


def digest(folder: Path) -> str:
    with packed(folder) as pack:
        return pack.digest


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as error, packed(folder):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_the_digest_depends_on_names_contents_links_and_the_right_to_execute_alone(tmp_path: Path) -> None:
    one = tree(tmp_path / "one", {"train.py": "1", "a/b.py": "2"})
    other = tree(tmp_path / "other", {"a/b.py": "2", "train.py": "1"})
    os.utime(other / "train.py", (5, 5))
    (other / "a/b.py").chmod(0o600)
    assert digest(one) == digest(other)
    found = {digest(one)}
    (one / "train.py").chmod(0o755)
    found.add(digest(one))
    (one / "link").symlink_to("a/b.py")
    found.add(digest(one))
    (one / "train.py").write_text("3")
    found.add(digest(one))
    assert len(found) == 4


def test_a_pack_is_what_is_unpacked(tmp_path: Path) -> None:
    folder = tree(tmp_path / "code", {"train.py": "print()", "a/é b.py": "2", "a/" + "long" * 40 + "/x": ""})
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "a/link").symlink_to("../train.py")
    (folder / "absolute").symlink_to(folder / "a")
    (tmp_path / "out").mkdir()
    with packed(folder) as pack, pack.file.open("rb") as file:
        assert unpack(file, pack.digest, tmp_path / "out") == 6 == len(pack.names)
    assert (tmp_path / "out/a/é b.py").read_text() == "2"
    assert (tmp_path / "out/a/link").read_text() == "print()"
    assert (tmp_path / "out/absolute").readlink() == Path("a"), "it leads to the unpacked folder, not to this machine's"
    assert os.access(tmp_path / "out/run.sh", os.X_OK)
    assert not os.access(tmp_path / "out/train.py", os.X_OK)
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "x.log").touch()
    (tmp_path / "copy").mkdir()
    copy_packed(folder, tmp_path / "copy")
    assert digest(tmp_path / "copy") == digest(folder)
    assert not (tmp_path / "copy/x.log").exists()


def test_what_gitignore_names_is_left_out_also_in_folders_below_and_above(tmp_path: Path) -> None:
    top = tree(
        tmp_path,
        {
            ".git/config": "",
            ".gitignore": "secret.txt\n/code/only-here\n",
            "code/.gitignore": "*.log\n/data/\n!keep.log\n",
            "code/train.py": "",
            "code/x.log": "",
            "code/keep.log": "",
            "code/data/large": "",
            "code/lib/data/small": "",
            "code/lib/.gitignore": "keep.log\n!x.log\nnested/\n",
            "code/lib/keep.log": "",
            "code/lib/x.log": "",
            "code/lib/nested/y": "",
            "code/secret.txt": "",
            "code/only-here": "",
        },
    )
    assert names(top / "code") == {
        *(".gitignore", "train.py", "keep.log", "lib/data/small", "lib/.gitignore", "lib/x.log")
    }


def test_bytecode_environments_version_control_and_run_directories_are_never_packed(tmp_path: Path) -> None:
    never = (".git/HEAD", "a/__pycache__/x.pyc", "x.pyc", ".venv/pyvenv.cfg", ".venv/lib/x.py")
    runs = ("runs/digits/job.json", "runs/digits/generations/1", "runs/digits/leases/1", "runs/digits/log/x")
    assert names(tree(tmp_path, dict.fromkeys((*never, *runs, "train.py"), ""))) == {"train.py"}


def test_a_folder_that_is_too_large_is_refused_by_sizes_with_its_largest_files(tmp_path: Path) -> None:
    tree(tmp_path, {"train.py": "", "small": "x"})
    for number in range(6):
        with (tmp_path / f"data-{number}").open("wb") as file:
            file.truncate((300 + 50 * number) * 10**6)  # no byte of it is read
    said = refused(tmp_path)
    assert "2.6 GB" in said
    largest = ("data-5 (550 MB)", "data-4 (500 MB)", "data-3 (450 MB)", "data-2 (400 MB)", "data-1 (350 MB)")
    assert f"The largest files: {', '.join(largest)}. List" in said
    assert ".gitignore" in said
    (tmp_path / ".gitignore").write_text("data-*\n")
    assert names(tmp_path) == {".gitignore", "train.py", "small"}


def test_too_many_files_and_too_many_packed_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, {str(number): "x" for number in range(12)})
    with monkeypatch.context() as changed:
        changed.setattr(packing, "MAX_FILES", 11)
        assert "12 files or more" in refused(tmp_path)
    (tmp_path / "random").write_bytes(os.urandom(5000))
    with monkeypatch.context() as changed:
        changed.setattr(packing, "MAX_PACKED_BYTES", 4000)
        assert "random (5.0 kB)" in refused(tmp_path)


def outside(folder: Path) -> None:
    (folder / "link").symlink_to("../elsewhere")


def outside_by_a_link(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a/up").symlink_to("..")
    (folder / "link").symlink_to("a/up/../elsewhere")


def through_the_root(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def door(folder: Path) -> None:
    here = Path.cwd()
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("door")
    os.chdir(here)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (outside, "the link link leads out of the folder"),
        (outside_by_a_link, "the link link leads out of the folder"),
        (through_the_root, "the link link leads out of the folder, to /etc/passwd"),
        (pipe, "pipe is neither a file nor a folder"),
        (door, "door is neither a file nor a folder"),
    ],
)
def test_what_pods_would_not_have_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], complaint: str
) -> None:
    folder = tree(tmp_path / "code", {"train.py": ""})
    make(folder)
    assert complaint in refused(folder)
    (folder / ".gitignore").write_text("link\npipe\ndoor\n")
    assert "train.py" in names(folder)


def test_a_folder_without_files_and_no_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no files for --code" in refused(tmp_path / "empty")
    (tmp_path / "file").touch()
    assert "is a file" in refused(tmp_path / "file")
    assert "is not there" in refused(tmp_path / "missing")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"trainer": {"command": ["python", "train.py"]}}, ""),
        ({"trainer": {"command": ["train.py"]}}, ""),
        ({"trainer": {"command": ["python", "./train.py"]}}, ""),
        ({"trainer": {"command": ["python", "/tandem/train.py"]}}, ""),
        ({"trainer": {"command": ["python", "-m", "train.py"]}}, ""),
        ({"trainer": {"command": ["python"], "args": ["other.py"]}}, "spec.trainer.args.0 other.py does not exist"),
        ({"trainer": {"command": ["secret.py"]}}, "spec.trainer.command.0 secret.py is excluded by .gitignore"),
        (
            {"trainer": {"command": ["train.py"]}, "evaluators": {"command": ["python", "evaluate.py"]}},
            "spec.evaluators.command.1 evaluate.py does not exist",
        ),
    ],
)
def test_a_script_that_is_not_in_the_pack_is_told_at_its_field(
    tmp_path: Path, spec: dict[str, Any], complaint: str
) -> None:
    tree(tmp_path, {"train.py": "", "secret.py": "", ".gitignore": "secret.py\n"})
    with packed(tmp_path) as pack:
        found = [
            ".".join(map(str, one.field)) + " " + one.message
            for one in pack.missing_scripts(manifests.job("a", **spec))
        ]
    assert len(found) == bool(complaint)
    assert all(complaint in one for one in found)


def test_a_pack_is_a_plain_compressed_tar(tmp_path: Path) -> None:
    """Who keeps a run can look at its code without Tandem."""
    with packed(tree(tmp_path, {"b": "", "a": ""})) as pack, tarfile.open(pack.file) as tar:
        assert tar.getnames() == ["a", "b"]
