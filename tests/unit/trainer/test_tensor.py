"""Plans of tensor parallelism: what a model brings, what is refused, and layers that stay whole."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tandem_trainer.failure import ConfigurationError
from tandem_trainer.strategies import replicated
from tandem_trainer.strategies.tensor import check, split_modules
from tandem_trainer.task import Task
from tests.support import language


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_a_model_of_hugging_face_s_brings_a_plan_that_any_task_can_use(kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(language.config(kind))
    brought = set(model.tp_plan.values())
    assert "colwise_gather_output" in brought, "a last layer that gathers"
    plan = Task.tensor_plan(cast(Task[Any], SimpleNamespace()), model, 2)
    # As a task returns it, or a script gives it to distribute.
    for one in (plan, model.tp_plan, {**model.tp_plan}):
        check(one, model, 2)
        split = {name: style for name, _, style in split_modules(one, model)}
        assert set(split.values()) == {"colwise", "rowwise"} | ({"replicated_with_grad_allreduce"} & brought)
        assert ("model.layers.0.self_attn.q_norm" in split) == (kind == "qwen3")
        assert "lm_head" not in split


def test_the_first_pattern_that_means_a_layer_counts_also_where_it_leaves_it_whole() -> None:
    model = nn.ModuleDict({"up": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    found = {name: style for name, _, style in split_modules({"head": "colwise_gather_output", "*": "colwise"}, model)}
    assert found == {"up": "colwise"}


def test_a_plan_with_a_word_for_other_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.tp_plan = {"0": "colwise", "1": "mla_kv_a_proj"}
    with pytest.raises(
        ConfigurationError, match=r"style 1: mla_kv_a_proj; supported are colwise, rowwise and replicated"
    ):
        check(model.tp_plan, model, 2)
    model.tp_plan = {"0": "colwise_gather_output"}
    with pytest.raises(ConfigurationError, match=r"neither task nor model has one that splits any"):
        check(model.tp_plan, model, 2)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that find the same."""
    monkeypatch.setattr(replicated.dist, "all_reduce", lambda value, group: value.mul_(2))


@pytest.mark.usefixtures("doubled")
def test_gradients_of_a_layer_that_stays_whole_are_added_up_in_each_pass() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    made = copy.deepcopy(plain)
    replicated.sum_gradients(made[1], cast(Any, None))
    again = copy.deepcopy(made)
    for model in (plain, made, again):
        for _ in range(2):
            model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    for model in (made, again):
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert all(isinstance(one, nn.Parameter) for one in model[1]._parameters.values())
        torch.testing.assert_close(model[1].weight.grad, 2 * plain[1].weight.grad)
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


@pytest.mark.usefixtures("doubled")
def test_a_layer_that_stays_whole_has_its_weights_back_after_a_pass_that_fails() -> None:
    layer = nn.LayerNorm(3)
    replicated.sum_gradients(layer, cast(Any, None))
    own = layer.weight
    with pytest.raises(RuntimeError):
        layer(torch.zeros(2, 4))
    assert layer.weight is own
    layer.weight.requires_grad_(False)
    layer(torch.zeros(2, 3))
    assert layer.weight is own, "one that does not learn is left alone"


class Peers:
    """What the other rank of two has found: a multiple of what is found here."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0
        self.has_gradients: bool | torch.Tensor = True

    def all_reduce(self, value: torch.Tensor, op: Any, group: object) -> None:
        assert op is dist.ReduceOp.MAX
        self.calls += 1
        theirs = value.clone()
        theirs[..., :2] *= self.factor
        value.copy_(torch.stack([value, theirs * self.has_gradients]).amax(0))


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    found = Peers(1.0)
    monkeypatch.setattr(replicated.dist, "all_reduce", found.all_reduce)
    monkeypatch.setattr(replicated.dist, "get_world_size", lambda group: 2)
    return found


def learned(value: float = 1.0) -> nn.Linear:
    layer = nn.Linear(3, 2)
    layer.weight.grad, layer.bias.grad = torch.full((2, 3), value), torch.zeros(2)
    return layer


def comparison() -> replicated.GradientComparison:
    return replicated.GradientComparison(cast(Any, None), torch.device("cpu"))


def test_gradients_of_whole_weights_are_compared_in_the_first_steps(peers: Peers) -> None:
    compared = comparison()
    for _ in range(replicated.COMPARED_STEPS + 3):
        compared.check(learned().named_parameters())
    assert peers.calls == replicated.COMPARED_STEPS
    assert not compared.is_due


def test_ranks_with_different_gradients_of_a_whole_weight_are_refused(peers: Peers) -> None:
    peers.factor = 0.9
    with pytest.raises(
        ConfigurationError, match=r"the ranks have different gradients of weight, between matrices that are"
    ):
        comparison().check(learned().named_parameters())


def test_a_weight_whose_gradient_is_zero_at_first_is_compared_when_it_is_not(peers: Peers) -> None:
    """As those of LoRA's first matrices are, while the second ones are zero."""
    compared, model = comparison(), nn.ModuleDict({"late": learned(0.0), "other": learned()})
    compared.check(model.named_parameters())
    peers.factor = 0.9
    model["other"].requires_grad_(False)
    model["late"].bias.grad = torch.ones(2)
    with pytest.raises(ConfigurationError, match=r"different gradients of late\.bias,"):
        compared.check(model.named_parameters())


def test_rounding_is_no_difference_and_what_is_not_finite_is_looked_at_again(peers: Peers) -> None:
    compared = comparison()
    compared.check(learned(float("inf")).named_parameters())
    peers.factor = 0.99
    for _ in range(replicated.COMPARED_STEPS + 3):
        compared.check(learned().named_parameters())
    assert peers.calls == 1 + replicated.COMPARED_STEPS


def test_a_step_in_which_a_rank_has_no_gradients_is_none(peers: Peers) -> None:
    """The ranks ask each other all the same, for each of them has to know."""
    compared, peers.has_gradients, peers.factor = comparison(), False, 0.5
    for _ in range(replicated.COMPARED_STEPS + 3):
        compared.check(learned().named_parameters())
        compared.check(nn.Linear(3, 2).named_parameters())
    assert compared.is_due
    peers.has_gradients = True
    with pytest.raises(ConfigurationError):
        compared.check(learned().named_parameters())


def test_a_gradient_that_some_ranks_have_and_others_have_not_is_one_that_differs(peers: Peers) -> None:
    compared, model = comparison(), nn.ModuleDict({"some": learned(), "all": learned()})
    peers.has_gradients = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    with pytest.raises(ConfigurationError, match=r"different gradients of some\.weight and 2 more"):
        compared.check(model.named_parameters())


def test_nothing_is_asked_of_weights_that_do_not_learn_or_are_elsewhere_until_they_do(peers: Peers) -> None:
    compared, frozen = comparison(), learned().requires_grad_(False)
    compared.check(frozen.named_parameters())
    compared.check(nn.Linear(3, 2, device="meta").named_parameters())
    assert (peers.calls, compared.is_due) == (0, True)
    compared.check(frozen.requires_grad_(True).named_parameters())
    assert peers.calls == 1


def test_where_nothing_comes_the_ranks_stop_asking(peers: Peers) -> None:
    compared = comparison()
    for _ in range(replicated.MAX_EMPTY_STEPS + 3):
        compared.check(nn.Linear(3, 2).named_parameters())
    assert (peers.calls, compared.is_due) == (replicated.MAX_EMPTY_STEPS, False)
