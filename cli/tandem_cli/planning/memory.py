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
    dp        P + O + the larger of          the first of N devices, which adds up the gradients of all of them:
                G + activations              the samples of its copy, and the outputs and the loss of all samples
                2 G                          its own gradients, and the sum
    model     P + G + O + activations        of the layers on the device that holds most

FSDP is that of ZeRO's third stage (https://arxiv.org/abs/1910.02054) as `torch.distributed.fsdp.fully_shard` does it.
Activations are those of a traced step (tandem.footprint); they contain the copies of weights that mixed precision
casts. Of `single`, `fsdp` and `tensor` without accumulation only those gradients count that exist at the peak: most of
them come into being while activations go.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem.errors import UserError
from tandem.footprint import Footprint, Pass
from tandem.tasks import Fsdp, Loop

FULL_PRECISION = 4
"""Bytes of a number in float32."""
ADAM_STATES = 2
"""Numbers that Adam keeps for each parameter: means of the gradient and of its square."""
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
"""Of sizes, as data sheets and Kubernetes write them."""


class Strategy(StrEnum):
    """How a model is distributed over ranks."""

    SINGLE = "single"
    """One rank."""
    DDP = "ddp"
    """Each rank holds all; gradients are averaged."""
    FSDP = "fsdp"
    """Each rank holds a part of parameters, gradients and optimizer state, and gathers a block when it is computed."""
    TENSOR = "fsdp+tensor"
    """The same, and the ranks of a worker split each matrix (tensorParallel)."""
    PIPELINE = "pipeline"
    """Ranks hold consecutive stages of the model (tandem_cli.planning.pipeline)."""
    HOGWILD = "hogwild"
    """The ranks of a worker write into the same weights."""
    DP = "dp"
    """One process copies the model to all of its devices in each pass, and divides the samples among them."""
    MODEL = "model"
    """One process has runs of layers on each of its devices."""


@dataclass(frozen=True)
class Memory:
    """What lies on one device at the peak, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """With temporary tensors and the batch; without casts."""
    casts: int
    """Copies of parameters in a lower precision."""
    gathered: int
    """FSDP: parameters and gradients of the blocks that are whole."""
    buffers: int
    """Those of the model, and the moving average of its weights."""
    data: int
    """Training data that lies on the device as a whole."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Batch:
    """How the rank with most samples takes its share of a global batch."""

    micro_batch: int
    """Samples of its largest forward pass."""
    passes: int
    """Forward passes of a step."""


def batch_of(loop: Loop, world_size: int) -> Batch:
    """The micro-batches of one data-parallel rank, as `pieces` in tandem_trainer.data.order cuts them."""
    share = -(-loop.global_batch_size // world_size)
    passes = -(-share // (loop.micro_batch_size or share))
    return Batch(-(-share // passes), passes)


def state_of(parameters: int) -> Footprint:
    """The state of a model in float32 with Adam.

    Args:
        parameters: how many numbers it learns.
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
    strategy: Strategy,
    shards: int,
    footprint: Footprint,
    traced: Pass | None,
    passes: int = 1,
    options: Fsdp | None = None,
    precision: str = "float32",
) -> Memory:
    """The peak of one device.

    Args:
        shards: ranks that `fsdp` splits the state over; without it the number is of no account.
        footprint: of the whole model; for `fsdp+tensor` of what a rank has of it.
        traced: the pass over a micro-batch; None where it is not known, and activations count as nothing.
        passes: in a step.
        options: of `fsdp`; None: as they are by default.
        precision: of the computation.
    """
    options = options or Fsdp()
    parts = shards if strategy in (Strategy.FSDP, Strategy.TENSOR) else 1
    # With offloading, gradients never stay on the device.
    keeps_all = passes > 1 or strategy is Strategy.DDP or (options.cpu_offload and parts > 1)
    whole = _state(footprint, parts)
    is_half = precision == "bfloat16" and parts > 1
    if traced is not None:
        if is_half:
            footprint, traced = _without_casts(footprint, traced)
        whole = _accumulating(whole, footprint, traced) if keeps_all else _computing(whole, footprint, traced, parts)
    if parts == 1:
        return whole
    inside, at_end = gathered(footprint, options, is_half)
    peaks = [replace(whole, gathered=inside), replace(_state(footprint, parts), gathered=at_end)]
    if options.cpu_offload:
        peaks = [replace(one, parameters=0, gradients=0, optimizer=0, buffers=footprint.buffers) for one in peaks]
    return max(peaks, key=_total)


def of_worker(ranks: int, footprint: Footprint, traced: Pass | None, passes: int) -> Memory:
    """The peak of all ranks of a worker together, under `hogwild`; arguments are those of `memory`."""
    one = memory(Strategy.SINGLE, 1, footprint, traced, passes)
    # The average has buffers, too, which are each rank's own.
    own_buffers = footprint.buffers * (2 if footprint.average else 1)
    return Memory(
        parameters=one.parameters,
        gradients=ranks * one.gradients,
        optimizer=ranks * one.optimizer,
        activations=ranks * one.activations,
        casts=ranks * one.casts,
        gathered=0,
        buffers=one.buffers + (ranks - 1) * own_buffers,
        data=ranks * one.data,
    )


def of_copies(footprint: Footprint, passes: int) -> Memory:
    """The peak of the first device under `dp`.

    Args:
        footprint: with the pass of that device.
        passes: in a step.
    """
    whole = _state(footprint)
    before = 0 if passes == 1 else footprint.gradients
    adding_up = replace(whole, gradients=before + 2 * footprint.gradients)
    if not footprint.passes:
        return adding_up
    computing = _computing(whole, footprint, footprint.passes[0])
    computing = replace(computing, gradients=before + computing.gradients)
    return max(computing, adding_up, key=_total)


def of_layers(footprint: Footprint, passes: int) -> Memory:
    """The peak of the device that holds most under `model`; arguments are those of `of_copies`."""
    found = []
    for number, one in enumerate(footprint.portions):
        here = footprint.model_copy(
            update={
                "parameters": one.parameters,
                "gradients": one.gradients,
                "optimizer": one.optimizer,
                "buffers": one.buffers,
                "average": one.parameters + one.buffers if footprint.average else 0,
                "casts": one.casts,
                "data": 0 if number else footprint.data,
            }
        )
        found.append(memory(Strategy.SINGLE, 1, here, one.passes[0], passes))
    return max(found, key=_total)


def _total(peak: Memory) -> int:
    return peak.total


def _state(footprint: Footprint, parts: int = 1) -> Memory:
    """The state that persists between steps, and all gradients, sharded over `parts` ranks."""
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


def _computing(whole: Memory, footprint: Footprint, traced: Pass, parts: int = 1) -> Memory:
    """The peak of a pass that starts without gradients, which are sharded over `parts` ranks."""
    peak = max(traced.moments, key=lambda one: one.activations * parts + one.gradients)
    return replace(_active(whole, footprint, peak.activations), gradients=-(-peak.gradients // parts))


def _accumulating(whole: Memory, footprint: Footprint, traced: Pass) -> Memory:
    """The peak of a pass during which the gradients of all parameters exist, or the device keeps none."""
    return _active(whole, footprint, traced.accumulating)


def _without_casts(footprint: Footprint, traced: Pass) -> tuple[Footprint, Pass]:
    """The pass without copies of weights that autocast makes: FSDP has gathered the weights in that precision.

    A copy is freed once the gradient of its weight is computed.
    """
    moments = []
    for one in traced.moments:
        left = footprint.casts * (footprint.gradients - one.gradients) // max(1, footprint.gradients)
        moments.append(one.model_copy(update={"activations": max(0, one.activations - left)}))
    accumulating = max(traced.accumulating - footprint.casts, *(one.activations for one in moments))
    return (
        footprint.model_copy(update={"casts": 0}),
        traced.model_copy(update={"moments": tuple(moments), "accumulating": accumulating}),
    )


def _active(whole: Memory, footprint: Footprint, active: int) -> Memory:
    casts = min(footprint.casts, active)
    return replace(whole, activations=active - casts, casts=casts)


def gathered(footprint: Footprint, options: Fsdp, is_half: bool = False) -> tuple[int, int]:
    """Bytes that are whole on each device under FSDP, at the most: while a block is computed, and at the end of the
    backward pass, when no activations are left. 0 where the blocks of the model are not known.

    Args:
        is_half: whether parameters are gathered, and gradients computed, in two bytes for each number.
    """
    if footprint.blocks is None:
        return 0, 0
    blocks = sorted(footprint.blocks)
    outside = footprint.parameters - sum(blocks)
    gradients, gradients_outside = blocks, outside
    if footprint.block_gradients is not None:
        gradients = sorted(footprint.block_gradients)
        gradients_outside = footprint.gradients - sum(gradients)
    together = blocks[-1 - options.prefetch :] if options.reshard_after_forward else blocks
    # Gradients before they are reduced, and the flat copy of them that is sent, in full precision: of the largest
    # block, or, at the end, of what is in no block.
    held, sent = (0.5, 1.5) if is_half else (1, 2)
    inside = held * sum(together) + sent * max(gradients, default=0)
    return int(held * outside + inside), int(held * outside + sent * gradients_outside)


def bytes_of(text: str, what: str) -> int:
    """A size as people write it: `80GB`, `79.6GiB`, `16Gi`.

    Args:
        what: that is of this size, for the message.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise UserError(f"{what}: {text!r} is no size; write a number with its unit, such as 80GB or 79.6GiB")
    amount, unit = float(match[1]), match[2]
    by_name = {name.lower(): factor for name, factor in UNITS.items()}
    if unit.lower() not in by_name:
        written = f"the unit {unit} is not known" if unit else "the unit is missing"
        raise UserError(f"{what}: {text}: {written}; take one of {', '.join(UNITS)}")
    size = int(amount * by_name[unit.lower()])
    if size < 1:
        raise UserError(f"{what}: {text} is nothing; write more than 0")
    return size


def shown(size: float) -> str:
    """A size in the binary units of memory: `26.1 GiB`, `213.4 MiB`, `36 B`."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size >= 0.9995 * UNITS[unit]), "B")
    return f"{size:.0f} B" if unit == "B" else f"{size / UNITS[unit]:,.1f} {unit}"


def world_sizes(text: str) -> Iterator[int]:
    """Numbers of ranks, as `1,2,4,8`, each once.

    Raises:
        UserError: one of them is none.
    """
    for part in dict.fromkeys(part.strip() for part in text.split(",")):
        if not part.isdecimal() or int(part) < 1:
            raise UserError(f"--workers: {part!r} is no number of workers; write some from 1 on, such as 1,2,4,8")
        yield int(part)
