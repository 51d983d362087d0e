"""The pre-flight of a generation: which members are tested, what their reports mean, and what follows.

Pure; a part of the state machine in `membership`.

With `elasticity.preflight`, a generation with a member that has not passed one yet begins with a pre-flight. Each agent
has short-lived processes compute something whose result is known, exchange data with other members in pairs, and add up
something over all ranks (tandem_trainer.agent.preflight). It reports the results, and waits: `Answer.preflight` keeps
the ranks from starting. Once all reports are in, they are judged, and the group goes on without a member that is wrong,
not reached, or much slower than the others.

**Who is to blame.** A wrong result of its own is a member's own fault, and nothing else is considered then: a process
that has died takes the connections of the others along. Of a pair that cannot reach each other, one of the two has to
go: the one with more such pairs, because the network of the others is sound; if both have as many, the one that comes
later in rank order, because the first one hosts the store. A member is slow if it is SLOW_FACTOR times worse than the
median of at least MIN_COMPARED members. Between pods of one node data travels far faster than between nodes, so pairs
within a node count only if all members are on it.

**What follows.** As in `failures`, at most a quarter of the members is excluded, and never so many that fewer than
`minReplicas` remain. A member that cannot be excluded and is only slow is reported, and trains. One that is wrong or
not reached never trains: the generation is closed, which counts as a failure, until the restart budget is used up.

Rejected: a limit in absolute numbers (every kind of node has its own), three failures in a row as in `failures` (a
pre-flight measures what `failures` has to guess), and a check while ranks train (it would take what it measures).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high, median_low
from typing import Literal

from tandem.formatting import size
from tandem.wire.protocol import PreflightReport, Sync
from tandem_coordinator.closing import close, count_failure
from tandem_coordinator.failures import exclude
from tandem_coordinator.group_state import Action, Announce, Cause, Exclusion, Preflight, State, Transition, join_names

SLOW_FACTOR = 3.0
"""Factor to the median above which a member is slow. Equal nodes differ by some per cent; a GPU that throttles, a link
that fell back to a tenth of its speed, or a core that is shared by three are beyond it."""
MIN_COMPARED = 3
"""Minimum number of members to compare: with fewer, it is unknown which one is slow."""
LIMIT_SECONDS = 150.0
"""Time limit for all reports, in seconds. The agents themselves give up well before."""
SETTLE_SECONDS = 5.0
"""Time that the others get to report the same after the first member that cannot reach another one, in seconds: all
give up after equal times."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A finding of a pre-flight against a member."""

    replica: str
    """The member; empty if it is unknown whose fault it is."""
    reason: str
    """The finding with numbers, as a predicate that follows the member's name; a whole sentence if there is none."""
    kind: Literal["unfit", "slow", "failed"] = "unfit"
    """`unfit`: the group cannot train with the member. `slow`: it can. `failed`: another attempt may succeed."""


def judge(members: Sequence[str], reports: Mapping[str, PreflightReport], places: Mapping[str, str]) -> list[Suspect]:
    """Judge the reports of a pre-flight; returns one finding per faulty member, none if all are sound.

    Args:
        members: in rank order.
        reports: the reports received, by member.
        places: the node or address of each.
    """
    received = {name: reports[name] for name in members if name in reports}
    return (
        [Suspect(name, report.wrong) for name, report in received.items() if report.wrong]
        or _unreached(members, received)
        or [Suspect(name, "sent no pre-flight report", "failed") for name in members if name not in received]
        or _miscounted(received)
        or _slow_products(received)
        or _slow_pairs(received, places)
    )


# In the machine


def request(state: State, now: float) -> State:
    """Request a pre-flight of the generation that was just formed, if the job wants one and a member has passed
    none."""
    if not state.rules.preflight or state.preflight_passed >= state.members.keys():
        return state
    return replace(state, preflight=Preflight(now))


def has_new_report(state: State, sync: Sync) -> bool:
    """Whether a message brings a new pre-flight report."""
    return (
        state.preflight is not None
        and sync.preflight is not None
        and sync.preflight.generation == state.number
        and (sync.replica, sync.incarnation) in state.members
        and sync.replica not in state.preflight.reports
    )


def record_report(state: State, sync: Sync, now: float) -> State:
    """Record the report of a member."""
    if not has_new_report(state, sync):
        return state
    assert state.preflight is not None
    assert sync.preflight is not None
    preflight, report = state.preflight, sync.preflight
    is_broken = any(pair.bytes_per_second is None for pair in report.pairs)
    broken_at = now if preflight.broken_at is None and is_broken else preflight.broken_at
    reports = {**preflight.reports, sync.replica: report}
    return replace(state, preflight=replace(preflight, reports=reports, broken_at=broken_at))


def skip_time(state: State, seconds: float) -> State:
    """Do not count time in which the coordinator did not listen."""
    preflight = state.preflight
    if preflight is None:
        return state
    broken_at = None if preflight.broken_at is None else preflight.broken_at + seconds
    return replace(state, preflight=replace(preflight, since=preflight.since + seconds, broken_at=broken_at))


def decide(state: State, now: float) -> Transition:
    """Judge the pre-flight once enough reports are in, and let the ranks start, or close the generation."""
    preflight, latest = state.preflight, state.latest
    if preflight is None or latest is None or not _is_due(preflight, len(latest.members), now):
        return state, ()
    names = [member.replica for member in latest.members]
    nodes = {name: state.agents[name].node if name in state.agents else "" for name in names}
    places = {member.replica: nodes[member.replica] or member.address for member in latest.members}
    # Findings are judged together, since one of them may be the consequence of another.
    findings = judge(names, preflight.reports, places)
    exclusions: list[str] = []
    for suspect in findings:
        # Another attempt may succeed, so no member is excluded for it.
        if suspect.kind == "failed":
            continue
        name, node = suspect.replica, nodes[suspect.replica]
        location = f"{name} (node {node})" if node else name
        detail = f"{location} is left out after the pre-flight: it {suspect.reason}"
        if (without_suspect := exclude(state, Exclusion(name, node, detail, now))) is not None:
            state = without_suspect
            exclusions.append(detail)
    # Without the excluded members another group is formed, and tested again.
    if exclusions:
        return close(state, Cause("PreflightFailed", "; ".join(exclusions)), now)
    messages = [f"{suspect.replica} {suspect.reason}" if suspect.replica else suspect.reason for suspect in findings]
    # A member that is wrong and cannot be excluded must not train.
    if any(suspect.kind != "slow" for suspect in findings):
        return _fail(state, findings[0].replica, "; ".join(messages), now)
    # Only agents that still live are remembered, so that the set stays small.
    alive = {(name, agent.member.incarnation) for name, agent in state.agents.items()}
    passed = (state.preflight_passed & alive) | state.members.keys()
    slow = (Announce(f"{text}; it cannot be left out", warning=True) for text in messages)
    return replace(state, preflight=None, preflight_passed=passed), (
        *slow,
        Announce(_summary(preflight.reports, now - preflight.since)),
    )


def _fail(state: State, culprit: str, detail: str, now: float) -> Transition:
    actions: tuple[Action, ...]
    state, actions = close(state, Cause("PreflightFailed", f"the pre-flight failed: {detail}", culprit), now)
    state, more = count_failure(state, now)
    return state, (*actions, *more)


def _is_due(preflight: Preflight, members: int, now: float) -> bool:
    return (
        len(preflight.reports) == members
        or any(report.wrong for report in preflight.reports.values())
        or (preflight.broken_at is not None and now - preflight.broken_at > SETTLE_SECONDS)
        or now - preflight.since > LIMIT_SECONDS
    )


# Of reports


def _unreached(members: Sequence[str], reports: Mapping[str, PreflightReport]) -> list[Suspect]:
    # Everybody has to reach the store of the first member.
    tested_peers: dict[str, set[str]] = {name: set() for name in members}
    tested_peers[members[0]].update(members[1:])
    broken: set[frozenset[str]] = set()
    for name, report in reports.items():
        for pair in report.pairs:
            if pair.replica in tested_peers and pair.replica != name:
                tested_peers[name].add(pair.replica)
                tested_peers[pair.replica].add(name)
                if pair.bytes_per_second is None:
                    broken.add(frozenset((name, pair.replica)))
    findings = []
    while broken:
        broken_pairs = {name: [pair for pair in broken if name in pair] for name in members}
        # Each round blames the member with the most broken pairs, and explains these by it.
        worst = max(members, key=lambda name: (_share(broken_pairs[name], tested_peers[name]), members.index(name)))
        peers = join_names(peer for pair in broken_pairs[worst] for peer in pair - {worst})
        findings.append(Suspect(worst, f"and {peers} do not reach each other"))
        broken -= set(broken_pairs[worst])
    return findings


def _share(broken: Sequence[frozenset[str]], tested: set[str]) -> tuple[int, float]:
    return len(broken), len(broken) / max(1, len(tested))


def _miscounted(reports: Mapping[str, PreflightReport]) -> list[Suspect]:
    wrong = [name for name, report in reports.items() if report.all_reduce == "wrong"]
    if wrong and len(wrong) < len(reports):
        return [Suspect(name, "got a wrong sum over all ranks, and others the right one") for name in wrong]
    if wrong:
        return [Suspect("", "the sum over all ranks is wrong everywhere", "failed")]
    if failed := [name for name, report in reports.items() if report.all_reduce == "failed"]:
        return [Suspect("", f"the sum over all ranks failed on {join_names(failed)}", "failed")]
    return []


def _slow_products(reports: Mapping[str, PreflightReport]) -> list[Suspect]:
    seconds = {name: report.product_seconds for name, report in reports.items() if report.product_seconds}
    if len(seconds) < MIN_COMPARED:
        return []
    median_value = median_low(seconds.values())
    return [
        Suspect(
            name,
            f"took {_milliseconds(duration)} for a matrix product, {duration / median_value:.1f} times as long as the "
            f"median of {_milliseconds(median_value)}",
            "slow",
        )
        for name, duration in seconds.items()
        if duration > SLOW_FACTOR * median_value
    ]


def _slow_pairs(reports: Mapping[str, PreflightReport], places: Mapping[str, str]) -> list[Suspect]:
    is_one_place = len({places[name] for name in reports}) == 1
    rates: dict[str, dict[str, float]] = {name: {} for name in reports}
    for name, report in reports.items():
        for pair in report.pairs:
            if pair.bytes_per_second and pair.replica in rates:
                # Pairs within a node are faster than any between nodes, and would set the median.
                if places[name] == places[pair.replica] and not is_one_place:
                    continue
                # Both have measured it; a hiccup of one is none of the pair's.
                for member, peer in ((name, pair.replica), (pair.replica, name)):
                    rates[member][peer] = max(rates[member].get(peer, 0.0), pair.bytes_per_second)
    # With the better half of its peers: a pair is as slow as the slower of the two.
    own = {name: median_high(peers.values()) for name, peers in rates.items() if len(peers) > 1}
    if len(own) < MIN_COMPARED:
        return []
    median_value = median(own.values())
    return [
        Suspect(
            name,
            f"exchanges {_rate(rate)} with most of the others, {median_value / rate:.1f} times less than the median of "
            f"{_rate(median_value)}",
            "slow",
        )
        for name, rate in own.items()
        if rate * SLOW_FACTOR < median_value
    ]


def _summary(reports: Mapping[str, PreflightReport], seconds: float) -> str:
    parts = [f"the pre-flight passed in {seconds:.1f} s"]
    if products := [report.product_seconds for report in reports.values() if report.product_seconds]:
        parts.append(f"a matrix product took {_milliseconds(max(products))} at most")
    rates = [pair.bytes_per_second for report in reports.values() for pair in report.pairs if pair.bytes_per_second]
    if rates:
        parts.append(f"pairs exchanged {_rate(min(rates))} at least")
    return ", ".join(parts)


def _milliseconds(seconds: float) -> str:
    return f"{_number(1000 * seconds)} ms"


def _rate(bytes_per_second: float) -> str:
    return f"{size(bytes_per_second)}/s"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
