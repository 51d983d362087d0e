"""What a step draws at random follows from the step, on every kind of device."""

import random

import numpy as np
import pytest
import torch

from tandem_trainer.data import keyed


def drawn(gpu: torch.Generator) -> list[float]:
    """One number from each source; the GPU's is played by a generator of its own."""
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), torch.rand((), generator=gpu).item()]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    return generator


def test_on_a_gpu_what_is_drawn_on_the_cpu_follows_from_the_seed_too(gpu: torch.Generator) -> None:
    device = torch.device("cuda", 0)
    keyed.seed_everything(7, device)
    first = drawn(gpu)
    assert drawn(gpu) != first
    keyed.seed_everything(7, device)
    assert drawn(gpu) == first
    keyed.seed_everything(8, device)
    assert all(now != before for now, before in zip(drawn(gpu), first, strict=True))


def test_torch_alone_is_seeded_on_the_cpu_and_on_the_gpu(gpu: torch.Generator) -> None:
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        keyed.seed_torch(7, device)
        first = torch.rand(()).item()
        keyed.seed_torch(7, device)
        assert torch.rand(()).item() == first
    assert gpu.initial_seed() == 7
