"""`tandem status [NAME]`: how the jobs of a cluster get on."""

import json
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from tandem.checkpoints.columns import plain
from tandem.cli.cluster import INTERRUPTED, ContextOption, NamespaceOption, named
from tandem.cli.echo import echo, echo_json
from tandem.cluster import picture
from tandem.cluster.complaint import ClusterError, NotFound
from tandem.cluster.kubectl import Kubectl
from tandem.cluster.records import job_record, sight_record
from tandem.cluster.sight import JobSight, Sight, ask_jobs, look
from tandem.mistake import UserError
from tandem.printable import printable
from tandem.snapshot import Snapshot
from tandem.view.canvas import Canvas, can_draw
from tandem.view.console import PrintableConsole
from tandem.view.lines import state_line
from tandem.view.scene import Scene

WATCH_SECONDS = 2.0
"""Between two looks. Step and loss are written every ten seconds, everything else at once."""
EVENTS_SECONDS = 10.0
"""Between two looks at the events, which are those of the whole namespace."""


class Output(StrEnum):
    """How it is written."""

    TEXT = "text"
    JSON = "json"


def status(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A job; all of the namespace unless given.", show_default=False)
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until the job ends; exit code 1 if it fails.")
    ] = False,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Text for people, JSON for programs.")] = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Say how jobs on a cluster get on: one row for each, or everything about one.

    Progress, loss and scores, where its pods are and what keeps them from running, what happened last. Needs kubectl,
    and uses what is set up for it.
    """
    kubectl, name = Kubectl(namespace, context), named(name) if name else ""
    if name and everywhere:
        raise UserError("give a NAME or --all-namespaces, not both; where the job is, says --namespace")
    if watch and not name:
        raise UserError("--watch follows one job: give its NAME; for all of them: kubectl get dtj --watch")
    if watch and output is Output.JSON:
        raise UserError("-o json says how it is now; leave --watch out, or call it again and again")
    console = PrintableConsole(highlight=False)
    width = console.width if console.is_terminal else None
    if watch:
        raise typer.Exit(_watched(kubectl, name, console))
    if name:
        sight = look(kubectl, name)
        if output is Output.JSON:
            echo_json(sight_record(sight))
        else:
            _print(console, picture.picture(sight, width, time.time()))
        return
    found = ask_jobs(kubectl, everywhere)
    if output is Output.JSON:
        echo_json([job_record(job) for job in found])
    elif found:
        _print(console, picture.jobs(found, width, time.time(), everywhere))
    else:
        where = "any namespace" if everywhere else namespace or "this namespace"
        echo(f"no jobs in {where}; give it one with: tandem submit FILE{kubectl.options()}", err=True)


def _watched(kubectl: Kubectl, name: str, console: Console) -> int:
    """Until the job ends, is deleted, or Ctrl-C. A cluster that is away for a while is waited for."""
    sight, notice, events_at = look(kubectl, name), "", time.monotonic()
    show, close = _drawn(console) if can_draw(console) else _written(console)
    try:
        while True:
            show(sight, notice)
            if sight.job.ended:
                break
            time.sleep(WATCH_SECONDS)
            with_events = time.monotonic() - events_at >= EVENTS_SECONDS
            try:
                sight, notice = _look_again(kubectl, sight, with_events), ""
            except NotFound:
                close()
                echo(f"{name} was deleted", err=True)
                return 1
            except ClusterError as error:
                notice = f"trying again: {printable(str(error)).splitlines()[0]}"
                continue
            events_at = time.monotonic() if with_events else events_at
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        close()
    _print(console, picture.picture(sight, console.width if console.is_terminal else None, time.time()))
    return 0 if sight.job.status.phase == "Succeeded" else 1


def _look_again(kubectl: Kubectl, before: Sight, with_events: bool) -> Sight:
    """The next look; the last one has everything."""
    sight = look(kubectl, before.job.name, None if with_events else before.happenings)
    return look(kubectl, before.job.name) if sight.job.ended and not with_events else sight


Show = Callable[[Sight, str], None]


def _drawn(console: Console) -> tuple[Show, Callable[[], None]]:
    canvas = Canvas(console)

    def show(sight: Sight, notice: str) -> None:
        columns, rows = canvas.size
        lines = picture.picture(sight, columns, time.time())
        foot = Text(notice or "Ctrl-C leaves; the job goes on", "yellow" if notice else "dim")
        canvas.draw(Group(*lines[: max(1, rows - 2)], Text(), foot))

    return show, canvas.close


def _written(console: Console) -> tuple[Show, Callable[[], None]]:
    last = ""

    def show(sight: Sight, notice: str) -> None:
        nonlocal last
        now = time.time()
        line = _line(sight.job, notice or picture.message_of(sight.job, now), now)
        if (news := line.partition(" ")[2]) != last:
            last = news
            print(line, file=console.file, flush=True)

    return show, lambda: None


def _line(job: JobSight, message: str, now: float) -> str:
    if job.status.progress is not None:
        snapshot = Snapshot(job=job.name, time=now, status=job.status)
        return state_line(Scene(job=job.name, run_dir="", snapshot=snapshot, notice=message), now)
    waits = f" waiting={json.dumps(plain(message), ensure_ascii=False)}" if message else ""
    return f"time={time.strftime('%H:%M:%S', time.localtime(now))} phase={job.status.phase}{waits}"


def _print(console: Console, lines: Any) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
