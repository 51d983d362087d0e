"""Ranks say what they begin with, and one that differs is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tandem_trainer.agreement import (
    MAX_RANKS_NAMED,
    SampleDigest,
    SamplesDiffer,
    Terms,
    agree,
    deviating_ranks,
    ranks_of,
    refuse_samples,
)
from tandem_trainer.checkpoint.replicas import MAX_TENSORS, WINDOW, GradientsNotAveraged, Replicas
from tandem_trainer.checkpoint.restoring import ReplicasDiffer
from tandem_trainer.checkpoint.sharding import StageTensor
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group, Vote
from tests.support.threads import Control, on_ranks

RANKS = 3
TERMS = Terms(seed=1, samples=240, global_batch_size=24, epochs=3, strategy=("ddp",), settings={"emaDecay": None})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"samples": 1238}, "samples is 240 on ranks 0, 1 and 1,238 on rank 2"),
        ({"samples": None}, "samples is 240 on ranks 0, 1 and None on rank 2"),
        ({"strategy": ("fsdp",)}, "strategy is ['ddp'] on ranks 0, 1 and ['fsdp'] on rank 2"),
        ({"torch": "2.11.0"}, "and 2.11.0 on rank 2"),
        ({"code": "sha256:1"}, "code is None on ranks 0, 1 and sha256:1 on rank 2"),
        ({"settings": {"emaDecay": 0.9}}, "emaDecay is None on ranks 0, 1 and 0.9 on rank 2"),
        ({"drop_last": True, "epochs": 2}, "drop_last is False on ranks 0, 1 and True on rank 2; epochs is 3 on"),
    ],
)
def test_terms_that_differ_are_refused_with_ranks_and_values(changed: dict[str, Any], why: str) -> None:
    def begins(group: Group) -> None:
        agree(group, replace(TERMS, **changed) if group.rank == 2 else TERMS)

    found = on_ranks(RANKS, begins)
    assert [type(one) for one in found] == [ConfigurationError] * RANKS
    assert why in str(found[0])
    assert len({str(one) for one in found}) == 1
    assert on_ranks(RANKS, lambda group: agree(group, TERMS)) == [None] * RANKS


def test_of_many_ranks_some_are_named() -> None:
    assert ranks_of([7]) == "rank 7"
    assert ranks_of([*range(MAX_RANKS_NAMED)]) == "ranks 0, 1, 2, 3"
    assert ranks_of([*range(2000)]) == "ranks 0, 1, 2, 3 and 1,996 more"
    assert deviating_ranks(["a", "b", "a"]) == [1]
    assert deviating_ranks(["a", "b"]) == [1], "of two, rank 0 is right"
    assert deviating_ranks(["a", "a"]) == []


def votes(numbers: list[int], losses: list[int]) -> list[Vote]:
    """What ranks hear that have taken samples with these digests."""

    def vote(group: Any) -> Vote:
        group._control = Control(group)
        part = torch.full((losses[group.rank],), 1.0 + group.rank)
        found: Vote = group.vote(part, group.rank == 1, True, False, numbers[group.rank], 0.25, finish=group.rank == 2)
        return found

    return on_ranks(len(numbers), vote)


@pytest.mark.parametrize("wrong", [0, 1, 2**64 - 1, 2**63, 2**33 + 5])
def test_a_vote_tells_all_ranks_whether_one_has_taken_other_samples(wrong: int) -> None:
    same = 0x8000_0002_0000_FFFF
    assert [vote.same_samples for vote in votes([same, same, wrong], [2, 2, 2])] == [False] * 3
    # A rank that has what the mean of all is must not think that they have the same.
    assert [vote.same_samples for vote in votes([1, 2, 3], [2, 2, 2])] == [False] * 3
    alike = votes([same] * 3, [2, 2, 2])
    assert alike == [Vote([6.0, 6.0], True, True, True, False, False, True, 0.25, 2)] * 3


def test_ranks_that_have_taken_different_numbers_of_steps_hear_it_too() -> None:
    assert [vote.same_samples for vote in votes([5, 6], [2, 7])] == [False] * 2


def test_the_ranks_that_took_other_samples_are_named_with_the_steps() -> None:
    def takes(group: Group) -> None:
        taken = SampleDigest()
        for step in (8, 9):
            taken.add(step, torch.arange(4) + (step == 9 and group.rank == 1), content=0)
        refuse_samples(group, taken, 8, 9)

    found = on_ranks(RANKS, takes)
    assert [(type(one), one.ranks) for one in found] == [(SamplesDiffer, [1])] * RANKS
    assert str(found[2]).startswith("rank 1 took other samples in steps 8 to 9 than the other ranks")


def test_what_is_taken_depends_on_step_ids_and_content() -> None:
    def digest(step: int, ids: list[int], content: int) -> int:
        taken = SampleDigest()
        taken.add(step, torch.tensor(ids), content)
        return taken.digest

    assert digest(1, [1, 2], 0) == digest(1, [1, 2], 0)
    assert len({digest(*one) for one in ((1, [1, 2], 0), (2, [1, 2], 0), (1, [2, 1], 0), (1, [1, 2], 3))}) == 4


class Replica:
    """One rank's weights, some, or one that is longer than a window, and their moments."""

    def __init__(self, weights: int = 3, size: int = 5) -> None:
        self.parts = nn.ParameterList([torch.full((size,), 2.0) for _ in range(weights)])
        self.parts.register_buffer("seen", torch.zeros(1))
        self.optimizer = torch.optim.Adam(self.parts.parameters())
        self.average = AveragedModel(self.parts)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        for one in self.parts:
            one.grad = torch.ones_like(one)
        self.optimizer.step()

    def replicas(self, group: Group, mistake: str = "") -> Replicas:
        return Replicas(group, TrainState(self.parts, self.optimizer, self.average).replicas, lambda: mistake)


def compared(ranks: list[Replica], times: int = 1, mistake: str = "") -> list[Any]:
    """After how many comparisons a rank has raised what; None: it has not."""

    def compare(group: Group) -> Any:
        replicas = ranks[group.rank].replicas(group, mistake)
        for number in range(1, times + 1):
            try:
                replicas.compare(number)
            except (ReplicasDiffer, ConfigurationError) as error:
                return number, error
        return None

    return on_ranks(len(ranks), compare)


def test_one_wrong_weight_is_found_and_named() -> None:
    ranks = [Replica() for _ in range(RANKS)]
    ranks[1].parts[2].data[4] += 0.5
    found = compared(ranks)
    assert [type(error) for _, error in found] == [ReplicasDiffer] * RANKS
    why = (
        "after step 1 rank 1 held other weights than the other ranks: 1 of 6 tensors that were compared, the first 2. "
    )
    assert str(found[0][1]).startswith(why)


def moments_apart(rank: Replica) -> None:
    rank.optimizer.state[rank.parts[1]]["exp_avg"][2] += 0.5


def steps_apart(rank: Replica) -> None:
    rank.optimizer.state[rank.parts[1]]["step"] += 1


def frozen_apart(rank: Replica) -> None:
    rank.parts[0].data[1] = 7.0


def average_apart(rank: Replica) -> None:
    rank.average.module[1].data[0] = 0.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (moments_apart, "held other moments than the other ranks: 1 of 15 tensors that were compared, the first 1/exp"),
        (steps_apart, "held other moments than the other ranks: 1 of 15 tensors that were compared, the first 1/step"),
        (frozen_apart, "held other frozen weights than the other ranks: 1 of 15 tensors"),
        (average_apart, "held other averages than the other ranks: 1 of 15 tensors that were compared, the first 1. "),
    ],
)
def test_moments_frozen_weights_and_averages_are_compared(change: Callable[[Replica], None], why: str) -> None:
    ranks = [Replica() for _ in range(RANKS)]
    for rank in ranks:
        rank.step()
        rank.parts[0].requires_grad_(False)
    assert compared(ranks) == [None] * RANKS
    change(ranks[2])
    found = compared(ranks)
    assert [type(error) for _, error in found] == [ReplicasDiffer] * RANKS
    assert f"after step 1 rank 2 {why}" in str(found[0][1])


def test_ranks_whose_optimizers_have_state_of_other_tensors_are_named() -> None:
    ranks = [Replica() for _ in range(RANKS)]
    for rank in ranks:
        rank.step()
    del ranks[1].optimizer.state[ranks[1].parts[2]]
    found = compared(ranks)
    assert [type(error) for _, error in found] == [ReplicasDiffer] * RANKS
    assert "after step 1 rank 1 held other tensors than the other ranks: of other names" in str(found[0][1])


@pytest.mark.parametrize("strange", range(4))
def test_parts_are_compared_by_the_ranks_that_hold_the_same(strange: int) -> None:
    """Ranks 0 and 2 hold one half of a weight, of another size than the other half, which ranks 1 and 3 hold."""

    def held(rank: int, value: float) -> dict[str, dict[str, Tensor]]:
        part = torch.full((3 + rank % 2,), value)
        return {"weights": {"split": StageTensor.wrap(part, (rank % 2,), torch.device("cpu"))}}

    def compare(group: Group, apart: float) -> Any:
        value = group.rank % 2 + apart * (group.rank == strange) + 1.0
        replicas = Replicas(group, lambda: held(group.rank, value), str)
        try:
            replicas.compare(1)
        except ReplicasDiffer as error:
            return str(error)
        return ""

    assert on_ranks(4, lambda group: compare(group, 0.0)) == [""] * 4
    assert on_ranks(4, lambda group: compare(group, 1e-6)) == [""] * 4, "that is rounding"
    found = on_ranks(4, lambda group: compare(group, 0.5))
    # Of two, the first is right.
    assert all(one.startswith(f"after step 1 rank {strange | 2} held other weights") for one in found), found


def test_where_every_rank_has_another_part_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(group: Group) -> int:
        tensor = StageTensor.wrap(torch.full((3,), float(group.rank)), (group.rank,), torch.device("cpu"))
        replicas = Replicas(group, lambda: {"weights": {"split": tensor}}, str)
        replicas.compare(1)
        return sum(len(one.windows) for one in replicas._samples()[0].values())

    assert on_ranks(RANKS, compare) == [0] * RANKS


def test_a_known_mistake_in_the_script_is_never_tried_again() -> None:
    ranks = [Replica() for _ in range(2)]
    assert compared(ranks, mistake="call it") == [None] * 2, "what changes nothing is none"
    ranks[1].parts[0].data += 0.5
    found = compared(ranks, mistake="call it")
    assert [type(error) for _, error in found] == [GradientsNotAveraged] * 2
    assert str(found[0][1]) == "after step 1 rank 1 held other weights than the other ranks: call it"


def test_rounding_and_buffers_are_each_ranks_own(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [Replica() for _ in range(2)]
    ranks[1].parts.get_buffer("seen").add_(1)
    ranks[1].average.module.get_buffer("seen").add_(1)
    assert compared(ranks) == [None] * 2
    assert not caplog.records
    ranks[1].parts[1].data[0] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    assert compared(ranks, times=3) == [None] * 2
    assert [record.message for record in caplog.records] == [
        "step=1 the weights of rank 1 differ by rounding from those of the others"
    ]


@pytest.mark.parametrize(
    ("weights", "size", "place"),
    [(3, 4 * WINDOW, 3 * WINDOW + 1), (2 * MAX_TENSORS + 1, 5, 4), (MAX_TENSORS + 1, 2 * WINDOW, 2 * WINDOW - 1)],
)
def test_every_weight_has_its_turn(weights: int, size: int, place: int) -> None:
    ranks = [Replica(weights, size) for _ in range(2)]
    ranks[1].parts[weights - 1].data[place] += 100.0
    windows = -(-size // WINDOW)
    found = compared(ranks, times=windows * -(-weights // MAX_TENSORS) + 1)
    assert [type(error) for _, error in found] == [ReplicasDiffer] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_weights_of_any_type_are_compared(dtype: torch.dtype) -> None:
    ranks = [Replica() for _ in range(2)]
    for rank in ranks:
        rank.parts[0].data = torch.ones(3, dtype=torch.int8).to(dtype)
    ranks[1].parts[0].data[1] = 3
    assert "the first 0." in str(compared(ranks)[0][1])
