"""One checkpoint written by several ranks: every byte by exactly one of them, and nothing committed in part."""

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.rundir.checkpoint import CHUNK_BYTES, WEIGHTS, Broken, DataPosition, chunks
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint import saving, staging
from tandem_trainer.checkpoint.exchange import element_ranges
from tandem_trainer.checkpoint.file_names import FULL_WEIGHTS, OPTIMIZER
from tandem_trainer.checkpoint.format import header, parse
from tandem_trainer.checkpoint.reader import read_contents, read_full_weights, read_weights
from tandem_trainer.checkpoint.saving import Author, Outcome, Saver
from tandem_trainer.checkpoint.staging import MIN_PART, FileLayout, Staging, shared_memory
from tandem_trainer.checkpoint.train_state import Contents
from tests.support import manifests
from tests.support.checkpoints import begin
from tests.support.waiting import SECONDS, until

POSITION = DataPosition(seed=0, epoch=0, cursor=0)
ALL_KINDS = {
    "small": torch.tensor(7, dtype=torch.int64),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "odd": torch.tensor([True, False, True]),
    "wide": torch.randn(2, 2, dtype=torch.float64),
    "strided": torch.randn(4, 6).t(),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return made(tmp_path / "run")


def made(path: Path) -> RunDir:
    """A run directory whose first generation has begun."""
    run = manifests.run_directory(path, manifests.job("test"))
    begin(run, 1)
    return run


class Ranks:
    """The savers of all ranks of a generation, in one process."""

    def __init__(self, rundir: RunDir, generation: int, world_size: int, rounds: bool = False) -> None:
        authors = [Author(generation, None, world_size, rank, rounds) for rank in range(world_size)]
        self.savers = [Saver(rundir, author, lambda: None, lambda outcome: None) for author in authors]

    def save(self, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> list[Outcome]:
        for saver in self.savers:
            saver.save(step, POSITION, Contents(weights, optimizer))
        return [saver.wait() for saver in self.savers]

    def close(self) -> None:
        for saver in self.savers:
            saver.close()


@pytest.fixture
def three(rundir: RunDir) -> Iterator[Ranks]:
    ranks = Ranks(rundir, 1, 3)
    yield ranks
    ranks.close()


def kill_writer(saver: Saver) -> None:
    process = saver._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def large_state() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three parts and a bit, with tensors that cross their borders."""
    numbers = MIN_PART * 3 // 4
    weights = {"a": torch.arange(numbers // 2, dtype=torch.float32), "b": torch.full((999,), 2.0, dtype=torch.float64)}
    moments = torch.arange(numbers // 2, dtype=torch.float32).neg()
    return weights, {"a/exp_avg": moments, "a/step": torch.tensor(4.0), "b/exp_avg": torch.ones(5, 7).t()}


def test_staged_bytes_are_safetensors_files(tmp_path: Path) -> None:
    files = {"a.safetensors": ALL_KINDS, "none.safetensors": {}, "b.safetensors": {"x": torch.randn(9)}}
    descriptor = shared_memory()
    staging = Staging(descriptor, files, FileLayout.from_files(files, 1), 0)
    staging.copy(files)
    assert [region.path for region in staging.regions] == list(files)
    for region in staging.regions:
        content = os.pread(descriptor, region.size, region.offset)
        by_the_library, by_us = safetensors.torch.load(content), parse(memoryview(bytearray(content)))
        assert by_the_library.keys() == by_us.keys() == files[region.path].keys()
        for name, tensor in files[region.path].items():
            assert torch.equal(by_the_library[name], tensor), name
            assert torch.equal(by_us[name], tensor), name
            assert by_us[name].dtype == tensor.dtype
    os.close(descriptor)


def test_what_the_library_writes_is_read_by_us() -> None:
    tensors = {name: tensor.contiguous() for name, tensor in ALL_KINDS.items()}
    read = parse(memoryview(bytearray(safetensors.torch.save(tensors, metadata={"format": "pt"}))))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


@given(st.data())
def test_whatever_is_altered_in_a_header_is_refused_or_harmless(data: st.DataObject) -> None:
    """Never a tensor outside of the bytes that there are, never an error of another kind."""
    sound = header(ALL_KINDS) + bytes(200)
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    try:
        tensors = parse(memoryview(content))
    except Broken:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(content) * len(tensors)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 9))
def test_each_chunk_of_each_file_belongs_to_exactly_one_part(megabytes: list[int], world_size: int) -> None:
    sizes = {f"file-{number}": size * 2**20 + number for number, size in enumerate(megabytes)}
    parts = max(1, min(world_size, sum(sizes.values()) // MIN_PART))
    found = FileLayout({}, sizes, parts)
    covered: dict[str, list[tuple[int, int]]] = {path: [] for path in sizes}
    for part in range(parts):
        for piece in found.pieces(part):
            assert piece.start % CHUNK_BYTES == 0
            covered[piece.path].append((piece.start, piece.size))
    for path, size in sizes.items():
        end = 0
        for start, length in covered[path]:
            assert start == end
            end += length
        assert end == size
    loads = [sum(chunks(piece.size) for piece in found.pieces(part)) for part in range(parts)]
    assert max(loads) - min(loads) <= 1


def test_parts_are_spread_over_the_ranks() -> None:
    found = FileLayout({}, {"file": 2 * MIN_PART}, 2)
    assert [found.part_of(rank, 8) for rank in range(8)] == [0, None, None, None, 1, None, None, None]
    assert FileLayout.from_files({"small": {"w": torch.zeros(9)}}, 64).parts == 1


def test_three_ranks_write_what_one_reads(rundir: RunDir, three: Ranks) -> None:
    weights, optimizer = large_state()
    outcomes = three.save(10, weights, optimizer)
    assert outcomes[0]["committed"] == "step-000000010"
    assert all(outcome["written"] >= MIN_PART // 2 for outcome in outcomes[1:])
    (manifest,) = rundir.committed()
    assert manifest.size == outcomes[0]["bytes"]
    folder = rundir.checkpoint(manifest.name)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(
        ["manifest.json", WEIGHTS, OPTIMIZER]
    )
    for read, written in (
        (read_weights(folder, manifest), weights),
        (read_contents(folder, manifest).optimizer, optimizer),
    ):
        assert read.keys() == written.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
    with safetensors.safe_open(str(folder / WEIGHTS), framework="pt") as file:
        assert torch.equal(file.get_tensor("a"), weights["a"]), "a file for everybody"


def test_rounded_weights_for_evaluators_and_full_ones_to_resume_from(rundir: RunDir) -> None:
    weights = {"w": torch.randn(1000), "count": torch.tensor(3)}
    ranks = Ranks(rundir, 1, 1, rounds=True)
    assert "committed" in ranks.save(10, weights, {"w/step": torch.tensor(1.0)})[0]
    ranks.close()
    (manifest,) = rundir.committed()
    folder = rundir.checkpoint(manifest.name)
    rounded, full = read_weights(folder, manifest), read_full_weights(folder, manifest)
    assert rounded["w"].dtype == torch.bfloat16
    assert torch.equal(rounded["w"], weights["w"].to(torch.bfloat16))
    assert rounded["count"].item() == 3
    assert torch.equal(full["w"], weights["w"])
    assert manifest.entry(WEIGHTS).size < 0.6 * manifest.entry(FULL_WEIGHTS).size


def test_a_part_whose_writer_dies_fails_the_save_at_once_and_the_next_one_is_whole(
    rundir: RunDir, three: Ranks
) -> None:
    weights, optimizer = large_state()
    three.save(10, weights, optimizer)
    kill_writer(three.savers[2])
    outcomes = three.save(20, weights, optimizer)
    assert "part 2 was not written: the writer process has died" in outcomes[0]["failed"], "not: within ten minutes"
    assert rundir.checkpoint_names() == ["step-000000010"]
    assert "committed" in three.save(30, weights, optimizer)[0]
    until(lambda: not list(rundir.checkpoints.glob(".tmp-*")), "the end of what is left of the save that failed")


def test_a_writer_that_cannot_be_started_again_fails_saves_until_it_can(
    rundir: RunDir, three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, optimizer = large_state()
    three.save(10, weights, optimizer)
    kill_writer(three.savers[0])
    with monkeypatch.context() as short:
        short.setattr(saving.subprocess, "Popen", refused)
        for step in (20, 30, 40):
            assert "Cannot allocate memory" in three.save(step, weights, optimizer)[0]["failed"]
    assert "committed" in three.save(50, weights, optimizer)[0]
    assert rundir.checkpoint_names() == ["step-000000010", "step-000000050"]


def test_a_writer_that_cannot_be_started_at_first_is_started_for_the_save(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, contents = Ranks(rundir, 1, 1), Contents({"w": torch.ones(3)}, {})
    with monkeypatch.context() as short:
        short.setattr(saving.subprocess, "Popen", refused)
        ranks.savers[0].prepare(contents)
    assert "committed" in ranks.save(10, contents.weights, contents.optimizer)[0]
    ranks.close()


def refused(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_part_that_fails_before_the_others_begin_is_not_waited_for(rundir: RunDir, three: Ranks) -> None:
    weights, optimizer = large_state()
    three.save(10, weights, optimizer)
    kill_writer(three.savers[2])
    three.savers[2].save(20, POSITION, Contents(weights, optimizer))
    assert "failed" in three.savers[2].wait()
    for saver in three.savers[:2]:
        saver.save(20, POSITION, Contents(weights, optimizer))
    assert "part 2 was not written: the writer process has died" in three.savers[0].wait()["failed"]
    three.savers[1].wait()
    assert "committed" in three.save(30, weights, optimizer)[0]


def test_without_a_part_nothing_is_committed_and_a_new_generation_ends_the_wait(
    rundir: RunDir, three: Ranks, tmp_path: Path
) -> None:
    weights, optimizer = large_state()
    whole = Ranks(made(tmp_path / "other"), 1, 3)
    for saver in three.savers[:2]:
        saver.save(10, POSITION, Contents(weights, optimizer))
    assert "written" in three.savers[1].wait()
    assert "committed" in whole.save(10, weights, optimizer)[0], "so long a save takes that has all of its parts"
    whole.close()
    assert three.savers[0].busy
    assert rundir.checkpoint_names() == []
    begin(rundir, 2)
    assert "superseded" in three.savers[0].wait()
    assert rundir.checkpoint_names() == []


def test_a_writer_whose_rank_has_died_does_not_wait_for_ever(rundir: RunDir, three: Ranks) -> None:
    weights, optimizer = large_state()
    three.savers[0].save(10, POSITION, Contents(weights, optimizer))
    process = three.savers[0]._process
    assert process.stdin is not None
    until(lambda: list(rundir.checkpoints.glob(".tmp-*/part-0000.json")), "the note of the first part")
    process.stdin.close()
    assert "failed" in three.savers[0].wait()
    process.wait(SECONDS)
    assert list(rundir.checkpoints.iterdir()) == []


def test_the_longest_stall_of_all_ranks_is_told(rundir: RunDir, three: Ranks) -> None:
    weights, optimizer = large_state()
    outcomes = three.save(10, weights, optimizer)
    notes = [outcome["stallSeconds"] for outcome in outcomes]
    assert outcomes[0]["stallSeconds"] >= max(notes[1:])
    assert json.dumps(outcomes)


def test_a_type_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="w has dtype"):
        staging.FileLayout.from_files({"f": {"w": torch.zeros(1, dtype=torch.complex128)}}, 1)


def test_tensors_in_another_order_in_memory_are_not_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    files = {"f": {"images": images, "rows": torch.randn(6, 7).t(), "plain": torch.randn(9)}}
    laid_out = staging.FileLayout.from_files(files, 1)
    staged = Staging(shared_memory(), files, laid_out, 0)
    made: list[int] = []
    reshape = torch.Tensor.reshape

    def noted(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        found = reshape(tensor, *shape)
        if found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            made.append(tensor.numel())
        return found

    monkeypatch.setattr(torch.Tensor, "reshape", noted)
    staged.copy(files)
    assert made == []
    (region,) = staged.regions
    content = bytearray(staged._memory[region.offset : region.offset + region.size])
    found = parse(memoryview(content))
    assert all(torch.equal(found[name], tensor) for name, tensor in files["f"].items())


def test_each_element_is_written_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 64)
    monkeypatch.setattr(staging, "chunks", lambda size: -(-size // 64))
    monkeypatch.setattr(staging, "MIN_PART", 64)
    files = {"f": {"a": torch.zeros(5, 9), "b": torch.zeros(3), "none": torch.zeros(0)}, "g": {"c": torch.zeros(100)}}
    layout = FileLayout.from_files(files, 6)
    found = element_ranges(files, layout, 6)
    for path, tensors in files.items():
        for name, tensor in tensors.items():
            numbers = [number for run in found[path, name] for number in range(run.first, run.end)]
            assert numbers == list(range(tensor.numel())), name
    assert {run.rank for one in found.values() for run in one} <= {*layout.writers(6)}
    assert len(found["g", "c"]) > 1, "one tensor in several parts"


def test_one_rank_alone_writes_where_it_saves_for_all(rundir: RunDir) -> None:
    state = {"big": torch.arange(3 * MIN_PART // 4, dtype=torch.float32)}
    savers = [Saver(rundir, Author(1, None, 2, rank, writers=1), lambda: None, lambda outcome: None) for rank in (0, 1)]
    other = {"big": torch.zeros_like(state["big"])}
    for saver, weights in zip(savers, (state, other), strict=True):
        saver.save(1, POSITION, Contents(weights, {}))
    assert savers[0].wait()["committed"]
    for saver in savers:
        saver.close()
    (manifest,) = rundir.committed()
    assert manifest.world_size == 2
    assert torch.equal(read_weights(rundir.checkpoint(manifest.name), manifest)["big"], state["big"])
