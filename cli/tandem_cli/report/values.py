"""Values of JSON files as a report finds them: damaged, of another version, or not there."""

import math
from typing import Any

from tandem.model import LATEST

LARGEST = 3.5e38
"""What no float32 can hold is infinite."""


def number(value: object) -> float:
    """The number that a file holds, NaN for anything else. What no float32 can hold is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if not abs(value) > LARGEST else math.copysign(math.inf, value)


def within(value: object, low: float, high: float) -> float:
    """The number that a file holds if it can be true, NaN for anything else."""
    found = number(value)
    return found if low <= found <= high else math.nan


def moment(value: object) -> float | None:
    """The time that a file holds, seconds since the epoch, None for anything else."""
    found = within(value, 0, LATEST)
    return None if math.isnan(found) else found or None


def text(value: object) -> str:
    """The text that a file holds, "" for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """The object that a file holds, {} for anything else."""
    return value if isinstance(value, dict) else {}
