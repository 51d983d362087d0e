"""State goes back to what it was taken from, whatever the order of groups and the wrappers, or it is refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tandem_trainer.checkpoint.state import CheckpointMismatch, NamedOptimizer
from tandem_trainer.checkpoint.train_state import Contents, TrainState

Optimizers = dict[str, torch.optim.Optimizer]


class Net(nn.Module):
    """Parameters of which several have the same shape, so that a wrong order is no error."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.backbone(rows)))
        return found


def decay_groups(net: Net) -> torch.optim.Optimizer:
    """As most language models are trained: what has one dimension is not decayed, and comes last."""
    plain = [one for one in net.parameters() if one.ndim > 1]
    rest = [one for one in net.parameters() if one.ndim == 1]
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.05)


def frozen_prefix(net: Net) -> torch.optim.Optimizer:
    net.backbone.requires_grad_(False)
    return torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], lr=0.05)


def reversed_order(net: Net) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(net.parameters())[::-1], lr=0.05, fused=True)


def head_first(net: Net) -> torch.optim.Optimizer:
    groups = [{"params": net.head.parameters(), "lr": 0.1}, {"params": net.backbone.parameters()}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def quasi_newton(net: Net) -> torch.optim.Optimizer:
    """Its state is lists of tensors, counts and numbers, all with the first parameter."""
    return torch.optim.LBFGS(net.parameters(), lr=0.5, history_size=3)


def double_moments(net: Net) -> torch.optim.Optimizer:
    """Moments in another type than the parameters'."""
    return DoubleMomentum(net.parameters(), lr=0.05)


def orthogonal(net: Net) -> torch.optim.Optimizer:
    """Muon takes matrices alone."""
    return torch.optim.Muon([one for one in net.parameters() if one.ndim == 2], lr=0.02)


def factored(net: Net) -> torch.optim.Optimizer:
    """Second moments of rows and columns, of other shapes than the parameters'."""
    return torch.optim.Adafactor(net.parameters(), lr=0.05)


def normed_weights(net: Net) -> torch.optim.Optimizer:
    nn.utils.parametrizations.weight_norm(net.head)
    return torch.optim.Adam(net.parameters(), lr=0.05)


class Table(nn.Module):
    """Looks rows up by numbers; its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 4, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.rows((rows * 8).long().abs() % 5)
        return found.mean(1)


def sparse_gradients(net: Net) -> torch.optim.Optimizer:
    net.backbone = Table()  # type: ignore[assignment]
    for part in (net.norm, net.head):
        part.requires_grad_(False)
    return torch.optim.SparseAdam(net.backbone.parameters(), lr=0.05)


class DoubleMomentum(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    state = self.state[one]
                    state["mean"] = state.get("mean", torch.zeros_like(one, dtype=torch.float64)) * 0.9 + one.grad
                    state["taken"] = state.get("taken", 0.0) + 0.1
                    one -= (group["lr"] / (1 + state["taken"]) * state["mean"]).to(one.dtype)


def take_step(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    rows = torch.sin(torch.arange(12.0).reshape(3, 4) * (step + 1))

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = (net(rows) - rows.cos()).square().mean()
        found.backward()
        return found

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(loss)  # type: ignore[arg-type]
    else:
        loss()
        optimizer.step()


def take_steps(net: Net, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        take_step(net, optimizer, step)


def frozen_copy(contents: Contents) -> Contents:
    """What a checkpoint would hold: steps taken later do not change it."""
    return copy.deepcopy(contents)


@pytest.mark.parametrize(
    "make",
    [
        *(decay_groups, frozen_prefix, reversed_order, head_first, quasi_newton, double_moments),
        *(orthogonal, factored, normed_weights, sparse_gradients),
    ],
)
def test_the_next_steps_are_the_very_same_however_the_optimizer_orders_its_parameters(
    make: Callable[[Net], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = make(net)
    take_steps(net, optimizer, 0, 5)
    contents = frozen_copy(TrainState(net, optimizer, hyperparameters=True).contents({}))
    take_steps(net, optimizer, 5, 5)

    torch.manual_seed(1)
    again = Net()
    again_optimizer = make(again)
    kept = TrainState(again, again_optimizer, hyperparameters=True)
    kept.check(contents)
    kept.load(contents)
    take_steps(again, again_optimizer, 5, 5)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda one: schedules.StepLR(one, 3),
    "steps": lambda one: schedules.MultiStepLR(one, [2, 5, 5]),
    "exponential": lambda one: schedules.ExponentialLR(one, 0.9),
    "cosine": lambda one: schedules.CosineAnnealingLR(one, 10),
    "warm restarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 4),
    "lambda": lambda one: schedules.LambdaLR(one, lambda step: 0.95**step),
    "multiplicative": lambda one: schedules.MultiplicativeLR(one, lambda step: 0.95),
    "one cycle": lambda one: schedules.OneCycleLR(one, 0.1, total_steps=20),
    "cyclic": lambda one: schedules.CyclicLR(one, 0.01, 0.1, step_size_up=4),
    "cyclic by a function": lambda one: schedules.CyclicLR(one, 0.01, 0.1, step_size_up=4, scale_fn=lambda x: 0.9**x),
    "linear": lambda one: schedules.LinearLR(one),
    "constant": lambda one: schedules.ConstantLR(one),
    "polynomial": lambda one: schedules.PolynomialLR(one, 10),
    "sequence": lambda one: schedules.SequentialLR(
        one, [schedules.LinearLR(one, 0.1, total_iters=4), schedules.CosineAnnealingLR(one, 10)], [4]
    ),
    "chain": lambda one: schedules.ChainedScheduler([schedules.ConstantLR(one), schedules.ExponentialLR(one, 0.9)]),
    "plateau": lambda one: schedules.ReduceLROnPlateau(one, patience=1),
    "average": lambda one: SWALR(one, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_with_the_rates_and_momenta_of_the_undisturbed_run(name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any, TrainState]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        return optimizer, schedule, TrainState(net, optimizer, None, {"schedule": schedule}, hyperparameters=True)

    def taken(optimizer: torch.optim.Optimizer, schedule: Any, first: int) -> list[tuple[float, float]]:
        values = []
        for step in range(first, first + 7):
            optimizer.step()
            schedule.step(*[1.0 + step % 3] if name == "plateau" else [])
            values.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return values

    optimizer, schedule, kept = make()
    taken(optimizer, schedule, 0)
    contents = frozen_copy(kept.contents({}))
    again, schedule_again, kept_again = make()
    kept_again.check(contents)
    kept_again.load(replace(contents, loop=json.loads(json.dumps(contents.loop))))
    assert taken(again, schedule_again, 7) == taken(optimizer, schedule, 7)


def test_groups_without_parameters_keep_their_own_settings() -> None:
    """Hugging Face's Trainer makes two groups whatever the model has, and a script may have more such."""

    def groups(net: Net) -> torch.optim.Optimizer:
        mine = [{"params": list(net.parameters()), "weight_decay": 0.1}]
        return torch.optim.AdamW([*mine, *({"params": [], "weight_decay": decay} for decay in (0.2, 0.3))])

    net, again = Net(), Net()
    state = NamedOptimizer(net, groups(net)).state()
    other = groups(again)
    for group in other.param_groups:
        group["weight_decay"] = 0.9
    NamedOptimizer(again, other).load(state)
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.2, 0.3]


def test_moments_follow_their_parameters_into_another_order_of_groups() -> None:
    net, again = Net(), Net()
    optimizer = decay_groups(net)
    take_steps(net, optimizer, 0, 3)
    contents = frozen_copy(TrainState(net, optimizer, hyperparameters=True).contents({}))
    groups = decay_groups(again).param_groups[::-1]
    other = torch.optim.AdamW([{"params": group["params"]} for group in groups], lr=0.9)
    TrainState(again, other, hyperparameters=True).load(contents)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    before, after = NamedOptimizer(net, optimizer).state().tensors, NamedOptimizer(again, other).state().tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[path], after[path]) for path in before)


def test_several_optimizers_each_get_their_own() -> None:
    def make() -> tuple[Net, Optimizers]:
        net = Net()
        return net, {
            "head": torch.optim.Adam(net.head.parameters(), lr=0.1),
            "rest": torch.optim.Adam([*net.norm.parameters(), *net.backbone.parameters()], lr=0.01),
        }

    net, optimizers = make()
    for step in range(3):
        take_steps(net, optimizers["head"], step, 1)
        take_steps(net, optimizers["rest"], step, 1)
    contents = frozen_copy(TrainState(net, optimizers, hyperparameters=True).contents({}))
    again, others = make()
    TrainState(again, others, hyperparameters=True).load(contents)
    for name in optimizers:
        before, after = NamedOptimizer(net, optimizers[name]).state(), NamedOptimizer(again, others[name]).state()
        assert len(before.tensors) > 4
        assert all(torch.equal(before.tensors[path], after.tensors[path]) for path in before.tensors)
        assert before.hyperparameters == after.hyperparameters
    with pytest.raises(
        CheckpointMismatch, match="of the optimizers head, rest, but the script registers one optimizer"
    ):
        TrainState(again, one_group(again)).check(contents)


def renamed(net: Net) -> torch.optim.Optimizer:
    net.tail = net.head
    del net.head
    return torch.optim.AdamW(net.parameters())


def wider(net: Net) -> torch.optim.Optimizer:
    net.head = nn.Linear(4, 5)
    return torch.optim.AdamW(net.parameters())


def one_group(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters())


def without_norm(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*net.backbone.parameters(), *net.head.parameters()])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (renamed, r"the checkpoint lacks tail\.bias, tail\.weight; the script lacks head\.bias, head\.weight"),
        (wider, r"head\.weight is \[4, 4\] there and \[5, 4\] here"),
        (one_group, "the optimizer's parameters are grouped differently"),
        (without_norm, r"the script lacks norm\.bias, norm\.weight"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(make: Callable[[Net], Any], said: str) -> None:
    net = Net()
    optimizer = decay_groups(net)
    take_steps(net, optimizer, 0, 2)
    contents = frozen_copy(TrainState(net, optimizer, hyperparameters=True).contents({}))
    other = Net()
    kept = TrainState(other, make(other), hyperparameters=True)
    before = copy.deepcopy(kept.contents({}))
    with pytest.raises(CheckpointMismatch, match=said):
        kept.check(contents)
    after = kept.contents({})
    assert all(torch.equal(tensor, after.weights[name]) for name, tensor in before.weights.items())
    assert before.optimizer.keys() == after.optimizer.keys()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: nn.DataParallel(net),
        lambda net: torch.compile(net, backend="eager"),
        lambda net: torch.compile(nn.DataParallel(net), backend="eager"),
        lambda net: nn.DataParallel(torch.compile(net, backend="eager")),
    ],
)
def test_wrappers_around_the_model_do_not_show_in_a_checkpoint(wrap: Callable[[nn.Module], nn.Module]) -> None:
    net, other = Net(), Net()
    contents = TrainState(wrap(net), one_group(net)).contents({})
    assert sorted(contents.weights) == sorted(net.state_dict())
    TrainState(other, one_group(other)).load(copy.deepcopy(contents))
    assert torch.equal(other.head.weight, net.head.weight)


def test_a_part_that_is_compiled_keeps_its_names() -> None:
    net, other = Net(), Net()
    net.head = torch.compile(net.head, backend="eager")  # type: ignore[assignment]
    contents = TrainState(net, one_group(net)).contents({})
    assert "head.weight" in contents.weights
    TrainState(other, one_group(other)).load(copy.deepcopy(contents))
    compiled = Net()
    compiled.head = torch.compile(compiled.head, backend="eager")  # type: ignore[assignment]
    kept = TrainState(compiled, one_group(compiled))
    kept.check(contents)
    kept.load(copy.deepcopy(contents))
    assert torch.equal(dict(compiled.named_parameters())["head._orig_mod.weight"], other.head.weight)


def test_an_average_goes_on_and_does_not_begin_anew() -> None:
    def make() -> tuple[Net, AveragedModel]:
        net = Net()
        return net, AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]

    net, average = make()
    optimizer = one_group(net)
    for step in range(4):
        take_steps(net, optimizer, step, 1)
        average.update_parameters(net)
    contents = frozen_copy(TrainState(net, optimizer, average).contents({}))
    again, average_again = make()
    optimizer_again = one_group(again)
    TrainState(again, optimizer_again, average_again).load(contents)
    for one, mean, with_optimizer in ((net, average, optimizer), (again, average_again, optimizer_again)):
        take_steps(one, with_optimizer, 4, 1)
        mean.update_parameters(one)
    assert int(average_again.n_averaged) == 5
    for name, tensor in average.module.state_dict().items():
        assert torch.equal(tensor, average_again.module.state_dict()[name]), name


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = {"batches": 0, "share": 0.1}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_what_modules_keep_beside_tensors_comes_back_as_it_was() -> None:
    net, again = Counting(), Counting()
    net.seen = {"batches": 3, "share": 0.1 + 0.2}
    contents = TrainState(net, None).contents({})
    kept = TrainState(again, None)
    kept.check(contents)
    kept.load(contents)
    assert again.seen == {"batches": 3, "share": 0.30000000000000004}


def test_mixed_precision_that_is_switched_on_later_begins_afresh() -> None:
    net = Net()
    off = torch.amp.GradScaler("cpu", enabled=False)
    contents = TrainState(net, None, None, {"scaler": off}).contents({})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kept = TrainState(Net(), None, None, {"scaler": scaler})
    kept.check(contents)
    kept.load(contents)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.bool, torch.complex64),
    ],
)
def test_tensors_of_every_type_of_the_format_are_held(dtype: torch.dtype) -> None:
    net = nn.Module()
    values = torch.tensor([0, 1, 1, 0], dtype=torch.float32).to(dtype)
    net.register_buffer("table", values)
    contents = TrainState(net, None).contents({})
    contents.check()
    again = nn.Module()
    again.register_buffer("table", torch.zeros(4).to(dtype))
    TrainState(again, None).load(copy.deepcopy(contents))
    assert torch.equal(again.get_buffer("table").view(torch.uint8), values.view(torch.uint8))


def test_buffers_are_not_rounded_for_evaluators() -> None:
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(torch.ones(2)))
    net.register_buffer("positions", torch.arange(4.0))
    rounded = TrainState(net, None).contents({}).rounded()
    assert (rounded["weight"].dtype, rounded["positions"].dtype) == (torch.bfloat16, torch.float32)
