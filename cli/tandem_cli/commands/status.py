"""`tandem status [NAME]`: the status of a run of this machine or of jobs on a cluster."""

import json
import shutil
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.wire.status import Snapshot
from tandem_cli.checkpoints.listing import plain
from tandem_cli.cluster import INTERRUPTED, ContextOption, NamespaceOption
from tandem_cli.commands.ls import ls
from tandem_cli.kubernetes.job_view import fetch_jobs
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NoClusterError
from tandem_cli.kubernetes.platform import OnKubernetes
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.platforms import PlatformError, Run, RunNotFoundError
from tandem_cli.runs import completed, find_run
from tandem_cli.terminal import tables
from tandem_cli.terminal.tables import job_record, view_record
from tandem_cli.view import JobSummary, JobView
from tandem_launcher.terminal.canvas import Canvas, PrintableConsole, can_draw
from tandem_launcher.terminal.screen import Scene, state_line

WATCH_SECONDS = 2.0
"""Poll interval, in seconds. Step and loss change every ten seconds, everything else immediately."""
EVENTS_SECONDS = 10.0
"""Poll interval of the events, in seconds; each poll fetches those of the whole namespace."""


def status(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A run of this machine, by its name or folder; the URL of one in a bucket; else a job on a cluster. "
            "Without it: all jobs there; if kubectl has no cluster configured, all runs of this machine.",
            show_default=False,
            autocompletion=completed,
        ),
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch until it ends. Exit code 0 if it is complete, otherwise 1.")
    ] = False,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the jobs of all namespaces.")
    ] = False,
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Show the status of a local run or a job on a cluster; without NAME a row for each.

    Shows progress, loss and scores, the nodes and states of its processes, and the last events. For a cluster it needs
    kubectl, and uses its configuration. If kubectl has no cluster configured, a call without NAME lists the runs of
    this machine, as `tandem ls` does.
    """
    if name and everywhere:
        raise UserError("give a NAME or --all-namespaces, not both; select the job's namespace with --namespace")
    if watch and not name:
        raise UserError("--watch follows one job: give its NAME; for all of them: kubectl get dtj --watch")
    if watch and output.is_data:
        raise UserError(f"-o {output.value} prints the current status; omit --watch, or call it repeatedly")
    console = PrintableConsole(highlight=False)
    width = console.width if console.is_terminal and output is not Output.WIDE else None
    if name:
        run = find_run(name, namespace, context)
        view = run.view()
        if watch:
            raise typer.Exit(_watch(run, view, console))
        if output.is_data:
            emit(view_record(view), output)
        else:
            _print(console, tables.job_lines(view, width, time.time()))
            if "/" not in name and not isinstance(run, OnKubernetes) and shutil.which("kubectl"):
                echo(f"this is a local run; for a job on a cluster: tandem status {name} -n NAMESPACE", err=True)
        return
    names_cluster = bool(everywhere or namespace or context)
    if not names_cluster and shutil.which("kubectl") is None:
        ls(output=output)
        return
    kubectl = Kubectl(namespace, context)
    try:
        jobs = fetch_jobs(kubectl, everywhere)
    except NoClusterError:
        if names_cluster:
            raise
        ls(output=output)
        return
    except ClusterError as error:
        raise UserError(f"{error}. Without a NAME it shows jobs on a cluster; local runs: tandem ls") from error
    if output.is_data:
        emit([job_record(job) for job in jobs], output)
    elif jobs:
        _print(console, tables.jobs(jobs, width, time.time(), everywhere))
    else:
        place = "any namespace" if everywhere else namespace or "this namespace"
        echo(f"no jobs in {place}; submit one with: tandem submit FILE{kubectl.options()}", err=True)


def _watch(run: Run, view: JobView, console: Console) -> int:
    """Show the status until the run ends or is deleted, or Ctrl-C; return the exit code.

    If the cluster does not answer for a while, it keeps trying.
    """
    notice, events_at = "", time.monotonic()
    show, close = _screen(console, run.on_leaving) if can_draw(console) else _line_display(console)
    try:
        while True:
            show(view, notice)
            if run.is_over(view):
                break
            time.sleep(WATCH_SECONDS)
            with_events = time.monotonic() - events_at >= EVENTS_SECONDS
            try:
                view, notice = _poll(run, view, with_events), ""
            except RunNotFoundError:
                close()
                echo(f"{view.job.name} was deleted", err=True)
                return 1
            except PlatformError as error:
                notice = f"trying again: {printable(str(error)).splitlines()[0]}"
                continue
            events_at = time.monotonic() if with_events else events_at
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        close()
    _print(console, tables.job_lines(view, console.width if console.is_terminal else None, time.time()))
    return 0 if view.job.status.phase == "Succeeded" else 1


def _poll(run: Run, before: JobView, with_events: bool) -> JobView:
    """Fetch the next view; the final one always includes the events."""
    view = run.view(None if with_events else before.job_events)
    return run.view() if run.is_over(view) and not with_events else view


Show = Callable[[JobView, str], None]


def _screen(console: Console, hint: str) -> tuple[Show, Callable[[], None]]:
    canvas = Canvas(console)

    def show(view: JobView, notice: str) -> None:
        columns, rows = canvas.size
        lines = tables.job_lines(view, columns, time.time())
        foot = Text(notice or hint, "yellow" if notice else "dim")
        canvas.draw(Group(*lines[: max(1, rows - 2)], Text(), foot))

    return show, canvas.close


def _line_display(console: Console) -> tuple[Show, Callable[[], None]]:
    last = ""

    def show(view: JobView, notice: str) -> None:
        nonlocal last
        now = time.time()
        line = _line(view.job, notice or tables.message_of(view.job, now), now)
        if (news := line.partition(" ")[2]) != last:
            last = news
            print(line, file=console.file, flush=True)

    return show, lambda: None


def _line(job: JobSummary, message: str, now: float) -> str:
    if job.status.progress is not None:
        snapshot = Snapshot(job=job.name, time=now, status=job.status)
        return state_line(Scene(job=job.name, run_dir="", snapshot=snapshot, notice=message), now)
    waits = f" waiting={json.dumps(plain(message), ensure_ascii=False)}" if message else ""
    return f"time={time.strftime('%H:%M:%S', time.localtime(now))} phase={job.status.phase}{waits}"


def _print(console: Console, lines: Any) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
