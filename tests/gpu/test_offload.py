"""Under `fsdp.cpuOffload` a model takes the steps that it takes on the GPU alone, and goes on from its checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tandem.job.tasks import FsdpSettings as Options
from tandem.job.tasks import Loop, Optimizer
from tandem_trainer.causal_lm import CausalLM, CausalLMConfig
from tandem_trainer.checkpoint.exchange import Exchange
from tandem_trainer.checkpoint.sharding import to_local
from tandem_trainer.checkpoint.staging import FileLayout, Staging, shared_memory
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.models.minigpt import MiniGPT
from tandem_trainer.optimizers import torch_optimizer
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.fsdp import Fsdp

BACKEND = "nccl"
# Of CUDA, NCCL and their drivers, which are those of the machine.
pytestmark = pytest.mark.filterwarnings("default")
TASK = CausalLM(CausalLMConfig(width=32, layers=2, heads=2, length=16))
ADAM = Optimizer(name="adamw", learning_rate=0.01)
LOOP = Loop(strategy="fsdp", fsdp=Options(cpu_offload=True), optimizer=ADAM)


@pytest.fixture
def group(tmp_path: Path, device: torch.device) -> Iterator[Group]:
    """A process group of one rank, as NCCL wants one GPU for each."""
    on_gpu = device.type == "cuda"
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=1, device_id=device if on_gpu else None)
    yield Group(0, 1, 0, device)
    dist.destroy_process_group()


class Split:
    """A model whose state is in the memory of the machine, that takes itself for one of two ranks."""

    def __init__(self, group: Group) -> None:
        torch.manual_seed(0)
        self.model = TASK.model()
        self.strategy = Fsdp(LOOP, group, 1, 1)
        self.strategy.dp_size = 2
        self.strategy.shard(self.model, TASK, lambda count: None)
        self.optimizer = torch_optimizer(self.model, ADAM)
        self.kept = TrainState(self.model, self.optimizer)

    def step(self, tokens: Tensor) -> float:
        return stepped(self.model, self.optimizer, tokens, self.strategy)


def stepped(model: MiniGPT, optimizer: torch.optim.Optimizer, tokens: Tensor, strategy: Fsdp | None) -> float:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
    loss.backward()
    if strategy is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        strategy.clip([*model.parameters()], 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def test_the_state_is_in_the_memory_of_the_machine_and_learns_the_same(group: Group) -> None:
    torch.manual_seed(0)
    alone = TASK.model().to(group.device)
    optimizer = torch_optimizer(alone, ADAM)
    ours = Split(group)
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1)).to(group.device)
    for _ in range(5):
        assert ours.step(tokens) == pytest.approx(stepped(alone, optimizer, tokens, None), rel=1e-3)
    moments = [one["exp_avg"] for one in ours.optimizer.state.values()]
    assert {to_local(one).device.type for one in [*ours.model.parameters(), *moments]} == {"cpu"}
    assert {one.device.type for one in ours.model.buffers()} == {group.device.type}


def test_it_goes_on_from_what_it_saves(group: Group) -> None:
    tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1)).to(group.device)
    first = Split(group)
    for _ in range(3):
        first.step(tokens)
    contents = first.kept.contents({})
    files = contents.files(rounds=False)
    layout = FileLayout.from_files(files, 1)
    staging = Staging(shared_memory(), files, layout, 0)
    staging.copy(files, Exchange(files, layout, 0, 1).receive(files))
    whole: dict[str, dict[str, Tensor]] = {path: {} for path in files}
    for one in staging._slices:
        whole[one.path][one.name] = one.place.clone().view(files[one.path][one.name].shape)
    weights, moments = whole["weights.safetensors"], whole["state/optimizer.safetensors"]
    second = Split(group)
    read = Contents(weights, moments, loop=contents.loop)
    second.kept.check(read)
    second.kept.load(read)
    found = [one["exp_avg"] for one in second.optimizer.state.values()]
    assert {to_local(one).device.type for one in [*second.model.parameters(), *found]} == {"cpu"}
    assert [second.step(tokens) for _ in range(2)] == pytest.approx([first.step(tokens) for _ in range(2)], rel=1e-4)
