"""`tandem debug JOB [RANK]`: what the threads of a run's ranks do at this moment; and a debugger on one of them."""

import json
import shlex
import textwrap
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from tandem.errors import UserError
from tandem.formatting import duration, several
from tandem.stacks import Attachment, Frame, Inspection, RankStacks, ThreadStack
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import TargetArgument, found
from tandem_cli.terminal.canvas import PrintableConsole

UNBOUNDED = 100_000
"""Characters of a line that no terminal cuts."""
MAX_LISTED = 16
"""Ranks that are named one by one."""
HOST = "127.0.0.1"
_NONE_RUNNING = "no rank of {} is running now: its workers are starting or restarting; try again"


def debug(
    name: TargetArgument,
    rank: Annotated[
        int | None,
        typer.Argument(
            metavar="RANK",
            min=0,
            help="Print all threads of this rank. Default: one line for each rank.",
            show_default=False,
        ),
    ] = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Let a Python debugger (debugpy) attach to this rank, and print how.")
    ] = False,
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Print where the ranks of a run are in their code at this moment; training continues.

    With RANK it prints the stacks of all threads of that rank, the innermost call last. On a cluster it runs
    `kubectl exec` in the pods of the job's workers.

    With --attach it asks the rank to listen for a Python debugger, and prints a configuration for VS Code. On a cluster
    it also forwards the port from the pod until Ctrl-C. While a debugger is attached, the job does not count as hung.
    """  # fmt: skip
    if attach and rank is None:
        raise UserError(f"--attach needs the number of a rank: tandem debug {shlex.quote(name)} 0 --attach")
    run = found(name, namespace, context)
    inspection = run.inspect(rank)
    if rank is None:
        if not inspection.ranks:
            raise UserError(_NONE_RUNNING.format(name))
        _print_all(inspection, output)
        return
    one = _rank_of(inspection, name, rank)
    if attach:
        raise typer.Exit(run.attach(one, lambda attachment: _print_attachment(attachment, name, output)))
    if output.is_data:
        emit(one.dump(), output)
    else:
        echo(told(one))


def _rank_of(found: Inspection, name: str, rank: int) -> RankStacks:
    if not found.ranks:
        raise UserError(_NONE_RUNNING.format(name))
    one = next((one for one in found.ranks if one.rank == rank), None)
    if one is None:
        raise UserError(f"{name} has no rank {rank}; there {_there(found)}")
    return one


def _print_attachment(found: Attachment, name: str, output: Output) -> None:
    if found.port is None:
        raise UserError(f"no debugger can attach to rank {found.rank} ({found.replica}): {found.trouble}")
    if output.is_data:
        emit(found.dump(), output)
    else:
        echo(how_to_attach(found, name))


def how_to_attach(found: Attachment, name: str) -> str:
    """What the user does next; pure."""
    configuration = {
        "name": f"{name}, rank {found.rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": HOST, "port": found.port},
        "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": found.folder}],
        "justMyCode": False,
    }
    return "\n".join(
        (
            f"rank {found.rank} · {found.replica} · process {found.pid} listens for a debugger on {HOST}:{found.port}",
            "",
            "VS Code: put this into `configurations` of .vscode/launch.json, set a breakpoint, and start it (F5).",
            "",
            textwrap.indent(json.dumps(configuration, indent=2), "  "),
            "",
            "Any other client of the Debug Adapter Protocol attaches to that address.",
            "Training goes on until a breakpoint is reached, and again when you disconnect (Shift+F5). While a",
            "debugger is attached, the job does not count as hung. A rank that restarts has to be asked again.",
        )
    )


def _there(found: Inspection) -> str:
    numbers = [one.rank for one in found.ranks]
    if numbers == list(range(len(numbers))) and len(numbers) > 2:
        return f"are the ranks 0 to {numbers[-1]}"
    some = ", ".join(map(str, numbers[:MAX_LISTED])) + (", …" if len(numbers) > MAX_LISTED else "")
    return f"is the rank {some}" if len(numbers) == 1 else f"are the ranks {some}"


def told(one: RankStacks) -> str:
    """All threads of a rank as text; pure."""
    head = [f"rank {one.rank}", one.replica, f"process {one.pid}", _progress(one)]
    lines = [" · ".join(part for part in head if part)]
    if one.trouble:
        lines += ["", f"no stacks: {one.trouble}"]
    silent = 0
    for thread in one.threads:
        if thread.frames:
            lines += ["", _heading(one, thread), *(_call(frame) for frame in thread.frames)]
        elif one.trouble:
            lines += ["", _heading(one, thread)]
        else:
            silent += 1
    if silent:
        lines += ["", f"{several(silent, 'thread')} without Python code"]
    return "\n".join(lines)


def _heading(one: RankStacks, thread: ThreadStack) -> str:
    name = "main thread" if thread.number == one.pid else f"thread {thread.name}"
    state = thread.state.partition("(")[2].rstrip(")") or thread.state
    waits = f", in the kernel's {thread.waits_in}" if thread.waits_in not in ("", "0") else ""
    return f"{name} ({thread.number}), {state}{waits}"


def _call(frame: Frame) -> str:
    return f'  File "{frame.file}", line {frame.line}, in {frame.function}'


def _progress(one: RankStacks) -> str:
    if one.step is None:
        return "a script that does not report its steps" if one.phase else ""
    since = "" if one.silent_seconds is None else f", {duration(one.silent_seconds)} ago"
    return f"step {one.step:,} · {one.phase}{since}"


def _print_all(found: Inspection, output: Output) -> None:
    if output.is_data:
        emit(found.dump(), output)
        return
    console = PrintableConsole(highlight=False)
    if not console.is_terminal or output is Output.WIDE:
        console.width = UNBOUNDED
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("RANK", "STEP"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("WORKER", "PHASE"):
        table.add_column(title, no_wrap=True)
    table.add_column("MAIN THREAD", overflow="fold")
    for one in found.ranks:
        cells = (str(one.rank), "–" if one.step is None else f"{one.step:,}", one.replica, one.phase or "–")
        table.add_row(*(Text(cell) for cell in (*cells, _place(one, output is Output.WIDE))))
    console.print(table)


def _place(one: RankStacks, whole: bool) -> str:
    """The innermost call of the main thread."""
    frames = one.threads[0].frames if one.threads else []
    if not frames:
        return one.trouble or "no Python code"
    file = frames[-1].file if whole else "/".join(frames[-1].file.rsplit("/", 2)[-2:])
    return f"{frames[-1].function} ({file}:{frames[-1].line})"
