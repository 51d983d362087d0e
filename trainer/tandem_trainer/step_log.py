"""The step log: what a script without a session says of its steps through `tandem.log`.

It goes two ways. The pulse tells the agent, at once and without a system call, for views and hang detection. A thread
writes the training log twice a second: step by step for the report, and in sums for the coordinator's counters. So a
call costs microseconds, a disk that is slow or full holds up no step, and what a script logs before it hangs is
written.

**One writer.** The training log of a generation belongs to the rank that creates it: rank 0 at its first call, another
rank a second after its own, if rank 0 has not called by then. So rank 0's values count where all ranks call, and those
of the last stage of a pipeline where that alone calls. Rejected: rank 0 alone (it may not know the loss), a file for
each rank (every reader would have to merge them).

**Steps, samples.** `step` may jump: after 50 comes 100 where every fiftieth step is logged. `samples` is of one step,
so the calls between which nothing was said count too. A second call of the same step adds values and counts nothing.

Beside a session, which tells its own steps, only other values count. They go into the session's log.
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

from tandem.launch import RUN_DIR
from tandem.model import MAX_COUNT
from tandem.protocol import SCRIPT, TRAIN
from tandem.rundir import records
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.script import MAX_NAME_LENGTH, MAX_VALUES, is_name
from tandem_trainer.pulse import Pulse, check_name
from tandem_trainer.stacks import answer_with_stacks
from tandem_trainer.trouble import TroubleCounts

logger = logging.getLogger("tandem.log")

WRITE_SECONDS = 0.5
"""Time between two writes, and the least that a rate is measured over."""
CLAIM_SECONDS = 1.0
"""For so long another rank leaves the training log to rank 0."""
CLOSE_SECONDS = 2.0
"""What the disk gets at the end of the script."""
MAX_WAITING = 100_000
"""Records that wait while the disk hangs; what comes then is lost."""
TAKEN = frozenset({"time"})
"""Names of other columns, besides those of the arguments."""
MEASURES = ("lr", "gradient_norm")
"""Values that a step has a field for: they stand where those of a session stand."""


class OpenSession(Protocol):
    """A session of this process, which tells its steps itself."""

    def log_values(self, step: int, values: dict[str, float]) -> None:
        """Write other values into its log."""

    def pausing(self, name: str) -> AbstractContextManager[None]:
        """Do something that takes as long as it takes."""


class _Step(NamedTuple):
    """A step that waits to be written. Its record is made by the thread that writes: it costs as much as the call."""

    time: float
    step: int
    samples: int | None
    loss: float | None
    lr: float | None
    gradient_norm: float | None

    def record(self) -> records.Step:
        """As it is written."""
        return records.Step(
            time=self.time,
            step=self.step,
            samples=self.samples,
            loss=self.loss,
            lr=self.lr,
            gradient_norm=self.gradient_norm,
        )


class _Values(NamedTuple):
    """Other values that wait to be written."""

    time: float
    step: int
    values: dict[str, float]

    def record(self) -> records.Values:
        """As they are written."""
        return records.Values(time=self.time, step=self.step, values=self.values)


Waiting = _Step | _Values | records.TrainingRecord


class StepLog:
    """What one rank says. Any thread may call."""

    def __init__(self, pulse: Pulse, rundir: RunDir, world_size: int | None) -> None:
        self._pulse, self._rundir, self._world_size = pulse, rundir, world_size
        self._process = os.getpid()
        # A signal's handler may call in the middle of a call.
        self._lock = threading.RLock()
        self._troubles = TroubleCounts(pulse)
        self._waiting: list[Waiting] = []
        self._lost = 0
        self._start: records.Start | None = None
        """What the log begins with, whenever that can be written."""
        self._writer: LogWriter | None = None
        self._is_others = False
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

        # Since the last rate. The time of the first step is not known: it is counted, and not timed.
        self._began = 0.0
        self._steps = self._samples = self._untimed_steps = self._untimed_samples = 0
        self._paused = 0.0
        # As it was at the last step: what comes after it is no part of one.
        self._last = (0.0, 0.0)

    def log(
        self, step: int, loss: float | None, samples: int | None, total: int | None, values: dict[str, float]
    ) -> None:
        """See `tandem.log`."""
        if os.getpid() != self._process:
            # A child that was forked, such as a loader worker: its steps are not those of the rank.
            return
        with self._lock:
            self._take(step, loss, samples, total, values)

    @contextlib.contextmanager
    def pausing(self, name: str) -> Iterator[None]:
        """See `tandem.pausing`."""
        check_name(name)
        if os.getpid() != self._process:
            yield
            return
        before, began = self._phase, time.perf_counter()
        with self._pulse.pausing(name):
            self._phase = name
            try:
                yield
            finally:
                self._phase = before
                if before == TRAIN:
                    self._paused += time.perf_counter() - max(began, self._began)

    def close(self) -> None:
        """The script ends: write what waits."""
        if self._thread is None or self._closed.is_set() or os.getpid() != self._process:
            return
        with self._lock:
            self._tell_rate(*self._last)
            self._wait_for_disk(records.TrainingEnd(time=time.time(), step=self._step, why="the script ended"))
        self._closed.set()
        self._thread.join(2 * CLOSE_SECONDS)

    def _take(
        self, step: int, loss: float | None, samples: int | None, total: int | None, values: dict[str, float]
    ) -> None:
        now, at = time.perf_counter(), time.time()
        before, self._step = self._step, step
        self._loss = self._loss if loss is None else loss
        self._total = self._total if total is None else total
        self._samples_per_step = self._samples_per_step if samples is None else samples
        measured = [values.pop(name, None) for name in MEASURES] if values else [None, None]
        self._lr = self._lr if measured[0] is None else measured[0]
        self._gradient_norm = self._gradient_norm if measured[1] is None else measured[1]
        if before is None:
            self._begin(step, now, at)
        self._count(before, step, now)
        self._pulse.beat(
            step=step,
            total_steps=self._total,
            loss=self._loss,
            throughput=self._throughput,
            phase=self._phase,
            pauses=self._phase != TRAIN,
        )
        if step != before or loss is not None:
            self._wait_for_disk(_Step(at, step, self._samples_per_step, loss, *measured))
        if values:
            self._wait_for_disk(_Values(at, step, values))

    def _begin(self, step: int, now: float, at: float) -> None:
        self._began, self._paused = now, 0.0
        first = max(0, step - 1)
        self._start = records.Start(time=at, step=first, total_steps=self._total, world_size=self._world_size)
        self._thread = threading.Thread(target=self._write, name="tandem-step-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _count(self, before: int | None, step: int, now: float) -> None:
        samples = self._samples_per_step or 0
        if before is None:
            self._steps = self._untimed_steps = 1
            self._samples = self._untimed_samples = samples
        elif step > before:
            self._steps += step - before
            self._samples += samples * (step - before)
        if step != before:
            self._last = (now, self._paused)
            if now - self._began - self._paused >= WRITE_SECONDS:
                self._tell_rate(now, self._paused)

    def _tell_rate(self, now: float, paused: float) -> None:
        """Sum up what was done since the last time."""
        seconds = now - self._began - paused
        timed = self._steps - self._untimed_steps
        if timed <= 0 or seconds <= 0:
            return
        has_samples = self._samples_per_step is not None
        self._throughput = (self._samples - self._untimed_samples) / seconds if has_samples else None
        self._wait_for_disk(
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
        self._began, self._paused = now, 0.0
        self._steps = self._samples = self._untimed_steps = self._untimed_samples = 0

    # What the thread does

    def _wait_for_disk(self, record: Waiting) -> None:
        if self._is_others:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(record)
        else:
            self._lost += 1

    def _write(self) -> None:
        if self._pulse.rank:
            self._closed.wait(CLAIM_SECONDS)
        while True:
            is_closed = self._closed.is_set()
            with self._lock:
                waiting, self._waiting = self._waiting, []
                lost, self._lost = self._lost, 0
            if lost:
                self._troubles.lines_lost(lost)
            if waiting:
                self._hand_over(waiting)
            if is_closed or self._is_others:
                break
            self._closed.wait(WRITE_SECONDS)
        if self._writer is not None:
            self._writer.close(CLOSE_SECONDS)

    def _hand_over(self, waiting: list[Waiting]) -> None:
        if self._writer is None:
            path = self._rundir.training_log(self._pulse.generation)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                self._is_others = True
                return
            except OSError as error:
                logger.warning("event=log-not-written path=%s error=%s", path, error)
                self._troubles.lines_lost(len(waiting))
                return
            self._writer = LogWriter(path, self._troubles.lines_lost)
            waiting = [self._start, *waiting] if self._start is not None else waiting
        self._writer.append(*(one.record() if isinstance(one, _Step | _Values) else one for one in waiting))


# The functions of tandem.script

_step_log: StepLog | None = None
_session: OpenSession | None = None
_has_no_pulse = False
_names: set[str] = set()
"""Of the other values so far."""


def log(step: Any, loss: Any, samples: Any, total: Any, values: dict[str, Any]) -> None:
    """See `tandem.log`."""
    number = _whole("step", step)
    given = None if loss is None else _number("loss", loss)
    counts = None if samples is None else _whole("samples", samples)
    most = None if total is None else _whole("total", total)
    others = {name: _number(name, value) for name, value in values.items()} if values else {}
    if not _names.issuperset(others):
        _check_names(others)
    if _session is not None:
        if others:
            _session.log_values(number, others)
    elif (found := _step_log or _open()) is not None:
        found.log(number, given, counts, most, others)


def pausing(name: str) -> AbstractContextManager[None]:
    """See `tandem.pausing`."""
    check_name(name)
    if _session is not None:
        return _session.pausing(name)
    found = _step_log or _open()
    return nullcontext() if found is None else found.pausing(name)


def give_way(session: OpenSession) -> None:
    """A session begins in this process: from now on it tells the steps."""
    global _session
    _session = session
    if _step_log is not None:
        _step_log.close()


_opening = threading.Lock()


def _open() -> StepLog | None:
    """The step log of this process; None where it is not one that an agent has started."""
    if _has_no_pulse:
        return None
    with _opening:
        return _step_log or _opened()


def _opened() -> StepLog | None:
    global _step_log, _has_no_pulse
    pulse = Pulse.ours
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


def _whole(name: str, value: Any) -> int:
    """
    Raises:
        TypeError, ValueError: it is no count.
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


def _number(name: str, value: Any) -> float:
    """
    Raises:
        TypeError, ValueError: it is no number, or more than one.
    """
    if type(value) is float:
        return value
    given = value
    if not isinstance(value, int | float):
        try:
            # A tensor or an array of one element; with more it says so.
            value = value.item() if hasattr(value, "item") else float(value) if hasattr(value, "__float__") else None
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"{name} has to be one number: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} has to be a number, and is {given!r}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None


def _check_names(values: dict[str, float]) -> None:
    """
    Raises:
        ValueError: a value cannot be called so, or there are too many names.
    """
    for name in values:
        if not is_name(name):
            raise ValueError(f"{name!r} cannot name a value: take a Python identifier, up to {MAX_NAME_LENGTH} letters")
        if name in TAKEN:
            raise ValueError(f"{name!r} cannot name a value: it is taken")
    if len(_names | values.keys()) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} names of values: {', '.join(sorted(_names | values.keys()))}")
    _names.update(values)
