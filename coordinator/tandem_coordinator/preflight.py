"""The pre-flight of a generation: which members are tested, what their reports mean, and what follows.

Pure; a part of the state machine in `membership`.

With `elasticity.preflight`, a generation with a member that has not passed one yet begins with a pre-flight. Each agent
has short-lived processes compute something whose result is known, exchange data with other members in pairs, and add up
something over all ranks (tandem_trainer.preflight). It tells what they found, and waits: `Answer.preflight` keeps the
ranks from starting. Once all have told, the reports are judged, and the group goes on without a member that is wrong,
not reached, or much slower than the others.

**Who is to blame.** A wrong result of its own is a member's own fault, and nothing else is looked at then: a process
that has died takes the connections of the others along. Of a pair that does not reach each other, one of the two has
to go: the one with more such pairs, because the network of the others is sound; if both have as many, the one
that comes later in rank order, because the first one hosts the store. Slow is who is SLOW times worse than the median
of at least COMPARED members. Between pods of one node data travels far faster than between nodes, so pairs within a
node count only if all members are on it.

**What follows.** As with `blame`, at most a quarter is left out, and never so many that fewer than `minReplicas`
remain. A member that cannot be left out and is only slow is told of, and trains. One that is wrong or not reached never
trains: the generation is closed, which counts as a failure, until the restart budget is used up.

Rejected: a limit in absolute numbers (every kind of node has its own), three failures in a row as in `blame` (a
pre-flight measures what `blame` has to guess), and a check while ranks train (it would take what it measures).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high, median_low
from typing import Literal

from tandem.formatting import size
from tandem.protocol import PreflightReport, Sync
from tandem_coordinator.closing import close, count_failure
from tandem_coordinator.failures import leave_out
from tandem_coordinator.group_state import Action, Cause, LeftOut, Next, Preflight, Say, State, listed

SLOW = 3.0
"""So many times slower than the median is slow. Equal nodes differ by some per cent; a GPU that throttles, a link that
fell back to a tenth of its speed, or a core that is shared by three are beyond it."""
COMPARED = 3
"""Of fewer members nobody can say which is the slow one."""
LIMIT_SECONDS = 150.0
"""For all reports. The agents themselves give up well before."""
SETTLE_SECONDS = 5.0
"""After the first member that does not reach another one, what the others get to tell the same: all give up after equal
times."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Something is wrong with a member."""

    replica: str
    """Empty: nobody knows whose fault it is."""
    why: str
    """What, with numbers, after the member's name; a whole sentence if there is none."""
    kind: Literal["unfit", "slow", "failed"] = "unfit"
    """`unfit`: the group cannot work with it. `slow`: it can. `failed`: another try may succeed."""


def judge(members: Sequence[str], reports: Mapping[str, PreflightReport], places: Mapping[str, str]) -> list[Suspect]:
    """What is wrong with whom; nothing if all are sound.

    Args:
        members: in rank order.
        reports: what they told, by member.
        places: the node or address of each.
    """
    told = {name: reports[name] for name in members if name in reports}
    return (
        [Suspect(name, report.wrong) for name, report in told.items() if report.wrong]
        or _unreached(members, told)
        or [Suspect(name, "did not tell what its pre-flight found", "failed") for name in members if name not in told]
        or _miscounted(told)
        or _slow_products(told)
        or _slow_pairs(told, places)
    )


# In the machine


def begin(state: State, now: float) -> State:
    """Ask the generation that was just formed for a pre-flight, if the job wants one and a member has passed none."""
    if not state.rules.preflight or state.passed >= state.inside.keys():
        return state
    if not all(state.agents[replica].preflights for replica, _ in state.inside):
        # An older agent would start its ranks, and the others would wait for its report.
        return state
    return replace(state, preflight=Preflight(now))


def is_missing(state: State, sync: Sync) -> bool:
    """Whether this brings a report that is not known yet."""
    return (
        state.preflight is not None
        and sync.preflight is not None
        and sync.preflight.generation == state.number
        and (sync.replica, sync.incarnation) in state.inside
        and sync.replica not in state.preflight.reports
    )


def take(state: State, sync: Sync, now: float) -> State:
    """Take in what a member found."""
    if not is_missing(state, sync):
        return state
    assert state.preflight is not None
    assert sync.preflight is not None
    known, told = state.preflight, sync.preflight
    is_broken = any(pair.bytes_per_second is None for pair in told.pairs)
    broken_at = now if known.broken_at is None and is_broken else known.broken_at
    reports = {**known.reports, sync.replica: told}
    return replace(state, preflight=replace(known, reports=reports, broken_at=broken_at))


def waited(state: State, seconds: float) -> State:
    """So much time has passed in which the coordinator did not listen."""
    known = state.preflight
    if known is None:
        return state
    broken_at = None if known.broken_at is None else known.broken_at + seconds
    return replace(state, preflight=replace(known, since=known.since + seconds, broken_at=broken_at))


def decide(state: State, now: float) -> Next:
    """Judge the pre-flight once there is enough to judge by, and let the ranks start, or close the generation."""
    known, latest = state.preflight, state.latest
    if known is None or latest is None or not _is_due(known, len(latest.members), now):
        return state, ()
    names = [member.replica for member in latest.members]
    nodes = {name: state.agents[name].node if name in state.agents else "" for name in names}
    places = {member.replica: nodes[member.replica] or member.address for member in latest.members}
    findings = judge(names, known.reports, places)
    gone: list[str] = []
    for found in findings:
        if found.kind == "failed":
            continue
        name, node = found.replica, nodes[found.replica]
        where = f"{name} (node {node})" if node else name
        detail = f"{where} is left out after the pre-flight: it {found.why}"
        if (without_it := leave_out(state, LeftOut(name, node, detail, now))) is not None:
            state = without_it
            gone.append(detail)
    if gone:
        return close(state, Cause("PreflightFailed", "; ".join(gone)), now)
    said = [f"{found.replica} {found.why}" if found.replica else found.why for found in findings]
    if any(found.kind != "slow" for found in findings):
        return _fail(state, findings[0].replica, "; ".join(said), now)
    alive = {(name, agent.member.incarnation) for name, agent in state.agents.items()}
    passed = (state.passed & alive) | state.inside.keys()
    slow = (Say(f"{text}; it cannot be left out", warning=True) for text in said)
    return replace(state, preflight=None, passed=passed), (*slow, Say(_summary(known.reports, now - known.since)))


def _fail(state: State, culprit: str, detail: str, now: float) -> Next:
    actions: tuple[Action, ...]
    state, actions = close(state, Cause("PreflightFailed", f"the pre-flight failed: {detail}", culprit), now)
    state, more = count_failure(state, now)
    return state, (*actions, *more)


def _is_due(known: Preflight, members: int, now: float) -> bool:
    return (
        len(known.reports) == members
        or any(report.wrong for report in known.reports.values())
        or (known.broken_at is not None and now - known.broken_at > SETTLE_SECONDS)
        or now - known.since > LIMIT_SECONDS
    )


# Of reports


def _unreached(members: Sequence[str], told: Mapping[str, PreflightReport]) -> list[Suspect]:
    # Everybody has to reach the store of the first member.
    asked: dict[str, set[str]] = {name: set() for name in members}
    asked[members[0]].update(members[1:])
    broken: set[frozenset[str]] = set()
    for name, report in told.items():
        for pair in report.pairs:
            if pair.replica in asked and pair.replica != name:
                asked[name].add(pair.replica)
                asked[pair.replica].add(name)
                if pair.bytes_per_second is None:
                    broken.add(frozenset((name, pair.replica)))
    findings = []
    while broken:
        lacks = {name: [pair for pair in broken if name in pair] for name in members}
        worst = max(members, key=lambda name: (_share(lacks[name], asked[name]), members.index(name)))
        peers = listed(peer for pair in lacks[worst] for peer in pair - {worst})
        findings.append(Suspect(worst, f"and {peers} do not reach each other"))
        broken -= set(lacks[worst])
    return findings


def _share(lacks: Sequence[frozenset[str]], asked: set[str]) -> tuple[int, float]:
    return len(lacks), len(lacks) / max(1, len(asked))


def _miscounted(told: Mapping[str, PreflightReport]) -> list[Suspect]:
    wrong = [name for name, report in told.items() if report.all_reduce == "wrong"]
    if wrong and len(wrong) < len(told):
        return [Suspect(name, "got a wrong sum over all ranks, and others the right one") for name in wrong]
    if wrong:
        return [Suspect("", "the sum over all ranks is wrong everywhere", "failed")]
    if failed := [name for name, report in told.items() if report.all_reduce == "failed"]:
        return [Suspect("", f"the sum over all ranks did not come about on {listed(failed)}", "failed")]
    return []


def _slow_products(told: Mapping[str, PreflightReport]) -> list[Suspect]:
    seconds = {name: report.product_seconds for name, report in told.items() if report.product_seconds}
    if len(seconds) < COMPARED:
        return []
    usual = median_low(seconds.values())
    return [
        Suspect(
            name,
            f"took {_milliseconds(took)} for a matrix product, {took / usual:.1f} times as long as the median of "
            f"{_milliseconds(usual)}",
            "slow",
        )
        for name, took in seconds.items()
        if took > SLOW * usual
    ]


def _slow_pairs(told: Mapping[str, PreflightReport], places: Mapping[str, str]) -> list[Suspect]:
    one_place = len({places[name] for name in told}) == 1
    rates: dict[str, dict[str, float]] = {name: {} for name in told}
    for name, report in told.items():
        for pair in report.pairs:
            if pair.bytes_per_second and pair.replica in rates:
                if places[name] == places[pair.replica] and not one_place:
                    continue
                # Both have measured it; a hiccup of one is none of the pair's.
                for one, other in ((name, pair.replica), (pair.replica, name)):
                    rates[one][other] = max(rates[one].get(other, 0.0), pair.bytes_per_second)
    # With the better half of its peers: a pair is as slow as the slower of the two.
    own = {name: median_high(found.values()) for name, found in rates.items() if len(found) > 1}
    if len(own) < COMPARED:
        return []
    usual = median(own.values())
    return [
        Suspect(
            name,
            f"exchanges {_rate(rate)} with most of the others, {usual / rate:.1f} times less than the median of "
            f"{_rate(usual)}",
            "slow",
        )
        for name, rate in own.items()
        if rate * SLOW < usual
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
