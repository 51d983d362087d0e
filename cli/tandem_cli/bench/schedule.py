"""The schedule of a pipeline, from what its ranks recorded: how much of the time they wait, and a picture.

The bubble is the share of a step's time in which ranks compute nothing, from the first pass of any rank to the end of
the last. In theory it is that of the same passes in the same order where all passes of a kind through a stage take
equally long, and what they pass on takes no time. For GPipe and 1F1B with p ranks and m micro-batches and equal stages
that is (p - 1) / (m + p - 1) (https://arxiv.org/abs/1811.06965, section 2.3).

By stage, and not by kind alone: with zero bubble the first stage has no inputs whose gradients anybody wants, so torch
computes all of its gradients in the pass for those of weights, and nothing in the other.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from statistics import fmean, median
from typing import Literal, NamedTuple

from pydantic import Field

from tandem.formatting import several, share
from tandem.model import Model
from tandem_coordinator.charts.chart import WIDE, Axis, Role
from tandem_coordinator.charts.drawing import across, framed, rectangle, text, time_axis

Kind = Literal["forward", "backward", "input", "weight"]
COLORS: dict[Kind, Role] = {"forward": "trainer", "backward": "evaluator", "input": "evaluator", "weight": "gpu"}
NAMES: dict[Kind, str] = {
    "forward": "forward pass",
    "backward": "backward pass",
    "input": "gradients of inputs",
    "weight": "gradients of weights",
}
ROW, SPACE, LEFT, RIGHT, HEAD = 30.0, 8.0, 64.0, 12.0, 26.0
"""Pixels of a rank's row, between two, beside the rows, and of the line with the colours."""
LEGIBLE = 13.0
"""Pixels that the number of a micro-batch needs."""
FAINTEST = 0.55
"""How strong the first of several stages of a rank is drawn; the last one is at full strength."""


class Pass(Model):
    """A micro-batch goes through a stage, forward or backward."""

    rank: int = Field(ge=0)
    """Its place in the pipeline."""
    stage: int = Field(ge=0)
    micro_batch: int = Field(ge=0)
    kind: Kind = Field(alias="pass")
    begin: float
    """Seconds of a clock that all ranks share."""
    end: float


class _Key(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


class Schedule(Model):
    """Recorded steps of one pipeline."""

    schedule: str
    ranks: int = Field(ge=1)
    stages: int = Field(ge=1)
    micro_batches: int = Field(ge=1)
    steps: list[list[Pass]] = Field(min_length=1)

    @cached_property
    def measured(self) -> float:
        """The bubble, 0 to 1: the median over the steps."""
        return median(bubble(step, self.ranks) for step in self.steps)

    @cached_property
    def predicted(self) -> float:
        """The bubble in theory, with the mean times of passes that were measured."""
        costs = self._costs
        return bubble(replayed(self.steps[0], lambda one: costs[one.kind, one.stage]), self.ranks)

    @cached_property
    def unsent(self) -> float:
        """The bubble if each pass took as long as it did, and what passes pass on took no time: the median over the
        steps. What was measured beyond that is sending; what this is beyond theory is passes that took unequally
        long."""
        return median(bubble(replayed(step, lambda one: one.end - one.begin), self.ranks) for step in self.steps)

    @property
    def words(self) -> str:
        """For people."""
        size = f"{several(self.ranks, 'rank')}, {several(self.micro_batches, 'micro-batch', 'micro-batches')}"
        found = f"bubble {share(self.measured)}, in theory {share(self.predicted)}"
        return f"{self.schedule}, {size}: {found}; {share(self.unsent)} if sending took no time"

    @cached_property
    def typical(self) -> list[Pass]:
        """The recorded step whose bubble is nearest to the median."""
        return min(self.steps, key=lambda step: abs(bubble(step, self.ranks) - self.measured))

    @cached_property
    def _costs(self) -> dict[tuple[Kind, int], float]:
        times: dict[tuple[Kind, int], list[float]] = {}
        for step in self.steps:
            for one in step:
                times.setdefault((one.kind, one.stage), []).append(one.end - one.begin)
        return {key: fmean(found) for key, found in times.items()}


def bubble(passes: Iterable[Pass], ranks: int) -> float:
    """The share of the time in which ranks compute nothing, 0 to 1."""
    known = list(passes)
    length = max(one.end for one in known) - min(one.begin for one in known)
    busy = sum(one.end - one.begin for one in known)
    return 1.0 - busy / (ranks * length) if length > 0 else 0.0


def replayed(passes: Iterable[Pass], cost: Callable[[Pass], float]) -> list[Pass]:
    """The same passes of each rank in the same order, each as early as what it needs is there.

    Args:
        cost: seconds of a pass.

    Raises:
        ValueError: what some pass needs is computed by none before it.
    """
    waiting: dict[int, list[Pass]] = {}
    for one in sorted(passes, key=lambda one: one.begin):
        waiting.setdefault(one.rank, []).append(one)
    last = max(one.stage for of_rank in waiting.values() for one in of_rank)
    free = dict.fromkeys(waiting, 0.0)
    done: dict[_Key, float] = {}
    found = []
    while any(waiting.values()):
        ready = [rank for rank, left in waiting.items() if left and all(key in done for key in _needs(left[0], last))]
        if not ready:
            raise ValueError("the passes of a pipeline wait for each other")
        for rank in ready:
            one = waiting[rank].pop(0)
            begin = max([free[rank], *(done[key] for key in _needs(one, last))])
            free[rank] = begin + cost(one)
            # The stage before needs only the gradients of the inputs.
            kind: Kind = "backward" if one.kind == "input" else one.kind
            done[_Key(kind, one.stage, one.micro_batch)] = free[rank]
            found.append(one.model_copy(update={"begin": begin, "end": free[rank]}))
    return found


def _needs(one: Pass, last: int) -> list[_Key]:
    """The passes after which it can begin."""
    if one.kind == "forward":
        return [_Key("forward", one.stage - 1, one.micro_batch)] if one.stage else []
    if one.kind == "weight":
        return [_Key("backward", one.stage, one.micro_batch)]
    after = [_Key("forward", one.stage, one.micro_batch)]
    return after if one.stage == last else [*after, _Key("backward", one.stage + 1, one.micro_batch)]


def drawn(schedule: Schedule) -> str:
    """An svg element: a row for each rank, with its passes over time, and numbers of micro-batches in them."""
    passes = schedule.typical
    start, end = min(one.begin for one in passes), max(one.end for one in passes)
    axis = Axis(low=0.0, high=1000 * (end - start), label="milliseconds since the first pass of the step")
    scale, width = across(axis), WIDE.width - LEFT - RIGHT
    parts = _legend(passes)
    for rank in range(schedule.ranks):
        top = HEAD + rank * (ROW + SPACE)
        parts.append(text(LEFT - 8, top + ROW / 2 + 4, f"rank {rank}", "ink", "end"))
        parts.append(rectangle(LEFT, top, width, ROW, "grid"))
        for one in passes:
            if one.rank == rank:
                left = LEFT + scale.place(1000 * (one.begin - start)) * width
                right = LEFT + scale.place(1000 * (one.end - start)) * width
                parts += _box(one, schedule, left, right, top)
    bottom = HEAD + schedule.ranks * (ROW + SPACE)
    parts += time_axis(axis, LEFT, width, bottom)
    return framed("schedule", title(schedule), schedule.words, parts, WIDE.width, bottom + 46.0)


def title(schedule: Schedule) -> str:
    """The heading of the picture."""
    return f"A step of a pipeline: {schedule.words}"


def _legend(passes: Iterable[Pass]) -> list[str]:
    found = {one.kind for one in passes}
    parts, x = [], LEFT
    for kind, name in NAMES.items():
        if kind in found:
            parts += [rectangle(x, 4, 12, 12, COLORS[kind]), text(x + 18, 14, name, "ink")]
            x += 170
    parts += [rectangle(x, 4, 12, 12, "grid"), text(x + 18, 14, "waiting", "ink")]
    return parts


def _box(one: Pass, schedule: Schedule, left: float, right: float, top: float) -> list[str]:
    per_rank = schedule.stages // schedule.ranks
    place = one.stage // schedule.ranks
    strength = 1.0 if per_rank == 1 else FAINTEST + (1.0 - FAINTEST) * place / (per_rank - 1)
    # A pixel stays free, so that neighbours are told apart.
    parts = [rectangle(left, top, max(0.5, right - left - 1), ROW, COLORS[one.kind], strength)]
    if right - left > LEGIBLE:
        parts.append(text((left + right) / 2, top + ROW / 2 + 4, str(one.micro_batch), "paper", "middle", bold=True))
    return parts
