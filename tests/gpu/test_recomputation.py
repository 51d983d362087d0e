"""Dropout by sample on a GPU: what is computed again in the backward pass, in another thread, draws what it drew."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem_trainer.models.dropout import key_dropout


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_of_several_regions_draws_in_each_again_what_it_drew(
    device: torch.device, use_reentrant: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Dropout(0.5)).to(device)
    draws = key_dropout(model)
    start = torch.randn(16, 20, device=device, requires_grad=True)

    def gradient(recomputed: bool) -> Tensor:
        draws.set(0, 0, torch.arange(16, device=device))
        model.zero_grad()
        state = start
        for _ in range(4):
            state = checkpoint(model, state, use_reentrant=use_reentrant) if recomputed else model(state)
        state.square().sum().backward()
        found = model[0].weight.grad
        assert isinstance(found, Tensor)
        return found.clone()

    torch.testing.assert_close(gradient(recomputed=True), gradient(recomputed=False))
