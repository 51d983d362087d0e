"""A plan: each strategy on each number of workers, whether it fits, and which one to take. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.errors import UserError
from tandem.footprint import Footprint
from tandem.formatting import several
from tandem.strategies import micro_batches, pipeline_ranks
from tandem.tasks import Fsdp, Loop, Pipeline, TaskLoop
from tandem_cli import combinations
from tandem_cli.planning import pipeline
from tandem_cli.planning.memory import (
    Batch,
    Memory,
    Strategy,
    batch_of,
    memory,
    of_copies,
    of_layers,
    of_worker,
    shown,
)
from tandem_cli.planning.speed import Speed, StepTime, cost, step_time, steps_of

RESERVE = "2GiB"
"""Of a device's memory, for what no tensor is: the CUDA context and its kernels (some 0.5 GiB), NCCL's buffers, and
gaps between blocks of torch's allocator."""

SHORT = 0.005
"""Seconds: a step starts hundreds of kernels, at some 10 µs each."""


SIMPLEST = (
    Strategy.SINGLE,
    Strategy.DDP,
    Strategy.FSDP,
    Strategy.TENSOR,
    Strategy.PIPELINE,
    Strategy.DP,
    Strategy.MODEL,
    Strategy.HOGWILD,
)
"""The order in which strategies are recommended; what is combined comes after what is not."""
_UNITS = {Strategy.HOGWILD: "rank", Strategy.DP: "device", Strategy.MODEL: "device"}
"""What `--workers` counts, where it is no workers."""


@dataclass(frozen=True)
class Row:
    """One strategy on a number of workers."""

    strategy: Strategy
    workers: int
    """Ranks, each with a device; of one process with several devices the number of these."""
    batch: Batch | None
    """None where no job is planned."""
    memory: Memory
    spare: int
    """Bytes left on the device; negative where it is too small."""
    time: StepTime | None
    """None where operations are not known."""
    cost: float | None
    """Of the whole run; None without a price."""
    tensor: int = 1
    """Ranks that split each matrix."""
    combined: str = ""
    """What is combined with the strategy, as `+fsdp`."""
    is_own: bool = False
    """Whether the job says this strategy and this number of workers."""
    copies: int = 1
    """The data-parallel size: ranks, or groups of them, that share a global batch."""

    @property
    def fits(self) -> bool:
        """Whether the device has room for the peak."""
        return self.spare >= 0

    @property
    def label(self) -> str:
        """As commands name it."""
        return f"{self.strategy.value}{self.combined}"

    @property
    def name(self) -> str:
        """As in a sentence, before its verb."""
        return f"{self.label} on {several(self.workers, _UNITS.get(self.strategy, 'worker'))}{self.said}"

    @property
    def said(self) -> str:
        """Who says so."""
        return ", as the job says," if self.is_own else ""


@dataclass(frozen=True)
class Budget:
    """What there is."""

    device_memory: int
    """Bytes of one device; for a job under `hogwild` those of its worker."""
    reserve: int
    """Bytes of it that tensors do not get."""
    speed: Speed | None
    price_per_hour: float | None = None
    """Of one device."""


@dataclass(frozen=True)
class Plan:
    """The whole answer."""

    rows: tuple[Row, ...]
    steps: int | None
    """Of the whole run."""
    recommendation: str
    notes: tuple[str, ...]
    """What the numbers do not say, in sentences."""


def batches(loop: Loop, worlds: Sequence[int], tensor: int = 1) -> tuple[int, ...]:
    """The different sizes of micro-batches that these numbers of ranks have: what has to be traced.

    Args:
        tensor: ranks that split each matrix, and work on the same samples.
    """
    return tuple(dict.fromkeys(batch_of(loop, world // tensor).micro_batch for world in worlds if world % tensor == 0))


def staged_batches(loop: Loop, worlds: Sequence[int]) -> tuple[int, ...]:
    """The same for the stages of the job's pipeline; none where it has none, or no number of ranks makes one."""
    if loop.strategy != "pipeline":
        return ()
    ranks = pipeline_ranks(loop)
    return tuple(dict.fromkeys(micro_batches(loop, world // ranks)[1] for world in worlds if world % ranks == 0))


def devices(loop: Loop, worlds: Sequence[int]) -> tuple[int, ...]:
    """The numbers of devices in one process for which the step has to be traced."""
    return tuple(world for world in worlds if world > 1) if loop.strategy in ("dp", "model") else ()


def degree_of(loop: Loop) -> int:
    """Ranks that split each matrix."""
    return loop.tensor_parallel if isinstance(loop, TaskLoop) else 1


def planned(
    footprints: Mapping[int, Footprint],
    loop: Loop | None,
    worlds: Sequence[int],
    wanted: int,
    budget: Budget,
    per_worker: int = 1,
    staged: Footprint | None = None,
    spread: Mapping[int, Footprint] | None = None,
) -> Plan:
    """The plan of a job.

    Args:
        footprints: by the number of ranks that split each matrix, from 1 on.
        loop: of the job; None for a model of which only the size is known.
        worlds: numbers of workers, each a rank.
        wanted: the number that the job asks for.
        per_worker: ranks in a worker of the job's.
        staged: with the stages of the job's pipeline, if it has one.
        spread: by the number of devices of one process, if the job uses several.
    """
    footprint = footprints[1]
    steps = None if loop is None else steps_of(loop, footprint.samples)
    rows = [
        _row(strategy, world, tensor, footprints[tensor], loop, steps, budget, per_worker)
        for world in worlds
        for strategy, tensor in _strategies(world, footprints, loop)
    ]
    if loop is not None and staged is not None and staged.stages:
        allowed = (world for world in worlds if world % pipeline_ranks(loop) == 0 and _is_within(loop, per_worker))
        rows += [_pipeline_row(world, footprint, staged, loop, steps, budget, per_worker) for world in allowed]
    if loop is not None:
        known = {number: one for number, one in (spread or {}).items() if not one.untraced}
        rows += [_spread_row(number, one, loop, steps, budget) for number, one in known.items()]
        rows.sort(key=lambda row: row.workers)
    if loop is not None and wanted > 1:
        rows = owned(rows, loop, wanted)
    is_known = bool(footprint.passes)
    notes = _notes(footprint, loop, is_known)
    if loop is not None and loop.strategy == "pipeline":
        notes += _pipeline_notes(loop, staged, per_worker)
    if loop is not None:
        notes += _spread_notes(loop, spread or {})
    if (
        loop is not None
        and loop.strategy == "fsdp"
        and (tensor := degree_of(loop)) > 1
        and not any(row.tensor > 1 for row in rows)
    ):
        notes.append(f"tensorParallel {tensor} needs a multiple of {tensor} ranks, and none is planned for.")
    notes += _row_notes(rows, loop)
    return Plan(tuple(rows), steps, recommendation(rows, wanted, is_known), tuple(notes))


def owned(rows: Sequence[Row], loop: Loop, wanted: int) -> list[Row]:
    """Rows, with the one that a job says marked.

    Args:
        wanted: number of ranks that it asks for.
    """
    own = combinations.own(loop)
    return [replace(row, is_own=row.workers == wanted and row.label == own) for row in rows]


def joined(plans: Mapping[str, Plan], loop: Loop, wanted: int, missing: Sequence[str] = ()) -> Plan:
    """One plan of several strategies, in their order.

    Args:
        plans: of the job under each strategy, by the name of that.
        loop: of the job itself.
        wanted: number of ranks that it asks for.
        missing: why there is no plan of others, in sentences.

    Raises:
        UserError: none of them has a row.
    """
    first = next(iter(plans.values()))
    found = [row for row in first.rows if row.strategy is Strategy.SINGLE]
    for name, one in plans.items():
        found += [row for row in one.rows if row.label == name]
    # Rows that are not shown say nothing.
    of_rows = {note for one in plans.values() for note in _row_notes(one.rows, loop)}
    notes = dict.fromkeys(note for one in plans.values() for note in one.notes if note not in of_rows)
    notes |= dict.fromkeys(missing)
    if not found:
        raise UserError(f"--strategies: there is nothing to plan. {' '.join(notes)}".rstrip())
    found.sort(key=lambda row: row.workers)
    rows = owned(found, loop, wanted) if wanted > 1 else found
    notes |= dict.fromkeys([*_gaps(plans, rows), *_row_notes(rows, loop)])
    is_known = any(row.memory.activations for row in rows)
    return Plan(tuple(rows), first.steps, recommendation(rows, wanted, is_known), tuple(notes))


def _gaps(plans: Mapping[str, Plan], rows: Sequence[Row]) -> Iterator[str]:
    """For each strategy, for which numbers of ranks it has no row though another one has."""
    worlds = sorted({row.workers for row in rows if row.workers > 1})
    if not worlds:
        for name in plans:
            if name in ("ddp", "fsdp", "dp", "model"):
                yield f"{name} has no row: it is for more than one {_UNITS.get(Strategy(name), 'worker')}."
    for name in plans:
        there = {row.workers for row in rows if row.label == name}
        if there and (missing := [str(world) for world in worlds if world not in there]):
            yield f"{name} has no row for {', '.join(missing)} ranks: they make no whole number of its groups."


def _strategies(
    world: int, footprints: Mapping[int, Footprint], loop: Loop | None
) -> Iterator[tuple[Strategy, int]]:  # fmt: skip
    """Each strategy that a world size allows, with its degree of tensor parallelism; the simplest first."""
    if world == 1:
        yield Strategy.SINGLE, 1
        return
    if loop is not None and loop.strategy == "hogwild":
        # Of the others each rank would have a device of its own.
        yield Strategy.HOGWILD, 1
        return
    yield Strategy.DDP, 1
    yield Strategy.FSDP, 1
    for tensor in footprints:
        if tensor > 1 and world % tensor == 0:
            yield Strategy.TENSOR, tensor


def _row(
    strategy: Strategy,
    world: int,
    tensor: int,
    footprint: Footprint,
    loop: Loop | None,
    steps: int | None,
    budget: Budget,
    per_worker: int,
) -> Row:
    copies = world // tensor
    batch = None if loop is None else batch_of(loop, copies)
    traced = next((one for one in footprint.passes if batch is not None and one.samples == batch.micro_batch), None)
    passes = 1 if batch is None else batch.passes
    options = Fsdp() if loop is None or loop.fsdp is None else loop.fsdp
    shards = min(copies, max(1, per_worker // tensor)) if options.shard_within == "Worker" else copies
    if strategy is Strategy.HOGWILD:
        peak = of_worker(world, footprint, traced, passes)
    else:
        precision = "float32" if loop is None else loop.precision
        peak = memory(strategy, shards, footprint, traced, passes, options, precision)
    time = None
    if traced is not None and budget.speed is not None:
        time = step_time(strategy, copies, footprint, traced, passes, budget.speed, tensor)
    price = None
    if time is not None and budget.price_per_hour is not None and steps is not None:
        price = cost(steps, time.step, world, budget.price_per_hour)
    spare = budget.device_memory - budget.reserve - peak.total
    return Row(strategy, world, batch, peak, spare, time, price, tensor, copies=copies)


def _spread_row(number: int, footprint: Footprint, loop: Loop, steps: int | None, budget: Budget) -> Row:
    """Of one process with several devices, which takes the global batch alone."""
    batch = batch_of(loop, 1)
    if loop.strategy == "dp":
        strategy, peak, traced = Strategy.DP, of_copies(footprint, batch.passes), footprint.passes[0]
    else:
        strategy, peak = Strategy.MODEL, of_layers(footprint, batch.passes)
        traced = footprint.portions[0].passes[0]
    copies = number if loop.strategy == "dp" else 1
    time = price = None
    if budget.speed is not None:
        time = step_time(strategy, 1, footprint, traced, batch.passes, budget.speed)
        if budget.price_per_hour is not None and steps is not None:
            price = cost(steps, time.step, number, budget.price_per_hour)
    spare = budget.device_memory - budget.reserve - peak.total
    return Row(strategy, number, batch, peak, spare, time, price, copies=copies)


def _pipeline_row(
    world: int,
    footprint: Footprint,
    staged: Footprint,
    loop: Loop,
    steps: int | None,
    budget: Budget,
    per_worker: int,
) -> Row:
    options, ranks = loop.pipeline or Pipeline(), pipeline_ranks(loop)
    copies = world // ranks
    chunks, samples = micro_batches(loop, copies)
    # Of the optimizer's state only a trace of the whole step knows.
    known = footprint.model_copy(update={"stages": staged.stages})
    sharding = None
    if loop.fsdp is not None and copies > 1:
        shards = min(copies, per_worker // ranks) if loop.fsdp.shard_within == "Worker" else copies
        sharding = pipeline.Sharding(shards, loop.fsdp, loop.precision == "bfloat16")
    peak = pipeline.memory(known, options, chunks, samples, sharding)
    time = price = None
    if budget.speed is not None:
        is_sharded = sharding is not None
        time = pipeline.step_time(known, options, chunks, samples, copies, budget.speed, is_sharded, degree_of(loop))
        if budget.price_per_hour is not None and steps is not None:
            price = cost(steps, time.step, world, budget.price_per_hour)
    spare = budget.device_memory - budget.reserve - peak.total
    combined = combinations.own(loop).removeprefix("pipeline")
    tensor = degree_of(loop)
    batch = Batch(samples, chunks)
    return Row(Strategy.PIPELINE, world, batch, peak, spare, time, price, tensor, combined, copies=copies)


def _is_within(loop: Loop, per_worker: int) -> bool:
    """Whether pipelines lie in workers as the job wants it (tandem.strategies.RULES)."""
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
            f"{pipeline_ranks(loop)} ranks do not divide the {several(per_worker, 'process', 'processes')} of a worker."
        ]
    return []


def _spread_notes(loop: Loop, spread: Mapping[int, Footprint]) -> Iterator[str]:
    for number, one in spread.items():
        if one.untraced:
            yield f"{loop.strategy} on {several(number, 'device')} is not planned, because {one.untraced}."


def recommendation(rows: Sequence[Row], wanted: int, is_known: bool = True) -> str:
    """Which row to take, in a sentence or two.

    Args:
        rows: in any order.
        wanted: the number of workers to take if it is among the rows; otherwise the most.
        is_known: whether activations are.
    """
    rows = sorted(rows, key=lambda row: (row.workers, SIMPLEST.index(row.strategy), row.combined))
    workers = wanted if any(row.workers == wanted for row in rows) else max(row.workers for row in rows)
    here = [row for row in rows if row.workers == workers]
    without = "" if is_known else ", without activations"
    for index, row in enumerate(here):
        if row.fits:
            lacking = [f"{one.name} lacks {shown(-one.spare)}; " for one in here[:index]]
            needless = [f"; {one.label}{one.said} is not needed" for one in here[index + 1 :]]
            return f"{''.join(lacking)}{row.name} fits with {shown(row.spare)} to spare{without}{''.join(needless)}."
    least = min(here, key=lambda row: row.memory.total)
    said = f"{least.name} lacks {shown(-least.spare)}{without}"
    if others := [row for row in rows if row.fits]:
        other = others[0]
        return f"{said}; {other.name} fits with {shown(other.spare)} to spare."
    least = min(rows, key=lambda row: row.memory.total)
    name = least.name.removesuffix(",")
    more = "Take more workers with fsdp, or devices with more memory."
    if any(row.strategy is Strategy.HOGWILD for row in rows):
        more = "Take fewer ranks, or a machine with more memory."
    return f"Nothing fits: {name}, which takes least, lacks {shown(-least.spare)}{without}. {_advice(least, more)}"


def _advice(row: Row, more: str) -> str:
    """What makes a row smaller.

    Args:
        more: the advice where activations are not most of it.
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


def _row_notes(rows: Sequence[Row], loop: Loop | None) -> Iterator[str]:
    """What these rows do not say."""
    most = max(rows, key=lambda row: row.copies, default=None)
    if loop is not None and most is not None and most.copies > loop.global_batch_size:
        there = several(most.workers, _UNITS.get(most.strategy, "worker"))
        if most.copies < most.workers:
            there = f"the {most.copies} data-parallel groups of {most.label} on {there}"
        yield f"globalBatchSize {loop.global_batch_size} is less than {there}: some have nothing to do."
    if any(row.time is not None and row.time.step < SHORT for row in rows):
        least = f"{1e3 * SHORT:.0f} ms"
        yield f"Steps of less than {least} are mostly spent on starting kernels, which is not in the times."


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
    if loop.strategy == "hogwild":
        notes.append("Sizes are those of all ranks of the worker together: the weights once, the rest for each rank.")
    if loop.compile:
        notes.append("The step is traced without loop.compile, which usually needs less.")
    return notes
