"""PNG files of pictures: the SVG of the page, rendered by resvg with a font that is installed with it.

resvg supports neither CSS variables nor lines that keep their width under a matrix. So colours become values, and
coordinates in the units of an axis are converted to pixels before rendering.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from xml.etree import ElementTree

import resvg_py

from tandem_coordinator.charts.chart import LIGHT

SCALE = 1.67
"""Pixels of a PNG file for each pixel of the page."""
MARGIN, HEAD = 12.0, 38.0
"""Margin around the picture, and height of the title, in pixels."""
TITLE_SIZE = 17
FAMILY = "Roboto"

_COLOR = re.compile(r"var\(--([a-z]+)\)")
_MATRIX = re.compile(r"matrix\(([^)]*)\)")
_COMMAND = re.compile(r"([MLHVZhv])([^MLHVZhv]*)")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Matrix = tuple[float, float, float, float, float, float]


def png(svg: str, title: str) -> bytes:
    """Render a picture as a PNG file, in the colours of a light page, with its title above it.

    Args:
        svg: svg element of `tandem_coordinator.charts.drawing.framed`.

    Raises:
        ElementTree.ParseError: the svg is malformed.
    """
    return painted(standalone(svg, title))


def standalone(svg: str, title: str) -> str:
    """Make an SVG file that needs no page around it; arguments and errors are those of `png`."""
    root = ElementTree.fromstring(_NOT_XML.sub("", svg))  # noqa: S314 - written by us, a moment ago
    _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
    for group in root.iter("g"):
        if match := _MATRIX.fullmatch(group.get("transform", "")):
            a, b, c, d, e, f = (float(part) for part in match[1].split())
            _flatten(group, (a, b, c, d, e, f))
    content = "".join(ElementTree.tostring(child, "unicode") for child in root if child.tag not in ("title", "desc"))
    heading = ElementTree.Element("text", {"x": "0", "y": "-14", "font-size": str(TITLE_SIZE), "font-weight": "700"})
    heading.text = _NOT_XML.sub("", title)
    heading.set("fill", LIGHT["ink"])
    full_w, full_h = width + 2 * MARGIN, height + HEAD + 2 * MARGIN
    source = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full_w * SCALE:.0f}" height="{full_h * SCALE:.0f}" '
        f'viewBox="{-MARGIN:g} {-MARGIN - HEAD:g} {full_w:g} {full_h:g}" font-family="{FAMILY}" '
        f'font-size="{root.get("font-size", "12")}">'
        f'<rect x="{-MARGIN:g}" y="{-MARGIN - HEAD:g}" width="{full_w:g}" height="{full_h:g}" fill="{LIGHT["paper"]}"/>'
        f"{ElementTree.tostring(heading, 'unicode')}{content}</svg>"
    )
    return _COLOR.sub(lambda match: LIGHT[match[1]], source)  # type: ignore[index]


def painted(source: str) -> bytes:
    """Render an SVG file that `standalone` made as a PNG file."""
    fonts = [str(path) for path in _fonts()]
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=source,
            background=LIGHT["paper"],
            skip_system_fonts=True,
            font_files=fonts,
            font_family=FAMILY,
            sans_serif_family=FAMILY,
        )
    )


def _fonts() -> Iterator[object]:
    for name in ("Roboto-Regular.ttf", "Roboto-Bold.ttf"):
        yield files("font_roboto") / "files" / name


def _flatten(group: ElementTree.Element, matrix: Matrix) -> None:
    """Convert the coordinates in a group to pixels, and remove its matrix."""
    a, _, _, d, e, f = matrix
    del group.attrib["transform"]
    for element in group.iter():
        element.attrib.pop("vector-effect", None)
        if element.tag == "path":
            element.set("d", _transformed(element.attrib["d"], matrix))
        elif element.tag == "rect":
            x, y, width, height = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
            places = (a * x + e, min(d * y + f, d * (y + height) + f), abs(a * width), abs(d * height))
            for key, value in zip(("x", "y", "width", "height"), places, strict=True):
                element.set(key, f"{value:.2f}")


def _transformed(path: str, matrix: Matrix) -> str:
    a, _, _, d, e, f = matrix
    parts: list[str] = []
    x = y = 0.0
    for command, arguments in _COMMAND.findall(path):
        numbers = [float(part) for part in arguments.split()]
        match command:
            case "Z":
                parts.append("Z")
                continue
            case "H":
                x = numbers[0]
            case "V":
                y = numbers[0]
            case "h":
                x += numbers[0]
            case "v":
                y += numbers[0]
            case _:
                x, y = numbers
        parts.append(f"{'M' if command == 'M' else 'L'}{a * x + e:.2f} {d * y + f:.2f}")
    return "".join(parts)
