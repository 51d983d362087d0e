"""Gradients that NCCL averages while the backward pass runs are those of the model alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tandem.job.tasks import Loop
from tandem_trainer.models import build
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.ddp import Ddp
from tandem_trainer.strategies.strategy import prepare

BACKEND = "nccl"
# Of CUDA, NCCL and their drivers, which are those of the machine.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def group(tmp_path: Path, device: torch.device) -> Iterator[Group]:
    """A process group of one rank, as NCCL wants one GPU for each, that the trainer takes for one of two."""
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    made = Group(0, 1, 0, device)
    made.world_size = 2
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [{}, {"activation_checkpointing": True}], ids=["plain", "recomputed"])
def test_with_and_without_micro_batches(group: Group, config: dict[str, bool]) -> None:
    settings = Loop(**config)  # type: ignore[arg-type]
    alone = build("baby-cnn", 1, 8, 10).to(group.device)
    model = build("baby-cnn", 1, 8, 10)
    model.load_state_dict(alone.state_dict())
    wrapped = Ddp(settings, group).wrap(prepare(model, settings, group).to(group.device))
    assert isinstance(wrapped, DistributedDataParallel)
    images = torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(group.device)
    for _ in range(2):
        alone(images.flatten(0, 1)).square().sum().backward()
        with wrapped.no_sync():
            wrapped(images[0]).square().sum().backward()
        wrapped(images[1]).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in found.values())
