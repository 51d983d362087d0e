"""Micro-batches of one step: as many on every rank, of nearly the same size, and together the gradient of the step."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tandem.job.tasks import ImageParameters, Loop
from tandem_trainer.data.order import Order, pieces, share
from tandem_trainer.data.supply import Resident
from tandem_trainer.image_classification import ImageTask
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy
from tandem_trainer.train import Stepper

sizes = st.integers(1, 70)


@given(samples=sizes, world_size=st.integers(1, 9), most=sizes)
def test_every_rank_takes_as_many_pieces_and_none_is_larger_than_it_may_be(
    samples: int, world_size: int, most: int
) -> None:
    ids = torch.arange(samples)
    shares = [share(ids, rank, world_size) for rank in range(world_size)]
    cuts = [pieces(len(mine), samples, world_size, most) for mine in shares]
    assert len({len(cut) for cut in cuts}) == 1, "ranks that take other numbers of collectives wait for ever"
    for mine, cut in zip(shares, cuts, strict=True):
        lengths = [end - start for start, end in cut]
        assert max(lengths) <= most
        assert max(lengths) - min(lengths) <= 1
        assert torch.equal(torch.cat([mine[start:end] for start, end in cut]), mine)
    assert len(cuts[0]) == -(-max(map(len, shares)) // most), "and no more than are needed"


class Counting(nn.Module):
    """A linear model that notes the size of each batch it is given, as a collective in its forward pass would."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 3)
        self.sizes: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        logits: Tensor = self.layer(images.flatten(1))
        return logits


SAMPLES = (torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)


def step(rank: int, world_size: int, samples: int, **options: Any) -> tuple[list[int], Tensor, float]:
    """Batch sizes of the forward passes, this rank's gradient, and its part of the loss."""
    group = Group(0, 1, 0, torch.device("cpu"))
    group.rank, group.world_size = rank, world_size
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.layer.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop = Loop(**options)
    stepper = Stepper(ImageTask(ImageParameters()), loop, Strategy(loop, group), model, Draws(), optimizer, scaler)
    supply = Resident([tensor[:samples] for tensor in SAMPLES], Order(samples, samples, seed=0), rank, world_size)
    loss = stepper.take(0, supply.read(0), [1.0])
    return model.sizes, before - model.layer.weight.detach(), loss.item()


@pytest.mark.parametrize(("samples", "world_size", "micro"), [(33, 2, 16), (3, 2, 1), (2, 3, 1), (17, 1, 16)])
def test_a_step_takes_as_many_forward_passes_on_every_rank_and_its_gradient_stays(
    samples: int, world_size: int, micro: int
) -> None:
    _, expected, loss = step(0, 1, samples)
    ranks = [step(rank, world_size, samples, micro_batch_size=micro) for rank in range(world_size)]
    assert len({len(sizes) for sizes, _, _ in ranks}) == 1
    torch.testing.assert_close(torch.stack([gradient for _, gradient, _ in ranks]).mean(0), expected)
    assert sum(part for _, _, part in ranks) == pytest.approx(loss)


def test_the_last_micro_batch_is_no_single_sample_that_batch_norm_cannot_take() -> None:
    assert step(0, 1, 17, micro_batch_size=16)[0] == [8, 9]
    assert step(0, 1, 33, micro_batch_size=16)[0] == [11, 11, 11]
