"""Numbers and names as people read them, the same in pictures and on the page.

A number and its unit are held together by a no-break space.
"""

import datetime
import math

NAMES = {"accuracy": "accuracy", "macroF1": "macro F1", "loss": "loss"}
SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
SHARES = {"accuracy", "macroF1"}
"""Scores that are read in percent."""


def metric_name(metric: str) -> str:
    """How people call a metric."""
    return NAMES.get(metric, metric)


def score(metric: str, value: float) -> str:
    """A score: 98.61 %, or 0.0493."""
    return f"{100 * value:.2f}\u00a0%" if metric in SHARES else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """A length of time: 4.5 ms, 3.2 s, 4 min 10 s, 3 h 20 min, 2 d 4 h; a dash for what is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 0.0995:
        value, unit = 1e3 * seconds, "ms"
    elif seconds < 99.5:
        value, unit = seconds, "s"
    else:
        return _in_two_units(round(seconds))
    return f"{value:.{0 if value >= 9.95 or value == 0 else 1}f}\u00a0{unit}"


def _in_two_units(seconds: int) -> str:
    for big, big_name, small, small_name, most in (
        (60, "min", 1, "s", 3600),
        (3600, "h", 60, "min", 2 * 86400),
        (86400, "d", 3600, "h", math.inf),
    ):
        if seconds < most:
            rest = seconds % big // small
            return f"{seconds // big}\u00a0{big_name}" + (f" {rest}\u00a0{small_name}" if rest else "")
    raise AssertionError


def size(count: float | None) -> str:
    """Bytes: 14.4 MB; a dash for what is not known."""
    if count is None:
        return "–"
    unit = 0
    while count >= 999.5 and unit < len(SIZES) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.{0 if count >= 99.5 or unit == 0 else 1}f}\u00a0{SIZES[unit]}"


def number(value: float | None) -> str:
    """A count or a rate: 1,234 or 12.3; a dash for what is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share of a whole: 97 %, 0.03 %."""
    if value is None or not math.isfinite(value):
        return "–"
    if 0 < value < 0.0001:
        return "<\u00a00.01\u00a0%"
    return f"{100 * value:.0f}\u00a0%" if value >= 0.0995 else f"{100 * value:.2g}\u00a0%"


def several(count: int, one: str, more: str = "") -> str:
    """A count with its noun: 1 restart, 2 restarts."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def reason(name: str) -> str:
    """A CamelCase reason: MemberLost becomes member lost."""
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in plain(name))
    return spaced.strip()


def moment(time: float) -> str:
    """A time of day with its date, in UTC; a dash for what is no time."""
    try:
        return f"{datetime.datetime.fromtimestamp(time, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "–"


def plain(name: str) -> str:
    """A name that came from outside, in characters that the pictures' typeface has."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)[:32]
