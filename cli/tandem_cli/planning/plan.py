"""A plan: each strategy on each number of workers, whether it fits, and the recommended one. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.job.footprint import Footprint
from tandem.job.strategies import micro_batches, pipeline_ranks
from tandem.job.tasks import FsdpSettings, Loop, Pipeline
from tandem_cli import combinations
from tandem_cli.planning import pipeline
from tandem_cli.planning.memory import (
    Memory,
    MicroBatches,
    PlannedStrategy,
    batch_of,
    format_bytes,
    memory,
    worker_memory,
)
from tandem_cli.planning.speed import Speed, StepTime, cost, step_time, steps_of

RESERVE = "2GiB"
"""Memory of a device that tensors do not get: the CUDA context and its kernels (some 0.5 GiB), NCCL's buffers, and gaps
between blocks of torch's allocator."""

SHORT = 0.005
"""Seconds of a step below which starting kernels dominates: a step starts hundreds of them, at some 10 µs each."""


SIMPLEST = (
    PlannedStrategy.SINGLE,
    PlannedStrategy.DDP,
    PlannedStrategy.FSDP,
    PlannedStrategy.TENSOR,
    PlannedStrategy.PIPELINE,
    PlannedStrategy.HOGWILD,
)
"""The order in which strategies are recommended; combinations come after the plain strategy."""
_UNITS = {PlannedStrategy.HOGWILD: "rank"}
"""Unit that `--workers` counts, if not workers."""


@dataclass(frozen=True)
class PlanRow:
    """One strategy on a number of workers."""

    strategy: PlannedStrategy
    workers: int
    """Ranks, each with a device."""
    batch: MicroBatches | None
    """None for a model without a job."""
    memory: Memory
    spare: int
    """Bytes left on the device; negative if it is too small."""
    time: StepTime | None
    """None if the number of operations is unknown."""
    cost: float | None
    """Cost of the whole run; None without a price."""
    tensor: int = 1
    """Ranks that split each matrix."""
    combined: str = ""
    """Strategies combined with this one, such as `+fsdp`."""
    is_own: bool = False
    """Whether the job specifies this strategy and this number of workers."""
    copies: int = 1
    """The data-parallel size: ranks, or groups of ranks, that share a global batch."""

    @property
    def fits(self) -> bool:
        """Whether the device has room for the peak."""
        return self.spare >= 0

    @property
    def label(self) -> str:
        """Name of the strategy on the command line."""
        return f"{self.strategy.value}{self.combined}"

    @property
    def name(self) -> str:
        """Subject of a sentence, before its verb."""
        return f"{self.label} on {count_noun(self.workers, _UNITS.get(self.strategy, 'worker'))}{self.origin}"

    @property
    def origin(self) -> str:
        """Phrase that marks the strategy of the job itself; empty for others."""
        return ", as the job says," if self.is_own else ""


@dataclass(frozen=True)
class PlanBudget:
    """The memory, speed and price that a plan is made for."""

    device_memory: int
    """Bytes of one device; under `hogwild`, of the job's worker."""
    reserve: int
    """Bytes of it that are not available to tensors."""
    speed: Speed | None
    price_per_hour: float | None = None
    """Price of one device."""


@dataclass(frozen=True)
class _Setting:
    """Values that all rows of a plan share."""

    loop: Loop | None
    steps: int | None
    """Steps of the whole run."""
    budget: PlanBudget
    per_worker: int
    """Ranks in a worker of the job."""

    def spare(self, peak: Memory) -> int:
        """Bytes left on a device; negative if it is too small."""
        return self.budget.device_memory - self.budget.reserve - peak.total

    def cost(self, time: StepTime | None, devices: int) -> float | None:
        """Cost of the whole run; None if its time or a price is unknown."""
        if time is None or self.steps is None or self.budget.price_per_hour is None:
            return None
        return cost(self.steps, time.step, devices, self.budget.price_per_hour)


@dataclass(frozen=True)
class Plan:
    """Everything that `tandem plan` prints."""

    rows: tuple[PlanRow, ...]
    steps: int | None
    """Steps of the whole run."""
    recommendation: str
    notes: tuple[str, ...]
    """Limits of the numbers, in sentences."""


def batches(loop: Loop, worlds: Sequence[int], tensor: int = 1) -> tuple[int, ...]:
    """List the different micro-batch sizes that these numbers of ranks have: the ones to trace.

    Args:
        tensor: ranks that split each matrix, and work on the same samples.
    """
    return tuple(dict.fromkeys(batch_of(loop, world // tensor).micro_batch for world in worlds if world % tensor == 0))


def staged_batches(loop: Loop, worlds: Sequence[int]) -> tuple[int, ...]:
    """List the micro-batch sizes of the job's pipeline; none if it has no pipeline, or no number of ranks makes one."""
    if loop.strategy != "pipeline":
        return ()
    ranks = pipeline_ranks(loop)
    return tuple(dict.fromkeys(micro_batches(loop, world // ranks)[1] for world in worlds if world % ranks == 0))


def degree_of(loop: Loop) -> int:
    """Ranks that split each matrix."""
    return loop.tensor_parallel


def planned(
    footprints: Mapping[int, Footprint],
    loop: Loop | None,
    worlds: Sequence[int],
    target: int,
    budget: PlanBudget,
    per_worker: int = 1,
    staged: Footprint | None = None,
) -> Plan:
    """Plan a job.

    Args:
        footprints: by the number of ranks that split each matrix, from 1 on.
        loop: loop of the job; None for a model of which only the size is known.
        worlds: numbers of workers, each a rank.
        target: number of workers that the job specifies.
        per_worker: ranks in a worker of the job.
        staged: footprint with the stages of the job's pipeline, if it has one.
    """
    # The footprint of a rank that holds whole matrices; its samples give the steps of the run.
    footprint = footprints[1]
    steps = None if loop is None else steps_of(loop, footprint.samples)
    setting = _Setting(loop, steps, budget, per_worker)
    rows = [
        _row(strategy, world, tensor, footprints[tensor], setting)
        for world in worlds
        for strategy, tensor in _strategies(world, footprints, loop)
    ]
    # The job's pipeline, on the numbers of ranks that make whole pipelines.
    if loop is not None and staged is not None and staged.stages:
        allowed = (world for world in worlds if world % pipeline_ranks(loop) == 0 and _is_within(loop, per_worker))
        rows += [_pipeline_row(world, footprint, staged, loop, setting) for world in allowed]
    if loop is not None:
        rows.sort(key=lambda row: row.workers)
    if loop is not None and target > 1:
        # Mark the job's own choice, so that the recommendation can refer to it.
        rows = owned(rows, loop, target)
    # Without a traced pass, activations and times are unknown, which the notes say.
    is_known = bool(footprint.passes)
    notes = _notes(footprint, loop, is_known)
    if loop is not None and loop.strategy == "pipeline":
        notes += _pipeline_notes(loop, staged, per_worker)
    if (
        loop is not None
        and loop.strategy == "fsdp"
        and (tensor := degree_of(loop)) > 1
        and not any(row.tensor > 1 for row in rows)
    ):
        notes.append(f"tensorParallel {tensor} needs a multiple of {tensor} ranks, and none is planned for.")
    notes += _row_notes(rows, loop)
    return Plan(tuple(rows), steps, recommendation(rows, target, is_known), tuple(notes))


def owned(rows: Sequence[PlanRow], loop: Loop, target: int) -> list[PlanRow]:
    """Mark the row that the job specifies.

    Args:
        target: number of ranks that it specifies.
    """
    own = combinations.strategy_of(loop)
    return [replace(row, is_own=row.workers == target and row.label == own) for row in rows]


def joined(plans: Mapping[str, Plan], loop: Loop, target: int, missing: Sequence[str] = ()) -> Plan:
    """Join the plans of several strategies, in their order.

    Args:
        plans: plans of the job by strategy name.
        loop: loop of the job itself.
        target: number of ranks that it specifies.
        missing: reasons why other strategies have no plan, in sentences.

    Raises:
        UserError: none of them has a row.
    """
    first = next(iter(plans.values()))
    # One rank alone is the same row under each strategy.
    rows = [row for row in first.rows if row.strategy is PlannedStrategy.SINGLE]
    for name, plan in plans.items():
        rows += [row for row in plan.rows if row.label == name]
    # Notes about rows that are left out are left out, too; those about the joined rows follow below.
    row_notes = {note for plan in plans.values() for note in _row_notes(plan.rows, loop)}
    notes = dict.fromkeys(note for plan in plans.values() for note in plan.notes if note not in row_notes)
    notes |= dict.fromkeys(missing)
    if not rows:
        raise UserError(f"--strategies: there is nothing to plan. {' '.join(notes)}".rstrip())
    rows.sort(key=lambda row: row.workers)
    rows = owned(rows, loop, target) if target > 1 else rows
    notes |= dict.fromkeys([*_gaps(plans, rows), *_row_notes(rows, loop)])
    is_known = any(row.memory.activations for row in rows)
    return Plan(tuple(rows), first.steps, recommendation(rows, target, is_known), tuple(notes))


def _gaps(plans: Mapping[str, Plan], rows: Sequence[PlanRow]) -> Iterator[str]:
    """Note each strategy that has no row for a number of ranks that another strategy has."""
    worlds = sorted({row.workers for row in rows if row.workers > 1})
    if not worlds:
        for name in plans:
            if name in ("ddp", "fsdp"):
                yield f"{name} has no row: it is for more than one {_UNITS.get(PlannedStrategy(name), 'worker')}."
    for name in plans:
        sizes = {row.workers for row in rows if row.label == name}
        if sizes and (missing := [str(world) for world in worlds if world not in sizes]):
            yield f"{name} has no row for {', '.join(missing)} ranks: they make no whole number of its groups."


def _strategies(
    world: int, footprints: Mapping[int, Footprint], loop: Loop | None
) -> Iterator[tuple[PlannedStrategy, int]]:  # fmt: skip
    """Generate the strategies that a world size allows, each with its degree of tensor parallelism, the simplest
    first."""
    if world == 1:
        yield PlannedStrategy.SINGLE, 1
        return
    if loop is not None and loop.strategy == "hogwild":
        # Under the other strategies each rank would have a device of its own.
        yield PlannedStrategy.HOGWILD, 1
        return
    yield PlannedStrategy.DDP, 1
    yield PlannedStrategy.FSDP, 1
    for tensor in footprints:
        if tensor > 1 and world % tensor == 0:
            yield PlannedStrategy.TENSOR, tensor


def _row(strategy: PlannedStrategy, world: int, tensor: int, footprint: Footprint, setting: _Setting) -> PlanRow:
    """Plan one strategy on a world size."""
    loop, speed = setting.loop, setting.budget.speed
    # Ranks that split matrices share samples: they are one data-parallel rank.
    copies = world // tensor
    batch = None if loop is None else batch_of(loop, copies)
    traced = next(
        (pass_ for pass_ in footprint.passes if batch is not None and pass_.samples == batch.micro_batch), None
    )
    passes = 1 if batch is None else batch.passes
    options = FsdpSettings() if loop is None or loop.fsdp is None else loop.fsdp
    # `shardWithin: Worker` keeps copies in each worker, so the state is sharded over its ranks only.
    shards = min(copies, max(1, setting.per_worker // tensor)) if options.shard_within == "Worker" else copies
    if strategy is PlannedStrategy.HOGWILD:
        peak = worker_memory(world, footprint, traced, passes)
    else:
        precision = "float32" if loop is None else loop.precision
        peak = memory(strategy, shards, footprint, traced, passes, options, precision)
    # A time needs the traced operations and the device's speed; a cost, a price and the steps of the run, too.
    time = None
    if traced is not None and speed is not None:
        time = step_time(strategy, copies, footprint, traced, passes, speed, tensor)
    price = setting.cost(time, world)
    return PlanRow(strategy, world, batch, peak, setting.spare(peak), time, price, tensor, copies=copies)


def _pipeline_row(world: int, footprint: Footprint, staged: Footprint, loop: Loop, setting: _Setting) -> PlanRow:
    """Plan the job's pipeline on a world size."""
    options, ranks, speed = loop.pipeline or Pipeline(), pipeline_ranks(loop), setting.budget.speed
    copies = world // ranks
    chunks, samples = micro_batches(loop, copies)
    # Only the trace of the whole step has the optimizer's state; only the other one has the stages.
    with_stages = footprint.model_copy(update={"stages": staged.stages})
    sharding = None
    if loop.fsdp is not None and copies > 1:
        shards = min(copies, setting.per_worker // ranks) if loop.fsdp.shard_within == "Worker" else copies
        sharding = pipeline.Sharding(shards, loop.fsdp, loop.precision == "bfloat16")
    peak = pipeline.memory(with_stages, options, chunks, samples, sharding)
    time, tensor = None, degree_of(loop)
    if speed is not None:
        is_sharded = sharding is not None
        time = pipeline.step_time(with_stages, options, chunks, samples, copies, speed, is_sharded, tensor)
    price = setting.cost(time, world)
    combined = combinations.strategy_of(loop).removeprefix("pipeline")
    batch = MicroBatches(samples, chunks)
    strategy, spare = PlannedStrategy.PIPELINE, setting.spare(peak)
    return PlanRow(strategy, world, batch, peak, spare, time, price, tensor, combined, copies=copies)


def _is_within(loop: Loop, per_worker: int) -> bool:
    """Whether pipelines lie within workers as the job requires (tandem.job.strategies.RULES)."""
    is_free = loop.fsdp is None or loop.fsdp.shard_within != "Worker"
    return is_free or per_worker % pipeline_ranks(loop) == 0


def _pipeline_notes(loop: Loop, staged: Footprint | None, per_worker: int) -> list[str]:
    if staged is None:
        stages, ranks = (loop.pipeline or Pipeline()).stages, pipeline_ranks(loop)
        of_each = f" with tensorParallel {degree_of(loop)}" if degree_of(loop) > 1 else ""
        return [f"A pipeline of {stages} stages{of_each} needs a multiple of {ranks} ranks, and none is planned for."]
    if not staged.stages:
        return [f"The pipeline is not planned, because {staged.untraced}."]
    if not _is_within(loop, per_worker):
        return [
            f"The pipeline is not planned, because with fsdp.shardWithin: Worker each stays within a worker, and its "
            f"{pipeline_ranks(loop)} ranks do not divide the {count_noun(per_worker, 'process', 'processes')} of a "
            f"worker."
        ]
    return []


def recommendation(rows: Sequence[PlanRow], target: int, is_known: bool = True) -> str:
    """Recommend a row, in a sentence or two.

    Args:
        rows: in any order.
        target: number of workers to recommend a strategy for if the rows have it; otherwise the largest.
        is_known: whether activations are known.
    """
    rows = sorted(rows, key=lambda row: (row.workers, SIMPLEST.index(row.strategy), row.combined))
    workers = target if any(row.workers == target for row in rows) else max(row.workers for row in rows)
    candidates = [row for row in rows if row.workers == workers]
    without = "" if is_known else ", without activations"
    for index, row in enumerate(candidates):
        if row.fits:
            # Rows are in order of simplicity: the first that fits is recommended, and the later ones are not needed.
            too_large = [f"{other.name} lacks {format_bytes(-other.spare)}; " for other in candidates[:index]]
            needless = [f"; {other.label}{other.origin} is not needed" for other in candidates[index + 1 :]]
            fits = f"{row.name} fits with {format_bytes(row.spare)} to spare{without}"
            return f"{''.join(too_large)}{fits}{''.join(needless)}."
    # No strategy fits this number of workers: name the smallest need, and another number that fits.
    smallest = min(candidates, key=lambda row: row.memory.total)
    if other := next((row for row in rows if row.fits), None):
        need = f"{smallest.name} lacks {format_bytes(-smallest.spare)}{without}"
        return f"{need}; {other.name} fits with {format_bytes(other.spare)} to spare."
    smallest = min(rows, key=lambda row: row.memory.total)
    name = smallest.name.removesuffix(",")
    more = "Take more workers with fsdp, or devices with more memory."
    if any(row.strategy is PlannedStrategy.HOGWILD for row in rows):
        more = "Take fewer ranks, or a machine with more memory."
    lacks = format_bytes(-smallest.spare)
    return f"Nothing fits: {name}, which takes least, lacks {lacks}{without}. {_advice(smallest, more)}"


def _advice(row: PlanRow, more: str) -> str:
    """Advise how to make a row smaller.

    Args:
        more: advice if activations are at most half of it.
    """
    peak = row.memory
    if peak.activations <= peak.total / 2 or row.batch is None:
        return more
    if row.batch.micro_batch > 1:
        return (
            f"Activations are most of it: set loop.microBatchSize below {row.batch.micro_batch}, or "
            "loop.activationCheckpointing, or loop.precision bfloat16."
        )
    return "Activations of one sample are most of it: set loop.activationCheckpointing, or loop.precision bfloat16."


def _row_notes(rows: Sequence[PlanRow], loop: Loop | None) -> Iterator[str]:
    """Note the limits of these rows."""
    widest = max(rows, key=lambda row: row.copies, default=None)
    if loop is not None and widest is not None and widest.copies > loop.global_batch_size:
        members = count_noun(widest.workers, _UNITS.get(widest.strategy, "worker"))
        if widest.copies < widest.workers:
            members = f"the {widest.copies} data-parallel groups of {widest.label} on {members}"
        yield f"globalBatchSize {loop.global_batch_size} is less than {members}: some have nothing to do."
    if any(row.time is not None and row.time.step < SHORT for row in rows):
        limit = f"{1e3 * SHORT:.0f} ms"
        yield f"Steps of less than {limit} are mostly spent on starting kernels, which is not in the times."


def _notes(footprint: Footprint, loop: Loop | None, is_known: bool) -> list[str]:
    notes = []
    if loop is None:
        notes.append(
            "State in float32 with Adam. Activations and the blocks that fsdp gathers are not counted: they depend on "
            "the model and the batch, which a job says."
        )
        return notes
    if not is_known:
        notes.append(
            f"Activations are not counted and times are not known, because {footprint.untraced}. What is counted "
            "follows from the sizes of the parameters."
        )
    if loop.strategy in ("dp", "model"):
        notes.append(f"{loop.strategy} is not planned: one process would have several devices.")
    if loop.strategy == "hogwild":
        notes.append("Sizes are those of all ranks of the worker together: the weights once, the rest for each rank.")
    if loop.compile:
        notes.append("The step is traced without loop.compile, which usually needs less.")
    return notes
