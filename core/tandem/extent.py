"""How much a piece of JSON holds: what may be nested at will is bounded before anybody walks through it."""

from typing import Any, NamedTuple


class Extent(NamedTuple):
    """The most that a piece of JSON may be."""

    depth: int
    """Levels of objects and lists."""
    values: int
    """Entries of all objects and lists together."""
    characters: int
    """Of all texts, names of fields included."""


def excess(value: Any, most: Extent) -> str:
    """What is too much about it, in words that follow "it"; empty if nothing is.

    Without recursion, and it stops where the bound is broken: a hostile value costs no more than the bound.
    """
    values = characters = 0
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        found, depth = left.pop()
        if isinstance(found, str):
            characters += len(found)
        elif isinstance(found, int):
            characters += found.bit_length() // 3
        elif isinstance(found, dict | list):
            if depth > most.depth:
                return f"is nested more than {most.depth} levels deep"
            values += len(found)
            if values > most.values:
                return f"has more than {most.values} entries"
            if isinstance(found, dict):
                characters += sum(len(name) for name in found)
            left += [(inner, depth + 1) for inner in (found.values() if isinstance(found, dict) else found)]
        if characters > most.characters:
            return f"has more than {most.characters} characters"
    return ""
