"""The pulse: the channel between a rank and its agent, a small memory-mapped file.

For each local rank the agent creates, in the folder `$TANDEM_PULSE`,

    rank-0         12 KiB, mapped by both: the rank's beats and exit code, the agent's order and next generation
    rank-0.wake    a named pipe: the agent writes a byte when it changes the order; only the agent holds its write end
    rank-0.news    a named pipe: the rank writes a byte when its state for a regroup changes
    rank-0.stacks  where the rank writes the stacks of its threads when it hangs (tandem_trainer.stacks)

**Beats.** The rank writes a record after each step: no wake-up, no system call, about a microsecond.
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

**A regroup.** A rank that can go on in another group says so by a byte. The order `regroup` ends its collectives, and
the agent then writes the rank's place in the next generation (tandem_trainer.regroup).

**A debugger.** A byte asks the rank to let a debugger attach (tandem_trainer.debugger).

A script of the user's own obeys no order, even if it reports its steps (tandem_trainer.step_log): a byte says so.

**Last word.** A rank that leaves on purpose announces its exit code before it exits, because torchrun's rendezvous
handler never sees exit codes, and leaving after an order is not a failure. A rank that fails leaves a record of its
error (tandem_trainer.failure).

An exit code alone means nothing: a script may end with any number, including one of tandem.processes.exitcode. It
counts as Tandem's only if Tandem, in the rank, has announced it as its last word. A script that was forked leaves its
own exit code there, too, because its agent cannot ask the kernel for it; a byte tells the two apart.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import GENERATION, PULSE
from tandem.processes.processor_time import ProcessorTime
from tandem.wire.protocol import FINISHING, SAVING, SCRIPT, STARTING, STOPPED, TRAIN, Trouble
from tandem_trainer.debugger import DebuggerSlot, exempt_from_debugger
from tandem_trainer.failure import record
from tandem_trainer.gpu import Gpu
from tandem_trainer.stacks import answer_with_stacks

Order = Literal["run", "save-and-leave", "abort", "regroup"]
"""`run`: go on. `save-and-leave`: save at the next step boundary and exit PREEMPTED. `abort`: exit SUPERSEDED now.
`regroup`: leave the group now, and wait for a place in the next one."""

ORDERS: tuple[Order, ...] = get_args(Order)

USAGE_SECONDS = 0.5
"""Interval of samples of processor use, in seconds: half of the shortest sensible heartbeat."""

INTERRUPT_SECONDS = 0.05
"""Interval at which the collectives of a rank are ended as long as it is ordered to regroup, in seconds."""
MAX_PHASE_LENGTH = 16
"""Maximum length of a phase's name, in ASCII characters."""
RESERVED_PHASES = {STARTING, TRAIN, STOPPED, SCRIPT, SAVING, FINISHING}
"""Phases with a meaning of their own, which cannot name a pause."""

MAX_SLOT_READS = 8
"""Reads of slots, in turn, after which there is no record. Two are enough while nobody writes, three once a writer has
died in the middle of a write."""

_MAGIC = b"tandem-5"
_FILE_BYTES = 12288
_ORDER_OFFSET = 64
_LAST_WORD_OFFSET = 65
_SCRIPT_OFFSET = 66
"""1 if a script of the user's own beats, which obeys no orders. Ranks of versions that do not write it leave it 0."""
_OWN_CODE_OFFSET = 68
"""1 if the last word is an exit code that a script has chosen. The byte before is the debugger's."""
_COMPLETE_OFFSET = 69
"""1 once a session has taken all of its steps, and their last checkpoint is committed."""
_REGROUP_STATE_OFFSET = 70
"""State of the rank for a regroup: one of RESTARTS, SURVIVES, PARKED, PREPARED, MIXED."""
_ACKNOWLEDGED_OFFSET = 71
"""1 once the watchdog of the rank has heard the order to regroup."""
_BEAT_OFFSETS = (128, 384)
_USAGE_OFFSETS = (640, 768)
_TROUBLE_OFFSETS = (1024, 2560)
_FAILURE_OFFSET = 4096
_FAILURE_END = 8192
_PLACE_OFFSETS = (8192, 8704)
_NO_WORD = 255
_BEAT = struct.Struct("=QqqqqqddddBBBd16s")
_USAGE = struct.Struct("=Qdddddq")
_TROUBLE = struct.Struct("=Q1500s")
_PLACE = struct.Struct("=Qqqq256sq")
_CHECKSUM = struct.Struct("=I")
_NAN = float("nan")

_PULSE_FILE = re.compile(r"(.*/rank-[0-9]+)(|\.wake|\.news|\.stacks)(?: \(deleted\))?")

_BeatValues = tuple[int, int | None, float | None, float | None, float | None, float | None, str, bool]
"""Arguments of `Pulse.beat`."""


RESTARTS, SURVIVES, PARKED, PREPARED, MIXED = range(5)
"""States of a rank: it has to end when its group changes; it can go on in the next group; it has left its group, and
waits for the next one; it waits for the next one, and holds no state; it has to end, because some ranks of its group
run the script from its beginning, and others are in its loop."""


class RankPlace(NamedTuple):
    """A rank's place in a generation."""

    generation: int
    """Number of the generation."""
    rank: int
    """Global rank."""
    world_size: int
    """Number of ranks."""
    address: str
    """Address of the store, at most 256 bytes."""
    port: int
    """Port of the store."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Last report of a rank on its work. None: not known."""

    pid: int
    """Process number."""
    rank: int
    """Global rank."""
    generation: int
    """Generation that the rank belongs to; 0 outside of one."""
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
    """Mean time of the rank's own work in a step, in seconds, without waiting for other ranks."""
    phase: str
    """Activity, at most 16 ASCII characters."""
    pauses: bool
    """Whether the rank is in a pause: no step is due."""
    finishing: bool
    """Whether all steps are taken, and the code after the loop runs."""
    reported_at: float
    """Time of the report, in seconds of the monotonic clock, which all processes of a machine share."""


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Processor and GPU use of a rank."""

    sampled_at: float
    """Time of the sample, in seconds of the monotonic clock."""
    cpu_seconds: float
    """Processor time of all its threads since its start."""
    first_at: float
    first_cpu_seconds: float
    """First sample: the start of the interval for a reader that has read none before."""
    gpu: float | None
    """Utilization of its GPU, 0 to 1."""
    gpu_memory_bytes: int | None
    """Memory in use on its GPU."""


def check_name(pause: str) -> None:
    """Refuse a name that no pause can have.

    Raises:
        ValueError: the name is reserved, too long, or not plain ASCII.
    """
    if not (pause.isascii() and pause.isprintable() and 0 < len(pause) <= MAX_PHASE_LENGTH) or pause in RESERVED_PHASES:
        raise ValueError(
            f"{pause!r} cannot name a pause; use up to {MAX_PHASE_LENGTH} plain letters, and none of "
            f"{sorted(RESERVED_PHASES)}"
        )


class Slots:
    """Two slots for one kind of record, written in turn by one thread, and read by any process."""

    def __init__(self, memory: mmap.mmap | bytearray, layout: struct.Struct, offsets: tuple[int, int]) -> None:
        self.memory, self.layout, self.offsets = memory, layout, offsets
        self.sequence = 0

    def write(self, *values: Any) -> None:
        """Write a record into the slot of the one before the last."""
        self.sequence += 1
        body = self.layout.pack(self.sequence, *values)
        start = self.offsets[self.sequence & 1]
        # The other slot stays whole: a rank killed in the middle of this write leaves its previous record.
        self.memory[start : start + len(body) + 4] = body + _CHECKSUM.pack(zlib.crc32(body))

    def read(self) -> tuple[Any, ...] | None:
        """Return the newest whole record without its sequence number; None if there is none, or all reads met a
        writer."""
        previous: tuple[Any, ...] | None = None
        for number in range(MAX_SLOT_READS):
            # While one slot is being written, the other one may be overwritten next. So a record counts only once the
            # other slot has been read after it.
            record = self._read(self.offsets[number & 1])
            if number and record is not None:
                newest = record if previous is None or record[0] > previous[0] else previous
                return newest[1:]
            previous = record
        return None

    def _read(self, start: int) -> tuple[Any, ...] | None:
        """Return the record of a slot; None if it is not whole."""
        size = self.layout.size
        copy = self.memory[start : start + size + 4]
        is_whole = _CHECKSUM.unpack_from(copy, size)[0] == zlib.crc32(copy[:size])
        return self.layout.unpack_from(copy) if is_whole else None


class Pulse:
    """The rank's end of its pulse. One thread beats; any thread may read the order."""

    current: ClassVar["Pulse | None"] = None
    """Pulse of this process, once it is open."""

    def __init__(self, path: Path, rank: int, generation: int) -> None:
        self.path, self.rank, self.generation = path, rank, generation
        self._memory = _map(path)
        # Non-blocking, or opening would wait for an agent that is gone already.
        self.wake = os.open(_wake_path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._news = os.open(_news_path(path), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.stacks = os.open(_stacks_path(path), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._beats = Slots(self._memory, _BEAT, _BEAT_OFFSETS)
        self._usage = Slots(self._memory, _USAGE, _USAGE_OFFSETS)
        self._trouble = Slots(self._memory, _TROUBLE, _TROUBLE_OFFSETS)
        self._places = Slots(self._memory, _PLACE, _PLACE_OFFSETS)
        self.order_changed = threading.Event()
        """Set by the watchdog whenever the agent has given an order."""
        self.on_regroup: Callable[[], None] = lambda: None
        """Called by the watchdog when the agent orders a regroup, perhaps several times; must not block."""
        self._debugger = DebuggerSlot(self._memory)
        self._last_beat: _BeatValues = (0, None, None, None, None, None, STARTING, False)
        self._finishing = False
        self._pid = os.getpid()
        self._gpu = Gpu()
        self._closed = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="tandem-usage", daemon=True)
        exempt_from_debugger(self._sampler)

    @classmethod
    def open_for_rank(cls, phase: str = STARTING) -> "Pulse | None":
        """Open the pulse that the environment names for this rank, and send a first beat; None outside of Tandem.

        A process has one: the files have no names any more after the first beat (see PulseView.unlink).

        Raises:
            FileNotFoundError, ValueError: TANDEM_PULSE names no folder with this rank's pulse.
        """
        folder = os.environ.get(PULSE)
        if not folder:
            return None
        path = Path(folder) / f"rank-{os.environ.get('LOCAL_RANK', '0')}"
        # A second call in the same process: the files have no names any more, so the open ones are used.
        if cls.current is not None and cls.current.path == path:
            cls.current._finishing = False
            cls.current._start(phase)
            return cls.current
        pulse = cls.current = cls(path, int(os.environ.get("RANK", "0")), int(os.environ.get(GENERATION, "0")))
        pulse._start(phase)
        pulse._sampler.start()
        return pulse

    def _start(self, phase: str) -> None:
        # The flags come before the first beat, with which the agent starts to read them.
        self._memory[_SCRIPT_OFFSET] = phase == SCRIPT
        self._memory[_COMPLETE_OFFSET] = 0
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
        """Report the progress of this rank. Costs about a microsecond, so that it may follow every step."""
        self._last_beat = (step, total_steps, epoch, loss, throughput, busy_seconds, phase, pauses)
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
        """Report a pause for as long as the block takes: no step is due.

        Raises:
            ValueError: the phase cannot name a pause.
        """
        check_name(phase)
        *_, phase_before, paused_before = self._last_beat
        self._beat_with_phase(phase, pauses=True)
        try:
            yield
        finally:
            self._beat_with_phase(phase_before, pauses=paused_before)

    def all_steps_taken(self) -> None:
        """Report that all steps are taken and their last checkpoint is committed: exit code 0 is a completion from now
        on."""
        self._memory[_COMPLETE_OFFSET] = 1

    def finish(self) -> None:
        """Report, from now on, that all steps are taken and the code after the loop runs."""
        self._finishing = True
        self._beat_with_phase(FINISHING, pauses=True)

    def _beat_with_phase(self, phase: str, pauses: bool) -> None:
        """Repeat the last beat with another phase."""
        step, total_steps, epoch, loss, throughput, busy_seconds, _, _ = self._last_beat
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

    def report_trouble(self, trouble: Trouble) -> None:
        """Report the trouble so far. One thread at a time."""
        self._trouble.write(trouble.model_dump_json().encode()[: _TROUBLE.size - 8])

    @property
    def order(self) -> Order:
        """Current order of the agent."""
        return ORDERS[self._memory[_ORDER_OFFSET]]

    def set_regroup_state(self, state: int) -> None:
        """Report the state of this rank for a regroup, and wake the agent."""
        self._memory[_REGROUP_STATE_OFFSET] = state
        # A full pipe wakes it, too. One without a reader belongs to an agent that is gone.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._news, b"!")

    def acknowledge_regroup(self) -> None:
        """Obey the order to regroup, on the watchdog's thread."""
        self._memory[_ACKNOWLEDGED_OFFSET] = 1
        self.on_regroup()

    def next_place(self) -> RankPlace | None:
        """Return the place of this rank in the generation after its current one; None if there is none yet."""
        record = self._places.read()
        if record is None or record[0] <= self.generation:
            return None
        generation, rank, world_size, address, port = record
        return RankPlace(generation, rank, world_size, address.rstrip(b"\0").decode(), port)

    def enter(self, place: RankPlace) -> None:
        """Take a place: from now on beats are those of its rank in its generation."""
        self.rank, self.generation = place.rank, place.generation
        self.beat(step=0, phase=STARTING)

    def last_word(self, code: int) -> None:
        """Announce the exit code of this rank before it ends, so that its agent knows whether the end is a failure."""
        # Flag before code: the agent must never take the code for the script's own.
        self._memory[_OWN_CODE_OFFSET] = 0
        self._memory[_LAST_WORD_OFFSET] = code

    def last_word_of_script(self, code: int) -> None:
        """Record the exit code of a script. If Tandem has announced the same, its word stays."""
        if self._memory[_LAST_WORD_OFFSET] != code:
            # Flag before code: a script's code must never count as Tandem's.
            self._memory[_OWN_CODE_OFFSET] = 1
            self._memory[_LAST_WORD_OFFSET] = code

    @classmethod
    def record_failure(cls, error: BaseException, frames: TracebackType | None = None) -> None:
        """Record the error that ends this rank, if it has a pulse; the first record stays.

        Args:
            frames: the traceback, from the first frame that is worth showing; default: all of it.
        """
        if cls.current is not None and cls.current._memory[_FAILURE_OFFSET] == 0:
            # A consequence, such as an error in a clean-up, must not replace the cause.
            content = record(error, frames or error.__traceback__, _FAILURE_END - _FAILURE_OFFSET - 1)
            cls.current._memory[_FAILURE_OFFSET : _FAILURE_OFFSET + len(content)] = content

    def close(self) -> None:
        """Stop sampling. The file stays mapped: other threads may still look at the order."""
        self._closed.set()

    def _sample(self) -> None:
        processor = ProcessorTime()
        first = time.monotonic(), processor.seconds()
        while True:
            gpu, memory = self._gpu.sample()
            gpu_use = _NAN if gpu is None else gpu, -1 if memory is None else memory
            self._usage.write(time.monotonic(), processor.seconds(), *first, *gpu_use)
            self._debugger.answer()
            if self._closed.wait(USAGE_SECONDS):
                return


class Watchdog(threading.Thread):
    """Thread that ends this rank as soon as its agent orders `abort` or is gone, even while the main thread hangs in a
    collective.

    On Linux the kernel additionally kills the rank when its parent dies, which covers native code that holds the
    interpreter lock.
    """

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(name="tandem-watchdog", daemon=True)
        exempt_from_debugger(self)
        self._pulse = pulse

    def start(self) -> None:
        """Start the thread. Call it from the main thread, early."""
        die_with_parent()
        answer_with_stacks(self._pulse.stacks)
        super().start()

    def run(self) -> None:
        """Wait for orders, and obey them."""
        poll = select.poll()
        poll.register(self._pulse.wake, select.POLLIN)
        while True:
            # Read before sleeping: the order may be older than the wait for the pipe.
            if (order := self._pulse.order) == "abort":
                self._leave()
            if order == "regroup":
                self._pulse.acknowledge_regroup()
            self._pulse.order_changed.set()
            # Again and again as long as it is ordered: the rank may be about to open the connections of a group.
            poll.poll(INTERRUPT_SECONDS * 1000 if order == "regroup" else None)
            # An empty read is the end of the pipe: the agent is gone, and no order can come any more.
            with contextlib.suppress(BlockingIOError):
                if not os.read(self._pulse.wake, 64):
                    self._leave()

    def _leave(self) -> None:
        # os._exit: destructors of process groups wait for peers that will never answer.
        self._pulse.last_word(ExitCode.SUPERSEDED)
        os._exit(ExitCode.SUPERSEDED)


class PulseView:
    """The agent's end of one rank's pulse: creates the file, reads beats, gives orders. Used by one thread at a
    time."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        self.path = folder / f"rank-{local_rank}"
        content = bytearray(_FILE_BYTES)
        content[: len(_MAGIC)] = _MAGIC
        content[_LAST_WORD_OFFSET] = _NO_WORD
        self.path.write_bytes(content)
        os.mkfifo(_wake_path(self.path), 0o600)
        os.mkfifo(_news_path(self.path), 0o600)
        # Opened for writing, too: a pipe without a writer is always readable.
        self.news = os.open(_news_path(self.path), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        """Descriptor that is readable when the rank's state for a regroup has changed."""
        self.stacks = os.open(_stacks_path(self.path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Opened for reading, too: opening a pipe for writing alone waits for a reader.
        self._wake = os.open(_wake_path(self.path), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._memory = _map(self.path)
        self._debugger = DebuggerSlot(self._memory)
        self._beats = Slots(self._memory, _BEAT, _BEAT_OFFSETS)
        self._usage = Slots(self._memory, _USAGE, _USAGE_OFFSETS)
        self._trouble = Slots(self._memory, _TROUBLE, _TROUBLE_OFFSETS)
        self._places = Slots(self._memory, _PLACE, _PLACE_OFFSETS)

    def beat(self) -> Beat | None:
        """The newest beat; None before the first one."""
        return _beat(self._beats.read())

    @property
    def runs_script(self) -> bool:
        """Whether the rank is a script of the user's own, which obeys no orders."""
        return bool(self._memory[_SCRIPT_OFFSET])

    @property
    def is_complete(self) -> bool:
        """Whether exit code 0 of the rank means that it is complete: for a session, only if the session said so."""
        return self.runs_script or bool(self._memory[_COMPLETE_OFFSET]) or self.announced() == ExitCode.DONE

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger is attached to the rank, or was when the rank ended."""
        return self._debugger.state == "attached"

    def usage(self) -> ProcessorUse | None:
        """The newest sample of processor use; None before the first one."""
        record = self._usage.read()
        if record is None:
            return None
        sampled_at, cpu_seconds, first_at, first_cpu_seconds, gpu, memory = record
        return ProcessorUse(
            sampled_at, cpu_seconds, first_at, first_cpu_seconds, _none_if_nan(gpu), None if memory < 0 else memory
        )

    def trouble(self) -> Trouble | None:
        """Trouble of the rank so far; None if there is none."""
        record = self._trouble.read()
        return None if record is None else Trouble.read_json(record[0].rstrip(b"\0"))

    @property
    def regroup_state(self) -> int:
        """State of the rank for a regroup: RESTARTS, SURVIVES, PARKED, PREPARED or MIXED."""
        return self._memory[_REGROUP_STATE_OFFSET]

    def read_news(self) -> None:
        """Empty the pipe of `news`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.news, 64)

    @property
    def has_acknowledged(self) -> bool:
        """Whether the rank has heard the last order to regroup: its watchdog runs."""
        return bool(self._memory[_ACKNOWLEDGED_OFFSET])

    def assign(self, place: RankPlace) -> None:
        """Give the rank a place in the next generation, and wake its watchdog. The order to regroup is over."""
        generation, rank, world_size, address, port = place
        # Before the place, so that a rank which takes it and parks again is seen, and an order that follows is one for
        # the new generation.
        if ORDERS[self._memory[_ORDER_OFFSET]] != "abort":
            self._memory[_ORDER_OFFSET] = ORDERS.index("run")
        self._memory[_REGROUP_STATE_OFFSET] = SURVIVES
        self._places.write(generation, rank, world_size, address.encode(), port)
        os.write(self._wake, b"!")

    def order(self, order: Order) -> None:
        """Give an order and wake the rank's watchdog. `abort` cannot be revoked."""
        if ORDERS[self._memory[_ORDER_OFFSET]] in ("abort", order):
            return
        if order == "regroup":
            self._memory[_ACKNOWLEDGED_OFFSET] = 0
        # Byte before wake-up: the watchdog reads the order as soon as the pipe wakes it.
        self._memory[_ORDER_OFFSET] = ORDERS.index(order)
        os.write(self._wake, b"!")

    def last_word(self) -> int | None:
        """Exit code that the rank announced; None if it announced none."""
        code = self._memory[_LAST_WORD_OFFSET]
        return None if code == _NO_WORD else code

    def announced(self) -> int | None:
        """Exit code that Tandem, in the rank, announced; None if it announced none, or the script chose another one."""
        return None if self._memory[_OWN_CODE_OFFSET] else self.last_word()

    def failure(self) -> bytes | None:
        """Record of the error that ended the rank; None if it left none."""
        return self._memory[_FAILURE_OFFSET:_FAILURE_END].partition(b"\0")[0] or None

    def close(self) -> None:
        """Close the file and the pipe; a rank that still watches the pipe leaves."""
        for descriptor in (self._wake, self.news, self.stacks):
            os.close(descriptor)
        self._memory.close()
        self.unlink()

    def unlink(self) -> None:
        """Remove the files' names. After the first beat both ends hold the files open, and nothing is left on the disk
        if both are killed."""
        for path in (self.path, _wake_path(self.path), _news_path(self.path), _stacks_path(self.path)):
            path.unlink(missing_ok=True)


def read_beat(path: Path) -> Beat | None:
    """Return the newest beat in a pulse file, for a process that is neither its rank nor its agent; None if there is
    none, or the file is of another version.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = bytearray(file.read(_FILE_BYTES))
    if len(content) < _FILE_BYTES or not content.startswith(_MAGIC):
        return None
    return _beat(Slots(content, _BEAT, _BEAT_OFFSETS).read())


def debugger_slot(path: Path) -> DebuggerSlot:
    """Open the slot through which a process that is neither the rank nor its agent asks for a debugger.

    Raises:
        OSError, ValueError: the file cannot be written to, or is of another version.
    """
    return DebuggerSlot(_map(path))


def pulse_file(path: str) -> tuple[str, str] | None:
    """Identify an open file of a process by its path: the path of its pulse, and `""`, `.wake`, `.news` or `.stacks`;
    None for any other file. The kernel marks a file whose name was removed."""
    match = _PULSE_FILE.fullmatch(path)
    return None if match is None else (match[1], match[2])


def _beat(record: tuple[Any, ...] | None) -> Beat | None:
    if record is None:
        return None
    pid, rank, generation, step, total, epoch, loss, throughput, busy, has_loss, *flags, reported_at, phase = record
    return Beat(
        pid=pid,
        rank=rank,
        generation=generation,
        step=step,
        total_steps=None if total < 0 else total,
        epoch=_none_if_nan(epoch),
        loss=loss if has_loss else None,
        throughput=_none_if_nan(throughput),
        busy_seconds=_none_if_nan(busy),
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        pauses=bool(flags[0]),
        finishing=bool(flags[1]),
        reported_at=reported_at,
    )


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        if file.read(len(_MAGIC)) == _MAGIC and os.fstat(file.fileno()).st_size == _FILE_BYTES:
            return mmap.mmap(file.fileno(), _FILE_BYTES)
    raise ValueError(f"{path} is not a pulse of this version of Tandem")


def _wake_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.wake")


def _news_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.news")


def _stacks_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.stacks")


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
