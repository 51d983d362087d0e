"""The memory of one device at the peak of a training step, by strategy and world size. Pure.

With P, G and O for the bytes of parameters, gradients and optimizer state, and N data-parallel ranks:

    single    P + G + O + activations
    ddp       P + G + O + activations        the buckets are the gradients (gradient_as_bucket_view=True)
    fsdp      (P + G + O) / N + the larger of
                activations,             and what is gathered: the parts outside of any block, the block that is
                                         computed, those that are prefetched, and the gradients of one block, before
                                         they are reduced and while they are sent
                what is in no block,     and twice its gradients, at the end of the backward pass
              Copies in each worker (shardWithin): N is the ranks of a worker
              With cpuOffload P, G and O are in the memory of the machine, and the device has what is gathered
    tensor    as fsdp, with the P, G, O and activations of a rank that holds its part of each split matrix
    hogwild   P + N (G + O + activations)    all ranks of the worker together, which share the weights alone
    dp        P + O + the larger of          the first of N devices, which sums the gradients of all of them:
                G + activations              the samples of its copy, and the outputs and the loss of all samples
                2 G                          its own gradients, and the sum
    model     P + G + O + activations        of the layers on the device that holds most

FSDP is that of ZeRO's third stage (https://arxiv.org/abs/1910.02054) as `torch.distributed.fsdp.fully_shard` does it.
Activations are those of a traced step (tandem.job.footprint); they contain the copies of weights that mixed precision
casts. Under `single`, `fsdp` and `tensor` without accumulation, only the gradients that exist at the peak count: most
gradients are computed while activations are freed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from tandem.errors import UserError
from tandem.job.footprint import Footprint, Pass
from tandem.job.tasks import FsdpSettings, Loop

FULL_PRECISION = 4
"""Bytes of a float32 element."""
ADAM_STATES = 2
"""Elements of Adam's state for each parameter: running means of the gradient and of its square."""
UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
"""Bytes of each unit of size, as data sheets and Kubernetes write them."""


class PlannedStrategy(StrEnum):
    """Distribution of a model over ranks."""

    SINGLE = "single"
    """One rank."""
    DDP = "ddp"
    """Each rank holds the whole model; gradients are averaged."""
    FSDP = "fsdp"
    """Each rank holds a shard of parameters, gradients and optimizer state, and gathers a block before computing it."""
    TENSOR = "fsdp+tensor"
    """Like `fsdp`, and the ranks of a worker split each matrix (tensorParallel)."""
    PIPELINE = "pipeline"
    """Ranks hold consecutive stages of the model (tandem_cli.planning.pipeline)."""
    HOGWILD = "hogwild"
    """The ranks of a worker update the same weights without locks."""


@dataclass(frozen=True)
class Memory:
    """Memory of one device at the peak, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Activations, temporary tensors and the batch; without casts."""
    casts: int
    """Copies of parameters in a lower precision."""
    gathered: int
    """FSDP: unsharded parameters and gradients of gathered blocks."""
    buffers: int
    """Buffers of the model, and the moving average of its weights."""
    data: int
    """Training data that the device holds as a whole."""

    @property
    def total(self) -> int:
        """The peak, in bytes."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of the rank that has most samples of a global batch."""

    micro_batch: int
    """Samples of its largest forward pass."""
    passes: int
    """Forward passes of a step."""


def batch_of(loop: Loop, world_size: int) -> MicroBatches:
    """Compute the micro-batches of one data-parallel rank, as `pieces` in tandem_trainer.data.order cuts them."""
    share = -(-loop.global_batch_size // world_size)
    passes = -(-share // (loop.micro_batch_size or share))
    return MicroBatches(-(-share // passes), passes)


def state_of(parameters: int) -> Footprint:
    """Compute the state of a float32 model trained with Adam.

    Args:
        parameters: number of trainable elements.
    """
    size = FULL_PRECISION * parameters
    return Footprint(
        parameters=size,
        parameter_count=parameters,
        gradients=size,
        optimizer=ADAM_STATES * size,
        buffers=0,
        samples=0,
    )


def memory(
    strategy: PlannedStrategy,
    shards: int,
    footprint: Footprint,
    traced: Pass | None,
    passes: int = 1,
    options: FsdpSettings | None = None,
    precision: str = "float32",
) -> Memory:
    """Compute the peak of one device.

    Args:
        shards: ranks that `fsdp` shards the state over; the other strategies ignore it.
        footprint: footprint of the whole model; for `fsdp+tensor`, of one rank's part of it.
        traced: pass over a micro-batch; None if unknown, and activations are not counted.
        passes: passes of a step.
        options: settings of `fsdp`; None for the defaults.
        precision: precision of the computation.
    """
    options = options or FsdpSettings()
    parts = shards if strategy in (PlannedStrategy.FSDP, PlannedStrategy.TENSOR) else 1
    # Earlier passes accumulated gradients, or DDP's buckets are the gradients: then they exist during the whole pass.
    # With offloading, gradients never stay on the device.
    keeps_all = passes > 1 or strategy is PlannedStrategy.DDP or (options.cpu_offload and parts > 1)
    base = _state(footprint, parts)
    is_half = precision == "bfloat16" and parts > 1
    # The trace has what a step adds to the state: activations, and the gradients that exist with them.
    if traced is not None:
        # FSDP gathers weights in the precision of the computation, so autocast makes no further copies.
        if is_half:
            footprint, traced = _without_casts(footprint, traced)
        base = _accumulating(base, footprint, traced) if keeps_all else _computing(base, footprint, traced, parts)
    if parts == 1:
        return base
    # Activations are freed during the backward pass, and the gathered root parameters stay until its end: either moment
    # may be the peak.
    inside, at_end = unsharded_bytes(footprint, options, is_half)
    peaks = [replace(base, gathered=inside), replace(_state(footprint, parts), gathered=at_end)]
    # Offloaded shards are in the machine's memory; only what is gathered and the buffers stay on the device.
    if options.cpu_offload:
        peaks = [replace(peak, parameters=0, gradients=0, optimizer=0, buffers=footprint.buffers) for peak in peaks]
    return max(peaks, key=attrgetter("total"))


def worker_memory(ranks: int, footprint: Footprint, traced: Pass | None, passes: int) -> Memory:
    """Compute the peak of all ranks of a worker together, under `hogwild`; arguments are those of `memory`."""
    single = memory(PlannedStrategy.SINGLE, 1, footprint, traced, passes)
    # Ranks share the weights alone. The average has buffers, too, which are each rank's own.
    own_buffers = footprint.buffers * (2 if footprint.average else 1)
    return Memory(
        parameters=single.parameters,
        gradients=ranks * single.gradients,
        optimizer=ranks * single.optimizer,
        activations=ranks * single.activations,
        casts=ranks * single.casts,
        gathered=0,
        buffers=single.buffers + (ranks - 1) * own_buffers,
        data=ranks * single.data,
    )


def _state(footprint: Footprint, parts: int = 1) -> Memory:
    """Compute what persists between steps, and all gradients, sharded over `parts` ranks."""
    return Memory(
        parameters=-(-footprint.parameters // parts),
        gradients=-(-footprint.gradients // parts),
        optimizer=-(-footprint.optimizer // parts),
        activations=0,
        casts=0,
        gathered=0,
        buffers=footprint.buffers + -(-footprint.average // parts),
        data=footprint.data,
    )


def _computing(base: Memory, footprint: Footprint, traced: Pass, parts: int = 1) -> Memory:
    """Compute the peak of a pass that starts without gradients, which are sharded over `parts` ranks."""
    peak = max(traced.moments, key=lambda moment: moment.activations * parts + moment.gradients)
    return replace(_active(base, footprint, peak.activations), gradients=-(-peak.gradients // parts))


def _accumulating(base: Memory, footprint: Footprint, traced: Pass) -> Memory:
    """Compute the peak of a pass during which all gradients exist, or none stays on the device."""
    return _active(base, footprint, traced.accumulating)


def _without_casts(footprint: Footprint, traced: Pass) -> tuple[Footprint, Pass]:
    """Remove the copies of weights that autocast makes from a pass: FSDP gathers weights in that precision.

    A copy is freed once the gradient of its weight is computed.
    """
    moments = []
    for moment in traced.moments:
        # The share of copies that still exists is that of the gradients that are still to be computed.
        casts = footprint.casts * (footprint.gradients - moment.gradients) // max(1, footprint.gradients)
        moments.append(moment.model_copy(update={"activations": max(0, moment.activations - casts)}))
    accumulating = max(traced.accumulating - footprint.casts, *(moment.activations for moment in moments))
    return (
        footprint.model_copy(update={"casts": 0}),
        traced.model_copy(update={"moments": tuple(moments), "accumulating": accumulating}),
    )


def _active(base: Memory, footprint: Footprint, active: int) -> Memory:
    casts = min(footprint.casts, active)
    return replace(base, activations=active - casts, casts=casts)


def unsharded_bytes(footprint: Footprint, options: FsdpSettings, is_half: bool = False) -> tuple[int, int]:
    """Compute the unsharded bytes of a device under FSDP, at most: while a block is computed, and at the end of the
    backward pass, when no activations are left. Both are 0 if the model's blocks are unknown.

    Args:
        is_half: whether parameters are gathered, and gradients computed, in two bytes an element.
    """
    if footprint.blocks is None:
        return 0, 0
    blocks = sorted(footprint.blocks)
    root = footprint.parameters - sum(blocks)
    gradients, root_gradients = blocks, root
    if footprint.block_gradients is not None:
        gradients = sorted(footprint.block_gradients)
        root_gradients = footprint.gradients - sum(gradients)
    # With resharding, the current block and the prefetched ones are whole; without it, all blocks stay whole.
    unsharded = blocks[-1 - options.prefetch :] if options.reshard_after_forward else blocks
    # Gradients before they are reduced, and the flat copy of them that is sent, in full precision: those of the largest
    # block, or, at the end, those of parameters outside of any block. In units of full precision: half precision takes
    # 0.5 for parameters, and 0.5 + 1 for gradients and their copy.
    parameter_bytes, gradient_bytes = (0.5, 1.5) if is_half else (1, 2)
    inside = parameter_bytes * sum(unsharded) + gradient_bytes * max(gradients, default=0)
    return int(parameter_bytes * root + inside), int(parameter_bytes * root + gradient_bytes * root_gradients)


def bytes_of(text: str, subject: str) -> int:
    """Parse a size as people write it: `80GB`, `79.6GiB`, `16Gi`.

    Args:
        subject: subject of the error message.

    Raises:
        UserError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise UserError(f"{subject}: {text!r} is not a size; write a number with its unit, such as 80GB or 79.6GiB")
    amount, unit = float(match[1]), match[2]
    by_name = {name.lower(): factor for name, factor in UNITS.items()}
    if unit.lower() not in by_name:
        problem = f"the unit {unit} is not known" if unit else "the unit is missing"
        raise UserError(f"{subject}: {text}: {problem}; take one of {', '.join(UNITS)}")
    size = int(amount * by_name[unit.lower()])
    if size < 1:
        raise UserError(f"{subject}: {text} is not positive; write more than 0")
    return size


def format_bytes(size: float) -> str:
    """Format a size in the binary units of memory: `26.1 GiB`, `213.4 MiB`, `36 B`."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= 0.9995 * UNITS[unit]), "B")
    return f"{size:.0f} B" if unit == "B" else f"{size / UNITS[unit]:,.1f} {unit}"


def world_sizes(text: str) -> Iterator[int]:
    """Parse numbers of ranks such as `1,2,4,8`, each once.

    Raises:
        UserError: one of them is not a positive integer.
    """
    for part in dict.fromkeys(part.strip() for part in text.split(",")):
        if not part.isdecimal() or int(part) < 1:
            raise UserError(f"--workers: {part!r} is not a number of workers; write positive integers, such as 1,2,4,8")
        yield int(part)
