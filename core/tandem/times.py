"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


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
    """Seconds since the epoch as Kubernetes writes a time."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
