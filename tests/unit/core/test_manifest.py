"""The manifest: whatever is altered in a checkpoint is noticed before it is used."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from tandem.rundir.checkpoint import (
    CHUNK_BYTES,
    FILE,
    Broken,
    DataPosition,
    FileEntry,
    Manifest,
    OtherFormat,
    verified_bytes,
)
from tandem.rundir.durable import encode, replace_json
from tests.support.checkpoints import hash_file

NAME = "step-000000500"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint of two files."""
    made = tmp_path / NAME
    (made / "state").mkdir(parents=True)
    rng = random.Random(0)
    (made / "weights.safetensors").write_bytes(rng.randbytes(300))
    (made / "state/rank-0.bin").write_bytes(rng.randbytes(200))
    files = [hash_file(made / path, path) for path in ("weights.safetensors", "state/rank-0.bin")]
    manifest = Manifest(
        name=NAME,
        step=500,
        generation=7,
        parent="step-000000450",
        created_at=1.5,
        world_size=2,
        data=DataPosition(seed=0, epoch=1, cursor=64),
        loop={"lr": 1e-05, "best": 0.25},
        versions={"torch": "2.15"},
        files=files,
    )
    replace_json(made / FILE, manifest.sealed())
    return made


def whole(folder: Path) -> dict[str, memoryview]:
    """What a careful reader gets of a checkpoint."""
    manifest = Manifest.load(folder)
    return {entry.path: verified_bytes(folder, entry) for entry in manifest.files}


def test_a_sound_checkpoint_reads_back(folder: Path) -> None:
    manifest = Manifest.load(folder)
    assert (manifest.step, manifest.generation, manifest.size) == (500, 7, 500)
    assert manifest.entry("weights.safetensors").size == 300
    assert manifest.reference.name == NAME
    assert sorted(whole(folder)) == ["state/rank-0.bin", "weights.safetensors"]


@pytest.mark.parametrize("name", ["weights.safetensors", "state/rank-0.bin"])
def test_any_flipped_bit_of_a_file_is_noticed(folder: Path, name: str) -> None:
    sound = (folder / name).read_bytes()
    for bit in range(0, len(sound) * 8, 7):
        altered = bytearray(sound)
        altered[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(altered)
        with pytest.raises(Broken, match="checksum"):
            whole(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "state/rank-0.bin"])
def test_any_missing_or_added_end_of_a_file_is_noticed(folder: Path, name: str) -> None:
    sound = (folder / name).read_bytes()
    for length in range(len(sound)):
        (folder / name).write_bytes(sound[:length])
        with pytest.raises(Broken, match="bytes"):
            whole(folder)
    (folder / name).write_bytes(sound + b"\0")
    with pytest.raises(Broken, match="bytes"):
        whole(folder)


def test_any_flipped_bit_of_the_manifest_is_noticed_or_changes_nothing(folder: Path) -> None:
    """A flip that JSON reads as the same (1e-05 and 1E-05) is no damage."""
    sound = (folder / FILE).read_bytes()
    content, noticed = json.loads(sound), 0
    for bit in range(len(sound) * 8):
        altered = bytearray(sound)
        altered[bit // 8] ^= 1 << bit % 8
        (folder / FILE).write_bytes(altered)
        try:
            Manifest.load(folder)
        except Broken:
            noticed += 1
        else:
            assert json.loads(altered) == content, f"bit {bit} went unnoticed"
    assert noticed > 0.99 * len(sound) * 8


def test_any_truncation_of_the_manifest_is_noticed(folder: Path) -> None:
    sound = (folder / FILE).read_bytes()
    for length in range(len(sound.rstrip())):
        (folder / FILE).write_bytes(sound[:length])
        with pytest.raises(Broken):
            Manifest.load(folder)


def test_a_checkpoint_without_its_manifest_or_a_file_is_broken(folder: Path) -> None:
    (folder / "state/rank-0.bin").unlink()
    with pytest.raises(Broken, match=r"lacks state/rank-0\.bin"):
        whole(folder)
    (folder / FILE).unlink()
    with pytest.raises(Broken, match="has no manifest"):
        Manifest.load(folder)


def test_a_vanished_checkpoint_is_gone_not_broken(folder: Path) -> None:
    entry = Manifest.load(folder).files[0]
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        Manifest.load(folder)
    with pytest.raises(FileNotFoundError):
        verified_bytes(folder, entry)


def test_folders_in_the_place_of_files_and_files_in_the_place_of_folders_are_broken(folder: Path) -> None:
    (folder / "state/rank-0.bin").unlink()
    (folder / "state/rank-0.bin").mkdir()
    with pytest.raises(Broken, match="is not a file"):
        whole(folder)
    (folder / "state/rank-0.bin").rmdir()
    (folder / "state").rmdir()
    (folder / "state").touch()
    with pytest.raises(Broken, match="is not a file"):
        whole(folder)
    (folder.parent / "step-000000600").touch()
    with pytest.raises(Broken, match="not a folder"):
        Manifest.load(folder.parent / "step-000000600")
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    with pytest.raises(Broken, match="manifest file"):
        Manifest.load(folder)


def test_the_manifest_of_another_checkpoint_is_refused(folder: Path) -> None:
    moved = folder.rename(folder.with_name("step-000000600"))
    with pytest.raises(Broken, match=f"belongs to {NAME}"):
        Manifest.load(moved)


def seal(folder: Path, **changes: object) -> None:
    """Write the manifest as a version would that wants it otherwise: with a digest that is right."""
    body = json.loads((folder / FILE).read_bytes()) | changes
    rest = {key: value for key, value in body.items() if key != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    (folder / FILE).write_bytes(encode(body | {"digest": hashlib.sha256(canonical).hexdigest()}))


def test_what_a_newer_version_adds_to_a_format_is_passed_over(folder: Path) -> None:
    known = Manifest.load(folder)
    seal(folder, colour="red")
    assert Manifest.load(folder).reference == known.reference


@pytest.mark.parametrize("change", [{"format": "1"}, {"step": "500"}, {"files": None}])
def test_a_manifest_of_another_version_is_refused_even_if_whole(folder: Path, change: dict[str, object]) -> None:
    seal(folder, **change)
    with pytest.raises(Broken, match="not one this version reads"):
        Manifest.load(folder)


@pytest.mark.parametrize("written", [1, 2, 5])
def test_a_checkpoint_of_another_format_is_called_that_and_not_damaged(folder: Path, written: int) -> None:
    files = [{**entry, "sha256": ["0" * 64]} for entry in json.loads((folder / FILE).read_bytes())["files"]]
    seal(folder, format=written, files=files)
    with pytest.raises(OtherFormat, match=f"^{NAME} is of format {written}, and this version reads formats 3 to 4$"):
        Manifest.load(folder)


def test_a_checkpoint_of_the_format_before_is_read(folder: Path) -> None:
    seal(folder, format=3)
    assert Manifest.load(folder).format == 3


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"null", b"{}", b"[" * 100_000, b"\xff"])
def test_garbage_is_broken(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    with pytest.raises(Broken):
        Manifest.load(folder)


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ".hidden", "a//b", "a/", "", "a\nb", "ä"])
def test_paths_cannot_leave_the_folder(path: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        FileEntry(path=path, size=1, xxh3=["0" * 32])


def test_a_file_of_several_chunks_is_read_in_order_and_the_damaged_chunk_is_named(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(2 * CHUNK_BYTES + 5)
    (tmp_path / "large").write_bytes(content)
    entry = hash_file(tmp_path / "large")
    assert len(entry.xxh3) == 3
    assert verified_bytes(tmp_path, entry) == content
    altered = bytearray(content)
    altered[CHUNK_BYTES + 7] ^= 1
    (tmp_path / "large").write_bytes(altered)
    with pytest.raises(Broken, match=f"at byte {CHUNK_BYTES}$"):
        verified_bytes(tmp_path, entry)


def test_an_empty_file_has_no_checksum_and_reads_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert verified_bytes(tmp_path, hash_file(tmp_path / "empty")) == b""


def test_a_file_has_a_checksum_for_each_chunk() -> None:
    with pytest.raises(ValueError, match="1 checksums"):
        FileEntry(path="large", size=CHUNK_BYTES + 1, xxh3=["0" * 32])


def test_an_unlisted_file_has_no_entry(folder: Path) -> None:
    with pytest.raises(Broken, match="lists no optimizer"):
        Manifest.load(folder).entry("optimizer")
