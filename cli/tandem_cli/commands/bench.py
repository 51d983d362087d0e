"""`tandem bench FILE`: which strategy and how many workers are fastest for a job, measured on this machine."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import UnmetRequirement, UserError
from tandem.formatting import number, size
from tandem.job.manifest.reading import parse_job, raise_for_unmet, read_source
from tandem.job.manifest.source import Source
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.distribution import install_command
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import schedule_path
from tandem.rundir.layout import RunDir
from tandem_cli.bench.measurement import Measurement, Unmeasured, measure
from tandem_cli.bench.results import BenchResults, Conditions, TrialRun
from tandem_cli.bench.schedule import RecordedSchedule, draw_schedule, title
from tandem_cli.bench.trial import TrialDisplay, TrialResources, drop_checkpoints, train
from tandem_cli.bench.variants import MIN_STEPS, TRACE_STEPS, Variant, comparison, traced, warm_up
from tandem_cli.commands.run import check_torch
from tandem_cli.output import Output, OutputOption, OverridesOption, echo, emit
from tandem_cli.packing import CodeOption, Pack, packed_if_given, with_code
from tandem_coordinator.prerequisites import local_site, unmet
from tandem_launcher.local.local_run import Requests
from tandem_launcher.local.placement import share_gpus, usable_cores
from tandem_launcher.terminal.canvas import PrintableConsole

THREADS = "OMP_NUM_THREADS"
UNBOUNDED = 100_000
"""Width that no line exceeds, in characters."""


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
            "--profile",
            help="Trace a few steps of rank 0 in one more run of each combination, and draw the schedule of pipelines.",
        ),
    ] = False,
    code: CodeOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Train a job with several strategies and numbers of workers, and compare speed, memory and efficiency.

    Each combination trains for a few steps in each round, without evaluators. Ctrl-C ends the command with a table of
    the results so far.
    """
    requests = Requests()
    with requests.caught(), packed_if_given(code) as pack:
        source = read_source(file)
        settings = with_code(overrides or (), pack)
        job = parse_job(source, settings)
        variants, omitted = comparison(job, strategies, workers, steps)
        check_torch()
        folder = out or Path("runs") / f"bench-{job.metadata.name}"
        cores = len(usable_cores())
        largest = max(variants, key=lambda variant: variant.ranks)
        machine = TrialResources(cores, _threads(job, cores, largest.ranks))
        _validate_machine(largest, machine, folder, source, settings, pack)
        conditions = Conditions(
            job=job.metadata.name,
            steps=steps,
            warm_up_steps=warm_up(steps),
            rounds=rounds,
            cores=cores,
            threads_per_rank=machine.threads,
            load_before=os.getloadavg()[0],
            target_loss=target_loss,
            left_out=omitted,
        )
        results = _Bench(conditions, variants, machine, folder, requests, pack).run(profile)
    if results.runs:
        pictures = write(results, folder)
        _show(results, folder, pictures, output)
    if requests.count:
        raise typer.Exit(ExitCode.INTERRUPTED)
    raise typer.Exit(ExitCode.FAILED if results.failed else ExitCode.DONE)


class _Bench:
    """Runs all variants, one after the other."""

    def __init__(
        self,
        conditions: Conditions,
        variants: Sequence[Variant],
        machine: TrialResources,
        folder: Path,
        requests: Requests,
        pack: Pack | None,
    ) -> None:
        self._conditions, self._variants, self._machine = conditions, variants, machine
        self._folder, self._requests, self._pack = folder, requests, pack
        self._runs: list[TrialRun] = []

    def run(self, profile: bool) -> BenchResults:
        """Measure all variants, until the user asks to stop."""
        rounds = self._conditions.rounds
        count = len(self._variants) * (rounds + profile)
        with TrialDisplay(PrintableConsole(stderr=True, highlight=False), self._conditions.steps, count) as progress:
            for round_ in range(1, rounds + 1):
                for variant in self._variants:
                    if self._requests.count:
                        break
                    self._measure(variant, round_, progress)
            for variant in self._variants if profile else ():
                if self._requests.count:
                    break
                self._trace(variant, progress)
        return BenchResults(self._conditions, tuple(self._runs))

    def _measure(self, variant: Variant, round_: int, progress: TrialDisplay) -> None:
        path = self._folder / "runs" / f"{_folder_name(variant)}-{round_}"
        progress.begin(f"{variant.name}, round {round_} of {self._conditions.rounds}")
        train(variant, path, self._machine, self._requests, progress, self._pack)
        if self._requests.count:
            progress.end_run("ended before it was measured")
            return
        measurement, reason = None, ""
        try:
            measurement = measure(RunDir(path), self._conditions.warm_up_steps, self._conditions.target_loss)
        except Unmeasured as error:
            reason = str(error)
        drop_checkpoints(RunDir(path))
        self._runs.append(TrialRun(variant, round_, measurement, reason, str(path)))
        progress.end_run(f"failed: {reason}" if measurement is None else _describe(measurement))

    def _trace(self, variant: Variant, progress: TrialDisplay) -> None:
        path = self._folder / "runs" / f"{_folder_name(variant)}-trace"
        file = self._folder / f"trace-{_folder_name(variant)}.json"
        file.unlink(missing_ok=True)
        schedule_path(file).unlink(missing_ok=True)
        progress.begin(f"{variant.name}, traced", TRACE_STEPS)
        train(traced(variant, file), path, self._machine, self._requests, progress, self._pack)
        drop_checkpoints(RunDir(path))
        progress.end_run(str(file) if file.exists() else f"no trace was written; see {path / 'log'}")
        if (recorded := schedule_path(file)).exists():
            progress.note(_draw_schedule(recorded, self._folder / f"schedule-{_folder_name(variant)}"))


def _folder_name(variant: Variant) -> str:
    return f"{variant.strategy}-{variant.workers}"


def _describe(measurement: Measurement) -> str:
    memory = measurement.peak_memory if measurement.peak_gpu_memory is None else measurement.peak_gpu_memory
    return f"{number(measurement.samples_per_second)} samples/s, {size(memory)} a rank"


def _threads(job: DistributedTrainingJob, cores: int, ranks: int) -> int:
    """Return the threads of each rank, equal in all runs: the user's setting, or a share of the cores in the largest
    group."""
    variables = {variable.name: variable.value for variable in job.spec.trainer.env}
    setting = variables.get(THREADS) or os.environ.get(THREADS, "")
    return int(setting) if setting.isdecimal() and int(setting) else max(1, cores // ranks)


def _validate_machine(
    largest: Variant, machine: TrialResources, folder: Path, source: Source, settings: Sequence[str], pack: Pack | None
) -> None:
    """Check the prerequisites of the largest group, before anything is written.

    Raises:
        UserError: this machine does not meet them.
    """
    if pack is None and largest.job.spec.trainer.code is not None:
        message = "the code of this digest is not on this machine; give the folder with --code DIR, and omit this field"
        raise_for_unmet([UnmetRequirement(("spec", "trainer", "code"), message)], source, settings)
    if pack is not None:
        raise_for_unmet(pack.missing_scripts(largest.job), source, settings)
    gpus, note = share_gpus(machine.gpus, largest.job)
    code = None if pack is None else pack.folder
    site = local_site(
        largest.job, RunDir(folder / "runs" / _folder_name(largest)), machine.cores, gpus, True, code=code
    )
    raise_for_unmet(unmet(largest.job, site), source, settings)
    if note and machine.gpus:
        raise UserError(f"--workers: {note}; numbers from CPUs and from GPUs cannot be compared")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file; a bench needs a folder")


def _draw_schedule(recorded: Path, stem: Path) -> str:
    """Draw the recorded schedule of a pipeline; return its description."""
    schedule = RecordedSchedule.read_json(recorded.read_bytes())
    try:
        from tandem_cli.report.raster import painted, standalone
    except ModuleNotFoundError:
        return schedule.words
    svg = standalone(draw_schedule(schedule), title(schedule))
    picture, _ = _keep(stem, svg, painted(svg))
    return f"{schedule.words}; drawn in {picture}"


def _keep(stem: Path, svg: str, png: bytes) -> tuple[Path, Path]:
    """Write a picture as PNG and SVG."""
    files = stem.with_suffix(".png"), stem.with_suffix(".svg")
    files[0].write_bytes(png)
    files[1].write_text(svg)
    return files


def write(results: BenchResults, folder: Path) -> tuple[Path, ...]:
    """Write all files; return the pictures, none if the packages that draw them are not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.csv").write_text(results.csv())
    (folder / "bench.json").write_text(json.dumps(results.record(), indent=2) + "\n")
    try:
        from tandem_cli.bench import picture
        from tandem_cli.report.raster import painted
    except ModuleNotFoundError:
        return ()
    svg = picture.draw_results(results)
    return _keep(folder / "bench", svg, painted(svg)) if svg else ()


def _show(results: BenchResults, folder: Path, pictures: Sequence[Path], output: Output) -> None:
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
        echo(f"no picture was drawn: its packages are not installed. Install them with: {install_command('report')}")
