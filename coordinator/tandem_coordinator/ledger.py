"""The ledger of a run: the seconds of workers and evaluators, by purpose (docs/decisions/0042-ledger.md).

`WorkerSeconds` counts for how long workers exist, in units of one worker, and puts each second into exactly one of the
purposes of tandem.wire.ledger, or into the unsettled ones: their group steps, and the training log says a little later
what it did. So the parts and the unsettled rest add up to the whole, whatever events come. `RunLedger` adds evaluators,
what earlier coordinators have counted, and the GPUs and CPUs of each.
"""

from collections.abc import Mapping, Set
from math import inf

from tandem.formatting import parse_rfc3339
from tandem.job.pod_template import container_resources, cpus
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import SUBMITTED_ANNOTATION
from tandem.rundir import records
from tandem.wire.ledger import PURPOSES, Ledger, Purpose, UsageByPurpose, priced_ledger
from tandem.wire.protocol import Sync
from tandem.wire.save_interval import interval_advice
from tandem.wire.wall_time import Cause, WallTime
from tandem_coordinator.goodput import ENDED, SETTLE_SECONDS, SILENT, STEPPING, Goodput
from tandem_coordinator.group_state import State
from tandem_coordinator.log_followers import LedgerPosition
from tandem_coordinator.run_watcher import Observed
from tandem_coordinator.snapshots import Instant

UNSETTLED = "unsettled"
"""Placeholder for a purpose, until the first rank of the group has logged its work."""
RECORD_SECONDS = 10.0
"""Time between two records, in seconds."""
MAX_GONE = 1_000
"""Maximum number of disconnected workers to remember, in case they reconnect."""

Worker = tuple[str, str]
"""A worker's replica and incarnation."""


class WorkerSeconds:
    """A counter of worker-seconds.

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
        """Workers that have not reported their age, and since when they are known."""
        self._removed: dict[Worker, float] = {}
        self._members: Set[Worker] = frozenset()
        self._inside = 0
        self._purpose, self._generation, self._first = "waiting", generation, generation
        self._seconds: dict[Purpose, float] = dict.fromkeys(PURPOSES, 0.0)
        self._unsettled = {generation: unsettled} if unsettled > 0 else {}
        self._debt = max(0.0, -unsettled)
        """Worker-seconds of groups that were seen to step too late, and counted as waiting until then."""
        self._stopped_at: dict[int, float] = {}
        """Times at which groups stopped stepping, by generation, until their time is settled."""
        self._logged: dict[int, Mapping[Purpose, float]] = {}

    def add_worker(self, replica: str, incarnation: str, now: float, age: float | None = None) -> None:
        """Add a worker, which exists now at the latest.

        Args:
            age: its age in seconds, if it reports one.
        """
        worker = replica, incarnation
        # A member of the group that an earlier coordinator formed has worked since its last record.
        is_adopted = self._counted_until > -inf and worker in self._members and self._generation == self._first
        if self._workers.get(replica) != incarnation:
            self._count(now)
            self.remove_worker(replica, now)
            if (left_at := self._removed.pop(worker, None)) is not None:
                self._add(self._purpose if worker in self._members else "waiting", now - left_at)
            else:
                self._unaged[worker] = self._counted_until if is_adopted else now
                self._add(UNSETTLED, now - self._unaged[worker])
            self._workers[replica] = incarnation
            self._inside += worker in self._members
        if age is not None and (known_since := self._unaged.pop(worker, None)) is not None:
            since = max(now - age, self._counted_until)
            if known_since == self._counted_until:
                self._add(UNSETTLED, known_since - since)
            else:
                self._add("waiting", max(0.0, known_since - since))

    def remove_worker(self, replica: str, now: float) -> bool:
        """Remove a worker; returns whether it existed. If it comes back, it counts as having existed all the time."""
        if (incarnation := self._workers.get(replica)) is None:
            return False
        self._count(now)
        worker = replica, incarnation
        del self._workers[replica]
        self._unaged.pop(worker, None)
        self._inside -= worker in self._members
        self._removed[worker] = now
        if len(self._removed) > MAX_GONE:
            del self._removed[next(iter(self._removed))]
        return True

    def update(
        self,
        now: float,
        purpose: str,
        generation: int,
        members: Set[Worker],
        logged: Mapping[int, Mapping[Purpose, float]],
        sizes: Mapping[int, int],
    ) -> None:
        """Set the purpose of the group's time from now on. All other workers wait.

        Args:
            purpose: a purpose, or UNSETTLED.
            generation: the number of the group.
            members: its workers; none while there is no group.
            logged: seconds by generation and purpose that first ranks have written down so far.
            sizes: the workers of each of these generations.
        """
        self._count(now)
        for number, seconds in logged.items():
            before = self._logged.get(number, {})
            for name, total in seconds.items():
                worked = (total - before.get(name, 0.0)) * sizes.get(number, max(1, self._inside))
                self._seconds[name] += worked
                self._unsettled[number] = self._unsettled.get(number, 0.0) - worked
        self._logged = dict(logged)
        for number in self._unsettled.keys() - {generation if purpose == UNSETTLED else None}:
            self._stopped_at.setdefault(number, now)
        if purpose == UNSETTLED:
            self._stopped_at.pop(generation, None)
        for number, since in list(self._stopped_at.items()):
            if now - since >= SETTLE_SECONDS:
                self._settle(number)
        if members is not self._members:
            self._members = members
            self._inside = sum(worker in members for worker in self._workers.items())
        self._purpose, self._generation = purpose, generation

    def close(self, now: float) -> None:
        """Settle what remains. Once all workers are gone, time that nobody has logged was work that did not last."""
        self._count(now)
        for number in [] if self._workers else list(self._unsettled):
            self._settle(number)

    @property
    def settled_seconds(self) -> Mapping[Purpose, float]:
        """Settled worker-seconds by purpose. They only grow."""
        return self._seconds

    @property
    def unsettled(self) -> float:
        """Unsettled worker-seconds; negative where first ranks have logged more than their groups were seen to step.
        Together with the settled ones they are the seconds for which workers existed."""
        return sum(self._unsettled.values()) - self._debt

    def _count(self, now: float) -> None:
        elapsed = max(0.0, now - self._since)
        self._since = max(now, self._since)
        self._add(self._purpose, elapsed * self._inside)
        self._add("waiting", elapsed * (len(self._workers) - self._inside))

    def _add(self, purpose: str, seconds: float) -> None:
        if purpose == UNSETTLED:
            self._unsettled[self._generation] = self._unsettled.get(self._generation, 0.0) + seconds
            return
        for name in PURPOSES:
            if name == purpose:
                paid = min(self._debt, seconds) if name == "waiting" and seconds > 0 else 0.0
                self._debt -= paid
                self._seconds[name] += seconds - paid

    def _settle(self, generation: int) -> None:
        self._stopped_at.pop(generation, None)
        remainder = self._unsettled.pop(generation, 0.0)
        if remainder > 0:
            self._seconds["idle"] += remainder
        else:
            self._debt -= remainder


def displayed_amounts(settled_amounts: Mapping[Purpose, float], unsettled: float) -> dict[Purpose, float]:
    """Combine settled and unsettled amounts: unsettled ones count as compute for the time being, and were waiting where
    they are negative. The sum stays the same."""
    amounts = dict(settled_amounts)
    amounts["compute"] += max(0.0, unsettled)
    missing = max(0.0, -unsettled)
    for purpose in ("waiting", "idle", "compute", "recomputed"):
        deducted = min(missing, amounts[purpose])
        amounts[purpose] -= deducted
        missing -= deducted
    return amounts


class RunLedger:
    """The ledger of one run.

    Args:
        before: the last record of an earlier coordinator.
        generation: the newest that it formed.
        in_pod: workers are pods, which have what they ask for.
        adopts: a group of an earlier coordinator may step.
    """

    def __init__(
        self,
        job: DistributedTrainingJob,
        clock: Instant,
        before: records.LedgerRecord | None = None,
        generation: int = 0,
        in_pod: bool = False,
        adopts: bool = False,
    ) -> None:
        self._job = job
        self._prices, self._before = job.spec.prices, before or records.LedgerRecord(time=clock.wall)
        workers, evaluators = job.spec.workers, job.spec.evaluation
        self._processes, self._is_script = workers.processes, job.spec.trainer.command is not None
        self._gpus, self._cpus = self._before.worker_gpus or 0.0, self._before.worker_cpus or 0.0
        self._evaluator_cpus = 1.0
        self._is_known = in_pod
        if in_pod:
            self._gpus, self._cpus = float(workers.gpus), cpus(workers.asked) or 0.0
            requested = cpus(container_resources(evaluators.template, "evaluator")) or cpus(evaluators.resources)
            self._evaluator_cpus = 1.0 if requested is None else requested / evaluators.processes_per_replica
        unsettled = self._before.unsettled or 0.0
        counted_until = -inf if before is None else clock.steady - max(0.0, clock.wall - before.time)
        self._workers = WorkerSeconds(clock.steady, counted_until, generation, unsettled)
        self._base = {
            "gpu": _without_unsettled(self._before.gpu_seconds, unsettled * (self._before.worker_gpus or 0.0)),
            "cpu": _without_unsettled(self._before.cpu_seconds, unsettled * (self._before.worker_cpus or 0.0)),
        }
        wall = self._before.wall or WallTime()
        self._saves, self._setbacks = wall.saves, wall.setbacks
        submitted_at = parse_rfc3339(job.metadata.annotations.get(SUBMITTED_ANNOTATION)) or clock.wall
        self.goodput = Goodput(
            clock.steady,
            self._before.wall,
            self._before.wall_unsettled or 0.0,
            max(0.0, clock.wall - (submitted_at if before is None else before.time)),
            adopts,
        )
        """Wall time by cause and phase."""
        self._sizes: dict[int, int] = {}
        self._inside: Mapping[Worker, object] = {}
        self._members: Set[Worker] = frozenset()
        self._observed = Observed()
        self._recorded_at = -inf

    def record_sync(self, sync: Sync, now: float, state: State) -> None:
        """Record an agent's message, after it was applied to the state."""
        if not self._is_known and (sync.gpus is not None or sync.cpus is not None):
            self._gpus, self._cpus = float(sync.gpus or 0), float(sync.cpus or self._processes)
        self._cpus = self._cpus or float(sync.cpus or self._processes)
        self._workers.add_worker(sync.replica, sync.incarnation, now, sync.age)
        self.goodput.add_worker(now, sync.age)
        agent = state.agents.get(sync.replica)
        if agent is None or agent.member.incarnation != sync.incarnation:
            # An agent that leaves, or is told to. If it sends another message, it existed until then.
            self.remove_agent(sync.replica, now)

    def remove_agent(self, replica: str, now: float) -> None:
        """Remove an agent that is gone."""
        if self._workers.remove_worker(replica, now):
            self._recorded_at = -inf

    def update(
        self,
        now: float,
        state: State,
        activity: str,
        finishing: bool,
        observed: Observed,
        straggler_share: float = 0.0,
    ) -> None:
        """Set the job's activity from now on (see tandem_coordinator.goodput).

        Args:
            finishing: all steps are taken, and the code after the loop runs.
            straggler_share: share of a step's time that all ranks wait for a straggler.
        """
        if state.latest is not None:
            self._sizes[state.latest.generation] = len(state.latest.members)
        logged = observed.training.by_generation
        for generation in self._sizes.keys() - logged.keys() - {state.number}:
            del self._sizes[generation]
        # Members that a coordinator finds after its own restart step on meanwhile.
        adopts = not state.open and state.adopting_until is not None
        # Ranks of a task report nothing before their first message.
        doing = "restore" if activity == SILENT and not self._is_script else activity
        self.goodput.update(now, STEPPING if adopts else doing, observed.training.work, straggler_share)
        purpose = UNSETTLED if adopts or activity == STEPPING else PURPOSE_OF_ACTIVITY.get(activity, "waiting")
        if finishing or (activity == SILENT and self._is_script):
            purpose = "compute"
        if (state.open or adopts) and state.members is not self._inside:
            self._inside, self._members = state.members, state.members.keys()
        members = self._members if state.open or adopts else frozenset()
        self._workers.update(now, purpose, state.number, members, logged, self._sizes)
        self._observed = observed

    def close(self, now: float) -> None:
        """Close the ledger."""
        self._workers.close(now)
        self.goodput.close(now)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run so far."""
        ledger = priced_ledger(*self._amounts(self._workers.unsettled), self._prices, self._observed.bucket)
        return ledger.model_copy(update={"wall": self._wall(self.goodput.wall_time)})

    @property
    def settled_ledger(self) -> Ledger:
        """The ledger without unsettled amounts. Its amounts only grow."""
        ledger = priced_ledger(*self._amounts(0.0), self._prices, self._observed.bucket)
        return ledger.model_copy(update={"wall": self._wall(self.goodput.settled_seconds)})

    def due(self, clock: Instant) -> records.LedgerRecord | None:
        """The record, if one is due; otherwise None."""
        if clock.steady - self._recorded_at < RECORD_SECONDS:
            return None
        self._recorded_at = clock.steady
        return self.record(clock.wall)

    def record(self, time: float) -> records.LedgerRecord:
        """Create the record that a coordinator needs after a restart."""
        training = self._observed.training
        return records.LedgerRecord(
            time=time,
            **dict(self.ledger),
            unsettled=round(self._workers.unsettled, 3),
            worker_gpus=self._gpus,
            worker_cpus=self._cpus,
            reached=training.reached,
            offsets={str(generation): float(offset) for generation, offset in training.offsets.items()},
            evaluators_until=self._observed.read_at,
            wall_unsettled=round(self.goodput.unsettled, 3),
        )

    def _wall(self, amounts: Mapping[Cause, float]) -> WallTime:
        """The wall time with counts and advice."""
        training = self._observed.training
        wall = WallTime(
            saves=self._saves + training.ledger_saves,
            setbacks=self._setbacks + training.setbacks,
            interval_seconds=training.interval_seconds,
            mirror_seconds=training.mirror_seconds,
            mirror_step=training.mirror_step,
        ).with_causes(amounts)
        checkpoints = self._job.spec.checkpoint
        if checkpoints.every == "Auto":
            return wall
        advice = interval_advice(
            training_seconds=wall.training + wall.stragglers + wall.data + wall.recomputed,
            total_seconds=wall.total,
            save_seconds=wall.checkpoint,
            recomputed_seconds=wall.recomputed,
            saves=wall.saves,
            setbacks=wall.setbacks,
            write_seconds=training.commit_seconds or 0.0,
            step_seconds=training.step_seconds if checkpoints.every_steps else None,
        )
        return wall.model_copy(update={"advice": advice})

    def _amounts(self, unsettled: float) -> tuple[UsageByPurpose, UsageByPurpose]:
        worker_seconds, observed = self._workers.settled_seconds, self._observed
        # Of a pod's processes each reports its GPUs, for one that stands in for it has none.
        resources = (
            ("gpu", self._gpus, observed.evaluator_gpu_seconds, 1.0),
            ("cpu", self._cpus, observed.evaluator_seconds, self._evaluator_cpus),
        )
        by_resource = []
        for name, per_worker, evaluators, per_evaluator in resources:
            base = self._base[name]
            workers = {purpose: base[purpose] + per_worker * worker_seconds[purpose] for purpose in PURPOSES}
            amounts = displayed_amounts(workers, per_worker * unsettled)
            for purpose, seconds in evaluators.items():
                amounts[purpose] += per_evaluator * seconds
            by_resource.append(
                UsageByPurpose(**{purpose: round(max(0.0, amount), 3) for purpose, amount in amounts.items()})
            )
        return by_resource[0], by_resource[1]


def ledger_position(before: records.LedgerRecord | None) -> LedgerPosition:
    """The position up to which an earlier coordinator has counted the logs."""
    if before is None:
        return LedgerPosition()
    offsets = {int(number): int(offset or 0) for number, offset in (before.offsets or {}).items() if number.isdecimal()}
    return LedgerPosition(before.reached or 0, offsets, before.evaluators_until or before.time)


PURPOSE_OF_ACTIVITY = {"idle": "idle", ENDED: "idle"}
"""Purposes of workers' time by the job's activity; in all others, they wait."""


def _without_unsettled(displayed: UsageByPurpose, unsettled: float) -> dict[Purpose, float]:
    """The settled amounts, of displayed ones."""
    amounts: dict[Purpose, float] = {purpose: getattr(displayed, purpose) for purpose in PURPOSES}
    amounts["compute" if unsettled > 0 else "waiting"] -= unsettled
    return amounts
