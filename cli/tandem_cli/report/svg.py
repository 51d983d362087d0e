"""A figure as a piece of an HTML page: text as text, colours as CSS variables, and ids that no other figure has."""

import io
import re
from html import escape

from matplotlib.figure import Figure

from tandem.charts.palette import LIGHT

_VIEW = re.compile(r'viewBox="([-0-9. ]+)"')
_CONTENT = re.compile(r"<svg[^>]*>(.*)</svg>", re.DOTALL)
_DROPPED = re.compile(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", re.DOTALL)
_ID = re.compile(r' id="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')
_FAMILY = re.compile(r"'DejaVu Sans'(?:, sans-serif)?")
_PATH = re.compile(r' d="([^"]*)"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")


def inline(figure: Figure, name: str, label: str) -> str:
    """The SVG element of a figure.

    Args:
        name: prefix of every id in it; each figure of a page needs its own.
        label: what it shows, for those who do not see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    source = buffer.getvalue()
    view, content = _VIEW.search(source), _CONTENT.search(source)
    assert view is not None, "matplotlib writes a view box"
    assert content is not None, "matplotlib writes one svg element"
    text = _DROPPED.sub("", content[1]).replace("xlink:href=", "href=")
    # Most ids are matplotlib's names for its artists, and nobody asks for them.
    used = {match[2] for match in _REFERENCE.finditer(text)}
    text = _ID.sub(lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", text)
    text = _REFERENCE.sub(lambda match: f"{match[1]}{name}-{match[2]}", text)
    for role, color in LIGHT.items():
        text = text.replace(color, f"var(--{role})")
    text = _PATH.sub(_shortened, _FAMILY.sub("var(--font)", text))
    return f'<svg viewBox="{view[1]}" role="img" aria-label="{escape(label)}">{text.strip()}</svg>'


def _shortened(path: re.Match[str]) -> str:
    """Path data to a hundredth of a point, on one line: half the size, and nobody sees it."""
    data = _DECIMALS.sub(r"\1", path[1])
    return f' d="{" ".join(data.split())}"'
