"""`tandem trace RUN`: where the time of a failure, a change or a start went."""

import json
import os
import re
import subprocess
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.text import Text

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.job.tracking import OTLP_ENDPOINT
from tandem.processes.launch import RUN_DIR, module_command
from tandem.rundir.layout import RunDir
from tandem.rundir.timeline import TimelineReader
from tandem.wire.trace import Span, Trace, identified, last_failure, root_id, traces
from tandem_cli.cluster import ContextOption, NamespaceOption
from tandem_cli.kubernetes.pod_spans import pod_spans
from tandem_cli.output import Output, OutputOption, echo, emit
from tandem_cli.runs import RunArgument, find_run, open_run
from tandem_cli.terminal.waterfall import waterfall
from tandem_launcher.terminal.canvas import PrintableConsole


def trace(
    run: RunArgument,
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation", "-g", metavar="N", help="The change that led to this generation.", show_default=False
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="N", min=1, help="The last N changes, of any kind.", show_default=False),
    ] = None,
    otlp: Annotated[
        str,
        typer.Option("--otlp", metavar="URL", help="Send all traces to this collector.", show_default=False),
    ] = "",
    output: OutputOption = Output.TEXT,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
) -> None:
    """Show where the time of the last failure went, from the last step before it to the first step after it: detection,
    stop, decision, rendezvous, restore, first step. The spans add up to the outage.

    Without a failure, it shows the start. The run may be running, complete or killed. With `--namespace` or
    `--context`, the command first copies the results of that job to runs/NAME, without checkpoints.
    """
    if generation is not None and last is not None:
        raise UserError("give either --generation or --last")
    pods: list[Span] = []
    if namespace or context:
        job = find_run(str(run), namespace, context)
        rundir, pods = job.run_dir(), pod_spans(job.view().job_events)
    else:
        rundir = open_run(run)
    if otlp:
        _send(rundir, otlp)
        return
    reader = TimelineReader(rundir)
    timeline = reader.read()
    traced = traces(replace(timeline, work=(*timeline.work, *pods)))
    chosen, remark = _chosen(traced, generation, last)
    if output.is_data:
        emit({"traces": [record(item) for item in chosen], "faults": reader.faults}, output)
        return
    console = PrintableConsole(highlight=False)
    width = console.width if console.is_terminal and output is not Output.WIDE else None
    for index, item in enumerate(chosen):
        for line in [*([Text()] if index else []), *waterfall(item, width)]:
            console.print(line, soft_wrap=True)
    for sentence in [*([remark] if remark else []), *reader.faults]:
        echo(sentence, err=True)


def _send(rundir: RunDir, url: str) -> None:
    """Send all traces to a collector, as the coordinator does while the run goes on."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise UserError(f"--otlp takes the URL of a collector, such as http://localhost:4318, not {url}")
    variables = {name: value for name, value in os.environ.items() if name != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}
    variables |= {OTLP_ENDPOINT: url, RUN_DIR: str(rundir.path.resolve())}
    command = module_command("tandem_coordinator.tracing", "--once")
    done = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    result: dict[str, Any] = (
        json.loads(lines[-1]) if lines else {"failing": f"it ended with exit code {done.returncode}"}
    )
    if result["failing"]:
        raise UserError(f"the traces were not sent: {result['failing']}")
    echo(f"sent {count_noun(result['sent'], 'span')} to {url}")


def _chosen(traced: list[Trace], generation: int | None, last: int | None) -> tuple[list[Trace], str]:
    """Choose the traces to show; returns a remark, too."""
    if not traced:
        raise UserError("there is nothing to trace yet: the run has no generation")
    if last is not None:
        return traced[-last:], ""
    if generation is not None:
        if chosen := [item for item in traced if item.first_generation <= generation <= item.generation]:
            return chosen, ""
        newest = traced[-1].generation
        raise UserError(f"the run has no generation {generation}; its newest is {newest}")
    failure = last_failure(traced)
    if failure is not None:
        return [failure], ""
    changes = len(traced) - 1
    planned = f"; {count_noun(changes, 'planned change')}: `--last {len(traced)}` shows all" if changes else ""
    return [traced[0]], f"nothing has failed in this run, so this is its start{planned}"


def record(item: Trace) -> dict[str, Any]:
    """The JSON form of a trace. Times are seconds since the epoch."""
    spans = [_span(identity, span) for identity, span in identified(item)]
    return {
        "traceId": item.trace_id,
        "rootSpanId": root_id(item),
        "generation": item.generation,
        "kind": item.kind,
        "reason": item.reason,
        "detail": item.detail,
        "begin": item.begin,
        "end": item.end,
        "seconds": item.seconds,
        "without": item.without,
        "complete": item.is_complete,
        "spans": spans[: len(item.spans)],
        "work": spans[len(item.spans) :],
        "notes": [*item.notes],
    }


def _span(identity: str, span: Span) -> dict[str, Any]:
    return {
        "spanId": identity,
        "name": span.name,
        "detail": span.detail,
        "begin": span.begin,
        "end": span.end,
        "seconds": span.seconds,
        "attributes": dict(span.attributes),
    }
