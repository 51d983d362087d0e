"""`tandem debug JOB [RANK]`: the current stacks of a run's ranks, or a debugger on one of them."""

import json
import shlex
import textwrap
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from tandem.errors import UserError
from tandem.formatting import count_noun, duration
from tandem.wire.stacks import Attachment, Frame, Inspection, RankStacks, ThreadStack
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import TargetArgument, find_run
from tandem_launcher.terminal.canvas import PrintableConsole

UNBOUNDED = 100_000
"""Width that no line exceeds, in characters."""
MAX_LISTED = 16
"""Number of ranks that an error lists."""
HOST = "127.0.0.1"
_NONE_RUNNING = "no rank of {} is running: its workers are starting or restarting; try again"


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
    """Print the current stacks of the ranks of a run; training continues.

    With RANK it prints the stacks of all threads of that rank, the innermost call last. On a cluster it runs
    `kubectl exec` in the pods of the job's workers.

    With --attach it asks the rank to listen for a Python debugger, and prints a configuration for VS Code. On a cluster
    it also forwards the port from the pod until Ctrl-C. While a debugger is attached, the job does not count as hung.
    """  # fmt: skip
    if attach and rank is None:
        raise UserError(f"--attach needs the number of a rank: tandem debug {shlex.quote(name)} 0 --attach")
    run = find_run(name, namespace, context)
    inspection = run.inspect(rank)
    if rank is None:
        if not inspection.ranks:
            raise UserError(_NONE_RUNNING.format(name))
        _print_all(inspection, output)
        return
    stacks = _rank_of(inspection, name, rank)
    if attach:
        raise typer.Exit(run.attach(stacks, lambda attachment: _print_attachment(attachment, name, output)))
    if output.is_data:
        emit(stacks.dump(), output)
    else:
        echo(format_stacks(stacks))


def _rank_of(inspection: Inspection, name: str, rank: int) -> RankStacks:
    if not inspection.ranks:
        raise UserError(_NONE_RUNNING.format(name))
    stacks = next((stacks for stacks in inspection.ranks if stacks.rank == rank), None)
    if stacks is None:
        raise UserError(f"{name} has no rank {rank}; there {_existing_ranks(inspection)}")
    return stacks


def _print_attachment(attachment: Attachment, name: str, output: Output) -> None:
    if attachment.port is None:
        raise UserError(
            f"no debugger can attach to rank {attachment.rank} ({attachment.replica}): {attachment.trouble}"
        )
    if output.is_data:
        emit(attachment.dump(), output)
    else:
        echo(how_to_attach(attachment, name))


def how_to_attach(attachment: Attachment, name: str) -> str:
    """Return the instructions to attach a debugger; pure."""
    configuration = {
        "name": f"{name}, rank {attachment.rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": HOST, "port": attachment.port},
        "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": attachment.folder}],
        "justMyCode": False,
    }
    return "\n".join(
        (
            f"rank {attachment.rank} · {attachment.replica} · process {attachment.pid} listens for a debugger on "
            f"{HOST}:{attachment.port}",
            "",
            "VS Code: put this into `configurations` of .vscode/launch.json, set a breakpoint, and start it (F5).",
            "",
            textwrap.indent(json.dumps(configuration, indent=2), "  "),
            "",
            "Any other client of the Debug Adapter Protocol can attach to that address.",
            "Training continues until a breakpoint is reached, and when you disconnect (Shift+F5). While a debugger",
            "is attached, the job does not count as hung. After a restart of the rank, run this command again.",
        )
    )


def _existing_ranks(inspection: Inspection) -> str:
    numbers = [stacks.rank for stacks in inspection.ranks]
    if numbers == list(range(len(numbers))) and len(numbers) > 2:
        return f"are the ranks 0 to {numbers[-1]}"
    ranks = ", ".join(map(str, numbers[:MAX_LISTED])) + (", …" if len(numbers) > MAX_LISTED else "")
    return f"is the rank {ranks}" if len(numbers) == 1 else f"are the ranks {ranks}"


def format_stacks(stacks: RankStacks) -> str:
    """Format the stacks of all threads of a rank; pure."""
    head = [f"rank {stacks.rank}", stacks.replica, f"process {stacks.pid}", _progress(stacks)]
    lines = [" · ".join(part for part in head if part)]
    if stacks.trouble:
        lines += ["", f"no stacks: {stacks.trouble}"]
    silent = 0
    for thread in stacks.threads:
        if thread.frames:
            lines += ["", _heading(stacks, thread), *(_call(frame) for frame in thread.frames)]
        elif stacks.trouble:
            lines += ["", _heading(stacks, thread)]
        else:
            silent += 1
    if silent:
        lines += ["", f"{count_noun(silent, 'thread')} without Python code"]
    return "\n".join(lines)


def _heading(stacks: RankStacks, thread: ThreadStack) -> str:
    name = "main thread" if thread.number == stacks.pid else f"thread {thread.name}"
    state = thread.state.partition("(")[2].rstrip(")") or thread.state
    waits = f", in the kernel's {thread.waits_in}" if thread.waits_in not in ("", "0") else ""
    return f"{name} ({thread.number}), {state}{waits}"


def _call(frame: Frame) -> str:
    return f'  File "{frame.file}", line {frame.line}, in {frame.function}'


def _progress(stacks: RankStacks) -> str:
    if stacks.step is None:
        return "a script that does not report its steps" if stacks.phase else ""
    since = "" if stacks.silent_seconds is None else f", {duration(stacks.silent_seconds)} ago"
    return f"step {stacks.step:,} · {stacks.phase}{since}"


def _print_all(inspection: Inspection, output: Output) -> None:
    if output.is_data:
        emit(inspection.dump(), output)
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
    for stacks in inspection.ranks:
        cells = (
            str(stacks.rank),
            "–" if stacks.step is None else f"{stacks.step:,}",
            stacks.replica,
            stacks.phase or "–",
        )
        table.add_row(*(Text(cell) for cell in (*cells, _place(stacks, output is Output.WIDE))))
    console.print(table)


def _place(stacks: RankStacks, is_wide: bool) -> str:
    """Return the innermost call of the main thread."""
    frames = stacks.threads[0].frames if stacks.threads else []
    if not frames:
        return stacks.trouble or "no Python code"
    file = frames[-1].file if is_wide else "/".join(frames[-1].file.rsplit("/", 2)[-2:])
    return f"{frames[-1].function} ({file}:{frames[-1].line})"
