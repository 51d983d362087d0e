"""`tandem bench FILE`: which strategy and how many workers are fastest for a job, measured on this machine."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tandem.distribution import install
from tandem.errors import Unmet, UserError
from tandem.exitcode import ExitCode
from tandem.formatting import number, size
from tandem.job import DistributedTrainingJob
from tandem.launch import schedule_beside
from tandem.manifest.reading import job_of, read_source, refuse
from tandem.manifest.source import Source
from tandem.rundir.layout import RunDir
from tandem_cli.bench.measurement import Measurement, Unmeasured, measured
from tandem_cli.bench.results import Conditions, Results, Run
from tandem_cli.bench.schedule import Schedule, drawn, title
from tandem_cli.bench.trial import Machine, Told, drop_checkpoints, train
from tandem_cli.bench.variants import MIN_STEPS, TRACE_STEPS, Variant, comparison, traced, warm_up
from tandem_cli.commands.run import need_torch
from tandem_cli.local.local_run import Requests
from tandem_cli.local.placement import share_gpus, usable_cores
from tandem_cli.output import Output, OutputOption, OverridesOption, echo, emit
from tandem_cli.packing import CodeOption, Pack, packed_if_given, with_code
from tandem_cli.terminal.canvas import PrintableConsole
from tandem_coordinator.prerequisites import here, unmet

THREADS = "OMP_NUM_THREADS"
UNBOUNDED = 100_000
"""Characters of a line that no terminal cuts."""


def bench(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The job's manifest; - reads standard input.")],
    overrides: OverridesOption = None,
    strategies: Annotated[
        str | None, typer.Option(help="Strategies, such as ddp,fsdp,fsdp+tensor.", show_default="the job's own")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Numbers of workers, such as 1,2.", show_default="1 and that of the job")
    ] = None,
    steps: Annotated[int, typer.Option(min=MIN_STEPS, help="Steps of each run, warm-up included.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each combination, in turns with the others.")] = 2,
    target_loss: Annotated[
        float | None, typer.Option(help="Also measure the time until the training loss is this low.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for results and runs.", show_default="runs/bench-NAME"),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="In one more run of each, trace a few steps of rank 0, and draw what pipelines do when."
        ),
    ] = False,
    code: CodeOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Train a job with several strategies and numbers of workers, and compare speed, memory and efficiency.

    Each combination trains for a few steps, as often as there are rounds, without evaluators. Ctrl-C ends it, with a
    table of what was measured by then.
    """
    requests = Requests()
    with requests.caught(), packed_if_given(code) as pack:
        source = read_source(file)
        settings = with_code(overrides or (), pack)
        job = job_of(source, settings)
        found, left_out = comparison(job, strategies, workers, steps)
        need_torch()
        folder = out or Path("runs") / f"bench-{job.metadata.name}"
        cores = len(usable_cores())
        most = max(found, key=lambda one: one.ranks)
        machine = Machine(cores, _threads(job, cores, most.ranks))
        _refuse_what_cannot_run(most, machine, folder, source, settings, pack)
        conditions = Conditions(
            job=job.metadata.name,
            steps=steps,
            warm_up_steps=warm_up(steps),
            rounds=rounds,
            cores=cores,
            threads_per_rank=machine.threads,
            load_before=os.getloadavg()[0],
            target_loss=target_loss,
            left_out=left_out,
        )
        results = _Bench(conditions, found, machine, folder, requests, pack).run(profile)
    if results.runs:
        pictures = write(results, folder)
        _show(results, folder, pictures, output)
    if requests.count:
        raise typer.Exit(ExitCode.INTERRUPTED)
    raise typer.Exit(ExitCode.FAILED if results.failed else ExitCode.DONE)


class _Bench:
    """All runs, one after the other."""

    def __init__(
        self,
        conditions: Conditions,
        variants: Sequence[Variant],
        machine: Machine,
        folder: Path,
        requests: Requests,
        pack: Pack | None,
    ) -> None:
        self._conditions, self._variants, self._machine = conditions, variants, machine
        self._folder, self._requests, self._pack = folder, requests, pack
        self._runs: list[Run] = []

    def run(self, profile: bool) -> Results:
        """Until all are measured, or the user asks to stop."""
        rounds = self._conditions.rounds
        count = len(self._variants) * (rounds + profile)
        with Told(PrintableConsole(stderr=True, highlight=False), self._conditions.steps, count) as told:
            for round_ in range(1, rounds + 1):
                for variant in self._variants:
                    if self._requests.count:
                        break
                    self._measure(variant, round_, told)
            for variant in self._variants if profile else ():
                if self._requests.count:
                    break
                self._trace(variant, told)
        return Results(self._conditions, tuple(self._runs))

    def _measure(self, variant: Variant, round_: int, told: Told) -> None:
        path = self._folder / "runs" / f"{_named(variant)}-{round_}"
        told.begin(f"{variant.name}, round {round_} of {self._conditions.rounds}")
        train(variant, path, self._machine, self._requests, told, self._pack)
        if self._requests.count:
            told.end_run("ended before it was measured")
            return
        found, why = None, ""
        try:
            found = measured(RunDir(path), self._conditions.warm_up_steps, self._conditions.target_loss)
        except Unmeasured as error:
            why = str(error)
        drop_checkpoints(RunDir(path))
        self._runs.append(Run(variant, round_, found, why, str(path)))
        told.end_run(f"failed: {why}" if found is None else _in_words(found))

    def _trace(self, variant: Variant, told: Told) -> None:
        path = self._folder / "runs" / f"{_named(variant)}-trace"
        file = self._folder / f"trace-{_named(variant)}.json"
        file.unlink(missing_ok=True)
        schedule_beside(file).unlink(missing_ok=True)
        told.begin(f"{variant.name}, traced", TRACE_STEPS)
        train(traced(variant, file), path, self._machine, self._requests, told, self._pack)
        drop_checkpoints(RunDir(path))
        told.end_run(str(file) if file.exists() else f"no trace was written; see {path / 'log'}")
        if (recorded := schedule_beside(file)).exists():
            told.note(_draw_schedule(recorded, self._folder / f"schedule-{_named(variant)}"))


def _named(variant: Variant) -> str:
    return f"{variant.strategy}-{variant.workers}"


def _in_words(found: Measurement) -> str:
    memory = found.peak_memory if found.peak_gpu_memory is None else found.peak_gpu_memory
    return f"{number(found.samples_per_second)} samples/s, {size(memory)} a rank"


def _threads(job: DistributedTrainingJob, cores: int, ranks: int) -> int:
    """Of each rank, in every run: what the user has set, or an even share of the cores in the largest group."""
    own = {one.name: one.value for one in job.spec.trainer.env}
    given = own.get(THREADS) or os.environ.get(THREADS, "")
    return int(given) if given.isdecimal() and int(given) else max(1, cores // ranks)


def _refuse_what_cannot_run(
    most: Variant, machine: Machine, folder: Path, source: Source, settings: Sequence[str], pack: Pack | None
) -> None:
    """Have what this machine lacks for the largest group told, before anything is written.

    Raises:
        UserError: it lacks something.
    """
    if pack is None and most.job.spec.trainer.code is not None:
        why = "the code of this digest is not here; give the folder with --code DIR, and leave out this field"
        refuse([Unmet(("spec", "trainer", "code"), why)], source, settings)
    if pack is not None:
        refuse(pack.left_out(most.job), source, settings)
    gpus, note = share_gpus(machine.gpus, most.job)
    code = None if pack is None else pack.folder
    site = here(most.job, RunDir(folder / "runs" / _named(most)), machine.cores, gpus, True, code=code)
    refuse(unmet(most.job, site), source, settings)
    if note and machine.gpus:
        raise UserError(f"--workers: {note}; numbers from CPUs and from GPUs cannot be compared")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file; a bench needs a folder")


def _draw_schedule(recorded: Path, stem: Path) -> str:
    """Draw what a pipeline recorded; returns what it shows, in words."""
    schedule = Schedule.read_json(recorded.read_bytes())
    try:
        from tandem_cli.report.raster import painted, standalone
    except ModuleNotFoundError:
        return schedule.words
    svg = standalone(drawn(schedule), title(schedule))
    picture, _ = _keep(stem, svg, painted(svg))
    return f"{schedule.words}; drawn in {picture}"


def _keep(stem: Path, svg: str, png: bytes) -> tuple[Path, Path]:
    """Write both forms of a picture."""
    files = stem.with_suffix(".png"), stem.with_suffix(".svg")
    files[0].write_bytes(png)
    files[1].write_text(svg)
    return files


def write(results: Results, folder: Path) -> tuple[Path, ...]:
    """Write all files; returns the pictures, none where what draws them is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.csv").write_text(results.csv())
    (folder / "bench.json").write_text(json.dumps(results.record(), indent=2) + "\n")
    try:
        from tandem_cli.bench import picture
        from tandem_cli.report.raster import painted
    except ModuleNotFoundError:
        return ()
    svg = picture.drawn(results)
    return _keep(folder / "bench", svg, painted(svg)) if svg else ()


def _show(results: Results, folder: Path, pictures: Sequence[Path], output: Output) -> None:
    if output.is_data:
        emit(results.record(), output)
        return
    console = PrintableConsole(highlight=False)
    if not console.is_terminal or output is Output.WIDE:
        console.width = UNBOUNDED
    console.print(results.table())
    console.print()
    for note in results.notes:
        echo(note)
    echo(f"table     {folder / 'bench.csv'}, {folder / 'bench.json'}")
    if pictures:
        echo(f"picture   {', '.join(map(str, pictures))}")
    elif any(run.found is not None for run in results.runs):
        echo(f"no picture was drawn, because what draws it is missing; install it with: {install('report')}")
