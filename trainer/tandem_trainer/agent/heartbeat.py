"""The agent's heartbeats to the coordinator, on a separate thread.

One thread uses the connection, and does nothing else that could block: no store, no DNS, no torch. torchrun's thread
only sets what to send (`enter`, `leave`) and waits for the answer; a pipe wakes the heartbeat thread out of a request
that the coordinator holds back. The end of a rank wakes it, too, so that the coordinator, and through it all other
agents, know of a dead worker some milliseconds after its death.

If the group hangs, the coordinator asks for stacks: a short-lived thread makes the ranks write theirs into the run
directory, which may block, and the ranks are aborted afterwards, or after STACKS_SECONDS. A group that is idle writes
its stacks, too, and goes on. When this agent gets SIGTERM, a wake-up descriptor wakes the heartbeat thread in the same
moment, while torchrun passes the signal on to the ranks: the coordinator asks the other ranks to save with them.

While no coordinator answers, training goes on, and a restarted one is sent the membership. When all ranks have ended
with exit code 0, the agent reports it until that is acknowledged, or records it (tandem_trainer.agent.finished).
When a generation is closed, the ranks are ordered to abort, so that torchrun finds them gone instead of waiting; those
that can regroup leave their group instead, and stay.
"""

import logging
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

from tandem.processes.exitcode import ExitCode
from tandem.processes.process_age import process_age
from tandem.rundir.layout import FinishedMember, RunDir
from tandem.wire.coordinator_client import (
    CoordinatorClient,
    CoordinatorRefused,
    RequestCancelled,
    Unreachable,
    readable,
)
from tandem.wire.protocol import MAX_BODY_BYTES, Answer, Failure, Membership, PreflightReport, Sync
from tandem_trainer.agent.finished import FinishedRecorder
from tandem_trainer.agent.local_ranks import ENDED_BY_TORCHRUN, PARK_SECONDS, LocalRanks, devices_of_worker, signal_of
from tandem_trainer.failure import aged, read, record
from tandem_trainer.stacks import write_stacks

log = logging.getLogger("tandem.agent")

RETRY_SECONDS = 0.3
"""Interval between attempts to reach a coordinator, in seconds: it must hear from all within lostAfterSeconds."""
WAITING_LOG_SECONDS = 30.0
"""Interval between log lines about a coordinator that does not answer, in seconds."""
PAUSE_SECONDS = 0.3
"""Interval between heartbeats while the agent can only wait for torchrun, in seconds."""
HUNG_PARK_SECONDS = 1.0
"""Time for which ranks of a group that hung may take to leave it, in seconds."""
PARK_POLL_SECONDS = 0.005
"""Poll interval of ranks that leave their group to go on in the next one, in seconds."""
WATCH_SECONDS = 0.05
"""Poll interval of ranks that have not started to beat, or do not obey an order, in seconds."""
FINISH_SECONDS = 30.0
"""Grace period of ranks after training is complete, in seconds."""
ACKNOWLEDGE_SECONDS = 300.0
"""Maximum time that an agent whose ranks have finished waits for the coordinator's acknowledgement, in seconds, while
the coordinator answers or the run directory cannot be written; torchrun waits as long for the other agents."""
STORE_POLL_SECONDS = 0.2
"""Poll interval of the store, in which the other agents announce that their ranks have finished, in seconds."""
REFUSAL_RETRY_SECONDS = 10.0
"""Time for which a refused agent tries again, in seconds: a proxy may have refused it, or another coordinator comes."""
STACKS_SECONDS = 2.0
"""Maximum time that a hanging group is kept alive for the stacks of its ranks, in seconds."""
SIGNAL_SECONDS = 0.5
"""Time to wait for a SIGTERM to this agent after its ranks were terminated by one, in seconds."""
LEAVE_SECONDS = 2.0
"""Time limit of the last message, in seconds."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the agent to end."""


@dataclass(frozen=True)
class End:
    """End of the job for this agent."""

    code: int
    """Exit code of the agent."""
    reason: str


@dataclass(frozen=True)
class _AgentState:
    """State that torchrun's thread wants the heartbeat thread to report."""

    state: str = "idle"
    is_new: bool = False
    port: int = 1
    reason: str = ""
    generation: int | None = None


class RanksEnded(Exception):  # noqa: N818 - it says what happened
    """A rank that waited for the next generation has ended."""


class Heartbeat(threading.Thread):
    """Heartbeat thread of an agent. All public methods may be called from torchrun's thread.

    Args:
        client: the connection; only this thread uses it.
        rundir: records the end of the job.
        replica, address, processes, node: see tandem.wire.protocol.Sync.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        rundir: RunDir,
        replica: str,
        address: str,
        processes: int,
        node: str | None = None,
    ) -> None:
        super().__init__(name="tandem-heartbeat", daemon=True)
        self.replica, self.incarnation = replica, secrets.token_hex(6)
        self.address = address
        self._client, self._rundir = client, rundir
        self._processes, self._node = processes, node
        self._started_at, self._devices = time.monotonic() - process_age(), devices_of_worker(processes)
        self._changed = threading.Condition()
        self._state = _AgentState()
        self._membership: Membership | None = None
        self._ranks: LocalRanks | None = None
        self._failure: tuple[float, Failure] | None = None
        self._closed = False
        self._closed_at = self._prepares_since = 0.0
        self._finished = self._recorded = False
        self._acknowledged_at = 0.0
        self._has_preflight = False
        self._preflight: PreflightReport | None = None
        self._leaving = False
        self._end_signal: signal.Signals | None = None
        self._stacks: threading.Thread | None = None
        self._idle_stacks: threading.Thread | None = None
        self._stacks_until = 0.0
        self._end: End | None = None
        self._ended_at = 0.0
        self._refused: CoordinatorRefused | None = None
        self._unreachable_since: float | None = None
        self._unreachable_logged_at = 0.0
        self._refused_since: float | None = None
        self._leave_started_at = 0.0
        self._wake_read, self._wake_write = os.pipe()
        self._signals_read, self._signals_write = os.pipe()
        for end in (self._wake_read, self._signals_read, self._signals_write):
            os.set_blocking(end, False)

    # Called by torchrun's thread

    def install_signal_handlers(self) -> None:
        """Install handlers that record signals, and wake the heartbeat thread at once. Call it from the main thread."""
        for number in END_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._signals_write, warn_on_full_buffer=False)

    @property
    def end_signal(self) -> signal.Signals | None:
        """First signal that asked this agent to end; None if none has."""
        return self._end_signal

    def enter(
        self, port: int, reason: str, ranks: LocalRanks | None = None, regroups: bool = False
    ) -> Membership | None:
        """Wait for a generation with this agent in it. Returns None if the agent was asked to end.

        Args:
            port: port on which this agent's socket listens.
            reason: reason for the new generation.
            ranks: ranks that wait for it, too.
            regroups: whether ranks of this job can keep their state.

        Raises:
            RanksEnded: one of these has ended.
            SystemExit: the job is over; carries the exit code.
            CoordinatorRefused: the coordinator will never let this agent in.
        """
        with self._changed:
            # torchrun has ended the ranks of the last generation before it asks for a new one, or they go on in it.
            self._drop_ranks()
            self._membership, self._closed, self._stacks, self._idle_stacks = None, False, None, None
            self._has_preflight = False
            is_new = regroups and (ranks is None or not ranks.hold_state)
            self._state = replace(self._state, state="joining", is_new=is_new, port=port, reason=reason)
            self._wake()
            # With a timeout, so that signals are handled in between on every platform.
            while self._membership is None and self._end is None and self._refused is None and self._end_signal is None:
                self._changed.wait(1.0)
                if ranks is not None and self._membership is None:
                    ranks.watch()
                    if not ranks.all_running:
                        self._failure, self._closed = ranks.failure(), True
                        self._state = replace(self._state, state="preparing", reason="WorkerFailed")
                        self._wake()
                        raise RanksEnded
            if self._end is not None:
                log.info("event=over code=%d why=%r", self._end.code, self._end.reason)
                raise SystemExit(self._end.code)
            if self._refused is not None:
                raise self._refused
            return self._membership

    @property
    def has_preflight(self) -> bool:
        """Whether the joined generation starts with a pre-flight."""
        return self._has_preflight

    def report_preflight(self, report: PreflightReport) -> bool:
        """Report the result of the pre-flight, and wait for the decision: whether the ranks may start. They may not if
        the generation is closed, or this agent was asked to end."""
        with self._changed:
            self._preflight = report
            self._wake()
            while self._preflight is not None and not self._closed and self._end is None and self._end_signal is None:
                self._changed.wait(1.0)
            may_start, self._preflight = self._preflight is None, None
            return may_start

    def prepare(self, ranks: LocalRanks, reason: str) -> None:
        """Watch ranks that prepare themselves before this agent joins a generation.

        Args:
            reason: reason for which this agent will join.
        """
        with self._changed:
            self._drop_ranks()
            self._ranks, self._membership, self._closed, self._closed_at = ranks, None, True, 0.0
            self._state = replace(self._state, state="preparing", reason=reason)
            self._prepares_since = time.monotonic()
            self._wake()

    def end_preparation(self, limit: float) -> bool:
        """End ranks that cannot become ready: one has ended, or this agent is to end. Return whether they take too
        long, and torchrun has to end them.

        Args:
            limit: time for the preparation, in seconds.
        """
        with self._changed:
            if not self.is_preparing or self._ranks is None:
                return False
            if self._ranks.any_ended or self.is_over:
                self._ranks.order("abort")
            if self._ranks.are_parked or time.monotonic() - self._prepares_since <= limit:
                return False
            log.warning("event=preparation-timed-out seconds=%.0f", limit)
            self._ranks.order("abort")
            return True

    @property
    def is_preparing(self) -> bool:
        """Whether the ranks prepare themselves, and this agent has not joined yet."""
        return self._state.state == "preparing"

    @property
    def are_prepared(self) -> bool:
        """Whether all ranks are ready to join a generation."""
        with self._changed:
            return self._ranks is not None and self._ranks.are_parked

    @property
    def is_over(self) -> bool:
        """Whether this agent will join no generation any more."""
        return self._end is not None or self._refused is not None or self._end_signal is not None

    def watch(self, ranks: LocalRanks) -> None:
        """Watch the ranks of the joined generation. They are aborted when it is closed."""
        with self._changed:
            self._ranks = ranks
            # The generation may have been closed while torchrun prepared the start of its ranks.
            if self._closed:
                self._end_ranks()
            self._wake()

    def release_ranks(self) -> LocalRanks | None:
        """Wait until the ranks of a closed generation have left their group, and hand them over: they go on in the next
        one. None if they cannot; they are aborted then."""
        with self._changed:
            while (ranks := self._ranks) is not None and ranks.is_leaving and not ranks.are_parked:
                if self._end is not None or self._end_signal is not None:
                    break
                self._changed.wait(PARK_POLL_SECONDS)
                ranks.watch()
            if ranks is None or not ranks.are_parked or self._end is not None:
                if ranks is not None:
                    ranks.order("abort")
                return None
            self._ranks = None
            return ranks

    @property
    def closed(self) -> bool:
        """Whether the joined generation is closed."""
        return self._closed

    def join_reason(self) -> str:
        """Return the reason for which torchrun wants a new generation; sent when joining."""
        with self._changed:
            if self.is_preparing and (self._ranks is None or self._ranks.are_parked):
                return self._state.reason
            if self._ranks is None:
                return "Started" if self._state.generation is None else "MembershipChanged"
            # The coordinator may not have heard of the failure yet: it goes with the next join.
            verdict = self._ranks.last_verdict()
            self._failure = self._ranks.failure()
            code, failed = self._ranks.final_code(), self._rundir.failed()
            # A rank's exit code counts as final only if the record in the run directory agrees with it.
            if code is not None and failed is not None and failed.get("exitCode") == code:
                self._set_end(End(code, "a training process said that a restart is of no use"))
            # What a rank did after that is a consequence of the end of its generation.
            failed_before = self._failure is not None and self._failure[0] <= self._closed_at
            return "MembershipChanged" if self._closed and not failed_before else verdict

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the processes that torchrun has started, by local rank."""
        with self._changed:
            if self._ranks is not None:
                self._ranks.started(pids)

    def ended(self, codes: Mapping[int, int]) -> None:
        """Record how ranks failed, by local rank: exit codes, or minus the signals. Ranks that were asked to end with
        this agent have not failed: on a node that shuts down, they may get the signal first."""
        with self._changed:
            if ENDED_BY_TORCHRUN.issuperset(map(signal_of, codes.values())):
                self._changed.wait_for(lambda: self._end_signal is not None or self._closed, SIGNAL_SECONDS)
            if self._ranks is not None and self._end_signal is None:
                self._ranks.record_exit_codes(codes)

    def stopped_early(self) -> dict[int, int]:
        """Record that all ranks ended with exit code 0. Returns the processes of unfinished sessions, by local rank."""
        with self._changed:
            return {} if self._ranks is None else self._ranks.stopped_early()

    def wait_for_event(self, seconds: float) -> None:
        """Wait until torchrun has an event to handle: a rank has ended, the generation is closed, or this agent is to
        end. Waits at most `seconds`, and not at all while the ranks start."""
        with self._changed:
            self._changed.wait_for(self._is_eventful, seconds)

    def finish(self, is_needless: Callable[[], bool]) -> None:
        """Report that all ranks have ended with exit code 0, and wait for as long as others may use this agent's store.
        A signal that asks this agent to end is obeyed at once: its own work is done.

        Args:
            is_needless: whether, as far as this agent knows by itself, the store is unused.

        Raises:
            SystemExit: the generation was closed, and this replica has to join the next one; or the job has failed.
        """
        with self._changed:
            self._finished, self._acknowledged_at = True, time.monotonic()
        # Called without the lock: a store may be slow, and heartbeats must go on.
        if not is_needless():
            self._wake()
        while not is_needless():
            with self._changed:
                if self._end_signal is not None or self._end is not None or self._closed:
                    break
                if time.monotonic() - self._acknowledged_at > ACKNOWLEDGE_SECONDS:
                    log.warning("event=finished-alone generation=%s", self._state.generation)
                    break
                self._changed.wait(STORE_POLL_SECONDS)
        with self._changed:
            if self._end is not None and self._end.code != ExitCode.DONE:
                raise SystemExit(self._end.code)
            if self._end is None and self._closed:
                # torchrun would end with 0, and the replica would count as complete. After this code it is started
                # again.
                raise SystemExit(ExitCode.PEER_LOST)

    def leave(self, error: Exception | None = None) -> None:
        """Send the last message, if the coordinator answers in time, and stop. For ranks that have finished, the time
        limit is longer, unless the run directory has the message.

        Args:
            error: error that ends this agent, such as a program that cannot be started; it fails the generation.

        Raises:
            SystemExit: no coordinator answers, and the run directory shows that the job goes on, or has failed.
        """
        with self._changed:
            is_expected = self._closed or self._finished or self._end_signal is not None
            if error is not None and self._membership is not None and not is_expected:
                rank = 0 if self._ranks is None else self._ranks.first_rank
                content = record(error, None, MAX_BODY_BYTES)
                self._failure = self._failure or read(content, rank, ExitCode.FAILED, time.monotonic())
            self._finished = self._finished and not self._closed
            self._drop_ranks()
            self._state, self._leave_started_at = replace(self._state, state="leaving"), time.monotonic()
            self._wake()
        member = FinishedMember(self._state.generation or 0, self.replica, self.incarnation)
        recorder = FinishedRecorder(self._rundir, member)
        while self.is_alive() and not self._leave_timed_out():
            self.join(STORE_POLL_SECONDS)
            if self._is_news and (code := recorder.poll(self._unreachable_since)) is not None:
                self._recorded = True
                if code != ExitCode.DONE:
                    raise SystemExit(code)

    # The heartbeat thread

    def run(self) -> None:
        """Send heartbeats until the last message is sent."""
        while True:
            with self._changed:
                message = self._message()
            if message is None:
                self._wait(PAUSE_SECONDS)
                continue
            if (pause := self._exchange(message)) is None:
                # The coordinator forgets what is cut off, so the last message has to be sent again, too.
                continue
            is_delivered = message.state == "leaving" and self._unreachable_since is None
            if is_delivered or (self._state.state == "leaving" and self._leave_timed_out()):
                self._client.close()
                return
            if pause:
                self._wait(pause)

    def _exchange(self, message: Sync) -> float | None:
        """Send a message; return the pause in seconds before the next one. None: an event came before the answer."""
        try:
            answer = self._client.sync(message, until=self._wait_for_answer)
        except RequestCancelled:
            return None
        except Unreachable as error:
            # Training goes on without a coordinator. The log reports it, but not at each attempt.
            now = time.monotonic()
            if self._unreachable_since is None:
                self._unreachable_since = self._unreachable_logged_at = now
                log.warning("event=coordinator-unreachable error=%r", str(error))
            elif now - self._unreachable_logged_at >= WAITING_LOG_SECONDS:
                self._unreachable_logged_at = now
                seconds = now - self._unreachable_since
                log.warning("event=waiting-for-coordinator seconds=%.0f error=%r", seconds, str(error))
            return RETRY_SECONDS
        except CoordinatorRefused as error:
            return self._handle_refusal(error, message)
        self._refused_since = None
        if self._unreachable_since is not None:
            silent, self._unreachable_since = time.monotonic() - self._unreachable_since, None
            log.info("event=coordinator-answers-again seconds=%.1f", silent)
        with self._changed:
            return self._handle_answer(message, answer)

    def _message(self) -> Sync | None:
        state, ranks = self._state, self._ranks
        if state.state == "idle":
            return None
        if state.state == "preparing":
            return self._sync("joining", standby="preparing", reason=state.reason, failure=aged(self._failure))
        finished = self._finished or None
        if state.state == "leaving" and finished and not self._client.has_answered:
            # A coordinator that has just restarted adopts the group before it hears who has finished.
            return self._sync("running", membership=self._membership and self._membership.if_small())
        if state.state != "running":
            more = {"standby": "new"} if state.is_new and state.state == "joining" else {}
            return self._sync(state.state, reason=state.reason, finished=finished, failure=aged(self._failure), **more)
        # On a new connection the coordinator may have restarted: the membership lets it adopt the group.
        verdict = self._verdict()
        return self._sync(
            "running",
            reason=verdict or "",
            failure=aged(ranks.failure()) if ranks and verdict else None,
            leaving=self._leaving,
            finished=finished,
            membership=None if self._client.connected else self._membership and self._membership.if_small(),
            preflight=self._preflight,
            ranks=[] if ranks is None else ranks.reports(),
        )

    def _handle_answer(self, message: Sync, answer: Answer) -> float:
        if answer.order == "end":
            self._end_job(answer.why, bool(answer.left_out))
            return PAUSE_SECONDS
        if message.standby == "preparing":
            return PAUSE_SECONDS
        if message.state == "joining":
            # torchrun's thread may have changed the state since the message was sent.
            if answer.order == "run" and answer.membership is not None and self._state.state == "joining":
                self._has_preflight = bool(answer.preflight)
                self._start_generation(answer.membership)
            return 0.0
        # After the end of a generation only torchrun's thread can act: it joins the next one.
        if self._closed:
            return PAUSE_SECONDS
        if (message.state, message.generation) != (self._state.state, self._state.generation):
            # torchrun's thread has entered again since the message was sent: the answer is about the generation before.
            return 0.0
        # Each acknowledgement renews the time for which `finish` waits.
        if answer.finished:
            self._acknowledged_at = time.monotonic()
        if answer.order == "run" and message.preflight is not None and not answer.preflight:
            self._preflight = None
            self._changed.notify_all()
        elif answer.order == "run" and answer.stacks and self._idle_stacks is None:
            self._idle_stacks = self._take_stacks()
        elif answer.order == "save" and self._ranks is not None:
            self._ranks.order("save-and-leave")
        elif answer.order == "rejoin":
            # A hanging group writes its stacks first: after the abort they are gone.
            if answer.stacks and not self._stacks_are_taken():
                return WATCH_SECONDS
            log.info("event=generation-closed generation=%s why=%r", message.generation, answer.why)
            # A rank that hangs elsewhere than in a collective has had its time.
            self._close_generation(HUNG_PARK_SECONDS if answer.stacks else PARK_SECONDS)
        return PAUSE_SECONDS if self._closed else 0.0

    def _stacks_are_taken(self) -> bool:
        """Start writing the stacks, once; returns whether they are written, or have taken too long."""
        if self._stacks is None:
            self._stacks, self._stacks_until = self._take_stacks(), time.monotonic() + STACKS_SECONDS
        return self._stacks is None or not self._stacks.is_alive() or time.monotonic() > self._stacks_until

    def _take_stacks(self) -> threading.Thread | None:
        if self._ranks is None:
            return None
        folder = self._rundir.stacks(self._ranks.generation)
        thread = threading.Thread(target=write_stacks, args=(self._ranks.subjects(), folder), daemon=True)
        thread.start()
        return thread

    def _start_generation(self, membership: Membership) -> None:
        self._membership, self._failure = membership, None
        self._state = replace(self._state, state="running", generation=membership.generation, reason="")
        self._changed.notify_all()

    def _end_job(self, reason: str, is_left_out: bool) -> None:
        """End the job for this agent. Ranks may finish by themselves after success; otherwise they are aborted."""
        if self._end is None:
            # Where no end is recorded, another process has replaced this one.
            recorded = self._rundir.end_code()
            code = ExitCode.SUPERSEDED if recorded is None else recorded
            self._set_end(End(ExitCode.LEFT_OUT if is_left_out else code, reason))
        assert self._end is not None
        seconds_since_end = time.monotonic() - self._ended_at
        is_parked = self.is_preparing or (self._ranks is not None and self._ranks.any_parked)
        if self._end.code != ExitCode.DONE or seconds_since_end > FINISH_SECONDS or is_parked:
            self._close_generation()

    def _close_generation(self, patience: float = PARK_SECONDS) -> None:
        if not self._closed:
            self._closed, self._closed_at = True, time.monotonic()
        self._changed.notify_all()
        self._end_ranks(patience)

    def _end_ranks(self, patience: float = PARK_SECONDS) -> None:
        """Order the ranks of a closed generation to leave their group, or to end if they cannot go on in another."""
        if self._ranks is not None:
            self._ranks.order("regroup" if self._end is None and self._ranks.survive else "abort", patience)

    def _sync(self, state: str, **more: object) -> Sync:
        return Sync.model_validate(
            {
                "replica": self.replica,
                "incarnation": self.incarnation,
                "address": self.address,
                "port": self._state.port,
                "processes": self._processes,
                "state": state,
                "generation": self._state.generation,
                "node": self._node,
                "age": time.monotonic() - self._started_at,
                **self._devices,
                **more,
            }
        )

    def _set_end(self, end: End) -> None:
        self._end, self._ended_at = end, time.monotonic()
        self._changed.notify_all()

    def _handle_refusal(self, error: CoordinatorRefused, message: Sync) -> float:
        log.error("event=refused error=%r", str(error))
        # Only a join gives up. A running group goes on until the coordinator answers again.
        if self._refused_since is None:
            self._refused_since = time.monotonic()
        if message.state == "joining" and time.monotonic() - self._refused_since > REFUSAL_RETRY_SECONDS:
            with self._changed:
                self._refused = error
                self._changed.notify_all()
        return max(RETRY_SECONDS, 1.0)

    # Waiting

    def _wait_for_answer(self, connection: socket.socket, seconds: float) -> bool:
        """Wait for the coordinator's answer; returns False if there is something new to send."""
        deadline = time.monotonic() + seconds
        while True:
            if (waiting := self._poll(deadline)) is None:
                return False
            descriptors, patience = waiting
            if patience <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")
            with suppress(TimeoutError):
                if readable(connection, patience, descriptors):
                    return True
            if self._drain_pipes():
                return False

    def _wait(self, seconds: float) -> None:
        """Wait for so many seconds, or until there is something to send."""
        deadline = time.monotonic() + seconds
        while True:
            if (waiting := self._poll(deadline)) is None:
                return
            descriptors, patience = waiting
            if patience <= 0:
                return
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(patience * 1000)
            if self._drain_pipes():
                return

    def _poll(self, deadline: float) -> tuple[list[int], float] | None:
        """Poll the ranks. Returns the descriptors to wait for, and how long until the deadline or the next poll; None
        if the ranks have changed what to send."""
        with self._changed:
            before = self._verdict()
            waiting = self._poll_ranks(deadline - time.monotonic())
            return waiting if self._verdict() == before else None

    def _is_eventful(self) -> bool:
        waits = self.is_preparing and not (self._ranks is None or self._ranks.are_parked)
        ended = (self._closed and not waits) or self._end is not None or self._end_signal is not None
        return ended or self._ranks is None or not self._ranks.all_running

    def _poll_ranks(self, seconds: float) -> tuple[list[int], float]:
        if self._ranks is None:
            return [self._wake_read, self._signals_read], seconds
        self._ranks.watch()
        if not self._ranks.all_running or (self.is_preparing and self._ranks.are_parked):
            self._changed.notify_all()
        # A descriptor reports the end of a rank. Before the first beat, and after an abort, polling has to.
        patience = seconds if self._ranks.is_event_driven else min(seconds, WATCH_SECONDS)
        return [self._wake_read, self._signals_read, *self._ranks.descriptors], patience

    def _verdict(self) -> str | None:
        """Verdict on the ranks to report; None once the coordinator knows that the generation is over."""
        return None if self._ranks is None or self._closed or self._end is not None else self._ranks.verdict()

    def _drain_pipes(self) -> bool:
        # torchrun's thread waits on the condition: let it raise the signal.
        if signals := _read(self._signals_read):
            with self._changed:
                self._changed.notify_all()
        # The first SIGTERM is reported at once, so that the whole group saves before this replica is gone.
        has_to_save = self._state.state == "running" and not self._finished
        if signal.SIGTERM in signals and not self._leaving and has_to_save:
            log.info("event=has-to-go generation=%s", self._state.generation)
            self._leaving = True
            return True
        return bool(_read(self._wake_read))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._end_signal is None:
            self._end_signal = signal.Signals(number)

    def _wake(self) -> None:
        os.write(self._wake_write, b"!")

    @property
    def _is_news(self) -> bool:
        """Whether only this agent knows that its ranks have finished."""
        return self._finished and self._end is None and self._end_signal is None and not self._recorded

    def _leave_timed_out(self) -> bool:
        """Whether the time limit of the last message is over."""
        seconds = ACKNOWLEDGE_SECONDS if self._is_news else 0.0 if self._recorded else LEAVE_SECONDS
        return time.monotonic() - self._leave_started_at + RETRY_SECONDS > seconds

    def _drop_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 64)
    except BlockingIOError:
        return b""
