"""Gradients of the same samples, computed by all ranks now and then, and compared.

Averaged gradients are equal on all ranks, whatever a rank has put in. So a processor that computes wrongly makes
weights that are wrong and equal, which no other comparison shows. In one step of EVERY_STEPS one rank sends some
samples of its share to all others, and each computes their gradient with the same weights, buffers and random numbers.
Nothing of that is learned: the step is taken as if nothing had been.

Gradients must be equal to the bit on ranks with the same kind of processor; other ranks are not compared with each
other, because their libraries sum in another order, and a tolerance that lets that pass hides flipped bits. Where two
ranks differ, all compute once more. A rank that does not get its own result again is the wrong one. If each gets its
own again, those that differ from most by more than rounding are wrong; if there is no majority, nobody knows which.

On a GPU the computation is deterministic here also where training is not. An operation that has no deterministic form
gives most ranks another result the second time, and ends the comparisons of this generation.

Rejected: the gradient of the step itself (in the backward pass it is averaged piece by piece, so it would have to be
computed apart as well), and norms of gradients (they differ between ranks, which have different samples).
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tandem.formatting import number
from tandem.job.tasks import Loop
from tandem.wire.status import GRADIENTS_DIFFER
from tandem_trainer.agreement import deviating_ranks, ranks_of
from tandem_trainer.checkpoint.restoring import digests
from tandem_trainer.corruption import CorruptionLog
from tandem_trainer.data.keyed import mixed, random_state_restored, seed_everything
from tandem_trainer.data.supply import Share
from tandem_trainer.machine import describe_machine
from tandem_trainer.micro_batch import PassDidNotFit, is_out_of_memory
from tandem_trainer.process_group import Group
from tandem_trainer.regroup import StepBuffers

log = logging.getLogger(__name__)

EVERY_STEPS = 1024
"""Steps of which one is compared: a comparison takes as long as two steps of 5 ms, and less of longer ones, so that it
costs at most 0.5 % where a step takes 2 ms."""
MAX_SAMPLES = 8
"""Samples whose gradient is compared."""
MAX_ELEMENTS = 2**24
"""Elements of the gradient that are compared: memory for a few copies of them is there also where it is scarce."""
MAX_BUFFER_BYTES = 2**26
"""Size of the buffers with which ranks still are compared, which rank 0 sends; codes of quantized weights are more."""
ROUNDING = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Difference of two gradients, relative to their norm, that two kernels for one kind of processor may make, by the
precision of the loop."""

Loss = Callable[[int, nn.Module, Any, Tensor], Tensor]
"""Function of a step, a model, a batch and the ids of its samples that returns the sum of their losses, a scalar."""


class GradientCheck:
    """Compares gradients of ranks that all hold the whole model.

    Args:
        model: the model, not wrapped by a strategy.
        loss: computes losses.
        loop: settings of the training loop.
    """

    def __init__(self, group: Group, model: nn.Module, loss: Loss, loop: Loop) -> None:
        self._group, self._model, self._loss, self._loop = group, model, loss, loop
        self._buffers = StepBuffers(model)
        # A compiled model would be compiled again without the wrapper of its strategy.
        is_large = sum(buffer.nbytes for buffer in model.buffers()) > MAX_BUFFER_BYTES
        self._is_off = group.world_size == 1 or loop.compile or is_large
        self._window = self._place = -1

    def is_due(self, step: int) -> bool:
        """Whether a step, counted from 0, is compared; the same on all ranks."""
        window, place = divmod(step, EVERY_STEPS)
        if window != self._window:
            self._window, self._place = window, mixed(self._loop.seed, window) % EVERY_STEPS
        return place == self._place and not self._is_off

    def compare(self, step: int, share: Share, corruptions: CorruptionLog) -> None:
        """Compare the gradients of some samples. Collective.

        Args:
            share: this rank's samples in that step.
            corruptions: takes what differs.
        """
        samples = self._samples_of_one_rank(step, share)
        first = self._gradients(step, *samples)
        views = self._group.gather({"kind": _kind(self._group.device), "digest": _digest(first)})
        kinds = [view["kind"] for view in views]
        by_kind = [[rank for rank, kind in enumerate(kinds) if kind == its] for its in dict.fromkeys(kinds)]
        differing = [ranks for ranks in by_kind if len({views[rank]["digest"] for rank in ranks}) > 1]
        if not differing:
            return
        second = self._gradients(step, *samples)
        # On a GPU, some operations sum in any order.
        on_gpu = self._group.device.type == "cuda"
        is_steady = self._is_close(first, second) if on_gpu else _digest(first) == _digest(second)
        weights = _digest([weight.detach() for weight in self._model.parameters()])
        second_views = self._group.gather({"steady": is_steady, "weights": weights})
        steady = [view["steady"] for view in second_views]
        if all(steady) and len({view["weights"] for view in second_views}) > 1:
            # Other weights have other gradients, and are named before the next save.
            return
        for ranks in differing:
            self._judge(step + 1, ranks, [views[rank]["digest"] for rank in ranks], steady, first, corruptions)

    def _judge(
        self,
        step: int,
        ranks: Sequence[int],
        values: Sequence[str],
        steady: Sequence[bool],
        gradients: Sequence[Tensor],
        corruptions: CorruptionLog,
    ) -> None:
        """Decide which of some ranks with the same kind of processor is wrong, if any, and record it. Collective.

        Args:
            values: digest of the gradient of each of these ranks.
            steady: whether each rank of the group has got its own gradient again.
            gradients: this rank's gradients.
        """
        computed = f"the gradient of the same {MAX_SAMPLES} samples or fewer in step {number(step)}"
        unsteady = [rank for rank in ranks if not steady[rank]]
        if 2 * len(unsteady) > len(ranks):
            self._is_off = True
            if self._group.rank == 0:
                log.info("gradients are not compared: most ranks compute another one from the same samples again")
            return
        if unsteady:
            corruptions.record(
                GRADIENTS_DIFFER, f"{ranks_of(unsteady)} computed {computed} twice, with different results", unsteady
            )
            return
        strange = [ranks[index] for index in deviating_ranks(values)]
        reference = [gradient.clone() for gradient in gradients]
        self._group.copy_from(next(rank for rank in ranks if rank not in strange), reference)
        close = [view["close"] for view in self._group.gather({"close": self._is_close(reference, gradients)})]
        strange = [rank for rank in strange if not close[rank]]
        if not strange:
            return
        if 2 * len(strange) < len(ranks):
            message = f"{ranks_of(strange)} computed {computed} otherwise than the other ranks, each time"
        else:
            strange = list(ranks)
            message = (
                f"{ranks_of(strange)} computed {computed} differently, each time; who of them is right is not known"
            )
        corruptions.record(GRADIENTS_DIFFER, message, strange)

    def _samples_of_one_rank(self, step: int, share: Share) -> tuple[Any, Tensor]:
        """Send some samples of one rank, which seed and step choose, to all. Collective."""
        group, content = self._group, io.BytesIO()
        source = mixed(self._loop.seed, step, 1) % group.world_size
        if group.rank == source:
            count = min(share.samples, self._loop.micro_batch_size or MAX_SAMPLES, MAX_SAMPLES)
            torch.save(share.part(0, count), content)
        size = group.gather({"bytes": content.tell()})[source]["bytes"]
        data = torch.frombuffer(bytearray(content.getvalue() or bytes(size)), dtype=torch.uint8)
        group.copy_from(source, [data])
        # All ranks read it, also the one that has sent it: its own tensors may begin at another place in memory, and
        # some libraries sum in another order then.
        read: tuple[Any, Tensor] = torch.load(
            io.BytesIO(bytes(data.numpy())), map_location=group.device, weights_only=True
        )
        return read

    def _gradients(self, step: int, batch: Any, ids: Tensor) -> list[Tensor]:
        """Compute the gradients of some samples, and put back what that changes. Collective.

        Raises:
            PassDidNotFit: it ran out of memory.
        """
        weights: list[nn.Parameter] = []
        size = 0
        for weight in self._model.parameters():
            # The first one needs the whole backward pass.
            if weight.requires_grad and (not weights or size + weight.numel() <= MAX_ELEMENTS):
                weights.append(weight)
                size += weight.numel()
        self._buffers.hold(self._group)
        try:
            with random_state_restored(), _deterministic(self._group.device):
                seed_everything(mixed(self._loop.seed, step), self._group.device)
                loss = self._loss(step, self._model, batch, ids)
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise PassDidNotFit(len(ids)) from error
            raise
        finally:
            self._buffers.put_back()
        return [gradient for gradient in gradients if gradient is not None]

    def _is_close(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
        """Whether two gradients differ by rounding at the most."""
        distance, norm = (
            torch.stack([torch.linalg.vector_norm(values, dtype=torch.float64) for values in tensors]).norm()
            for tensors in ([a - b for a, b in zip(first, second, strict=True)], first)
        )
        return bool(distance <= ROUNDING[self._loop.precision] * norm)


def _digest(gradients: Sequence[Tensor]) -> str:
    values = digests({str(place): gradient for place, gradient in enumerate(gradients)}).values()
    return xxhash.xxh3_64_hexdigest(repr([*values]).encode())


@cache
def _kind(device: torch.device) -> str:
    """Kind of processor that computes here, with what decides in which order it sums."""
    machine = describe_machine(device)
    return machine["device"] if device.type == "cuda" else f"{machine['processor']} {machine['threads']}"


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Have a GPU compute deterministically, as far as operations can; a CPU does."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(), torch.backends.cudnn.flags(benchmark=False, deterministic=True):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
