"""Evaluation of the generations of a run directory after a fault. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

Generation = Mapping[str, Any]
"""Number, world size, and time and step of the first and the last step; None without steps."""


def first_step(generations: Sequence[Generation], after: float, world_size: int = 1) -> float | None:
    """Time of the first step of a group of at least this size that was formed after a time; None if there is none."""
    times = [
        generation["first"]
        for generation in generations
        if generation["first"] is not None and generation["first"] > after and generation["worldSize"] >= world_size
    ]
    return min(times, default=None)


def two_groups(generations: Sequence[Generation]) -> list[str]:
    """List generations that took steps while a later one already did."""
    trained = sorted(
        (item for item in generations if item["first"] is not None), key=lambda item: int(item["generation"])
    )
    return [
        f"generation {before['generation']} made steps until {before['last']:.3f}, "
        f"{after['generation']} from {after['first']:.3f} on"
        for index, before in enumerate(trained)
        for after in trained[index + 1 :]
        if after["first"] < before["last"]
    ]
