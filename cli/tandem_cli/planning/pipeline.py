"""The memory and the time of the ranks of a pipeline. Pure.

A rank holds the state of its stages. Of each micro-batch that has passed a stage forward and not yet backward it keeps
the activations, so the order of passes decides how many it keeps: all of them with GPipe, at most as many as ranks
follow with 1F1B (https://arxiv.org/abs/2006.09503), and some more where each rank has several stages.

    step    operations of the slowest rank / (peak of the device × utilization) / (1 - bubble)
            + what does not hide behind it of activations and their gradients between stages
            + gradients between pipelines, and of weights that stages share, which are added up once all is computed
    bubble  (S - 1) / (v M + S - 1) for S ranks, M micro-batches and v stages on each rank; with zeroBubble, where
            gradients of weights fill the time, a third of the waiting is left (https://arxiv.org/abs/2401.10241)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.footprint import Footprint, Stage, StagePass
from tandem.tasks import Pipeline
from tandem_cli.planning.memory import Memory
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


def held(options: Pipeline, place: int, chunks: int, stages: Sequence[Stage], samples: int) -> tuple[int, int]:
    """Bytes of activations and of gradients that a rank holds when it holds most of both.

    Gradients of a stage exist from its first backward pass on. With `zeroBubble`, gradients between layers stay until
    those of weights are computed from them, which is later by as many passes as ranks come before.

    Args:
        stages: of the rank.
        samples: of a micro-batch.
    """
    passes = [_pass(one, samples) for one in stages]
    is_later = options.schedule == "zeroBubble"
    late = 2 * place * max(one.kept for one in passes) if is_later else 0
    alive = 0
    begun: set[int] = set()
    most = 0, sum(one.gradients for one in stages)
    for step in order(options, place, chunks, len(passes)):
        one = passes[step.stage]
        alive -= 0 if step.is_forward else one.kept
        now = alive + (one.forward if step.is_forward else one.peak + (late + one.kept if is_later else 0))
        most = max(most, (now, sum(stages[number].gradients for number in begun)), key=sum)
        if step.is_forward:
            alive += one.kept
        else:
            begun.add(step.stage)
    return most


def memory(footprint: Footprint, options: Pipeline, chunks: int, samples: int) -> Memory:
    """The peak of the rank that has most.

    Args:
        footprint: with its stages.
        chunks: micro-batches of a step.
        samples: of the largest micro-batch.
    """
    return max((_rank(footprint, options, place, chunks, samples) for place in range(options.stages)), key=_total)


def _total(peak: Memory) -> int:
    return peak.total


def _rank(footprint: Footprint, options: Pipeline, place: int, chunks: int, samples: int) -> Memory:
    stages = _stages(footprint, options, place)
    parameters = sum(one.parameters for one in stages)
    learning = sum(one.gradients for one in stages)
    activations, gradients = held(options, place, chunks, stages, samples)
    outside = footprint.buffers - sum(one.buffers for one in footprint.stages) if place == 0 else 0
    buffers = sum(one.buffers for one in stages) + max(0, outside)
    share = learning / footprint.gradients if footprint.gradients else 0.0
    averaged = (parameters + buffers) / max(1, footprint.parameters + footprint.buffers)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=round(footprint.optimizer * share),
        activations=activations,
        casts=0,
        gathered=0,
        buffers=buffers + round(footprint.average * averaged),
        data=footprint.data,
    )


def step_time(
    footprint: Footprint, options: Pipeline, chunks: int, samples: int, copies: int, speed: Speed
) -> StepTime:  # fmt: skip
    """The time of an optimizer step; arguments are those of `memory`.

    Args:
        copies: pipelines that share the global batch.
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
    shared = max(0, sum(one.gradients for stages in ranks for one in stages) - footprint.gradients)
    added_up = (2 * (copies - 1) / copies * gradients + shared) / speed.bandwidth
    step = compute * (1 + waiting) + max(0.0, sent - compute) + added_up
    return StepTime(compute, sent + added_up, step)


def _stages(footprint: Footprint, options: Pipeline, place: int) -> tuple[Stage, ...]:
    return footprint.stages[place :: options.stages]


def _pass(stage: Stage, samples: int) -> StagePass:
    return next(one for one in stage.passes if one.samples == samples)
