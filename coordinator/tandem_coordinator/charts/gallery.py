"""A grid of small grey-scale pictures with captions, as SVG text."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from tandem.formatting import share, truncate_end
from tandem_coordinator.charts.chart import Viewport
from tandem_coordinator.charts.drawing import framed, text

if TYPE_CHECKING:
    from tandem.rundir.wrong_samples import Gallery

SHADES = 8
"""Number of distinct shades: each is one path, and the darkest is none."""
SIDE, GAP, BELOW = 76.0, 14.0, 36.0
"""Pixels of a picture's side, between two pictures, and for the captions."""
MAX_LABEL_LENGTH = 16
"""Maximum length of a caption, in characters."""


@dataclass(frozen=True)
class Tile:
    """One picture."""

    pixels: bytes
    """Grey values row by row; larger values are darker."""
    width: int
    """Width in pixels."""
    label: str
    """First line of the caption."""
    prediction: str
    """Second line of the caption."""
    description: str
    """Description for those who do not see it."""


def tiles(samples: "Gallery") -> list[Tile]:
    """Create the pictures of a checkpoint's wrong samples; damaged ones are left out."""
    pictures = []
    for picture in samples.pictures:
        try:
            pixels = base64.b64decode(picture.pixels, validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(pixels) == samples.width * samples.height:
            confidence = share(picture.confidence)
            description = (
                f"sample {picture.index:,}: {picture.label}, taken for {picture.prediction}, {confidence} sure"
            )
            pictures.append(
                Tile(pixels, samples.width, picture.label, f"→ {picture.prediction}, {confidence}", description)
            )
    return pictures


def draw(name: str, title: str, tiles: Sequence[Tile], viewport: Viewport) -> str:
    """Draw all pictures as one svg element.

    Args:
        name: prefix of the ids in it.
    """
    across = max(1, int((viewport.width + GAP) / (SIDE + GAP)))
    parts: list[str] = []
    for index, tile in enumerate(tiles):
        x, y = index % across * (SIDE + GAP), index // across * (SIDE + BELOW)
        parts += _tile(tile, x, y)
    rows = -(-len(tiles) // across)
    description = "; ".join(tile.description for tile in tiles)
    return framed(name, title, description, parts, viewport.width, rows * (SIDE + BELOW))


def _tile(tile: Tile, x: float, y: float) -> list[str]:
    scale = SIDE / max(tile.width, len(tile.pixels) // tile.width)
    return [
        f'<g><title>{escape(tile.description)}</title><rect x="{x:g}" y="{y:g}" width="{SIDE:g}" height="{SIDE:g}" '
        'fill="var(--grid)"/>',
        f'<g transform="translate({x:g} {y:g}) scale({scale:.5g})" fill="var(--ink)" shape-rendering="crispEdges">',
        *(f'<path d="{path}" fill-opacity="{level / (SHADES - 1):.2g}"/>' for level, path in _shades(tile)),
        "</g>",
        text(x, y + SIDE + 14, _short(tile.label), "ink", size=11),
        text(x, y + SIDE + 28, _short(tile.prediction), "muted", size=11),
        "</g>",
    ]


def _short(caption: str) -> str:
    return truncate_end(caption, MAX_LABEL_LENGTH)


def _shades(tile: Tile) -> list[tuple[int, str]]:
    """The stretches of rows of each shade, as one path."""
    paths_by_level: dict[int, list[str]] = {}
    for start in range(0, len(tile.pixels), tile.width):
        x = 0
        for level, run in groupby(pixel * SHADES // 256 for pixel in tile.pixels[start : start + tile.width]):
            length = sum(1 for _ in run)
            if level:
                paths_by_level.setdefault(level, []).append(f"M{x} {start // tile.width}h{length}v1h-{length}z")
            x += length
    return [(level, "".join(paths)) for level, paths in sorted(paths_by_level.items())]
