"""Whose seconds the ledger counts, and what they were for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.ledger import PURPOSES, Ledger, Prices, Purpose, Spent, amounts, in_words, priced
from tandem.rundir.ledger import newest_ledger
from tandem_coordinator.ledger import UNSETTLED, WorkerSeconds, shown
from tests.support.worlds.ledger_world import T0, LedgerWorld

# Worker-seconds

ONE, TWO = ("worker-0", "a"), ("worker-1", "b")


def sum_of(seconds: WorkerSeconds) -> float:
    return sum(seconds.settled.values()) + seconds.unsettled


def test_members_do_what_the_group_does_and_all_others_wait() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.heard(*ONE, 0.0)
    seconds.heard(*TWO, 0.0)
    seconds.look(5.0, UNSETTLED, 1, {ONE}, {}, {1: 1})
    seconds.look(15.0, "waiting", 1, frozenset(), {1: {"compute": 8.0, "waiting": 1.5}}, {1: 1})
    assert seconds.settled["waiting"] == 10.0 + 10.0 + 1.5
    assert seconds.settled["compute"] == 8.0
    assert seconds.unsettled == 0.5
    seconds.look(19.0, "waiting", 1, frozenset(), {}, {})
    assert seconds.settled["idle"] == 0.5, "nobody has written it down since"


def test_lines_that_come_after_the_end_of_their_group_are_of_that_group() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.heard(*ONE, 0.0)
    seconds.look(0.0, UNSETTLED, 1, {ONE}, {}, {1: 1})
    seconds.look(10.0, UNSETTLED, 2, {ONE, TWO}, {1: {"compute": 9.0}}, {1: 1, 2: 2})
    seconds.look(10.5, UNSETTLED, 2, {ONE, TWO}, {1: {"compute": 10.0}}, {1: 1, 2: 2})
    seconds.look(20.0, UNSETTLED, 2, {ONE, TWO}, {1: {"compute": 10.0}}, {1: 1, 2: 2})
    assert seconds.settled["idle"] == 0.0


def test_a_worker_has_waited_since_its_process_began() -> None:
    seconds = WorkerSeconds(100.0)
    seconds.heard(*ONE, 104.0)
    seconds.heard(*ONE, 105.0, age=5.0)
    seconds.heard(*ONE, 106.0, age=6.0)
    seconds.close(106.0)
    assert seconds.settled["waiting"] == 6.0


def test_a_worker_that_comes_back_was_there_all_the_time_and_another_one_of_its_name_was_not() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.heard(*ONE, 0.0, age=0.0)
    seconds.gone("worker-0", 10.0)
    seconds.heard(*ONE, 12.0, age=12.0)
    seconds.gone("worker-0", 20.0)
    seconds.heard("worker-0", "another", 30.0, age=4.0)
    seconds.close(40.0)
    assert sum_of(seconds) == 20.0 + 14.0


def test_after_a_restart_a_member_has_worked_since_the_last_record() -> None:
    seconds = WorkerSeconds(1000.0, counted_until=990.0, generation=3, unsettled=2.0)
    seconds.look(1000.0, UNSETTLED, 3, {ONE}, {}, {3: 1})
    seconds.heard(*ONE, 1001.0)
    seconds.heard(*TWO, 1002.0, age=5.0)
    assert seconds.unsettled == 2.0 + 11.0 + 1.0
    assert seconds.settled["waiting"] == 5.0
    seconds.heard(*ONE, 1003.0, age=10.0)
    assert seconds.unsettled == 2.0 + 9.0, "it was born after that"


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int, float]]:
    """Events: what, of which worker, with which life of it, and how long after the one before."""
    kinds = st.sampled_from(["heard", "aged", "gone", "look", "close"])
    return draw(
        st.lists(st.tuples(kinds, st.integers(0, 3), st.integers(0, 2), st.floats(0.0, 20.0)), min_size=1, max_size=60)
    )


@given(
    histories(),
    st.lists(st.sampled_from([*PURPOSES, UNSETTLED]), min_size=1),
    st.lists(st.floats(0.0, 30.0), min_size=1),
    st.floats(-50.0, 50.0),
)
def test_the_parts_add_up_to_the_seconds_of_workers_whatever_events_come(
    events: list[tuple[str, int, int, float]], doings: list[str], told: list[float], unsettled: float
) -> None:
    now, truth = 0.0, Existence()
    seconds = WorkerSeconds(now, generation=0, unsettled=unsettled)
    written: dict[int, dict[Purpose, float]] = {}
    before = dict(seconds.settled)
    for number, (kind, index, life, later) in enumerate(events):
        now += later
        name, incarnation = f"worker-{index}", f"life-{life}"
        if kind == "gone":
            seconds.gone(name, now)
            truth.gone(name, now)
        elif kind in ("heard", "aged"):
            age = told[number % len(told)] if kind == "aged" else None
            seconds.heard(name, incarnation, now, age)
            truth.heard(name, incarnation, now, age)
        elif kind == "look":
            generation = 1 + number // 7
            for purpose in ("compute", "recomputed", "waiting"):
                of = written.setdefault(generation - life % 2, {})
                of[purpose] = of.get(purpose, 0.0) + told[(number + index) % len(told)]
            members = frozenset((f"worker-{one}", f"life-{life}") for one in range(index))
            sizes = {generation: index + 1}
            seconds.look(now, doings[number % len(doings)], generation, members, written, sizes)
        else:
            seconds.close(now)
        seconds.gone("nobody", now)
        assert all(value >= before[purpose] - 1e-6 for purpose, value in seconds.settled.items()), "counters grow"
        before = dict(seconds.settled)
    seconds.close(now)
    assert sum_of(seconds) == pytest.approx(truth.seconds(now) + unsettled, abs=1e-6)
    assert sum(shown(seconds.settled, seconds.unsettled).values()) == pytest.approx(
        max(0.0, truth.seconds(now) + unsettled), abs=1e-6
    )


class Existence:
    """For how long workers exist, by the definition: from birth, as far as that is told while they are there for the
    first time, to the last time that they are there."""

    def __init__(self) -> None:
        self.lives: dict[tuple[str, str], list[float]] = {}
        self.unaged: set[tuple[str, str]] = set()
        self.there: dict[str, str] = {}

    def heard(self, name: str, incarnation: str, now: float, age: float | None) -> None:
        one = name, incarnation
        if self.there.get(name) != incarnation:
            self.gone(name, now)
            if one not in self.lives:
                self.lives[one] = [now, now]
                self.unaged.add(one)
            self.there[name] = incarnation
        if age is not None and one in self.unaged:
            self.unaged.discard(one)
            self.lives[one][0] = min(self.lives[one][0], now - age)

    def gone(self, name: str, now: float) -> None:
        if (incarnation := self.there.pop(name, None)) is not None:
            self.lives[name, incarnation][1] = now
            self.unaged.discard((name, incarnation))

    def seconds(self, now: float) -> float:
        for name, incarnation in self.there.items():
            self.lives[name, incarnation][1] = now
        return sum(end - begin for begin, end in self.lives.values())


# A run


def spent(ledger: Ledger, purpose: Purpose) -> float:
    found: float = getattr(ledger.cpu_seconds, purpose)
    return found


def test_a_run_with_kills_and_restarts_of_its_coordinator_adds_up_within_one_percent(tmp_path: Path) -> None:
    world = LedgerWorld(tmp_path / "run", workers=3, evaluators=2)
    world.passes(30.0)
    for name in ("worker-1", "evaluator-0", "worker-0", "worker-2"):
        world.dies(name)
        world.passes(23.0)
    world.coordinator_dies()
    world.passes(15.0)
    world.coordinator_starts()
    world.passes(23.0)
    world.dies("worker-1")
    world.passes(1.0)
    world.coordinator_dies()
    world.passes(4.0)
    world.coordinator_starts()
    world.passes(40.0)
    ledger = world.ends()
    # A worker has two CPUs here, an evaluator one.
    truth = 2 * world.existed["worker"] + world.existed["evaluator"]
    assert ledger.cpu_seconds.total == pytest.approx(truth, rel=0.01)
    assert ledger.gpu_seconds.total == 0.0
    assert spent(ledger, "compute") + spent(ledger, "recomputed") == pytest.approx(2 * world.computed, rel=0.01)
    assert spent(ledger, "recomputed") > 0.0
    assert spent(ledger, "evaluation") == pytest.approx(world.existed["evaluator"] / 2, rel=0.15)
    recorded = newest_ledger(world.rundir)
    assert recorded is not None
    assert recorded.cpu_seconds == ledger.cpu_seconds
    assert recorded.time == T0 + world.now


def test_steps_that_are_taken_again_are_recomputed(tmp_path: Path) -> None:
    world = LedgerWorld(tmp_path / "run", workers=1, evaluators=0)
    world.passes(20.0)
    lost = world.step - world.saved
    assert lost >= 5
    world.dies("worker-0")
    world.passes(30.0)
    ledger = world.ends()
    # Of the last lines before a kill, some steps are not written down.
    assert 0.85 * (lost - 5) * 0.1 * 2 - 1e-6 <= spent(ledger, "recomputed") <= 0.85 * lost * 0.1 * 2 + 1e-6


# What is shown


def test_money_is_hours_by_their_price() -> None:
    gpu, cpu = Spent(compute=7200.0, idle=1800.0), Spent(compute=3600.0, evaluation=3600.0)
    ledger = priced(gpu, cpu, Prices(gpu_per_hour=2.0, cpu_per_hour=0.1, currency="EUR"))
    assert ledger.cost == Spent(compute=4.1, idle=1.0, evaluation=0.1)
    told = {name: in_words(amount, written) for name, amount, written in amounts(ledger)}
    assert told["GPU-hours"] == "2.500 · compute 2.000 (80 %) · idle 0.5000 (20 %)"
    assert told["cost"].startswith("5.200 EUR · compute 4.100 EUR (79 %)")
    assert priced(gpu, cpu, None).cost is None
    assert priced(gpu, cpu, Prices(currency="EUR")).cost is None, "nothing has a price"


def test_a_run_without_gpus_shows_none() -> None:
    shown: Iterator[str] = (name for name, _, _ in amounts(priced(Spent(), Spent(compute=1.0), None)))
    assert list(shown) == ["CPU-hours"]
