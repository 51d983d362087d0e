"""The process that sends traces to an OTLP collector: `python -m tandem_coordinator.tracing [--once]`.

It follows the run directory as the one for MLflow does (tandem_coordinator.tracking), and is started if the standard
variables of OpenTelemetry name a collector. What is folded from the logs needs no queue: where the collector is away
for an hour, the logs are read afterwards. Ids of spans follow from the run, so nothing is sent under two names; which
were sent is noted in the run directory, so that a coordinator that restarts does not send all of them again.

A span is sent when it is complete: those of a change when its first step has come, a save or an evaluation when it is
over, training when its generation is closed.

Standard output has one JSON object per line for the parent: `failing` is the reason why the collector lacks something,
and is empty otherwise. The process ends with its parent, whose end closes standard input.
"""

import argparse
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tandem.formatting import one_line
from tandem.job.tracking import OTLP_ENDPOINT, without_password
from tandem.processes.distribution import install_command, version
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR
from tandem.rundir.layout import RunDir
from tandem.rundir.timeline import TimelineReader
from tandem.wire.trace import Span, Trace, identified, root_id, traces

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", OTLP_ENDPOINT)
"""Variables that name a collector; the first one that is set counts."""
POLL_SECONDS = 5.0
"""Time between two polls of the run directory, in seconds."""
TIMEOUT_SECONDS = 10.0
"""Time limit of a request, with the exporter's own attempts, in seconds."""
MAX_RETRY_SECONDS = 60.0
"""Maximum time between two attempts, in seconds; the first ones are 1, 2, 4, … seconds."""
FINAL_SECONDS = 10.0
"""Time to send what remains after SIGTERM, in seconds."""
BATCH = 200
"""Maximum number of spans in a request."""
NICENESS = 10
"""Nice value: training has priority."""
MAX_PROBLEM_LENGTH = 200
SENT_FILE = "sent-spans.txt"
"""File in the run directory's folder `tracking` with the ids of the spans that the collector has, one a line."""


def collector(variables: Mapping[str, str]) -> str:
    """The address of the collector; empty if none is named."""
    return next((variables[name] for name in ENDPOINTS if variables.get(name)), "")


class SpanSender:
    """Sends what is complete and has not been sent.

    Args:
        notes: whether to note in the run directory what was sent, and to leave out what is noted there.
    """

    def __init__(self, rundir: RunDir, notes: bool) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._reader = TimelineReader(rundir)
        self._exporter = OTLPSpanExporter(timeout=TIMEOUT_SECONDS)
        self._problem = _LastWarning()
        # The exporter returns no reason.
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._problem)
        logger.propagate = False
        self._file = rundir.tracking / SENT_FILE if notes else None
        self._sent = set(self._noted())
        self._resource: Resource = Resource.create({"service.name": "tandem", "service.version": version()})

    def send(self) -> int:
        """Send what is complete and new; returns the number of spans.

        Raises:
            ConnectionError: the collector did not take everything; the message says why.
        """
        timeline = self._reader.read()
        pending = [
            (identity, readable(trace, identity, span, timeline.name, self._resource))
            for trace in traces(timeline)
            for identity, span in complete_spans(trace, timeline.is_over)
            if identity not in self._sent
        ]
        for first in range(0, len(pending), BATCH):
            self._export(pending[first : first + BATCH])
        return len(pending)

    def _export(self, batch: Sequence[tuple[str, "ReadableSpan"]]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._problem.text = ""
        if self._exporter.export([span for _, span in batch]) is not SpanExportResult.SUCCESS:
            # The exporter has tried for TIMEOUT_SECONDS, and reports each attempt.
            problem = self._problem.text
            raise ConnectionError("it does not answer" if not problem or "max retries" in problem else problem)
        names = [identity for identity, _ in batch]
        self._sent.update(names)
        if self._file is not None:
            # A disk that is full costs at most that spans are sent again after a restart, under the same ids.
            with suppress(OSError):
                self._file.parent.mkdir(exist_ok=True)
                with self._file.open("a") as file:
                    file.write("".join(f"{name}\n" for name in names))

    def _noted(self) -> list[str]:
        if self._file is None:
            return []
        try:
            return self._file.read_text(errors="replace").split()
        except OSError:
            return []


def complete_spans(trace: Trace, is_over: bool) -> Iterator[tuple[str, Span]]:
    """Generate the complete spans of a trace, each with its id; first the change as a whole.

    Args:
        is_over: the run has ended, so everything is complete.
    """
    is_complete = trace.is_complete or is_over
    if is_complete:
        facts = {"change.detail": trace.detail, "change.without": trace.without}
        yield root_id(trace), Span(trace.kind, trace.begin, trace.end, attributes=facts)
    for index, (identity, span) in enumerate(identified(trace)):
        is_over_by_itself = index >= len(trace.spans) and span.name != "training"
        has_ended = is_complete if index < len(trace.spans) else is_over_by_itself or trace.is_closed or is_over
        if has_ended:
            yield identity, span


def readable(trace: Trace, identity: str, span: Span, job: str, resource: "Resource") -> "ReadableSpan":
    """Convert a span to that of the exporter. All spans have that of the change as parent; training, saves and
    evaluations follow it.

    Args:
        job: name of the job.
    """
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    def context(identity: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace.trace_id, 16), int(identity, 16), is_remote=False, trace_flags=flags)

    root = root_id(trace)
    values = {"job.name": job, "generation": trace.generation, "change.reason": trace.reason, **span.attributes}
    is_failure = identity == root and trace.kind in ("failure", "end")
    return ReadableSpan(
        name=span.name,
        context=context(identity),
        parent=None if identity == root else context(root),
        resource=resource,
        attributes={f"tandem.{name}": value for name, value in values.items()},
        status=Status(StatusCode.ERROR, trace.detail or trace.reason) if is_failure else Status(StatusCode.UNSET),
        start_time=round(span.begin * 1e9),
        end_time=round(span.end * 1e9),
        instrumentation_scope=InstrumentationScope("tandem", version()),
    )


class _LastWarning(logging.Handler):
    """Remembers the last warning of the exporter."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = one_line(record.getMessage())[:MAX_PROBLEM_LENGTH]


def main() -> None:
    """Send until SIGTERM, or the end of the parent."""
    parser = argparse.ArgumentParser(prog="python -m tandem_coordinator.tracing", description="Send traces by OTLP.")
    parser.add_argument("--once", action="store_true", help="send everything now, and leave")
    args = parser.parse_args()
    os.nice(NICENESS)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if not args.once:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    code = _send_once(RunDir(os.environ[RUN_DIR])) if args.once else _serve(RunDir(os.environ[RUN_DIR]), stop)
    sys.stdout.flush()
    os._exit(code)


def _send_once(rundir: RunDir) -> ExitCode:
    if missing := _missing():
        return _fail(missing)
    try:
        count = SpanSender(rundir, notes=False).send()
    except (ConnectionError, ValueError) as error:
        _report(f"{without_password(collector(os.environ))}: {error}")
        return ExitCode.FAILED
    _report("", sent=count)
    return ExitCode.DONE


def _serve(rundir: RunDir, stop: threading.Event) -> ExitCode:
    if missing := _missing():
        return _fail(missing)
    sender, failures, deadline = SpanSender(rundir, notes=True), 0, None
    while True:
        is_leaving = stop.is_set()
        if is_leaving and deadline is None:
            deadline = time.monotonic() + FINAL_SECONDS
        try:
            sender.send()
        except (ConnectionError, OSError, ValueError) as error:
            failures += 1
            _report(f"{without_password(collector(os.environ))}: {error}")
        else:
            failures = 0
            _report("")
            if is_leaving:
                return ExitCode.DONE
        if deadline is not None and time.monotonic() + 1.0 > deadline:
            return ExitCode.FAILED
        pause = min(MAX_RETRY_SECONDS, 2.0 ** (failures - 1)) if failures else POLL_SECONDS
        if is_leaving:
            time.sleep(1.0)
        else:
            stop.wait(pause)


def _missing() -> str:
    try:
        module = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        module = None
    if module is None:
        return f"the OTLP exporter is not installed where the coordinator runs ({install_command('otel')})"
    return ""


def _exit_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(ExitCode.FAILED)


def _fail(problem: str) -> ExitCode:
    _report(problem)
    return ExitCode.CONFIGURATION


def _report(problem: str, **facts: int) -> None:
    """Report the problem to the parent; empty if there is none."""
    print(json.dumps({"failing": problem, **facts}), flush=True)


if __name__ == "__main__":
    main()
