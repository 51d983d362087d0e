"""`tandem sweep FILE`: trials of a job with different settings, of which scores stop the worse ones."""

import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.errors import UserError
from tandem.formatting import metric_name, score
from tandem_cli.client.client import Client
from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption, ProfileOption
from tandem_cli.local.known import RUNS
from tandem_cli.output import OverridesOption, echo
from tandem_cli.packing import CodeOption
from tandem_cli.sweep.background import start_in_background
from tandem_cli.sweep.best import export_weights, write_manifest
from tandem_cli.sweep.definition import SweepFolder, TrialPlatform, define, find_sweep
from tandem_cli.sweep.driver import Driver
from tandem_cli.sweep.table import trial_table
from tandem_launcher.terminal.canvas import PrintableConsole

UNBOUNDED = 100_000
"""Width that no line exceeds, in characters."""
COLOURS = {"": "", "good": "green", "bad": "red"}


def sweep(
    target: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of kind Sweep; or the name or folder of one to continue.")
    ],
    overrides: OverridesOption = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder of the sweep.", show_default="runs/NAME")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Continue in the background.")] = False,
    code: CodeOption = None,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit trials to the SLURM cluster of this node.")] = False,
    profile: ProfileOption = "",
) -> None:
    """Train a job with different settings, and find the best ones.

    A sampler of Optuna chooses the settings; a trial whose scores are worse than those of others is stopped. Ctrl-C
    saves and stops; the same command continues. `tandem compare NAME` shows all trials.
    """
    place = None if Path(target).is_file() else find_sweep(target)
    if place is not None:
        options = {"--set": overrides, "--dir": folder, "--code": code, "--slurm": slurm, "--namespace": namespace}
        for option, value in options.items():
            if value:
                raise UserError(f"{option} is for a new sweep; {place.path} continues as it began")
    else:
        destination = TrialPlatform(kubernetes=namespace, context=context, slurm=slurm, profile=profile)
        definition = define(target, overrides or (), code, destination)
        place = SweepFolder(folder or RUNS / definition.name)
        place.record(definition)
    if detach:
        start_in_background(place)
        echo(f" {place.path}", mark="started", colour="green")
        echo(f"  tandem compare {shlex.quote(str(place.path))}")
        return
    if not _drive(place):
        echo(f"stopped; to continue: tandem sweep {shlex.quote(str(place.path))}")
        raise typer.Exit(INTERRUPTED)


def _drive(place: SweepFolder) -> bool:
    """Drive a sweep, and print what happens and its result; returns whether it is complete."""
    definition = place.definition()
    client = _client_for(definition.destination)
    with place.locked():
        driver = Driver(definition, place, client, _print)
        with _interrupting(driver.interrupt):
            is_complete = driver.run()
        console = PrintableConsole(highlight=False)
        if not console.is_terminal:
            console.width = UNBOUNDED
        console.print()
        console.print(trial_table(driver.trials, driver.metric, driver.goal, is_running=False))
        console.print()
        best = driver.best
        if best is None or best.score is None:
            if is_complete:
                raise UserError(f"no trial of {definition.name} has a score")
            return False
        value = score(driver.metric, best.score)
        echo(f" trial {best.number}, {metric_name(driver.metric)} {value}", mark="best", colour="green")
        if is_complete:
            echo(f"  job      {write_manifest(best, definition, place)}")
            echo(f"  run      {best.run if client.is_on_kubernetes else place.run_dir(best.run)}")
            try:
                echo(f"  weights  {export_weights(best, place, client)}")
            except UserError as error:
                echo(f"  weights  not exported: {error}")
        return is_complete


def _print(text: str, mood: Literal["", "good", "bad"]) -> None:
    echo("" if mood else text, mark=text if mood else "", colour=COLOURS[mood])


@contextmanager
def _interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call a function at the first signal that would end this process; the second one ends it."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}

    def handle(number: int, frame: object) -> None:
        for signum in signals:
            signal.signal(signum, before[signum])
        interrupt()

    for signum in signals:
        signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum in signals:
            signal.signal(signum, before[signum])


def _client_for(destination: TrialPlatform) -> Client:
    """The place to which the trials of a sweep go."""
    slurm = destination.profile or True if destination.slurm else False
    return Client(kubernetes=destination.kubernetes, context=destination.context, slurm=slurm)
