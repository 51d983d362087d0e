"""The agent's heartbeats to the coordinator, on a separate thread.

One thread speaks, over one connection, and does nothing that could block on anything else: no store, no DNS, no torch.
torchrun's thread only says what it wants (`enter`, `leave`) and waits for the answer; a pipe wakes the speaker out of a
request that the coordinator holds back. The end of a rank wakes it, too, so that the coordinator, and through it all
other agents, know of a dead worker some milliseconds after its death.

A group that hangs is asked where: then a short-lived thread has the ranks write their stacks into the run directory,
which may block, and the ranks are aborted afterwards, or after STACKS_SECONDS. A group that does nothing is asked the
same, and goes on. When this agent gets SIGTERM, a wake-up descriptor tells the speaker in the same moment, while
torchrun passes the signal on to the ranks: the coordinator asks the others to save with them. The handler itself only
notes the signal (tandem_trainer.rendezvous says why).

When the coordinator does not answer, training goes on: the thread tries again, and tells a restarted coordinator what
runs. When all ranks have ended with exit code 0, the agent says so until the coordinator has taken note of it. When a
generation is closed, the ranks are ordered to abort at once; torchrun then finds them gone, instead of
signalling them and waiting.
"""

import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

from tandem.coordinator_client import CoordinatorClient, GivenUp, Refused, Unreachable, readable
from tandem.exitcode import ExitCode
from tandem.process_age import process_age
from tandem.protocol import MAX_BODY_BYTES, Answer, Failure, Membership, PreflightReport, Sync
from tandem.rundir.layout import RunDir
from tandem_trainer.failure import aged, read, record
from tandem_trainer.local_ranks import LocalRanks
from tandem_trainer.stacks import write_stacks

log = logging.getLogger("tandem.agent")

RETRY_SECONDS = 0.3
"""Between two tries to reach a coordinator that does not answer: it must hear of everybody within lostAfterSeconds."""
SAY_WAITING_SECONDS = 30.0
"""Between two lines that say so."""
PAUSE_SECONDS = 0.3
"""Between two heartbeats while nothing can be done but wait for torchrun."""
WATCH_SECONDS = 0.05
"""How often ranks are looked at that have not begun to beat, or do not obey."""
FINISH_SECONDS = 30.0
"""What ranks get to finish by themselves once training is complete."""
FINISHED_SECONDS = 300.0
"""How long an agent whose ranks have finished waits for a coordinator that does not take note of it; torchrun waits for
the other agents for as long."""
FINISHED_POLL_SECONDS = 0.2
"""How often it looks whether the other agents have announced the same."""
REFUSED_SECONDS = 10.0
"""How long an agent that is refused tries again: whoever refused it may have been a proxy, or be replaced."""
STACKS_SECONDS = 2.0
"""How long a group that hangs is kept for the stacks of its ranks."""
LEAVE_SECONDS = 2.0
"""For the last message."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the agent to end."""


@dataclass(frozen=True)
class End:
    """The job is over for this agent."""

    code: int
    """What to exit with."""
    why: str


@dataclass(frozen=True)
class _Wish:
    """What torchrun's thread wants the speaker to say."""

    state: str = "idle"
    port: int = 1
    reason: str = ""
    generation: int | None = None


class Heartbeat(threading.Thread):
    """Speaks with the coordinator. All public methods may be called from torchrun's thread.

    Args:
        client: the connection, used by this thread alone.
        rundir: asked for the end of the job.
        replica, address, processes, node: see tandem.protocol.Sync.
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
        self._began, self._devices = time.monotonic() - process_age(), _devices(processes)
        self._changed = threading.Condition()
        self._wish = _Wish()
        self._membership: Membership | None = None
        self._ranks: LocalRanks | None = None
        self._failure: tuple[float, Failure] | None = None
        self._closed = False
        self._finished = False
        self._noted_at = 0.0
        self._preflight_asked = False
        self._preflight: PreflightReport | None = None
        self._leaving = False
        self._asked: signal.Signals | None = None
        self._stacks: threading.Thread | None = None
        self._idle_stacks: threading.Thread | None = None
        self._stacks_until = 0.0
        self._end: End | None = None
        self._ended_at = 0.0
        self._refused: Refused | None = None
        self._unreachable_since: float | None = None
        self._told_unreachable = 0.0
        self._refused_since: float | None = None
        self._left_at = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._signals_read, self._signals_write = os.pipe()
        os.set_blocking(self._signals_read, False)
        os.set_blocking(self._signals_write, False)

    # What torchrun's thread asks for

    def hear_signals(self) -> None:
        """Notice signals in the moment they arrive, whatever the main thread does. Call it from the main thread."""
        for number in ENDING:
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self._signals_write, warn_on_full_buffer=False)

    @property
    def asked(self) -> signal.Signals | None:
        """The signal that has asked this agent to end."""
        return self._asked

    def enter(self, port: int, reason: str) -> Membership | None:
        """Wait for a generation with this agent in it; `port` is where it listens. None: it was asked to end.

        Raises:
            SystemExit: the job is over; with the code to leave with.
            Refused: the coordinator will never let this agent in.
        """
        with self._changed:
            self._drop_ranks()
            self._membership, self._closed, self._stacks, self._idle_stacks = None, False, None, None
            self._preflight_asked = False
            self._wish = replace(self._wish, state="joining", port=port, reason=reason)
            self._wake()
            # With a timeout, so that signals are handled in between on every platform.
            while self._membership is None and self._end is None and self._refused is None and self._asked is None:
                self._changed.wait(1.0)
            if self._end is not None:
                log.info("event=over code=%d why=%r", self._end.code, self._end.why)
                raise SystemExit(self._end.code)
            if self._refused is not None:
                raise self._refused
            return self._membership

    @property
    def preflight_asked(self) -> bool:
        """Whether the generation that was joined begins with a pre-flight."""
        return self._preflight_asked

    def tell(self, report: PreflightReport) -> bool:
        """Tell what the pre-flight found, and wait for what follows: whether the ranks may start. If not, the
        generation is closed, or this agent was asked to end."""
        with self._changed:
            self._preflight = report
            self._wake()
            while self._preflight is not None and not self._closed and self._end is None and self._asked is None:
                self._changed.wait(1.0)
            may_start, self._preflight = self._preflight is None, None
            return may_start

    def watch(self, ranks: LocalRanks) -> None:
        """Look after the ranks of the generation that was joined. They are aborted when it is closed."""
        with self._changed:
            self._ranks = ranks
            if self._closed:
                ranks.order("abort")
            self._wake()

    @property
    def closed(self) -> bool:
        """Whether the generation that was joined is over."""
        return self._closed

    def why_again(self) -> str:
        """Why torchrun wants a new generation: the reason to give when joining."""
        with self._changed:
            if self._ranks is None:
                return "Started" if self._wish.generation is None else "MembershipChanged"
            verdict = self._ranks.last_verdict()
            self._failure = self._ranks.failure()
            code, failed = self._ranks.final_code(), self._rundir.failed()
            if code is not None and failed is not None and failed.get("exitCode") == code:
                self._finish(End(code, "a training process said that trying again is of no use"))
            return "MembershipChanged" if self._closed else verdict

    def started(self, pids: Mapping[int, int]) -> None:
        """Take in the processes that torchrun has started, by local rank."""
        with self._changed:
            if self._ranks is not None:
                self._ranks.started(pids)

    def ended(self, codes: Mapping[int, int]) -> None:
        """Take in how ranks failed, by their local number: exit codes, or minus the signals."""
        with self._changed:
            if self._ranks is not None:
                self._ranks.told(codes)

    def stopped_early(self) -> dict[int, int]:
        """Take in that all ranks have ended with exit code 0; the processes of those whose session had steps left, by
        local rank."""
        with self._changed:
            return {} if self._ranks is None else self._ranks.stopped_early()

    def rest(self, seconds: float) -> None:
        """Wait until torchrun has something to look at: a rank has ended, the generation is closed, or this agent is to
        end. No longer than `seconds`, and not at all while the ranks start."""
        with self._changed:
            self._changed.wait_for(self._is_eventful, seconds)

    def finish(self, is_needless: Callable[[], bool]) -> None:
        """Report that all ranks have ended with exit code 0, and wait for as long as others may use this agent's store.
        A signal that asks this agent to end is obeyed at once: nothing of its own is left to do.

        Args:
            is_needless: whether nobody uses it any more, as far as this agent knows by itself.

        Raises:
            SystemExit: the generation was closed, and this replica has to take part in the next one; or the job has
                failed.
        """
        with self._changed:
            self._finished, self._noted_at = True, time.monotonic()
        # Not under the lock: a store may be slow, and heartbeats must go on.
        if not is_needless():
            self._wake()
        while not is_needless():
            with self._changed:
                if self._asked is not None or self._end is not None or self._closed:
                    break
                if time.monotonic() - self._noted_at > FINISHED_SECONDS:
                    log.warning("event=finished-alone generation=%s", self._wish.generation)
                    break
                self._changed.wait(FINISHED_POLL_SECONDS)
        with self._changed:
            if self._end is not None and self._end.code != ExitCode.DONE:
                raise SystemExit(self._end.code)
            if self._end is None and self._closed:
                # torchrun would end with 0. With this code the replica is started again.
                raise SystemExit(ExitCode.PEER_LOST)

    def leave(self, error: Exception | None = None) -> None:
        """Send the last message, if the coordinator answers in time, and stop. It gets longer to take note of ranks
        that have finished.

        Args:
            error: what ends this agent, such as a program that cannot be started: its generation fails by it.
        """
        with self._changed:
            if error is not None and self._membership is not None and not (self._closed or self._finished):
                rank = 0 if self._ranks is None else self._ranks.first_rank
                said = record(error, None, MAX_BODY_BYTES)
                self._failure = self._failure or read(said, rank, ExitCode.FAILED, time.monotonic())
            self._finished = self._finished and not self._closed
            self._drop_ranks()
            self._wish, self._left_at = replace(self._wish, state="leaving"), time.monotonic()
            self._wake()
        if self.is_alive():
            self.join(self._leave_seconds)

    # The speaker

    def run(self) -> None:
        """Speak until told to leave."""
        while True:
            with self._changed:
                message = self._message()
            if message is None:
                self._wait(PAUSE_SECONDS)
                continue
            pause = self._speak(message)
            is_heard = message.state == "leaving" and self._unreachable_since is None
            if is_heard or (self._wish.state == "leaving" and self._is_late()):
                self._client.close()
                return
            if pause:
                self._wait(pause)

    def _speak(self, message: Sync) -> float:
        """Say it and obey the answer; returns how long to be silent then."""
        try:
            answer = self._client.sync(message, until=self._until)
        except GivenUp:
            return 0.0
        except Unreachable as error:
            now = time.monotonic()
            if self._unreachable_since is None:
                self._unreachable_since = self._told_unreachable = now
                log.warning("event=coordinator-unreachable error=%r", str(error))
            elif now - self._told_unreachable >= SAY_WAITING_SECONDS:
                self._told_unreachable = now
                silent = now - self._unreachable_since
                log.warning("event=waiting-for-coordinator seconds=%.0f error=%r", silent, str(error))
            return RETRY_SECONDS
        except Refused as error:
            return self._was_refused(error, message)
        self._refused_since = None
        if self._unreachable_since is not None:
            silent, self._unreachable_since = time.monotonic() - self._unreachable_since, None
            log.info("event=coordinator-answers-again seconds=%.1f", silent)
        with self._changed:
            return self._obey(message, answer)

    def _message(self) -> Sync | None:
        wish, ranks = self._wish, self._ranks
        if wish.state == "idle":
            return None
        finished = self._finished or None
        if wish.state == "leaving" and finished and not self._client.knows_protocol:
            # The last message would go without this word. The coordinator has just restarted, and adopts the group.
            return self._sync("running", membership=_if_small(self._membership))
        if wish.state != "running":
            return self._sync(wish.state, reason=wish.reason, finished=finished, failure=aged(self._failure))
        verdict = self._verdict()
        return self._sync(
            "running",
            reason=verdict or "",
            failure=aged(ranks.failure()) if ranks and verdict else None,
            leaving=self._leaving,
            finished=finished,
            membership=None if self._client.connected else _if_small(self._membership),
            preflight=self._preflight,
            ranks=[] if ranks is None else ranks.reports(),
        )

    def _obey(self, message: Sync, answer: Answer) -> float:
        if answer.order == "end":
            self._over(answer.why, bool(answer.left_out))
            return PAUSE_SECONDS
        if message.state == "joining":
            # torchrun's thread may have asked for something else since the message was sent.
            if answer.order == "run" and answer.membership is not None and self._wish.state == "joining":
                self._preflight_asked = bool(answer.preflight)
                self._joined(answer.membership)
            return 0.0
        if self._closed:
            return PAUSE_SECONDS
        if (message.state, message.generation) != (self._wish.state, self._wish.generation):
            # torchrun's thread has entered again while this answer was on its way: it is about the generation before.
            return 0.0
        if answer.finished:
            self._noted_at = time.monotonic()
        if answer.order == "run" and message.preflight is not None and not answer.preflight:
            self._preflight = None
            self._changed.notify_all()
        elif answer.order == "run" and answer.stacks and self._idle_stacks is None:
            self._idle_stacks = self._take_stacks()
        elif answer.order == "save" and self._ranks is not None:
            self._ranks.order("save-and-leave")
        elif answer.order == "rejoin":
            if answer.stacks and not self._stacks_are_taken():
                return WATCH_SECONDS
            log.info("event=generation-closed generation=%s why=%r", message.generation, answer.why)
            self._close_generation()
        return PAUSE_SECONDS if self._closed else 0.0

    def _stacks_are_taken(self) -> bool:
        """Have the stacks written, once; whether that is done, or has taken too long."""
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

    def _joined(self, membership: Membership) -> None:
        self._membership, self._failure = membership, None
        self._wish = replace(self._wish, state="running", generation=membership.generation, reason="")
        self._changed.notify_all()

    def _over(self, why: str, left_out: bool) -> None:
        """The job is over, at least for us. Ranks may finish by themselves after success; otherwise they must not go
        on."""
        if self._end is None:
            self._finish(End(ExitCode.LEFT_OUT, why) if left_out else _end(self._rundir, why))
        assert self._end is not None
        over_for = time.monotonic() - self._ended_at
        if self._end.code != ExitCode.DONE or over_for > FINISH_SECONDS:
            self._close_generation()

    def _close_generation(self) -> None:
        self._closed = True
        self._changed.notify_all()
        if self._ranks is not None:
            self._ranks.order("abort")

    def _sync(self, state: str, **more: object) -> Sync:
        return Sync.model_validate(
            {
                "replica": self.replica,
                "incarnation": self.incarnation,
                "address": self.address,
                "port": self._wish.port,
                "processes": self._processes,
                "state": state,
                "generation": self._wish.generation,
                "node": self._node,
                "age": time.monotonic() - self._began,
                **self._devices,
                **more,
            }
        )

    def _finish(self, end: End) -> None:
        self._end, self._ended_at = end, time.monotonic()
        self._changed.notify_all()

    def _was_refused(self, error: Refused, message: Sync) -> float:
        log.error("event=refused error=%r", str(error))
        if self._refused_since is None:
            self._refused_since = time.monotonic()
        if message.state == "joining" and time.monotonic() - self._refused_since > REFUSED_SECONDS:
            with self._changed:
                self._refused = error
                self._changed.notify_all()
        return max(RETRY_SECONDS, 1.0)

    # Waiting

    def _until(self, connection: socket.socket, seconds: float) -> bool:
        """Wait for the coordinator's answer; give up when there is something else to say."""
        deadline = time.monotonic() + seconds
        while True:
            if (seen := self._look(deadline)) is None:
                return False
            others, patience = seen
            if patience <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")
            with suppress(TimeoutError):
                if readable(connection, patience, others):
                    return True
            if self._woken():
                return False

    def _wait(self, seconds: float) -> None:
        """Be silent for so long, or until there is something to say."""
        deadline = time.monotonic() + seconds
        while True:
            if (seen := self._look(deadline)) is None:
                return
            others, patience = seen
            if patience <= 0:
                return
            poll = select.poll()
            for descriptor in others:
                poll.register(descriptor, select.POLLIN)
            poll.poll(patience * 1000)
            if self._woken():
                return

    def _look(self, deadline: float) -> tuple[list[int], float] | None:
        """Look after the ranks; what to wait for, and how long until the deadline or the next look. None: the ranks
        have given us something new to say."""
        with self._changed:
            told = self._verdict()
            seen = self._watch(deadline - time.monotonic())
            return seen if self._verdict() == told else None

    def _is_eventful(self) -> bool:
        ended = self._closed or self._end is not None or self._asked is not None
        return ended or self._ranks is None or not self._ranks.all_run

    def _watch(self, seconds: float) -> tuple[list[int], float]:
        if self._ranks is None:
            return [self._wake_read, self._signals_read], seconds
        self._ranks.watch()
        if not self._ranks.all_run:
            self._changed.notify_all()
        patience = seconds if self._ranks.settled else min(seconds, WATCH_SECONDS)
        return [self._wake_read, self._signals_read, *self._ranks.descriptors], patience

    def _verdict(self) -> str | None:
        """What the coordinator has to be told about our ranks, nothing once it knows that the generation is over."""
        return None if self._ranks is None or self._closed or self._end is not None else self._ranks.verdict()

    def _woken(self) -> bool:
        if signals := _read(self._signals_read):
            with self._changed:
                self._changed.notify_all()
        has_to_save = self._wish.state == "running" and not self._finished
        if signal.SIGTERM in signals and not self._leaving and has_to_save:
            log.info("event=has-to-go generation=%s", self._wish.generation)
            self._leaving = True
            return True
        return bool(_read(self._wake_read))

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._asked is None:
            self._asked = signal.Signals(number)

    def _wake(self) -> None:
        os.write(self._wake_write, b"!")

    @property
    def _leave_seconds(self) -> float:
        is_news = self._finished and self._end is None and self._asked is None
        return FINISHED_SECONDS if is_news else LEAVE_SECONDS

    def _is_late(self) -> bool:
        """Whether the last message has been tried for long enough."""
        return time.monotonic() - self._left_at + RETRY_SECONDS > self._leave_seconds

    def _drop_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _devices(processes: int) -> dict[str, object]:
    """The CPUs and GPUs of a worker with this many ranks, for the ledger."""
    gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS", "")
    seen = None if gpus is None else len([name for name in gpus.split(",") if name.strip() not in ("", "-1")])
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"cpus": float(processes * int(threads) if threads.isdecimal() else usable), "gpus": seen}


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 64)
    except BlockingIOError:
        return b""


def _end(rundir: RunDir, why: str) -> End:
    if rundir.done() is not None:
        return End(ExitCode.DONE, why)
    if (failed := rundir.failed()) is not None:
        code = failed.get("exitCode")
        return End(code if isinstance(code, int) and 0 < code < 256 else ExitCode.FAILED, why)
    return End(ExitCode.SUPERSEDED, why)


def _if_small(membership: Membership | None) -> Membership | None:
    """A large membership is not repeated: the coordinator has it in its state store."""
    if membership is None or len(membership.model_dump_json()) > MAX_BODY_BYTES // 2:
        return None
    return membership
