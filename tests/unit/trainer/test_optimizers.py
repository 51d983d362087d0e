"""The optimizers that a job can name: what each part of a model is trained by, and that a checkpoint is exact."""

import copy
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from tandem.job.tasks import Optimizer
from tandem_trainer.causal_lm import CausalLM, CausalLMConfig
from tandem_trainer.checkpoint.state import CheckpointMismatch
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models import vision
from tandem_trainer.models.minigpt import MiniGPT
from tandem_trainer.optimizers import hidden_matrices, torch_optimizer

MUON = Optimizer(name="muon", learning_rate=0.01, adamw_learning_rate=0.002, weight_decay=0.1, momentum=0.95)


def language_model(tied: bool = True) -> MiniGPT:
    config = {"layers": 2, "width": 32, "heads": 2, "length": 16, "tied": tied, "positions": "learned"}
    return CausalLM(CausalLMConfig.model_validate(config)).model()


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {known[id(one)] for one in parameters}


def take(model: MiniGPT, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(step))
        logits: Tensor = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:  # as a schedule does
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_gets_the_matrices_between_the_embedding_and_the_head(tied: bool) -> None:
    model = language_model(tied)
    parts = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "out")}
    inner = {
        f"blocks.{block}.{part}.{side}.weight" for block in (0, 1) for part, sides in parts.items() for side in sides
    }
    assert names(model, hidden_matrices(model)) == inner
    optimizer = torch_optimizer(model, MUON)
    first, second = optimizer.param_groups
    assert names(model, first["params"]) == inner
    assert names(model, second["params"]) == {name for name, _ in model.named_parameters()} - inner
    assert (first["lr"], second["lr"], first["momentum"], second["weight_decay"]) == (0.01, 0.002, 0.95, 0.1)


def test_first_and_last_layers_kernels_and_frozen_matrices_are_none_of_its() -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    layers[3].requires_grad_(False)
    assert names(layers, hidden_matrices(layers)) == {"2.weight"}
    cnn = vision.cnn(1, 8, 10)
    assert {one.ndim for one in hidden_matrices(cnn)} == {2}
    assert len(hidden_matrices(cnn)) == 1
    shared = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    shared[2].weight = shared[0].weight
    assert names(shared, hidden_matrices(shared)) == {"1.weight"}


def test_a_model_without_a_hidden_matrix_is_told_to_take_another() -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer.name: muon .* and Sequential has none; use adamw"):
        torch_optimizer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), MUON)


def test_one_learning_rate_serves_both_unless_told() -> None:
    optimizer = torch_optimizer(language_model(), Optimizer(name="muon", learning_rate=0.01))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]


def test_it_steps_as_the_two_optimizers_of_torch_do() -> None:
    torch.manual_seed(0)
    model = language_model()
    other = copy.deepcopy(model)
    take(model, torch_optimizer(model, MUON), range(5))

    matrices = hidden_matrices(other)
    rest = [one for one in other.parameters() if all(one is not matrix for matrix in matrices)]
    scaled = torch.optim.Muon(matrices, lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.002, weight_decay=0.1, fused=True)
    for step in range(5):
        tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(other(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
        for optimizer in (scaled, adamw):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("hyperparameters", [False, True])
def test_a_run_goes_on_from_a_checkpoint_to_the_last_bit(hyperparameters: bool) -> None:
    torch.manual_seed(0)
    model = language_model()
    optimizer = torch_optimizer(model, MUON)
    take(model, optimizer, range(4))
    contents = copy.deepcopy(TrainState(model, optimizer, hyperparameters=hyperparameters).contents({}))
    assert "blocks.0.mlp.gate.weight/momentum_buffer" in contents.optimizer
    assert "embedding.weight/exp_avg_sq" in contents.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    take(model, optimizer, range(4, 8))

    torch.manual_seed(1)
    again = language_model()
    resumed = torch_optimizer(again, MUON)
    kept = TrainState(again, resumed, hyperparameters=hyperparameters)
    kept.check(contents)
    kept.load(contents)
    if not hyperparameters:  # the loop sets them in each step
        for group, rate in zip(resumed.param_groups, rates, strict=True):
            group["lr"] = rate
    take(again, resumed, range(4, 8))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_checkpoint_of_muon_is_not_one_of_another_model() -> None:
    model, other = language_model(), language_model(tied=False)
    optimizer = torch_optimizer(model, MUON)
    take(model, optimizer, range(1))
    contents = TrainState(model, optimizer).contents({})
    with pytest.raises(CheckpointMismatch):
        TrainState(other, torch_optimizer(other, MUON)).check(contents)


def test_what_looks_at_gradients_before_a_step_is_called_once() -> None:
    model = language_model()
    optimizer = torch_optimizer(model, MUON)
    called: list[int] = []
    hook: Callable[..., None] = lambda *_: called.append(1)  # noqa: E731
    optimizer.register_step_pre_hook(hook)
    take(model, optimizer, range(2))
    assert called == [1, 1]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_is_left_out_in_float16_leaves_nothing_behind(name: Literal["sgd", "adamw"]) -> None:
    moved = []
    for first in (torch.inf, None):
        model = nn.Linear(256, 256, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch_optimizer(model, Optimizer(name=name, learning_rate=0.1, momentum=0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for gradient in (first, 1.0, 2.0):
            if gradient is not None:
                model.weight.grad = scaler.scale(torch.full_like(model.weight, gradient))
                scaler.step(optimizer)
                scaler.update()
        moved.append(model.weight.detach().clone())
    assert torch.equal(*moved)


def test_it_learns_in_float16_as_the_scaler_asks_for() -> None:
    """The scaler divides the gradients of all groups, and leaves a step out where one is not finite."""
    torch.manual_seed(0)
    model = language_model()
    optimizer = torch_optimizer(model, MUON)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(model.state_dict())
    for value, changes in ((float("inf"), False), (1.0, True)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 8.0 * value)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(before[name], tensor) != changes for name, tensor in model.state_dict().items())
