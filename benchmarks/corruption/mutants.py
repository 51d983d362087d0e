"""Mutants of a training process: `python mutants.py NAME` trains the job of TANDEM_RUN_DIR with one wrong thing in it.

Each plants it after step PLANTED, in rank 1 where it does not say otherwise. A mutant of a restart is planted where the
state is read, in a second generation.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from tandem.rundir.checkpoint import OPTIMIZER, WEIGHTS
from tandem_trainer import gradient_check
from tandem_trainer.checkpoint.state import NamedOptimizer, OptimizerState
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.data.supply import Resident, Share
from tandem_trainer.gradient_check import GradientCheck
from tandem_trainer.train import Stepper

PLANTED, LEAVES, EVERY = 15, 20, 10
"""Step of the mutation, step after which a run that is restarted leaves, and steps between two saves."""
RANK = int(os.environ.get("RANK", "0"))
ALL = (0, 1)
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Mutant:
    """One wrong thing."""

    place: str
    reasons: tuple[str, ...]
    """Kinds of the comparisons of which one names it."""
    plant: Callable[[], None]
    restarts: bool = False
    """Whether it is planted in a second generation."""
    options: Mapping[str, Any] = field(default_factory=dict)


def flip(tensor: Tensor, bit: int) -> None:
    """Change a bit of the largest of the first elements."""
    values = tensor.detach().view(-1)[:4096]
    values.view(torch.int32)[values.abs().argmax()] ^= 1 << bit


def after_step(change: Callable[[Stepper], None], ranks: Ranks = (1,), lasts: bool = False) -> None:
    """Change something after the update of step PLANTED, or of all from there on."""
    real = Stepper.take

    def take(self: Stepper, step: int, share: Share, rates: Any) -> Tensor:
        loss = real(self, step, share, rates)
        if RANK in ranks and (step + 1 == PLANTED or (lasts and step + 1 > PLANTED)):
            change(self)
        return loss

    Stepper.take = take  # type: ignore[method-assign]


def flip_weight(index: int, bit: int, ranks: Ranks = (1,)) -> None:
    after_step(lambda stepper: flip(stepper._parameters[index], bit), ranks)


def flip_moment(name: str, bit: int, ranks: Ranks = (1,)) -> None:
    after_step(lambda stepper: flip(stepper._optimizer.state[stepper._parameters[0]][name], bit), ranks)


def flip_average() -> None:
    real = AveragedModel.update_parameters

    def update(self: AveragedModel, model: Any) -> None:
        real(self, model)
        if RANK == 1 and int(self.n_averaged) == PLANTED:
            flip(next(iter(self.module.parameters())), 25)

    AveragedModel.update_parameters = update  # type: ignore[assignment, method-assign]


def before_update(change: Callable[[Any], None]) -> None:
    """Change the optimizer and its averaged gradients before each update that follows step PLANTED."""
    after_step(
        lambda stepper: stepper._optimizer.register_step_pre_hook(lambda optimizer, *_: change(optimizer)) and None
    )


def scale_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for parameters in optimizer.param_groups:
        for parameter in parameters["params"]:
            parameter.grad *= factor


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for parameters in optimizer.param_groups:
        parameters["lr"] *= factor


def skip_updates(ranks: Ranks) -> None:
    after_step(lambda stepper: setattr(stepper._optimizer, "step", lambda: None), ranks)


def no_rate() -> None:
    real = Stepper.take
    Stepper.take = lambda self, step, share, rates: real(  # type: ignore[method-assign]
        self, step, share, [0.0 for _ in rates] if step >= PLANTED else rates
    )


def put_back_weights() -> None:
    copies: list[Tensor] = []

    def put_back(stepper: Stepper) -> None:
        copies.extend(parameter.detach().clone() for parameter in stepper._parameters if len(copies) < 99)
        for parameter, copy in zip(stepper._parameters, copies, strict=False):
            parameter.data.copy_(copy)

    after_step(put_back, ALL, lasts=True)


def read_otherwise(data_step: Callable[[int], int], ranks: Ranks) -> None:
    real = Resident.read
    Resident.read = lambda self, step: real(self, data_step(step) if RANK in ranks else step)  # type: ignore[method-assign]


def read_reversed(ranks: Ranks) -> None:
    real = Resident.read

    def read(self: Resident, step: int) -> Share:
        share = real(self, step)
        return replace(share, ids=share.ids.flip(0)) if RANK in ranks and step == PLANTED else share

    Resident.read = read  # type: ignore[method-assign]


def stale(name: str) -> None:
    real, first = Contents.files, dict[str, Any]()

    def files(self: Contents, rounds: bool) -> Any:
        current = real(self, rounds)
        if not first:
            first.update({tensor_name: tensor.clone() for tensor_name, tensor in current[name].items()})
        return current | {name: first}

    Contents.files = files  # type: ignore[method-assign]


def load_older() -> None:
    real = NamedOptimizer.load

    def load(self: NamedOptimizer, state: OptimizerState) -> None:
        real(self, state)
        for entries in self.optimizer.state.values():
            entries["step"] -= 5

    NamedOptimizer.load = load  # type: ignore[method-assign]


def forget_moments() -> None:
    TrainState._load_moments = lambda self, contents: None  # type: ignore[method-assign]


def after_load(change: Callable[[TrainState], None], ranks: Ranks) -> None:
    real = TrainState.load

    def load(self: TrainState, contents: Contents) -> None:
        real(self, contents)
        if RANK in ranks:
            change(self)

    TrainState.load = load  # type: ignore[method-assign]


def compute_wrongly(bit: int, ranks: Ranks, lasts: bool) -> None:
    real, computed = GradientCheck._gradients, list[int]()

    def gradients(self: GradientCheck, step: int, batch: Any, ids: Tensor) -> list[Tensor]:
        current = real(self, step, batch, ids)
        if step >= PLANTED and RANK in ranks and (lasts or not computed):
            computed.append(step)
            flip(current[0], bit)
        return current

    GradientCheck._gradients = gradients  # type: ignore[method-assign]


DIFFER, SAMPLES, MOMENTS = ("RanksDiffer",), ("SamplesDiffer",), ("OptimizerDiffers",)
GRADIENTS, UNCHANGED = ("GradientsDiffer",), ("WeightsUnchanged",)
READS: dict[str, Callable[[int], int]] = {
    "a batch comes twice": lambda step: PLANTED - 1 if step == PLANTED else step,
    "a batch is left out": lambda step: step if step < PLANTED else step + 1,
    "all batches come late": lambda step: step if step < PLANTED else step - 1,
    "two batches are swapped": lambda step: {PLANTED: PLANTED + 1, PLANTED + 1: PLANTED}.get(step, step),
}
SIDES: dict[str, Ranks] = {"on rank 0": (0,), "on rank 1": (1,)}
FIRST_WEIGHT = "first weight"

MUTANTS: dict[str, Mutant] = {
    **{
        f"bit {bit} of the {name} {side}": Mutant("memory", DIFFER, partial(flip_weight, index, bit, ranks))
        for side, ranks in SIDES.items()
        for name, index, bit in ((FIRST_WEIGHT, 0, 25), (FIRST_WEIGHT, 0, 31), ("last bias", -1, 24))
    },
    **{
        f"bit of {name} {side}": Mutant("memory", DIFFER, partial(flip_moment, name, 25, ranks))
        for side, ranks in SIDES.items()
        for name in ("exp_avg", "exp_avg_sq")
    },
    "bit of an average": Mutant("memory", DIFFER, flip_average, options={"emaDecay": 0.9}),
    "gradients × 1.5": Mutant("trainer", DIFFER, partial(before_update, partial(scale_gradients, factor=1.5))),
    "gradients × -1": Mutant("trainer", DIFFER, partial(before_update, partial(scale_gradients, factor=-1.0))),
    "gradients lost": Mutant("trainer", DIFFER, partial(before_update, partial(scale_gradients, factor=0.0))),
    "rate × 1.01": Mutant("trainer", DIFFER, partial(before_update, partial(scale_rates, factor=1.01))),
    "updates skipped on rank 1": Mutant("trainer", DIFFER, partial(skip_updates, (1,))),
    "weights changed beside": Mutant(
        "trainer", DIFFER, partial(after_step, lambda stepper: stepper._parameters[0].data.mul_(1.001))
    ),
    "updates skipped on all ranks": Mutant("trainer", UNCHANGED, partial(skip_updates, ALL)),
    "rate 0": Mutant("trainer", UNCHANGED, no_rate),
    "weights put back": Mutant("trainer", UNCHANGED, put_back_weights),
    **{
        f"{name} on {side}": Mutant("loader", SAMPLES, partial(read_otherwise, changed, ranks))
        for side, ranks in (("rank 1", (1,)), ("all ranks", ALL))
        for name, changed in READS.items()
    },
    "ids in another order on rank 1": Mutant("loader", SAMPLES, partial(read_reversed, (1,))),
    "ids in another order on all ranks": Mutant("loader", SAMPLES, partial(read_reversed, ALL)),
    "moments of the first save": Mutant("saver", MOMENTS, partial(stale, OPTIMIZER)),
    "weights of the first save": Mutant("saver", UNCHANGED, partial(stale, WEIGHTS)),
    "moments forgotten": Mutant("restore", (*MOMENTS, *DIFFER), forget_moments, restarts=True),
    "counters of earlier moments": Mutant("restore", MOMENTS, load_older, restarts=True),
    **{
        f"bit of a weight {side}": Mutant(
            "restore",
            DIFFER,
            partial(after_load, lambda state: flip(next(iter(state.learned().values())), 20), ranks),
            restarts=True,
        )
        for side, ranks in SIDES.items()
    },
    **{
        f"bit {bit}, {'always' if lasts else 'once'}, {side}": Mutant(
            "processor", GRADIENTS, partial(compute_wrongly, bit, ranks, lasts)
        )
        for side, ranks in SIDES.items()
        for bit, lasts in ((0, False), (20, False), (31, False), (30, True))
    },
}


def main() -> None:
    """Train with the mutation whose name is the first argument; `none` and `leaves` have none."""
    from tandem_trainer.__main__ import main as train

    gradient_check.EVERY_STEPS = EVERY
    if sys.argv[1] != "none":
        # So that each save ends before the next one begins.
        real = Stepper.take
        Stepper.take = lambda *arguments: (time.sleep(0.02), real(*arguments))[1]  # type: ignore[method-assign]
    if sys.argv[1] == "leaves":
        after_step(lambda stepper: os.kill(os.getpid(), signal.SIGTERM), ALL, lasts=True)
    elif sys.argv[1] != "none":
        MUTANTS[sys.argv[1]].plant()
    train()


if __name__ == "__main__":
    main()
