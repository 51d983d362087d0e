"""`tandem plan FILE`: which strategy fits on which devices, before one is booked."""

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from tandem.errors import UnmetRequirement, UserError, join_names
from tandem.formatting import count_noun, duration, number, one_line
from tandem.job.footprint import Footprint, FootprintRequest, FootprintResponse
from tandem.job.manifest.reading import parse_job, raise_for_unmet, read_source
from tandem.job.manifest.source import Source
from tandem.job.resource import DistributedTrainingJob, Workers
from tandem.job.trainer import Trainer
from tandem.processes.distribution import install_command
from tandem.processes.launch import module_command
from tandem_cli.combinations import choose, first_error, parse_names
from tandem_cli.output import Output, OutputOption, OverridesOption, echo, emit
from tandem_cli.planning.memory import bytes_of, format_bytes, state_of, world_sizes
from tandem_cli.planning.plan import (
    RESERVE,
    Plan,
    PlanBudget,
    PlanRow,
    batches,
    degree_of,
    joined,
    planned,
    staged_batches,
)
from tandem_cli.planning.speed import DEFAULT_DEVICE, DEVICES, UTILIZATION, Speed
from tandem_launcher.terminal.canvas import PrintableConsole

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "casts", "gathered", "other")


def plan(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The job's manifest; - reads standard input.")
    ] = None,
    overrides: OverridesOption = None,
    parameters: Annotated[
        float | None, typer.Option(help="Without a job: the state of a model with this many parameters, such as 7e9.")
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Strategies to plan for, as ddp,fsdp,pipeline+fsdp.", show_default="ddp, fsdp and that of the job"
        ),
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers to plan for, each with a device.")] = "1,2,4,8",
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Device whose data sheet is used for what you leave out: {', '.join(DEVICES)}.",
            show_default=DEFAULT_DEVICE,
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a device: 80GB, 79.6GiB.", show_default="the device's")
    ] = None,
    reserve: Annotated[
        str, typer.Option(metavar="SIZE", help="Part of that memory that tensors cannot use: CUDA context, NCCL, gaps.")
    ] = RESERVE,
    peak_flops: Annotated[
        float | None, typer.Option(help="Operations a second of a device, such as 989e12.", show_default="the device's")
    ] = None,
    utilization: Annotated[float, typer.Option(help="Share of that peak which training reaches.")] = UTILIZATION,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Between two devices, a second: 450GB.", show_default="the device's"),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="Price of a device, for an estimate of costs.", show_default="the job's prices.gpuPerHour"),
    ] = None,
    output: OutputOption = Output.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Estimate which strategy fits: memory of a device, time of a step and costs, for each number of workers.

    Traces a training step of the job's task without its weights, so a model of any size is planned on any machine.
    """
    worlds = sorted(world_sizes(workers))
    sheet = DEVICES.get((device or DEFAULT_DEVICE).lower())
    if sheet is None:
        raise UserError(f"--device: {device} is unknown; choose one of {', '.join(DEVICES)}, or give --device-memory")
    memory = sheet.memory if device_memory is None else bytes_of(device_memory, "--device-memory")
    reserved = bytes_of(reserve, "--reserve")
    speed_of_links = sheet.bandwidth if bandwidth is None else float(bytes_of(bandwidth, "--bandwidth"))
    if not 0 < utilization <= 1:
        raise UserError(f"--utilization: {utilization} is out of range; give a number above 0 and at most 1")
    if parameters is not None and 0 < parameters < 1:
        raise UserError(f"--parameters: {parameters:g} is less than one parameter")
    for name, value in (("peak-flops", peak_flops), ("price-per-hour", price_per_hour), ("parameters", parameters)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name}: give a number above 0, not {value:g}")
    if (file is None) == (parameters is None):
        raise UserError("tandem plan needs either a job's manifest, or --parameters with the size of a model")
    if parameters is not None:
        if strategies is not None:
            raise UserError(
                "--strategies: for a model of which only the size is known, ddp and fsdp are planned; omit it"
            )
        footprint, job = state_of(round(parameters)), None
        budget = PlanBudget(memory, reserved, None, price_per_hour)
        source_of_values = sheet_values(device, device_memory, peak_flops, bandwidth, needs_speed=False)
        result = planned({1: footprint}, None, worlds, worlds[-1], budget)
    else:
        assert file is not None
        source = read_source(file)
        job = parse_job(source, overrides or ())
        _refuse_script(job, source, overrides or ())
        loop, group = job.spec.trainer.settings_of_loop, job.spec.workers
        names = [] if strategies is None else list(parse_names(strategies, loop))
        if several := [name for name in names if name in ("dp", "model")]:
            raise UserError(f"--strategies: {several[0]} is not planned: one process would have several devices")
        if names and names != [loop.strategy] and "hogwild" in (loop.strategy, *names):
            raise UserError(
                "--strategies: hogwild is planned alone, for a job that uses it, because it needs no device; for "
                "other strategies, set another one in the job"
            )
        speed: Speed | None = Speed(peak_flops or sheet.peak(loop.precision), utilization, speed_of_links)
        source_of_values = sheet_values(device, device_memory, peak_flops, bandwidth, needs_speed=True)
        if loop.strategy == "hogwild":
            # No device of a data sheet: the worker computes on its CPUs.
            memory, source_of_values = memory if device_memory else allowed(group) or _machine_memory(), ""
            speed = speed if peak_flops else None
        if price_per_hour is None and job.spec.prices is not None:
            price_per_hour = job.spec.prices.gpu_per_hour
        budget = PlanBudget(memory, reserved, speed, price_per_hour)
        result, footprint = _planned_job(job, _Traces(source, overrides or ()), worlds, names, budget)
        if job.spec.elasticity.mirror:
            result = replace(result, notes=(*result.notes, mirror_note(footprint, worlds, group.processes)))
    if as_json or output.is_data:
        emit(_record(result, footprint, job, budget), Output.JSON if as_json else output)
    else:
        _show(result, footprint, job, budget, source_of_values, output)


def sheet_values(
    device: str | None, device_memory: str | None, peak_flops: float | None, bandwidth: str | None, needs_speed: bool
) -> str:
    """Name the values that come from the data sheet of a device, a sentence; empty if none does.

    Args:
        device: the device that the user has named; None: the default.
        device_memory: memory that the user has given, and so the others.
        needs_speed: whether times are estimated.
    """
    options = {"memory": device_memory, **({"peak": peak_flops, "bandwidth": bandwidth} if needs_speed else {})}
    names = [name for name, value in options.items() if value is None]
    if not names:
        return ""
    verb = "is that" if len(names) == 1 else "are those"
    source = device.lower() if device is not None else f"{DEFAULT_DEVICE}, the default of --device"
    return f"{join_names(names)} {verb} of an {source}"


def _refuse_script(job: DistributedTrainingJob, source: Source, overrides: Sequence[str]) -> None:
    if job.spec.trainer.task is None:
        message = (
            "spec.trainer.command: the model of a script is unknown, only that of a task; to plan for a model "
            "of a given size: tandem plan --parameters 7e9"
        )
        raise_for_unmet([UnmetRequirement(("spec", "trainer", "command"), message)], source, overrides)


def mirror_note(footprint: Footprint, worlds: Sequence[int], processes: int) -> str:
    """Return the host memory that mirrors take, a sentence.

    Args:
        worlds: numbers of workers.
        processes: processes of each.
    """
    state = footprint.parameters + footprint.optimizer + footprint.average
    # Two of each process's part, and two of its neighbour's (tandem_trainer.checkpoint.mirror).
    sizes = [f"{format_bytes((2 if world <= processes else 4) * state / world)} with {world}" for world in worlds]
    owner = "worker" if processes == 1 else "process"
    return f"Mirrors (elasticity.mirror) take memory of the host for each {owner}: {', '.join(sizes)}."


@dataclass(frozen=True)
class _Traces:
    """Traces of a manifest's task, from processes of the trainer."""

    source: Source
    overrides: Sequence[str]

    def trace(self, trainer: Trainer, sizes: tuple[int, ...], **options: Any) -> Footprint:
        """Trace micro-batches of these sizes.

        Raises:
            UserError: the task has an error.
        """
        answer = _run_trace(FootprintRequest(trainer=trainer, micro_batches=sizes, **options))
        raise_for_unmet(
            [UnmetRequirement(mistake.path, mistake.message) for mistake in answer.mistakes],
            self.source,
            self.overrides,
        )
        assert answer.footprint is not None
        return answer.footprint


def _planned_job(
    job: DistributedTrainingJob, traces: _Traces, worlds: Sequence[int], names: Sequence[str], budget: PlanBudget
) -> tuple[Plan, Footprint]:
    """Plan a job; return the plan and the footprint of the whole model.

    Args:
        names: strategies to plan for; empty: `ddp`, `fsdp` and the job's own.
    """
    trainer, group = job.spec.trainer, job.spec.workers
    loop = trainer.settings_of_loop
    target = group.replicas * group.processes
    sizes = {tensor: batches(loop, worlds, tensor) for tensor in (1, degree_of(loop))}
    # The unsharded model is the same under each strategy.
    unsharded = {
        tensor: traces.trace(trainer, micro_batches, tensor_parallel=tensor)
        for tensor, micro_batches in sizes.items()
        if micro_batches
    }

    def plan_for(trainer: Trainer) -> Plan:
        own = trainer.settings_of_loop
        chunks = staged_batches(own, worlds)
        staged = traces.trace(trainer, chunks, by_stage=True, tensor_parallel=degree_of(own)) if chunks else None
        return planned(unsharded, own, worlds, target, budget, group.processes, staged)

    if not names:
        return plan_for(trainer), unsharded[1]
    plans: dict[str, Plan] = {}
    failed: dict[str, UserError] = {}
    for name in names:
        try:
            plans[name] = plan_for(_with_strategy(trainer, name))
        except UserError as error:
            failed[name] = error
    reasons = {name: one_line(str(error)).removeprefix("--strategies: ") for name, error in failed.items()}
    missing = [f"{name} is not planned: {reason}" for name, reason in reasons.items()]
    if not plans and len(set(reasons.values())) == 1:
        raise next(iter(failed.values()))
    if not plans:
        raise UserError("\n".join(["--strategies: there is nothing to plan", *missing]))
    return joined(plans, loop, target, missing), unsharded[1]


def _with_strategy(trainer: Trainer, name: str) -> Trainer:
    """Return the trainer with other strategies.

    Raises:
        UserError: its other options are not compatible with them.
    """
    data = trainer.dump()
    choose(data.setdefault("loop" if trainer.config is None else "config", {}), name)
    try:
        return Trainer.parse(data)
    except ValidationError as error:
        raise UserError(f"--strategies: this job cannot take {name}: {first_error(error)}") from None


def allowed(workers: Workers) -> int | None:
    """Return the memory limit of a worker's container in bytes; None if the job has none."""
    amount = str({**workers.asked["requests"], **workers.asked["limits"]}.get("memory", ""))
    with suppress(UserError):
        return bytes_of(f"{amount}B" if amount[-1:] in "kMGT0123456789" else amount, "memory")
    return None


def _machine_memory() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _run_trace(question: FootprintRequest) -> FootprintResponse:
    """Run a trace in a process of the trainer, which prints its progress."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"tandem plan needs torch; install it with: {install_command('trainer')}")
    task = question.trainer.task
    done = subprocess.run(
        module_command("tandem_trainer.footprint"),
        input=question.model_dump_json(exclude_none=True).encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    try:
        if done.returncode == 0:
            return FootprintResponse.read_json(done.stdout)
    except ValidationError as error:
        raise UserError(f"the trace of {task} gave no readable answer: {error}") from error
    raise UserError(f"{task} could not be traced: the process exited with code {done.returncode}; see above")


def _show(
    result: Plan,
    footprint: Footprint,
    job: DistributedTrainingJob | None,
    budget: PlanBudget,
    source_of_values: str,
    output: Output,
) -> None:
    title = f"{footprint.parameter_count:,} parameters"
    if job is not None:
        loop = job.spec.trainer.settings_of_loop
        title = (
            f"{job.metadata.name}: {title}, global batch {loop.global_batch_size:,}, {loop.precision}, "
            f"{count_noun(result.steps or 0, 'step')}"
        )
    echo(title)
    owner = "the worker" if job is not None and job.spec.trainer.settings_of_loop.strategy == "hogwild" else "a device"
    echo(f"{owner} has {format_bytes(budget.device_memory)}, {format_bytes(budget.reserve)} of it not for tensors")
    if source_of_values:
        echo(source_of_values)
    echo("")
    console = PrintableConsole(highlight=False)
    for line in table(result, console.width if console.is_terminal and output is not Output.WIDE else None):
        echo(line)
    echo("")
    if budget.speed is not None and any(row.time is not None for row in result.rows):
        speed = budget.speed
        echo(
            f"times assume {number(speed.flops / 1e12)} TFLOP/s × {speed.utilization:g} utilization and "
            f"{number(speed.bandwidth / 1e9)} GB/s between devices; reading data and checkpoints are not included"
        )
    for note in result.notes:
        echo(note)
    echo(result.recommendation, mark="→ ", colour="green")


def table(result: Plan, width: int | None = None) -> list[str]:
    """Format the rows as lines of aligned columns, without columns that are zero in all rows.

    Args:
        width: width of the terminal. Where the parts of the peak have no room, they are left out. None: any width.
    """
    sizes = [_sizes(row) for row in result.rows]
    lines = _aligned(result, sizes, [name for name in COLUMNS if any(row_sizes[name] for row_sizes in sizes)])
    return lines if width is None or max(map(len, lines)) <= width else _aligned(result, sizes, [])


def _aligned(result: Plan, sizes: Sequence[Mapping[str, int]], shows: Sequence[str]) -> list[str]:
    heads, lines = ["strategy", "workers"], [[row.label, str(row.workers)] for row in result.rows]

    def column(head: str, cells: Sequence[str]) -> None:
        heads.append(head)
        for line, cell in zip(lines, cells, strict=True):
            line.append(cell)

    if any(row.batch for row in result.rows):
        column("batch", [f"{row.batch.micro_batch} × {row.batch.passes}" if row.batch else "-" for row in result.rows])
    for name in shows:
        column(name, [format_bytes(row_sizes[name]) if row_sizes[name] else "-" for row_sizes in sizes])
    column("peak", [format_bytes(row.memory.total) for row in result.rows])
    column("fits", [f"{format_bytes(abs(row.spare))} {'left' if row.fits else 'lack'}" for row in result.rows])
    if any(row.time for row in result.rows):
        column("step", [_time(row.time.step) if row.time else "-" for row in result.rows])
    if any(row.cost is not None for row in result.rows):
        column("cost", ["-" if row.cost is None else _cost(row.cost) for row in result.rows])
    grid = [[head.upper() for head in heads], *lines]
    widths = [max(len(cell) for cell in cells) for cells in zip(*grid, strict=True)]
    # Text is left-aligned, numbers are right-aligned.
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in grid]


def _sizes(row: PlanRow) -> dict[str, int]:
    """Return the sizes of the columns; the small ones are combined into `other`."""
    sizes = dict(vars(row.memory))
    return {**sizes, "other": sizes.pop("buffers") + sizes.pop("data")}


def _time(seconds: float) -> str:
    return "< 1 ms" if seconds < 0.001 else duration(seconds)


def _cost(price: float) -> str:
    return "< 0.01" if price < 0.01 else f"{price:,.2f}"


def _record(
    result: Plan, footprint: Footprint, job: DistributedTrainingJob | None, budget: PlanBudget
) -> dict[str, Any]:
    """Return the plan for programs, in bytes, seconds, and the currency of the price."""
    speed = budget.speed
    return {
        "name": None if job is None else job.metadata.name,
        "parameterCount": footprint.parameter_count,
        "steps": result.steps,
        "deviceMemory": budget.device_memory,
        "reserve": budget.reserve,
        "assumptions": None
        if speed is None
        else {"peakFlops": speed.flops, "utilization": speed.utilization, "bandwidth": speed.bandwidth},
        "pricePerHour": budget.price_per_hour,
        "rows": [_row(row) for row in result.rows],
        "recommendation": result.recommendation,
        "notes": list(result.notes),
    }


def _row(row: PlanRow) -> dict[str, Any]:
    return {
        "strategy": row.label,
        "workers": row.workers,
        "tensorParallel": row.tensor,
        "microBatch": row.batch and row.batch.micro_batch,
        "passes": row.batch and row.batch.passes,
        "memory": {**{to_camel(name): size for name, size in vars(row.memory).items()}, "peak": row.memory.total},
        "fits": row.fits,
        "spare": row.spare,
        "seconds": row.time
        and {
            "compute": row.time.compute,
            "communication": row.time.communication,
            "step": row.time.step,
        },
        "cost": row.cost,
    }
