"""The waterfall of the last failure, or of the start where nothing failed: a bar for each span, below each other."""

from tandem.formatting import ascii_name, duration, share, truncate_end
from tandem.wire.measures import time_unit
from tandem.wire.trace import UNACCOUNTED, Span, Trace, last_failure, traces
from tandem_cli.report.run import RunData
from tandem_coordinator.charts.chart import Axis, Role, Viewport
from tandem_coordinator.charts.drawing import framed, line, rectangle, text, time_axis

COLORS: dict[str, Role] = {
    "unlogged steps": "alert",
    "detection": "alert",
    "start that failed": "alert",
    "stop of ranks": "other",
    "wait for workers": "other",
    "decision": "other",
    "start of processes": "gpu",
    "start of the script": "gpu",
    "rendezvous": "gpu",
    "model and data": "checkpoint",
    "restore": "checkpoint",
    "regroup": "checkpoint",
    "save": "checkpoint",
    "first step": "trainer",
    UNACCOUNTED: "muted",
}
"""Colours by the first name of a span; others are those of evaluators."""
MAX_OVERLAPPING = 8
"""Maximum number of spans that overlap the change."""
ROW, ROW_NARROW, BAR = 22.0, 36.0, 12.0
"""Pixels: height of a row, on a narrow screen with its label above the bar, and height of a bar."""
LABELS, NUMBERS = 240.0, 130.0
"""Widths of the columns of labels and of durations, in pixels."""
MAX_LABEL = 38
"""Maximum length of a label, in characters."""
MIN_BAR = 1.5
"""Width of the bar of the shortest span, in pixels."""


def select(run: RunData) -> Trace | None:
    """The trace that the report shows; None if there is none."""
    traced = traces(run.timeline)
    return last_failure(traced) or next(iter(traced), None)


def finding(trace: Trace) -> str:
    """Describe the trace in a sentence or two."""
    cause = trace.detail or trace.reason
    if trace.kind == "start":
        begin = f"The first {trace.without} came {duration(trace.seconds)} after the begin of the run."
    elif trace.kind == "end":
        begin = f"The job ended {duration(trace.seconds)} after its last step: {cause}."
    else:
        begin = f"Generation {trace.generation}: {duration(trace.seconds)} without a {trace.without}, because {cause}."
    longest = max(trace.spans, key=lambda span: span.seconds, default=None)
    longest_text = "" if longest is None else f" The longest part was {longest.name}: {duration(longest.seconds)}."
    return f"{begin}{longest_text}{''.join(f' Note: {note}.' for note in trace.notes)}"


def draw(name: str, title: str, description: str, run: RunData, style: Viewport) -> str | None:
    """Draw the waterfall as an SVG element. None if the run has no trace, or one without a duration.

    Args:
        name: prefix of the ids in it.
        title: title of the drawing.
        description: description for readers who cannot see it.
    """
    trace = select(run)
    if trace is None or not trace.spans:
        return None
    overlapping = [span for span in trace.overlapping if span.name != "training"][:MAX_OVERLAPPING]
    described = ", ".join(f"{span.name} {duration(span.seconds)}" for span in trace.spans)
    parts: list[str] = []
    y = 6.0
    for index, span in enumerate([*trace.spans, *overlapping]):
        if index == len(trace.spans):
            y += ROW
            parts.append(text(0, y - 6, "Meanwhile", "ink", bold=True))
        row, y = _row(trace, span, y, style, in_sum=index < len(trace.spans))
        parts += row
    x_left, width = _plot(style)
    unit, unit_seconds = time_unit(trace.seconds)
    since = "the begin of the run" if trace.kind == "start" else "the last step"
    axis = Axis(low=0.0, high=trace.seconds / unit_seconds, label=f"{unit} since {since}")
    parts += [line(x_left, y + 4, x_left + width, y + 4, "line"), *time_axis(axis, x_left, width, y + 4)]
    return framed(name, title, f"{description} {described}.", parts, style.width, y + 46)


def _row(trace: Trace, span: Span, y: float, style: Viewport, in_sum: bool) -> tuple[list[str], float]:
    label = truncate_end(span.name + (f" ({ascii_name(span.detail)})" if span.detail else ""), MAX_LABEL)
    numbers = duration(span.seconds) + (f" · {share(span.seconds / trace.seconds)}" if in_sum else "")
    x_left, width = _plot(style)
    begin = x_left + width * (max(span.begin, trace.begin) - trace.begin) / trace.seconds
    end = x_left + width * (min(span.end, trace.end) - trace.begin) / trace.seconds
    color = COLORS.get(span.name.partition(",")[0], "evaluator")
    bar_width = max(MIN_BAR, end - begin)
    begin = min(begin, x_left + width - bar_width)
    if style.narrow:
        return [
            text(0, y + 11, label, "ink"),
            text(style.width, y + 11, numbers, "muted", "end"),
            rectangle(begin, y + 17, bar_width, BAR, color),
        ], y + ROW_NARROW
    return [
        text(0, y + 11, label, "ink"),
        text(LABELS + NUMBERS - 14, y + 11, numbers, "muted", "end"),
        rectangle(begin, y + 1, bar_width, BAR, color),
    ], y + ROW


def _plot(style: Viewport) -> tuple[float, float]:
    """Left edge and width of the bars."""
    return (6.0, style.width - 12) if style.narrow else (LABELS + NUMBERS, style.width - LABELS - NUMBERS - 6)
