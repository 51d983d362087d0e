"""The trace of a change of a run as lines of text: a bar for each span, below each other. Pure."""

from collections.abc import Iterator

from rich.text import Text

from tandem.formatting import duration, one_line, reason, share, truncate_end
from tandem.wire.trace import UNACCOUNTED, Span, Trace
from tandem_cli.terminal.tables import INDENT, clock

DEFAULT_WIDTH = 100
"""Width where there is no terminal, in columns."""
MIN_BAR, MAX_BAR = 12, 80
"""Width of the bars, in columns. On a narrower terminal they are left out."""
MAX_OVERLAPPING = 12
"""Maximum number of spans that overlap the change; further ones are counted."""
TITLES = {"start": "start", "failure": "failure", "change": "change", "end": "end of the job"}


def waterfall(trace: Trace, width: int | None) -> list[Text]:
    """Draw one trace: its cause, its spans with their durations and shares, and what happened meanwhile.

    Args:
        width: columns of the terminal; None: nothing is cut.
    """
    overlapping = [span for span in trace.overlapping if span.name != "training"]
    rows = [
        *((span, _style(span)) for span in trace.spans),
        *((span, "bright_black") for span in overlapping[:MAX_OVERLAPPING]),
    ]
    labels = [_label(span) for span, _ in rows]
    columns = max([*map(len, labels), 4])
    # Two spaces, the label, two columns of ten and eight, and the gaps between them.
    bar = min(MAX_BAR, (width or DEFAULT_WIDTH) - columns - 24)
    lines = [*_head(trace, width), Text()]
    for index, ((span, style), label) in enumerate(zip(rows, labels, strict=True)):
        if index == len(trace.spans):
            lines += [_total(trace, columns), Text(), Text(f"{INDENT}meanwhile", "dim")]
        part = share(span.seconds / trace.seconds) if index < len(trace.spans) and trace.seconds > 0 else ""
        line = Text.assemble(f"{INDENT}{label:<{columns}} ", f"{duration(span.seconds):>10}", (f"{part:>8}", "dim"))
        if bar >= MIN_BAR:
            line.append("  ").append_text(_bar(trace, span, bar, style))
            line.rstrip()
        lines.append(line)
    if not overlapping:
        lines.append(_total(trace, columns))
    elif len(overlapping) > MAX_OVERLAPPING:
        lines.append(Text(f"{INDENT}and {len(overlapping) - MAX_OVERLAPPING:,} more", "dim"))
    if width is not None:
        for line in lines:
            line.truncate(width, overflow="ellipsis")
    return [*lines, *(Text(f"{INDENT}note: {note}", "dim") for note in trace.notes)]


def _head(trace: Trace, width: int | None) -> Iterator[Text]:
    cause = one_line(trace.detail or reason(trace.reason))
    title = f"generation {trace.generation}"
    yield Text.assemble((title, "bold"), f"  {TITLES[trace.kind]}: {cause}")
    missing = "until the first" if trace.kind == "start" else "without a"
    so_far = "" if trace.is_complete else " so far"
    facts = f"{duration(trace.seconds)} {missing} {trace.without}{so_far}"
    if trace.kind == "end":
        facts = f"{duration(trace.seconds)} from the last step to the end of the job"
    yield Text(f"{INDENT}{facts}, from {clock(trace.begin)} to {clock(trace.end)} · trace {trace.trace_id}", "dim")


def _total(trace: Trace, columns: int) -> Text:
    return Text(f"{INDENT}{'sum':<{columns}} {duration(trace.seconds):>10}{'100 %':>8}", "bold")


def _label(span: Span) -> str:
    detail = f" ({one_line(span.detail)})" if span.detail else ""
    return truncate_end(f"{span.name}{detail}", 60)


def _style(span: Span) -> str:
    return "yellow" if span.name == UNACCOUNTED else "red" if span.name in ("detection", "unlogged steps") else "cyan"


def _bar(trace: Trace, span: Span, width: int, style: str) -> Text:
    """The bar of a span, at its place in the change; at least one cell."""
    scale = width / trace.seconds if trace.seconds > 0 else 0.0
    first = min(width - 1, round((max(span.begin, trace.begin) - trace.begin) * scale))
    last = max(first + 1, round((min(span.end, trace.end) - trace.begin) * scale))
    return Text.assemble(" " * first, ("━" * (last - first), style))
