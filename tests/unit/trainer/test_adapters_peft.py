"""Of a model of peft, the state is what learns; the frozen rest is known by a digest, and comes back after training."""

from typing import Any

import peft
import pytest
import torch
from torch import nn

from tandem_trainer.adapters.peft import BASE, omit_base
from tandem_trainer.checkpoint.state import CheckpointMismatch, load_weights, weights


def model(seed: int = 0, **settings: Any) -> peft.PeftModel:
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], **settings))


def test_its_state_is_what_learns_buffers_and_a_digest() -> None:
    one = model(modules_to_save=["2"])
    whole = set(one.state_dict())
    learning = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    buffers = {name for name, _ in one.named_buffers()}
    undo = omit_base(one)
    assert set(one.state_dict()) == learning | buffers | {f"{BASE}.digest"}
    assert any("modules_to_save" in name for name in learning)
    undo()
    assert set(one.state_dict()) == whole


def test_it_is_put_into_a_model_of_the_same_base_and_refused_by_another() -> None:
    one, same, other = model(), model(), model(seed=1)
    with torch.no_grad():
        for parameter in one.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    for each in (one, same, other):
        omit_base(each)
    load_weights(same, weights(one))
    inputs = torch.randn(3, 4)
    assert same.eval()(inputs).equal(one.eval()(inputs))
    before = {name: tensor.clone() for name, tensor in weights(other).items()}
    with pytest.raises(
        CheckpointMismatch, match=r"adapters belong to other pretrained weights .*; load the model that the run"
    ):
        load_weights(other, weights(one))
    assert all(tensor.equal(before[name]) for name, tensor in weights(other).items())


@pytest.mark.parametrize("plain", [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)])
def test_any_other_model_stays_as_it_is(plain: nn.Module) -> None:
    omit_base(plain)()
    assert set(plain.state_dict()) == {"weight", "bias"}
