"""The step log: steps of a script without a session, logged through `tandem.log`.

Steps go two ways. The pulse tells the agent, at once and without a system call, for views and hang detection. A thread
writes the training log twice a second: step by step for the report, and in sums for the coordinator's counters. So a
call costs microseconds, a disk that is slow or full holds up no step, and what a script logs before it hangs is
written.

**One writer.** The training log of a generation belongs to the rank that creates it: rank 0 at its first call, another
rank a second after its own, if rank 0 has not called by then. So rank 0's values count where all ranks call, and those
of the last stage of a pipeline where that alone calls. Rejected: rank 0 alone (it may not know the loss), a file for
each rank (every reader would have to merge them).

**Steps, samples.** `step` may jump: after 50 comes 100 where every fiftieth step is logged. `samples` is of one step,
so steps between two calls count, too. A second call of the same step adds values and counts nothing.

Beside a session, which logs its own steps, only other values count. They go into the session's log.
"""

import atexit
import contextlib
import logging
import operator
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tandem.model import MAX_COUNT
from tandem.processes.launch import RUN_DIR
from tandem.processes.process_age import process_age
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.script import MAX_NAME_LENGTH, MAX_VALUES, is_name
from tandem.wire.protocol import SCRIPT, TRAIN
from tandem_trainer.pulse import Pulse, check_name
from tandem_trainer.stacks import answer_with_stacks
from tandem_trainer.trouble import TroubleCounts

logger = logging.getLogger("tandem.log")

WRITE_SECONDS = 0.5
"""Interval of writes, and the minimum time that a rate is measured over, in seconds."""
CLAIM_SECONDS = 1.0
"""Time for which another rank leaves the training log to rank 0, in seconds."""
CLOSE_SECONDS = 2.0
"""Time limit of the last write at the end of the script, in seconds."""
MAX_PENDING_RECORDS = 100_000
"""Maximum records that wait while the disk hangs; further records are dropped."""
RESERVED_NAMES = frozenset({"time"})
"""Names of columns of the log that are no arguments of `tandem.log`."""
MEASURES = ("lr", "gradient_norm")
"""Values with a field of their own in a step's record, as in a session's."""


class OpenSession(Protocol):
    """A session of this process, which logs its steps itself."""

    def log_values(self, step: int, values: dict[str, float]) -> None:
        """Write other values into the session's log."""

    def pausing(self, name: str) -> AbstractContextManager[None]:
        """Report a pause for as long as the block takes."""


class _PendingStep(NamedTuple):
    """A step that waits to be written. The writing thread makes the record, because that costs as much as the call."""

    time: float
    step: int
    samples: int | None
    loss: float | None
    lr: float | None
    gradient_norm: float | None

    def record(self) -> records.Step:
        """Build the record."""
        return records.Step(
            time=self.time,
            step=self.step,
            samples=self.samples,
            loss=self.loss,
            lr=self.lr,
            gradient_norm=self.gradient_norm,
        )


class _PendingValues(NamedTuple):
    """Other values that wait to be written."""

    time: float
    step: int
    values: dict[str, float]

    def record(self) -> records.Values:
        """Build the record."""
        return records.Values(time=self.time, step=self.step, values=self.values)


PendingRecord = _PendingStep | _PendingValues | records.TrainingRecord


class StepLog:
    """Step log of one rank. Any thread may call it."""

    def __init__(self, pulse: Pulse, rundir: RunDir, world_size: int | None) -> None:
        self._pulse, self._rundir, self._world_size = pulse, rundir, world_size
        self._process = os.getpid()
        # Reentrant: a signal handler may log in the middle of a call.
        self._lock = threading.RLock()
        self._troubles = TroubleCounts(pulse)
        self._pending: list[PendingRecord] = []
        self._dropped = 0
        self._start: records.Start | None = None
        """First record of the log, written whenever the log can be opened."""
        self._writer: LogWriter | None = None
        self._belongs_to_other_rank = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

        self._step: int | None = None
        self._total: int | None = None
        self._loss: float | None = None
        self._lr: float | None = None
        self._gradient_norm: float | None = None
        self._samples_per_step: int | None = None
        self._throughput: float | None = None
        self._phase = TRAIN

        # Since the last rate. The first step is counted, but not timed: its start is not known.
        self._window_start = 0.0
        self._steps = self._samples = self._untimed_steps = self._untimed_samples = 0
        self._paused = 0.0
        # Time and pauses at the last step: what follows a step belongs to no step.
        self._last = (0.0, 0.0)

    def log(
        self, step: int, loss: float | None, samples: int | None, total: int | None, values: dict[str, float]
    ) -> None:
        """See `tandem.log`."""
        if os.getpid() != self._process:
            # A forked child, such as a loader worker: its steps are not those of the rank.
            return
        with self._lock:
            self._log_step(step, loss, samples, total, values)

    @contextlib.contextmanager
    def pausing(self, name: str) -> Iterator[None]:
        """See `tandem.pausing`."""
        check_name(name)
        if os.getpid() != self._process:
            yield
            return
        phase_before, started_at = self._phase, time.perf_counter()
        with self._pulse.pausing(name):
            self._phase = name
            try:
                yield
            finally:
                self._phase = phase_before
                if phase_before == TRAIN:
                    self._paused += time.perf_counter() - max(started_at, self._window_start)

    def close(self) -> None:
        """Write the pending records at the end of the script."""
        if self._thread is None or self._closed.is_set() or os.getpid() != self._process:
            return
        with self._lock:
            self._write_rate(*self._last)
            self._enqueue(records.TrainingEnd(time=time.time(), step=self._step, why="the script ended"))
        self._closed.set()
        self._thread.join(2 * CLOSE_SECONDS)

    def _log_step(
        self, step: int, loss: float | None, samples: int | None, total: int | None, values: dict[str, float]
    ) -> None:
        now, wall_time = time.perf_counter(), time.time()
        previous, self._step = self._step, step
        self._loss = self._loss if loss is None else loss
        self._total = self._total if total is None else total
        self._samples_per_step = self._samples_per_step if samples is None else samples
        measured = [values.pop(name, None) for name in MEASURES] if values else [None, None]
        self._lr = self._lr if measured[0] is None else measured[0]
        self._gradient_norm = self._gradient_norm if measured[1] is None else measured[1]
        if previous is None:
            self._start_writer(step, now, wall_time)
        self._count(previous, step, now)
        self._pulse.beat(
            step=step,
            total_steps=self._total,
            loss=self._loss,
            throughput=self._throughput,
            phase=self._phase,
            pauses=self._phase != TRAIN,
        )
        if step != previous or loss is not None:
            self._enqueue(_PendingStep(wall_time, step, self._samples_per_step, loss, *measured))
        if values:
            self._enqueue(_PendingValues(wall_time, step, values))

    def _start_writer(self, step: int, now: float, wall_time: float) -> None:
        self._window_start, self._paused = now, 0.0
        first = max(0, step - 1)
        self._start = records.Start(
            time=wall_time,
            step=first,
            total_steps=self._total,
            world_size=self._world_size,
            process_at=time.time() - process_age(),
        )
        self._thread = threading.Thread(target=self._write, name="tandem-step-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _count(self, previous: int | None, step: int, now: float) -> None:
        samples = self._samples_per_step or 0
        if previous is None:
            self._steps = self._untimed_steps = 1
            self._samples = self._untimed_samples = samples
        elif step > previous:
            self._steps += step - previous
            self._samples += samples * (step - previous)
        if step != previous:
            self._last = (now, self._paused)
            if now - self._window_start - self._paused >= WRITE_SECONDS:
                self._write_rate(now, self._paused)

    def _write_rate(self, now: float, paused: float) -> None:
        """Write the rate since the last one."""
        seconds = now - self._window_start - paused
        timed = self._steps - self._untimed_steps
        if timed <= 0 or seconds <= 0:
            return
        has_samples = self._samples_per_step is not None
        self._throughput = (self._samples - self._untimed_samples) / seconds if has_samples else None
        self._enqueue(
            records.Rate(
                time=time.time(),
                step=self._step,
                throughput=self._throughput,
                steps=self._steps,
                samples=self._samples if has_samples else None,
                step_seconds=seconds / timed,
                world_size=self._world_size,
                phases={"data": 0.0, "compute": seconds, "checkpoint": 0.0} | ({"pause": paused} if paused else {}),
                lr=self._lr,
                loss=self._loss,
                gradient_norm=self._gradient_norm,
            )
        )
        self._window_start, self._paused = now, 0.0
        self._steps = self._samples = self._untimed_steps = self._untimed_samples = 0

    # The writing thread

    def _enqueue(self, record: PendingRecord) -> None:
        if self._belongs_to_other_rank:
            return
        if len(self._pending) < MAX_PENDING_RECORDS:
            self._pending.append(record)
        else:
            self._dropped += 1

    def _write(self) -> None:
        if self._pulse.rank:
            self._closed.wait(CLAIM_SECONDS)
        while True:
            is_closed = self._closed.is_set()
            with self._lock:
                pending, self._pending = self._pending, []
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._troubles.lines_lost(dropped)
            if pending:
                self._append(pending)
            if is_closed or self._belongs_to_other_rank:
                break
            self._closed.wait(WRITE_SECONDS)
        if self._writer is not None:
            self._writer.close(CLOSE_SECONDS)

    def _append(self, pending: list[PendingRecord]) -> None:
        if self._writer is None:
            path = self._rundir.training_log(self._pulse.generation)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                self._belongs_to_other_rank = True
                return
            except OSError as error:
                logger.warning("event=log-not-written path=%s error=%s", path, error)
                self._troubles.lines_lost(len(pending))
                return
            self._writer = LogWriter(path, self._troubles.lines_lost)
            pending = [self._start, *pending] if self._start is not None else pending
        self._writer.append(
            *(entry.record() if isinstance(entry, _PendingStep | _PendingValues) else entry for entry in pending)
        )


# The functions of tandem.script

_step_log: StepLog | None = None
_session: OpenSession | None = None
_has_no_pulse = False
_names: set[str] = set()
"""Names of other values so far."""


def log(step: Any, loss: Any, samples: Any, total: Any, values: dict[str, Any]) -> None:
    """See `tandem.log`."""
    number = _as_count("step", step)
    loss_value = None if loss is None else _as_float("loss", loss)
    counts = None if samples is None else _as_count("samples", samples)
    total_steps = None if total is None else _as_count("total", total)
    other_values = {name: _as_float(name, value) for name, value in values.items()} if values else {}
    if not _names.issuperset(other_values):
        _check_names(other_values)
    if _session is not None:
        if other_values:
            _session.log_values(number, other_values)
    elif (step_log := _step_log or _open()) is not None:
        step_log.log(number, loss_value, counts, total_steps, other_values)


def pausing(name: str) -> AbstractContextManager[None]:
    """See `tandem.pausing`."""
    check_name(name)
    if _session is not None:
        return _session.pausing(name)
    step_log = _step_log or _open()
    return nullcontext() if step_log is None else step_log.pausing(name)


def use_session(session: OpenSession) -> None:
    """Hand the steps over to a session that starts in this process."""
    global _session
    _session = session
    if _step_log is not None:
        _step_log.close()


_opening = threading.Lock()


def _open() -> StepLog | None:
    """Return the step log of this process; None if no agent has started the process."""
    if _has_no_pulse:
        return None
    with _opening:
        return _step_log or _opened()


def _opened() -> StepLog | None:
    global _step_log, _has_no_pulse
    pulse = Pulse.current
    try:
        if pulse is None and (pulse := Pulse.open_for_rank(phase=SCRIPT)) is not None:
            answer_with_stacks(pulse.stacks)
    except (OSError, ValueError) as error:
        logger.warning("event=steps-not-logged why='the job did not start this process itself' error=%s", error)
    _has_no_pulse = pulse is None
    if pulse is not None:
        world_size = os.environ.get("WORLD_SIZE", "")
        rundir = RunDir(Path(os.environ.get(RUN_DIR, ".")))
        _step_log = StepLog(pulse, rundir, int(world_size) if world_size.isdecimal() else None)
    return _step_log


def _as_count(name: str, value: Any) -> int:
    """Convert an argument to a count.

    Raises:
        TypeError: the value is no whole number.
        ValueError: the value is negative or too large.
    """
    if type(value) is not int:
        if isinstance(value, bool):
            raise TypeError(f"{name} has to be a whole number, and is {value!r}")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} has to be a whole number, and is {value!r}") from None
    if not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} has to be between 0 and 2**53, and is {value}")
    return int(value)


def _as_float(name: str, value: Any) -> float:
    """Convert an argument to a float.

    Raises:
        TypeError: the value is no number, or more than one.
        ValueError: the value is too large.
    """
    if type(value) is float:
        return value
    original = value
    if not isinstance(value, int | float):
        try:
            # A tensor or an array of one element; one with more raises.
            value = value.item() if hasattr(value, "item") else float(value) if hasattr(value, "__float__") else None
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"{name} has to be one number: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} has to be a number, and is {original!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None


def _check_names(values: dict[str, float]) -> None:
    """Refuse names of values that the log cannot hold.

    Raises:
        ValueError: a name is no identifier, too long or reserved, or there are too many names.
    """
    for name in values:
        if not is_name(name):
            raise ValueError(f"{name!r} cannot name a value: use a Python identifier, up to {MAX_NAME_LENGTH} letters")
        if name in RESERVED_NAMES:
            raise ValueError(f"{name!r} cannot name a value: it is taken")
    if len(_names | values.keys()) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} names of values: {', '.join(sorted(_names | values.keys()))}")
    _names.update(values)
