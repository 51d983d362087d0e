"""Ranks agree before they take a checkpoint, read it once a node, and compare what they hold afterwards."""

import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tandem.job.resource import CheckpointSpec
from tandem.rundir import checkpoint
from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import DatasetCommit, GenerationRecord
from tandem_trainer.checkpoint import node_memory
from tandem_trainer.checkpoint.node_memory import FileMemory
from tandem_trainer.checkpoint.restoring import (
    NoUsableCheckpoint,
    ReplicasDiffer,
    Restored,
    compare,
    digests,
    record_start,
    restore,
    weighted_sum,
)
from tandem_trainer.checkpoint.saving import Author, Saver
from tandem_trainer.checkpoint.sharding import StageTensor
from tandem_trainer.checkpoint.staging import shared_memory
from tandem_trainer.checkpoint.state import CheckpointMismatch
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.process_group import Group, PeerFault
from tandem_trainer.session_settings import agreed_settings
from tests.support import manifests
from tests.support.checkpoints import hash_file
from tests.support.threads import on_ranks

RANKS = 3
STEPS = (10, 20)


class Replica:
    """A model with moments, whose numbers say after which step they were saved."""

    def __init__(self, step: float = 0.0) -> None:
        self.model = nn.Linear(300, 40)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.data.fill_(step)
            parameter.grad = torch.full_like(parameter, step)
        if step:
            self.optimizer.step()
        self.kept = TrainState(self.model, self.optimizer)

    def resume(self, rundir: RunDir, group: Group) -> Restored:
        restored = restore(rundir, group, lambda found: self.kept.check(found.contents))
        if restored.loaded is not None:
            self.kept.load(restored.loaded.contents)
        compare(group, self.kept.replicated())
        restored.release()
        return restored

    @property
    def numbers(self) -> set[float]:
        return {value for tensor in self.kept.replicated().values() for value in tensor.unique().tolist()}


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    found = manifests.run_directory(tmp_path, manifests.job("test", checkpoint={"keepLast": 9}))
    assert found.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    saver = Saver(found, Author(1, None, 1), lambda: None, lambda outcome: None)
    for step in STEPS:
        saver.save(step, DataPosition(seed=0, epoch=0, cursor=0), Replica(step).kept.contents({}))
        assert "committed" in saver.wait()
    saver.close()
    return found


def started(rundir: RunDir, replicas: list[Replica] | None = None) -> tuple[list[Any], list[Replica]]:
    """What a start came to on each rank."""
    ranks = replicas or [Replica() for _ in range(RANKS)]
    return on_ranks(len(ranks), lambda group: ranks[group.rank].resume(rundir, group)), ranks


def test_all_ranks_have_what_was_saved(rundir: RunDir) -> None:
    found, ranks = started(rundir)
    assert [restored.loaded.manifest.step for restored in found] == [20] * RANKS
    assert [rank.numbers for rank in ranks] == [{20.0}] * RANKS


def test_the_ranks_of_a_node_read_each_byte_once(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []

    def counted(descriptor: int, entry: Any, number: int, place: memoryview) -> bool:
        read.append((entry.path, number))
        return checkpoint.read_chunk(descriptor, entry, number, place)

    monkeypatch.setattr(node_memory, "read_chunk", counted)
    started(rundir)
    newest = rundir.committed()[0]
    assert sorted(read) == sorted((entry.path, number) for entry in newest.files for number in range(len(entry.xxh3)))


def test_where_memory_cannot_be_shared_each_rank_reads_for_itself(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "_open_peer_memory", lambda *offer: None)
    found, ranks = started(rundir)
    assert [restored.loaded.manifest.step for restored in found] == [20] * RANKS
    assert [rank.numbers for rank in ranks] == [{20.0}] * RANKS


def test_one_ranks_wrong_checksum_sets_nothing_aside(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 finds it sound: the fault is not the disk's, and an older checkpoint would cut a sound one off."""
    wrong: list[int] = []

    def fails_once(descriptor: int, entry: Any, number: int, place: memoryview) -> bool:
        if not wrong and entry.path == "weights.safetensors":
            wrong.append(number)
            return False
        return checkpoint.read_chunk(descriptor, entry, number, place)

    monkeypatch.setattr(node_memory, "read_chunk", fails_once)
    found, ranks = started(rundir)
    assert sorted(type(one).__name__ for one in found) == ["OSError", "PeerFault", "PeerFault"]
    assert "does not match its checksum" in str(next(one for one in found if isinstance(one, PeerFault)))
    assert rundir.checkpoint_names() == ["step-000000010", "step-000000020"]
    assert [rank.numbers for rank in ranks] == [{0.0}] * RANKS


def test_what_rank_0_finds_damaged_as_well_is_set_aside_and_all_take_the_one_before(rundir: RunDir) -> None:
    path = rundir.checkpoint("step-000000020") / "state" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    found, ranks = started(rundir)
    assert [restored.loaded.manifest.step for restored in found] == [10] * RANKS
    assert [list(restored.passed_over) for restored in found] == [["step-000000020"]] * RANKS
    assert [rank.numbers for rank in ranks] == [{10.0}] * RANKS
    assert (rundir.checkpoints / "step-000000020.bad").is_dir()


def test_a_rank_that_it_does_not_fit_stops_all_before_anything_is_changed(rundir: RunDir) -> None:
    ranks = [Replica() for _ in range(RANKS)]
    ranks[1].model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    found, _ = started(rundir, ranks)
    assert [type(one) for one in found] == [PeerFault, CheckpointMismatch, PeerFault]
    assert [rank.numbers for rank in ranks] == [{0.0}] * RANKS
    assert rundir.checkpoint_names() == ["step-000000010", "step-000000020"]


def test_a_device_that_fails_while_the_state_is_put_in_place_sets_nothing_aside(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Replica() for _ in range(RANKS)]

    def fails(state: Any) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(ranks[2].optimizer, "load_state_dict", fails)
    found, _ = started(rundir, ranks)
    assert isinstance(found[2], RuntimeError)
    assert not any(isinstance(one, Restored) for one in found)
    assert rundir.checkpoint_names() == ["step-000000010", "step-000000020"]


def test_replicas_that_differ_do_not_go_on(rundir: RunDir) -> None:
    ranks = [Replica(20.0) for _ in range(RANKS)]
    ranks[2].optimizer.state[ranks[2].model.bias]["momentum_buffer"][7] += 2**-10

    found = on_ranks(RANKS, lambda group: compare(group, ranks[group.rank].kept.replicated()))
    assert [type(one) for one in found] == [ReplicasDiffer] * RANKS
    assert "ranks [2] hold another state than the others: 1 tensors, the first the moments of bias" in str(found[0])


def test_ranks_that_have_read_different_commits_of_a_data_set_do_not_begin(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "begins")
    run.create()
    first = DatasetCommit(id="org/talk", commit="1" * 40)

    def begins(read: list[list[DatasetCommit]]) -> list[Any]:
        return on_ranks(RANKS, lambda group: record_start(run, group, 1, [], None, None, read[group.rank]))

    found = begins([[first], [first], [first.model_copy(update={"commit": "2" * 40})]])
    assert [type(one) for one in found] == [ReplicasDiffer] * RANKS
    assert f"have read org/talk at commit {'1' * 40} and at commit {'2' * 40}" in str(found[0])
    assert run.generation_records() == []
    # A rank that the hub did not tell which commit it is has read the same branch.
    assert begins([[], [first], [first]]) == [None] * RANKS
    (record,) = run.generation_records()
    assert record.datasets == [first]


def test_a_weight_that_stages_share_is_compared_where_ranks_have_nothing_else_in_common() -> None:
    """A pipeline of three stages, of which the first and the last have the embedding."""

    def held(rank: int, embedding: float) -> dict[str, torch.Tensor]:
        cpu = torch.device("cpu")
        found = {f"weights of block {rank}": StageTensor.wrap(torch.full((4,), float(rank)), (rank,), cpu)}
        if rank != 1:
            found["weights of embedding"] = StageTensor.wrap(torch.full((4,), embedding), (0,), cpu, stages_share=True)
        return dict(found)

    assert on_ranks(3, lambda group: compare(group, held(group.rank, 1.0))) == [None] * 3
    found = on_ranks(3, lambda group: compare(group, held(group.rank, 1.0 + group.rank)))
    assert [type(one) for one in found] == [ReplicasDiffer] * 3
    why = "ranks [2] hold another state than the others: 1 tensors, the first the weights of embedding"
    assert why in str(found[0])


def test_a_checkpoint_of_another_version_is_not_passed_over(rundir: RunDir) -> None:
    body = rundir.manifest("step-000000020").sealed() | {"format": 99}
    body["digest"] = checkpoint._digest(body)
    (rundir.checkpoint("step-000000020") / checkpoint.FILE).write_bytes(json.dumps(body).encode())
    found, _ = started(rundir)
    assert all("is of format 99" in str(one) for one in found)
    assert rundir.checkpoint_names() == ["step-000000010", "step-000000020"]


def test_with_none_left_every_rank_says_so(rundir: RunDir) -> None:
    for name in rundir.checkpoint_names():
        rundir.set_aside(name, why="it is damaged")
    found, _ = started(rundir)
    assert [type(one) for one in found] == [NoUsableCheckpoint] * RANKS


@pytest.mark.parametrize("size", [1, 2, 6, 8, 1000, 1001])
def test_each_bit_changes_the_digest_of_a_device(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    known = {weighted_sum(content)}
    places = range(0, size, max(1, size // 50))
    for at in places:
        altered = content.clone()
        altered[at] ^= 1 << (at % 8)
        known.add(weighted_sum(altered))
    assert len(known) == 1 + len(places)


def test_a_digest_does_not_depend_on_the_order_in_memory() -> None:
    images = torch.randn(2, 3, 4, 5)
    assert digests({"it": images}) == digests({"it": images.to(memory_format=torch.channels_last)})
    assert digests({"it": images}) != digests({"it": images.transpose(0, 1)})


def test_memory_that_all_have_passed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "MIN_FREED_BYTES", 2**20)
    (tmp_path / "large").write_bytes(os.urandom(8 * 2**20))
    entries = [hash_file(tmp_path / "large")]
    descriptor = shared_memory()
    one = FileMemory(descriptor, entries, sharers=2, place=0)
    other = FileMemory(os.dup(descriptor), entries, sharers=2, place=1)
    one.sign()
    assert one.fill(tmp_path) is None
    assert other.fill(tmp_path) is None
    used = [os.fstat(descriptor).st_blocks * 512]
    parts = [torch.frombuffer(memory_of.file("large"), dtype=torch.uint8) for memory_of in (one, other)]
    for first in range(0, len(parts[0]), 2**20):
        one.release(parts[0][first : first + 2**20])
        assert os.fstat(descriptor).st_blocks * 512 == used[-1]
        other.release(parts[1][first : first + 2**20])
        used.append(os.fstat(descriptor).st_blocks * 512)
    assert [before - after for before, after in itertools.pairwise(used)] == [2**20] * 8


def test_a_disk_that_gives_an_error_is_no_damage(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*chunk: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(node_memory, "read_chunk", fails)
    found, _ = started(rundir)
    assert any(isinstance(one, OSError) for one in found)
    assert rundir.checkpoint_names() == ["step-000000010", "step-000000020"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error"), ["OSError", "PeerFault", "PeerFault"]),
        (PermissionError(errno.EACCES, "Permission denied"), ["ConfigurationError"] * 3),
    ],
    ids=["a disk that fails", "a folder of somebody else's"],
)
def test_a_session_whose_folder_cannot_be_used_is_rank_0s_fault_or_everybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, expected: list[str]
) -> None:
    def fails(_: RunDir) -> None:
        raise error

    monkeypatch.setattr(RunDir, "create", fails)
    found = on_ranks(RANKS, lambda group: agreed_settings(RunDir(tmp_path / "run"), group, CheckpointSpec()))
    assert [type(one).__name__ for one in found] == expected
    assert all("cannot be used" in str(one) for one in found)
