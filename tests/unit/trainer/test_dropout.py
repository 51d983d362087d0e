"""Dropout by sample: like torch's in what it does, and the same wherever a sample is computed."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem_trainer.models import build
from tandem_trainer.models.dropout import Draws, SampleDropout, key_dropout

IDS = torch.arange(400)


def dropped(
    p: float = 0.25, seed: int = 0, step: int = 0, layer: int = 0, ids: Tensor = IDS, units: int = 500
) -> Tensor:
    """Which units are dropped. [samples, units], bool."""
    draws = Draws()
    draws.set(seed, step, ids)
    return SampleDropout(p, layer, draws)(torch.ones(len(ids), units)) == 0


@pytest.mark.parametrize("p", [0.01, 0.2, 0.25, 0.5, 0.9])
def test_the_part_that_is_dropped_is_p_and_the_mean_stays(p: float) -> None:
    draws = Draws()
    draws.set(1, 2, IDS)
    values = SampleDropout(p, 3, draws)(torch.ones(len(IDS), 5, 10, 10))
    count = values.numel()
    assert (values == 0).float().mean().item() == pytest.approx(p, abs=4 * (p * (1 - p) / count) ** 0.5)
    assert values.max().item() == pytest.approx(1 / (1 - p))


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten().float(), other.flatten().float()]))[0, 1].item()


def test_seeds_steps_layers_samples_and_units_draw_independently() -> None:
    base = dropped()
    few = 4 / base.numel() ** 0.5
    for other in (dropped(seed=1), dropped(step=1), dropped(layer=1), dropped(ids=IDS + 400), dropped(ids=IDS + 1)):
        assert abs(correlation(base, other)) < few
    for lag in (1, 2, 3, 64):
        assert abs(correlation(base[lag:], base[:-lag])) < few, "neighbouring samples"
        assert abs(correlation(base[:, lag:], base[:, :-lag])) < few, "neighbouring units"
    by_sample, by_unit = base.float().mean(1), base.float().mean(0)
    assert by_sample.std().item() == pytest.approx((0.25 * 0.75 / 500) ** 0.5, rel=0.2)
    assert by_unit.std().item() == pytest.approx((0.25 * 0.75 / 400) ** 0.5, rel=0.2)


def test_a_sample_draws_the_same_in_whatever_batch_it_is() -> None:
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropped(ids=IDS[order]), dropped()[order])
    assert torch.equal(dropped(ids=IDS[7:8]), dropped()[7:8])


def test_gradients_flow_through_what_is_kept() -> None:
    draws = Draws()
    draws.set(0, 0, IDS[:8])
    layer = SampleDropout(0.5, 0, draws)
    activations = torch.randn(8, 50, requires_grad=True)
    layer(activations).sum().backward()
    assert set(activations.grad.unique().tolist()) == {0.0, 2.0}
    draws.set(0, 0, IDS[:8])
    assert torch.equal(activations.grad == 0, layer(torch.ones(8, 50)) == 0)


def test_every_type_of_activation_keeps_its_type() -> None:
    draws = Draws()
    draws.set(0, 0, IDS[:8])
    layer = SampleDropout(0.5, 0, draws)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert layer(torch.ones(8, 5, dtype=dtype)).dtype == dtype


def test_evaluation_and_nothing_to_drop_change_nothing() -> None:
    activations = torch.randn(3, 5)
    assert SampleDropout(0.5, 0, Draws()).eval()(activations) is activations
    assert SampleDropout(0.0, 0, Draws())(activations) is activations


def test_a_batch_that_nobody_drew_for_is_refused() -> None:
    draws = Draws()
    draws.set(0, 0, IDS[:4])
    with pytest.raises(RuntimeError, match="for 4 samples, not for 5"):
        SampleDropout(0.5, 0, draws)(torch.ones(5, 2))


@pytest.mark.parametrize(("name", "layers"), [("cnn", 2), ("simple-net", None), ("resnet-18", 0)])
def test_every_dropout_of_a_model_is_replaced_and_nothing_else(name: str, layers: int | None) -> None:
    model, reference = build(name, 1, 28, 10), build(name, 1, 28, 10)
    draws = key_dropout(model)
    found = [module for module in model.modules() if isinstance(module, SampleDropout)]
    assert not [module for module in model.modules() if type(module) is nn.Dropout]
    expected = [module.p for module in reference.modules() if isinstance(module, nn.Dropout)]
    assert [module.p for module in found] == expected
    assert layers is None or len(found) == layers
    assert len({module._salt for module in found}) == len(found)
    assert model.state_dict().keys() == reference.state_dict().keys()
    draws.set(0, 0, IDS[:2])
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_numbers_of_any_size_are_keys() -> None:
    draws = Draws()
    draws.set(2**31 - 1, 2**40, torch.tensor([0, 2**31, 2**33 + 5, 2**62]))
    assert draws.keys.dtype == torch.int32
    assert len(set(draws.keys.tolist())) == 4


def test_each_call_in_a_step_draws_anew_and_the_next_step_begins_again() -> None:
    draws = Draws()
    layer = SampleDropout(0.25, 0, draws)
    ones = torch.ones(len(IDS), 500)
    draws.set(0, 0, IDS)
    calls = [layer(ones) == 0 for _ in range(3)]
    assert torch.equal(calls[0], dropped()), "the first call draws what a module that is called once draws"
    few = 4 / calls[0].numel() ** 0.5
    assert all(abs(correlation(one, other)) < few for one, other in itertools.combinations(calls, 2))
    draws.set(0, 0, IDS)
    assert all(torch.equal(layer(ones) == 0, call) for call in calls)


def test_a_probability_of_one_drops_everything_as_torch_does() -> None:
    draws = Draws()
    draws.set(0, 0, IDS[:8])
    activations = torch.randn(8, 5, requires_grad=True)
    values = SampleDropout(1.0, 0, draws)(activations)
    values.sum().backward()
    assert activations.grad is not None
    assert not values.any()
    assert not activations.grad.any()


class Recurrent(nn.Module):
    """One cell and one dropout, each called twice in each of four regions."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(20, 20)
        self.dropout = nn.Dropout(0.5)

    def region(self, state: Tensor) -> Tensor:
        for _ in range(2):
            state = self.dropout(torch.tanh(self.cell(state)))
        return state

    def forward(self, state: Tensor, **recomputed: Any) -> Tensor:
        for _ in range(4):
            state = checkpoint(self.region, state, **recomputed) if recomputed else self.region(state)
        return state


def recurrent() -> tuple[Recurrent, Draws]:
    torch.manual_seed(0)
    model = Recurrent()
    return model, key_dropout(model)


def gradient(model: Recurrent) -> Tensor:
    found = model.cell.weight.grad
    assert found is not None
    model.cell.weight.grad = None
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_again_in_the_backward_pass_draws_what_it_drew(use_reentrant: bool) -> None:
    model, draws = recurrent()
    state = torch.randn(16, 20, requires_grad=True)
    draws.set(0, 0, IDS[:16])
    model(state).square().sum().backward()
    expected = gradient(model)
    draws.set(0, 0, IDS[:16])
    loss = model(state, use_reentrant=use_reentrant).square().sum()
    loss.backward(retain_graph=not use_reentrant)
    torch.testing.assert_close(gradient(model), expected)
    if not use_reentrant:
        loss.backward()
        torch.testing.assert_close(gradient(model), expected)


def test_a_region_in_a_region_draws_what_it_drew() -> None:
    model, draws = recurrent()
    state = torch.randn(16, 20, requires_grad=True)
    draws.set(0, 0, IDS[:16])
    model(state).square().sum().backward()
    expected = gradient(model)
    draws.set(0, 0, IDS[:16])
    whole = checkpoint(model, state, use_reentrant=False)
    inner = checkpoint(lambda: model(state, use_reentrant=False), use_reentrant=False)
    assert not torch.equal(whole, inner)
    whole.square().sum().backward()
    torch.testing.assert_close(gradient(model), expected)
    draws.set(0, 0, IDS[:16])
    inner = checkpoint(lambda: model(state, use_reentrant=False), use_reentrant=False)
    inner.square().sum().backward()
    torch.testing.assert_close(gradient(model), expected)


def test_a_backward_pass_over_several_micro_batches_draws_for_each_its_own() -> None:
    model, draws = recurrent()
    state = torch.randn(16, 20)
    halves = (slice(0, 8), slice(8, 16))
    for part in halves:
        draws.set(0, 0, IDS[part])
        model(state[part]).square().sum().backward()
    expected = gradient(model)
    loss = torch.zeros(())
    for part in halves:
        draws.set(0, 0, IDS[part])
        loss = loss + model(state[part].requires_grad_(), use_reentrant=False).square().sum()
    loss.backward()
    torch.testing.assert_close(gradient(model), expected)


def test_without_the_random_state_one_call_is_right_and_several_are_refused() -> None:
    model, draws = recurrent()
    state = torch.randn(16, 20, requires_grad=True)
    draws.set(0, 0, IDS[:16])
    model.dropout(model.cell(state)).square().sum().backward()
    expected = gradient(model)
    draws.set(0, 0, IDS[:16])
    once = checkpoint(lambda: model.dropout(model.cell(state)), use_reentrant=False, preserve_rng_state=False)
    once.square().sum().backward()
    torch.testing.assert_close(gradient(model), expected)
    draws.set(0, 0, IDS[:16])
    with pytest.raises(RuntimeError, match="preserve_rng_state"):
        model(state, use_reentrant=False, preserve_rng_state=False).sum().backward()


def test_in_a_compiled_graph_each_call_draws_anew_too() -> None:
    model, draws = recurrent()
    state = torch.randn(16, 20)
    draws.set(0, 0, IDS[:16])
    expected = model(state)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        draws.set(0, 0, IDS[:16])
        torch.testing.assert_close(compiled(state), expected)


def test_a_graph_that_is_cut_draws_what_one_that_is_not_compiled_draws() -> None:
    """The compiler traces what is before the cut twice."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            values = self.first(self.first(values))
            torch._dynamo.graph_break()
            return self.second(self.first(values))

    model = Cut()
    draws = key_dropout(model)
    state = torch.ones(4, 64)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for step in (1, 2):
        draws.set(1, step, torch.arange(4))
        expected = model(state)
        draws.set(1, step, torch.arange(4))
        torch.testing.assert_close(compiled(state), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["a-compiled-region", "a-region-in-a-compiled-model"])
def test_what_is_compiled_and_computed_again_draws_what_it_drew(inside: bool) -> None:
    model, draws = recurrent()
    state = torch.randn(16, 20, requires_grad=True)
    draws.set(0, 0, IDS[:16])
    model(state).square().sum().backward()
    expected = gradient(model)
    torch.compiler.reset()
    if inside:
        compiled = torch.compile(lambda: model(state, use_reentrant=False), backend="aot_eager")
    else:
        region = torch.compile(lambda: model(state), backend="aot_eager")
        compiled = lambda: checkpoint(region, use_reentrant=False)  # noqa: E731
    for _ in range(2):
        draws.set(0, 0, IDS[:16])
        compiled().square().sum().backward()
        torch.testing.assert_close(gradient(model), expected)


def test_parts_of_activations_that_are_split_over_ranks_drop_what_the_whole_would() -> None:
    whole = SampleDropout(0.4, 3, Draws())
    activations = torch.ones(5, 6, 8)
    whole.draws.set(0, 7, torch.arange(5))
    expected = whole(activations)
    found = []
    for place in range(4):
        part = SampleDropout(0.4, 3, whole.draws)
        part.part = (place, 4)
        # Each rank has draws of its own; these count the calls of a layer.
        whole.draws.set(0, 7, torch.arange(5))
        found.append(part(activations[..., 2 * place : 2 * place + 2]))
    assert torch.equal(torch.cat(found, dim=-1), expected)
