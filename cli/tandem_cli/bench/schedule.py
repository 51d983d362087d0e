"""The schedule of a pipeline, as its ranks recorded it: the share of time that they wait, and a picture.

The bubble is the share of a step's time in which ranks compute nothing, from the first pass of any rank to the end of
the last. In theory it is that of the same passes in the same order if all passes of a kind through a stage take equally
long, and sending takes no time. For GPipe and 1F1B with p ranks, m micro-batches and equal stages that is (p - 1) / (m
+ p - 1) (https://arxiv.org/abs/1811.06965, section 2.3).

Times are averaged by stage, and not by kind alone: with zero bubble the first stage needs no gradients of its inputs,
so torch computes all of its gradients in the pass for those of weights, and nothing in the other.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from statistics import fmean, median
from typing import Literal, NamedTuple

from pydantic import Field

from tandem.formatting import count_noun, share
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
ROW, SPACE, LEFT_MARGIN, RIGHT_MARGIN, HEAD = 30.0, 8.0, 64.0, 12.0, 26.0
"""Pixels: height of a rank's row, space between rows, margins at the left and the right, height of the legend."""
LEGIBLE = 13.0
"""Width that the number of a micro-batch needs, in pixels."""
FAINTEST = 0.55
"""Opacity of the first of several stages of a rank; the last one is opaque."""


class RecordedPass(Model):
    """Pass of a micro-batch through a stage, forward or backward."""

    rank: int = Field(ge=0)
    """Position in the pipeline."""
    stage: int = Field(ge=0)
    micro_batch: int = Field(ge=0)
    kind: Kind = Field(alias="pass")
    begin: float
    """Start, in seconds of a clock that all ranks share."""
    end: float


class _Key(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


class RecordedSchedule(Model):
    """Recorded steps of a pipeline."""

    schedule: str
    ranks: int = Field(ge=1)
    stages: int = Field(ge=1)
    micro_batches: int = Field(ge=1)
    steps: list[list[RecordedPass]] = Field(min_length=1)

    @cached_property
    def measured(self) -> float:
        """The measured bubble, 0 to 1: the median over the steps."""
        return median(bubble(step, self.ranks) for step in self.steps)

    @cached_property
    def predicted(self) -> float:
        """The bubble in theory, with the measured mean times of passes."""
        costs = self._costs
        return bubble(replayed(self.steps[0], lambda pass_: costs[pass_.kind, pass_.stage]), self.ranks)

    @cached_property
    def unsent(self) -> float:
        """The bubble if each pass took its measured time and sending took none: the median over the steps. The
        measured bubble exceeds it by the time of sending; it exceeds theory by the unequal times of passes."""
        return median(bubble(replayed(step, lambda pass_: pass_.end - pass_.begin), self.ranks) for step in self.steps)

    @property
    def words(self) -> str:
        """Summary for people."""
        size = f"{count_noun(self.ranks, 'rank')}, {count_noun(self.micro_batches, 'micro-batch', 'micro-batches')}"
        bubbles = f"bubble {share(self.measured)}, in theory {share(self.predicted)}"
        return f"{self.schedule}, {size}: {bubbles}; {share(self.unsent)} if sending took no time"

    @cached_property
    def typical(self) -> list[RecordedPass]:
        """The recorded step whose bubble is nearest to the median."""
        return min(self.steps, key=lambda step: abs(bubble(step, self.ranks) - self.measured))

    @cached_property
    def _costs(self) -> dict[tuple[Kind, int], float]:
        times: dict[tuple[Kind, int], list[float]] = {}
        for step in self.steps:
            for pass_ in step:
                times.setdefault((pass_.kind, pass_.stage), []).append(pass_.end - pass_.begin)
        return {key: fmean(seconds) for key, seconds in times.items()}


def bubble(passes: Iterable[RecordedPass], ranks: int) -> float:
    """Compute the share of the time in which ranks compute nothing, 0 to 1."""
    recorded = list(passes)
    length = max(pass_.end for pass_ in recorded) - min(pass_.begin for pass_ in recorded)
    busy = sum(pass_.end - pass_.begin for pass_ in recorded)
    return 1.0 - busy / (ranks * length) if length > 0 else 0.0


def replayed(passes: Iterable[RecordedPass], cost: Callable[[RecordedPass], float]) -> list[RecordedPass]:
    """Replay the passes of each rank in the same order, each as early as its inputs are available.

    Args:
        cost: seconds of a pass.

    Raises:
        ValueError: the passes wait for each other.
    """
    waiting: dict[int, list[RecordedPass]] = {}
    for pass_ in sorted(passes, key=lambda pass_: pass_.begin):
        waiting.setdefault(pass_.rank, []).append(pass_)
    last = max(pass_.stage for queue in waiting.values() for pass_ in queue)
    free = dict.fromkeys(waiting, 0.0)
    done: dict[_Key, float] = {}
    replay = []
    while any(waiting.values()):
        ready = [
            rank for rank, queue in waiting.items() if queue and all(key in done for key in _needs(queue[0], last))
        ]
        if not ready:
            raise ValueError("the passes of a pipeline wait for each other")
        for rank in ready:
            next_pass = waiting[rank].pop(0)
            begin = max([free[rank], *(done[key] for key in _needs(next_pass, last))])
            free[rank] = begin + cost(next_pass)
            # The stage before needs only the gradients of the inputs.
            kind: Kind = "backward" if next_pass.kind == "input" else next_pass.kind
            done[_Key(kind, next_pass.stage, next_pass.micro_batch)] = free[rank]
            replay.append(next_pass.model_copy(update={"begin": begin, "end": free[rank]}))
    return replay


def _needs(waiting_pass: RecordedPass, last: int) -> list[_Key]:
    """List the passes that a pass waits for."""
    if waiting_pass.kind == "forward":
        return [_Key("forward", waiting_pass.stage - 1, waiting_pass.micro_batch)] if waiting_pass.stage else []
    if waiting_pass.kind == "weight":
        return [_Key("backward", waiting_pass.stage, waiting_pass.micro_batch)]
    after = [_Key("forward", waiting_pass.stage, waiting_pass.micro_batch)]
    return (
        after
        if waiting_pass.stage == last
        else [*after, _Key("backward", waiting_pass.stage + 1, waiting_pass.micro_batch)]
    )


def draw_schedule(schedule: RecordedSchedule) -> str:
    """Draw a schedule as an svg element: a row for each rank, with its passes over time, and the numbers of
    micro-batches in them."""
    passes = schedule.typical
    start, end = min(pass_.begin for pass_ in passes), max(pass_.end for pass_ in passes)
    axis = Axis(low=0.0, high=1000 * (end - start), label="milliseconds since the first pass of the step")
    scale, width = across(axis), WIDE.width - LEFT_MARGIN - RIGHT_MARGIN
    parts = _legend(passes)
    for rank in range(schedule.ranks):
        top = HEAD + rank * (ROW + SPACE)
        parts.append(text(LEFT_MARGIN - 8, top + ROW / 2 + 4, f"rank {rank}", "ink", "end"))
        parts.append(rectangle(LEFT_MARGIN, top, width, ROW, "grid"))
        for pass_ in passes:
            if pass_.rank == rank:
                x0 = LEFT_MARGIN + scale.place(1000 * (pass_.begin - start)) * width
                x1 = LEFT_MARGIN + scale.place(1000 * (pass_.end - start)) * width
                parts += _box(pass_, schedule, x0, x1, top)
    bottom = HEAD + schedule.ranks * (ROW + SPACE)
    parts += time_axis(axis, LEFT_MARGIN, width, bottom)
    return framed("schedule", title(schedule), schedule.words, parts, WIDE.width, bottom + 46.0)


def title(schedule: RecordedSchedule) -> str:
    """Heading of the picture."""
    return f"A step of a pipeline: {schedule.words}"


def _legend(passes: Iterable[RecordedPass]) -> list[str]:
    kinds = {pass_.kind for pass_ in passes}
    parts, x = [], LEFT_MARGIN
    for kind, name in NAMES.items():
        if kind in kinds:
            parts += [rectangle(x, 4, 12, 12, COLORS[kind]), text(x + 18, 14, name, "ink")]
            x += 170
    parts += [rectangle(x, 4, 12, 12, "grid"), text(x + 18, 14, "waiting", "ink")]
    return parts


def _box(drawn_pass: RecordedPass, schedule: RecordedSchedule, x0: float, x1: float, top: float) -> list[str]:
    per_rank = schedule.stages // schedule.ranks
    place = drawn_pass.stage // schedule.ranks
    strength = 1.0 if per_rank == 1 else FAINTEST + (1.0 - FAINTEST) * place / (per_rank - 1)
    # A pixel stays free, so that neighbours can be distinguished.
    parts = [rectangle(x0, top, max(0.5, x1 - x0 - 1), ROW, COLORS[drawn_pass.kind], strength)]
    if x1 - x0 > LEGIBLE:
        parts.append(text((x0 + x1) / 2, top + ROW / 2 + 4, str(drawn_pass.micro_batch), "paper", "middle", bold=True))
    return parts
