"""The memory and the time of the ranks of a pipeline. Pure.

A rank holds the state of its stages. Of each micro-batch that has passed a stage forward and not yet backward it keeps
the activations, so the order of passes decides how many it keeps: all of them with GPipe, at most one more than ranks
follow with 1F1B (https://arxiv.org/abs/2006.09503), and some more where each rank has several stages. With `fsdp` N
pipelines split the state of a stage: a rank holds 1/N of it, and what is gathered of its parts.

    step    operations of the slowest rank / (peak of the device × utilization) / (1 - bubble)
            + what does not hide behind it of activations and their gradients between stages, and, with `fsdp`, of
              weights and gradients of each micro-batch, as for `fsdp` alone
            + gradients between pipelines, and of weights that stages share, which are added up once all is computed
            + with tensorParallel, what the ranks of a stage add up of activations
    bubble  (S - 1) / (v M + S - 1) for S ranks, M micro-batches and v stages on each rank; with zeroBubble, where
            gradients of weights fill the time, a third of the waiting is left (https://arxiv.org/abs/2401.10241)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.footprint import Footprint, Held, Stage, StagePass
from tandem.tasks import Fsdp, Pipeline
from tandem_cli.planning.memory import Memory, gathered
from tandem_cli.planning.speed import Speed, StepTime


class Step(NamedTuple):
    """A pass of one micro-batch through a stage of a rank."""

    is_forward: bool
    stage: int
    """Among those of the rank, from 0."""


def order(options: Pipeline, place: int, chunks: int, per_rank: int) -> Iterator[Step]:
    """The passes of a rank, in the order of torch.distributed.pipelining.

    Args:
        place: of the rank in the pipeline, from 0.
        chunks: micro-batches of a step.
        per_rank: stages on each rank.
    """
    ranks, count = options.stages, per_rank * chunks
    after = ranks - 1 - place
    together = chunks // max(1, chunks // ranks)
    if options.schedule == "gpipe":
        ahead = count
    elif options.schedule == "1f1b":
        ahead = min(after, chunks)
    else:
        factor = 1 if options.schedule == "zeroBubble" else 2
        ahead = min((per_rank - 1) * together + factor * after, count)
    for number in range(count + ahead):
        if number < count:
            yield Step(True, number // together % per_rank)
        if number >= ahead:
            yield Step(False, per_rank - 1 - (number - ahead) // together % per_rank)


class Moment(NamedTuple):
    """What a rank holds beyond its state when it holds most, in bytes."""

    activations: int
    """Without casts."""
    casts: int
    """Copies of parameters in a lower precision, of each micro-batch that is under way."""
    gradients: int


def held(
    options: Pipeline,
    place: int,
    chunks: int,
    stages: Sequence[Stage],
    samples: int,
    parts: int = 1,
    is_half: bool = False,
) -> Moment:
    """What a rank holds of activations and of gradients when it holds most of both.

    Gradients of a stage exist from its first backward pass on. With `zeroBubble`, gradients between layers stay until
    those of weights are computed from them, which is later by as many passes as ranks come before.

    Args:
        stages: of the rank.
        samples: of a micro-batch.
        parts: ranks that hold a part each of the gradients.
        is_half: whether weights are gathered in the precision of the computation, so that no copies of them are made.
    """
    whole = _alive(options, place, chunks, [_held(one, samples, is_half) for one in stages])
    uncast = _alive(options, place, chunks, [_held(one, samples, True) for one in stages])
    begun: set[int] = set()
    gradients = [-(-one.gradients // parts) for one in stages]
    most = Moment(0, 0, sum(gradients))
    for step, now, without in zip(order(options, place, chunks, len(stages)), whole, uncast, strict=True):
        least = min(now, without)
        most = max(most, Moment(least, now - least, sum(gradients[number] for number in begun)), key=sum)
        if not step.is_forward:
            begun.add(step.stage)
    return most


def _alive(options: Pipeline, place: int, chunks: int, passes: Sequence[Held]) -> Iterator[int]:
    """Bytes of activations at the most, during each pass of a rank.

    Args:
        passes: what a micro-batch takes in each of its stages.
    """
    is_later = options.schedule == "zeroBubble"
    late = 2 * place * max(one.kept for one in passes) if is_later else 0
    alive = 0
    for step in order(options, place, chunks, len(passes)):
        one = passes[step.stage]
        alive -= 0 if step.is_forward else one.kept
        yield alive + (one.forward if step.is_forward else one.peak + (late + one.kept if is_later else 0))
        alive += one.kept if step.is_forward else 0


class Sharding(NamedTuple):
    """How pipelines split the state of a stage."""

    ranks: int
    """That hold a part each."""
    options: Fsdp
    is_half: bool = False
    """Whether parts are gathered in two bytes for each number."""


def memory(
    footprint: Footprint, options: Pipeline, chunks: int, samples: int, sharding: Sharding | None = None
) -> Memory:  # fmt: skip
    """The peak of the rank that has most.

    Args:
        footprint: with its stages.
        chunks: micro-batches of a step.
        samples: of the largest micro-batch.
        sharding: None: each rank holds the whole state of its stages.
    """
    peaks = (_rank(footprint, options, place, chunks, samples, sharding) for place in range(options.stages))
    return max(peaks, key=_total)


def _total(peak: Memory) -> int:
    return peak.total


def _rank(
    footprint: Footprint, options: Pipeline, place: int, chunks: int, samples: int, sharding: Sharding | None
) -> Memory:  # fmt: skip
    stages = _stages(footprint, options, place)
    parts = 1 if sharding is None else sharding.ranks
    parameters = sum(one.parameters for one in stages)
    learning = sum(one.gradients for one in stages)
    is_half = sharding is not None and sharding.is_half
    most = held(options, place, chunks, stages, samples, parts, is_half)
    outside = footprint.buffers - sum(one.buffers for one in footprint.stages) if place == 0 else 0
    buffers = sum(one.buffers for one in stages) + max(0, outside)
    share = learning / footprint.gradients if footprint.gradients else 0.0
    averaged = (parameters + buffers) / max(1, footprint.parameters + footprint.buffers)
    return Memory(
        parameters=-(-parameters // parts),
        gradients=most.gradients,
        optimizer=round(footprint.optimizer * share / parts),
        activations=most.activations,
        casts=most.casts,
        gathered=0 if sharding is None else _gathered(stages, sharding),
        buffers=buffers + round(footprint.average * averaged / parts),
        data=footprint.data,
    )


def _gathered(stages: Sequence[Stage], sharding: Sharding) -> int:
    """Bytes that are whole on a rank: of its stages as `fsdp` gathers them, part by part (planning.memory)."""
    whole = Footprint(
        parameters=sum(one.parameters for one in stages),
        parameter_count=0,
        gradients=sum(one.gradients for one in stages),
        optimizer=0,
        buffers=0,
        samples=0,
        blocks=tuple(size for one in stages for size in one.parts),
        block_gradients=tuple(size for one in stages for size in one.part_gradients),
    )
    return max(gathered(whole, sharding.options, sharding.is_half))


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
    """The time of an optimizer step; arguments are those of `memory`.

    Args:
        copies: pipelines that share the global batch.
        is_sharded: whether they split the state of a stage.
        tensor: ranks that split each matrix.
    """
    ranks = [_stages(footprint, options, place) for place in range(options.stages)]
    per_rank = len(ranks[0])
    slowest = max(sum(_pass(one, samples).flops for one in stages) for stages in ranks) * chunks
    compute = slowest / (speed.flops * speed.utilization)
    waiting = (options.stages - 1) / (per_rank * chunks)
    if options.schedule == "zeroBubble":
        waiting /= 3
    sent = max(2 * chunks * sum(_pass(one, samples).sent for one in stages) for stages in ranks) / speed.bandwidth
    gradients = max(sum(one.gradients for one in stages) for stages in ranks)
    parameters = max(sum(one.parameters for one in stages) for stages in ranks)
    # Of a footprint of one of several ranks that split matrices the sum is smaller.
    shared = max(0, sum(one.gradients for stages in ranks for one in stages) - footprint.gradients)
    share = (copies - 1) / copies
    if is_sharded:
        sent += share * (2 * parameters + gradients) * chunks / speed.bandwidth
    added_up = ((0 if is_sharded else 2 * share * gradients) + shared) / speed.bandwidth
    split = max(sum(_pass(one, samples).added_up for one in stages) for stages in ranks) * chunks
    added_up += 2 * (tensor - 1) / tensor * split / speed.bandwidth
    step = compute * (1 + waiting) + max(0.0, sent - compute) + added_up
    return StepTime(compute, sent + added_up, step)


def _stages(footprint: Footprint, options: Pipeline, place: int) -> tuple[Stage, ...]:
    return footprint.stages[place :: options.stages]


def _held(stage: Stage, samples: int, is_half: bool) -> Held:
    found = _pass(stage, samples)
    return found.uncast if is_half and found.uncast is not None else found


def _pass(stage: Stage, samples: int) -> StagePass:
    return next(one for one in stage.passes if one.samples == samples)
