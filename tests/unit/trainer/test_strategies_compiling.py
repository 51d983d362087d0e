"""What `compile: true` hands to torch's compiler: the whole model, on one rank and on several."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tandem.job.tasks import Loop
from tandem_trainer.models import build
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.ddp import Ddp
from tandem_trainer.strategies.pipeline import _Stage
from tandem_trainer.strategies.strategy import Strategy


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each graph has that the compiler is given from here on."""
    import torch._inductor.compile_fx as inductor

    found: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: object, **_: Any) -> Any:
        found.append(sum(node.op in ("call_function", "call_module", "call_method") for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", count)
    torch.compiler.reset()
    return found


def compiled_operations(world_size: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each graph has that the compiler is given while a model takes two steps.

    The process group has one rank, whatever the model is told: what is around the model does not depend on it.
    """
    found = counted(monkeypatch)
    group = Group(0, 1, 0, torch.device("cpu"))
    group.world_size = world_size
    model = build("baby-cnn", 1, 8, 10)
    before = model.state_dict().keys()
    loop = Loop(compile=True)
    forward = (Ddp if world_size > 1 else Strategy)(loop, group).wrap(model)
    assert isinstance(forward, nn.Module)
    for _ in range(2):
        forward(torch.zeros(4, 1, 8, 8)).sum().backward()
    assert model.state_dict().keys() == before
    return found


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_whole_model_is_one_graph(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (operations,) = compiled_operations(world_size, monkeypatch)
    assert operations >= 8, "four convolutions and poolings, two activations, the flattening, the linear layer"


def test_a_stage_of_a_pipeline_is_one_graph_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    strategy = SimpleNamespace(loop=Loop(strategy="pipeline", compile=True), splits=False)
    runner: Any = SimpleNamespace(strategy=strategy)
    parts = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]
    stage = _Stage(runner, 1, parts, is_last=False)
    for _ in range(3):
        values = stage.chain((torch.ones(5, 4, requires_grad=True),), {})
        values[0].sum().backward()
    (operations,) = found
    assert operations >= len(parts)
