"""The pulse: the channel between a rank and its agent, a small memory-mapped file.

For each local rank the agent lays out, in the folder `$TANDEM_PULSE`,

    rank-0         8 KiB, mapped by both: the rank's beats and its last word, the agent's order
    rank-0.wake    a named pipe: the agent writes a byte when it changes the order; only the agent holds its write end
    rank-0.stacks  where the rank writes the stacks of its threads when it hangs (tandem_trainer.stacks)

**Beats.** The rank writes a record after each step; nobody is woken, no system call is made, it costs a microsecond.
A record goes alternately into one of two slots, with a sequence number and a CRC over all of it; the reader takes the
newest slot whose CRC holds. A slot that is just being written says that the other one holds the newest record, but not
that what was read from that one before still is: it is read again. So it needs no lock and no memory barriers (which
Python does not have), and a rank killed in the middle of a write still leaves its previous beat. Rejected: one slot
with an even/odd counter (sound on x86 alone, and a writer that dies half-way locks readers out), a socket or the
TCPStore (system calls, and someone to wake).

**Orders.** An order is one byte, which cannot be torn; the training loop may look at it after every step. The watchdog
thread of the rank sleeps in the kernel on the pipe, holding no lock of the interpreter, and wakes when an order is
written. The pipe also ends when the agent does, however it died: then no order can come any more, and the rank leaves.
Rejected: polling the byte every 20 ms (50 wake-ups a second, each asking the training thread for the interpreter lock),
signals alone (Python runs their handlers in the main thread, which may be stuck in a collective).

**A debugger.** A byte asks the rank to let a debugger attach (tandem_trainer.debugger).

A script of the user's own obeys no order, also where it says how far it is (tandem_trainer.step_log): a byte says so.

**Last word.** A rank that leaves on purpose says why before it exits, because torchrun's rendezvous handler never sees
exit codes, and leaving after an order is not a failure. One that leaves by an error says by which, in
tandem_trainer.failure.

An exit code alone means nothing: a script may end with any number, also with one of tandem.exitcode. It counts as
Tandem's only if Tandem, in the rank, has announced that number as its last word. A script that was forked leaves its
own exit code there, too, because its agent cannot ask the kernel for it; a byte says so.

Exit code 0 of a session is a completion only if the session says so: by a byte, when all steps are taken and their last
checkpoint is committed, or by its last word. Code in the loop, or a signal handler, may end the process with 0.
"""

import contextlib
import ctypes
import math
import mmap
import os
import re
import select
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, get_args

from tandem.exitcode import ExitCode
from tandem.launch import GENERATION, PULSE
from tandem.processor_time import ProcessorTime
from tandem.protocol import FINISHING, SAVING, SCRIPT, STARTING, STOPPED, TRAIN, Trouble
from tandem_trainer.debugger import DebuggerSlot, keep_out
from tandem_trainer.failure import record
from tandem_trainer.gpu import Gpu
from tandem_trainer.stacks import answer_with_stacks

Order = Literal["run", "save-and-leave", "abort"]
"""`run`: go on. `save-and-leave`: save at the next step boundary and exit PREEMPTED. `abort`: exit SUPERSEDED now."""

ORDERS: tuple[Order, ...] = get_args(Order)

USAGE_SECONDS = 0.5
"""Time between two samples of the processor's use: twice in the shortest sensible heartbeat."""

MAX_LETTERS = 16
"""A phase has no more."""
TAKEN = {STARTING, TRAIN, STOPPED, SCRIPT, SAVING, FINISHING}
"""Phases that mean something, and so cannot be the name of a pause."""

MAX_READS = 8
"""Of slots, in turn, before they are said to have no record. Two are enough while nobody writes, three once a writer
has died in the middle."""

_MAGIC = b"tandem-3"
_BYTES = 8192
_AT_ORDER = 64
_AT_LAST_WORD = 65
_AT_SCRIPT = 66
"""1 if a script of the user's own beats, which obeys no orders. A rank of a version that does not say leaves it 0."""
_AT_OWN_CODE = 68
"""1 if the last word is an exit code that a script has chosen. The byte before is the debugger's."""
_AT_TAKEN = 69
"""1 once a session has taken all of its steps, and their last checkpoint is committed."""
_AT_BEATS = (128, 384)
_AT_USAGE = (640, 768)
_AT_TROUBLE = (1024, 2560)
_AT_FAILURE = 4096
_SILENT = 255
_BEAT = struct.Struct("=QqqqqqddddBBBd16s")
_USAGE = struct.Struct("=Qdddddq")
_TROUBLE = struct.Struct("=Q1500s")
_SEAL = struct.Struct("=I")
_NAN = float("nan")

_PULSE_FILE = re.compile(r"(.*/rank-[0-9]+)(|\.wake|\.stacks)(?: \(deleted\))?")

_Said = tuple[int, int | None, float | None, float | None, float | None, float | None, str, bool]
"""The arguments of a beat."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The last thing a rank said about its work. What it does not know is None."""

    pid: int
    """Its process."""
    rank: int
    """Global rank."""
    generation: int
    """The generation it belongs to; 0 outside of one."""
    step: int
    """Optimizer steps completed."""
    total_steps: int | None
    """Optimizer steps of the whole run."""
    epoch: float | None
    """Passes over the data, with its fraction."""
    loss: float | None
    """Training loss; may be NaN or infinite, if it is."""
    throughput: float | None
    """Samples a second over all ranks."""
    busy_seconds: float | None
    """Mean time of its own work in a step, without waiting for other ranks."""
    phase: str
    """What it is doing, at most 16 ASCII characters."""
    pauses: bool
    """Whether that may take as long as it takes: no step is due."""
    finishing: bool
    """Whether all steps are taken, and the code after the loop runs."""
    at: float
    """When, seconds of the monotonic clock, which all processes of a machine share."""


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """What a rank has used of its processors."""

    at: float
    """When, seconds of the monotonic clock."""
    cpu_seconds: float
    """Processor time of all its threads since its start."""
    first_at: float
    first_cpu_seconds: float
    """Both when it was sampled first: since then for who has not read it before."""
    gpu: float | None
    """Utilization of its GPU, 0 to 1."""
    gpu_memory_bytes: int | None
    """Memory in use on its GPU."""


def check_name(pause: str) -> None:
    """
    Raises:
        ValueError: no pause can be called so.
    """
    if not (pause.isascii() and pause.isprintable() and 0 < len(pause) <= MAX_LETTERS) or pause in TAKEN:
        raise ValueError(
            f"{pause!r} cannot name a pause; take up to {MAX_LETTERS} plain letters, and none of {sorted(TAKEN)}"
        )


class Slots:
    """Two places for one kind of record, written in turn by one thread, and read by any process."""

    def __init__(self, memory: mmap.mmap | bytearray, layout: struct.Struct, offsets: tuple[int, int]) -> None:
        self.memory, self.layout, self.offsets = memory, layout, offsets
        self.sequence = 0

    def write(self, *values: Any) -> None:
        """Write a record in the place of the one before the last."""
        self.sequence += 1
        body = self.layout.pack(self.sequence, *values)
        start = self.offsets[self.sequence & 1]
        self.memory[start : start + len(body) + 4] = body + _SEAL.pack(zlib.crc32(body))

    def read(self) -> tuple[Any, ...] | None:
        """The newest whole record without its sequence number; None if there is none, or all reads met a writer."""
        before: tuple[Any, ...] | None = None
        for number in range(MAX_READS):
            record = self._read(self.offsets[number & 1])
            if number and record is not None:
                newest = record if before is None or record[0] > before[0] else before
                return newest[1:]
            before = record
        return None

    def _read(self, start: int) -> tuple[Any, ...] | None:
        """The record of a slot; None if it is not whole."""
        size = self.layout.size
        copy = self.memory[start : start + size + 4]
        is_whole = _SEAL.unpack_from(copy, size)[0] == zlib.crc32(copy[:size])
        return self.layout.unpack_from(copy) if is_whole else None


class Pulse:
    """The rank's end. One thread beats; any thread may read the order."""

    ours: ClassVar["Pulse | None"] = None
    """That of this process, once it was opened."""

    def __init__(self, path: Path, rank: int, generation: int) -> None:
        self.path, self.rank, self.generation = path, rank, generation
        self._memory = _map(path)
        # Non-blocking, or opening would wait for an agent that is gone already.
        self.wake = os.open(_wake_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.stacks = os.open(_stacks_path(path), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._beats = Slots(self._memory, _BEAT, _AT_BEATS)
        self._usage = Slots(self._memory, _USAGE, _AT_USAGE)
        self._trouble = Slots(self._memory, _TROUBLE, _AT_TROUBLE)
        self._debugger = DebuggerSlot(self._memory)
        self._said: _Said = (0, None, None, None, None, None, STARTING, False)
        self._finishing = False
        self._pid = os.getpid()
        self._gpu = Gpu()
        self._closed = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="tandem-usage", daemon=True)
        keep_out(self._sampler)

    @classmethod
    def open_for_rank(cls, phase: str = STARTING) -> "Pulse | None":
        """The pulse of this rank as its environment names it, already beating; None outside of Tandem.

        A process has one: its names are gone once the agent has heard it (see PulseView.unlink).

        Raises:
            FileNotFoundError, ValueError: TANDEM_PULSE names no folder with this rank's pulse.
        """
        folder = os.environ.get(PULSE)
        if not folder:
            return None
        path = Path(folder) / f"rank-{os.environ.get('LOCAL_RANK', '0')}"
        if cls.ours is not None and cls.ours.path == path:
            cls.ours._finishing = False
            cls.ours._begin(phase)
            return cls.ours
        pulse = cls.ours = cls(path, int(os.environ.get("RANK", "0")), int(os.environ.get(GENERATION, "0")))
        pulse._begin(phase)
        pulse._sampler.start()
        return pulse

    def _begin(self, phase: str) -> None:
        self._memory[_AT_SCRIPT] = phase == SCRIPT
        self._memory[_AT_TAKEN] = 0
        self.beat(step=0, phase=phase)

    def beat(
        self,
        *,
        step: int,
        total_steps: int | None = None,
        epoch: float | None = None,
        loss: float | None = None,
        throughput: float | None = None,
        busy_seconds: float | None = None,
        phase: str = TRAIN,
        pauses: bool = False,
    ) -> None:
        """Say how far this rank is. Costs about a microsecond, so that it may follow every step."""
        self._said = (step, total_steps, epoch, loss, throughput, busy_seconds, phase, pauses)
        self._beats.write(
            self._pid,
            self.rank,
            self.generation,
            step,
            -1 if total_steps is None else total_steps,
            _NAN if epoch is None else epoch,
            _NAN if loss is None else loss,
            _NAN if throughput is None else throughput,
            _NAN if busy_seconds is None else busy_seconds,
            0 if loss is None else 1,
            pauses,
            self._finishing,
            time.monotonic(),
            phase.encode(),
        )

    @contextlib.contextmanager
    def pausing(self, phase: str) -> Iterator[None]:
        """Say, for as long as the block takes, that this rank is at something of its own and no step is due.

        Raises:
            ValueError: no phase can be called so.
        """
        check_name(phase)
        *_, before, paused = self._said
        self._say(phase, pauses=True)
        try:
            yield
        finally:
            self._say(before, pauses=paused)

    def all_steps_taken(self) -> None:
        """Say that all steps are taken and their last checkpoint is committed: exit code 0 is a completion from now
        on."""
        self._memory[_AT_TAKEN] = 1

    def finish(self) -> None:
        """Say, from now on, that all steps are taken and the code after the loop runs."""
        self._finishing = True
        self._say(FINISHING, pauses=True)

    def _say(self, phase: str, pauses: bool) -> None:
        """Repeat the last beat with another phase."""
        step, total_steps, epoch, loss, throughput, busy_seconds, _, _ = self._said
        self.beat(
            step=step,
            total_steps=total_steps,
            epoch=epoch,
            loss=loss,
            throughput=throughput,
            busy_seconds=busy_seconds,
            phase=phase,
            pauses=pauses,
        )

    def tell(self, trouble: Trouble) -> None:
        """Say what went wrong so far. One thread at a time."""
        self._trouble.write(trouble.model_dump_json().encode()[: _TROUBLE.size - 8])

    @property
    def order(self) -> Order:
        """What the agent wants of this rank."""
        return ORDERS[self._memory[_AT_ORDER]]

    def last_word(self, code: int) -> None:
        """Say with which exit code this rank is about to end, so that its agent knows whether that is a failure."""
        self._memory[_AT_OWN_CODE] = 0
        self._memory[_AT_LAST_WORD] = code

    def last_word_of_script(self, code: int) -> None:
        """Say with which exit code a script ends. Where Tandem has announced the same, its word stays."""
        if self._memory[_AT_LAST_WORD] != code:
            self._memory[_AT_OWN_CODE] = 1
            self._memory[_AT_LAST_WORD] = code

    @classmethod
    def tell_failure(cls, error: BaseException, frames: TracebackType | None = None) -> None:
        """Leave word of what this rank is about to fail by, if it has a pulse; what was said first stays.

        Args:
            frames: the traceback, from the first frame that is worth showing; default: all of it.
        """
        if cls.ours is not None and cls.ours._memory[_AT_FAILURE] == 0:
            content = record(error, frames or error.__traceback__, _BYTES - _AT_FAILURE - 1)
            cls.ours._memory[_AT_FAILURE : _AT_FAILURE + len(content)] = content

    def close(self) -> None:
        """Stop sampling. The file stays mapped: other threads may still look at the order."""
        self._closed.set()

    def _sample(self) -> None:
        processor = ProcessorTime()
        first = time.monotonic(), processor.seconds()
        while True:
            gpu, memory = self._gpu.sample()
            told = _NAN if gpu is None else gpu, -1 if memory is None else memory
            self._usage.write(time.monotonic(), processor.seconds(), *first, *told)
            self._debugger.answer()
            if self._closed.wait(USAGE_SECONDS):
                return


class Watchdog(threading.Thread):
    """Ends this rank the moment its agent orders `abort` or is gone, also while its main thread hangs in a collective.

    On Linux the kernel additionally kills the rank when its parent dies, which covers native code that holds the
    interpreter lock.
    """

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(name="tandem-watchdog", daemon=True)
        keep_out(self)
        self._pulse = pulse

    def start(self) -> None:
        """Begin to watch. Call it from the main thread, early."""
        die_with_parent()
        answer_with_stacks(self._pulse.stacks)
        super().start()

    def run(self) -> None:
        """Sleep until there is an order, and obey it."""
        poll = select.poll()
        poll.register(self._pulse.wake, select.POLLIN)
        while True:
            if self._pulse.order == "abort":
                self._leave()
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                if not os.read(self._pulse.wake, 64):
                    self._leave()

    def _leave(self) -> None:
        # os._exit: destructors of process groups wait for peers that will never answer.
        self._pulse.last_word(ExitCode.SUPERSEDED)
        os._exit(ExitCode.SUPERSEDED)


class PulseView:
    """The agent's end of one rank's pulse: makes the file, reads beats, gives orders. Used by one thread at a time."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        self.path = folder / f"rank-{local_rank}"
        content = bytearray(_BYTES)
        content[: len(_MAGIC)] = _MAGIC
        content[_AT_LAST_WORD] = _SILENT
        self.path.write_bytes(content)
        os.mkfifo(_wake_path(self.path), 0o600)
        self.stacks = os.open(_stacks_path(self.path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Read and write, because a pipe without a reader cannot be opened for writing alone without waiting.
        self._wake = os.open(_wake_path(self.path), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._memory = _map(self.path)
        self._debugger = DebuggerSlot(self._memory)
        self._beats = Slots(self._memory, _BEAT, _AT_BEATS)
        self._usage = Slots(self._memory, _USAGE, _AT_USAGE)
        self._trouble = Slots(self._memory, _TROUBLE, _AT_TROUBLE)

    def beat(self) -> Beat | None:
        """The newest beat; None before the first one."""
        return _beat(self._beats.read())

    @property
    def runs_script(self) -> bool:
        """Whether the rank is a script of the user's own, which obeys no orders."""
        return bool(self._memory[_AT_SCRIPT])

    @property
    def is_complete(self) -> bool:
        """Whether exit code 0 of the rank means that it is complete: of a session, only if the session said so."""
        return self.runs_script or bool(self._memory[_AT_TAKEN]) or self.announced() == ExitCode.DONE

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger is attached to the rank, or was when it ended."""
        return self._debugger.state == "attached"

    def usage(self) -> ProcessorUse | None:
        """The newest sample of processor use; None before the first one."""
        record = self._usage.read()
        if record is None:
            return None
        at, cpu_seconds, first_at, first_cpu_seconds, gpu, memory = record
        return ProcessorUse(at, cpu_seconds, first_at, first_cpu_seconds, _known(gpu), None if memory < 0 else memory)

    def trouble(self) -> Trouble | None:
        """What went wrong in the rank so far; None if nothing did."""
        record = self._trouble.read()
        return None if record is None else Trouble.read_json(record[0].rstrip(b"\0"))

    def order(self, order: Order) -> None:
        """Give an order and wake the rank's watchdog. There is no way back from `abort`."""
        if ORDERS[self._memory[_AT_ORDER]] in ("abort", order):
            return
        self._memory[_AT_ORDER] = ORDERS.index(order)
        os.write(self._wake, b"!")

    def last_word(self) -> int | None:
        """The exit code that the rank announced; None if it did not."""
        code = self._memory[_AT_LAST_WORD]
        return None if code == _SILENT else code

    def announced(self) -> int | None:
        """The exit code that Tandem, in the rank, announced; None if it did not, or the script chose another one."""
        return None if self._memory[_AT_OWN_CODE] else self.last_word()

    def failure(self) -> bytes | None:
        """What the rank has left of the error that it failed by; None if it has not."""
        return self._memory[_AT_FAILURE:].partition(b"\0")[0] or None

    def close(self) -> None:
        """Let go of the file and of the pipe; a rank that still watches it leaves."""
        os.close(self._wake)
        os.close(self.stacks)
        self._memory.close()
        self.unlink()

    def unlink(self) -> None:
        """Remove the names. After the first beat both ends hold what they need, and nothing is left on the disk should
        both be killed."""
        for path in (self.path, _wake_path(self.path), _stacks_path(self.path)):
            path.unlink(missing_ok=True)


def read_beat(path: Path) -> Beat | None:
    """The newest beat in a pulse file, for a process that is neither its rank nor its agent; None if there is none, or
    if the file is of another version.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = bytearray(file.read(_BYTES))
    if len(content) < _BYTES or not content.startswith(_MAGIC):
        return None
    return _beat(Slots(content, _BEAT, _AT_BEATS).read())


def debugger_slot(path: Path) -> DebuggerSlot:
    """By which a process that is neither the rank nor its agent asks for a debugger.

    Raises:
        OSError, ValueError: the file cannot be written to, or is of another version.
    """
    return DebuggerSlot(_map(path))


def pulse_file(path: str) -> tuple[str, str] | None:
    """What an open file of a process is, by its path: the path of its pulse, and `""`, `.wake` or `.stacks`; None for
    any other file. The kernel marks a file whose name was removed."""
    found = _PULSE_FILE.fullmatch(path)
    return None if found is None else (found[1], found[2])


def _beat(record: tuple[Any, ...] | None) -> Beat | None:
    if record is None:
        return None
    pid, rank, generation, step, total, epoch, loss, throughput, busy, has_loss, *flags, at, phase = record
    return Beat(
        pid=pid,
        rank=rank,
        generation=generation,
        step=step,
        total_steps=None if total < 0 else total,
        epoch=_known(epoch),
        loss=loss if has_loss else None,
        throughput=_known(throughput),
        busy_seconds=_known(busy),
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        pauses=bool(flags[0]),
        finishing=bool(flags[1]),
        at=at,
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        if file.read(len(_MAGIC)) == _MAGIC and os.fstat(file.fileno()).st_size == _BYTES:
            return mmap.mmap(file.fileno(), _BYTES)
    raise ValueError(f"{path} is not a pulse of this version of Tandem")


def _wake_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.wake")


def _stacks_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.stacks")


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
