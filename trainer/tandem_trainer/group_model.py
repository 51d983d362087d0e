"""A model of a session whose gradients are averaged in one group after another.

A script holds on to what `Session.distribute` has returned, and DistributedDataParallel belongs to one process group.
So a session that can go on in another group returns an `GroupModel`, which makes a DistributedDataParallel for each
group, around the same module.

**Errors do not leave it.** If the group is lost in a forward or backward pass, the step is marked as lost, and the
pass goes on with the gradients of this rank alone: an exception would end the loop of the script
(tandem_trainer.session_regroup). Each collective of a pass is either the all-reduce of a bucket, which the hook guards,
or made in DistributedDataParallel's forward pass, which is repeated without it.

Rejected: `DistributedDataParallel.__init__` on the same object for each group (it drops the hooks that the script has
registered), its own copies of buffers between ranks (a collective that the watchdog cannot end).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tandem_trainer.failure import is_of_peers
from tandem_trainer.process_group import Group, GroupLost
from tandem_trainer.uncompiled import uncompiled

_SYNC_OPTIONS = inspect.signature(DistributedDataParallel).parameters.keys() & {"forward_sync_buffers"}
WITHOUT_SYNC: dict[str, Any] = {"init_sync": False} | dict.fromkeys(_SYNC_OPTIONS or {"broadcast_buffers"}, False)
"""Options of DistributedDataParallel without collectives of its own besides those of gradients: they cannot be
interrupted. Ranks that regroup hold the same weights, and copy buffers themselves (tandem_trainer.regroup). torch 2.15
has another name for one."""
OPTIONS = {"bucket_cap_mb", "gradient_as_bucket_view"}
"""Options of DistributedDataParallel with which it has no other collectives than those above."""


class LocalLoss:
    """This rank's part of the loss of a step, which travels with its last bucket of gradients: so the loss is not lost
    with a rank."""

    def __init__(self) -> None:
        self.part: Tensor | None = None
        """This rank's part so far, a scalar."""
        self._sum: Tensor | None = None

    def message(self) -> Tensor:
        """Return what this rank sends: its part, and 1 if it has one, [2], float64."""
        message = torch.zeros(2, dtype=torch.float64)
        if self.part is not None:
            message[0], message[1] = self.part.detach(), 1
        self._sum = message
        return message

    def take(self, world_size: int) -> Tensor | None:
        """Return the mean loss of the global batch, a scalar, once the last bucket has arrived; None if a rank has not
        sent its part. Forgets it."""
        part, total, self.part, self._sum = self.part, self._sum, None, None
        if world_size == 1:
            return part
        return total[0] if total is not None and int(total[1]) == world_size else None


class PassState:
    """State of the forward and backward passes of the current step."""

    def __init__(self) -> None:
        self.is_tolerant = False
        """Whether a lost group is marked, and not raised."""
        self.error: Exception | None = None
        """Error with which the group was lost in this step."""
        self.operations = 0
        """Collectives of gradients in this step."""
        self.averages_after_update = False
        """Whether gradients were averaged after an optimizer had taken its step."""
        self.has_updated = False
        """Whether an optimizer has taken its step."""
        self.loss = LocalLoss()

    def begin(self) -> None:
        """Begin a step."""
        self.error, self.operations, self.averages_after_update, self.has_updated = None, 0, False, False
        self.loss.part = None

    @property
    def is_lost(self) -> bool:
        """Whether the group was lost in this step, so that its gradients are not those of the global batch."""
        return self.error is not None

    def lose(self, error: Exception) -> None:
        """Mark the step as lost. Any thread may call it."""
        self.error = self.error or error

    @property
    def on_error(self) -> Callable[[Exception], None] | None:
        """Called with an error of a collective; None: the error is raised."""
        return self.lose if self.is_tolerant else None


class GroupModel(nn.Module):
    """A model whose gradients are averaged over the ranks of the current group; alone, it is the model.

    Args:
        module: the model.
        options: options of DistributedDataParallel, of OPTIONS.
        passes: state of the passes of all models of the session.
    """

    _averaging: DistributedDataParallel | None

    def __init__(self, module: nn.Module, options: Mapping[str, Any], passes: PassState) -> None:
        super().__init__()
        self.module = module
        self._options, self._passes = {"gradient_as_bucket_view": True, **options}, passes
        self._hide(None)

    def bind(self, group: Group) -> None:
        """Average gradients in a group from now on. The ranks hold the same weights already."""
        if group.world_size == 1:
            self._hide(None)
            return
        averaging = DistributedDataParallel(self.module, **(WITHOUT_SYNC | self._options))
        averaging.register_comm_hook((group, self._passes), averaging_hook)
        self._hide(averaging)

    def release(self) -> None:
        """Leave the group: gradients are those of this rank alone."""
        self._hide(None)

    def layout(self) -> list[str]:
        """Describe the parameters whose gradients are averaged; it is the same on all ranks."""
        return [
            f"{name} {list(parameter.shape)} {parameter.dtype}"
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them."""
        with contextlib.nullcontext() if self._averaging is None else self._averaging.no_sync():
            yield

    # A compiler skips this frame, and compiles the model, whose code stays when the group changes.
    @uncompiled(recursive=False)
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        averaging, passes = self._averaging, self._passes
        if averaging is None or passes.is_lost:
            return self.module(*inputs, **options)
        before = averaging._has_rebuilt_buckets
        first = sequence_number()
        try:
            result = averaging(*inputs, **options)
        except Exception as error:
            if not passes.is_tolerant or not (isinstance(error, GroupLost) or is_of_peers(error)):
                raise
            passes.lose(error)
            return self.module(*inputs, **options)
        if averaging._has_rebuilt_buckets and not before:
            # DistributedDataParallel has agreed on its buckets, once.
            passes.operations += sequence_number() - first
        return result

    def __getstate__(self) -> dict[str, Any]:
        # A copy, such as an average of the weights, is in no group, and no step of the session passes through it.
        return vars(self) | {"_averaging": None, "_passes": PassState()}

    def _hide(self, averaging: DistributedDataParallel | None) -> None:
        """Set the attribute such that it is no submodule: the names of weights would change with the group."""
        vars(self)["_averaging"] = averaging


@uncompiled
def sequence_number() -> int:
    """Return the number of collectives that the group of all ranks has begun; 0 without one."""
    # The control group of Tandem is another one.
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    return 0 if world is None else int(world._get_sequence_number_for_group())


def averaging_hook(state: tuple[Group, PassState], bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients as DistributedDataParallel does without a hook. With the last one, the loss of the
    step is summed."""
    group, passes = state
    gradients = bucket.buffer()
    passes.averages_after_update |= passes.has_updated
    if passes.is_lost:
        return _complete(gradients)
    gradients.div_(group.world_size)
    futures = [_all_reduce(gradients, group, passes)]
    if bucket.is_last():
        futures.append(_all_reduce(passes.loss.message(), group, passes))
    if len(futures) == 1:
        return futures[0]
    both = torch.futures.collect_all(futures)
    # An error of either is raised here, so it reaches the thread that waits.
    return both.then(lambda done: [future.value() for future in done.value()][0])  # noqa: RUF015 - all are looked at


def _all_reduce(tensor: Tensor, group: Group, passes: PassState) -> Future[Tensor]:
    """Sum a tensor over the ranks, in place."""
    assert dist.group.WORLD is not None
    try:
        work = dist.group.WORLD.allreduce([tensor])
    except RuntimeError as error:
        if passes.on_error is None:
            raise
        passes.lose(error)
        return _complete(tensor)
    passes.operations += 1
    return group.guarded(work.get_future(), tensor, passes.on_error)


def _complete(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future
