"""What an object does not take back is named at the first save at which it has something to lose, and nothing in the
run is changed by that."""

import logging
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tandem_trainer.checkpoint import round_trip
from tandem_trainer.checkpoint.round_trip import MAX_BYTES, RoundTrip, differences
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.process_group import Group
from tandem_trainer.session import Session
from tests.support.own_state import WRAPPED, Recorded, Seen, adam

ALONE = Group(0, 1, 0, torch.device("cpu"))


class Counter:
    """An object as a script has it; `kind` says how it takes its state back."""

    def __init__(self, kind: str = "whole") -> None:
        self.kind, self.seen = kind, {"steps": 0, "ema": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        match self.kind:
            case "nothing":
                return
            case "another key":
                self.seen = {"steps": state["step"]}
            case "part":
                self.seen["ema"] = state["ema"]
            case "rounded":
                self.seen = state | {"ema": state["ema"].bfloat16().float()}
            case _:
                self.seen = state

    def step(self) -> None:
        self.seen = {"steps": self.seen["steps"] + 1, "ema": self.seen["ema"] + 0.1001}


def kept(**others: Any) -> TrainState:
    found = TrainState(nn.Linear(2, 2), None, None, others)
    found.copy_objects()
    return found


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nothing", "Counter loses or changes ema, steps of its state when it loads it"),
        ("part", "Counter loses or changes steps of its state when it loads it"),
        ("rounded", "Counter loses or changes ema of its state when it loads it"),
        ("another key", "Counter.load_state_dict does not take the state that its state_dict gives: KeyError('step')"),
    ],
)
def test_an_object_that_does_not_take_back_all_of_its_state_is_named_once(kind: str, why: str) -> None:
    counter = Counter(kind)
    state = kept(counter=counter)
    counter.step()
    assert state.lost_in_round_trip(ALONE) == {"counter": why}
    assert state.lost_in_round_trip(ALONE) == {}


def test_an_object_is_tried_until_it_has_something_to_lose() -> None:
    counter = Counter("nothing")
    state = kept(counter=counter)
    assert state.lost_in_round_trip(ALONE) == {}, "it has the state of a new one"
    counter.step()
    assert [*state.lost_in_round_trip(ALONE)] == ["counter"]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 5),
    "lambda": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)),
    "cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.02, total_steps=100),
    "sequence": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=1), torch.optim.lr_scheduler.ExponentialLR(one, 0.9)],
        [1],
    ),
}


@pytest.mark.parametrize("name", [*SCHEDULES])
@pytest.mark.parametrize("kind", ["adam", *WRAPPED])
def test_schedules_and_optimizers_take_all_back_and_the_run_stays_as_it_was(kind: str, name: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    optimizer = {"adam": adam, **WRAPPED}[kind]([{"params": [*net.parameters()]}])
    schedule, scaler = SCHEDULES[name](optimizer), torch.amp.GradScaler("cpu", init_scale=8.0)
    state = TrainState(net, optimizer, None, {"schedule": schedule, "scaler": scaler}, hyperparameters=True)
    state.copy_objects()
    tried = {name: one._copy is not None for name, one in state._round_trips.items()}
    assert tried == {"schedule": True, "scaler": True} | ({} if kind == "adam" else {"optimizer": True})
    for _ in range(3):
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    before = net.weight.detach().clone()
    rate = optimizer.param_groups[0]["lr"]
    assert state.lost_in_round_trip(ALONE) == {}
    assert torch.equal(net.weight, before)
    assert optimizer.param_groups[0]["lr"] == rate


class Short(WRAPPED["lookahead"]([{"params": [nn.Parameter(torch.zeros(1))]}]).__class__):  # type: ignore[misc]
    """Lookahead that forgets how many steps it has taken."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"taken": 0})


def test_an_optimizer_that_forgets_is_named() -> None:
    net = nn.Linear(2, 2)
    optimizer = Short(adam([{"params": [*net.parameters()]}]))
    state = TrainState(net, optimizer)
    state.copy_objects()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert state.lost_in_round_trip(ALONE) == {
        "optimizer": "Short loses or changes taken of its state when it loads it"
    }
    # One that has got a group since is another one at a restart, too.
    state.copy_objects()
    net.more = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [net.more]})
    assert state.lost_in_round_trip(ALONE) == {}


class Forgetful(Seen):
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.total = state_dict[f"{prefix}total"]


def test_a_module_that_loads_in_its_own_way_is_tried() -> None:
    net = nn.ModuleDict({"seen": Seen(), "recorded": Recorded(), "bad": Forgetful(), "norm": nn.BatchNorm1d(2)})
    state = TrainState(net, None)
    state.copy_objects()
    assert {*state._round_trips} == {"module seen", "module recorded", "module bad"}
    for name in ("seen", "recorded", "bad"):
        net[name].update(2.0)  # type: ignore[operator]
    assert state.lost_in_round_trip(ALONE) == {
        "module bad": "Forgetful loses or changes values of its state when it loads it"
    }
    assert float(net["seen"].total) == 2.0  # type: ignore[arg-type]


class Large(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.empty(MAX_BYTES + 1, dtype=torch.uint8)


class Many(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.words = [[number] for number in range(round_trip.MAX_OBJECTS)]


class Open(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.file = Path(__file__).open("rb")  # noqa: SIM115 - it is closed below

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("what has a file open is not copied")


class Ends(Counter):
    ended: list[int] = []

    def __del__(self) -> None:
        self.ended.append(1)


class DeletedCheckpoint(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.peer = weakref.proxy(Counter())


class Reads(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.loader = DataLoader(TensorDataset(torch.zeros(4)), num_workers=2)


@pytest.mark.parametrize("kind", [Large, Many, Open, Ends, DeletedCheckpoint, Reads])
def test_what_is_large_or_holds_a_file_or_a_process_is_not_copied(kind: type[Counter]) -> None:
    one = kind()
    copied = RoundTrip("one", one)._copy
    if isinstance(one, Open):
        one.file.close()
    assert copied is None


def test_what_is_too_large_to_be_tested_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    state = kept(large=Large(), many=Many(), ends=Ends(), small=Counter())
    for _ in range(2):
        state.lost_in_round_trip(ALONE)
    names = [message.partition(" is too large to be tested at the first save; ")[0] for message in caplog.messages]
    assert names == ["kept=large", "kept=many"]


def test_an_object_that_refers_to_the_model_changes_neither_it_nor_what_is_drawn() -> None:
    class Engine(Counter):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.log = model, logging.getLogger("engine")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            random.random(), np.random.rand(), torch.rand(1)
            for one in self.model.parameters():
                one.data.fill_(7.0)

    net = nn.Linear(2, 2)
    engine = Engine(net)
    state = TrainState(net, None, None, {"engine": engine})
    state.copy_objects()
    engine.step()
    before = net.weight.detach().clone()
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert state._round_trips["engine"]._copy is not None
    assert state.lost_in_round_trip(ALONE) == {}
    assert torch.equal(net.weight, before)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == drawn


def test_states_are_compared_to_the_bit() -> None:
    nan, array = float("nan"), np.arange(3)
    same = {"a": [1, (2, nan)], "b": torch.tensor([nan, -0.0]), "c": array, "d": torch.tensor(True)}
    again = {"a": [1, (2, nan)], "b": torch.tensor([nan, -0.0]), "c": array.copy(), "d": torch.tensor(True)}
    assert [*differences(same, again)] == []
    changed = {"a": [1, (3, nan)], "b": torch.tensor([nan, 0.0]), "c": array.astype(np.int32), "e": 1}
    assert [*differences(same, changed)] == ["a/1/0", "b", "c", "d", "e"]
    assert [*differences(torch.zeros(1), 0.0)] == [""]
    assert [*differences({"a": torch.zeros(2)}, {"a": torch.zeros(2, device="meta")})] == []


def test_a_run_says_at_its_first_save_what_would_be_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def taken(session: Session, net: nn.Module) -> Iterator[Tensor]:
        for batch in session.batches(TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), 2):
            rows, labels = batch.data
            yield batch.mean(cross_entropy(net(rows), labels, reduction="none"))

    with Session(tmp_path / "run", checkpoint={"everySteps": 3}) as session:
        net = session.distribute(nn.Linear(4, 2))
        optimizer, counter = torch.optim.SGD(net.parameters(), lr=0.1), Counter("nothing")
        session.keep(net, optimizer, counter=counter)
        for loss in taken(session, net):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            counter.step()
    assert [message for message in caplog.messages if "kept=" in message] == [
        "kept=counter would not come back from this checkpoint as it is: Counter loses or changes ema, steps of its "
        "state when it loads it"
    ]


def test_all_ranks_ask_an_object_for_its_state_as_often() -> None:
    """It may be a collective, and what one rank's object has seen is not what another's has."""

    class Counted(Counter):
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

    class Rank(Group):
        """One of two ranks; what rank 0 says is `first`."""

        first: Any = None

        def __init__(self, number: int) -> None:
            super().__init__(0, 1, 0, torch.device("cpu"))
            self.number = number

        def tell(self, value: Any) -> Any:
            if self.number == 0:
                Rank.first = value
            return Rank.first

    counters = Counted(), Counted()
    states = [kept(counter=one) for one in counters]
    before = [one.asked for one in counters]
    counters[1].step()
    for save in range(4):
        for rank, state in enumerate(states):
            state.lost_in_round_trip(Rank(rank))
        assert len({one.asked - count for one, count in zip(counters, before, strict=True)}) == 1
        if save == 1:
            counters[0].step()
    assert counters[0].asked - before[0] == 3, "rank 0 has seen it change at the third save"
