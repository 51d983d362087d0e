"""A rank that computes another gradient of the same samples is named, with its machine, and nothing else is changed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tandem.job.tasks import Loop
from tandem_trainer import gradient_check
from tandem_trainer.data.supply import Share
from tandem_trainer.gradient_check import EVERY_STEPS, GradientCheck
from tandem_trainer.process_group import Group
from tests.support.threads import on_ranks

STRANGE = 1
Flip = Callable[[int, int, Tensor], None]
"""What changes a gradient: called with the rank, the number of the computation, and the gradient."""


def flip(gradient: Tensor, bit: int = 30) -> None:
    """Change a bit of one element."""
    gradient.view(torch.int32).view(-1)[3] ^= 1 << bit


@dataclass
class Rank:
    """One rank's model, and what it records."""

    flips: Flip
    changes: Callable[[int, Tensor], None] = lambda rank, weights: None
    records: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    computations: int = 0

    def record(self, reason: str, message: str, ranks: tuple[int, ...]) -> None:
        self.records.append((reason, message, tuple(ranks)))

    def compare(self, group: Group) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
        """The state of the model before and afterwards, and whether more is compared."""
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.sin(torch.arange(float(weight.numel()))).view_as(weight))
        self.changes(group.rank, next(model.parameters()).detach())
        model[1].get_buffer("running_mean").fill_(group.rank)

        def loss(step: int, model: nn.Module, batch: Any, ids: Tensor) -> Tensor:
            self.computations += 1
            number, (x, y) = self.computations, batch
            logits = model(x)
            logits.register_hook(lambda gradient: self.flipped(group.rank, number, gradient))
            return cross_entropy(logits, y, reduction="sum")

        def part(start: int, end: int) -> tuple[Any, Tensor]:
            drawn = torch.Generator().manual_seed(group.rank)
            x = torch.randn(16, 8, generator=drawn)
            return (x[start:end], torch.arange(start, end) % 3), torch.arange(start, end)

        check = GradientCheck(group, model, loss, Loop())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        before |= {"grad": torch.tensor([weight.grad is None for weight in model.parameters()])}
        check.compare(0, Share(torch.arange(32), 16, part), self)  # type: ignore[arg-type]
        after = model.state_dict() | {"grad": torch.tensor([weight.grad is None for weight in model.parameters()])}
        return before, after, not check._is_off

    def flipped(self, rank: int, number: int, gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        self.flips(rank, number, changed)
        return changed


def compared(
    world_size: int, flips: Flip, changes: Callable[[int, Tensor], None] = lambda rank, weights: None
) -> tuple[list[tuple[str, str, tuple[int, ...]]], list[Any]]:
    """What each of some ranks records, which is the same on all, and the results of all."""
    ranks = [Rank(flips, changes) for _ in range(world_size)]
    results = on_ranks(world_size, lambda group: ranks[group.rank].compare(group))
    assert all(not isinstance(result, Exception) for result in results), results
    assert all(rank.records == ranks[0].records for rank in ranks)
    return ranks[0].records, results


def test_ranks_that_compute_the_same_are_not_named_and_nothing_is_changed() -> None:
    found, results = compared(3, lambda rank, number, gradient: None)
    assert found == []
    for rank, (before, after, continues) in enumerate(results):
        assert continues
        assert before.keys() == after.keys()
        # DistributedDataParallel sends those of rank 0 with the next forward pass, too.
        before["1.running_mean"].fill_(0)
        assert all(torch.equal(value, after[name]) for name, value in before.items()), rank


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bit", [0, 30])
def test_a_bit_that_flips_once_is_named_on_any_number_of_ranks(world_size: int, bit: int) -> None:
    def flips(rank: int, number: int, gradient: Tensor) -> None:
        if rank == STRANGE and number == 1:
            flip(gradient, bit)

    ((reason, message, ranks),), _ = compared(world_size, flips)
    assert (reason, ranks) == ("GradientsDiffer", (STRANGE,))
    assert message == (
        "rank 1 computed the gradient of the same 8 samples or fewer in step 1 twice, with different results"
    )


def test_a_bit_that_flips_each_time_is_named_by_most_ranks() -> None:
    ((_, message, ranks),), _ = compared(3, lambda rank, number, gradient: flip(gradient) if rank == STRANGE else None)
    assert ranks == (STRANGE,)
    assert message.endswith("in step 1 otherwise than the other ranks, each time")


def test_of_two_ranks_that_differ_each_time_nobody_knows_which_is_wrong() -> None:
    ((_, message, ranks),), _ = compared(2, lambda rank, number, gradient: flip(gradient) if rank == STRANGE else None)
    assert ranks == (0, 1)
    assert message.endswith("differently, each time; who of them is right is not known")


def test_ranks_with_other_weights_are_for_another_comparison() -> None:
    def changes(rank: int, weights: Tensor) -> None:
        if rank == STRANGE:
            flip(weights, 25)

    found, results = compared(3, lambda rank, number, gradient: None, changes)
    assert (found, [continues for _, _, continues in results]) == ([], [True] * 3)


def test_a_difference_within_rounding_that_stays_is_none() -> None:
    found, results = compared(3, lambda rank, number, gradient: flip(gradient, 0) if rank == STRANGE else None)
    assert (found, [continues for _, _, continues in results]) == ([], [True] * 3)


def test_what_no_rank_computes_again_in_the_same_way_is_not_compared_any_more() -> None:
    found, results = compared(3, lambda rank, number, gradient: gradient.mul_(rank + number))
    assert (found, [continues for _, _, continues in results]) == ([], [False] * 3)


def test_ranks_with_other_processors_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(["a", "b", "a", "b"])
    monkeypatch.setattr(gradient_check, "_kind", lambda device: next(kinds))
    found, _ = compared(2, lambda rank, number, gradient: flip(gradient) if rank == STRANGE else None)
    assert found == []


def test_one_step_of_each_window_is_compared_and_seeds_choose_others() -> None:
    def due(seed: int) -> list[int]:
        group = SimpleNamespace(world_size=2, device=torch.device("cpu"))
        check = GradientCheck(group, nn.Linear(1, 1), None, Loop(seed=seed))  # type: ignore[arg-type]
        return [step for step in range(4 * EVERY_STEPS) if check.is_due(step)]

    assert [step // EVERY_STEPS for step in due(1)] == [0, 1, 2, 3]
    assert len({step % EVERY_STEPS for step in due(1)}) > 1
    assert due(1) == due(1) != due(2)


@pytest.mark.parametrize("reason", ["alone", "compiled", "large"])
def test_where_it_would_cost_too_much_nothing_is_compared(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "large":
        monkeypatch.setattr(gradient_check, "MAX_BUFFER_BYTES", 8)
    group = SimpleNamespace(world_size=1 if reason == "alone" else 2, device=torch.device("cpu"))
    check = GradientCheck(group, nn.BatchNorm1d(9), None, Loop(compile=reason == "compiled"))  # type: ignore[arg-type]
    assert not any(check.is_due(step) for step in range(EVERY_STEPS))
