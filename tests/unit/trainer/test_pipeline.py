"""What a pipeline does on one rank alone: where it cuts, what it is asked with, and how it fills micro-batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action
from torch.testing._internal.distributed.fake_pg import FakeStore

from tandem_trainer.checkpoint.sharding import StageTensor, is_sharded, place_of, to_local
from tandem_trainer.data.feeding import padded
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.lora import exclude_from_state
from tandem_trainer.meter import GradientNorm
from tandem_trainer.models.dropout import key_dropout
from tandem_trainer.models.minigpt import MiniGPT, Shape
from tandem_trainer.strategies.pipeline import SCHEDULES, holders, placement, with_early_receives
from tandem_trainer.strategies.stages import PrecomputedOutput, evenly, inputs_of
from tandem_trainer.task import Task


@pytest.mark.parametrize(
    ("costs", "count", "begins"),
    [
        ([0, 1, 1, 1, 1, 0], 2, [0, 3]),
        ([0, 1, 1, 1, 3], 2, [0, 4]),
        ([1, 1, 1, 1], 4, [0, 1, 2, 3]),
        ([5, 1, 1, 1], 3, [0, 1, 2]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[float], count: int, begins: list[int]) -> None:
    found = evenly(costs, count)
    ends = [*found[1:], len(costs)]
    wanted = [*begins[1:], len(costs)]
    assert len(found) == count
    assert found[0] == 0
    assert max(sum(costs[a:b]) for a, b in zip(found, ends, strict=True)) == max(
        sum(costs[a:b]) for a, b in zip(begins, wanted, strict=True)
    )


def test_the_last_sample_fills_a_micro_batch() -> None:
    batch = {"image": torch.tensor([[1], [2]]), "name": ["a", "b"], "scale": torch.tensor(3.0)}
    filled = padded(batch, 2, 4)
    assert filled["image"].tolist() == [[1], [2], [2], [2]]
    assert filled["name"] == ["a", "b", "b", "b"]
    assert filled["scale"] == 3.0


class Learned(Task[None]):
    """A loss that does with the model what a test says."""

    def __init__(self, use: Any) -> None:
        self.use = use

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self, split: str) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        used: Tensor = self.use(model, batch)
        return used


def test_a_loss_is_asked_with_what_it_calls_the_model() -> None:
    task = Learned(lambda model, batch: model(batch + 1, scale=2).sum(dim=1))
    given, named = inputs_of(task, torch.zeros(3))
    assert given[0].tolist() == [1, 1, 1]
    assert named == {"scale": 2}


@pytest.mark.parametrize(
    ("use", "why"),
    [(lambda model, batch: batch, "does not call"), (lambda model, batch: model.weight, "more with the model")],
)
def test_a_loss_that_does_not_call_the_model_is_refused(use: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        inputs_of(Learned(use), torch.zeros(3))


def test_a_loss_that_calls_the_model_twice_is_refused() -> None:
    task = Learned(lambda model, batch: model(batch) + model(batch))
    with pytest.raises(ConfigurationError, match="more than once"):
        task.loss(PrecomputedOutput(task, torch.zeros(1)), torch.zeros(1))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_minigpt_are_its_forward_pass(positions: Any, tied: bool) -> None:
    shape = Shape(vocabulary=11, length=6, layers=2, heads=2, width=8, positions=positions, tied=tied)
    model = MiniGPT(shape)
    tokens = torch.arange(10).view(2, 5)
    values: Any = tokens
    for part in model.parts().values():
        values = part(values)
    assert torch.equal(values, model(tokens))
    held = {id(one) for part in model.parts().values() for one in part.parameters()}
    assert held == {id(one) for one in model.parameters()}


def test_a_sequential_is_cut_between_its_members() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
    task = Learned(None)
    assert list(task.pipeline_parts(model)) == ["0.0", "0.1", "1"]
    layer = nn.Linear(2, 2)
    twice = task.pipeline_parts(nn.Sequential(layer, nn.ReLU(), layer))
    assert [twice[name] is layer for name in ("0", "1", "2")] == [True, False, True]
    with pytest.raises(ConfigurationError, match="pipeline_parts"):
        task.pipeline_parts(nn.Linear(2, 2))


def test_a_layer_that_is_computed_again_draws_for_its_own_samples() -> None:
    """In a pipeline another stage of this rank may have computed other samples in between."""
    model = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    draws = key_dropout(model)
    first, second = model
    ones = torch.ones(2, 64, requires_grad=True)
    draws.set(0, 1, torch.tensor([1, 2]))
    dropped = torch.utils.checkpoint.checkpoint(lambda x: first(x * x), ones, use_reentrant=False)
    draws.set(0, 1, torch.tensor([7, 8]))
    second(ones)
    dropped.sum().backward()
    assert ones.grad is not None
    assert torch.equal(ones.grad, 2 * dropped.detach())


def test_the_norm_of_one_stage_is_not_told() -> None:
    norm = GradientNorm()
    mine, elsewhere = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.SGD([mine, elsewhere], lr=0.1)
    norm.follow(optimizer)
    mine.grad = torch.ones(2)
    optimizer.step()
    assert norm.take() is None


def test_a_weight_is_held_by_each_rank_with_a_stage_that_uses_it() -> None:
    shape = Shape(vocabulary=11, length=6, layers=2, heads=2, width=8, tied=True)
    model = MiniGPT(shape)
    stages = [[part] for part in model.parts().values()]
    assert len(stages) == 4
    found = holders(stages, 3)
    assert found[id(model.embedding.weight)] == (0,), "the first and the last stage are on one rank"
    found = holders(stages, 2)
    assert found[id(model.embedding.weight)] == (0, 1)
    assert found[id(model.norm.weight)] == (1,)


def test_a_frozen_weight_is_held_by_the_ranks_that_use_it() -> None:
    frozen, learning = nn.Linear(2, 2, bias=False).requires_grad_(False), nn.Linear(2, 2, bias=False)
    assert holders([[frozen], [nn.ReLU()], [learning]], 3) == {id(frozen.weight): (0,), id(learning.weight): (2,)}


def test_what_is_left_out_of_checkpoints_lies_where_it_is_used_and_what_nobody_uses_on_all_ranks() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}).requires_grad_(False)
    model["aside"] = nn.BatchNorm1d(2, affine=False)
    exclude_from_state(model, [name for name in model.state_dict() if name.startswith("second")])
    found = placement(model, holders([[model["first"]], [model["second"]]], 2), 2)
    assert [found[id(model[name].weight)] for name in ("first", "second")] == [(0,), (1,)]
    assert found[id(model["aside"].running_mean)] == (0, 1)


def actions(words: str) -> list[Any]:
    return [_Action.from_str(word) for word in words.split()]


def told(found: list[Any]) -> str:
    return " ".join(str(one) for one in found)


def test_receives_are_posted_some_passes_before_torch_posts_them() -> None:
    order = actions("1F0 1SEND_F0 1F1 3RECV_F0 1SEND_F1 3F0 3RECV_F1 3F1")
    assert told(with_early_receives(order, 0)) == told(order)
    assert told(with_early_receives(order)) == "1F0 1SEND_F0 3RECV_F0 1F1 1SEND_F1 3RECV_F1 3F0 3F1"
    assert told(with_early_receives(order, 9)) == "3RECV_F0 3RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 3F0 3F1"


def test_receives_stay_in_the_order_in_which_the_other_rank_sends() -> None:
    order = actions("2B0 0RECV_B0 0RECV_B1 0B0 2F1 0RECV_B2 0B1 0B2")
    for ahead in range(5):
        found = [str(one) for one in with_early_receives(order, ahead) if "RECV" in str(one)]
        assert found == ["0RECV_B0", "0RECV_B1", "0RECV_B2"]


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """This process is the first of two ranks, of which there is no other."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["interleaved1f1b", "zeroBubble"])
@pytest.mark.usefixtures("first_of_two")
def test_the_order_is_where_it_is_looked_for(name: str) -> None:
    value, cpu = torch.zeros(1, 1), torch.device("cpu")
    stages = [PipelineStage(nn.Linear(1, 1), index, 4, cpu, input_args=value, output_args=value) for index in (0, 2)]
    schedule: Any = SCHEDULES[name](stages, 4)  # type: ignore[arg-type]
    order = schedule.pipeline_order_with_comms[0]
    assert told(with_early_receives(order)) != told(order)


def test_a_tensor_of_a_stage_knows_its_place() -> None:
    live = nn.Parameter(torch.ones(3))
    tensor = StageTensor.wrap(live, (1,), torch.device("cpu"))
    assert is_sharded(tensor)
    assert place_of(tensor) == (1,)
    assert type(to_local(tensor)) is Tensor
    assert to_local(tensor).data_ptr() == live.data_ptr()
