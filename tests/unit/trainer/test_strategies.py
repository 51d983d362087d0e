"""How a model is laid out on the devices of one process, and which strategies refuse several ranks."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tandem.job.tasks import Loop, StrategyName
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.models.dropout import SampleDropout, key_dropout
from tandem_trainer.models.minigpt import MiniGPT, Shape
from tandem_trainer.process_group import Group
from tandem_trainer.strategies import strategy_of
from tandem_trainer.strategies.dp import divide_draws
from tandem_trainer.strategies.hogwild import Hogwild
from tandem_trainer.strategies.model import placement, split, spread, to_device
from tandem_trainer.strategies.strategy import blocks_of

CPU, META = torch.device("cpu"), torch.device("meta")


def of(model: nn.Module, devices: list[torch.device]) -> dict[str, str]:
    """The device of each part by its name in the model."""
    names = {module: name for name, module in model.named_modules()}
    return {names[part.module]: part.device.type for part in placement(model, devices)}


def minigpt(layers: int = 4, tied: bool = False) -> MiniGPT:
    return MiniGPT(Shape(vocabulary=8, length=4, layers=layers, heads=2, width=8, tied=tied))


@given(
    st.integers(0, 100), st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(0, 100), st.integers(1, 5)
)
def test_runs_of_blocks_are_contiguous(before: int, sizes: list[int], after: int, devices: int) -> None:
    runs = spread(before, sizes, after, devices)
    assert len(runs) == len(sizes)
    assert runs == sorted(runs)
    assert {*runs} <= {*range(devices)}


def test_devices_have_about_as_many_bytes() -> None:
    assert spread(0, [1] * 8, 0, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert spread(4, [1] * 4, 0, 2) == [1] * 4, "what precedes is as large as all blocks"
    assert spread(0, [1, 1, 1, 9], 0, 2) == [0, 0, 0, 1]


def test_what_precedes_is_on_the_first_device_and_what_follows_on_the_last() -> None:
    places = of(minigpt(), [CPU, META])
    assert [places[f"blocks.{number}"] for number in range(4)] == ["cpu", "cpu", "meta", "meta"]
    assert (places[""], places["embedding"], places["norm"], places["head"]) == ("cpu", "cpu", "meta", "meta")


def test_a_layer_that_shares_weights_is_where_they_are() -> None:
    model = minigpt()
    model.head.weight = model.embedding.weight
    assert of(model, [CPU, META])["head"] == "cpu"


def test_blocks_that_share_weights_and_would_be_apart_are_refused() -> None:
    model = minigpt()
    model.blocks[3].mlp = model.blocks[0].mlp
    with pytest.raises(ConfigurationError, match="share a parameter"):
        placement(model, [CPU, META])


class Chain(nn.Module):
    """Blocks that take what is beside the activations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        beside = torch.ones(2)
        for block in self.blocks:
            x = block(x, {"pair": (beside, [beside])})
        return x


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[str] = []

    def forward(self, x: Tensor, beside: dict[str, tuple[Tensor, list[Tensor]]]) -> Tensor:
        one, (other,) = beside["pair"]
        self.seen = [x.device.type, one.device.type, other.device.type]
        found: Tensor = self.linear(x) + one + other
        return found


def test_inputs_are_moved_to_where_a_block_is_however_they_are_nested() -> None:
    model = Chain()
    names = model.state_dict().keys()
    split(model, [CPU, META])
    assert model(torch.zeros(3, 2)).device == META
    assert [block.seen for block in model.blocks] == [["cpu"] * 3] * 2 + [["meta"] * 3] * 2
    assert model.state_dict().keys() == names
    assert [one.device.type for one in model.parameters()] == ["cpu"] * 4 + ["meta"] * 4


def test_what_is_no_tensor_stays_as_it_is() -> None:
    assert to_device({"a": (1, "b"), "c": None}, META) == {"a": (1, "b"), "c": None}


def test_a_copy_of_a_model_drops_for_its_samples_what_one_rank_alone_would() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Dropout(0.5), second=nn.Dropout(0.5)))
    draws = key_dropout(model)
    ids, samples = torch.arange(5), torch.ones(5, 64)
    draws.set(0, 3, ids)
    whole = model(samples)
    draws.set(0, 3, ids)
    copies = [nn.Sequential(*(SampleDropout(0.5, layer, draws) for layer in range(2))) for _ in range(3)]
    # As torch divides five samples among four devices.
    divide_draws(copies, 4)
    parts = [copy(part) for copy, part in zip(copies, samples.chunk(4), strict=True)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("strategy", ["dp", "model"])
def test_strategies_of_one_process_refuse_several_ranks(strategy: StrategyName) -> None:
    group = Group(0, 1, 0, CPU)
    group.world_size = 2
    with pytest.raises(ConfigurationError, match=f"{strategy} is for one process, and there are 2 ranks; use ddp"):
        strategy_of(Loop(strategy=strategy), group, 2)


def test_hogwild_refuses_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match="use ddp"):
        Hogwild(Loop(strategy="hogwild"), Group(0, 1, 0, torch.device("cuda", 0)))


def test_what_only_holds_blocks_is_none_itself() -> None:
    """It has no forward pass before which anything could be put together."""
    pairs = nn.ModuleList(
        nn.ModuleDict({"up": nn.Linear(2, 4), "act": nn.ReLU(), "down": nn.Linear(4, 2)}) for _ in "ab"
    )
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2))])
    model = nn.ModuleDict({"pairs": pairs, "nested": nested})
    assert [type(block) for block in blocks_of(model)] == [nn.Linear] * 6 + [nn.Sequential]
