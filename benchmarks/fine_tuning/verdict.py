"""Whether the sides may be compared, and whether Tandem keeps up. Pure.

**Admission.** Rows of a table stand for the same training only if the first STEPS steps of each side were taken of the
plan's documents, in its order, and the losses differ by TOLERANCE of their size at the most. Otherwise nothing of them
is judged, and the goal is missed.

**Time** is judged as `benchmarks.throughput.verdict` does: by the processor seconds of the ranks and by the clock,
fewer than six rounds not at all. Ours is to be 0.99 of the other's at least, and not less where packing is in it.

**Memory** is judged by medians, within 2 %; the **held-out loss** by the mean over rounds, within 0.005 nats; the
share of **padding** is exact.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.fine_tuning.record import Resumed, Step
from benchmarks.fine_tuning.sides import Run
from benchmarks.fine_tuning.work import Plan
from benchmarks.goals import MIN_VALUES, Outcome, Verdict
from benchmarks.throughput.verdict import Goal, by_clock, judge

STEPS = 20
TOLERANCE = 1e-5
"""Of a loss. 2.5e-7 was measured: attention with a mask for padding adds up in another order than without one."""
AS_FAST, FASTER = 0.99, 1.0
MEMORY, LOSS = 1.02, 0.005
Runs = Sequence[Run | None]


def admitted(plan: Plan, steps: Mapping[str, Sequence[Step]]) -> list[str]:
    """What keeps sides from being compared; nothing where they trained alike.

    Args:
        steps: of each side, the first one's losses are those that others are compared with.
    """
    problems = []
    for side, found in steps.items():
        if len(found) < STEPS:
            problems.append(f"{side}: {len(found)} steps")
        elif (other := _first(one.documents != plan.documents[number] for number, one in _numbered(found))) is not None:
            problems.append(f"{side}: step {other} has other documents")
    if problems:
        return problems
    (first, reference), *others = steps.items()
    for side, found in others:
        off, step = largest_difference(reference, found)
        if not off <= TOLERANCE:
            problems.append(f"{side}: its loss at step {step} is {off:.1e} of it away from that of {first}")
    return problems


def largest_difference(reference: Sequence[Step], found: Sequence[Step]) -> tuple[float, int]:
    """By how much of the reference a loss of the first STEPS differs at the most, and at which step."""
    pairs = zip(reference[:STEPS], found[:STEPS], strict=True)
    differences = [(abs(theirs.loss - ours.loss) / ours.loss, ours.step) for ours, theirs in pairs]
    return next((one for one in differences if math.isnan(one[0])), max(differences))


def compared(ours: Runs, theirs: Runs, other: str, packing: bool) -> list[Verdict]:
    """All goals without evaluation."""
    least = FASTER if packing else AS_FAST
    what = f"{'packed' if packing else 'unpacked'}, beside {other}"
    goal = Goal(f"{what}: tokens/s ≥ {least:g}", least, lambda use: use.ranks)
    verdicts = judge(goal, [run and run.measurement for run in ours], [run and run.measurement for run in theirs])
    own, others = [run for run in ours if run], [run for run in theirs if run]
    if not own or not others:
        return verdicts
    rows = [
        ("no more padding", [run.padding for run in own], [run.padding for run in others], 1e-9, "{:.1%}"),
        ("held-out loss no higher", [run.held_out for run in own], [run.held_out for run in others], LOSS, "{:.4f}"),
    ]
    peaks = statistics.median(run.peak for run in own), statistics.median(run.peak for run in others)
    verdicts.append(
        Verdict(
            Outcome.MET if peaks[0] <= MEMORY * peaks[1] else Outcome.MISSED,
            f"{what}: peak memory ≤ {MEMORY:g} of it",
            f"{peaks[0]:.0f} and {peaks[1]:.0f} MB",
        )
    )
    for words, mine, its, slack, form in rows:
        found, reference = statistics.fmean(mine), statistics.fmean(its)
        outcome = Outcome.MET if found <= reference + slack else Outcome.MISSED
        verdicts.append(Verdict(outcome, f"{what}: {words}", f"{form.format(found)} and {form.format(reference)}"))
    return verdicts


def evaluated(ours: Runs, theirs: Runs) -> list[Verdict]:
    """The goals of training with evaluation: earlier done, and no worse a score at any time that both have."""
    goal = "with evaluation, beside TRL: done no later"
    failed = [*ours, *theirs].count(None)
    if failed:
        return [Verdict(Outcome.MISSED, goal, f"{failed} of {len(ours) + len(theirs)} measurements failed")]
    pairs = [(own, other) for own, other in zip(ours, theirs, strict=True) if own and other]
    ratios = [other.evaluated_seconds / own.evaluated_seconds for own, other in pairs]
    losses = [at_equal_time(own, other) for own, other in pairs]
    own, other = (statistics.fmean(side) for side in zip(*losses, strict=True))
    outcome = Outcome.MET if own <= other + LOSS else Outcome.MISSED
    if len(pairs) < MIN_VALUES:
        outcome = Outcome.UNJUDGED  # Who is done first is a matter of the clock.
    why = f"{own:.4f} and {other:.4f} nats, mean of {len(pairs)}"
    equal = "with evaluation, beside TRL: held-out loss known at equal time no higher"
    return [by_clock(goal, FASTER, ratios), Verdict(outcome, equal, why)]


def at_equal_time(ours: Run, theirs: Run) -> tuple[float, float]:
    """The last held-out loss that each knew when the first of both was done."""
    seconds = min(ours.evaluated_seconds, theirs.evaluated_seconds)
    return ours.known_loss(seconds), theirs.known_loss(seconds)


def gap(plan: Plan, phases: Sequence[Sequence[Step]]) -> tuple[int, int, int]:
    """What a kill did to the data that the model has learned from in the end.

    Args:
        phases: steps of all ranks, before the kill and after it. What one did and its successor did again, from an
            earlier state, was lost: it does not count.

    Returns:
        Documents of the plan that were left out, those that came more often than in the plan, and steps that were
        computed again.
    """
    begins = [min(one.step for one in phase) for phase in phases]
    seen: Counter[str] = Counter()
    again = 0
    for phase, until in zip(phases, [*begins[1:], math.inf], strict=True):
        for one in phase:
            if one.step < until:
                seen.update(one.documents)
        again += len({one.step for one in phase if one.step >= until})
    wanted = Counter(document for step in plan.documents for document in step)
    return (wanted - seen).total(), (seen - wanted).total(), again


def without_gap(side: str, found: Sequence[Resumed]) -> Verdict:
    """Nothing may be left out, and nothing repeated."""
    lost, repeated = sum(one.lost for one in found), sum(one.repeated for one in found)
    words = f"{side}, killed and resumed on one rank: no document lost, none repeated"
    why = f"{lost} lost, {repeated} repeated in {len(found)} kills"
    return Verdict(Outcome.MISSED if lost or repeated else Outcome.MET, words, why)


def _numbered(steps: Sequence[Step]) -> list[tuple[int, Step]]:
    return list(enumerate(steps[:STEPS]))


def _first(wrong: object) -> int | None:
    return next((number for number, one in enumerate(wrong, start=1) if one), None)
