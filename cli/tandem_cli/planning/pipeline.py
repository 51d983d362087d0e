"""The memory and the step time of the ranks of a pipeline. Pure.

A rank holds the state of its stages. It keeps the activations of each micro-batch that has passed a stage forward and
not yet backward, so the order of passes decides how many it keeps: all of them with GPipe, at most one more than the
number of ranks after it with 1F1B (https://arxiv.org/abs/2006.09503), and some more with several stages on each rank.
With `fsdp`, N pipelines shard the state of a stage: a rank holds 1/N of it, and the parts that are gathered.

    step    operations of the slowest rank / (peak of the device × utilization) / (1 - bubble)
            + the part that is not overlapped of sending activations and their gradients between stages, and, with
              `fsdp`, of gathering weights and reducing gradients for each micro-batch, as for `fsdp` alone
            + the reduction of gradients between pipelines, and of weights that stages share, after the computation
            + with tensorParallel, the reduction of activations among the ranks of a stage
    bubble  (S - 1) / (v M + S - 1) for S ranks, M micro-batches and v stages on each rank; zeroBubble, which computes
            gradients of weights meanwhile, leaves a third of the waiting (https://arxiv.org/abs/2401.10241)
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from tandem.job.footprint import Footprint, StageFootprint, StageMemory, StagePass
from tandem.job.tasks import FsdpSettings, Pipeline
from tandem_cli.planning.memory import Memory, unsharded_bytes
from tandem_cli.planning.speed import Speed, StepTime


class PipelinePass(NamedTuple):
    """Pass of one micro-batch through a stage of a rank."""

    is_forward: bool
    stage: int
    """Index among the stages of the rank, from 0."""


def order(options: Pipeline, place: int, chunks: int, per_rank: int) -> Iterator[PipelinePass]:
    """Generate the passes of a rank, in the order of torch.distributed.pipelining.

    Args:
        place: position of the rank in the pipeline, from 0.
        chunks: micro-batches of a step.
        per_rank: stages on each rank.
    """
    ranks, count = options.stages, per_rank * chunks
    after = ranks - 1 - place
    together = chunks // max(1, chunks // ranks)
    # Forward passes ahead of the first backward pass: all of them with GPipe, else as many as keep the later ranks
    # busy.
    if options.schedule == "gpipe":
        ahead = count
    elif options.schedule == "1f1b":
        ahead = min(after, chunks)
    else:
        factor = 1 if options.schedule == "zeroBubble" else 2
        ahead = min((per_rank - 1) * together + factor * after, count)
    for number in range(count + ahead):
        if number < count:
            yield PipelinePass(True, number // together % per_rank)
        if number >= ahead:
            yield PipelinePass(False, per_rank - 1 - (number - ahead) // together % per_rank)


class PeakMemory(NamedTuple):
    """Memory of a rank beyond its state at its peak, in bytes."""

    activations: int
    """Activations without casts."""
    casts: int
    """Copies of parameters in a lower precision, for each micro-batch in flight."""
    gradients: int


def peak_moment(
    options: Pipeline,
    place: int,
    chunks: int,
    stages: Sequence[StageFootprint],
    samples: int,
    parts: int = 1,
    is_half: bool = False,
) -> PeakMemory:
    """Compute the activations and gradients of a rank when their sum is largest.

    Gradients of a stage exist from its first backward pass on. With `zeroBubble`, gradients between layers stay until
    the gradients of weights are computed from them, later by as many passes as ranks come before.

    Args:
        stages: stages of the rank.
        samples: samples of a micro-batch.
        parts: ranks that shard the gradients.
        is_half: whether weights are gathered in the precision of the computation, so that no copies of them are made.
    """
    # Two runs over the same passes: the difference between them is what casts take.
    with_casts = _live_bytes(options, place, chunks, [_stage_memory(stage, samples, is_half) for stage in stages])
    without_casts = _live_bytes(options, place, chunks, [_stage_memory(stage, samples, True) for stage in stages])
    has_gradients: set[int] = set()
    gradients = [-(-stage.gradients // parts) for stage in stages]
    # The optimizer's step needs all gradients, when no activations are left.
    peak = PeakMemory(0, 0, sum(gradients))
    for step, live, uncast in zip(order(options, place, chunks, len(stages)), with_casts, without_casts, strict=True):
        activations = min(live, uncast)
        moment = PeakMemory(activations, live - activations, sum(gradients[index] for index in has_gradients))
        peak = max(peak, moment, key=sum)
        if not step.is_forward:
            has_gradients.add(step.stage)
    return peak


def _live_bytes(options: Pipeline, place: int, chunks: int, passes: Sequence[StageMemory]) -> Iterator[int]:
    """Generate the largest number of live bytes of activations during each pass of a rank.

    Args:
        passes: memory of a micro-batch in each of its stages.
    """
    # Zero bubble delays the gradients of weights: inputs and output gradients of the delayed passes stay.
    is_delayed = options.schedule == "zeroBubble"
    late = 2 * place * max(stage.kept for stage in passes) if is_delayed else 0
    live = 0
    for step in order(options, place, chunks, len(passes)):
        stage = passes[step.stage]
        # A backward pass frees what the forward pass of the same micro-batch has kept.
        live -= 0 if step.is_forward else stage.kept
        yield live + (stage.forward if step.is_forward else stage.peak + (late + stage.kept if is_delayed else 0))
        live += stage.kept if step.is_forward else 0


class Sharding(NamedTuple):
    """Sharding of a stage's state over pipelines."""

    ranks: int
    """Ranks that hold a shard each."""
    options: FsdpSettings
    is_half: bool = False
    """Whether shards are gathered in two bytes an element."""


def memory(
    footprint: Footprint, options: Pipeline, chunks: int, samples: int, sharding: Sharding | None = None
) -> Memory:  # fmt: skip
    """Compute the peak of the rank that has most.

    Args:
        footprint: footprint with its stages.
        chunks: micro-batches of a step.
        samples: samples of the largest micro-batch.
        sharding: None if each rank holds the whole state of its stages.
    """
    peaks = (_rank(footprint, options, place, chunks, samples, sharding) for place in range(options.stages))
    return max(peaks, key=attrgetter("total"))


def _rank(
    footprint: Footprint, options: Pipeline, place: int, chunks: int, samples: int, sharding: Sharding | None
) -> Memory:  # fmt: skip
    stages = _stages(footprint, options, place)
    parts = 1 if sharding is None else sharding.ranks
    parameters = sum(stage.parameters for stage in stages)
    learning = sum(stage.gradients for stage in stages)
    is_half = sharding is not None and sharding.is_half
    peak = peak_moment(options, place, chunks, stages, samples, parts, is_half)
    # Buffers that belong to no stage count for the first rank.
    outside = footprint.buffers - sum(stage.buffers for stage in footprint.stages) if place == 0 else 0
    buffers = sum(stage.buffers for stage in stages) + max(0, outside)
    # The optimizer's state and the average are known of the whole model: a rank has its share of the gradients, or of
    # the parameters and buffers.
    share = learning / footprint.gradients if footprint.gradients else 0.0
    averaged = (parameters + buffers) / max(1, footprint.parameters + footprint.buffers)
    return Memory(
        parameters=-(-parameters // parts),
        gradients=peak.gradients,
        optimizer=round(footprint.optimizer * share / parts),
        activations=peak.activations,
        casts=peak.casts,
        gathered=0 if sharding is None else _gathered(stages, sharding),
        buffers=buffers + round(footprint.average * averaged / parts),
        data=footprint.data,
    )


def _gathered(stages: Sequence[StageFootprint], sharding: Sharding) -> int:
    """Compute the unsharded bytes of a rank: `fsdp` gathers its stages part by part (planning.memory)."""
    rank = Footprint(
        parameters=sum(stage.parameters for stage in stages),
        parameter_count=0,
        gradients=sum(stage.gradients for stage in stages),
        optimizer=0,
        buffers=0,
        samples=0,
        blocks=tuple(size for stage in stages for size in stage.parts),
        block_gradients=tuple(size for stage in stages for size in stage.part_gradients),
    )
    return max(unsharded_bytes(rank, sharding.options, sharding.is_half))


def step_time(
    footprint: Footprint,
    options: Pipeline,
    chunks: int,
    samples: int,
    copies: int,
    speed: Speed,
    is_sharded: bool = False,
    tensor: int = 1,
) -> StepTime:
    """Compute the time of an optimizer step; arguments are those of `memory`.

    Args:
        copies: pipelines that share the global batch.
        is_sharded: whether they shard the state of a stage.
        tensor: ranks that split each matrix.
    """
    ranks = [_stages(footprint, options, place) for place in range(options.stages)]
    per_rank = len(ranks[0])
    slowest = max(sum(_pass(part, samples).flops for part in stages) for stages in ranks) * chunks
    compute = slowest / (speed.flops * speed.utilization)
    # The bubble, as a share of the computation instead of the whole step.
    waiting = (options.stages - 1) / (per_rank * chunks)
    if options.schedule == "zeroBubble":
        waiting /= 3
    # Each boundary sends activations forward and their gradients backward.
    sent = max(2 * chunks * sum(_pass(part, samples).sent for part in stages) for stages in ranks) / speed.bandwidth
    gradients = max(sum(part.gradients for part in stages) for stages in ranks)
    parameters = max(sum(part.parameters for part in stages) for stages in ranks)
    # Stages that share a weight both count its gradients. With tensor parallelism the footprint is one rank's, and the
    # difference may be negative.
    shared = max(0, sum(part.gradients for stages in ranks for part in stages) - footprint.gradients)
    share = (copies - 1) / copies
    if is_sharded:
        sent += share * (2 * parameters + gradients) * chunks / speed.bandwidth
    # Without sharding, an all-reduce of the gradients over the pipelines.
    reduced = ((0 if is_sharded else 2 * share * gradients) + shared) / speed.bandwidth
    split = max(sum(_pass(part, samples).added_up for part in stages) for stages in ranks) * chunks
    reduced += 2 * (tensor - 1) / tensor * split / speed.bandwidth
    step = compute * (1 + waiting) + max(0.0, sent - compute) + reduced
    return StepTime(compute, sent + reduced, step)


def _stages(footprint: Footprint, options: Pipeline, place: int) -> tuple[StageFootprint, ...]:
    return footprint.stages[place :: options.stages]


def _stage_memory(stage: StageFootprint, samples: int, is_half: bool) -> StageMemory:
    traced = _pass(stage, samples)
    return traced.uncast if is_half and traced.uncast is not None else traced


def _pass(stage: StageFootprint, samples: int) -> StagePass:
    return next(traced for traced in stage.passes if traced.samples == samples)
