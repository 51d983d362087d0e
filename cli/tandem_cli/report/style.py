"""Colours and typefaces of all pictures, in light and dark.

Figures are drawn once, in the colours of a light page. Each colour has a role, and each role its own value, so that
an inline SVG can have its colours replaced by CSS variables (`tandem_cli.report.style`), which the page sets for light
and for dark (`tandem.charts.chart`).
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib import rc_context, rcParams, rcParamsDefault
from matplotlib.figure import Figure

from tandem.charts.chart import LIGHT


@dataclass(frozen=True)
class Theme:
    """For which place a figure is drawn."""

    width: float
    """Inches."""
    narrow: bool = False
    """For a phone: what stands side by side elsewhere stands below each other."""
    titled: bool = False
    """Whether the figure says itself what it is; on the page the heading above it does."""
    dots_per_inch: int = 72


WIDE = Theme(width=11.2)
NARROW = Theme(width=4.3, narrow=True)
PICTURE = Theme(width=11.2, titled=True, dots_per_inch=160)

SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 9,
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.6,
    "legend.borderaxespad": 0.2,
    "figure.facecolor": LIGHT["paper"],
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.05,
    "figure.constrained_layout.w_pad": 0.05,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "tandem",
    "path.simplify": True,
    "text.parse_math": False,
}


@contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures are made and saved: this style, and nothing of the user's own matplotlib settings."""
    with rc_context():
        settings: Any = {key: value for key, value in rcParamsDefault.items() if key != "backend"} | SETTINGS
        rcParams.update(settings)
        yield


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
