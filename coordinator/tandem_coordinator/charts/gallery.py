"""A grid of small grey-scale pictures with captions, as SVG text."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from tandem.formatting import share, shortened
from tandem_coordinator.charts.chart import Look
from tandem_coordinator.charts.drawing import framed, text

if TYPE_CHECKING:
    from tandem.wrong_samples import Gallery

LEVELS = 8
"""Shades that are told apart: each is one path, and the darkest is none."""
SIDE, GAP, BELOW = 76.0, 14.0, 36.0
"""Pixels of a picture's side, between two, and for the words below."""
LETTERS = 16
"""Of the words below, as many as there is room for."""


@dataclass(frozen=True)
class Tile:
    """One picture."""

    pixels: bytes
    """Row by row; the larger the more ink."""
    width: int
    """Pixels of a row."""
    words: str
    """What stands below, in the first line …"""
    beside: str
    """… and in the second."""
    told: str
    """What is said to those who do not see it."""


def tiles(found: "Gallery") -> list[Tile]:
    """What is drawn of a checkpoint's wrong samples; a picture that is damaged is left out."""
    drawn = []
    for one in found.pictures:
        try:
            pixels = base64.b64decode(one.pixels, validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(pixels) == found.width * found.height:
            sure = share(one.confidence)
            told = f"sample {one.index:,}: {one.label}, taken for {one.prediction}, {sure} sure"
            drawn.append(Tile(pixels, found.width, one.label, f"→ {one.prediction}, {sure}", told))
    return drawn


def draw(name: str, title: str, tiles: Sequence[Tile], look: Look) -> str:
    """One svg element with all pictures.

    Args:
        name: prefix of the ids in it.
    """
    across = max(1, int((look.width + GAP) / (SIDE + GAP)))
    parts: list[str] = []
    for place, tile in enumerate(tiles):
        x, y = place % across * (SIDE + GAP), place // across * (SIDE + BELOW)
        parts += _tile(tile, x, y)
    rows = -(-len(tiles) // across)
    description = "; ".join(tile.told for tile in tiles)
    return framed(name, title, description, parts, look.width, rows * (SIDE + BELOW))


def _tile(tile: Tile, x: float, y: float) -> list[str]:
    scale = SIDE / max(tile.width, len(tile.pixels) // tile.width)
    return [
        f'<g><title>{escape(tile.told)}</title><rect x="{x:g}" y="{y:g}" width="{SIDE:g}" height="{SIDE:g}" '
        'fill="var(--grid)"/>',
        f'<g transform="translate({x:g} {y:g}) scale({scale:.5g})" fill="var(--ink)" shape-rendering="crispEdges">',
        *(f'<path d="{path}" fill-opacity="{level / (LEVELS - 1):.2g}"/>' for level, path in _shades(tile)),
        "</g>",
        text(x, y + SIDE + 14, _short(tile.words), "ink", size=11),
        text(x, y + SIDE + 28, _short(tile.beside), "muted", size=11),
        "</g>",
    ]


def _short(words: str) -> str:
    return shortened(words, LETTERS)


def _shades(tile: Tile) -> list[tuple[int, str]]:
    """For each shade the stretches of rows that have it, as one path."""
    found: dict[int, list[str]] = {}
    for start in range(0, len(tile.pixels), tile.width):
        x = 0
        for level, run in groupby(pixel * LEVELS // 256 for pixel in tile.pixels[start : start + tile.width]):
            length = sum(1 for _ in run)
            if level:
                found.setdefault(level, []).append(f"M{x} {start // tile.width}h{length}v1h-{length}z")
            x += length
    return [(level, "".join(paths)) for level, paths in sorted(found.items())]
