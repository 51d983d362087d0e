"""The coordinator of one job: passes events to the membership state machine and carries out its actions.

Everything here runs on one event loop, so nothing needs a lock. What may block (the run directory) runs on threads: the
state store's, the run watcher's, the log's.
"""

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from tandem.formatting import number
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.exitcode import ExitCode
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.wire.protocol import Answer, Membership, Sync
from tandem.wire.queue_view import QueueView
from tandem.wire.reasons import Reason
from tandem.wire.status import Snapshot, Status, Troubles, with_cause
from tandem_coordinator import failures, group_state, membership
from tandem_coordinator.failures import failure_time, first_failed_at
from tandem_coordinator.forming import STACKS_SECONDS, times_ready
from tandem_coordinator.group_state import (
    Action,
    Announce,
    Cause,
    Close,
    Complete,
    Disconnected,
    FailJob,
    FailureReport,
    Hung,
    MemberFinished,
    NumbersFound,
    Open,
    Retarget,
    Rules,
    RunEnded,
    State,
)
from tandem_coordinator.hang import HangWatch
from tandem_coordinator.history import History, TroubleWatch
from tandem_coordinator.history import now as log_time
from tandem_coordinator.ledger import RunLedger, ledger_position
from tandem_coordinator.progress import Reports
from tandem_coordinator.prometheus import Figures
from tandem_coordinator.provenance_log import ProvenanceLog
from tandem_coordinator.run_watcher import Observed, RunDirectory, RunWatcher
from tandem_coordinator.snapshots import Instant, activity, snapshot, status
from tandem_coordinator.state_store import (
    MAX_HISTORY,
    CoordinatorState,
    RecordedState,
    StateStore,
    TakenOver,
    exclusion_records,
)
from tandem_coordinator.straggler import StragglerWatch

TICK_SECONDS = 0.05
"""Interval of ticks, in seconds. Messages of agents are handled at once."""
QUIET_TICK_SECONDS = 0.5
"""Interval of ticks while no timeout is pending, in seconds. Each tick takes processor time from the ranks of this
machine."""
MIN_HOLD_SHARE = 0.8
"""Minimum share of the heartbeat interval for which a heartbeat's answer is held; the share is random, because
thousands that were all answered at once would otherwise all be back at once."""
TICK_REST_FACTOR = 3.0
"""Multiple of a tick's duration that is left to everything else after it."""
SHORT_TICK_SECONDS = 0.002
"""Duration below which a tick needs no rest, as that of a small group, in seconds."""
RETRY_SECONDS = 1.0
"""Time between two attempts to write to a disk that fails, in seconds."""
STOP_WHEN_IGNORED = (
    "runPolicy.stopWhen does not end this script: it trains without a session or an adapter, which the ranks need to "
    "leave after the same step"
)
RECORD_SECONDS = 2.0
"""Maximum time that a request for another number of replicas, or an agent whose ranks have finished, waits for the
disk, in seconds; less than the operator waits for an answer."""
HANGUP_POLL_SECONDS = 0.2
"""Interval of checks whether an agent that was told that its generation is over is still connected, in seconds."""
SURVIVORS_POLL_SECONDS = 0.05
"""Interval of these checks in jobs whose ranks keep their state, in seconds."""
END_POLL_SECONDS = 1.0
"""Maximum time to find out, when an agent leaves, whether the job is complete, in seconds."""
SAMPLE_SECONDS = 1.0
"""Time between two samples in the log, in seconds."""
RANKS_PER_SAMPLE = 100
"""Number of ranks whose processor use is logged each second, on average; larger groups are sampled less often."""

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

WAITS_FOR_CODE = "the job waits for its code; run `tandem submit FILE --code DIR` again to send it"


class Coordinator:
    """The coordinator of one job. Create it inside a running event loop."""

    def __init__(
        self,
        job: DistributedTrainingJob,
        rundir: RunDir,
        state_store: StateStore,
        recorded_state: RecordedState,
        signing_key: "Ed25519PrivateKey | None" = None,
    ) -> None:
        """
        Args:
            signing_key: key to sign the run's provenance with; None: it is not signed.
        """
        self.job = job
        self.state: State = membership.initial_state(
            Rules.from_spec(job.spec),
            recorded_state.target or job.spec.workers.replicas,
            time.monotonic(),
            recorded_state,
        )
        clock = Instant(time.time(), time.monotonic())
        self._ledger = RunLedger(
            *(job, clock, recorded_state.ledger, recorded_state.generation, recorded_state.in_pod),
            adopts=self.state.adopting_until is not None,
        )
        self._rundir, self._state_store = rundir, state_store
        self._recorded = recorded_state.generation
        self._recorded_target = self.state.target
        self._recorded_finished = self.state.finished
        self._started_at = recorded_state.started_at
        self._history = History(rundir, recorded_state.history, recorded_state.first, recorded_state.restarts)
        self._reports = Reports()
        elasticity = job.spec.elasticity
        self._hangs = HangWatch(elasticity.hang_seconds, elasticity.hang_start_seconds, elasticity.heartbeat_seconds)
        self._stragglers = StragglerWatch()
        self._troubles = TroubleWatch(self._history.report, elasticity.heartbeat_seconds)
        self._save_requested: set[str] = set()
        self._observed = Observed()
        self.queue: QueueView | None = None
        """The queue of the job, as the operator has reported it."""
        self._is_code_missing = (code := job.spec.trainer.code) is not None and not rundir.pack(code).exists()
        if code is not None:
            self._history.report(f"code {code}{', which has not arrived yet' if self._is_code_missing else ''}", "info")
        self._bucket_problem = self._tracing_problem = ""
        self._not_finite_reported = 0
        self._has_warned = False
        """The generation whose non-finite loss was reported."""
        self._heartbeats: dict[str, float] = {}
        self._requests: dict[str, object] = {}
        self._changed = asyncio.Event()
        self._polled = asyncio.Event()
        self._tick_now = asyncio.Event()
        self._unrecorded = asyncio.Event()
        self._state_written = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="state-store")
        self._provenance = ProvenanceLog(rundir, job, signing_key)
        self._run_watcher = RunWatcher(
            RunDirectory(
                rundir,
                job.spec.evaluation,
                is_own_script=job.spec.trainer.command is not None,
                has_base=job.spec.trainer.is_fine_tuning,
                ledger_position=ledger_position(recorded_state.ledger),
                job=job,
                provenance=self._provenance,
            ),
            lambda observed: self._from_thread(self._observe, observed),
            lambda complaint: self._from_thread(self._history.report, complaint, "warning"),
        )
        self._count_time()

    # Requests

    async def sync(self, sync: Sync, hung_up: Callable[[], bool] = lambda: False) -> Answer:
        """Take an agent's message, and answer when the answer matters, or after the heartbeat interval.

        Args:
            hung_up: whether the agent's connection is closed.
        """
        # An agent has one request at a time: a newer one replaces the older, whose answer it no longer reads.
        request = self._requests[sync.replica] = object()
        now = time.monotonic()
        self._reports.record(sync.replica, sync.generation, sync.ranks, now)
        if sync.generation == self._reports.generation:
            self._troubles.record(sync.ranks)
        self._hangs.record(sync.replica, sync.generation, sync.ranks, now)
        # With thousands of agents, most messages only say that the sender lives: they wait for the next tick.
        if membership.is_redundant(self.state, sync):
            self._heartbeats[sync.replica] = now
        else:
            if _may_end_job(sync) and self.state.end is None:
                agent = self.state.agents.get(sync.replica)
                if agent is not None and agent.member.incarnation == sync.incarnation:
                    # This message replaces its heartbeat: it must not be lost before the message is handled.
                    self._heartbeats[sync.replica] = now
                    self._tick_now.set()
                await self._check_whether_ended()
            self._apply(group_state.Synced(sync))
            self._tick_now.set()
            if sync.finished:
                await self._wait_until_recorded(sync.replica)
        self._ledger.record_sync(sync, time.monotonic(), self.state)
        try:
            # Held up to a heartbeat, so that news reaches the agent at once and no news costs little.
            hold = self.job.spec.elasticity.heartbeat_seconds * random.uniform(MIN_HOLD_SHARE, 1.0)  # noqa: S311
            answer = await self._hold_answer(sync, request, now + hold)
        except asyncio.CancelledError:
            # The agent has hung up, unless this is an old request that a newer one has replaced.
            if self._requests.get(sync.replica) is request:
                self._note_disconnected(sync)
            raise
        if answer.order == "rejoin":
            self._loop.call_later(self._hangup_poll_seconds, self._check_connection, sync, request, hung_up)
        return answer

    async def retarget(self, replicas: int) -> int:
        """Set the target number of replicas; returns the granted number, once it is on the disk.

        Raises:
            TimeoutError: the disk cannot be written. The target counts until this process ends.
        """
        self._apply(Retarget(replicas))
        self._tick_now.set()
        self._unrecorded.set()
        granted = self.state.target
        async with asyncio.timeout(RECORD_SECONDS):
            while self._recorded_target != self.state.target:
                await self._state_written.wait()
        return granted

    def report_code(self, text: str) -> None:
        """Note that the job's code is in the run directory, and report it."""
        self._is_code_missing = False
        self._history.report(text, "info")

    def report_tracking(self, problem: str, blocks: bool = False) -> None:
        """Set the problem of the tracking server; empty if it has received everything. It never blocks anything."""
        self._troubles.tracking_message = problem

    def report_tracing(self, problem: str, blocks: bool = False) -> None:
        """Report once that the collector of traces lacks something, and that it has everything again."""
        if problem and not self._tracing_problem:
            self._history.report(f"traces are not sent, and nothing else is affected: {problem}", "warning")
        elif not problem and self._tracing_problem:
            self._history.report("traces: everything has been sent", "info")
        self._tracing_problem = problem

    def report_upload(self, problem: str, blocks: bool = False) -> None:
        """Set the reason why the bucket lacks something; empty if it has everything.

        Args:
            blocks: no generation can be recorded, because the bucket is the only place that all pods share.
        """
        self._troubles.upload_message = problem
        self._bucket_problem = problem if blocks else ""
        self._tick_now.set()

    def record_uploaded(self, checkpoint: str, seconds: float, size: int) -> None:
        """Record that a checkpoint is in the bucket."""
        record = records.Uploaded(time=log_time(), checkpoint=checkpoint, seconds=seconds, bytes=size)
        self._history.write(record)

    def snapshot(self, observed: Observed | None = None, max_members: int | None = None) -> Snapshot:
        """Create a snapshot of the job as it is now.

        Args:
            observed: the state of the run directory, if the caller has a newer one.
            max_members: how many members to list, those that need attention first; None: all.
        """
        clock, current, history = Instant(time.time(), time.monotonic()), observed or self._observed, self._history
        now = self._status(clock, current)
        return snapshot(
            self.job,
            now,
            self.state,
            clock,
            self._reports,
            current,
            history.generations,
            history.events,
            max_members=max_members,
        )

    def glance(self, max_members: int, observed: Observed | None = None) -> tuple[Snapshot, int]:
        """A snapshot with at most `max_members` members, and their total number: for viewers that poll every second,
        whatever the size of the job."""
        return self.snapshot(observed, max_members), len(self.state.agents)

    def figures(self) -> Figures:
        """Counters and measurements for Prometheus that are not part of a snapshot."""
        self._count_time()
        return Figures(
            checkpoints=self.job.spec.checkpoint,
            restarts=self._history.restarts,
            failures=self.state.failures,
            budget=self.job.spec.elasticity.max_restarts,
            seconds=self._ledger.goodput.seconds,
            ledger=self._ledger.settled_ledger,
            stepped_at=self._reports.stepped_at,
            idle_seconds=self._hangs.idle_seconds() if self.state.open else None,
            finishing=self._reports.finishing,
            scripted=self._reports.scripted,
            started_at=self._started_at,
            clock=Instant(time.time(), time.monotonic()),
            observed=self._observed,
            troubles=self._troubles.troubles or Troubles(),
        )

    def _count_time(self) -> None:
        now, doing = time.monotonic(), activity(self.state, self._reports, self._observed)
        step_seconds = self._observed.training.step_seconds
        straggler_share = self._stragglers.excess_seconds / step_seconds if step_seconds else 0.0
        self._ledger.update(now, self.state, doing, self._reports.finishing, self._observed, straggler_share)

    def _status(self, clock: Instant, observed: Observed) -> Status:
        stragglers = self._stragglers.stragglers
        computed = status(self.job, self.state, clock, self._reports, observed, self._started_at, stragglers)
        updates: dict[str, object] = (
            {"message": WAITS_FOR_CODE} if self._is_code_missing and computed.message is None else {}
        )
        updates |= {"troubles": self._troubles.troubles, "restarts": self._history.all_restarts}
        updates |= {"ledger": self._ledger.ledger, "queue": self.queue}
        return computed.model_copy(update=updates)

    async def _wait_until_recorded(self, replica: str) -> None:
        """Wait until the disk records that the ranks of this replica have finished. Its agent leaves once it is
        answered, and could not tell the next coordinator. A disk that fails does not keep it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORD_SECONDS):
                while self.state.end is None and replica in self.state.finished - self._recorded_finished:
                    await self._state_written.wait()

    async def _check_whether_ended(self) -> None:
        """Check whether the job has ended before an agent's departure is handled.

        An agent that leaves because the job is over, or whose rank has ended it, may say so before we have seen the
        marker, and the rest would be called another generation for an instant. The second poll has surely begun after
        the marker was written.
        """
        if self.state.end is None:
            await self._next_polls(lambda: self.state.end is not None)

    async def _next_polls(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for the run watcher's next two polls: the second has surely begun after now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_POLL_SECONDS):
                for _ in range(2):
                    if enough():
                        return
                    polled = self._polled
                    self._run_watcher.poll_now()
                    await polled.wait()

    def _check_connection(self, sync: Sync, request: object, hung_up: Callable[[], bool]) -> None:
        """Check whether an agent that was told to rejoin is still connected.

        The ranks of a killed agent die before it does: their peers report that, and the agent's request is answered,
        while its connection is about to close. No request of it is held then whose end would show that.
        """
        if self._requests.get(sync.replica) is not request:
            return
        if hung_up():
            self._note_disconnected(sync)
        else:
            self._loop.call_later(self._hangup_poll_seconds, self._check_connection, sync, request, hung_up)

    @property
    def _hangup_poll_seconds(self) -> float:
        # Where ranks keep their state, the others wait for nothing else.
        return SURVIVORS_POLL_SECONDS if self.state.survived else HANGUP_POLL_SECONDS

    def _note_disconnected(self, sync: Sync) -> None:
        self._ledger.remove_agent(sync.replica, time.monotonic())
        # A heartbeat that the next tick would record must not count as one after this.
        heartbeat_at = self._heartbeats.pop(sync.replica, None)
        self._apply(Disconnected(sync.replica, sync.incarnation, heartbeat_at))
        self._tick_now.set()

    # Tasks

    async def run(self) -> None:
        """Coordinate until cancelled.

        Raises:
            TakenOver: another coordinator has claimed the job.
        """
        self._run_watcher.start()
        taken_over = False
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick())
                tasks.create_task(self._record())
                tasks.create_task(self._sample())
        except* TakenOver as error:
            taken_over = True
            raise error.exceptions[0] from None
        finally:
            self._wake_requests()
            if not taken_over:
                await self._close_ledger()
            self._run_watcher.stop()
            self._disk.shutdown(wait=False, cancel_futures=True)
            self._history.close()

    async def _close_ledger(self) -> None:
        """Write the last record, with the last lines of processes that have just ended."""
        await self._next_polls()
        self._count_time()
        self._ledger.close(time.monotonic())
        self._history.write(self._ledger.record(log_time()))

    async def _tick(self) -> None:
        while True:
            started = time.monotonic()
            self._tick_now.clear()
            heartbeats, self._heartbeats = self._heartbeats, {}
            latest, foreign = self._observed.latest_checkpoint, self._observed.foreign
            self._apply(
                group_state.Tick(
                    heartbeats,
                    None if latest is None and foreign is None else (None if latest is None else latest.step, foreign),
                    saved_step=None if latest is None else latest.step,
                    script_checkpoint=self._observed.foreign_candidate,
                    script_checkpoint_polled=self._observed.foreign_polled_at,
                    training=self._reports.stepped,
                    can_save=self.job.spec.trainer.task is not None or self._reports.saves,
                    survive=self._reports.survive(len(self.state.members)),
                    scripted=self._reports.scripted,
                    step_seconds=self._observed.training.step_seconds or 0.0,
                    saving=self._reports.saving,
                    pausing=self._reports.pausing,
                    finishing=self._reports.finishing,
                    bucket_problem=self._bucket_problem,
                )
            )
            # After the tick, so that agents found to be lost are not blamed for a hang.
            if self.state.open and (hang := self._hangs.verdict()) is not None:
                self._apply(Hung(self._hangs.generation, hang, self._hangs.culprit(), self._hangs.step))
                continue
            if self.state.open and (idle := self._hangs.idle()) is not None:
                self._history.report(idle, "warning")
            # A tick looks at every agent. When thousands arrive at once, one tick serves many of them.
            if (duration := time.monotonic() - started) > SHORT_TICK_SECONDS:
                await asyncio.sleep(min(TICK_SECONDS, TICK_REST_FACTOR * duration))
            quiet = min(QUIET_TICK_SECONDS, membership.quiet_seconds(self.state, time.monotonic()))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(TICK_SECONDS, quiet)):
                    await self._tick_now.wait()

    async def _record(self) -> None:
        """Make generations durable, only the newest: one that was closed before it was recorded is never handed out."""
        while True:
            await self._unrecorded.wait()
            self._unrecorded.clear()
            recorded = self._recordable_state()
            try:
                await self._loop.run_in_executor(self._disk, self._state_store.record, recorded)
            except OSError as error:
                problem = "coordinator.json cannot be written, so no generation can start"
                self._history.report(with_cause(problem, str(error)), "error")
                await asyncio.sleep(RETRY_SECONDS)
                self._unrecorded.set()
                continue
            self._recorded_target = recorded.target
            self._recorded_finished = frozenset(recorded.finished or ())
            self._state_written.set()
            self._state_written = asyncio.Event()
            # Only now may agents learn of the generation.
            if recorded.generation > self._recorded:
                self._recorded = recorded.generation
                self._wake_requests()

    async def _sample(self) -> None:
        owed = 0
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            for message in self._stragglers.update(self._reports.all_reports(), time.monotonic()):
                self._history.report(message, "info")
            report = self._reports.not_finite
            if report is not None and self._reports.generation != self._not_finite_reported:
                self._not_finite_reported = self._reports.generation
                self._history.report(f"the training loss is not finite at step {number(report.step)}", "warning")
            if self._reports.scripted and self.job.spec.run_policy.stop_when is not None and not self._has_warned:
                self._has_warned = True
                self._history.report(STOP_WHEN_IGNORED, "warning")
            self._troubles.exclusion_message = failures.describe_exclusions(self.state)
            # Before the first poll nothing is known of what the coordinator before this one has reported.
            has_changed = self._observed.read_at is not None and self._troubles.update(
                self._observed, self._history.lines_lost, time.monotonic()
            )
            if has_changed and (troubles := self._troubles.troubles):
                self._history.write(records.TroublesRecord(time=log_time(), **troubles.model_dump()))
            if self._troubles.corruption and self.job.spec.elasticity.on_corruption == "Stop":
                self._apply(NumbersFound(Cause(Reason.NUMBERS_WRONG, self._troubles.corruption)))
            clock, observed = Instant(time.time(), time.monotonic()), self._observed
            self._count_time()
            if (record := self._ledger.due(clock)) is not None:
                self._history.write(record)
            job_status, evaluators = self._status(clock, observed), observed.evaluators
            owed -= RANKS_PER_SAMPLE
            trainer_cpu = self._reports.trainer_cpu() if owed <= 0 else {}
            gpu = self._reports.trainer_gpu() if owed <= 0 else {}
            busy = self._reports.trainer_busy() if owed <= 0 else {}
            memory = self._reports.gpu_memory() if owed <= 0 else {}
            used_before = self._reports.used_before(clock.steady) if owed <= 0 else {}
            used_before |= {view.name: round(view.silent_seconds, 2) for view in evaluators if view.cpu is not None}
            owed = owed if owed > 0 else max(len(trainer_cpu), len(gpu))
            self._history.write(
                records.Sample(
                    time=log_time(),
                    generation=job_status.generation,
                    world_size=job_status.world_size or 0,
                    workers=0 if job_status.workers is None else job_status.workers.ready,
                    step=self._reports.step,
                    loss=job_status.loss,
                    throughput=self._reports.measured if job_status.throughput is not None else None,
                    trainer_cpu=trainer_cpu,
                    used_before=used_before,
                    gpu=gpu,
                    busy_seconds=busy,
                    gpu_memory=memory,
                    evaluator_cpu={view.name: round(view.cpu, 3) for view in evaluators if view.cpu is not None},
                )
            )

    # Events and actions

    async def _hold_answer(self, sync: Sync, request: object, deadline: float) -> Answer:
        while True:
            changed = self._changed
            answer = membership.answer(self.state, sync, self._recorded)
            remaining = deadline - time.monotonic()
            if (
                remaining <= 0
                or self._is_worth_sending(sync, answer)
                or self._requests.get(sync.replica) is not request
            ):
                idle = (
                    answer.order == "run" and self._hangs.is_idle_reported and sync.generation == self._hangs.generation
                )
                return answer.model_copy(update={"stacks": True}) if idle else answer
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await changed.wait()

    def _is_worth_sending(self, sync: Sync, answer: Answer) -> bool:
        if sync.preflight is not None and answer.order == "run" and not answer.preflight:
            return True
        if answer.order != "save":
            return answer.order != ("run" if sync.state == "running" else "wait")
        # Saving takes a while, and an agent that was told to save only waits for its ranks.
        is_repeated = sync.replica in self._save_requested
        self._save_requested.add(sync.replica)
        return not is_repeated

    def _apply(self, event: group_state.Event) -> None:
        before = self.state
        self.state, actions = membership.step(before, event, time.monotonic())
        for action in actions:
            self._carry_out(action, before)
        # Everything that is stored about an agent ends with it.
        # No event both adds and removes agents.
        if len(self.state.agents) < len(before.agents):
            for replica in before.agents.keys() - self.state.agents.keys():
                self._reports.forget(replica)
                self._hangs.forget(replica)
                self._ledger.remove_agent(replica, time.monotonic())
                self._requests.pop(replica, None)
        if self.state.finished != before.finished:
            self._unrecorded.set()
        # Held requests are woken only if their answers may have changed.
        if _order_inputs(before) != _order_inputs(self.state):
            self._count_time()
            self._wake_requests()

    def _carry_out(self, action: Action, before: State) -> None:
        match action:
            case Open(opened, detail, adopted):
                times = *times_ready(before, opened), first_failed_at(before)
                self._opened(opened, detail, adopted, *map(_wall_time, times))
            case Close(generation, cause):
                progressed = bool(self.state.progress)
                is_hung = cause.reason == "Hung"
                failed_at = self._hangs.progressed_at() if is_hung else failure_time(cause, before, self.state)
                is_last = self.state.end is not None
                self._history.closed(generation, cause, progressed, is_last, _wall_time(failed_at))
                if not is_last:
                    self._provenance.closed(generation, cause.reason, cause.detail, cause.culprit)
            case Announce(text, warning):
                self._history.report(text, "warning" if warning else "info")
            case FailJob(cause, replica, report):
                self._history.report(cause.detail, "error")
                self._loop.create_task(self._mark_failed(cause, replica, report))
            case Complete(cause):
                self._loop.create_task(self._mark_complete(cause))

    def _opened(self, opened: Membership, detail: str, adopted: bool, *times: float | None) -> None:
        self._reports.begin(opened.generation)
        self._hangs.begin(opened.generation)
        self._stragglers.begin()
        self._troubles.begin()
        self._save_requested.clear()
        self._unrecorded.set()
        self._started_at = self._started_at or time.time()
        self._history.opened(opened, detail, adopted, *times)

    async def _mark_failed(self, cause: Cause, replica: str, report: FailureReport | None) -> None:
        if self.state.cause.reason == "Hung":
            # The end aborts all ranks at once, so their stacks have to be written first.
            await asyncio.sleep(STACKS_SECONDS)
        facts: dict[str, object] = {}
        if report is not None:
            facts = {"replica": replica, "rank": report.failure.rank, "traceback": report.failure.traceback}
        code = int(ExitCode.FAILED)
        await self._end(cause, lambda: self._rundir.mark_failed(cause.reason, cause.detail, code, **facts))

    async def _mark_complete(self, cause: Cause) -> None:
        self._history.report(cause.detail, "info")
        await self._end(cause, lambda: self._rundir.mark_done(None))

    async def _end(self, cause: Cause, mark: Callable[[], None]) -> None:
        while True:
            try:
                await self._loop.run_in_executor(self._disk, mark)
            except OSError as error:
                self._history.report(f"the end of the job cannot be recorded: {error}", "error")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._apply(RunEnded(cause))
                return

    def _observe(self, observed: Observed) -> None:
        self._observed = observed
        self._reports.samples_per_step = observed.training.samples_per_step
        self._count_time()
        self._polled.set()
        self._polled = asyncio.Event()
        for member in observed.finished:
            self._apply(MemberFinished(member))
        if observed.ending is not None and self.state.end is None:
            self._history.report(observed.ending.message, "error" if observed.ending.failed else "info")
            self._apply(RunEnded(Cause(observed.ending.reason, observed.ending.message)))

    def _recordable_state(self) -> CoordinatorState:
        return CoordinatorState(
            owner=self._state_store.owner,
            generation=self.state.number,
            membership=self.state.latest,
            failures=self.state.failures,
            replicas=self.job.spec.workers.replicas,
            target=self.state.target,
            started_at=self._started_at,
            left_out=exclusion_records(self.state, time.monotonic()) or None,
            restarts=self._history.all_restarts,
            finished=sorted(self.state.finished) or None,
            settings_changed=self.state.settings_changed or None,
            history=list(self._history.generations)[-MAX_HISTORY:],
        )

    def _wake_requests(self) -> None:
        """Wake all requests whose answers are held."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _from_thread(self, function: object, *args: object) -> None:
        # The loop may have closed while the disk was slow.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]


def _wall_time(steady: float | None) -> float | None:
    """Convert a time of the monotonic clock to seconds since the epoch, rounded as those of the log."""
    return None if steady is None else round(time.time() - (time.monotonic() - steady), 3)


def _may_end_job(sync: Sync) -> bool:
    final = sync.failure is not None and sync.failure.code in (ExitCode.DIVERGED, ExitCode.CONFIGURATION)
    return sync.state == "leaving" or sync.leaving or bool(sync.finished) or final


def _order_inputs(state: State) -> tuple[object, ...]:
    """The parts of a state that agents' orders depend on."""
    waits = state.saving is None, state.adopting_until is None, state.preflight is None
    return state.open, state.number, waits, state.end, state.retired
