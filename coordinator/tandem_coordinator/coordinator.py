"""The coordinator of one job: feeds events to the membership state machine and carries out its actions.

Everything here runs on one event loop, so nothing needs a lock. What may block (the run directory) runs on threads: the
state store's, the run watcher's, the log's.
"""

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tandem.exitcode import ExitCode
from tandem.formatting import number
from tandem.job import DistributedTrainingJob
from tandem.protocol import FIRST, PROTOCOL, Answer, Membership, Sync
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.status import Snapshot, Status, Troubles, explained
from tandem_coordinator import group_state, membership
from tandem_coordinator.forming import STACKS_SECONDS
from tandem_coordinator.goodput import Goodput
from tandem_coordinator.group_state import (
    Action,
    Cause,
    Close,
    Complaint,
    Complete,
    Disconnected,
    FailJob,
    Hung,
    Open,
    Over,
    Retarget,
    Rules,
    Say,
    State,
)
from tandem_coordinator.hang import HangWatch
from tandem_coordinator.history import History, TroubleWatch
from tandem_coordinator.history import now as log_time
from tandem_coordinator.ledger import RunLedger, counted
from tandem_coordinator.progress import Reports
from tandem_coordinator.prometheus import Figures
from tandem_coordinator.run_watcher import Observed, RunDirectory, RunWatcher
from tandem_coordinator.snapshots import Instant, about, snapshot, status
from tandem_coordinator.state_store import (
    HISTORY,
    CoordinatorState,
    Remembered,
    StateStore,
    TakenOver,
    remembered_left_out,
)
from tandem_coordinator.straggler import StragglerWatch

TICK_SECONDS = 0.05
"""How often time is looked at; what agents say is acted on at once."""
CALM_SECONDS = 0.5
"""The same while time alone decides nothing. Each tick takes processor time from the ranks of this machine."""
MIN_HOLD = 0.8
"""A heartbeat is held for so much of the heartbeat time at least, by chance: thousands that were all answered at once
would otherwise all be back at once."""
TICK_PAUSE = 3.0
"""After a tick this many times its duration is left to everything else."""
SHORT_SECONDS = 0.002
"""A tick that takes less, as that of a small group does, leaves enough by itself."""
RETRY_SECONDS = 1.0
"""Between two tries to write to a disk that fails."""
RECORD_SECONDS = 2.0
"""How long a request for another number of replicas, or the word of an agent whose ranks have finished, waits for the
disk; less than the operator waits for an answer."""
HUNG_UP_SECONDS = 0.2
"""How often it is looked whether an agent that was told that its generation is over is still there."""
LEAVING_SECONDS = 1.0
"""How long it is asked, when an agent leaves, whether the job is complete."""
SAMPLE_SECONDS = 1.0
"""Between two samples in the log."""
RANKS_IN_SAMPLES = 100
"""Ranks whose processor use is logged each second, on average; larger groups are sampled less often."""

WAITS_FOR_CODE = "the job waits for its code; `tandem submit FILE --code DIR`, as it was given, sends it"


class Coordinator:
    """One job's coordinator. Make it inside a running event loop."""

    def __init__(
        self,
        job: DistributedTrainingJob,
        rundir: RunDir,
        state_store: StateStore,
        remembered: Remembered,
    ) -> None:
        self.job = job
        self.state: State = membership.start(
            Rules.of(job.spec),
            remembered.target or job.spec.workers.replicas,
            time.monotonic(),
            number=remembered.generation,
            first=remembered.first,
            latest=remembered.membership,
            failures=remembered.failures,
            left_out=remembered.left_out,
            finished=remembered.finished,
            settings_changed=remembered.settings_changed,
        )
        self._goodput = Goodput(time.monotonic())
        clock = Instant(time.time(), time.monotonic())
        self._ledger = RunLedger(job, clock, remembered.ledger, remembered.generation, remembered.in_pod)
        self._rundir, self._state_store = rundir, state_store
        self._recorded = remembered.generation
        self._recorded_target = self.state.target
        self._recorded_finished = self.state.finished
        self._started_at = remembered.started_at
        self._history = History(rundir, remembered.history, remembered.first, remembered.restarts)
        self._reports = Reports()
        elasticity = job.spec.elasticity
        self._hangs = HangWatch(elasticity.hang_seconds, elasticity.hang_start_seconds, elasticity.heartbeat_seconds)
        self._stragglers = StragglerWatch()
        self._troubles = TroubleWatch(self._history.say, elasticity.heartbeat_seconds)
        self._asked_to_save: set[str] = set()
        self._observed = Observed()
        self._lacks_code = (code := job.spec.trainer.code) is not None and not rundir.pack(code).exists()
        if code is not None:
            self._history.say(f"code {code}{', which has not arrived yet' if self._lacks_code else ''}", "info")
        self._not_finite_told = 0
        """The generation of which it was said that its loss is not finite."""
        self._heard: dict[str, float] = {}
        self._requests: dict[str, object] = {}
        self._changed = asyncio.Event()
        self._looked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._unrecorded = asyncio.Event()
        self._page_written = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="state-store")
        self._run_watcher = RunWatcher(
            RunDirectory(
                rundir,
                job.spec.evaluation,
                own_script=job.spec.trainer.command is not None,
                has_base=job.spec.trainer.is_fine_tuning,
                counted=counted(remembered.ledger),
                job=job,
            ),
            lambda observed: self._from_thread(self._observe, observed),
            lambda complaint: self._from_thread(self._history.say, complaint, "warning"),
        )
        self._count_time()

    # What is asked of it

    async def sync(self, sync: Sync, hung_up: Callable[[], bool] = lambda: False, protocol: int = PROTOCOL) -> Answer:
        """Take in what an agent says, and answer when there is something to say, or after the heartbeat time.

        Args:
            hung_up: whether the agent's connection is closed.
            protocol: what the agent reads.
        """
        request = self._requests[sync.replica] = object()
        now = time.monotonic()
        self._reports.take(sync.replica, sync.generation, sync.ranks, now)
        if sync.generation == self._reports.generation:
            self._troubles.take(sync.ranks)
        self._hangs.take(sync.replica, sync.generation, sync.ranks, now)
        if membership.says_nothing_new(self.state, sync):
            self._heard[sync.replica] = now
        else:
            if _may_be_the_end(sync) and self.state.end is None:
                known = self.state.agents.get(sync.replica)
                if known is not None and known.member.incarnation == sync.incarnation:
                    # It has given up its heartbeat to say this, and must not be lost before it is taken in.
                    self._heard[sync.replica] = now
                    self._hurry.set()
                await self._ask_whether_over()
            self._apply(group_state.Synced(sync, preflights=protocol > FIRST))
            self._hurry.set()
            if sync.finished:
                await self._finish_recorded(sync.replica)
        self._ledger.heard(sync, time.monotonic(), self.state)
        try:
            hold = self.job.spec.elasticity.heartbeat_seconds * random.uniform(MIN_HOLD, 1.0)  # noqa: S311
            told = await self._worth_saying(sync, request, now + hold)
        except asyncio.CancelledError:
            # The agent has hung up, unless this is an old request that a newer one has replaced.
            if self._requests.get(sync.replica) is request:
                self._ledger.gone(sync.replica, time.monotonic())
                self._apply(Disconnected(sync.replica, sync.incarnation))
                self._hurry.set()
            raise
        if told.order == "rejoin":
            self._loop.call_later(HUNG_UP_SECONDS, self._look_for, sync, request, hung_up)
        return told

    async def retarget(self, replicas: int) -> int:
        """Wish for another number of replicas; returns what was granted, once it is on the disk.

        Raises:
            TimeoutError: the disk does not take it. The wish counts until this process ends.
        """
        self._apply(Retarget(replicas))
        self._hurry.set()
        self._unrecorded.set()
        granted = self.state.target
        async with asyncio.timeout(RECORD_SECONDS):
            while self._recorded_target != self.state.target:
                await self._page_written.wait()
        return granted

    def code_arrived(self, text: str) -> None:
        """The job's code is in the run directory from now on; says so."""
        self._lacks_code = False
        self._history.say(text, "info")

    def tracking(self, failing: str) -> None:
        """Why the tracking server has not got everything; empty if it has."""
        self._troubles.tracking_message = failing

    def snapshot(self, observed: Observed | None = None, most: int | None = None) -> Snapshot:
        """What is known of the job now.

        Args:
            observed: what stands in the run directory, if somebody knows it better.
            most: how many members to list, those that need attention first; None: all.
        """
        clock, seen, told = Instant(time.time(), time.monotonic()), observed or self._observed, self._history
        now = self._status(clock, seen)
        return snapshot(self.job, now, self.state, clock, self._reports, seen, told.generations, told.events, most=most)

    def glance(self, most: int, observed: Observed | None = None) -> tuple[Snapshot, int]:
        """A snapshot with at most `most` members, and how many there are: for viewers that look every second, whatever
        the size of the job."""
        return self.snapshot(observed, most), len(self.state.agents)

    def figures(self) -> Figures:
        """What is counted and measured besides, for Prometheus."""
        self._count_time()
        return Figures(
            checkpoints=self.job.spec.checkpoint,
            restarts=self._history.restarts,
            failures=self.state.failures,
            budget=self.job.spec.elasticity.max_restarts,
            seconds=self._goodput.seconds,
            ledger=self._ledger.settled,
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
        now, doing = time.monotonic(), about(self.state, self._reports, self._observed)
        self._goodput.look(now, doing, self._observed.training.seconds)
        self._ledger.look(now, self.state, doing, self._reports.finishing, self._observed)

    def _status(self, clock: Instant, observed: Observed) -> Status:
        stragglers = self._stragglers.stragglers
        found = status(self.job, self.state, clock, self._reports, observed, self._started_at, stragglers)
        more: dict[str, object] = {"message": WAITS_FOR_CODE} if self._lacks_code and found.message is None else {}
        more |= {"troubles": self._troubles.troubles, "restarts": self._history.all_restarts}
        more["ledger"] = self._ledger.ledger
        return found.model_copy(update=more)

    async def _finish_recorded(self, replica: str) -> None:
        """Wait until the disk has it that the ranks of this replica have finished: its agent goes when it is answered,
        and could not tell the next coordinator. A disk that fails does not keep it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORD_SECONDS):
                while self.state.end is None and replica in self.state.finished - self._recorded_finished:
                    await self._page_written.wait()

    async def _ask_whether_over(self) -> None:
        """An agent that leaves because the job is over, or whose rank has ended it, may say so before we have seen the
        marker, and the rest would be called another generation for an instant. The second look has surely begun after
        the marker was written."""
        if self.state.end is None:
            await self._next_looks(lambda: self.state.end is not None)

    async def _next_looks(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for the run watcher's next two looks: the second has surely begun after now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_SECONDS):
                for _ in range(2):
                    if enough():
                        return
                    looked = self._looked
                    self._run_watcher.look_again()
                    await looked.wait()

    def _look_for(self, sync: Sync, request: object, hung_up: Callable[[], bool]) -> None:
        """Its ranks die before a killed agent does: their peers report that, and the agent's request is answered, while
        its connection is about to close. Nothing is held then whose end would tell."""
        if self._requests.get(sync.replica) is not request:
            return
        if hung_up():
            self._ledger.gone(sync.replica, time.monotonic())
            self._apply(Disconnected(sync.replica, sync.incarnation))
        else:
            self._loop.call_later(HUNG_UP_SECONDS, self._look_for, sync, request, hung_up)

    # Its life

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
            self._announce()
            if not taken_over:
                await self._close_ledger()
            self._run_watcher.stop()
            self._disk.shutdown(wait=False, cancel_futures=True)
            self._history.close()

    async def _close_ledger(self) -> None:
        """The last record, with what processes that have just ended wrote last."""
        await self._next_looks()
        self._count_time()
        self._ledger.close(time.monotonic())
        self._history.write(self._ledger.record(log_time()))

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            self._hurry.clear()
            heard, self._heard = self._heard, {}
            latest, foreign = self._observed.latest_checkpoint, self._observed.foreign
            self._apply(
                group_state.Tick(
                    heard,
                    None if latest is None and foreign is None else (None if latest is None else latest.step, foreign),
                    saved_step=None if latest is None else latest.step,
                    own_file=self._observed.foreign_seen,
                    own_file_at=self._observed.foreign_looked,
                    training=self._reports.stepped,
                    can_save=self.job.spec.trainer.task is not None or self._reports.saves,
                    scripted=self._reports.scripted,
                    step_seconds=self._observed.training.step_seconds or 0.0,
                    saving=self._reports.saving,
                    pausing=self._reports.pausing,
                    finishing=self._reports.finishing,
                )
            )
            if self.state.open and (hang := self._hangs.verdict()) is not None:
                self._apply(Hung(self._hangs.generation, hang, self._hangs.culprit(), self._hangs.step))
                continue
            if self.state.open and (idle := self._hangs.idle()) is not None:
                self._history.say(idle, "warning")
            # A tick looks at every agent. When thousands arrive at once, one tick serves many of them.
            if (took := time.monotonic() - began) > SHORT_SECONDS:
                await asyncio.sleep(min(TICK_SECONDS, TICK_PAUSE * took))
            calm = min(CALM_SECONDS, membership.calm_seconds(self.state, time.monotonic()))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(TICK_SECONDS, calm)):
                    await self._hurry.wait()

    async def _record(self) -> None:
        """Make generations durable, the newest only: one that was closed before it was recorded is never handed out."""
        while True:
            await self._unrecorded.wait()
            self._unrecorded.clear()
            page = self._page()
            try:
                await self._loop.run_in_executor(self._disk, self._state_store.record, page)
            except OSError as error:
                what = "coordinator.json cannot be written, so no generation can start"
                self._history.say(explained(what, str(error)), "error")
                await asyncio.sleep(RETRY_SECONDS)
                self._unrecorded.set()
                continue
            self._recorded_target = page.target
            self._recorded_finished = frozenset(page.finished or ())
            self._page_written.set()
            self._page_written = asyncio.Event()
            if page.generation > self._recorded:
                self._recorded = page.generation
                self._announce()

    async def _sample(self) -> None:
        owed = 0
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            for told in self._stragglers.look(self._reports.everyone(), time.monotonic()):
                self._history.say(told, "info")
            if (bad := self._reports.not_finite) is not None and self._reports.generation != self._not_finite_told:
                self._not_finite_told = self._reports.generation
                self._history.say(f"the training loss is not finite at step {number(bad.step)}", "warning")
            worse = self._troubles.look(self._observed, self._history.lines_lost, time.monotonic())
            if worse and (found := self._troubles.troubles):
                self._history.write(records.Troubled(time=log_time(), **found.model_dump()))
            clock, observed = Instant(time.time(), time.monotonic()), self._observed
            self._count_time()
            if (accounted := self._ledger.due(clock)) is not None:
                self._history.write(accounted)
            now, evaluators = self._status(clock, observed), observed.evaluators
            owed -= RANKS_IN_SAMPLES
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
                    generation=now.generation,
                    world_size=now.world_size or 0,
                    workers=0 if now.workers is None else now.workers.ready,
                    step=self._reports.step,
                    loss=now.loss,
                    throughput=self._reports.measured if now.throughput is not None else None,
                    trainer_cpu=trainer_cpu,
                    used_before=used_before,
                    gpu=gpu,
                    busy_seconds=busy,
                    gpu_memory=memory,
                    evaluator_cpu={view.name: round(view.cpu, 3) for view in evaluators if view.cpu is not None},
                )
            )

    # Events and what follows from them

    async def _worth_saying(self, sync: Sync, request: object, deadline: float) -> Answer:
        while True:
            changed = self._changed
            told = membership.answer(self.state, sync, self._recorded)
            patience = deadline - time.monotonic()
            if patience <= 0 or self._is_news(sync, told) or self._requests.get(sync.replica) is not request:
                idle = told.order == "run" and self._hangs.idle_told and sync.generation == self._hangs.generation
                return told.model_copy(update={"stacks": True}) if idle else told
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await changed.wait()

    def _is_news(self, sync: Sync, told: Answer) -> bool:
        if sync.preflight is not None and told.order == "run" and not told.preflight:
            return True
        if told.order != "save":
            return told.order != ("run" if sync.state == "running" else "wait")
        # Saving takes a while, and an agent that was told has nothing to do but to wait for its ranks.
        known = sync.replica in self._asked_to_save
        self._asked_to_save.add(sync.replica)
        return not known

    def _apply(self, event: group_state.Event) -> None:
        before = self.state
        self.state, actions = membership.step(before, event, time.monotonic())
        for action in actions:
            self._act(action)
        # No event both adds and removes agents.
        if len(self.state.agents) < len(before.agents):
            for replica in before.agents.keys() - self.state.agents.keys():
                self._reports.forget(replica)
                self._hangs.forget(replica)
                self._ledger.gone(replica, time.monotonic())
                self._requests.pop(replica, None)
        if self.state.finished != before.finished:
            self._unrecorded.set()
        if _orders(before) != _orders(self.state):
            self._count_time()
            self._announce()

    def _act(self, action: Action) -> None:
        match action:
            case Open(opened, detail, adopted):
                self._opened(opened, detail, adopted)
            case Close(generation, cause):
                progressed = bool(self.state.progress)
                self._history.closed(generation, cause, progressed, is_last=self.state.end is not None)
            case Say(text, warning):
                self._history.say(text, "warning" if warning else "info")
            case FailJob(cause, replica, complaint):
                self._history.say(cause.detail, "error")
                self._loop.create_task(self._mark_failed(cause, replica, complaint))
            case Complete(cause):
                self._loop.create_task(self._mark_complete(cause))

    def _opened(self, opened: Membership, detail: str, adopted: bool) -> None:
        self._reports.begin(opened.generation)
        self._hangs.begin(opened.generation)
        self._stragglers.begin()
        self._troubles.begin()
        self._asked_to_save.clear()
        self._unrecorded.set()
        self._started_at = self._started_at or time.time()
        self._history.opened(opened, detail, adopted)

    async def _mark_failed(self, cause: Cause, replica: str, complaint: Complaint | None) -> None:
        if self.state.cause.reason == "Hung":
            # The end aborts all ranks at once, and these stacks are what somebody will want to read.
            await asyncio.sleep(STACKS_SECONDS)
        facts: dict[str, object] = {}
        if complaint is not None:
            facts = {"replica": replica, "rank": complaint.failure.rank, "traceback": complaint.failure.traceback}
        code = int(ExitCode.FAILED)
        await self._end(cause, lambda: self._rundir.mark_failed(cause.reason, cause.detail, code, **facts))

    async def _mark_complete(self, cause: Cause) -> None:
        self._history.say(cause.detail, "info")
        await self._end(cause, lambda: self._rundir.mark_done(None))

    async def _end(self, cause: Cause, mark: Callable[[], None]) -> None:
        while True:
            try:
                await self._loop.run_in_executor(self._disk, mark)
            except OSError as error:
                self._history.say(f"the end of the job cannot be recorded: {error}", "error")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._apply(Over(cause))
                return

    def _observe(self, observed: Observed) -> None:
        self._observed = observed
        self._reports.samples_per_step = observed.training.samples_per_step
        self._count_time()
        self._looked.set()
        self._looked = asyncio.Event()
        if observed.ending is not None and self.state.end is None:
            self._history.say(observed.ending.message, "error" if observed.ending.failed else "info")
            self._apply(Over(Cause(observed.ending.reason, observed.ending.message)))

    def _page(self) -> CoordinatorState:
        return CoordinatorState(
            owner=self._state_store.owner,
            generation=self.state.number,
            membership=self.state.latest,
            failures=self.state.failures,
            replicas=self.job.spec.workers.replicas,
            target=self.state.target,
            started_at=self._started_at,
            left_out=remembered_left_out(self.state, time.monotonic()) or None,
            restarts=self._history.all_restarts,
            finished=sorted(self.state.finished) or None,
            settings_changed=self.state.settings_changed or None,
            history=list(self._history.generations)[-HISTORY:],
        )

    def _announce(self) -> None:
        """Wake all requests that are held back."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _from_thread(self, function: object, *args: object) -> None:
        # The loop may have closed while the disk was slow.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]


def _may_be_the_end(sync: Sync) -> bool:
    final = sync.failure is not None and sync.failure.code in (ExitCode.DIVERGED, ExitCode.CONFIGURATION)
    return sync.state == "leaving" or sync.leaving or bool(sync.finished) or final


def _orders(state: State) -> tuple[object, ...]:
    """What an agent's orders depend on."""
    waits = state.saving is None, state.adopting_until is None, state.preflight is None
    return state.open, state.number, waits, state.end, state.retired
