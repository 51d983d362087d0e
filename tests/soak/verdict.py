"""What must hold after any fault, judged from the run directory alone. Pure: records in, violations out.

The steps that count are those along the lineage: of each generation, the steps from the checkpoint it resumed from up
to the one its successor resumed from. Each must have been taken once, with exactly the samples that the seed gives it,
and with the loss that an undisturbed run has there.

A rank that is killed loses the last lines of its log (they are written a tenth of a second's steps at a time). So the
last steps before a checkpoint may be missing in the log although they were taken; they are counted as unlogged. That
the right samples were in them shows in the loss of every later step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.rundir.lineage import GenerationRecord, chain

MAX_UNLOGGED = 100
"""Steps that the trainer may take before it writes them down."""
RELATIVE, ABSOLUTE = 1e-3, 1e-3
"""How far a loss may be from the undisturbed one: sums over other numbers of ranks are rounded otherwise, and small
differences grow over thousands of steps. Measured with one and two ranks: 2e-4 of the loss after 4,000 steps."""


@dataclass(frozen=True)
class Step:
    """One logged step."""

    at: float
    ids: str
    """Digest of its samples."""
    loss: float | None


@dataclass
class Log:
    """The log of one generation."""

    start: int | None = None
    """The step it started from."""
    steps: dict[int, Step] = field(default_factory=dict)
    twice: list[int] = field(default_factory=list)
    """Steps that it logged again."""
    saved: dict[int, float] = field(default_factory=dict)
    """Steps of its committed checkpoints, and when they were reported."""

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in a line."""
        step = record.get("step")
        if record["kind"] == "start":
            self.start = step
        elif record["kind"] == "step":
            assert isinstance(step, int)
            if step in self.steps:
                self.twice.append(step)
            self.steps[step] = Step(record["time"], record["ids"], record["loss"])
        elif record["kind"] == "checkpoint":
            assert isinstance(step, int)
            self.saved[step] = record["time"]


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    counting: dict[int, Step]
    """The steps that count and were logged."""
    unlogged: int
    """Steps that count and were not."""
    violations: list[str]


def judge(
    records: Sequence[GenerationRecord],
    logs: Mapping[int, Log],
    opened: Mapping[int, float],
    expected: Callable[[int], str],
) -> Verdict:
    """Judge a run.

    Args:
        opened: when the coordinator opened each generation.
        expected: the digest of the samples that a step (counted from 1) must take.
    """
    links = chain(records)
    known = {record.generation: record for record in records}
    violations = [f"generation {number} logged steps and has no record" for number in logs if number not in known]
    counting: dict[int, Step] = {}
    unlogged = 0
    parent: int | None = None
    for generation in reversed(links):
        log = logs.get(generation, Log())
        resumed = known[generation].resumed_from
        first = resumed.step if resumed is not None else 0
        limit = links[generation]
        violations += _of_log(generation, log, first)
        if parent is not None:
            violations += _passed_over(generation, first, logs.get(parent, Log()), opened.get(generation, 0.0))
        logged = {step: line for step, line in log.steps.items() if limit is None or step <= limit}
        missing = _missing(logged, first, limit)
        if len(missing) > MAX_UNLOGGED or (logged and missing and missing[0] < max(logged)):
            violations.append(f"generation {generation} did not log {len(missing)} steps from {missing[0]} on")
        unlogged += len(missing)
        for step, line in logged.items():
            if line.ids != expected(step):
                violations.append(f"step {step} of generation {generation} saw other samples than the seed gives it")
            if line.loss is None or not math.isfinite(line.loss):
                violations.append(f"step {step} of generation {generation} has no finite loss")
        counting |= logged
        parent = generation
    return Verdict(counting, unlogged, violations)


def compare(counting: Mapping[int, Step], reference: Mapping[int, float]) -> list[str]:
    """Where the loss is not that of the undisturbed run."""
    found = []
    for step, line in sorted(counting.items()):
        undisturbed = reference.get(step)
        if undisturbed is None or line.loss is None:
            continue
        if abs(line.loss - undisturbed) > ABSOLUTE + RELATIVE * abs(undisturbed):
            found.append(f"the loss of step {step} is {line.loss:.6f}; undisturbed it is {undisturbed:.6f}")
    return found


def second_writers(
    records: Iterable[GenerationRecord], logs: Mapping[int, Log], committed: Mapping[int, Mapping[int, float]]
) -> list[str]:
    """Checkpoints that count although a newer generation of the lineage had taken a step when they were committed.

    Args:
        committed: for each generation, the steps of its checkpoints that count, and when their commit began.
    """
    order = list(chain(records))
    found = []
    for index, generation in enumerate(order):
        newer = [line.at for other in order[:index] for line in logs.get(other, Log()).steps.values()]
        began = min(newer, default=math.inf)
        for step, at in committed.get(generation, {}).items():
            if at > began:
                found.append(
                    f"generation {generation} committed step {step} {at - began:.1f} s after its successor began"
                )
    return found


def _of_log(generation: int, log: Log, first: int) -> list[str]:
    found = [f"generation {generation} took step {step} twice" for step in log.twice]
    if log.start is not None and log.start != first:
        found.append(f"generation {generation} started from step {log.start}, and its record says {first}")
    found += [f"generation {generation} took step {step} again" for step in log.steps if step <= first]
    return found


def _passed_over(generation: int, first: int, parent: Log, opened: float) -> list[str]:
    """What its parent had committed before it was opened, it must have resumed from."""
    return [
        f"generation {generation} resumed from step {first} although step {step} was committed"
        for step, at in parent.saved.items()
        if step > first and at < opened
    ]


def _missing(logged: Mapping[int, Step], first: int, limit: int | None) -> list[int]:
    last = limit if limit is not None else max(logged, default=first)
    return [step for step in range(first + 1, last + 1) if step not in logged]
