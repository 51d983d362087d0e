"""Whether the sides may be compared, and whether Tandem keeps up. Pure.

**Admission.** Rows of a table stand for the same training only if the first STEPS steps of each side were taken of the
plan's documents, in its order, and the losses differ by at most TOLERANCE of their size. Otherwise none of them is
judged, and the goal is missed.

**Time** is judged as `benchmarks.throughput.verdict` does: by the processor seconds of the ranks and by the clock, with
at least six rounds. Tandem's is to be at least 0.99 of the other's, and at least equal with packing.

**Memory** is judged by medians, within 2 %; the **held-out loss** by the mean over rounds, within 0.005 nats; the share
of **padding** is exact.
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
"""Relative difference of two losses. 2.5e-7 was measured: attention with a mask for padding sums in another order
than without one."""
AS_FAST, FASTER = 0.99, 1.0
MEMORY, LOSS = 1.02, 0.005
Runs = Sequence[Run | None]


def admitted(plan: Plan, steps: Mapping[str, Sequence[Step]]) -> list[str]:
    """List the differences that keep sides from being compared; empty if they trained alike.

    Args:
        steps: steps of each side; other sides' losses are compared with the first one's.
    """
    problems = []
    for side, side_steps in steps.items():
        if len(side_steps) < STEPS:
            problems.append(f"{side}: {len(side_steps)} steps")
        elif (
            other := _first(step.documents != plan.documents[number] for number, step in _numbered(side_steps))
        ) is not None:
            problems.append(f"{side}: step {other} has other documents")
    if problems:
        return problems
    (first, reference), *other_sides = steps.items()
    for side, side_steps in other_sides:
        off, step = largest_difference(reference, side_steps)
        if not off <= TOLERANCE:
            problems.append(f"{side}: its loss at step {step} is {off:.1e} of it away from that of {first}")
    return problems


def largest_difference(reference: Sequence[Step], steps: Sequence[Step]) -> tuple[float, int]:
    """Largest relative difference of a loss of the first STEPS from the reference, and its step."""
    pairs = zip(reference[:STEPS], steps[:STEPS], strict=True)
    differences = [(abs(actual.loss - expected.loss) / expected.loss, expected.step) for expected, actual in pairs]
    return next((difference for difference in differences if math.isnan(difference[0])), max(differences))


def compared(own_runs: Runs, other_runs: Runs, other: str, packing: bool) -> list[Verdict]:
    """Judge all goals without evaluation."""
    minimum = FASTER if packing else AS_FAST
    title = f"{'packed' if packing else 'unpacked'}, beside {other}"
    goal = Goal(f"{title}: tokens/s ≥ {minimum:g}", minimum, lambda use: use.ranks)
    verdicts = judge(
        goal, [run and run.measurement for run in own_runs], [run and run.measurement for run in other_runs]
    )
    own, completed = [run for run in own_runs if run], [run for run in other_runs if run]
    if not own or not completed:
        return verdicts
    rows = [
        ("no more padding", [run.padding for run in own], [run.padding for run in completed], 1e-9, "{:.1%}"),
        ("held-out loss no higher", [run.held_out for run in own], [run.held_out for run in completed], LOSS, "{:.4f}"),
    ]
    peaks = statistics.median(run.peak for run in own), statistics.median(run.peak for run in completed)
    verdicts.append(
        Verdict(
            Outcome.MET if peaks[0] <= MEMORY * peaks[1] else Outcome.MISSED,
            f"{title}: peak memory ≤ {MEMORY:g} of it",
            f"{peaks[0]:.0f} and {peaks[1]:.0f} MB",
        )
    )
    for claim, own_values, other_values, slack, form in rows:
        own_mean, other_mean = statistics.fmean(own_values), statistics.fmean(other_values)
        outcome = Outcome.MET if own_mean <= other_mean + slack else Outcome.MISSED
        verdicts.append(Verdict(outcome, f"{title}: {claim}", f"{form.format(own_mean)} and {form.format(other_mean)}"))
    return verdicts


def evaluated(own_runs: Runs, other_runs: Runs) -> list[Verdict]:
    """Judge the goals of training with evaluation: done earlier, and no worse a score at any time that both have."""
    goal = "with evaluation, beside TRL: done no later"
    failed = [*own_runs, *other_runs].count(None)
    if failed:
        return [Verdict(Outcome.MISSED, goal, f"{failed} of {len(own_runs) + len(other_runs)} measurements failed")]
    pairs = [(own, other) for own, other in zip(own_runs, other_runs, strict=True) if own and other]
    ratios = [other.evaluated_seconds / own.evaluated_seconds for own, other in pairs]
    losses = [at_equal_time(own, other) for own, other in pairs]
    own, other = (statistics.fmean(side) for side in zip(*losses, strict=True))
    outcome = Outcome.MET if own <= other + LOSS else Outcome.MISSED
    if len(pairs) < MIN_VALUES:
        outcome = Outcome.UNJUDGED  # Who is done first is a matter of the clock.
    reason = f"{own:.4f} and {other:.4f} nats, mean of {len(pairs)}"
    equal = "with evaluation, beside TRL: held-out loss known at equal time no higher"
    return [by_clock(goal, FASTER, ratios), Verdict(outcome, equal, reason)]


def at_equal_time(own_run: Run, other_run: Run) -> tuple[float, float]:
    """The last held-out loss that each side knew when the first of both was done."""
    seconds = min(own_run.evaluated_seconds, other_run.evaluated_seconds)
    return own_run.known_loss(seconds), other_run.known_loss(seconds)


def gap(plan: Plan, phases: Sequence[Sequence[Step]]) -> tuple[int, int, int]:
    """Determine the effect of a kill on the data that the final model has learned from.

    Args:
        phases: steps of all ranks, before the kill and after it. Steps that a later phase repeated from an earlier
            state were lost: they do not count.

    Returns:
        Documents of the plan that were skipped, those that occurred more often than in the plan, and steps that were
        computed again.
    """
    begins = [min(entry.step for entry in phase) for phase in phases]
    learned_documents: Counter[str] = Counter()
    recomputed = 0
    for phase, until in zip(phases, [*begins[1:], math.inf], strict=True):
        for entry in phase:
            if entry.step < until:
                learned_documents.update(entry.documents)
        recomputed += len({entry.step for entry in phase if entry.step >= until})
    planned = Counter(document for documents in plan.documents for document in documents)
    return (planned - learned_documents).total(), (learned_documents - planned).total(), recomputed


def without_gap(side: str, recoveries: Sequence[Resumed]) -> Verdict:
    """Judge that no document was skipped, and none repeated."""
    lost, repeated = sum(recovery.lost for recovery in recoveries), sum(recovery.repeated for recovery in recoveries)
    goal = f"{side}, killed and resumed on one rank: no document lost, none repeated"
    reason = f"{lost} lost, {repeated} repeated in {len(recoveries)} kills"
    return Verdict(Outcome.MISSED if lost or repeated else Outcome.MET, goal, reason)


def _numbered(steps: Sequence[Step]) -> list[tuple[int, Step]]:
    return list(enumerate(steps[:STEPS]))


def _first(wrong: object) -> int | None:
    return next((number for number, is_wrong in enumerate(wrong, start=1) if is_wrong), None)
