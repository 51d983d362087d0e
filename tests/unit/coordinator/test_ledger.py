"""Whose seconds the ledger counts, and what they were for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.formatting import number, share
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir import records
from tandem.rundir.durable import Lines
from tandem.rundir.layout import RunDir
from tandem.rundir.ledger import newest_ledger
from tandem.wire.ledger import (
    PURPOSES,
    Ledger,
    Prices,
    Purpose,
    UsageByPurpose,
    format_usage,
    ledger_rows,
    priced_ledger,
)
from tandem.wire.protocol import RankReport, Sync
from tandem_cli.local.run_view import job_summary
from tandem_cli.report import clock
from tandem_cli.report.comparison import outcome, rows
from tandem_cli.report.page import page
from tandem_cli.report.reading import read
from tandem_cli.report.summary import summarize
from tandem_coordinator import membership
from tandem_coordinator.goodput import ENDED, SILENT
from tandem_coordinator.group_state import Disconnected, Event, Open, Rules, State, Synced, Tick
from tandem_coordinator.ledger import UNSETTLED, RunLedger, WorkerSeconds, displayed_amounts, ledger_position
from tandem_coordinator.log_followers import EvaluatorFollower, LedgerPosition, TrainingLogs
from tandem_coordinator.progress import Reports
from tandem_coordinator.run_watcher import Observed, RunDirectory
from tandem_coordinator.snapshots import Instant, activity
from tandem_coordinator.state_store import RecordedState
from tests.support import manifests

T0 = 1_780_000_000.0
DT = 0.1
IMPORT_SECONDS, RESTORE_SECONDS, AGAIN_SECONDS = 4.0, 1.5, 0.5
STEP_SECONDS, STEPS_SAVED = 0.1, 50


@dataclass
class Worker:
    """One agent process and its rank."""

    incarnation: str
    born: float
    state: str = "joining"
    generation: int | None = None
    said: float = float("-inf")
    """When it spoke last."""
    since: float = 0.0
    """When its rank was started."""


@dataclass
class Evaluator:
    """One evaluator process."""

    born: float
    said: float = float("-inf")
    state: str = "starting"


class LedgerWorld:
    """One job. `passes` lets time go by; the rest happens at once."""

    def __init__(self, path: Path, workers: int = 2, evaluators: int = 1, **spec: Any) -> None:
        self.job: DistributedTrainingJob = manifests.job(workers={"replicas": workers}, **spec)
        self.rundir: RunDir = manifests.run_directory(path, self.job)
        self.now, self.born = 0.0, 0
        self.workers: dict[str, Worker] = {}
        self.evaluators: dict[str, Evaluator] = {}
        self.due: list[tuple[float, str]] = []
        """Processes that start again, and when."""
        self.evaluator_gpus: float | None = None
        """GPUs of an evaluator process."""
        self.existed = {"worker": 0.0, "evaluator": 0.0}
        """Seconds of processes, as somebody counts who sees everything."""
        self.computed = 0.0
        """Worker-seconds of compute that were written down."""
        self.step = self.saved = self.window = 0
        self.trains = 0
        self.state: State | None = None
        self.number = 0
        self.coordinator_starts()
        for name in [*(f"worker-{i}" for i in range(workers)), *(f"evaluator-{i}" for i in range(evaluators))]:
            self.starts(name)

    # What happens

    def starts(self, name: str) -> None:
        self.born += 1
        if name.startswith("worker"):
            self.workers[name] = Worker(f"i{self.born}", self.now)
        else:
            self.evaluators[name] = Evaluator(self.now)

    def dies(self, name: str) -> None:
        """It is killed, and starts again a little later."""
        worker = self.workers.pop(name, None)
        self.evaluators.pop(name, None)
        self.due.append((self.now + AGAIN_SECONDS, name))
        if worker is not None and self.state is not None:
            # Its connection breaks.
            self.ledger.remove_agent(name, self.now)
            self.tell(Disconnected(name, worker.incarnation))

    def coordinator_dies(self) -> None:
        self.state = None

    def coordinator_stops(self) -> None:
        """It leaves in good order while the group trains on."""
        self.ledger.close(self.now)
        self._write("coordinator", self.ledger.record(self.clock.wall))
        self.state = None

    def coordinator_starts(self) -> None:
        before = newest_ledger(self.rundir)
        latest = self.latest if self.number else None
        self.state = membership.initial_state(
            Rules.from_spec(self.job.spec),
            len(self.workers) or 2,
            self.now,
            RecordedState(generation=self.number, membership=latest),
        )
        self.reports, self.observed = Reports(), Observed()
        adopts = self.state.adopting_until is not None
        self.ledger = RunLedger(self.job, self.clock, before, self.number, adopts=adopts)
        self.directory = RunDirectory(self.rundir, self.job.spec.evaluation, ledger_position=ledger_position(before))
        self.looked = float("-inf")
        self._account()

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until - 1e-9:
            self._tick()

    def ends(self) -> Ledger:
        """All processes leave, and the coordinator writes its last record."""
        for name, worker in list(self.workers.items()):
            self._talk(name, worker, "leaving")
            del self.workers[name]
        for name in list(self.evaluators):
            self._sign(name)
            del self.evaluators[name]
        self._look()
        self.ledger.close(self.now)
        self._write("coordinator", self.ledger.record(self.clock.wall))
        return self.ledger.ledger

    @property
    def clock(self) -> Instant:
        return Instant(T0 + self.now, self.now)

    # How

    def _tick(self) -> None:
        self.now += DT
        self.existed["worker"] += DT * len(self.workers)
        self.existed["evaluator"] += DT * len(self.evaluators)
        for at, name in [one for one in self.due if one[0] <= self.now]:
            self.due.remove((at, name))
            self.starts(name)
        self._train()
        for name, evaluator in self.evaluators.items():
            changed = evaluator.state != self._doing or self._doing == "evaluating"
            if self.now - evaluator.born > IMPORT_SECONDS and self.now - evaluator.said >= (1.0 if changed else 5.0):
                self._sign(name)
        if self.state is None:
            return
        for name, worker in self.workers.items():
            if self.now - worker.born > IMPORT_SECONDS and self.now - worker.said >= 1.0:
                self._talk(name, worker, worker.state)
        self.tell(Tick(training=self.trains > 0, can_save=False))
        if self.now - self.looked >= 0.5:
            self._look()
            if (record := self.ledger.due(self.clock)) is not None:
                self._write("coordinator", record)

    def _talk(self, name: str, worker: Worker, state: str) -> None:
        assert self.state is not None
        new = worker.said == float("-inf")
        worker.said = self.now
        trains = worker.state == "running" and self.trains == worker.generation
        sync = Sync(
            replica=name,
            incarnation=worker.incarnation,
            address="10.0.0.1",
            port=4000,
            processes=1,
            state=state,  # type: ignore[arg-type]
            generation=worker.generation,
            membership=self.latest if state == "running" and worker.generation == self.number else None,
            # The first message of a connection has only the fields that any version reads.
            age=None if new else self.now - worker.born,
            cpus=2.0,
            ranks=[RankReport(rank=0, step=self.step)] if trains else [],
        )
        self.reports.record(name, sync.generation, sync.ranks, self.now)
        self.tell(Synced(sync))
        self.ledger.record_sync(sync, self.now, self.state)
        told = membership.answer(self.state, sync, recorded=self.number)
        if told.order == "run" and told.membership is not None:
            worker.state, worker.generation, worker.since = "running", told.membership.generation, self.now
        elif told.order == "rejoin":
            worker.state = "joining"

    def tell(self, event: Event) -> None:
        assert self.state is not None
        before = self.state
        self.state, actions = membership.step(before, event, self.now)
        for name in before.agents.keys() - self.state.agents.keys():
            self.ledger.remove_agent(name, self.now)
        for action in actions:
            if isinstance(action, Open):
                self.latest, self.number = action.membership, action.membership.generation
                self.reports.begin(self.number)
        if self.state.open != before.open or self.state.number != before.number:
            self._account()

    def _look(self) -> None:
        self.looked, self.observed = self.now, self.directory.poll(self.clock.wall)
        self._account()

    def _account(self) -> None:
        assert self.state is not None
        self.ledger.update(
            self.now, self.state, activity(self.state, self.reports, self.observed), False, self.observed
        )

    def _train(self) -> None:
        """The group makes steps as long as all of its members are there, whatever becomes of the coordinator."""
        inside = [one for one in self.workers.values() if one.state == "running" and one.generation == self.number]
        whole = self.number > 0 and len(inside) == len(self.latest.members)
        if not whole or self.now - max(one.since for one in inside) < RESTORE_SECONDS:
            self.trains = 0
            return
        log = f"train-g{self.number:06d}"
        if self.trains != self.number:
            self.trains, self.step, self.window = self.number, self.saved, 0
            self._write(log, records.Start(time=T0 + self.now, step=self.step))
        self.step, self.window = self.step + 1, self.window + 1
        self.saved = self.step if self.step % STEPS_SAVED == 0 else self.saved
        if self.window == 5:
            seconds, self.window = 5 * STEP_SECONDS, 0
            self.computed += 0.85 * seconds * len(inside)
            phases = {"data": 0.1 * seconds, "compute": 0.85 * seconds, "checkpoint": 0.05 * seconds}
            self._write(
                log,
                records.Rate(
                    time=T0 + self.now, step=self.step, steps=5, step_seconds=STEP_SECONDS, phases=dict(phases)
                ),
            )

    @property
    def _doing(self) -> str:
        """What evaluators do: they work half of the time."""
        return "evaluating" if int(self.now / 10) % 2 else "idle"

    def _sign(self, name: str) -> None:
        evaluator = self.evaluators[name]
        evaluator.said, evaluator.state = self.now, self._doing
        age = self.now - evaluator.born
        sign = records.Usage(
            time=T0 + self.now, cpu_seconds=0.0, age=age, state=evaluator.state, gpus=self.evaluator_gpus
        )
        self._write(f"evaluator-{name}", sign)

    def _write(self, log: str, record: records.Record) -> None:
        lines = Lines(self.rundir.log / f"{log}.jsonl")
        lines.append(record.line())
        lines.close()


# Worker-seconds

ONE, TWO = ("worker-0", "a"), ("worker-1", "b")


def sum_of(seconds: WorkerSeconds) -> float:
    return sum(seconds.settled_seconds.values()) + seconds.unsettled


def test_members_do_what_the_group_does_and_all_others_wait() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.add_worker(*ONE, 0.0)
    seconds.add_worker(*TWO, 0.0)
    seconds.update(5.0, UNSETTLED, 1, {ONE}, {}, {1: 1})
    seconds.update(15.0, "waiting", 1, frozenset(), {1: {"compute": 8.0, "waiting": 1.5}}, {1: 1})
    assert seconds.settled_seconds["waiting"] == 10.0 + 10.0 + 1.5
    assert seconds.settled_seconds["compute"] == 8.0
    assert seconds.unsettled == 0.5
    seconds.update(19.0, "waiting", 1, frozenset(), {}, {})
    assert seconds.settled_seconds["idle"] == 0.5, "nobody has written it down since"


def test_a_member_that_is_gone_does_nothing_any_more() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.add_worker(*ONE, 0.0)
    seconds.add_worker(*TWO, 0.0)
    group = {ONE, TWO}
    seconds.update(0.0, UNSETTLED, 1, group, {}, {})
    seconds.remove_worker("worker-1", 5.0)
    seconds.update(10.0, UNSETTLED, 1, group, {}, {})
    assert seconds.unsettled == 15.0
    assert sum(seconds.settled_seconds.values()) == 0.0


def test_lines_that_come_after_the_end_of_their_group_are_of_that_group() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.add_worker(*ONE, 0.0)
    seconds.update(0.0, UNSETTLED, 1, {ONE}, {}, {1: 1})
    seconds.update(10.0, UNSETTLED, 2, {ONE, TWO}, {1: {"compute": 9.0}}, {1: 1, 2: 2})
    seconds.update(10.5, UNSETTLED, 2, {ONE, TWO}, {1: {"compute": 10.0}}, {1: 1, 2: 2})
    seconds.update(20.0, UNSETTLED, 2, {ONE, TWO}, {1: {"compute": 10.0}}, {1: 1, 2: 2})
    assert seconds.settled_seconds["idle"] == 0.0


def test_a_worker_has_waited_since_its_process_began() -> None:
    seconds = WorkerSeconds(100.0)
    seconds.add_worker(*ONE, 104.0)
    seconds.add_worker(*ONE, 105.0, age=5.0)
    seconds.add_worker(*ONE, 106.0, age=6.0)
    seconds.close(106.0)
    assert seconds.settled_seconds["waiting"] == 6.0


def test_a_worker_that_comes_back_was_there_all_the_time_and_another_one_of_its_name_was_not() -> None:
    seconds = WorkerSeconds(0.0)
    seconds.add_worker(*ONE, 0.0, age=0.0)
    seconds.remove_worker("worker-0", 10.0)
    seconds.add_worker(*ONE, 12.0, age=12.0)
    seconds.remove_worker("worker-0", 20.0)
    seconds.add_worker("worker-0", "another", 30.0, age=4.0)
    seconds.close(40.0)
    assert sum_of(seconds) == 20.0 + 14.0


def test_after_a_restart_a_member_has_worked_since_the_last_record() -> None:
    seconds = WorkerSeconds(1000.0, counted_until=990.0, generation=3, unsettled=2.0)
    seconds.update(1000.0, UNSETTLED, 3, {ONE}, {}, {3: 1})
    seconds.add_worker(*ONE, 1001.0)
    seconds.add_worker(*TWO, 1002.0, age=5.0)
    assert seconds.unsettled == 2.0 + 11.0 + 1.0
    assert seconds.settled_seconds["waiting"] == 5.0
    seconds.add_worker(*ONE, 1003.0, age=10.0)
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
    before = dict(seconds.settled_seconds)
    for count, (kind, index, life, later) in enumerate(events):
        now += later
        name, incarnation = f"worker-{index}", f"life-{life}"
        if kind == "gone":
            seconds.remove_worker(name, now)
            truth.gone(name, now)
        elif kind in ("heard", "aged"):
            age = told[count % len(told)] if kind == "aged" else None
            seconds.add_worker(name, incarnation, now, age)
            truth.heard(name, incarnation, now, age)
        elif kind == "look":
            generation = 1 + count // 7
            for purpose in ("compute", "recomputed", "waiting"):
                of = written.setdefault(generation - life % 2, {})
                of[purpose] = of.get(purpose, 0.0) + told[(count + index) % len(told)]
            members = frozenset((f"worker-{one}", f"life-{life}") for one in range(index))
            sizes = {generation: index + 1}
            seconds.update(now, doings[count % len(doings)], generation, members, written, sizes)
        else:
            seconds.close(now)
        seconds.remove_worker("nobody", now)
        assert all(value >= before[purpose] - 1e-6 for purpose, value in seconds.settled_seconds.items()), (
            "counters grow"
        )
        before = dict(seconds.settled_seconds)
    seconds.close(now)
    assert sum_of(seconds) == pytest.approx(truth.seconds(now) + unsettled, abs=1e-6)
    assert sum(displayed_amounts(seconds.settled_seconds, seconds.unsettled).values()) == pytest.approx(
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


@pytest.mark.parametrize("gpus", [None, 0.5])
def test_a_run_with_kills_and_restarts_of_its_coordinator_adds_up_within_one_percent(
    tmp_path: Path, gpus: float | None
) -> None:
    world = LedgerWorld(tmp_path / "run", workers=3, evaluators=2)
    world.evaluator_gpus = gpus
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
    world.passes(20.3)
    world.coordinator_stops()
    world.passes(6.0)
    world.coordinator_starts()
    world.passes(20.0)
    ledger = world.ends()
    # A worker has two CPUs here, an evaluator one.
    truth = 2 * world.existed["worker"] + world.existed["evaluator"]
    assert ledger.cpu_seconds.total == pytest.approx(truth, rel=0.01)
    # It has half of a GPU, as its own records say.
    assert ledger.gpu_seconds.total == pytest.approx((gpus or 0.0) * world.existed["evaluator"], rel=0.03)
    assert (ledger.gpu_seconds.evaluation > 0.0) == (gpus is not None)
    assert spent(ledger, "compute") + spent(ledger, "recomputed") == pytest.approx(2 * world.computed, rel=0.01)
    assert spent(ledger, "recomputed") > 0.0
    assert spent(ledger, "evaluation") == pytest.approx(world.existed["evaluator"] / 2, rel=0.15)
    # The wall time has one cause at each moment, also while the coordinator was away.
    assert ledger.wall.total == pytest.approx(world.now, abs=0.05)
    assert ledger.wall.recomputed * 2 * 3 == pytest.approx(spent(ledger, "recomputed"), rel=0.35)
    assert ledger.wall.restart > 4 * (IMPORT_SECONDS + RESTORE_SECONDS)
    recorded = newest_ledger(world.rundir)
    assert recorded.wall == ledger.wall
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
    wall = ledger.wall
    assert wall.recomputed == pytest.approx(spent(ledger, "recomputed") / 2, abs=0.001)
    assert wall.total == pytest.approx(50.0, abs=0.05)
    assert (wall.setbacks, wall.unreported, wall.other) == (1, 0.0, 0.0)
    # Before the first report there is no telling a process that starts from a queue but by its age.
    assert (wall.queue, wall.start) == (pytest.approx(0.0, abs=0.2), pytest.approx(IMPORT_SECONDS + 2.5, abs=1.5))


def test_status_and_report_of_a_run_that_is_over_show_the_last_record(tmp_path: Path) -> None:
    world = LedgerWorld(tmp_path / "run", prices={"cpuPerHour": 36.0, "currency": "EUR"})
    world.passes(12.0)
    ledger = world.ends()
    assert ledger.cost.total == pytest.approx(0.01 * ledger.cpu_seconds.total)
    assert job_summary(world.rundir.path).status.ledger == ledger
    run = read(world.rundir.path)
    assert run.ledger == ledger
    ticks = clock.make_clock(run.marks)
    drawn = page(run, summarize(run, ticks), ticks, [], "run", "1")
    (table,) = [part for part in drawn.split("<section ") if "<h2>Hours and cost" in part]
    assert re.findall(r"<tr><td>(\w+)</td>", table) == ["Compute", "Waiting", "Idle", "Evaluation", "Total"]
    assert f"{number(ledger.cost.total)} EUR" in table
    (table,) = [part for part in drawn.split("<section ") if "<h2>Time since the submission" in part]
    names = re.findall(r"<tr[^>]*><td>(\w+)</td>", table)
    assert (names[0], names[-2:]) == ("Training", ["Total", "Evaluators"])
    assert {"Start", "Data", "Checkpoints"} <= set(names)
    assert "not measured" in table
    found = outcome(run, "run")
    assert ("cost", (f"{number(ledger.cost.total)} EUR",)) in rows([run], [found])
    assert ("ETTR", (share(ledger.wall.ettr),)) in rows([run], [found])


def test_a_script_that_says_nothing_of_its_steps_computes_and_a_task_waits_until_it_steps() -> None:
    tasks = {"compute": {"command": ["train.py"]}, "waiting": {"task": "image-classification"}}
    for purpose, trainer in tasks.items():
        job = manifests.job(trainer=trainer)
        ledger, said = RunLedger(job, Instant(T0, 0.0)), sync("a", age=0.0, cpus=1.0)
        state = membership.step(membership.initial_state(Rules.from_spec(job.spec), 1, 0.0), Synced(said), 0.0)[0]
        member = {("worker-0", "a"): said.member}
        ledger.record_sync(said, 0.0, state)
        ledger.update(0.0, replace(state, open=True, members=member), SILENT, False, Observed())
        ledger.update(10.0, state, ENDED, False, Observed())
        assert spent(ledger.ledger, purpose) == 10.0  # type: ignore[arg-type]


def sync(incarnation: str, **more: Any) -> Sync:
    fields = {"address": "10.0.0.1", "port": 4000, "processes": 2, "state": "joining"}
    return Sync.model_validate({"replica": "worker-0", "incarnation": incarnation, **fields, **more})


@pytest.mark.parametrize(
    ("resources", "gpus", "cpus"),
    [
        ({"requests": {"nvidia.com/gpu": 2, "cpu": "1500m"}, "limits": {"cpu": 8}}, 2.0, 1.5),
        ({"limits": {"cpu": 4}}, 0.0, 4.0),
        ({}, 0.0, 6.0),
    ],
)
def test_a_worker_in_a_pod_has_what_the_pod_asks_for_and_otherwise_what_its_agent_says(
    resources: dict[str, Any], gpus: float, cpus: float
) -> None:
    job = manifests.job(workers={"processesPerReplica": 2, "resources": resources})
    for in_pod, expected in ((True, (10.0 * gpus, 10.0 * cpus)), (False, (10.0, 60.0))):
        ledger = RunLedger(job, Instant(T0, 0.0), in_pod=in_pod)
        state = membership.initial_state(Rules.from_spec(job.spec), 1, 0.0)
        said = sync("a", age=10.0, cpus=6.0, gpus=1)
        ledger.record_sync(said, 0.0, membership.step(state, Synced(said), 0.0)[0])
        found = ledger.ledger
        assert (found.gpu_seconds.waiting, found.cpu_seconds.waiting) == expected


# Logs


def logged(path: Path, *lines: records.Record) -> None:
    log = Lines(path)
    log.append(*(line.line() for line in lines))
    log.close()


def rate(step: int, steps: int, compute: float) -> records.Rate:
    return records.Rate(time=T0, step=step, steps=steps, step_seconds=0.1, phases={"compute": compute, "pause": 1.0})


def test_a_rate_of_which_some_steps_were_taken_before_is_divided(tmp_path: Path) -> None:
    logs = TrainingLogs(tmp_path)
    logged(tmp_path / "train-g000001.jsonl", rate(100, 100, 10.0))
    logged(tmp_path / "train-g000002.jsonl", rate(110, 40, 4.0))
    found = logs.follow(sorted(tmp_path.iterdir()))
    assert found.reached == 110
    assert found.by_generation[1] == {"compute": 11.0, "recomputed": 0.0, "waiting": 0.0}
    assert found.by_generation[2] == {"compute": 2.0, "recomputed": 3.0, "waiting": 0.0}


def test_what_was_written_while_the_coordinator_was_away_counts_and_what_it_had_counted_does_not(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "train-g000001.jsonl", tmp_path / "train-g000002.jsonl"
    logs = TrainingLogs(tmp_path)
    logged(first, rate(100, 100, 10.0))
    before = logs.follow([first])
    logged(first, rate(150, 50, 5.0))
    logged(second, rate(200, 50, 6.0))
    again = TrainingLogs(tmp_path, LedgerPosition(before.reached, before.offsets))
    logged(second, rate(210, 10, 1.0))
    found = again.follow([first, second])
    assert found.by_generation[1]["compute"] == 5.0 + 1.0
    assert found.by_generation[2]["compute"] == 6.0 + 1.0 + 1.0 + 1.0
    assert found.steps == 10, "Prometheus' counters begin with the process"


def sign(at: float, age: float, cpu: float, state: str, process: str = "a") -> records.Usage:
    return records.Usage(time=T0 + at, age=age, cpu_seconds=cpu, state=state, process=process)


def test_an_evaluator_existed_from_its_birth_to_its_last_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "evaluator-0.jsonl"
    logged(
        path,
        sign(4.0, 4.0, 1.0, "starting"),
        sign(9.0, 9.0, 2.0, "idle"),
        records.Evaluated(time=T0 + 13.0, checkpoint="step-000000001", seconds=1.5),
        sign(14.0, 14.0, 3.0, "evaluating"),
        sign(20.0, 20.0, 9.0, "idle"),
        # Another process, which was born 2 s later, and is older now than that one became.
        sign(43.0, 21.0, 9.5, "starting", process="b"),
    )
    log = EvaluatorFollower(path)
    log.follow(T0)
    assert log.seconds == {"waiting": 9.0 + 21.0, "idle": 3.5 + 2.0, "evaluation": 1.5 + 6.0}
    later = EvaluatorFollower(path, counted_until=T0 + 14.5)
    later.follow(T0)
    assert later.seconds == {"waiting": 21.0, "idle": 2.0, "evaluation": 6.0}


def test_an_evaluator_whose_programs_processor_time_is_gone_with_them_is_still_the_same(tmp_path: Path) -> None:
    """Counting it as another one would add its whole age again, with each program that ends."""
    path = tmp_path / "evaluator-0.jsonl"
    logged(path, *(sign(float(at), float(at), 5.0 - at % 2, "evaluating") for at in range(1, 90)))
    log = EvaluatorFollower(path)
    log.follow(T0)
    assert log.seconds == {"waiting": 1.0, "idle": 0.0, "evaluation": 88.0}


# What is shown


def test_money_is_hours_by_their_price() -> None:
    gpu, cpu = UsageByPurpose(compute=7200.0, idle=1800.0), UsageByPurpose(compute=3600.0, evaluation=3600.0)
    ledger = priced_ledger(gpu, cpu, Prices(gpu_per_hour=2.0, cpu_per_hour=0.1, currency="EUR"))
    assert ledger.cost == UsageByPurpose(compute=4.1, idle=1.0, evaluation=0.1)
    told = {name: format_usage(amount, written) for name, amount, written in ledger_rows(ledger)}
    assert told["GPU-hours"] == "2.500 · compute 2.000 (80 %) · idle 0.5000 (20 %)"
    assert told["cost"].startswith("5.200 EUR · compute 4.100 EUR (79 %)")
    assert priced_ledger(gpu, cpu, None).cost is None
    assert priced_ledger(gpu, cpu, Prices(currency="EUR")).cost is None, "nothing has a price"


def test_a_run_without_gpus_shows_none() -> None:
    displayed_amounts: Iterator[str] = (
        name for name, _, _ in ledger_rows(priced_ledger(UsageByPurpose(), UsageByPurpose(compute=1.0), None))
    )
    assert list(displayed_amounts) == ["CPU-hours"]
