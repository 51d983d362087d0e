"""`tandem plan FILE`: which strategy fits on which devices, before one is booked."""

import importlib.util
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from tandem.distribution import install
from tandem.errors import Unmet, UserError
from tandem.footprint import Answer, Footprint, Question
from tandem.formatting import duration, number, one_line, several
from tandem.job import DistributedTrainingJob, Trainer, Workers
from tandem.launch import module_command
from tandem.manifest.reading import job_of, read_source, refuse
from tandem.manifest.source import Source
from tandem_cli.combinations import choose, first_of, named
from tandem_cli.output import Output, OutputOption, OverridesOption, echo, emit
from tandem_cli.planning.memory import bytes_of, shown, state_of, world_sizes
from tandem_cli.planning.plan import (
    RESERVE,
    Budget,
    Plan,
    Row,
    batches,
    degree_of,
    devices,
    joined,
    planned,
    staged_batches,
)
from tandem_cli.planning.speed import DEFAULT_DEVICE, DEVICES, UTILIZATION, Speed

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
        str, typer.Option(help=f"Device whose data sheet is used for what you leave out: {', '.join(DEVICES)}.")
    ] = DEFAULT_DEVICE,
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
    """Say which strategy fits: memory of a device, time of a step and costs, for each number of workers.

    Traces a training step of the job's task without its weights, so a model of any size is planned on any machine.
    """
    worlds = sorted(world_sizes(workers))
    if device.lower() not in DEVICES:
        raise UserError(f"--device: {device} is not known; take one of {', '.join(DEVICES)}, or give --device-memory")
    sheet = DEVICES[device.lower()]
    memory = sheet.memory if device_memory is None else bytes_of(device_memory, "--device-memory")
    held = bytes_of(reserve, "--reserve")
    speed_of_links = sheet.bandwidth if bandwidth is None else float(bytes_of(bandwidth, "--bandwidth"))
    if not 0 < utilization <= 1:
        raise UserError(f"--utilization: {utilization} is no share; write more than 0 and at most 1")
    if parameters is not None and 0 < parameters < 1:
        raise UserError(f"--parameters: {parameters:g} is less than one parameter")
    for name, value in (("peak-flops", peak_flops), ("price-per-hour", price_per_hour), ("parameters", parameters)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name}: write a number above 0, not {value:g}")
    if (file is None) == (parameters is None):
        raise UserError(
            "tandem plan takes a job's manifest, or --parameters with the size of a model; give one of them"
        )
    if parameters is not None:
        if strategies is not None:
            raise UserError(
                "--strategies: of a model of which only the size is known, ddp and fsdp are planned; leave it out"
            )
        footprint, job = state_of(round(parameters)), None
        budget = Budget(memory, held, None, price_per_hour)
        found = planned({1: footprint}, None, worlds, worlds[-1], budget)
    else:
        assert file is not None
        source = read_source(file)
        job = job_of(source, overrides or ())
        _refuse_script(job, source, overrides or ())
        loop, group = job.spec.trainer.settings_of_loop, job.spec.workers
        names = [] if strategies is None else list(named(strategies, loop))
        if names and names != [loop.strategy] and "hogwild" in (loop.strategy, *names):
            raise UserError(
                "--strategies: hogwild is planned by itself, for a job that has it, because it takes no device; for "
                "others set another strategy in the job"
            )
        speed: Speed | None = Speed(peak_flops or sheet.peak(loop.precision), utilization, speed_of_links)
        if loop.strategy == "hogwild":
            # No device of a data sheet: the worker computes on its processors.
            memory = memory if device_memory else allowed(group) or _of_this_machine()
            speed = speed if peak_flops else None
        if price_per_hour is None and job.spec.prices is not None:
            price_per_hour = job.spec.prices.gpu_per_hour
        budget = Budget(memory, held, speed, price_per_hour)
        found, footprint = _planned_job(job, _Traces(source, overrides or ()), worlds, names, budget)
    if as_json or output.is_data:
        emit(_record(found, footprint, job, budget), Output.JSON if as_json else output)
    else:
        _show(found, footprint, job, budget)


def _refuse_script(job: DistributedTrainingJob, source: Source, overrides: Sequence[str]) -> None:
    if job.spec.trainer.task is None:
        why = (
            "spec.trainer.command: the model of a script is not known here, only that of a task; for the state of a "
            "model give its size: tandem plan --parameters 7e9"
        )
        refuse([Unmet(("spec", "trainer", "command"), why)], source, overrides)


@dataclass(frozen=True)
class _Traces:
    """What processes of the trainer's say of the tasks of a manifest."""

    source: Source
    overrides: Sequence[str]

    def ask(self, trainer: Trainer, sizes: tuple[int, ...], **how: Any) -> Footprint:
        """Of micro-batches of these sizes.

        Raises:
            UserError: the task is wrong.
        """
        answer = _answered(Question(trainer=trainer, micro_batches=sizes, **how))
        refuse([Unmet(one.path, one.message) for one in answer.mistakes], self.source, self.overrides)
        assert answer.footprint is not None
        return answer.footprint


def _planned_job(
    job: DistributedTrainingJob, traces: _Traces, worlds: Sequence[int], names: Sequence[str], budget: Budget
) -> tuple[Plan, Footprint]:
    """The plan of a job, and what it is of.

    Args:
        names: of the strategies to plan for; empty: `ddp`, `fsdp` and what the job has.
    """
    trainer, group = job.spec.trainer, job.spec.workers
    loop = trainer.settings_of_loop
    wanted = group.gpus if loop.strategy in ("dp", "model") else group.replicas * group.processes
    sizes = {tensor: batches(loop, worlds, tensor) for tensor in (1, degree_of(loop))}
    # The whole model is the same under each strategy.
    whole = {tensor: traces.ask(trainer, those, tensor_parallel=tensor) for tensor, those in sizes.items() if those}

    def under(trainer: Trainer) -> Plan:
        own = trainer.settings_of_loop
        chunks, alone = staged_batches(own, worlds), batches(own, (1,))
        staged = traces.ask(trainer, chunks, by_stage=True, tensor_parallel=degree_of(own)) if chunks else None
        spread = {number: traces.ask(trainer, alone, devices=number) for number in devices(own, worlds)}
        return planned(whole, own, worlds, wanted, budget, group.processes, staged, spread)

    if not names:
        return under(trainer), whole[1]
    plans: dict[str, Plan] = {}
    failed: dict[str, UserError] = {}
    for name in names:
        try:
            plans[name] = under(_chosen(trainer, name))
        except UserError as error:
            failed[name] = error
    told = {name: one_line(str(error)).removeprefix("--strategies: ") for name, error in failed.items()}
    missing = [f"{name} is not planned: {why}" for name, why in told.items()]
    if not plans and len(set(told.values())) == 1:
        raise next(iter(failed.values()))
    if not plans:
        raise UserError("\n".join(["--strategies: there is nothing to plan", *missing]))
    return joined(plans, loop, wanted, missing), whole[1]


def _chosen(trainer: Trainer, name: str) -> Trainer:
    """The same with other strategies.

    Raises:
        UserError: its other options do not go together with them.
    """
    data = trainer.dump()
    choose(data.setdefault("config" if trainer.is_built_in else "loop", {}), name)
    try:
        return Trainer.parse(data)
    except ValidationError as error:
        raise UserError(f"--strategies: this job cannot take {name}: {first_of(error)}") from None


def allowed(workers: Workers) -> int | None:
    """Bytes of memory that a worker's container may take; None where the job does not say it."""
    amount = str({**workers.asked["requests"], **workers.asked["limits"]}.get("memory", ""))
    with suppress(UserError):
        return bytes_of(f"{amount}B" if amount[-1:] in "kMGT0123456789" else amount, "memory")
    return None


def _of_this_machine() -> int:
    """Bytes of memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _answered(question: Question) -> Answer:
    """What a process of the trainer's answers. Its progress is shown."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"tandem plan needs torch; install it with: {install('trainer')}")
    task = question.trainer.task
    done = subprocess.run(
        module_command("tandem_trainer.footprint"),
        input=question.model_dump_json(exclude_none=True).encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    try:
        if done.returncode == 0:
            return Answer.read_json(done.stdout)
    except ValidationError as error:
        raise UserError(f"what traces {task} gave no answer that can be read: {error}") from error
    raise UserError(f"{task} could not be traced: the process ended with {done.returncode}; see above")


def _show(found: Plan, footprint: Footprint, job: DistributedTrainingJob | None, budget: Budget) -> None:
    what = f"{footprint.parameter_count:,} parameters"
    if job is not None:
        loop = job.spec.trainer.settings_of_loop
        what = (
            f"{job.metadata.name}: {what}, global batch {loop.global_batch_size:,}, {loop.precision}, "
            f"{several(found.steps or 0, 'step')}"
        )
    echo(what)
    whose = "the worker" if job is not None and job.spec.trainer.settings_of_loop.strategy == "hogwild" else "a device"
    echo(f"{whose} has {shown(budget.device_memory)}, {shown(budget.reserve)} of it not for tensors\n")
    for line in table(found):
        echo(line)
    echo("")
    if budget.speed is not None and any(row.time is not None for row in found.rows):
        speed = budget.speed
        echo(
            f"times assume {number(speed.flops / 1e12)} TFLOP/s × {speed.utilization:g} utilization and "
            f"{number(speed.bandwidth / 1e9)} GB/s between devices; reading data and checkpoints are not in them"
        )
    for note in found.notes:
        echo(note)
    echo(found.recommendation, mark="→ ", colour="green")


def table(found: Plan) -> list[str]:
    """The rows as lines of aligned columns; without those in which all are nothing."""
    sizes = [_sizes(row) for row in found.rows]
    shows = [name for name in COLUMNS if any(one[name] for one in sizes)]
    heads, lines = ["strategy", "workers"], [[row.label, str(row.workers)] for row in found.rows]

    def column(head: str, cells: Sequence[str]) -> None:
        heads.append(head)
        for line, cell in zip(lines, cells, strict=True):
            line.append(cell)

    if any(row.batch for row in found.rows):
        column("batch", [f"{row.batch.micro_batch} × {row.batch.passes}" if row.batch else "-" for row in found.rows])
    for name in shows:
        column(name, [shown(one[name]) if one[name] else "-" for one in sizes])
    column("peak", [shown(row.memory.total) for row in found.rows])
    column("fits", [f"{shown(abs(row.spare))} {'left' if row.fits else 'lack'}" for row in found.rows])
    if any(row.time for row in found.rows):
        column("step", [_time(row.time.step) if row.time else "-" for row in found.rows])
    if any(row.cost is not None for row in found.rows):
        column("cost", ["-" if row.cost is None else _cost(row.cost) for row in found.rows])
    whole = [[head.upper() for head in heads], *lines]
    widths = [max(len(cell) for cell in cells) for cells in zip(*whole, strict=True)]
    # Words begin at the left, numbers end at the right.
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in whole]


def _sizes(row: Row) -> dict[str, int]:
    """What columns show: what is mostly small is one of them."""
    sizes = dict(vars(row.memory))
    return {**sizes, "other": sizes.pop("buffers") + sizes.pop("data")}


def _time(seconds: float) -> str:
    return "< 1 ms" if seconds < 0.001 else duration(seconds)


def _cost(price: float) -> str:
    return "< 0.01" if price < 0.01 else f"{price:,.2f}"


def _record(found: Plan, footprint: Footprint, job: DistributedTrainingJob | None, budget: Budget) -> dict[str, Any]:
    """The plan for programs: bytes, seconds, and the currency of the price."""
    speed = budget.speed
    return {
        "name": None if job is None else job.metadata.name,
        "parameterCount": footprint.parameter_count,
        "steps": found.steps,
        "deviceMemory": budget.device_memory,
        "reserve": budget.reserve,
        "assumptions": None
        if speed is None
        else {"peakFlops": speed.flops, "utilization": speed.utilization, "bandwidth": speed.bandwidth},
        "pricePerHour": budget.price_per_hour,
        "rows": [_row(row) for row in found.rows],
        "recommendation": found.recommendation,
        "notes": list(found.notes),
    }


def _row(row: Row) -> dict[str, Any]:
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
