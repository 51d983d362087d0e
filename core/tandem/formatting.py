"""Formats numbers, names and times for people: the same on a terminal, on pages and in pictures.

What a number is stands in `tandem.measures`; how it is written, here. For programs (`key=value` lines, JSON, metrics)
numbers are not formatted.

An escape sequence can move the cursor, change what was printed before, or type for the user; a bidirectional override
shows letters in another order than they have. Each such character is shown as one that says that something is there.
"""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from unicodedata import category

NAMES = {"accuracy": "accuracy", "macroF1": "macro F1", "loss": "loss"}
SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
SHARES = {"accuracy", "macroF1"}
"""Scores that are read in percent."""
UNKNOWN = "–"
"""What stands where something is not known."""


def number(value: float | None) -> str:
    """A count in groups of three, or four digits that matter: `1,234`, `98.1`, `2.303`, `0.0213`, `3.142e-06`."""
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


def shortened(text: str, most: int) -> str:
    """The text, cut to `most` characters; a cut text ends with an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def several(count: int, one: str, more: str = "") -> str:
    """A count with its noun: `no restarts`, `1 restart`, `1,200 restarts`."""
    return f"{count:,} {one if count == 1 else more or one + 's'}" if count else f"no {more or one + 's'}"


def duration(seconds: float | None) -> str:
    """A length of time: `4.5 ms`, `3.2 s`, `4 min 10 s`, `3 h 20 min`, `2 d 4 h`; a dash for what is not known."""
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
    """A length of time in whole seconds, such as an age or what is left: `3 s`, `4 min 10 s`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return f"{max(0, round(seconds))} s" if seconds < 59.5 else _in_two_units(round(seconds))


def _in_two_units(seconds: int) -> str:
    for big, big_name, small, small_name, most in (
        (60, "min", 1, "s", 3600),
        (3600, "h", 60, "min", 86400),
        (86400, "d", 3600, "h", math.inf),
    ):
        if seconds < most:
            rest = seconds % big // small
            return f"{seconds // big} {big_name}" + (f" {rest} {small_name}" if rest else "")
    raise AssertionError


def size(count: float | None) -> str:
    """Bytes: `14.4 MB`; a dash for what is not known."""
    if count is None:
        return UNKNOWN
    unit = 0
    while count >= 999.5 and unit < len(SIZES) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{0 if count >= 99.5 or unit == 0 else 1}f} {SIZES[unit]}"


def done(step: int, total: int) -> str:
    """How much of the steps is done, all at most: `57 %`."""
    return f"{min(100, 100 * step // total)} %"


def share(value: float | None) -> str:
    """A share of a whole: `97 %`, `0.03 %`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if 0 < value < 0.0001:
        return "< 0.01 %"
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"


def hours(seconds: float) -> str:
    """GPU time or CPU time in hours: `1,234`, `98.1`, `0.0213`."""
    return number(float(seconds / 3600))


def cores(busy: float | None) -> str:
    """Busy cores: `0.02 cores`, `0.6 cores`, `12 cores`; a dash for what is not known."""
    if busy is None or not math.isfinite(busy):
        return UNKNOWN
    return f"{busy:.{2 if 0 < busy < 0.095 else 1 if busy < 9.95 else 0}f} cores"


def metric_name(metric: str) -> str:
    """How people call a metric."""
    return NAMES.get(metric, metric)


def metric_title(metric: str) -> str:
    """How people call a metric, where a heading begins with it. A name of the user's stays as it is written."""
    name = NAMES.get(metric, "")
    return name[:1].upper() + name[1:] if name else metric


MAX_METRICS = 4
"""Metrics of the user's own, besides the one that decides, that a table has room for."""


def metric_columns(metric: str, reported: Iterable[Iterable[str]], compared: Iterable[str] = ()) -> list[str]:
    """The metrics that a table of checkpoints shows: the one that decides, the loss, and some of the user's own.

    Args:
        reported: the names of the metrics of each checkpoint.
        compared: those of the base model, where checkpoints are compared with one.
    """
    names = dict.fromkeys(name for one in reported for name in one)
    own = [name for name in names if name not in NAMES and name != metric]
    has_loss = not names or "loss" in names
    beside = [name for name in compared if name in NAMES]
    return list(dict.fromkeys([metric, *(["loss"] if has_loss else []), *beside, *own[:MAX_METRICS]]))


def score(metric: str, value: float) -> str:
    """A score: `98.61 %`, `0.0493`, or `123.4`: perplexities of a hundred and more differ behind the point, too."""
    if metric in SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:.1f}" if 100 <= abs(value) < 1000 else number(float(value))


def change(metric: str, before: float, after: float) -> str:
    """How a score has changed: `−12.3 %` of what it was, or `+4.2 points` of one that is read in percent."""
    difference = after - before
    if metric in SHARES:
        return f"{_signed(100 * difference, 2)} points"
    if not before:
        return _signed(difference, 4)
    return f"{_signed(100 * difference / abs(before), 1)} %"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") if math.isfinite(value) else UNKNOWN


def on_validation(metric: str, scores: Mapping[str, float]) -> str:
    """The score by which the best was chosen, to be put behind other words: ` · 98.10 % on validation data`; nothing
    where no data is held out."""
    return f" · {score(metric, scores[metric])} on validation data" if metric in scores else ""


def end_of(path: str, most: int) -> str:
    """A path, cut at its beginning if it is longer than `most` characters."""
    return path if len(path) <= most else "…" + path[-max(1, most - 1) :]


def reason(name: str) -> str:
    """A CamelCase reason: `MemberLost` becomes `member lost`."""
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in plain(name))
    return spaced.strip()


def moment(time: float) -> str:
    """A time of day with its date, in UTC; a dash for what is no time."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def plain(name: str) -> str:
    """A name that came from outside, in characters that the pictures' typeface has."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)[:32]


LAST = 253_402_300_799.0
"""The last second of the year 9999; datetime knows none after it."""


def seconds(text: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None for what is none.

    Nanoseconds are cut to microseconds, which is what Python keeps.
    """
    if not isinstance(text, str):
        return None
    whole, dot, rest = text.removesuffix("Z").partition(".")
    try:
        at = datetime.fromisoformat(whole + (f".{rest[:6]}" if dot else ""))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def rfc3339(at: float) -> str:
    """Seconds since the epoch as Kubernetes writes a time; what is before 1970 or after 9999 as the nearest that is
    not."""
    return datetime.fromtimestamp(min(max(at, 0.0), LAST), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


SHOWN = "�"
"""In the place of a character that is not printable."""
SPACE = "Zs"
"""The category of spaces, whatever their width."""


def printable(text: str) -> str:
    """A text of any number of lines, without control characters, escapes and invisible marks. A tab is four spaces."""
    if text.isprintable():
        return text
    text = text.replace("\t", "    ")
    return "".join(one if one.isprintable() or one == "\n" or category(one) == SPACE else SHOWN for one in text)


def one_line(text: str) -> str:
    """The same in one line: what stands among our own words must not begin a line that looks like ours."""
    return printable(text.replace("\n", " "))
