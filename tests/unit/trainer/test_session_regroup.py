"""A step of a script's loop that is lost: what it has changed is put back, and what cannot be put back is found."""

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tandem_trainer.group_model import GroupModel, PassState
from tandem_trainer.meter import Stopwatch
from tandem_trainer.process_group import Group, GroupLost
from tandem_trainer.session_regroup import MAX_COPIED_BYTES, SessionRegroup, StepGuard
from tandem_trainer.strategies.session_models import Models

ALONE = Group(0, 1, 0, torch.device("cpu"))


class Loop:
    """A loop of a user's own, without a group."""

    def __init__(self, **states: Any) -> None:
        torch.manual_seed(0)
        self.passes = PassState()
        self.passes.is_tolerant = True
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.forward = GroupModel(self.model, {}, self.passes)
        self.optimizer = torch.optim.AdamW(
            [{"params": self.model[0].parameters(), "lr": 0.1}, {"params": self.model[2].parameters()}], lr=0.01
        )
        self.schedule = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10),
            ],
            [3],
        )
        self.average = AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.9))
        self.seen: dict[str, Any] = {"samples": 0, "sum": torch.zeros(2), "rows": [1]}
        given = {"schedule": self.schedule, "seen": self.seen, **states}
        self.guard = StepGuard(self.model, [self.optimizer], given, self.passes)
        self.guard.leave_out_updates(self.average)
        self.guard.begin_generation()
        self.generator = torch.Generator().manual_seed(1)

    def loss(self) -> Tensor:
        return self.forward(torch.randn(6, 4, generator=self.generator)).square().mean()

    def step(self, is_lost: bool = False, last: Callable[[], object] = lambda: None) -> None:
        """Take a step as a script does; the group is lost in its backward pass."""
        self.guard.begin(ALONE)
        self.loss().backward()
        if is_lost:
            self.passes.lose(GroupLost())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update_parameters(self.model)
        self.seen["samples"] += 6
        self.seen["sum"] += 1
        self.seen["rows"].append(2)
        last()

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: value.clone() for name, value in self.model.state_dict().items()},
            "moments": {
                number: {key: value.clone() for key, value in state.items()}
                for number, state in self.optimizer.state_dict()["state"].items()
            },
            "groups": [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups],
            "average": {name: value.clone() for name, value in self.average.state_dict().items()},
            "schedule": [
                self.schedule.last_epoch,
                self.schedule.get_last_lr(),
                [each.last_epoch for each in self.schedule._schedulers],
            ],
            "seen": (self.seen["samples"], self.seen["sum"].tolist(), [*self.seen["rows"]]),
        }


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.guard.close()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("before", [0, 1, 2, 3, 5])
def test_a_lost_step_leaves_no_trace(loop: Loop, before: int) -> None:
    for _ in range(before):
        loop.step()
    start, total = loop.state(), loop.seen["sum"]
    loop.step(is_lost=True)
    assert not equal(loop.state()["schedule"], start["schedule"])
    assert loop.guard.put_back() == ""
    assert not loop.passes.is_lost, "passes in the next group are averaged"
    assert equal(loop.state(), start)
    assert loop.seen["sum"] is total, "the script may hold the tensor"
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    # The next one counts.
    loop.step()
    assert loop.guard.violation() == ""
    assert loop.seen["samples"] == 6 * (before + 1)
    assert loop.average.n_averaged == before + 1
    assert not equal(loop.state()["model"], start["model"])


def test_a_step_that_was_whole_is_taken(loop: Loop) -> None:
    start = loop.state()
    loop.step()
    assert loop.guard.violation() == ""
    assert not any(equal(value, start[name]) for name, value in loop.state().items())


def halve(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight.mul_(0.5)


def halve_data(loop: Loop) -> None:
    loop.model[0].weight.data.mul_(0.5)


def replace(loop: Loop) -> None:
    loop.model[0].weight.data = loop.model[0].weight.data * 0.5


def average_by_hand(loop: Loop) -> None:
    for averaged, parameter in zip(loop.average.parameters(), loop.model.parameters(), strict=True):
        averaged.detach().lerp_(parameter.detach(), 0.5)


@pytest.mark.parametrize("change", [halve, halve_data, replace, average_by_hand])
def test_weights_that_the_loop_itself_has_changed_are_noticed(loop: Loop, change: Callable[[Loop], None]) -> None:
    loop.step()
    loop.step(is_lost=True, last=lambda: change(loop))
    assert "other than by steps of its optimizers" in loop.guard.put_back()


def test_an_optimizer_that_nobody_has_registered_takes_no_step_in_a_lost_one(loop: Loop) -> None:
    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    weights = loop.state()["model"]
    loop.guard.begin(ALONE)
    loop.loss().backward()
    loop.passes.lose(GroupLost())
    with pytest.raises(GroupLost):
        other.step()
    # So does a step that was taken from the class, as a compiler does.
    with pytest.raises(GroupLost):
        torch.optim.AdamW.step(loop.optimizer)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loop.model.named_parameters())


def test_a_group_that_is_lost_after_an_update_leaves_half_a_step(loop: Loop) -> None:
    loop.guard.begin(ALONE)
    loop.loss().backward()
    loop.optimizer.step()
    loop.loss().backward()
    loop.passes.lose(GroupLost())
    assert "had taken its step before" in loop.guard.put_back()


def test_a_batch_without_an_update_is_accumulation(loop: Loop) -> None:
    loop.guard.begin(ALONE)
    loop.loss().backward()
    assert loop.guard.has_gradients()
    assert "not every optimizer" in loop.guard.violation()


def test_gradients_of_zeros_are_none(loop: Loop) -> None:
    loop.guard.begin(ALONE)
    loop.loss().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    assert not loop.guard.has_gradients()


def test_parameters_that_a_lost_step_has_added_are_noticed(loop: Loop) -> None:
    extra = nn.Parameter(torch.zeros(2))
    loop.step(is_lost=True, last=lambda: loop.optimizer.add_param_group({"params": [extra]}))
    assert "added parameters" in loop.guard.put_back()


def test_hyperparameters_are_put_back_in_place(loop: Loop) -> None:
    rate = torch.tensor(0.5)
    loop.optimizer.param_groups[0]["lr"] = rate
    loop.guard.begin(ALONE)
    loop.passes.lose(GroupLost())
    loop.optimizer.param_groups[0]["lr"].mul_(0.1)
    loop.optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    assert loop.guard.put_back() == ""
    assert loop.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert loop.optimizer.param_groups[1]["betas"] == (0.9, 0.999)


def test_what_is_too_large_to_be_copied_in_each_step_is_named() -> None:
    loop = Loop(buffer={"rows": torch.zeros(MAX_COPIED_BYTES // 4 + 1)})
    try:
        assert loop.guard.problem() == "'buffer' is too large to be copied in each step"
    finally:
        loop.guard.close()


def test_a_schedule_finds_the_step_of_the_optimizer_whether_it_is_made_before_or_after(loop: Loop) -> None:
    # A warning is an error in these tests.
    after = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.step()
    after.step()


class Peers(Group):
    """Stands for a group with another rank, of which it has one message; records the collectives of this rank."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(0, 1, 0, torch.device("cpu"))
        self.message, self.copied = message, list[list[Tensor]]()

    def gather(self, view: Mapping[str, Any]) -> list[Any]:
        return [view, self.message]

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        self.copied.append([*tensors])


@pytest.fixture
def survival() -> Iterator[SessionRegroup]:
    made = SessionRegroup(Mock(), Mock(), Mock(), torch.device("cpu"))
    yield made
    made.close()


def distributed(survival: SessionRegroup, group: Group, model: nn.Module) -> nn.Module:
    models = Models(group, 0, Stopwatch(torch.device("cpu")), survival=survival)
    return models.distribute(model, False, "ddp", None, None, None, {})


def test_a_model_is_distributed_as_the_ranks_agree_and_not_as_one_of_them_knows(survival: SessionRegroup) -> None:
    """One rank alone has asked for the number of ranks, to print it."""
    peers = Peers({"reason": "the script asks for its rank"})
    assert not isinstance(distributed(survival, peers, nn.Linear(2, 2)), GroupModel)
    assert survival.reason == "the script asks for its rank"


def watched(survival: SessionRegroup, head: nn.Module) -> None:
    survival.watch(head, [torch.optim.SGD(head.parameters(), lr=0.1)], None, {})


def test_ranks_that_survive_and_those_that_do_not_copy_the_buffers_of_all_models(survival: SessionRegroup) -> None:
    """One rank refuses in the middle of a generation, and the backbone is not registered."""
    backbone, head = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for model in (backbone, head):
        distributed(survival, ALONE, model)
    watched(survival, head)
    group = Peers({"reason": ""})
    assert survival.agree(group)
    survival.survive(group)
    survival.begin_step(group)
    backbone(torch.randn(8, 4))
    survival.passes.lose(GroupLost())
    assert survival.leave()
    assert backbone.num_batches_tracked == 0, "buffers of all models are put back"
    survival.refuse("its loop has changed")
    survival.begin_step(group)
    expected = [id(buffer) for buffer in (*backbone.buffers(), *head.buffers())]
    assert [[id(tensor) for tensor in tensors] for tensors in group.copied] == [expected, expected]


def test_a_session_that_restarts_from_its_start_on_copies_buffers_too(survival: SessionRegroup) -> None:
    model = nn.BatchNorm1d(4)
    distributed(survival, ALONE, model)
    watched(survival, model)
    group = Peers({"reason": "another rank has collectives of its own"})
    assert not survival.agree(group)
    survival.begin_step(group)
    assert len(group.copied[0]) == 3


def test_a_model_that_learns_and_was_not_distributed_restarts_with_its_group(survival: SessionRegroup) -> None:
    """A script that distributes its model only where there is more than one rank begins with one."""
    watched(survival, nn.Linear(2, 2))
    assert not survival.agree(ALONE)
    assert survival.reason == "the script has not distributed each model that learns"


def test_a_model_is_copied_in_the_middle_of_a_step(loop: Loop) -> None:
    loop.guard.begin(ALONE)
    loop.passes.loss.part = loop.loss()
    copied = copy.deepcopy(loop.forward)
    loop.passes.lose(GroupLost())
    assert not copied._passes.is_lost


def test_a_copy_of_an_average_has_updates_of_its_own_and_can_be_saved(loop: Loop) -> None:
    before, copied = loop.state()["average"], copy.deepcopy(loop.average)
    assert type(copied) is AveragedModel
    copied.update_parameters(loop.model)
    assert equal(loop.state()["average"], before)
    assert copied.n_averaged == 1
    average = AveragedModel(loop.model)
    loop.guard.leave_out_updates(average)
    file = io.BytesIO()
    torch.save(average, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is AveragedModel
