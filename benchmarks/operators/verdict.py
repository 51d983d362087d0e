"""What the run directory says of a fault. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

Generation = Mapping[str, Any]
"""Number, world size, and time and step of the first and the last step; None if it made none."""


def first_step(generations: Sequence[Generation], after: float, world_size: int = 1) -> float | None:
    """When a group of at least this size that was formed after a time made its first step; None if none has."""
    found = [
        one["first"]
        for one in generations
        if one["first"] is not None and one["first"] > after and one["worldSize"] >= world_size
    ]
    return min(found, default=None)


def two_groups(generations: Sequence[Generation]) -> list[str]:
    """Generations that made steps while a later one already did."""
    trained = sorted((one for one in generations if one["first"] is not None), key=lambda one: int(one["generation"]))
    return [
        f"generation {before['generation']} made steps until {before['last']:.3f}, "
        f"{after['generation']} from {after['first']:.3f} on"
        for index, before in enumerate(trained)
        for after in trained[index + 1 :]
        if after["first"] < before["last"]
    ]
