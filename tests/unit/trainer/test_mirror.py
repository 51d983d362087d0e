"""Mirrors: what the memory of an agent holds, which of it counts, and how it comes together."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.processes.launch import MIRROR
from tandem.rundir.checkpoint import Broken, checksum
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Continuation, Rewind
from tandem_trainer.checkpoint.mirror import (
    FILES_PER_RANK,
    MirrorFile,
    MirrorMemory,
    MirrorPart,
    MirrorPoint,
    checksums,
    complete_points,
    create_memory,
)
from tandem_trainer.checkpoint.mirror_restore import is_newest, manifest_of, newest_that_counts
from tandem_trainer.checkpoint.staging import Region
from tests.support.checkpoints import begin, commit
from tests.support.manifests import job, run_directory

CONTENT = b"weights of a model"
FACTS = {"name": "step-000000012", "step": 12, "generation": 3, "createdAt": 1.0, "worldSize": 2}


def part(number: int = 0, count: int = 1, step: int = 12, **more: Any) -> MirrorPart:
    regions = [Region(path="weights.safetensors", start=0, size=len(CONTENT), offset=0)]
    known = {"generation": 3, "step": step, "number": number, "count": count, "regions": regions}
    return MirrorPart(**{**known, "files": {"weights.safetensors": len(CONTENT)}, "facts": FACTS, **more})


def held() -> MirrorFile:
    file = MirrorFile(os.memfd_create("test"))
    file.invalidate(len(CONTENT))
    os.pwrite(file.descriptor, CONTENT, 0)
    file.describe(part(chunks={"weights.safetensors": {"0": checksum(CONTENT)}}))
    return file


def test_memory_tells_another_process_what_it_holds() -> None:
    file = held()
    other = MirrorFile(file.descriptor)
    assert other.part == file.part
    assert other.point == MirrorPoint(3, 12)
    assert bytes(other.content()[: len(CONTENT)].tolist()) == CONTENT


def cut_short(file: MirrorFile) -> None:
    os.ftruncate(file.descriptor, os.fstat(file.descriptor).st_size - 1)


def flip_a_bit(file: MirrorFile) -> None:
    byte = os.pread(file.descriptor, 1, len(CONTENT) + 5)[0]
    os.pwrite(file.descriptor, bytes([byte ^ 1]), len(CONTENT) + 5)


def lengthen(file: MirrorFile) -> None:
    body_and_footer = os.pread(file.descriptor, 100_000, len(CONTENT))
    os.pwrite(file.descriptor, bytes(8) + body_and_footer, len(CONTENT))


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.invalidate(len(CONTENT)),
        lambda file: os.ftruncate(file.descriptor, 0),
        cut_short,
        flip_a_bit,
        lengthen,
    ],
    ids=["copied-in-part", "empty", "cut-short", "flipped", "longer"],
)
def test_nothing_counts_whose_description_is_not_whole(damage: Callable[[MirrorFile], None]) -> None:
    file = held()
    damage(file)
    assert MirrorFile(file.descriptor).part is None


def test_each_rank_opens_the_memory_that_its_agent_keeps_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    value = create_memory(2)
    monkeypatch.setenv(MIRROR, value)
    descriptors = [int(number) for number in value.partition(":")[2].split(",")]
    os.ftruncate(descriptors[FILES_PER_RANK], 7)
    first, second = MirrorMemory.of_agent(0), MirrorMemory.of_agent(1)
    assert first is not None
    assert second is not None
    assert [os.fstat(file.descriptor).st_size for file in first.files] == [0] * 4
    assert [os.fstat(file.descriptor).st_size for file in second.files] == [7, 0, 0, 0]
    assert MirrorMemory.of_agent(2) is None
    monkeypatch.delenv(MIRROR)
    assert MirrorMemory.of_agent(0) is None


def test_memory_of_an_agent_that_is_gone_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MIRROR, "1999999999:3,4,5,6")
    assert MirrorMemory.of_agent(0) is None
    assert "cannot be opened, so there are none" in caplog.text


def test_a_state_is_complete_with_all_parts_of_one_division() -> None:
    def parts(step: int, count: int, *numbers: int) -> list[dict[str, int]]:
        return [{"generation": 3, "step": step, "number": number, "count": count} for number in numbers]

    some = [*parts(10, 2, 0, 1), *parts(12, 2, 0, 0), *parts(11, 1, 0), *parts(13, 3, 0, 1), *parts(13, 2, 1)]
    assert complete_points(some) == [MirrorPoint(3, 11), MirrorPoint(3, 10)]


def test_chunks_are_numbered_by_their_place_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_trainer.checkpoint.mirror.CHUNK_BYTES", 4)
    content = torch.frombuffer(bytearray(b"....abcdef....xy"), dtype=torch.uint8)
    regions = [Region(path="a", start=8, size=6, offset=4), Region(path="b", start=0, size=2, offset=14)]
    assert checksums(content, regions) == {
        "a": {"2": checksum(b"abcd"), "3": checksum(b"ef")},
        "b": {"0": checksum(b"xy")},
    }


def test_a_manifest_comes_of_all_parts_and_of_no_less() -> None:
    whole = part(chunks={"weights.safetensors": {"0": checksum(CONTENT)}})
    manifest = manifest_of([part(1, 2), whole])
    assert manifest.step == 12
    assert [(entry.path, entry.size, entry.xxh3) for entry in manifest.files] == [
        ("weights.safetensors", len(CONTENT), [checksum(CONTENT)])
    ]
    with pytest.raises(Broken, match=r"no part has chunk 0 of weights\.safetensors"):
        manifest_of([part()])


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return run_directory(tmp_path, job())


def test_only_the_state_with_which_the_newest_generation_ended_or_began_counts(rundir: RunDir) -> None:
    begin(rundir, 1)
    begin(rundir, 2, continues=Continuation(generation=1, step=20, mirrored=True))
    assert is_newest(rundir, MirrorPoint(2, 30))
    assert is_newest(rundir, MirrorPoint(1, 20)), "generation 2 began with it, and has added nothing that is known"
    assert not is_newest(rundir, MirrorPoint(1, 25)), "generation 2 takes these steps itself"
    begin(rundir, 3, commit(rundir, 10))
    assert newest_that_counts(rundir, [MirrorPoint(2, 30)], []) == {}
    assert not is_newest(rundir, MirrorPoint(2, 30)), "generation 3 began from the disk"
    assert is_newest(rundir, MirrorPoint(3, 11))
    assert not is_newest(rundir, MirrorPoint(4, 11)), "no record tells how generation 4 began"


def test_the_disk_counts_unless_the_memory_is_newer(rundir: RunDir) -> None:
    begin(rundir, 1)
    assert newest_that_counts(rundir, [MirrorPoint(1, 20)], []) == {
        "point": MirrorPoint(1, 20),
        "checkpoint": None,
        "savedAt": None,
    }
    saved = commit(rundir, 20, created_at=5.0)
    assert newest_that_counts(rundir, [MirrorPoint(1, 20), MirrorPoint(1, 10)], []) == {}
    assert newest_that_counts(rundir, [MirrorPoint(1, 30), MirrorPoint(1, 21)], []) == {
        "point": MirrorPoint(1, 30),
        "checkpoint": saved.dump(),
        "savedAt": 5.0,
    }


def test_steps_that_a_rewind_takes_back_do_not_count(rundir: RunDir) -> None:
    begin(rundir, 1)
    rewind = Rewind(number=1, generation=1, bad_step=29, resume_before=21, skip_from=20, skip_to=40)
    found = newest_that_counts(rundir, [MirrorPoint(1, 30), MirrorPoint(1, 20)], [rewind])
    assert found["point"] == MirrorPoint(1, 20)
