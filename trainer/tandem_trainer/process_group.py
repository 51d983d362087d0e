"""The group of ranks: its members, their devices, and their collectives.

Gradients travel over NCCL or gloo as torch chooses. Messages between ranks about the run itself go through a gloo group
of their own, the control group, so that they neither wait behind gradients nor touch the GPU. torch.distributed does
not know that group: a script that destroys all process groups at its end, as scripts should, does not destroy it.

The *vote* is how all ranks take the same decision after the same step: to stop, to save, how the loss stands. One small
all-reduce carries everything; it is held about twice a second whatever a step takes, because its interval in steps
follows from numbers that all ranks have agreed on. Rejected: an all-reduce after each step (measurable on steps of a
millisecond), a flag in the store (ranks would see it after different steps, and then hang in different collectives).
"""

import datetime
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.futures import Future

from tandem.processes.process_age import process_age
from tandem_trainer.connections import Connections

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

VOTE_SECONDS = 0.5
"""Interval of votes, in seconds: short enough that a stop or a loss is never old, long enough to cost nothing."""
MAX_STEPS_BETWEEN_VOTES = 100
SETTLE_SECONDS = 0.1
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
"""Timeout of gradient collectives where no coordinator watches for ranks that hang."""
PATIENCE = datetime.timedelta(days=30)
"""Timeout of the control group, and of all collectives where a coordinator watches: it knows which ranks pause and
which hang.

The control group has it without a coordinator, too: between two steps and after the loop a rank may pause for any time,
for a validation or an export, while the others wait for its next message. A rank that has died breaks the connection at
once, and one that hangs in the model's own collectives ends them after COLLECTIVE_TIMEOUT."""

MESSAGE_BYTES = 2**24
"""Size of the messages in which a rank hands its state over, in bytes."""
STUCK_SECONDS = 0.1
"""Time after which an operation of an interrupted group never ends, in seconds."""
_stuck_groups: list[Any] = []
"""Groups of this process that cannot be destroyed."""

_numbers = itertools.count()
"""Counter of the groups of this process; all ranks create them in the same order."""


class GroupLost(Exception):  # noqa: N818 - it says what happened
    """The group is over, and this rank has left it; the step that it was in is not taken."""


class PeerFault(Exception):  # noqa: N818 - it says what happened
    """Another rank cannot go on, and has sent the reason; this rank could."""


@dataclass(frozen=True)
class Vote:
    """Result of a vote, equal on all ranks."""

    losses: list[float]
    """Mean loss of the global batch of each step since the last vote."""
    stop: bool
    """A rank is asked to save and leave."""
    finish: bool
    """A rank asks to end training early."""
    save: bool
    """A checkpoint is due, by the clock of rank 0."""
    busy: bool
    """A rank is still writing the previous checkpoint."""
    mirror: bool
    """All ranks copy their state into memory."""
    same_samples: bool
    """All ranks have taken the same samples since the last vote."""
    step_seconds: float
    """Mean time of a step over the ranks."""
    steps_to_next: int
    """Number of steps until the next vote."""


@dataclass(frozen=True)
class Operation:
    """An operation of gloo that a thread may be waiting for."""

    inner: Future[Any]
    """gloo's own future."""
    value: Any
    """Result for the waiting thread."""
    on_error: Callable[[Exception], None] | None
    """Called with an error, and the thread gets the value; None: it gets the error."""


class Group:
    """The ranks of a generation, seen from this one. A group of one needs no process group."""

    _is_interruptible = _is_interrupted = _is_lost = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        device: torch.device,
        timeout: datetime.timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        """
        Args:
            rank: global rank.
            world_size: number of ranks.
            local_rank: rank within the worker.
            device: device of this rank.
            timeout: timeout of collectives, also on meshes.
        """
        self.rank, self.world_size, self.local_rank, self.device = rank, world_size, local_rank, device
        self.timeout = timeout
        self._control: Any = None
        self._connections: Connections | None = None
        self._outstanding: dict[Future[Any], Operation] = {}
        """Operations, by the future that a thread waits for."""
        self._completing = threading.Lock()
        if world_size > 1:
            store = PrefixStore(f"tandem/{next(_numbers)}", dist.distributed_c10d._get_default_store())
            self._control = dist.ProcessGroupGloo(store, rank, world_size, PATIENCE)
        self.joined_at = time.time()
        """Time at which this rank was connected to all others, in seconds since the epoch."""
        self.process_at = self.joined_at - process_age()
        """Time at which this process started, likewise."""

    @classmethod
    def join(
        cls, watched: bool = False, device: torch.device | None = None, connections: Connections | None = None
    ) -> "Group":
        """Join the group that torchrun's variables describe; a group of one without them. A framework may have joined
        already.

        Args:
            watched: a coordinator ends ranks that wait for one that hangs.
            device: device of this rank; None: its GPU, if there is one.
            connections: records what the group opens.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        device = rank_device() if device is None else device
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        timeout = PATIENCE if watched else COLLECTIVE_TIMEOUT
        connections = Connections() if connections is None else connections
        if world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None)
        group = cls(rank, world_size, local_rank, device, timeout)
        group._connections = connections
        connections.settle(int(os.environ.get("MASTER_PORT", "0")))
        return group

    @classmethod
    def rejoin(cls, connections: Connections) -> "Group":
        """Join the group that torchrun's variables describe now, in a process that has left another one.

        Args:
            connections: records what the new group opens; `shut_down` on it makes this call raise.
        """
        # Ranks that start now count from 0, too.
        global _numbers
        _numbers = itertools.count()
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch resets it only where a group was complete (torch 2.15).
        dist.distributed_c10d._world.group_count = 0
        return cls.join(watched=True, connections=connections)

    def mesh(self, sizes: Mapping[str, int]) -> "DeviceMesh":
        """Create a device mesh of all ranks, in row-major order. Collective.

        Args:
            sizes: size of each dimension, by name, from the outermost.
        """
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for name in sizes:
            # The mesh creates groups of its own, without the timeout of the group of all ranks.
            _set_timeout(self.timeout, mesh.get_group(name))
        return mesh

    def vote(
        self,
        losses: Tensor,
        stop: bool,
        save: bool,
        busy: bool,
        samples_digest: int,
        step_seconds: float,
        finish: bool = False,
        mirror: bool = False,
    ) -> Vote:
        """Agree with all other ranks on stop, save, losses and samples. Collective.

        Args:
            losses: [steps since the last vote], float32 on the CPU; this rank's part of each global mean.
            stop: this rank is asked to save and leave.
            save: a checkpoint is due; only that of rank 0 counts.
            busy: this rank is still writing its part of the last one.
            samples_digest: digest of the samples since the last vote, 64 bits.
            step_seconds: mean time of a step here since the last vote.
            finish: this rank wants to end training early.
            mirror: this rank is ready for a mirror; on rank 0: and one is due.
        """
        digits = [samples_digest >> shift & 0xFFFF for shift in range(0, 64, 16)]
        inputs = [
            stop,
            finish,
            save and self.rank == 0,
            busy,
            mirror,
            step_seconds,
            *digits,
            *(digit * digit for digit in digits),
        ]
        # Sums of whole numbers are exact in double precision. The size is fixed, also where ranks have taken a
        # different number of steps.
        ballot = torch.zeros(len(inputs) + MAX_STEPS_BETWEEN_VOTES, dtype=torch.float64)
        ballot[: len(inputs)] = torch.tensor(inputs, dtype=torch.float64)
        ballot[len(inputs) : len(inputs) + len(losses)] = losses
        if self._control is not None:
            self._wait(self._control.allreduce([ballot]))
        stops, finishes, saves, busies, mirrors, seconds, *sums = ballot[: len(inputs)].tolist()
        agreed = ballot[len(inputs) : len(inputs) + len(losses)].float().tolist()
        # Numbers are equal if and only if the square of their sum is their count times the sum of their squares.
        pairs = zip(sums[: len(digits)], sums[len(digits) :], strict=True)
        same = all(int(total) ** 2 == self.world_size * int(squares) for total, squares in pairs)
        mean_seconds = seconds / self.world_size
        due = round(VOTE_SECONDS / mean_seconds) if mean_seconds > 0 else MAX_STEPS_BETWEEN_VOTES
        steps_to_next = max(1, min(due, MAX_STEPS_BETWEEN_VOTES))
        is_mirrored = mirrors == self.world_size
        return Vote(
            *(agreed, stops > 0, finishes > 0, saves > 0, busies > 0),
            *(is_mirrored, same, mean_seconds, steps_to_next),
        )

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather a small JSON value of every rank, in rank order, on every rank. Collective."""
        if self._control is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        self._wait(self._control.allgather([sizes], [size]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        self._wait(self._control.allgather([parts], [padded]))
        return [json.loads(bytes(part[: int(n)].numpy())) for part, n in zip(parts, sizes, strict=True)]

    def tell(self, value: dict[str, Any]) -> dict[str, Any]:
        """Broadcast a small JSON value of rank 0 to every rank. Collective."""
        return self.gather(value if self.rank == 0 else {})[0]

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of rank 0 to every rank. Collective.

        Args:
            tensors: the same shapes and types on every rank; changed in place.
        """
        self.copy_from(0, tensors)

    def copy_from(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of one rank to every rank. Collective.

        Args:
            rank: source rank.
            tensors: the same shapes and types on every rank; changed in place.
        """
        if self._control is None or not tensors:
            return
        flat = _flat(tensors)
        self._wait(self._control.broadcast(flat, rank))
        if self.rank != rank:
            parts = torch.split(flat, [tensor.nbytes for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self._control is not None:
            self._wait(self._control.barrier())

    def allow_interrupts(self) -> None:
        """Make all collectives to come such that `interrupt` frees who waits for them."""
        self._is_interruptible = True

    @property
    def is_lost(self) -> bool:
        """Whether a collective has failed, or the group was interrupted."""
        return self._is_lost

    def interrupt(self) -> None:
        """Make all collectives of this group raise, those that are in progress and those to come. Any thread may call
        it."""
        self._is_lost = self._is_interrupted = True
        if self._connections is not None:
            self._connections.shut_down()
        for future, operation in tuple(self._outstanding.items()):
            self._complete(future, operation, GroupLost())

    def guarded(
        self, inner: "Future[Any]", value: Any, on_error: Callable[[Exception], None] | None = None
    ) -> "Future[Any]":
        """Return a future that is complete when an operation of gloo is, with a value, or when the group is
        interrupted.

        gloo loses a message that it was receiving when the connection broke: the operation neither completes nor fails
        (torch 2.15; about one interrupted step in twenty). So a thread that waits for it needs this future.

        Args:
            on_error: called with an error, on any thread, before the future is complete with the value all the same;
                None: the future raises the error.
        """
        outer: Future[Any] = Future()
        operation = self._outstanding[outer] = Operation(inner, value, on_error)

        def end(inner: Future[Any]) -> None:
            try:
                inner.value()
            except Exception as error:  # it is raised where the future is waited for
                self._is_lost = True
                self._complete(outer, operation, error)
            else:
                self._complete(outer, operation)
            self._outstanding.pop(outer, None)

        inner.add_done_callback(end)
        if self._is_interrupted:
            self._complete(outer, operation, GroupLost())
        return outer

    def _complete(self, future: "Future[Any]", operation: Operation, error: Exception | None = None) -> None:
        """Complete a future, unless it is complete: by gloo's thread, or by the one that interrupts."""
        with self._completing:
            if future.done():
                return
            if error is not None and operation.on_error is None:
                future.set_exception(error)
                return
            if error is not None and operation.on_error is not None:
                operation.on_error(error)
            future.set_result(operation.value)

    def abandon(self) -> None:
        """Destroy the process groups, whatever the other ranks do."""
        self.interrupt()
        control, self._control = self._control, None
        deadline = time.monotonic() + STUCK_SECONDS
        while (
            stuck := not all(operation.inner.done() for operation in tuple(self._outstanding.values()))
        ) and time.monotonic() < deadline:
            time.sleep(0.001)
        if stuck:
            # Their destructors would wait for ever for the threads that gloo has forgotten.
            _stuck_groups.append((control, dist.group.WORLD))
        if dist.is_initialized():
            dist.destroy_process_group()

    def hand_over(self, rank: int, tensors: Sequence[Tensor], keeps: bool) -> None:
        """Copy the tensors of one rank to others, message by message. Collective.

        Args:
            rank: source rank.
            tensors: the same shapes and types on every rank, on the CPU, contiguous; changed in place.
            keeps: whether this rank, which is not the source, takes part without taking the values.
        """
        for tensor in tensors:
            content = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, len(content), MESSAGE_BYTES):
                part = content[start : start + MESSAGE_BYTES]
                buffer = torch.empty_like(part) if keeps and self.rank != rank else part
                self._wait(self._control.broadcast([buffer], _options(rank)))

    def _wait(self, work: Any) -> None:
        """Wait for an operation of the control group.

        Raises:
            GroupLost: the group was interrupted.
        """
        if not self._is_interruptible:
            work.wait()
            return
        done = threading.Event()
        future = self.guarded(work.get_future(), None)
        future.add_done_callback(lambda _: done.set())
        # Not `future.wait()`, in which Python runs no handler of a signal.
        done.wait()
        future.value()

    def leave(self) -> None:
        """Destroy the process groups, unless the script has. Called at the end of the process: until then the script
        may have collectives of its own."""
        if self._control is not None:
            # A thread of gloo releases the last gradients after they have arrived, takes the interpreter lock for it,
            # and aborts the process if the interpreter is ending by then (torch 2.15). So it gets a moment.
            time.sleep(SETTLE_SECONDS)
            if dist.is_initialized():
                dist.destroy_process_group()
            self._control = None


def rank_device() -> torch.device:
    """Return the device of this rank: its GPU, by its rank within the worker, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _options(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors])


def _set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup) -> None:
    # Public in torch 2.15, and not yet in 2.11.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)
