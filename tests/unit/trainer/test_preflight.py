"""What a pre-flight checks, and who is paired with whom."""

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch

from tandem.wire.protocol import Member, Membership
from tandem_trainer.agent.preflight import MAX_ROUNDS, ProcessPlace, opponents, process, processes

CPU = torch.device("cpu")


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 8, 9, 30])
def test_everybody_meets_everybody_once_and_one_in_each_round(replicas: int) -> None:
    tables = [opponents(replica, replicas, rounds=replicas) for replica in range(replicas)]
    for replica, table in enumerate(tables):
        met = [other for other in table if other is not None]
        assert sorted(met) == [other for other in range(replicas) if other != replica]
        for number, other in enumerate(table):
            assert other is None or tables[other][number] == replica


def test_in_a_large_world_there_are_a_few_rounds_alone() -> None:
    assert len(opponents(17, 5000)) == MAX_ROUNDS


def test_a_sound_device_takes_some_time_for_a_product() -> None:
    assert 0 < process.compute(CPU) < 60


@pytest.mark.parametrize(
    ("after", "why"),
    [(0, "with 1 of 512 rows wrong"), (3, "another matrix product the second time than the first")],
    ids=["always", "sometimes"],
)
def test_one_wrong_number_of_a_product_is_found(monkeypatch: pytest.MonkeyPatch, after: int, why: str) -> None:
    whole, calls = torch.matmul, [0]

    def broken(*given: Any, out: torch.Tensor) -> torch.Tensor:
        whole(*given, out=out)
        calls[0] += 1
        if calls[0] > after:
            out[5, 5] += 1
        return out

    monkeypatch.setattr(torch, "matmul", broken)
    with pytest.raises(process.WrongResult, match=why):
        process.compute(CPU)


def test_a_unit_that_adds_wrong_is_found_by_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda self, **k: whole(self, **k) + int(self.dtype == torch.float32))
    with pytest.raises(process.WrongResult, match="added up 1048576 numbers to"):
        process.compute(CPU)


def test_a_process_whose_agent_is_gone_does_nothing() -> None:
    place = ProcessPlace(0, 1, 0, 1, 0, "127.0.0.1", 1, "preflight/1", agent=os.getpid() + 1)
    command = [sys.executable, "-m", "tandem_trainer.agent.preflight", place.encoded()]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b""


def test_a_replica_alone_checks_its_device_and_leaves_no_process() -> None:
    member = Member(replica="worker-0", incarnation="a", address="127.0.0.1", port=1, processes=1)
    report = processes.run(Membership(generation=3, members=[member], reason="Started"), 0, lambda: True)
    assert (report.generation, report.wrong, report.pairs, report.all_reduce) == (3, "", [], None)
    assert report.product_seconds
    assert processes.run(Membership(generation=4, members=[member], reason="Started"), 0, lambda: False) is None
    left = [child.cmdline() for child in psutil.Process().children()]
    assert not any("tandem_trainer.agent.preflight" in words for words in left)
