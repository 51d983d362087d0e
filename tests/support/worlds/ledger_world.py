"""Workers and evaluators that are born, train and die on a simulated clock, with the logs that they write, and a
coordinator that sees as much of it as a real one: messages, broken connections, and the run directory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.job import DistributedTrainingJob
from tandem.ledger import Ledger
from tandem.protocol import RankReport, Sync
from tandem.rundir import records
from tandem.rundir.durable import Lines
from tandem.rundir.layout import RunDir
from tandem.rundir.ledger import newest_ledger
from tandem_coordinator import membership
from tandem_coordinator.group_state import Disconnected, Event, Open, Rules, State, Synced, Tick
from tandem_coordinator.ledger import RunLedger, counted
from tandem_coordinator.progress import Reports
from tandem_coordinator.run_watcher import Observed, RunDirectory
from tandem_coordinator.snapshots import Instant, about
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
            self.ledger.gone(name, self.now)
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
        self.state = membership.start(
            Rules.of(self.job.spec), len(self.workers) or 2, self.now, number=self.number, latest=latest
        )
        self.reports, self.observed = Reports(), Observed()
        self.ledger = RunLedger(self.job, self.clock, before, self.number)
        self.directory = RunDirectory(self.rundir, self.job.spec.evaluation, counted=counted(before))
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
        self.reports.take(name, sync.generation, sync.ranks, self.now)
        self.tell(Synced(sync))
        self.ledger.heard(sync, self.now, self.state)
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
            self.ledger.gone(name, self.now)
        for action in actions:
            if isinstance(action, Open):
                self.latest, self.number = action.membership, action.membership.generation
                self.reports.begin(self.number)
        if self.state.open != before.open or self.state.number != before.number:
            self._account()

    def _look(self) -> None:
        self.looked, self.observed = self.now, self.directory.look(self.clock.wall)
        self._account()

    def _account(self) -> None:
        assert self.state is not None
        self.ledger.look(self.now, self.state, about(self.state, self.reports, self.observed), False, self.observed)

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
        sign = records.Usage(time=T0 + self.now, cpu_seconds=0.0, age=age, state=evaluator.state)
        self._write(f"evaluator-{name}", sign)

    def _write(self, log: str, record: records.Record) -> None:
        lines = Lines(self.rundir.log / f"{log}.jsonl")
        lines.append(record.line())
        lines.close()
