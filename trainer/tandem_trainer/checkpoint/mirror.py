"""Mirrors: copies of the newest state in host memory, from which ranks restart (`elasticity.mirror`).

A checkpoint on disk is written every few minutes, so a rank's death costs minutes of steps. A mirror is a checkpoint
that stays in memory, so it can be taken every few seconds. It is divided as one on disk is (checkpoint.staging), and
each rank keeps two things: its own part, and a copy of the part of the rank with the same local rank on the next node.

**Memory.** The agent holds it, because it lives on when its ranks are restarted: four anonymous files for each rank
(`create_memory`), two for its own part and two for the neighbour's. A rank opens them through /proc. A mirror is
written into the file of a pair that does not hold the last complete one, so there is always a complete mirror.

**Taking one.** All ranks decide it in a vote, so all copy the state after the same step; training stalls only for that
copy. A thread then computes checksums, waits until rank 0's log is on disk, writes the description behind the content
(`MirrorPart`), and passes both on to the next node. The description comes last: what was copied in part does not count.
The next mirror waits until all ranks are ready, so a vote for one proves that the one before is complete everywhere.

**Interval.** Rank 0 chooses it so that the copy, and on CPUs the thread, too, take at most MAX_COST of the time.

**Restoring** is in checkpoint.mirror_restore. A node that is lost takes its own part with it, and the next node has the
copy. Two neighbours that are lost at once leave a gap: then the newest checkpoint on disk counts, as without mirrors.

Rejected: memory of the ranks themselves (a rank that fails is a process that ends, with all others of its group), files
in /dev/shm (64 MB in a container, and left behind by a node that is killed), the writer process of checkpoints (niced,
and busy with the disk for longer than a mirror lasts), and a copy on every node (the network and memory of n copies).
"""

import logging
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from pydantic import ValidationError
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from tandem.model import Model, WholeNumber
from tandem.processes.launch import MIRROR
from tandem.rundir.checkpoint import CHUNK_BYTES, checksum
from tandem.rundir.lineage import Continuation
from tandem.rundir.log import LogWriter
from tandem.rundir.records import Mirrored
from tandem_trainer.checkpoint.exchange import Exchange
from tandem_trainer.checkpoint.staging import FileLayout, Region, Staging, signature
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.process_group import MESSAGE_BYTES, Group
from tandem_trainer.save_interval import MAX_COSTS

log = logging.getLogger(__name__)

MAX_COST = 0.01
"""Share of the training time that mirrors may take."""
MIN_SECONDS = 2.0
"""Shortest interval, in seconds: a restart itself takes about as long."""
TRANSFER_TIMEOUT = timedelta(minutes=5)
"""Timeout of one message between two nodes."""
CLOSE_SECONDS = 10.0
"""Time for which the end of training waits for a mirror that is being taken, in seconds."""
FILES_PER_RANK = 4
_FOOTER = struct.Struct("<8sQQ")
"""Last bytes of a file: a mark, the length of the description in bytes, and its checksum."""
_MARK = b"tdmmirr1"


class MirrorPoint(NamedTuple):
    """The state after a step of a generation."""

    generation: int
    step: int


class MirrorPart(Model):
    """Description of one part of a mirror."""

    generation: WholeNumber
    """Generation that took the step."""
    step: WholeNumber
    """Optimizer steps completed."""
    number: WholeNumber
    """Number of this part."""
    count: WholeNumber
    """Number of parts that make up the state."""
    files: dict[str, WholeNumber]
    """Size of each file of the checkpoint, in bytes."""
    regions: list[Region]
    """Pieces of files in the content of this part."""
    chunks: dict[str, dict[str, str]] = {}
    """Checksum of each chunk of this part, by file and the chunk's number."""
    facts: dict[str, Any] = {}
    """The manifest without its files; part 0 has it."""

    @property
    def point(self) -> MirrorPoint:
        """Return the state that it is a part of."""
        return MirrorPoint(self.generation, self.step)


def create_memory(ranks: int) -> str:
    """Create the memory of an agent's ranks, empty as yet; returns the value of the variable that tells them.

    Args:
        ranks: number of ranks of this agent.
    """
    descriptors = [os.memfd_create("tandem-mirror") for _ in range(FILES_PER_RANK * ranks)]
    return f"{os.getpid()}:{','.join(map(str, descriptors))}"


class MirrorFile:
    """One file of the agent's memory: a part of a mirror and its description.

    Args:
        descriptor: descriptor of the file, which this object keeps.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.part = self._read()
        """Description of what it holds; None while it holds nothing complete."""

    @property
    def point(self) -> MirrorPoint | None:
        """The state whose part it holds."""
        return None if self.part is None else self.part.point

    def content(self) -> Tensor:
        """Return the whole file, [bytes], uint8; changes change the file."""
        return torch.frombuffer(mmap.mmap(self.descriptor, 0), dtype=torch.uint8)

    def invalidate(self, size: int) -> None:
        """Drop the description, and make the file this large, in bytes. A file's end must not look like a footer."""
        self.part = None
        os.ftruncate(self.descriptor, size + _FOOTER.size)
        os.pwrite(self.descriptor, bytes(_FOOTER.size), size)

    def describe(self, part: MirrorPart) -> None:
        """Write the description behind the content, which makes the part count."""
        size = content_size(part.regions)
        body = part.model_dump_json(by_alias=True).encode()
        footer = _FOOTER.pack(_MARK, len(body), xxhash.xxh3_64_intdigest(body))
        os.ftruncate(self.descriptor, size)
        os.pwrite(self.descriptor, body + footer, size)
        self.part = part

    def refresh(self) -> None:
        """Read the description that has been received."""
        self.part = self._read()

    def _read(self) -> MirrorPart | None:
        end = os.fstat(self.descriptor).st_size - _FOOTER.size
        if end < 0:
            return None
        mark, length, digest = _FOOTER.unpack(os.pread(self.descriptor, _FOOTER.size, end))
        if mark != _MARK or length > end:
            return None
        body = os.pread(self.descriptor, length, end - length)
        if xxhash.xxh3_64_intdigest(body) != digest:
            return None
        try:
            part = MirrorPart.model_validate_json(body)
        except ValidationError:
            # A version before this one may have written it.
            return None
        return part if content_size(part.regions) == end - length else None


def content_size(regions: Sequence[Region]) -> int:
    """Return the size of the content that holds these pieces, in bytes."""
    return max((region.offset + region.size for region in regions), default=0)


class MirrorMemory:
    """Files of one rank in its agent's memory.

    Args:
        files: two for the rank's own part, and two for its neighbour's.
    """

    def __init__(self, files: Sequence[MirrorFile]) -> None:
        self.files = files
        self.own, self.neighbour = files[:2], files[2:]

    @classmethod
    def of_agent(cls, local_rank: int) -> "MirrorMemory | None":
        """Open the files of a rank; None if its agent keeps none, or they cannot be opened."""
        process, _, numbers = os.environ.get(MIRROR, "").partition(":")
        own = numbers.split(",")[FILES_PER_RANK * local_rank :][:FILES_PER_RANK]
        if len(own) < FILES_PER_RANK:
            return None
        try:
            return cls([MirrorFile(os.open(f"/proc/{process}/fd/{n}", os.O_RDWR | os.O_CLOEXEC)) for n in own])
        except OSError as error:
            log.warning("the memory for mirrors cannot be opened, so there are none: %s", error)
            return None


class Ring:
    """Ranks with the same local rank, one on each node. Every rank has to create its own at the same time.

    Args:
        group: the ranks of this generation.
    """

    def __init__(self, group: Group) -> None:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size, self.ranks_per_node = group.world_size // ranks_per_node, ranks_per_node
        self.index, self.place = divmod(group.rank, ranks_per_node)
        self._gloo: Any = None
        if self.size > 1:
            store = PrefixStore(f"tandem/mirror/{self.place}", dist.distributed_c10d._get_default_store())
            self._gloo = dist.ProcessGroupGloo(store, self.index, self.size, TRANSFER_TIMEOUT)

    def copy_from(self, index: int, content: Tensor) -> None:
        """Copy bytes of one rank to all. Collective within the ring.

        Args:
            index: node of the source.
            content: [bytes], uint8; changed in place.
        """
        if self._gloo is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = index, 0
        for start in range(0, len(content), MESSAGE_BYTES):
            self._gloo.broadcast([content[start : start + MESSAGE_BYTES]], options).wait()

    def pass_on(self, content: Tensor, receive: Callable[[int], Tensor]) -> None:
        """Send bytes to the next node, and receive those of the previous one. Collective within the ring.

        Args:
            content: [bytes], uint8; may be empty.
            receive: returns the tensor for a number of bytes that arrive.
        """
        following, previous = (self.index + 1) % self.size, (self.index - 1) % self.size
        announced = torch.zeros(1, dtype=torch.int64)
        self._together(
            self._gloo.send([torch.tensor([len(content)])], following, 0), self._gloo.recv([announced], previous, 0)
        )
        incoming = receive(int(announced))
        for start in range(0, max(len(content), len(incoming)), MESSAGE_BYTES):
            works = []
            # Both are posted before either is waited for: in a ring, all would otherwise wait for the next one.
            if len(message := content[start : start + MESSAGE_BYTES]):
                works.append(self._gloo.send([message], following, 0))
            if len(message := incoming[start : start + MESSAGE_BYTES]):
                works.append(self._gloo.recv([message], previous, 0))
            self._together(*works)

    @staticmethod
    def _together(*works: Any) -> None:
        for work in works:
            work.wait()


class Mirrors:
    """Mirrors of one generation. Not thread-safe: only the training thread may call it. Every rank has to create its
    own at the same time.

    Args:
        group: the ranks of the generation.
    """

    def __init__(self, group: Group) -> None:
        self._group, self.ring = group, Ring(group)
        self.memory = MirrorMemory.of_agent(group.local_rank)
        """Memory of this rank; None if there is none, so that no mirror is taken."""
        self._complete: MirrorPoint | None = None
        self._log: LogWriter | None = None
        self._seconds = MIN_SECONDS
        self._costs: deque[float] = deque(maxlen=MAX_COSTS)
        self._copied_at = time.monotonic()
        self._newest: MirrorPoint | None = None
        self._signature: tuple[object, ...] | None = None
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def begin(self, restored: Continuation | None, writer: LogWriter | None) -> None:
        """Begin to take mirrors.

        Args:
            restored: mirror that this generation has started from; it stays until the first one is complete.
            writer: the training log, on rank 0; its lines are on disk before a mirror counts.
        """
        self._complete = None if restored is None else MirrorPoint(restored.generation, restored.step)
        self._log = writer
        self._copied_at = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether this rank has finished the last mirror, and can take another one."""
        is_busy = self._thread is not None and self._thread.is_alive()
        return self.memory is not None and not self._has_failed and not is_busy

    @property
    def is_due(self) -> bool:
        """Whether it is time for another one."""
        return self.is_ready and time.monotonic() - self._copied_at >= self._seconds

    def copy(self, point: MirrorPoint, contents: Contents, facts: dict[str, Any], started: float) -> None:
        """Copy this rank's part of the state, and finish the mirror in another thread. Collective. All ranks are ready.

        The tensors may change as soon as this returns.

        Args:
            facts: the manifest without its files.
            started: time of the perf_counter at which the copy began to block training.
        """
        assert self.memory is not None
        files = contents.files(rounds=False)
        # All ranks were ready in the vote, so the mirror before is complete on all of them.
        self._complete = self._newest or self._complete
        if self._signature != signature(files):
            self._signature = signature(files)
            self._layout = FileLayout.from_files(files, self._group.world_size)
            self._part = self._layout.part_of(self._group.rank, self._group.world_size)
            self._exchange = Exchange(files, self._layout, self._group.rank, self._group.world_size)
            self._stagings: dict[int, Staging] = {}
        part, file = None, self._unused(self.memory.own)
        if self._part is None:
            for _ in self._exchange.receive(files):
                pass  # the other ranks need this rank's elements
        else:
            staging = self._stagings.get(file.descriptor)
            if staging is None:
                staging = self._stagings[file.descriptor] = Staging(file.descriptor, files, self._layout, self._part)
            file.invalidate(content_size(staging.regions))
            staging.copy(files, self._exchange.receive(files))
            part = MirrorPart(
                generation=point.generation,
                step=point.step,
                number=self._part,
                count=self._layout.parts,
                files=self._layout.sizes,
                regions=staging.regions,
                facts=facts if self._part == 0 else {},
            )
        self._newest, self._copied_at = point, time.monotonic()
        stall = time.perf_counter() - started
        self._thread = threading.Thread(target=self._finish, args=(point, file, part, stall), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the mirror that is being taken."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _unused(self, pair: Sequence[MirrorFile]) -> MirrorFile:
        """Return the file of a pair that does not hold the mirror which has to stay."""
        return pair[1] if self._complete is not None and pair[0].point == self._complete else pair[0]

    def _finish(self, point: MirrorPoint, file: MirrorFile, part: MirrorPart | None, stall: float) -> None:
        started = time.perf_counter()
        try:
            if part is not None:
                if self._log is not None:
                    self._log.settle()
                file.describe(part.model_copy(update={"chunks": checksums(file.content(), part.regions)}))
            if self.ring.size > 1:
                self._pass_on(file if part is not None else None)
        except Exception:
            # The group is over, or the machine has no memory left. Training goes on, and the disk has checkpoints.
            log.exception("no further mirrors are taken in this generation")
            self._has_failed = True
            return
        # The thread takes its time from the ranks where these run on CPUs.
        busy = time.thread_time() if self._group.device.type == "cpu" else 0.0
        self._costs.append(stall + busy)
        self._seconds = max(MIN_SECONDS, median(self._costs) / MAX_COST)
        if self._log is not None:
            self._log.append(
                Mirrored(
                    time=time.time(),
                    step=point.step,
                    stall_seconds=round(stall, 6),
                    copy_seconds=round(time.perf_counter() - started, 6),
                    interval_seconds=round(self._seconds, 3),
                    bytes=0 if part is None else content_size(part.regions),
                )
            )

    def _pass_on(self, file: MirrorFile | None) -> None:
        assert self.memory is not None
        target = self._unused(self.memory.neighbour)

        def receive(size: int) -> Tensor:
            target.invalidate(max(0, size - _FOOTER.size))
            return target.content()[:size]

        self.ring.pass_on(torch.empty(0, dtype=torch.uint8) if file is None else file.content(), receive)
        target.refresh()


def checksums(content: Tensor, regions: Sequence[Region]) -> dict[str, dict[str, str]]:
    """Compute the checksum of each chunk, by file and the chunk's number.

    Args:
        content: [bytes], uint8.
    """
    by_file: dict[str, dict[str, str]] = {}
    memory = memoryview(content.numpy())  # type: ignore[arg-type]
    for region in regions:
        for first in range(0, region.size, CHUNK_BYTES):
            chunk = memory[region.offset + first : region.offset + min(first + CHUNK_BYTES, region.size)]
            by_file.setdefault(region.path, {})[str((region.start + first) // CHUNK_BYTES)] = checksum(chunk)
    return by_file


def complete_points(parts: Sequence[Mapping[str, int]]) -> list[MirrorPoint]:
    """Return the states of which all parts are among these, newest first.

    Args:
        parts: generation, step, number and count of each.
    """
    numbers: dict[tuple[MirrorPoint, int], set[int]] = {}
    for part in parts:
        point = MirrorPoint(part["generation"], part["step"])
        numbers.setdefault((point, part["count"]), set()).add(part["number"])
    return sorted((point for (point, count), present in numbers.items() if len(present) == count), reverse=True)
