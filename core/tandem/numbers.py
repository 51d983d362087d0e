"""Numbers as JSON records hold them, which may be damaged, of another version, or somebody else's."""

from math import isfinite

MOST = 2**53
"""Above it a JSON number is not exact any more, and no count of ours comes near."""


def finite(value: object) -> float | None:
    """The number that a record holds, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of more digits than fit
        return None
    return number if isfinite(number) else None


def amount(value: object) -> float | None:
    """The number that is not negative, None for anything else."""
    found = finite(value)
    return found if found is not None and found >= 0 else None


def whole(value: object) -> int | None:
    """The count, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None
