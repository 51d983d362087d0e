"""The ranks of one replica in one generation, from the agent's side: pulses, processes, exits.

torchrun starts and reaps the processes; its rendezvous handler never learns how one ended. What it has to know it
learns here: a pidfd says at once that a process has ended, and `waitid` with WNOWAIT how, without taking the status
away from torchrun. Of a rank that was forked warm, and is no child of the agent, the fork server says how it ended.
Where neither can, the rank's last word stands for it.

A script of the user's own obeys no orders, whether it says how far it is (tandem_trainer.step_log) or nothing. How it
ended, torchrun says; and torchrun ends it, with SIGTERM and time to react.

An exit code of tandem.exitcode means what it says there only if Tandem, in the rank, has announced it
(tandem_trainer.pulse). From any other program it is a failure like any other.

What a rank failed by it leaves in its pulse (tandem_trainer.failure).

Where a script says nothing of its GPU, the agent asks (tandem_trainer.gpu_watch). One that has no pulse is reported of
only for that.
"""

import fcntl
import logging
import math
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tandem.exitcode import ExitCode
from tandem.protocol import DEBUGGER, MAX_ERROR, SCRIPT, STARTING, STOPPED, Failure, RankReport
from tandem_trainer.failure import EndedAlone, StoppedEarly, read, record
from tandem_trainer.gpu_watch import GpuUse, GpuWatch
from tandem_trainer.pulse import Order, ProcessorUse, PulseView
from tandem_trainer.stacks import Subject, is_stopped
from tandem_trainer.warm import forkserver
from tandem_trainer.warm.leftovers import end_leftovers

log = logging.getLogger("tandem.agent")

MIN_SECONDS = 0.2
"""Of less than that no processor use is told: the clock of processor time is too coarse."""
ABORT_SECONDS = 0.5
"""A rank that lives so long after an abort is stopped, or stuck in code that holds the interpreter lock: kill it."""

PREFIX = "tandem-g"
LEAVING_SECONDS = 10.0
"""Folders that are younger are left alone."""

HARMLESS = {
    *(ExitCode.SUPERSEDED, ExitCode.PREEMPTED, ExitCode.PEER_LOST),
    *(ExitCode.REWOUND, ExitCode.OUT_OF_MEMORY),
}
"""Ends that, if they are announced, are no failure of the rank: their cause is elsewhere, or the next generation will
do otherwise."""

ENDED_BY_TORCHRUN = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals with which torchrun ends the ranks of an agent that is asked to end; they are no failure of the ranks."""

FINAL = {ExitCode.CONFIGURATION, ExitCode.DIVERGED}
"""Ends after which trying again is of no use; the rank has said why in the run directory."""

Verdict = Literal["WorkerFailed", "MembershipChanged"]


class LocalRanks:
    """The ranks of this replica in one generation.

    Args:
        generation: its number.
        processes: how many ranks there are.
        first_rank: the global rank of the first one.
        gpus: asks about the GPUs of scripts that say nothing of theirs; None asks nobody.
    """

    def __init__(self, generation: int, processes: int, first_rank: int = 0, gpus: GpuWatch | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{generation:06d}-", dir=_memory_folder()))
        self._lock = _lock(self.folder)
        self.generation = generation
        self.first_rank, self._gpus = first_rank, gpus
        self._started: dict[int, int] = {}
        self._views = [PulseView(self.folder, local_rank) for local_rank in range(processes)]
        self._pidfds: dict[int, int] = {}
        self._seen: set[int] = set()
        self._usage: dict[int, tuple[ProcessorUse, float | None]] = {}
        self._codes: dict[int, int | None] = {}
        self._ended_at: dict[int, float] = {}
        self._abort_at: float | None = None
        self._pids: dict[int, int] = {}
        self._endings = forkserver.endings
        self._forked: dict[int, int] = {}

    # What the ranks do

    def watch(self) -> None:
        """Take in ranks that have begun to beat and ranks that have ended, and kill those that do not obey."""
        for local_rank, view in enumerate(self._views):
            if local_rank not in self._seen and (beat := view.beat()) is not None:
                self._seen.add(local_rank)
                self._follow(local_rank, beat.pid)
                view.unlink()
        if len(self._seen) == len(self._views) and self.folder.exists():
            self.folder.rmdir()
        for local_rank, pidfd in list(self._pidfds.items()):
            if _has_ended(pidfd):
                end_leftovers(self._pids[local_rank])
                self._end(local_rank, _exit_code(pidfd))
        self._hear_endings()
        if self._abort_at is not None and time.monotonic() - self._abort_at > ABORT_SECONDS:
            self._kill()

    @property
    def descriptors(self) -> list[int]:
        """Become readable when a rank ends, and when it is known how."""
        said = None if self._endings is None else self._endings.descriptor
        return [*self._pidfds.values(), *([] if said is None else [said])]

    @property
    def settled(self) -> bool:
        """Whether `watch` need only be called when a descriptor is readable."""
        return len(self._seen) == len(self._views) and (self._abort_at is None or not self._pidfds)

    @property
    def all_run(self) -> bool:
        """Whether all ranks are there, none has ended, and the kernel says when one does."""
        return len(self._pidfds) == len(self._views) and not self._codes

    def verdict(self) -> Verdict | None:
        """Why a new generation is needed, judged by the first rank that ended otherwise than done; None if none has."""
        for local_rank, code in self._codes.items():
            if code in HARMLESS and self._has_announced(local_rank, code):
                return "MembershipChanged"
            if self._stopped_early(local_rank):
                return "WorkerFailed"
            if code != ExitCode.DONE and not (code is None and self._runs_script(local_rank)):
                return "WorkerFailed"
        return None

    def started(self, pids: Mapping[int, int]) -> None:
        """Take in which processes torchrun has started, by local rank. Of a rank that is forked warm it is the stub."""
        self._started = dict(pids)

    def told(self, codes: Mapping[int, int]) -> None:
        """Take in what torchrun says of ranks that have failed: exit codes, or minus the signals."""
        for local_rank, code in codes.items():
            if self._codes.get(local_rank) is None and local_rank < len(self._views):
                self._note(local_rank, code)

    def stopped_early(self) -> dict[int, int]:
        """Take in that torchrun found exit code 0 of all ranks; the processes of those whose session had steps left, by
        local rank."""
        self.watch()
        for local_rank in self._pids:
            if self._codes.get(local_rank) is None:
                self._note(local_rank, ExitCode.DONE)
        return {local_rank: pid for local_rank, pid in self._pids.items() if self._stopped_early(local_rank)}

    def failure(self) -> tuple[float, Failure] | None:
        """When a rank of these failed first, on the monotonic clock, and by what; consequences of what happened to
        others only where there is nothing else."""
        found = []
        for local_rank, code in self._codes.items():
            stopped_early = self._stopped_early(local_rank)
            if code is None or (code == ExitCode.DONE and not stopped_early):
                continue
            view = self._views[local_rank]
            beat, said = view.beat(), view.failure()
            rank = self.first_rank + local_rank if beat is None else beat.rank
            if stopped_early and beat is not None:
                said = record(StoppedEarly(beat.step, beat.total_steps), None, MAX_ERROR)
            announced = self._has_announced(local_rank, code)
            at, failure = read(said, rank, code, self._ended_at[local_rank], announced)
            step = None if beat is None or (beat.phase == SCRIPT and not beat.step) else beat.step
            found.append((at, failure.model_copy(update={"step": step})))
        if found and all(failure.consequence for _, failure in found):
            # A collective cannot work any more, once one of its ranks has ended.
            ended = [one for one, code in self._codes.items() if code == ExitCode.DONE]
            words = record(EndedAlone(), None, MAX_ERROR)
            found += [read(words, self.first_rank + one, 0, self._ended_at[one]) for one in ended]
        return min(found, key=lambda one: (one[1].consequence, one[0]), default=None)

    def last_verdict(self) -> Verdict:
        """The verdict when torchrun says that they have all ended, also of ranks that were never seen."""
        self.watch()
        if (verdict := self.verdict()) is not None:
            return verdict
        words = [view.announced() for view in self._views]
        return "MembershipChanged" if any(word in HARMLESS for word in words) else "WorkerFailed"

    def final_code(self) -> int | None:
        """The exit code of a rank that says that trying again is of no use; None if none says so."""
        return next((code for view in self._views if (code := view.announced()) in FINAL), None)

    def reports(self) -> list[RankReport]:
        """What the ranks say of themselves, for the coordinator."""
        reports = []
        watch = self._gpus
        gpus = {} if watch is None or watch.absent else watch.look(self._silent_of_gpu())
        for local_rank, view in enumerate(self._views):
            seen = gpus.get(local_rank)
            if (beat := view.beat()) is None:
                if seen is not None:
                    reports.append(_without_beats(self.first_rank + local_rank, seen))
                continue
            usage, cpu = self._used(local_rank, view)
            gpu, gpu_memory = (None, None) if usage is None else (usage.gpu, usage.gpu_memory_bytes)
            if seen is not None:
                gpu, gpu_memory = seen.busy, seen.memory_bytes
            is_script = self._runs_script(local_rank)
            # No step is due of one that has ended well, while others may go on.
            phase = SCRIPT if is_script and local_rank in self._codes else beat.phase
            debugged = view.is_debugged and local_rank not in self._codes
            reports.append(
                RankReport(
                    rank=beat.rank,
                    step=beat.step,
                    phase=STOPPED if is_stopped(beat.pid) else DEBUGGER if debugged else phase,
                    pauses=debugged or (beat.pauses and phase == beat.phase),
                    script=is_script,
                    finishing=beat.finishing,
                    total_steps=beat.total_steps,
                    epoch=_finite(beat.epoch),
                    loss=_finite(beat.loss),
                    loss_is_finite=beat.loss is None or math.isfinite(beat.loss),
                    throughput=_finite(beat.throughput),
                    busy_seconds=_finite(beat.busy_seconds),
                    saves=beat.phase != STARTING and not is_script,
                    cpu=cpu,
                    used_before=None if usage is None else max(0.0, round(time.monotonic() - usage.at, 3)),
                    gpu=gpu,
                    gpu_memory_bytes=gpu_memory,
                    trouble=view.trouble(),
                )
            )
        return reports

    # What is done to them

    def order(self, order: Order) -> None:
        """Give all ranks an order."""
        if order == "abort" and self._abort_at is None:
            # Who has ended by now, has not ended by this.
            self.watch()
            self._abort_at = time.monotonic()
        for view in self._views:
            view.order(order)

    def subjects(self) -> list[Subject]:
        """The living ranks, for the question where they hang."""
        found = []
        for local_rank, pidfd in self._pidfds.items():
            view = self._views[local_rank]
            beat = view.beat()
            assert beat is not None, "it is followed since its first beat"
            silent = f"{beat.phase} after step {beat.step}, silent for {time.monotonic() - beat.at:.1f} s"
            doing = "a script of the user's own" if beat.phase == SCRIPT else silent
            found.append(Subject(beat.rank, beat.pid, os.dup(pidfd), os.dup(view.stacks), doing))
        return found

    def close(self) -> None:
        """Let go of them. Those that still live leave."""
        if self._gpus is not None:
            self._gpus.look({})
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        for view in self._views:
            view.order("abort")
            view.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # Details

    def _follow(self, local_rank: int, pid: int) -> None:
        self._pids[local_rank] = pid
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfds[local_rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end(local_rank, None)

    def _end(self, local_rank: int, code: int | None) -> None:
        if (pidfd := self._pidfds.pop(local_rank, None)) is not None:
            os.close(pidfd)
        if code is None:
            code = self._views[local_rank].last_word()
        self._codes[local_rank] = code
        self._ended_at[local_rank] = time.monotonic()
        # Of one that was forked and killed, the fork server or torchrun says how; of one that torchrun ends, nobody.
        if code is not None:
            self._note(local_rank, code)

    def _hear_endings(self) -> None:
        """Take in what the fork server says of ranks that left no word: they were killed, and not by this agent."""
        if self._endings is None:
            return
        self._forked |= self._endings.read()
        for local_rank, pid in self._pids.items():
            unknown = self._codes.get(local_rank, ExitCode.DONE) is None and not self._runs_script(local_rank)
            code = self._forked.get(pid)
            if not unknown or code is None or -code in ENDED_BY_TORCHRUN:
                continue
            if self._abort_at is None or self._ended_at[local_rank] < self._abort_at:
                self._note(local_rank, code)

    def _note(self, local_rank: int, code: int) -> None:
        self._codes[local_rank] = code
        self._ended_at.setdefault(local_rank, time.monotonic())
        how = f"code={code}" if code >= 0 else f"signal={-code}"
        log.info("event=rank-ended generation=%d local_rank=%d %s", self.generation, local_rank, how)

    def _has_announced(self, local_rank: int, code: int | None) -> bool:
        """Whether Tandem, in the rank, said before its end that it would end with this exit code."""
        return code is not None and self._views[local_rank].announced() == code

    def _stopped_early(self, local_rank: int) -> bool:
        """Whether the process ended with 0 in the middle of a session."""
        view = self._views[local_rank]
        return self._codes.get(local_rank) == ExitCode.DONE and view.beat() is not None and not view.is_complete

    def _runs_script(self, local_rank: int) -> bool:
        beat = self._views[local_rank].beat()
        return beat is not None and (beat.phase == SCRIPT or self._views[local_rank].runs_script)

    def _silent_of_gpu(self) -> dict[int, int]:
        """The processes of scripts that run and say nothing of their GPU, by local rank."""
        pids = {}
        for local_rank, view in enumerate(self._views):
            if local_rank in self._codes:
                continue
            if (beat := view.beat()) is None:
                if local_rank in self._started:
                    pids[local_rank] = self._started[local_rank]
            elif self._runs_script(local_rank):
                usage = view.usage()
                if usage is None or (usage.gpu is None and usage.gpu_memory_bytes is None):
                    pids[local_rank] = beat.pid
        return pids

    def _is_stopped(self, local_rank: int) -> bool:
        beat = self._views[local_rank].beat()
        return beat is not None and is_stopped(beat.pid)

    def _kill(self) -> None:
        for local_rank, pidfd in self._pidfds.items():
            if self._runs_script(local_rank) and not self._is_stopped(local_rank):
                continue
            log.warning("event=rank-killed generation=%d local_rank=%d", self.generation, local_rank)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        self._abort_at = time.monotonic()

    def _used(self, local_rank: int, view: PulseView) -> tuple[ProcessorUse | None, float | None]:
        """The newest sample of processor use, and the busy cores since the one reported before, or the first."""
        usage = view.usage()
        before, cpu = self._usage.get(local_rank, (None, None))
        if usage is None or (before is not None and usage.at <= before.at):
            return before, cpu
        at, used = (usage.first_at, usage.first_cpu_seconds) if before is None else (before.at, before.cpu_seconds)
        if before is None and usage.at - at < MIN_SECONDS:
            return usage, None
        cpu = max(0.0, (usage.cpu_seconds - used) / (usage.at - at))
        self._usage[local_rank] = (usage, cpu)
        return usage, cpu


def remove_leavings() -> None:
    """Remove the folders of this user's agents that were killed: nobody holds their locks any more.

    All users of a machine share the place: whatever others have put there under such a name is left alone.
    """
    for folder in Path(_memory_folder() or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            # A folder may be younger than its lock.
            if time.time() - folder.lstat().st_mtime > LEAVING_SECONDS and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user's for as long as this process lives; None if another process has, or another user.

    Raises:
        OSError: it is not there, or is no folder.
    """
    # A link would lead elsewhere, and a pipe would be waited for until somebody writes into it.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _memory_folder() -> str | None:
    """A folder in memory, so that a beat never waits for a disk; the usual temporary folder where there is none."""
    memory = "/dev/shm"  # noqa: S108 - mkdtemp makes a private folder in it
    return memory if os.access(memory, os.W_OK) else None


def _without_beats(rank: int, seen: GpuUse) -> RankReport:
    """What is known of a rank that has no pulse."""
    return RankReport(
        rank=rank,
        step=0,
        phase=SCRIPT,
        script=True,
        used_before=max(0.0, round(time.monotonic() - seen.at, 3)),
        gpu=seen.busy,
        gpu_memory_bytes=seen.memory_bytes,
    )


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _exit_code(pidfd: int) -> int | None:
    """How the process ended, as subprocess counts: its exit code, or minus the signal; None if it is not our child."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
