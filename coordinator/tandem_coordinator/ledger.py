"""The ledger of a run: the seconds of workers and evaluators, by what they were for (docs/decisions/0042-ledger.md).

`WorkerSeconds` counts for how long workers exist, in units of one worker, and puts each second into exactly one of the
purposes of tandem.ledger, or into what is unsettled: its group steps, and what it did stands in the training log a
little later. So the parts and the unsettled rest add up to the whole, whatever events come. `RunLedger` adds
evaluators, what earlier coordinators have counted, and the GPUs and CPUs of each.
"""

from collections.abc import Mapping, Set
from math import inf

from tandem.job import DistributedTrainingJob
from tandem.ledger import PURPOSES, Ledger, Purpose, Spent, priced
from tandem.pod_template import asked_in, cpus
from tandem.protocol import Sync
from tandem.rundir import records
from tandem_coordinator.goodput import OVER, SILENT, STEPPING
from tandem_coordinator.group_state import State
from tandem_coordinator.log_followers import Counted
from tandem_coordinator.run_watcher import Observed
from tandem_coordinator.snapshots import Instant

UNSETTLED = "unsettled"
"""In place of a purpose, until the first rank of the group has logged what it did."""
SETTLE_SECONDS = 3.0
"""After the end of a group, its last lines are read within a second on a disk that answers."""
RECORD_SECONDS = 10.0
"""Between two records."""
MAX_GONE = 1_000
"""Maximum number of disconnected workers to remember, in case they reconnect."""

Worker = tuple[str, str]
"""Replica and incarnation."""


class WorkerSeconds:
    """Counts worker-seconds.

    Args:
        now: seconds of any steady clock, as everywhere here.
        counted_until: what was before that was counted by an earlier coordinator.
        generation: the newest that it formed.
        unsettled: worker-seconds that were unsettled then.
    """

    def __init__(self, now: float, counted_until: float = -inf, generation: int = 0, unsettled: float = 0.0) -> None:
        self._since, self._counted_until = now, counted_until
        self._workers: dict[str, str] = {}
        self._unaged: dict[Worker, float] = {}
        """Workers that have not said how old they are, and since when they are known."""
        self._gone: dict[Worker, float] = {}
        self._members: Set[Worker] = frozenset()
        self._inside = 0
        self._doing, self._generation, self._first = "waiting", generation, generation
        self._spent: dict[Purpose, float] = dict.fromkeys(PURPOSES, 0.0)
        self._unsettled = {generation: unsettled} if unsettled > 0 else {}
        self._debt = max(0.0, -unsettled)
        """Of groups that were seen to step too late, and counted as waiting until then."""
        self._left: dict[int, float] = {}
        """When groups stopped to step, while what they left is not settled."""
        self._told: dict[int, Mapping[Purpose, float]] = {}

    def heard(self, replica: str, incarnation: str, now: float, age: float | None = None) -> None:
        """A worker is there, now at the latest.

        Args:
            age: for how long it has existed, if it says so.
        """
        worker = replica, incarnation
        # A member of the group that an earlier coordinator formed has worked since its last record.
        adopted = self._counted_until > -inf and worker in self._members and self._generation == self._first
        if self._workers.get(replica) != incarnation:
            self._count(now)
            self.gone(replica, now)
            if (left := self._gone.pop(worker, None)) is not None:
                self._add(self._doing if worker in self._members else "waiting", now - left)
            else:
                self._unaged[worker] = self._counted_until if adopted else now
                self._add(UNSETTLED, now - self._unaged[worker])
            self._workers[replica] = incarnation
            self._inside += worker in self._members
        if age is not None and (known := self._unaged.pop(worker, None)) is not None:
            since = max(now - age, self._counted_until)
            if known == self._counted_until:
                self._add(UNSETTLED, known - since)
            else:
                self._add("waiting", max(0.0, known - since))

    def gone(self, replica: str, now: float) -> bool:
        """A worker is not there any more; whether it was. If it comes back, it was there all the time."""
        if (incarnation := self._workers.get(replica)) is None:
            return False
        self._count(now)
        worker = replica, incarnation
        del self._workers[replica]
        self._unaged.pop(worker, None)
        self._inside -= worker in self._members
        self._gone[worker] = now
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        return True

    def look(
        self,
        now: float,
        doing: str,
        generation: int,
        members: Set[Worker],
        told: Mapping[int, Mapping[Purpose, float]],
        sizes: Mapping[int, int],
    ) -> None:
        """What the group is doing from now on. All other workers wait.

        Args:
            doing: a purpose, or UNSETTLED.
            generation: the number of the group.
            members: its workers; none while there is no group.
            told: seconds by generation and purpose that first ranks have written down so far.
            sizes: the workers of each of these generations.
        """
        self._count(now)
        for number, seconds in told.items():
            before = self._told.get(number, {})
            for purpose, total in seconds.items():
                worked = (total - before.get(purpose, 0.0)) * sizes.get(number, max(1, self._inside))
                self._spent[purpose] += worked
                self._unsettled[number] = self._unsettled.get(number, 0.0) - worked
        self._told = dict(told)
        for number in self._unsettled.keys() - {generation if doing == UNSETTLED else None}:
            self._left.setdefault(number, now)
        if doing == UNSETTLED:
            self._left.pop(generation, None)
        for number, at in list(self._left.items()):
            if now - at >= SETTLE_SECONDS:
                self._settle(number)
        if members is not self._members:
            self._members = members
            self._inside = sum(worker in members for worker in self._workers.items())
        self._doing, self._generation = doing, generation

    def close(self, now: float) -> None:
        """Nothing follows here. Once all workers are gone, what nobody has written down was work that did not last."""
        self._count(now)
        for number in [] if self._workers else list(self._unsettled):
            self._settle(number)

    @property
    def settled(self) -> Mapping[Purpose, float]:
        """By purpose. They only grow."""
        return self._spent

    @property
    def unsettled(self) -> float:
        """The rest; negative where first ranks have written down more than their groups were seen to step. Together
        they are the seconds for which workers existed."""
        return sum(self._unsettled.values()) - self._debt

    def _count(self, now: float) -> None:
        elapsed = max(0.0, now - self._since)
        self._since = max(now, self._since)
        self._add(self._doing, elapsed * self._inside)
        self._add("waiting", elapsed * (len(self._workers) - self._inside))

    def _add(self, doing: str, seconds: float) -> None:
        if doing == UNSETTLED:
            self._unsettled[self._generation] = self._unsettled.get(self._generation, 0.0) + seconds
            return
        for purpose in PURPOSES:
            if purpose == doing:
                paid = min(self._debt, seconds) if purpose == "waiting" and seconds > 0 else 0.0
                self._debt -= paid
                self._spent[purpose] += seconds - paid

    def _settle(self, generation: int) -> None:
        self._left.pop(generation, None)
        rest = self._unsettled.pop(generation, 0.0)
        if rest > 0:
            self._spent["idle"] += rest
        else:
            self._debt -= rest


def shown(settled: Mapping[Purpose, float], unsettled: float) -> dict[Purpose, float]:
    """What is settled with what is not: that counts as compute for the time being, and was waiting where it is
    negative. The sum stays."""
    found = dict(settled)
    found["compute"] += max(0.0, unsettled)
    lacking = max(0.0, -unsettled)
    for purpose in ("waiting", "idle", "compute", "recomputed"):
        taken = min(lacking, found[purpose])
        found[purpose] -= taken
        lacking -= taken
    return found


class RunLedger:
    """The ledger of one run.

    Args:
        before: the last record of an earlier coordinator.
        generation: the newest that it formed.
        in_pod: workers are pods, which have what they ask for.
    """

    def __init__(
        self,
        job: DistributedTrainingJob,
        clock: Instant,
        before: records.Accounted | None = None,
        generation: int = 0,
        in_pod: bool = False,
    ) -> None:
        self._prices, self._before = job.spec.prices, before or records.Accounted(time=clock.wall)
        workers, evaluators = job.spec.workers, job.spec.evaluation
        self._processes, self._is_script = workers.processes, job.spec.trainer.command is not None
        self._gpus, self._cpus = self._before.worker_gpus or 0.0, self._before.worker_cpus or 0.0
        self._evaluator_cpus = 1.0
        self._is_known = in_pod
        if in_pod:
            self._gpus, self._cpus = float(workers.gpus), cpus(workers.asked) or 0.0
            asked = cpus(asked_in(evaluators.template, "evaluator")) or cpus(evaluators.resources)
            self._evaluator_cpus = 1.0 if asked is None else asked / evaluators.processes_per_replica
        unsettled = self._before.unsettled or 0.0
        counted_until = -inf if before is None else clock.steady - max(0.0, clock.wall - before.time)
        self._workers = WorkerSeconds(clock.steady, counted_until, generation, unsettled)
        self._base = {
            "gpu": _less(self._before.gpu_seconds, unsettled * (self._before.worker_gpus or 0.0)),
            "cpu": _less(self._before.cpu_seconds, unsettled * (self._before.worker_cpus or 0.0)),
        }
        self._sizes: dict[int, int] = {}
        self._inside: Mapping[Worker, object] = {}
        self._members: Set[Worker] = frozenset()
        self._observed = Observed()
        self._recorded_at = -inf

    def heard(self, sync: Sync, now: float, state: State) -> None:
        """An agent has spoken, and this came of it."""
        if not self._is_known and (sync.gpus is not None or sync.cpus is not None):
            self._gpus, self._cpus = float(sync.gpus or 0), float(sync.cpus or self._processes)
        self._cpus = self._cpus or float(sync.cpus or self._processes)
        self._workers.heard(sync.replica, sync.incarnation, now, sync.age)
        agent = state.agents.get(sync.replica)
        if agent is None or agent.member.incarnation != sync.incarnation:
            # One that leaves, or is told to. If it speaks again, it was there until then.
            self.gone(sync.replica, now)

    def gone(self, replica: str, now: float) -> None:
        """An agent is not there any more."""
        if self._workers.gone(replica, now):
            self._recorded_at = -inf

    def look(self, now: float, state: State, about: str, finishing: bool, observed: Observed) -> None:
        """What the job is about from now on, in the words of tandem_coordinator.goodput.

        Args:
            finishing: all steps are taken, and the code after the loop runs.
        """
        if state.latest is not None:
            self._sizes[state.latest.generation] = len(state.latest.members)
        told = observed.training.by_generation
        for generation in self._sizes.keys() - told.keys() - {state.number}:
            del self._sizes[generation]
        # Members that a coordinator finds after its own restart step on meanwhile.
        adopts = not state.open and state.adopting_until is not None
        doing = UNSETTLED if adopts or about == STEPPING else DOING.get(about, "waiting")
        if finishing or (about == SILENT and self._is_script):
            doing = "compute"
        if (state.open or adopts) and state.inside is not self._inside:
            self._inside, self._members = state.inside, state.inside.keys()
        members = self._members if state.open or adopts else frozenset()
        self._workers.look(now, doing, state.number, members, told, self._sizes)
        self._observed = observed

    def close(self, now: float) -> None:
        """Nothing follows."""
        self._workers.close(now)

    @property
    def ledger(self) -> Ledger:
        """What the run has taken so far."""
        return priced(*self._spent(self._workers.unsettled), self._prices)

    @property
    def settled(self) -> Ledger:
        """The same without what is unsettled. Its amounts only grow."""
        return priced(*self._spent(0.0), self._prices)

    def due(self, clock: Instant) -> records.Accounted | None:
        """The record, if it is time for one."""
        if clock.steady - self._recorded_at < RECORD_SECONDS:
            return None
        self._recorded_at = clock.steady
        return self.record(clock.wall)

    def record(self, time: float) -> records.Accounted:
        """What a coordinator that starts again needs."""
        training = self._observed.training
        return records.Accounted(
            time=time,
            **dict(self.ledger),
            unsettled=round(self._workers.unsettled, 3),
            worker_gpus=self._gpus,
            worker_cpus=self._cpus,
            reached=training.reached,
            offsets={str(generation): float(offset) for generation, offset in training.offsets.items()},
            evaluators_until=self._observed.looked_at,
        )

    def _spent(self, unsettled: float) -> tuple[Spent, Spent]:
        settled, evaluators = self._workers.settled, self._observed.evaluator_seconds
        found = []
        for name, each, of_evaluator in (("gpu", self._gpus, 0.0), ("cpu", self._cpus, self._evaluator_cpus)):
            base = self._base[name]
            workers = {purpose: base[purpose] + each * settled[purpose] for purpose in PURPOSES}
            amounts = shown(workers, each * unsettled)
            for purpose, seconds in evaluators.items():
                amounts[purpose] += of_evaluator * seconds
            found.append(Spent(**{purpose: round(max(0.0, amount), 3) for purpose, amount in amounts.items()}))
        return found[0], found[1]


def counted(before: records.Accounted | None) -> Counted:
    """How far an earlier coordinator has counted the logs."""
    if before is None:
        return Counted()
    offsets = {int(number): int(offset or 0) for number, offset in (before.offsets or {}).items() if number.isdecimal()}
    return Counted(before.reached or 0, offsets, before.evaluators_until or before.time)


DOING = {"idle": "idle", OVER: "idle"}
"""Of what the job is about, what its workers do; otherwise they wait."""


def _less(view: Spent, unsettled: float) -> dict[Purpose, float]:
    """What was settled, of what was shown."""
    found: dict[Purpose, float] = {purpose: getattr(view, purpose) for purpose in PURPOSES}
    found["compute" if unsettled > 0 else "waiting"] -= unsettled
    return found
