"""Formats numbers, names and times for people: the same on a terminal, on pages and in pictures.

`tandem.wire.measures` defines the numbers; this module formats them. For programs (`key=value` lines, JSON, metrics)
numbers are not formatted.

An escape sequence can move the cursor, change earlier output, or type for the user; a bidirectional override changes
the order of letters. Each such character is replaced by a visible one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from unicodedata import category

NAMES = {"accuracy": "accuracy", "macroF1": "macro F1", "loss": "loss"}
SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
SHARES = {"accuracy", "macroF1"}
"""Scores that are shown in percent."""
UNKNOWN = "–"
"""Text for a value that is not known."""


def number(value: float | None) -> str:
    """Format a count in groups of three, or with three or four significant digits: `1,234`, `98.1`, `2.303`, `0.0213`,
    `3.142e-06`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN if value is None else str(value)
    amount = abs(value)
    if isinstance(value, int) or amount >= 1000:
        return f"{round(value):,}"
    if amount >= 100:
        return f"{value:.0f}"
    if amount >= 10:
        return f"{value:.1f}"
    if amount >= 1:
        return f"{value:.3f}"
    return f"{value:.4f}" if amount >= 1e-2 or amount == 0 else f"{value:.4g}"


def truncate_end(text: str, max_length: int) -> str:
    """The text, truncated to `max_length` characters; a truncated text ends with an ellipsis."""
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def count_noun(count: int, singular: str, plural: str = "") -> str:
    """Format a count with its noun: `no restarts`, `1 restart`, `1,200 restarts`."""
    return (
        f"{count:,} {singular if count == 1 else plural or singular + 's'}"
        if count
        else f"no {plural or singular + 's'}"
    )


def duration(seconds: float | None) -> str:
    """Format a duration: `4.5 ms`, `3.2 s`, `4 min 10 s`, `3 h 20 min`, `2 d 4 h`; a dash if not known."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.0995:
        value, unit = 1e3 * max(0.0, seconds), "ms"
    elif seconds < 59.5:
        value, unit = seconds, "s"
    else:
        return _in_two_units(round(seconds))
    return f"{value:.{0 if value >= 9.95 or value == 0 else 1}f} {unit}"


def elapsed(seconds: float | None) -> str:
    """Format a duration in whole seconds, such as an age or the remaining time: `3 s`, `4 min 10 s`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return f"{max(0, round(seconds))} s" if seconds < 59.5 else _in_two_units(round(seconds))


def _in_two_units(seconds: int) -> str:
    for big, big_name, small, small_name, limit in (
        (60, "min", 1, "s", 3600),
        (3600, "h", 60, "min", 86400),
        (86400, "d", 3600, "h", math.inf),
    ):
        if seconds < limit:
            remainder = seconds % big // small
            return f"{seconds // big} {big_name}" + (f" {remainder} {small_name}" if remainder else "")
    raise AssertionError


def size(count: float | None) -> str:
    """Format a number of bytes: `14.4 MB`; a dash if not known."""
    if count is None:
        return UNKNOWN
    unit = 0
    while count >= 999.5 and unit < len(SIZES) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{0 if count >= 99.5 or unit == 0 else 1}f} {SIZES[unit]}"


def percent_done(step: int, total: int) -> str:
    """Format the completed share of the steps, at most all: `57 %`."""
    return f"{min(100, 100 * step // total)} %"


def share(value: float | None) -> str:
    """Format a share: `97 %`, `0.03 %`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if 0 < value < 0.0001:
        return "< 0.01 %"
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"


def hours(seconds: float) -> str:
    """Format GPU time or CPU time in hours: `1,234`, `98.1`, `0.0213`."""
    return number(float(seconds / 3600))


def cores(busy: float | None) -> str:
    """Format a number of busy cores: `0.02 cores`, `0.6 cores`, `12 cores`; a dash if not known."""
    if busy is None or not math.isfinite(busy):
        return UNKNOWN
    return f"{busy:.{2 if 0 < busy < 0.095 else 1 if busy < 9.95 else 0}f} cores"


def metric_name(metric: str) -> str:
    """Display name of a metric."""
    return NAMES.get(metric, metric)


def metric_title(metric: str) -> str:
    """Display name of a metric at the start of a heading. The user's own metrics are not changed."""
    name = NAMES.get(metric, "")
    return name[:1].upper() + name[1:] if name else metric


MAX_METRICS = 4
"""Maximum number of the user's own metrics in a table, besides the deciding one."""


def metric_columns(metric: str, reported: Iterable[Iterable[str]], compared: Iterable[str] = ()) -> list[str]:
    """The metrics in a table of checkpoints: the deciding one, the loss, and some of the user's own.

    Args:
        reported: the names of the metrics of each checkpoint.
        compared: metrics of the base model, where checkpoints are compared with one.
    """
    names = dict.fromkeys(name for metrics in reported for name in metrics)
    own = [name for name in names if name not in NAMES and name != metric]
    has_loss = not names or "loss" in names
    of_base = [name for name in compared if name in NAMES]
    return list(dict.fromkeys([metric, *(["loss"] if has_loss else []), *of_base, *own[:MAX_METRICS]]))


def score(metric: str, value: float) -> str:
    """Format a score: `98.61 %`, `0.0493`, or `123.4`: perplexities of a hundred and more keep a decimal."""
    if metric in SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:.1f}" if 100 <= abs(value) < 1000 else number(float(value))


def interval(metric: str, ends: Sequence[float | None] | None) -> str:
    """Format a confidence interval: `95.66 % to 98.87 %`; empty if it is not known."""
    low, high = ends or (None, None)
    return "" if low is None or high is None else f"{score(metric, low)} to {score(metric, high)}"


def tied_with(count: int | None) -> str:
    """Format the number of checkpoints whose score does not differ from the best by more than chance: `tied with 4
    others`, `ahead of all others`; empty if it is not known."""
    if count is None:
        return ""
    return f"tied with {count_noun(count, 'other')}" if count else "ahead of all others"


def confidence(metric: str, ends: Sequence[float | None] | None, tied: int | None = None) -> str:
    """Format what is known about how certain a score is, as a suffix: ` (95.66 % to 98.87 %) · tied with 4 others`."""
    formatted_interval, rivals = interval(metric, ends), tied_with(tied)
    return (f" ({formatted_interval})" if formatted_interval else "") + (f" · {rivals}" if rivals else "")


def confidence_items(metric: str, ends: Sequence[float | None] | None, tied: int | None) -> str:
    """Format the same as further items of a list: ` · 95.66 % to 98.87 % · tied with 4 others`."""
    return "".join(f" · {text}" for text in (interval(metric, ends), tied_with(tied)) if text)


def change(metric: str, before: float, after: float) -> str:
    """Format the change of a score: `−12.3 %` of the earlier value, or `+4.2 points` of a score in percent."""
    difference = after - before
    if metric in SHARES:
        return f"{_signed(100 * difference, 2)} points"
    if not before:
        return _signed(difference, 4)
    return f"{_signed(100 * difference / abs(before), 1)} %"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") if math.isfinite(value) else UNKNOWN


def on_validation(metric: str, scores: Mapping[str, float]) -> str:
    """The score that selected the best checkpoint, as a suffix: ` · 98.10 % on validation data`; empty if no data is
    held out."""
    return f" · {score(metric, scores[metric])} on validation data" if metric in scores else ""


def truncate_start(path: str, max_length: int) -> str:
    """A path, truncated at its beginning to `max_length` characters."""
    return path if len(path) <= max_length else "…" + path[-max(1, max_length - 1) :]


def reason(name: str) -> str:
    """Format a CamelCase reason: `MemberLost` becomes `member lost`."""
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in ascii_name(name))
    return spaced.strip()


def utc_time(time: float) -> str:
    """Format a time with its date, in UTC; a dash if it is no valid time."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def ascii_name(name: str) -> str:
    """A foreign name in ASCII characters, which the pictures' typeface has."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)[:32]


LAST_SECOND = 253_402_300_799.0
"""The last second of the year 9999; datetime has no later one."""


def parse_rfc3339(text: object) -> float | None:
    """Parse an RFC 3339 time into seconds since the epoch; None if it is not one.

    Nanoseconds are truncated to microseconds, the resolution of Python.
    """
    if not isinstance(text, str):
        return None
    integral, dot, fraction = text.removesuffix("Z").partition(".")
    try:
        time = datetime.fromisoformat(integral + (f".{fraction[:6]}" if dot else ""))
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def rfc3339(timestamp: float) -> str:
    """Format seconds since the epoch as Kubernetes does; clamped to the years 1970 to 9999."""
    return datetime.fromtimestamp(min(max(timestamp, 0.0), LAST_SECOND), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


REPLACEMENT = "�"
"""Replacement for a character that is not printable."""
SPACE = "Zs"
"""Unicode category of spaces of any width."""


def printable(text: str) -> str:
    """The text without control characters, escapes and invisible marks; it may have several lines. A tab is four
    spaces."""
    if text.isprintable():
        return text
    text = text.replace("\t", "    ")
    return "".join(
        letter if letter.isprintable() or letter == "\n" or category(letter) == SPACE else REPLACEMENT
        for letter in text
    )


def one_line(text: str) -> str:
    """The printable text in one line: foreign text must not begin a line that looks like ours."""
    return printable(text.replace("\n", " "))
