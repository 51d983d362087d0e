"""The ranks of one replica in one generation, from the agent's side: pulses, processes, exits.

torchrun starts and reaps the processes; its rendezvous handler never learns how one ended. This module finds out: a
pidfd shows at once that a process has ended, and `waitid` with WNOWAIT how, without taking the status away from
torchrun. A rank that was forked warm is no child of the agent: the fork server reports how it ended. Where neither
can, the exit code that the rank announced stands for it.

A script of the user's own obeys no orders, whether it reports its steps (tandem_trainer.step_log) or not. torchrun
reports how it ended; and torchrun ends it, with SIGTERM and time to react.

An exit code of tandem.processes.exitcode has its meaning only if Tandem, in the rank, has announced it
(tandem_trainer.pulse). From any other program it is a failure like any other.

A rank that fails leaves its error in its pulse (tandem_trainer.failure).

Where a script does not report its GPU, the agent measures it (tandem_trainer.agent.gpu_watch). A rank without a pulse
is reported for that alone.
"""

import fcntl
import logging
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tandem.processes.exitcode import ExitCode
from tandem.processes.limits import describe_kill, oom_kills
from tandem.wire.protocol import (
    DEBUGGER,
    MAX_ERROR_LENGTH,
    SCRIPT,
    STARTING,
    STOPPED,
    Failure,
    Membership,
    RankReport,
)
from tandem_trainer.agent.gpu_watch import GpuUse, GpuWatch
from tandem_trainer.agent.warm import forkserver
from tandem_trainer.agent.warm.leftovers import end_leftovers
from tandem_trainer.failure import EndedAlone, StoppedEarly, read, record
from tandem_trainer.pulse import MIXED, PARKED, PREPARED, SURVIVES, Order, ProcessorUse, PulseView, RankPlace
from tandem_trainer.stacks import Subject, is_stopped

log = logging.getLogger("tandem.agent")

MIN_USAGE_SECONDS = 0.2
"""Minimum time over which processor use is reported, in seconds: the clock of processor time is too coarse."""
PARK_SECONDS = 30.0
"""Time for which ranks that can regroup may compute before they wait for the next generation, in seconds: a forward
pass is not interrupted."""
ABORT_SECONDS = 0.5
"""Time after an abort at which a living rank is killed, in seconds: it is stopped, or stuck in code that holds the
interpreter lock."""

OOM_READINGS = 4
"""Number of readings of the kernel's counter of kills that are held: a kill is noticed within some heartbeats."""
FOLDER_PREFIX = "tandem-g"
STALE_FOLDER_SECONDS = 10.0
"""Minimum age of a folder that is removed as stale, in seconds."""

NO_FAILURE = {
    *(ExitCode.SUPERSEDED, ExitCode.PREEMPTED, ExitCode.PEER_LOST),
    *(ExitCode.REWOUND, ExitCode.OUT_OF_MEMORY),
}
"""Exit codes that, if announced, are no failure of the rank: their cause is elsewhere, or the next generation does
otherwise."""

ENDED_BY_TORCHRUN = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals with which torchrun ends the ranks of an agent that is asked to end; they are no failure of the ranks."""

FINAL_CODES = {ExitCode.CONFIGURATION, ExitCode.DIVERGED}
"""Exit codes after which a restart is of no use; the rank has recorded the reason in the run directory."""

SHELL_SIGNAL_BASE = 128
"""Exit codes above this are those of a shell whose child was killed, or of a program that obeys a signal: this number
plus the signal's."""

WAITING = {PARKED, PREPARED}
SURVIVING = {SURVIVES, *WAITING}
"""States of a rank that waits for the next generation."""

Verdict = Literal["WorkerFailed", "MembershipChanged"]


class LocalRanks:
    """Ranks of this replica in one generation.

    Args:
        generation: number of the generation.
        processes: number of ranks.
        first_rank: global rank of the first one.
        gpus: measures the GPUs of scripts that do not report theirs; None measures none.
    """

    def __init__(self, generation: int, processes: int, first_rank: int = 0, gpus: GpuWatch | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{generation:06d}-", dir=_memory_folder()))
        self._lock = _lock(self.folder)
        self.generation = generation
        self.first_rank, self._gpus = first_rank, gpus
        self._started: dict[int, int] = {}
        self._views = [PulseView(self.folder, local_rank) for local_rank in range(processes)]
        self._pidfds: dict[int, int] = {}
        self._beating: set[int] = set()
        self._usage: dict[int, tuple[ProcessorUse, float | None]] = {}
        self._codes: dict[int, int | None] = {}
        self._ended_at: dict[int, float] = {}
        self._abort_at: float | None = None
        self._regroup_at: float | None = None
        self._has_parked = False
        """Whether a rank waited for the next generation when they were last watched."""
        self._has_regrouped, self._patience = False, PARK_SECONDS
        self._pids: dict[int, int] = {}
        self._fork_server_exits = forkserver.endings
        self._forked_codes: dict[int, int] = {}
        self._oom_kills = deque([oom_kills()], maxlen=OOM_READINGS)
        """Newest readings of the kernel's counter, one a report. The oldest is from before a kill that is noticed
        now."""

    # State of the ranks

    def watch(self) -> None:
        """Update the state: ranks that have started to beat, ranks that have ended. Kill those that do not obey an
        abort."""
        for local_rank, view in enumerate(self._views):
            view.read_news()
            if local_rank not in self._beating and (beat := view.beat()) is not None:
                self._beating.add(local_rank)
                # From the first beat on, rank and agent hold the files open, so the names can go.
                self._track(local_rank, beat.pid)
                view.unlink()
        if len(self._beating) == len(self._views) and self.folder.exists():
            self.folder.rmdir()
        for local_rank, pidfd in list(self._pidfds.items()):
            if _has_ended(pidfd):
                end_leftovers(self._pids[local_rank])
                self._record_end(local_rank, _exit_code(pidfd))
        self._read_fork_server()
        self._has_parked = self.any_parked
        if self._abort_at is not None and time.monotonic() - self._abort_at > ABORT_SECONDS:
            self._kill()

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when a rank ends, when its exit code is known, and when it leaves its
        group."""
        exits = None if self._fork_server_exits is None else self._fork_server_exits.descriptor
        news = [view.news for view in self._views]
        return [*self._pidfds.values(), *news, *([] if exits is None else [exits])]

    @property
    def is_event_driven(self) -> bool:
        """Whether `watch` need be called only when a descriptor is readable."""
        return len(self._beating) == len(self._views) and (self._abort_at is None or not self._pidfds)

    @property
    def all_running(self) -> bool:
        """Whether all ranks run, and the kernel reports the end of each."""
        return len(self._pidfds) == len(self._views) and not self._codes

    def verdict(self) -> Verdict | None:
        """Reason for a new generation, judged by the first rank that ended otherwise than done; None if none has."""
        # In the order in which the ranks ended: the first one is the cause, and the others follow from it.
        for local_rank, code in self._codes.items():
            if code in NO_FAILURE and self._has_announced(local_rank, code):
                return "MembershipChanged"
            if self._stopped_early(local_rank):
                return "WorkerFailed"
            if code != ExitCode.DONE and not (code is None and self._runs_script(local_rank)):
                return "WorkerFailed"
        # A rank that has lost its peers, and waits for the next generation.
        if self._regroup_at is None and self._has_parked:
            return "MembershipChanged"
        return None

    @property
    def any_parked(self) -> bool:
        """Whether a rank has left its group, and waits for the next generation."""
        return any(view.regroup_state in WAITING for view in self._views)

    @property
    def survive(self) -> bool:
        """Whether all ranks run, and can go on in another generation."""
        return self.all_running and all(view.regroup_state in SURVIVING for view in self._views)

    @property
    def are_parked(self) -> bool:
        """Whether all ranks have left their group, and wait for the next generation."""
        return self.all_running and all(view.regroup_state in WAITING for view in self._views)

    @property
    def hold_state(self) -> bool:
        """Whether a rank that waits for the next generation holds a state of the run."""
        return any(view.regroup_state == PARKED for view in self._views)

    @property
    def any_mixed(self) -> bool:
        """Whether a rank was in a group of which some ranks run the script from its beginning, and others are in its
        loop."""
        return any(view.regroup_state == MIXED for view in self._views)

    @property
    def any_ended(self) -> bool:
        """Whether a rank has ended."""
        return bool(self._codes)

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks run, and are about to leave their group as ordered: none is stopped, stuck in code
        that holds the interpreter lock, or takes too long."""
        if self._regroup_at is None or not self.survive:
            return False
        seconds = time.monotonic() - self._regroup_at
        return seconds < (self._patience if all(view.has_acknowledged for view in self._views) else ABORT_SECONDS)

    def enter(self, membership: Membership, index: int) -> None:
        """Give the ranks, which wait, their places in a new generation.

        Args:
            index: index of this replica among the members.
        """
        self.generation, self.first_rank = membership.generation, membership.first_rank(index)
        self._has_regrouped = True
        self._regroup_at, self._has_parked, self._usage = None, False, {}
        first = membership.members[0]
        for local_rank, view in enumerate(self._views):
            rank = self.first_rank + local_rank
            view.assign(RankPlace(self.generation, rank, membership.world_size, first.address, first.port))

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the processes that torchrun has started, by local rank. For a rank that is forked warm, it is the
        stub."""
        self._started = dict(pids)

    def record_exit_codes(self, codes: Mapping[int, int]) -> None:
        """Record the exit codes of ranks that have failed, as torchrun reports them: exit codes, or minus the
        signals."""
        for local_rank, code in codes.items():
            if self._codes.get(local_rank) is None and local_rank < len(self._views):
                self._record_code(local_rank, code)

    def stopped_early(self) -> dict[int, int]:
        """Record that torchrun found exit code 0 of all ranks. Returns the processes of those whose session had steps
        left, by local rank."""
        self.watch()
        for local_rank in self._pids:
            if self._codes.get(local_rank) is None:
                self._record_code(local_rank, ExitCode.DONE)
        return {local_rank: pid for local_rank, pid in self._pids.items() if self._stopped_early(local_rank)}

    def failure(self) -> tuple[float, Failure] | None:
        """Return the first failure among these ranks, and its time on the monotonic clock; consequences of a failure
        elsewhere only if there is nothing else."""
        failures = []
        for local_rank, code in self._codes.items():
            # A session that exits with 0 before its last step has failed, too.
            stopped_early = self._stopped_early(local_rank)
            if code is None or (code == ExitCode.DONE and not stopped_early):
                continue
            view = self._views[local_rank]
            beat, content = view.beat(), view.failure()
            # The last beat of a rank that has got another place since may have the number of the place before.
            is_old = beat is None or (self._has_regrouped and beat.generation < self.generation)
            rank = self.first_rank + local_rank if beat is None or is_old else beat.rank
            if stopped_early and beat is not None:
                content = record(StoppedEarly(beat.step, beat.total_steps), None, MAX_ERROR_LENGTH)
            announced = self._has_announced(local_rank, code)
            failed_at, failure = read(content, rank, code, self._ended_at[local_rank], announced)
            if not failure.error and (killed := describe_kill(code, self._oom_kills[0])):
                failure = failure.model_copy(update={"error": killed})
            step = None if beat is None or (beat.phase == SCRIPT and not beat.step) else beat.step
            failures.append((failed_at, failure.model_copy(update={"step": step})))
        if failures and all(failure.consequence for _, failure in failures):
            # Every failed rank blames a peer. Then the cause is a rank that left early with exit code 0: collectives
            # need it.
            completed = [rank for rank, code in self._codes.items() if code == ExitCode.DONE]
            content = record(EndedAlone(), None, MAX_ERROR_LENGTH)
            failures += [read(content, self.first_rank + rank, 0, self._ended_at[rank]) for rank in completed]
        return min(failures, key=lambda failure: (failure[1].consequence, failure[0]), default=None)

    def last_verdict(self) -> Verdict:
        """Return the verdict when torchrun says that all ranks have ended, including ranks that never beat."""
        self.watch()
        if (verdict := self.verdict()) is not None:
            return verdict
        codes = [view.announced() for view in self._views]
        return "MembershipChanged" if any(code in NO_FAILURE for code in codes) else "WorkerFailed"

    def final_code(self) -> int | None:
        """Exit code of a rank that says that a restart is of no use; None if none does."""
        return next((code for view in self._views if (code := view.announced()) in FINAL_CODES), None)

    def reports(self) -> list[RankReport]:
        """Collect the reports of the ranks, for the coordinator."""
        reports = []
        self._oom_kills.append(oom_kills())
        watch = self._gpus
        gpus = {} if watch is None or watch.absent else watch.poll(self._without_gpu_use())
        for local_rank, view in enumerate(self._views):
            gpu_use = gpus.get(local_rank)
            beat = view.beat()
            if self._has_regrouped and beat is not None and beat.generation < self.generation:
                continue  # its last beat of the generation before
            if beat is None:
                if gpu_use is not None:
                    reports.append(_report_without_pulse(self.first_rank + local_rank, gpu_use))
                continue
            usage, cpu = self._processor_use(local_rank, view)
            gpu, gpu_memory = (None, None) if usage is None else (usage.gpu, usage.gpu_memory_bytes)
            if gpu_use is not None:
                gpu, gpu_memory = gpu_use.busy, gpu_use.memory_bytes
            is_script = self._runs_script(local_rank)
            # A script that has ended well owes no step, while others may go on.
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
                    saves=(beat.phase != STARTING and not is_script) or view.regroup_state in SURVIVING,
                    survives=view.regroup_state in SURVIVING,
                    cpu=cpu,
                    used_before=None if usage is None else max(0.0, round(time.monotonic() - usage.sampled_at, 3)),
                    gpu=gpu,
                    gpu_memory_bytes=gpu_memory,
                    trouble=view.trouble(),
                )
            )
        return reports

    # Orders

    def order(self, order: Order, patience: float = PARK_SECONDS) -> None:
        """Send an order to all ranks.

        Args:
            patience: time for which ranks that regroup may compute before they leave their group, in seconds.
        """
        if order == "abort" and self._abort_at is None:
            # Ranks that ended before the abort were not ended by it. Record them first.
            self.watch()
            self._abort_at = time.monotonic()
        if order == "regroup":
            self._regroup_at, self._patience = time.monotonic(), patience
        for view in self._views:
            view.order(order)

    def subjects(self) -> list[Subject]:
        """Return the living ranks, for a dump of their stacks."""
        subjects = []
        for local_rank, pidfd in self._pidfds.items():
            view = self._views[local_rank]
            beat = view.beat()
            assert beat is not None, "it is followed since its first beat"
            state = f"{beat.phase} after step {beat.step}, silent for {time.monotonic() - beat.reported_at:.1f} s"
            doing = "a script of the user's own" if beat.phase == SCRIPT else state
            subjects.append(Subject(beat.rank, beat.pid, os.dup(pidfd), os.dup(view.stacks), doing))
        return subjects

    def close(self) -> None:
        """Release the ranks. Those that still live leave."""
        if self._gpus is not None:
            self._gpus.poll({})
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

    def _track(self, local_rank: int, pid: int) -> None:
        self._pids[local_rank] = pid
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfds[local_rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._record_end(local_rank, None)

    def _record_end(self, local_rank: int, code: int | None) -> None:
        if (pidfd := self._pidfds.pop(local_rank, None)) is not None:
            os.close(pidfd)
        if code is None:
            code = self._views[local_rank].last_word()
        self._codes[local_rank] = code
        self._ended_at[local_rank] = time.monotonic()
        # A forked rank that was killed: the fork server or torchrun reports the code. One that torchrun ends: nobody
        # does.
        if code is not None:
            self._record_code(local_rank, code)

    def _read_fork_server(self) -> None:
        """Record exit codes that the fork server reports, of ranks that announced none: they were killed, and not by
        this agent."""
        if self._fork_server_exits is None:
            return
        self._forked_codes |= self._fork_server_exits.read()
        for local_rank, pid in self._pids.items():
            unknown = self._codes.get(local_rank, ExitCode.DONE) is None and not self._runs_script(local_rank)
            code = self._forked_codes.get(pid)
            if not unknown or code is None or -code in ENDED_BY_TORCHRUN:
                continue
            if self._abort_at is None or self._ended_at[local_rank] < self._abort_at:
                self._record_code(local_rank, code)

    def _record_code(self, local_rank: int, code: int) -> None:
        self._codes[local_rank] = code
        self._ended_at.setdefault(local_rank, time.monotonic())
        how = f"code={code}" if code >= 0 else f"signal={-code}"
        log.info("event=rank-ended generation=%d local_rank=%d %s", self.generation, local_rank, how)

    def _has_announced(self, local_rank: int, code: int | None) -> bool:
        """Whether Tandem, in the rank, announced this exit code before the end."""
        return code is not None and self._views[local_rank].announced() == code

    def _stopped_early(self, local_rank: int) -> bool:
        """Whether the process ended with exit code 0 in the middle of a session."""
        view = self._views[local_rank]
        return self._codes.get(local_rank) == ExitCode.DONE and view.beat() is not None and not view.is_complete

    def _runs_script(self, local_rank: int) -> bool:
        beat = self._views[local_rank].beat()
        return beat is not None and (beat.phase == SCRIPT or self._views[local_rank].runs_script)

    def _without_gpu_use(self) -> dict[int, int]:
        """Processes of running scripts that do not report their GPU, by local rank."""
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
            # torchrun ends scripts by itself. It cannot end one that is stopped.
            if self._runs_script(local_rank) and not self._is_stopped(local_rank):
                continue
            log.warning("event=rank-killed generation=%d local_rank=%d", self.generation, local_rank)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # A killed process may take a moment to die; the next signal is due after the same time again.
        self._abort_at = time.monotonic()

    def _processor_use(self, local_rank: int, view: PulseView) -> tuple[ProcessorUse | None, float | None]:
        """Return the newest sample of processor use, and the busy cores since the sample reported before, or since the
        first."""
        usage = view.usage()
        before, cpu = self._usage.get(local_rank, (None, None))
        if usage is None or (before is not None and usage.sampled_at <= before.sampled_at):
            return before, cpu
        since, used_before = (
            (usage.first_at, usage.first_cpu_seconds) if before is None else (before.sampled_at, before.cpu_seconds)
        )
        if before is None and usage.sampled_at - since < MIN_USAGE_SECONDS:
            return usage, None
        cpu = max(0.0, (usage.cpu_seconds - used_before) / (usage.sampled_at - since))
        self._usage[local_rank] = (usage, cpu)
        return usage, cpu


def devices_of_worker(processes: int) -> dict[str, object]:
    """CPUs and GPUs of a worker with this many ranks, for the coordinator's ledger."""
    gpus, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS", "")
    gpu_count = None if gpus is None else len([name for name in gpus.split(",") if name.strip() not in ("", "-1")])
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"cpus": float(processes * int(threads) if threads.isdecimal() else usable), "gpus": gpu_count}


def remove_stale_folders() -> None:
    """Remove the folders of killed agents of this user: nobody holds their locks any more.

    All users of a machine share the location: folders of others under such a name are left alone.
    """
    for folder in Path(_memory_folder() or tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            # A folder may be younger than its lock.
            if time.time() - folder.lstat().st_mtime > STALE_FOLDER_SECONDS and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user for as long as this process lives; None if another process or another user has it.

    Raises:
        OSError: the folder does not exist, or is no folder.
    """
    # Do not follow a link, which would lead elsewhere, and do not block on a pipe, which waits for a writer.
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


def signal_of(code: int) -> int:
    """Return the number of the signal that an exit code stands for; not positive if it stands for none."""
    return -code if code < 0 else code - SHELL_SIGNAL_BASE


def _memory_folder() -> str | None:
    """Return a folder in memory, so that a beat never waits for a disk; None, the usual temporary folder, where there
    is none."""
    memory = "/dev/shm"  # noqa: S108 - mkdtemp makes a private folder in it
    return memory if os.access(memory, os.W_OK) else None


def _report_without_pulse(rank: int, gpu_use: GpuUse) -> RankReport:
    """Report a rank that has no pulse, by its GPU alone."""
    return RankReport(
        rank=rank,
        step=0,
        phase=SCRIPT,
        script=True,
        used_before=max(0.0, round(time.monotonic() - gpu_use.sampled_at, 3)),
        gpu=gpu_use.busy,
        gpu_memory_bytes=gpu_use.memory_bytes,
    )


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _exit_code(pidfd: int) -> int | None:
    """Return how a process ended, as subprocess counts: its exit code, or minus the signal; None if it is no child of
    this one."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
