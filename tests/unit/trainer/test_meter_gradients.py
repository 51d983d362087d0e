"""The norm of the gradients is read where an optimizer takes its step, now and then, whatever the loop looks like."""

import math

import pytest
import torch
from torch import nn

from tandem_trainer.meter import INTERVAL_SECONDS, GradientNorm
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tandem_trainer.meter.time.monotonic", clock)
    return clock


def read(norm: GradientNorm) -> float | None:
    measured = norm.take()
    return None if measured is None else float(measured)


def set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_it_is_the_norm_over_all_parameters_before_the_step(clock: Clock) -> None:
    model, norm = nn.Linear(3, 2), GradientNorm()
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}, {"params": []}]
    optimizer = torch.optim.AdamW(groups, lr=0.2)
    norm.follow(optimizer)
    set_gradients(model, 2.0)
    optimizer.step()
    optimizer.zero_grad()
    assert read(norm) == pytest.approx(2.0 * math.sqrt(8))
    assert norm.take() is None, "a reading counts once"


def test_it_is_read_rarely(clock: Clock) -> None:
    model, norm = nn.Linear(3, 2), GradientNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm.follow(optimizer)
    for value in (1.0, 5.0):
        set_gradients(model, value)
        optimizer.step()
    assert read(norm) == pytest.approx(math.sqrt(8))
    optimizer.step()
    assert norm.take() is None
    clock.now += INTERVAL_SECONDS
    optimizer.step()
    assert read(norm) == pytest.approx(5.0 * math.sqrt(8))


def test_of_a_scaled_gradient_it_is_that_of_the_loss_itself(clock: Clock) -> None:
    """What GradScaler gives a fused optimizer."""
    model, norm = nn.Linear(3, 2), GradientNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    norm.follow(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    set_gradients(model, 64.0)
    optimizer.step()
    assert read(norm) == pytest.approx(math.sqrt(8))


def test_what_cannot_be_measured_alone_is_not(clock: Clock) -> None:
    embedding, norm = nn.Embedding(5, 2, sparse=True), GradientNorm()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    norm.follow(optimizer)
    optimizer.step()
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert norm.take() is None
