"""Times as Kubernetes writes them."""

from datetime import UTC, datetime

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
