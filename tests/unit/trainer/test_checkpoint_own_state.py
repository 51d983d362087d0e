"""What an object gives from its state_dict is what it gets back, or the run is refused where the object is kept."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint import train_state
from tandem_trainer.checkpoint.restoring import digests, restore
from tandem_trainer.checkpoint.saving import Author
from tandem_trainer.checkpoint.state import CheckpointMismatch, NamedOptimizer
from tandem_trainer.checkpoint.train_state import SMALL_BYTES, TrainState
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tandem_trainer.session import Session
from tests.support import manifests
from tests.support.own_state import WRAPPED, Recorded, SaverHere, Seen, adam
from tests.support.threads import ThreadGroup, on_ranks


def saved(folder: Path, kept: TrainState) -> RunDir:
    """A run directory with one checkpoint."""
    rundir = manifests.run_directory(folder, manifests.job("test"))
    assert rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    saver = SaverHere(rundir, Author(1, None, 1), lambda: None, lambda outcome: None)
    saver.save(1, DataPosition(seed=0, epoch=0, cursor=0), kept.contents({}))
    assert "committed" in saver.wait()
    saver.close()
    return rundir


def resumed(rundir: RunDir, *replicas: TrainState) -> None:
    """Put the checkpoint into ranks of one node, and give back the memory that it was read into."""

    def on(group: Group) -> None:
        kept = replicas[group.rank]
        restored = restore(rundir, group, lambda found: kept.check(found.contents))
        kept.load(restored.loaded.contents)
        restored.loaded = None
        group.barrier()
        restored.release()

    for error in on_ranks(len(replicas), on):
        if error is not None:
            raise error


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen, self.recorded = Seen(), Recorded()

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.update(1.5)
        self.recorded.update(2.5)
        found: Tensor = self.last(torch.tanh(self.first(rows)))
        return found


def groups(net: Net) -> list[dict[str, Any]]:
    return [{"params": [*net.last.parameters()]}, {"params": [*net.first.parameters()], "lr": 0.05}]


def take_steps(net: Net, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        rows = torch.sin(torch.arange(12.0).reshape(3, 4) * (step + 1))
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


# --- optimizers


@pytest.mark.parametrize("kind", sorted(WRAPPED))
def test_an_optimizer_gets_back_what_its_own_state_dict_gave(tmp_path: Path, kind: str) -> None:
    net, again = Net(), Net()
    optimizer, optimizer_again = WRAPPED[kind](groups(net)), WRAPPED[kind](groups(again))
    take_steps(net, optimizer, 0, 5)
    rundir = saved(tmp_path, TrainState(net, optimizer, hyperparameters=True))
    resumed(rundir, TrainState(again, optimizer_again, hyperparameters=True))
    take_steps(net, optimizer, 5, 5)
    take_steps(again, optimizer_again, 5, 5)
    assert_same(again, net)


def test_what_a_hook_adds_to_a_state_dict_is_state_too() -> None:
    def made(count: list[int]) -> NamedOptimizer:
        optimizer = adam(groups(net := Net()))
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"count": count[0]})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: count.__setitem__(0, state["count"]))
        return NamedOptimizer(net, optimizer)

    count = [0]
    made(count).load(made([7]).state())
    assert count == [7]


def test_state_by_number_is_refused_where_the_parameters_are_in_another_order() -> None:
    net, other = Net(), Net()
    optimizer = WRAPPED["lookahead"](groups(net))
    take_steps(net, optimizer, 0, 2)
    state = copy.deepcopy(NamedOptimizer(net, optimizer).state())
    with pytest.raises(CheckpointMismatch, match="depends on the order of its parameters, which has changed"):
        NamedOptimizer(other, WRAPPED["lookahead"](groups(other)[::-1])).check(state)


def test_an_optimizer_that_would_drop_state_is_refused() -> None:
    net, other = Net(), Net()
    optimizer = WRAPPED["lookahead"](groups(net))
    take_steps(net, optimizer, 0, 2)
    with pytest.raises(CheckpointMismatch, match="has slow, taken beside that by parameter, which Adam does not load"):
        NamedOptimizer(other, adam(groups(other))).check(NamedOptimizer(net, optimizer).state())


def test_an_optimizer_that_splits_its_state_over_ranks_is_refused_by_name() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # Without a process group there is none that works.
    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    with pytest.raises(ConfigurationError, match=r"ZeroRedundancyOptimizer splits its state .* strategy=\"fsdp\""):
        TrainState(Net(), optimizer)


def test_local_sgd_is_refused_where_it_is_chosen(tmp_path: Path) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.optim import PostLocalSGDOptimizer

    why = r"each rank trains weights of its own between two averages.* gradient accumulation"
    # Without a process group there are none that work.
    with pytest.raises(ConfigurationError, match=why):
        TrainState(Net(), PostLocalSGDOptimizer.__new__(PostLocalSGDOptimizer))
    session = Session(tmp_path)
    with pytest.raises(ConfigurationError, match=why):
        session.distribute(Net(), comm_hook=post_localSGD_hook, comm_state=PostLocalSGDState.__new__(PostLocalSGDState))


class Sharp(torch.optim.Optimizer):
    """As SAM is often written: it shares its groups with another one, and gives its own empty state."""

    def __init__(self, given: list[dict[str, Any]]) -> None:
        super().__init__(given, {})
        self.inner = torch.optim.Adam(self.param_groups, lr=0.01)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_state_that_a_state_dict_does_not_give_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = Sharp(groups(net))
    kept = TrainState(net, optimizer)
    kept.contents({})
    assert not caplog.records
    take_steps(net, optimizer, 0, 1)
    for _ in range(2):
        kept.contents({})
    (warning,) = caplog.messages
    assert (
        "optimizer=Sharp holds the optimizer Adam, and its state_dict does not include that one's exp_avg, exp_avg_sq"
        in warning
    )


@pytest.mark.parametrize("kind", sorted(WRAPPED))
def test_an_optimizer_that_gives_the_state_of_the_one_inside_is_not_warned_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    optimizer = WRAPPED[kind](groups(net))
    take_steps(net, optimizer, 0, 1)
    TrainState(net, optimizer).contents({})
    assert not caplog.records


# --- what is changed while it trains


def unfrozen(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.first.requires_grad_(True)
    optimizer.add_param_group({"params": [*net.first.parameters()], "lr": 0.002})


def with_frozen(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Net, torch.optim.Optimizer, TrainState]:
    net = Net()
    net.first.requires_grad_(False)
    optimizer = make([{"params": [*net.last.parameters()]}])
    return net, optimizer, TrainState(net, optimizer, hyperparameters=True)


@pytest.mark.parametrize("make", [adam, *WRAPPED.values()], ids=["adam", *WRAPPED])
def test_a_group_that_was_added_is_added_again_and_learns(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    (net, optimizer, kept), (again, optimizer_again, kept_again) = with_frozen(make), with_frozen(make)
    take_steps(net, optimizer, 0, 3)
    unfrozen(net, optimizer)
    take_steps(net, optimizer, 3, 3)
    rundir = saved(tmp_path, kept)
    resumed(rundir, kept_again)
    assert [len(group["params"]) for group in optimizer_again.param_groups] == [2, 2]
    take_steps(net, optimizer, 6, 3)
    take_steps(again, optimizer_again, 6, 3)
    assert_same(again, net)
    # The generation after that begins with one group, too.
    third, _, kept_third = with_frozen(make)
    kept_third.check(kept_again.contents({}))
    kept_third.load(copy.deepcopy(kept_again.contents({})))
    assert third.first.weight.requires_grad


def test_a_group_that_the_script_itself_made_is_not_added_when_it_is_taken_out() -> None:
    net, other = Net(), Net()
    contents = TrainState(net, adam(groups(net)), hyperparameters=True).contents({})
    with pytest.raises(CheckpointMismatch, match=r"the script lacks first\.bias, first\.weight"):
        TrainState(other, adam(groups(other)[:1]), hyperparameters=True).check(contents)


def test_a_group_of_parameters_that_the_model_lacks_is_refused() -> None:
    net, optimizer, kept = with_frozen(adam)
    net.more = nn.Linear(2, 2)
    optimizer.add_param_group({"params": [*net.more.parameters()]})
    contents = kept.contents({})
    _, _, other = with_frozen(adam)
    with pytest.raises(CheckpointMismatch, match=r"more\.bias"):
        other.check(contents)


def test_a_parameter_of_no_kept_module_is_refused_when_it_is_added() -> None:
    _, optimizer, kept = with_frozen(adam)
    optimizer.add_param_group({"params": [*nn.Linear(2, 2).parameters()]})
    with pytest.raises(ConfigurationError, match="a parameter was added to the optimizer that is not the model's"):
        kept.contents({})


def test_what_the_script_itself_freezes_since_stays_frozen() -> None:
    net, other = Net(), Net()
    contents = copy.deepcopy(TrainState(net, None).contents({}))
    other.first.requires_grad_(False)
    TrainState(other, None).load(contents)
    assert not other.first.weight.requires_grad


# --- modules


def test_a_module_that_keeps_what_it_loads_has_its_values_when_the_memory_is_given_back(tmp_path: Path) -> None:
    net = Net()
    take_steps(net, adam(groups(net)), 0, 4)
    rundir = saved(tmp_path, TrainState(net, None))
    ranks = [Net(), Net()]
    resumed(rundir, *map(TrainState, ranks, [None, None]))
    for one in ranks:
        assert_same(one, net)
    ranks[0].seen.update(1.0)
    assert (float(ranks[0].seen.total), float(ranks[1].seen.total)) == (7.0, 6.0), "each rank has its own"


def test_a_module_gets_its_copies_where_it_is() -> None:
    net, again = Net(), Net()
    again.seen.total = again.seen.total.to("meta")
    TrainState(again, None).load(TrainState(net, None).contents({}))
    assert (again.seen.total.device.type, again.seen.values.device.type) == ("meta", "cpu")


def test_what_a_hook_keeps_of_a_state_dict_stays_as_it_was(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, list[Tensor]]:
        net, given = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
        net[0].register_load_state_dict_pre_hook(lambda module, state, prefix, *_: given.append(state[f"{prefix}bias"]))
        return net, given

    (net, _), (again, given) = made(), made()
    resumed(saved(tmp_path, TrainState(net, None)), TrainState(again, None))
    assert torch.equal(given[-1], net[0].bias)  # type: ignore[arg-type]


def test_an_average_of_such_a_module_keeps_its_own_values(tmp_path: Path) -> None:
    net, average, again, average_again = Net(), Net(), Net(), Net()
    net.seen.update(3.0)
    average.seen.update(4.0)
    resumed(saved(tmp_path, TrainState(net, None, average)), TrainState(again, None, average_again))
    assert (float(again.seen.total), float(average_again.seen.total)) == (3.0, 4.0)


class Stubborn(nn.Module):
    """Loads in its own way, and takes one shape."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)


def test_a_module_is_asked_before_it_is_changed_whether_it_takes_another_shape() -> None:
    net, other = nn.Sequential(Stubborn(2)), nn.Sequential(Stubborn(3))
    with pytest.raises(CheckpointMismatch, match=r"0\.table is \[2\] there and \[3\] here"):
        TrainState(other, None).check(TrainState(net, None).contents({}))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min and quant_max")
def test_observers_of_quantization_aware_training_grow_and_come_back(tmp_path: Path) -> None:
    from torch.ao import quantization

    def made() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train()
        net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        prepared: nn.Module = quantization.prepare_qat(net)
        return prepared

    torch.manual_seed(0)
    net, again = made(), made()
    kept = TrainState(net, None)
    digests(kept.replicated())  # Ranks compare them before the first step, which has to leave the tensors as they are.
    net(torch.randn(8, 4))
    resumed(saved(tmp_path, kept), TrainState(again, None))
    assert_same(again, net)
    again(torch.randn(8, 4))


# --- what each rank has of its own


class Counted:
    """One rank with a metric, a dictionary and a table, of values of its own."""

    def __init__(self, rank: int, table: int) -> None:
        self.net = Net()
        for _ in range(rank + 1):
            self.net.seen.update(rank + 1.0)
        self.rows = {"rows": torch.full((2 + rank,), float(rank)), "last": [rank]}
        if rank:
            self.rows["more"] = torch.zeros(1)  # type: ignore[assignment]
        self.table = torch.full((table,), rank, dtype=torch.uint8)
        self.kept = TrainState(self.net, None, self.net, {"mine": self.rows, "large": {"table": self.table}})


def test_of_what_each_rank_has_of_its_own_a_checkpoint_has_that_of_rank_0() -> None:
    ranks = [Counted(rank, 4) for rank in range(3)]
    saved = on_ranks(3, lambda group: ranks[group.rank].kept.saved(group, {}))
    for one in saved:
        assert {*one.others} == {"mine/rows", "large/table"}
        assert one.others["mine/rows"].tolist() == [0.0, 0.0]
        assert one.others["large/table"].tolist() == [0] * 4
        assert one.weights["seen.values"].tolist() == one.average["seen.values"].tolist() == [1.0]
    assert [len(rank.net.seen.values) for rank in ranks] == [1, 2, 3], "each goes on with its own"
    assert [rank.rows["rows"].tolist() for rank in ranks] == [[0.0] * 2, [1.0] * 3, [2.0] * 4]


def test_large_tensors_that_have_one_shape_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Counted(0, SMALL_BYTES + 1) for _ in range(2)]
    sent: list[int] = []
    monkeypatch.setattr(
        ThreadGroup, "copy_from_first", lambda group, some: sent.append(sum(one.nbytes for one in some))
    )
    saved = on_ranks(2, lambda group: ranks[group.rank].kept.saved(group, {}))
    assert [one.others["large/table"] is rank.table for one, rank in zip(saved, ranks, strict=True)] == [True] * 2
    assert 0 < max(sent) < 100


def test_large_tensors_of_other_shapes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_state, "SMALL_BYTES", 3)
    ranks = [Counted(0, 4 + rank) for rank in range(2)]
    saved = on_ranks(2, lambda group: ranks[group.rank].kept.saved(group, {}))
    assert [len(one.others["large/table"]) for one in saved] == [4, 4]


# --- small things


def test_a_dictionary_that_was_empty_is_empty_again() -> None:
    contents = TrainState(nn.Linear(2, 1), None, None, {"pending": {}}).contents({})
    pending = {"rows": [1, 2]}
    TrainState(nn.Linear(2, 1), None, None, {"pending": pending}).load(contents)
    assert pending == {}


def test_an_array_without_dimensions_has_none_afterwards() -> None:
    contents = TrainState(nn.Linear(2, 1), None, None, {"best": {"loss": np.array(0.5)}}).contents({})
    best: dict[str, Any] = {}
    TrainState(nn.Linear(2, 1), None, None, {"best": best}).load(contents)
    assert best["loss"].shape == ()
    assert best["loss"] == 0.5


def test_a_relative_folder_stays_where_it_was_when_the_script_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with Session("run", checkpoint={"everySteps": 2}) as session:
        model = session.distribute(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.keep(model, optimizer)
        os.chdir(elsewhere)
        for batch in session.batches(TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), 4):
            rows, labels = batch.data
            batch.mean(cross_entropy(model(rows), labels, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert RunDir(tmp_path / "run").done() is not None
    assert not list(elsewhere.iterdir())
