"""Whatever is trained, a run that is resumed takes the very steps of the run that was not disturbed.

Each case draws a model (layers of one shape, so that a wrong order is no error; some of them tied, some frozen; buffers
of any type; modules that keep what they load, observers of quantization, and state that grows, of each rank alone or
alike), optimizers over any groups in any order, some
with a state_dict of their own, some with a group that is added later, and what people keep beside these. Ranks are
threads; they average their gradients by hand, save in parts and restore through the product's own code. Fifteen cases
are always the same; `--hypothesis-profile=random` plays five hundred others.
"""

import copy
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint import staging, writer
from tandem_trainer.checkpoint.format import DTYPES
from tandem_trainer.checkpoint.restoring import compare, record_start, restore
from tandem_trainer.checkpoint.saving import Author
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.process_group import Group
from tests.support import manifests
from tests.support.own_state import WRAPPED, Recorded, SaverHere, Seen
from tests.support.threads import ThreadGroup, on_ranks

CASES = 15 if settings.default.derandomize else 500
LAYERS, WIDTH, SAMPLES = 4, 4, 6
OWN = re.compile(r"seen|recorded|counted/rows")
"""Names of what each rank counts for itself."""
FURTHER = 10
"""Steps that are compared."""

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.002, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.001),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.02, t0=3),
    **WRAPPED,
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda one: torch.optim.lr_scheduler.StepLR(one, 3, gamma=0.7),
    "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 5),
    "cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.02, total_steps=100, cycle_momentum=False),
    "sequence": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(one, 0.9)],
        [4],
    ),
    "plateau": lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=1),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    dtype: torch.dtype
    tied: bool
    frozen: frozenset[int]
    """Layers that do not learn."""
    table: str
    """Type of a buffer, as the format calls it."""
    norm: bool
    """Whether running statistics of each rank's own samples are taken."""
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """For each optimizer its groups of layers, in order."""
    kinds: tuple[str, ...]
    """For each optimizer what it is."""
    backwards: bool
    """Whether parameters of a group come in the reverse order of the model's."""
    late: bool
    """Whether frozen layers that no optimizer has begin to learn after the first step."""
    metric: bool
    """Whether the model has a metric, and a record that grows."""
    own: bool
    """Whether each rank counts in them, and in what is kept, so many values of its own that shapes differ."""
    observed: bool
    """Whether an observer of quantization-aware training, which takes its shape when it is first called, takes part."""
    callback: bool
    """Whether an object with a state of many types is kept."""
    schedule: str | None
    scaled: bool
    average: str | None
    wrapped: tuple[bool, bool]
    """Whether it is compiled before, and after."""
    rounded: bool
    """Evaluators get weights in bfloat16."""
    worlds: tuple[int, int]
    steps: int
    """Before the save."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    same = draw(st.booleans())
    first = draw(st.integers(1, 3))
    second = first if same else draw(st.integers(1, 3).filter(lambda size: size != first))
    order = draw(st.permutations(range(LAYERS)))
    frozen = frozenset(draw(st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1)))
    learning = [layer for layer in order if layer not in frozen or draw(st.booleans())]
    learning = learning if set(learning) - frozen else [*learning, *(set(range(LAYERS)) - frozen)]
    cut = draw(st.integers(0, len(learning) - 1)) if draw(st.booleans()) else 0
    parts = [part for part in (learning[:cut], learning[cut:]) if set(part) - frozen]
    shares = []
    for part in parts:
        at = draw(st.integers(0, len(part)))
        shares.append(tuple(tuple(group) for group in (part[:at], part[at:]) if group))
    # Rounding differs with the number of summands, and small gradients are made large by some optimizers.
    schedule = draw(st.none() | st.sampled_from(sorted(SCHEDULES)))
    average = draw(st.sampled_from([None, "ema", "mean"]))
    dtypes = [torch.float32, torch.float64, torch.bfloat16] if same else [torch.float64]
    return Case(
        dtype=draw(st.sampled_from(dtypes)),
        tied=draw(st.booleans()) and 0 in learning,
        frozen=frozen,
        table=draw(st.sampled_from(sorted(DTYPES))),
        norm=same and draw(st.booleans()),
        shares=tuple(shares),
        kinds=tuple(draw(st.sampled_from(sorted(OPTIMIZERS))) for _ in shares),
        backwards=draw(st.booleans()),
        # Schedules are made for the groups that there are.
        late=schedule is None and draw(st.booleans()),
        metric=draw(st.booleans()),
        own=draw(st.booleans()),
        # torch's AveragedModel does not take buffers that grow (torch 2.15).
        observed=same and average is None and draw(st.booleans()),
        callback=draw(st.booleans()),
        schedule=schedule,
        scaled=draw(st.booleans()),
        average=average,
        wrapped=(draw(st.booleans()), draw(st.booleans())),
        rounded=draw(st.booleans()),
        worlds=(first, second),
        steps=draw(st.integers(1, 6)),
    )


class Net(nn.Module):
    """Layers of one shape. The table takes part in what is computed, and changes with each step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=case.dtype) for _ in range(LAYERS))
        if case.tied:
            self.layers[LAYERS - 1].weight = self.layers[0].weight
        for layer in case.frozen:
            self.layers[layer].requires_grad_(False)
        self.register_buffer("table", torch.ones(WIDTH).to(DTYPES[case.table]))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=case.dtype) if case.norm else None
        self.observer = PerChannelMinMaxObserver() if case.observed else None
        if case.metric:
            self.seen, self.recorded = Seen(), Recorded()
        self.calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        if self.norm is not None:
            # What it has counted so far takes part, as in evaluation; a batch of one has no variance.
            if len(rows) > 1:
                self.norm.train()(rows.detach())
            rows = self.norm.eval()(rows)
        if self.observer is not None:
            self.observer(rows.detach().T)
            rows = rows * (1 + self.observer.max_val.to(rows.dtype).tanh() / 8)
        table = self.table.real if self.table.is_complex() else self.table
        return rows * (1 + table.to(torch.float32).to(rows.dtype) / 8)

    def advance(self, times: int) -> None:
        """
        Args:
            times: values that the metric takes.
        """
        self.calls += 1
        for number in range(times if hasattr(self, "seen") else 0):
            self.seen.update((self.calls + number) / 8)
            self.recorded.update((self.calls + number) / 8)
        self.table.copy_(torch.tensor([self.calls % 2, 1, 0, 1], dtype=torch.float32).to(self.table.dtype))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Callback:
    """Keeps the best and the last values, in whatever it likes."""

    def __init__(self) -> None:
        self.best: tuple[float, int] | None = None
        self.history: dict[int, list[Any]] = {}

    def update(self, step: int) -> None:
        loss = math.nan if step == 1 else 1 / (step + 1)
        self.best = loss, step
        self.history[step] = [np.float32(loss), np.array([step, loss]), f"step {step}", {"last": [None, True, loss]}]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.history = state["best"], state["history"]


@dataclass
class Replica:
    """One rank's training, as a user's script would build it."""

    case: Case
    phase: int
    """0 before the save, 1 after."""
    counted: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = self.case
        torch.manual_seed(self.phase)
        self.net = Net(case)
        self.optimizers = {}
        taken: set[int] = set()
        for number, (kind, groups) in enumerate(zip(case.kinds, case.shares, strict=True)):
            chosen = []
            for group in groups:
                parameters = [one for layer in group for one in self.net.layers[layer].parameters()]
                # A tied weight is in one group alone.
                parameters = [one for one in parameters if not (id(one) in taken or taken.add(id(one)))]  # type: ignore[func-returns-value]
                if parameters:
                    chosen.append({"params": parameters[::-1] if case.backwards else parameters})
            if chosen:
                self.optimizers[f"o{number}"] = OPTIMIZERS[kind](chosen)
        frozen = (one for layer in sorted(case.frozen) for one in self.net.layers[layer].parameters())
        self.late = list({id(one): one for one in frozen if case.late and id(one) not in taken}.values())
        first = next(iter(self.optimizers.values()))
        self.schedule = SCHEDULES[case.schedule](first) if case.schedule else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if case.scaled else None
        self.average = None
        if case.average:
            mean = get_ema_multi_avg_fn(0.8) if case.average == "ema" else None
            self.average = AveragedModel(self.net, multi_avg_fn=mean)  # type: ignore[no-untyped-call]
        self.callback = Callback() if case.callback else None
        others = {
            "schedule": self.schedule,
            "scaler": self.scaler,
            "counted": self.counted,
            "callback": self.callback,
        }
        kept = torch.compile(self.net, backend="eager") if case.wrapped[self.phase] else self.net
        self.kept = TrainState(
            kept,
            self.optimizers if len(self.optimizers) > 1 else first,
            self.average,
            {name: other for name, other in others.items() if other is not None},
            hyperparameters=True,
        )

    def step(self, number: int, group: ThreadGroup) -> None:
        """One step on this rank's share; gradients are summed over the ranks."""
        rank, size = group.rank, group.world_size
        rows = torch.cos(torch.arange(SAMPLES * WIDTH, dtype=torch.float64) * (number + 1)).reshape(SAMPLES, WIDTH)
        mine = rows[rank * SAMPLES // size : (rank + 1) * SAMPLES // size].to(self.case.dtype)
        if self.net.norm is not None or (self.net.observer is not None and number):
            group.copy_from_first(self.kept.local())
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        loss = (self.net(mine) - mine.sin()).square().sum() / SAMPLES
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        learning = [one for one in self.net.parameters() if one.grad is not None]
        gradients = group.exchange([one.grad.clone() for one in learning if one.grad is not None])
        for place, one in enumerate(learning):
            one.grad = sum((theirs[place] for theirs in gradients[1:]), gradients[0][place].clone())
        group.barrier()
        for optimizer in self.optimizers.values():
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(float(number % 3))
        elif self.schedule is not None:
            self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.net)
        times = 1 + rank if self.case.own else 1
        self.net.advance(times)
        if self.callback is not None:
            self.callback.update(number)
        rows_seen = self.counted.get("rows", torch.zeros(0))
        self.counted["rows"] = torch.cat([rows_seen, torch.full((times,), float(number))])
        if number == 0 and self.late:
            for one in self.late:
                one.requires_grad_(True)
            next(iter(self.optimizers.values())).add_param_group({"params": self.late})
        self.counted["steps"] = self.counted.get("steps", 0) + 1
        self.counted["share"] = self.counted.get("share", 0.0) + 0.1

    def state(self) -> dict[str, Tensor]:
        """All tensors that are kept, as they are now, and what is told beside them."""
        contents = self.kept.contents({})
        found = {f"weight {name}": one for name, one in contents.weights.items()}
        found |= {f"moment {name}": one for name, one in contents.optimizer.items()}
        found |= {f"other {name}": one for name, one in contents.others.items()}
        found |= {f"average {name}": one for name, one in (contents.average or {}).items()}
        self.told = copy.deepcopy(contents.loop)
        return {name: one.detach().clone() for name, one in found.items()}


def before(replica: Replica, group: ThreadGroup, rundir: RunDir) -> dict[str, Tensor]:
    """Train, save, and train on undisturbed."""
    case = replica.case
    for number in range(case.steps):
        replica.step(number, group)
    saver = SaverHere(
        rundir,
        Author(1, None, group.world_size, group.rank, rounds_weights=case.rounded),
        lambda: None,
        lambda outcome: None,
    )
    saver.save(case.steps, DataPosition(seed=0, epoch=0, cursor=0), replica.kept.saved(group, {}))
    outcome = saver.wait()
    assert "committed" in outcome or "written" in outcome or not outcome, outcome
    saver.close()
    group.barrier()
    for number in range(case.steps, case.steps + FURTHER):
        replica.step(number, group)
    return replica.state()


def after(replica: Replica, group: ThreadGroup, rundir: RunDir) -> dict[str, Tensor]:
    """Resume, and train on."""
    case = replica.case
    restored = restore(rundir, group, lambda found: replica.kept.check(found.contents))
    assert restored.loaded.manifest.step == case.steps
    replica.kept.load(restored.loaded.contents)
    compare(group, replica.kept.replicated())
    record_start(rundir, group, 2, [], restored.loaded.manifest.reference)
    restored.release()
    for number in range(case.steps, case.steps + FURTHER):
        replica.step(number, group)
    return replica.state()


def ranks(case: Case, phase: int, do: Callable[..., Any], rundir: RunDir) -> tuple[list[Any], list[Replica]]:
    replicas = [Replica(case, phase) for _ in range(case.worlds[phase])]

    def on(group: Group) -> Any:
        assert isinstance(group, ThreadGroup)
        return do(replicas[group.rank], group, rundir)

    found = on_ranks(case.worlds[phase], on)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found, replicas


def differing(expected: dict[str, Tensor], found: dict[str, Tensor], exact: bool) -> Sequence[str]:
    assert expected.keys() == found.keys()
    wrong = []
    for name, one in expected.items():
        other = found[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        if exact or not (one.is_floating_point() and one.element_size() > 2):
            same = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        else:
            same = torch.allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)
        wrong += [] if same else [name]
    return wrong


@pytest.mark.timeout(3600)
@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases())
def test_the_next_ten_steps_are_those_of_the_undisturbed_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a small state has parts for all ranks, and what is no tensor a file of its own now and then.
    monkeypatch.setattr(staging, "MIN_PART", 1)
    monkeypatch.setattr(writer, "LARGE_TREES", 2**12)
    note(str(case))
    with tempfile.TemporaryDirectory() as folder:
        rundir = manifests.run_directory(Path(folder), manifests.job("test"))
        assert rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
        undisturbed, theirs = ranks(case, 0, before, rundir)
        resumed, ours = ranks(case, 1, after, rundir)
    exact = case.worlds[0] == case.worlds[1]
    for rank, found in enumerate(resumed):
        expected = undisturbed[rank if exact else 0]
        if rank and case.own:
            # What a rank has of its own is after a restart what rank 0 had.
            expected, found = (
                {name: one for name, one in some.items() if not OWN.search(name)} for some in (expected, found)
            )
        assert differing(expected, found, exact) == []
    assert torch.equal(ours[0].counted.pop("rows"), theirs[0].counted.pop("rows"))
    assert ours[0].counted == theirs[0].counted
    assert ours[0].told == theirs[0].told
    assert ours[0].net.calls == theirs[0].net.calls
