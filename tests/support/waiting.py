"""The one way in which tests wait: they look until something is so, and say what was missing if it never is."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
SECONDS = 120.0
"""For what takes seconds on a machine that has nothing else to do: a wait ends a broken test, and measures nothing."""


def until(
    look: Callable[[], T | None],
    what: str,
    seconds: float = SECONDS,
    otherwise: Callable[[], str] = lambda: "",
    pause: float = 0.02,
) -> T:
    """What `look` finds, as soon as it finds something true.

    Args:
        what: ends the sentence "this did not come: …".
        seconds: after these the test fails.
        otherwise: more to say then, such as a log.
        pause: seconds between two looks.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            pytest.fail(f"this did not come within {seconds:g} s: {what}\n{otherwise()}")
        time.sleep(pause)
    return found
