"""A chart as a value: its curves, axes and colours, independent of how it is drawn.

The hues are those of Okabe and Ito, told apart under the common kinds of colour blindness, in luminances that keep at
least 3:1 against the page for everything that carries meaning. A drawing names roles, as CSS variables; the page around
it sets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal[
    "paper", "ink", "muted", "line", "grid", "trainer", "evaluator", "gpu", "checkpoint", "alert", "other"
]  # fmt: skip

LIGHT: dict[Role, str] = {
    "paper": "#fefefe",
    "ink": "#1a1f26",
    "muted": "#5d6875",
    "line": "#c9d0d8",
    "grid": "#eceff2",
    "trainer": "#0067b1",
    "evaluator": "#c96a00",
    "gpu": "#00855f",
    "checkpoint": "#b3488f",
    "alert": "#c8310f",
    "other": "#7d8894",
}
DARK: dict[Role, str] = {
    "paper": "#14181d",
    "ink": "#e7eaee",
    "muted": "#9aa5b1",
    "line": "#48525d",
    "grid": "#252b32",
    "trainer": "#4fb0f2",
    "evaluator": "#f0a030",
    "gpu": "#2fc795",
    "checkpoint": "#e58cc6",
    "alert": "#ff7a57",
    "other": "#8a95a1",
}

FONTS = (
    '--font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; '
    '--mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;'
)
"""Font stacks of the reader's device: nothing has to be loaded."""


def variables() -> str:
    """The style sheet that sets the colour of each role and the fonts, for the reader's light or dark mode."""
    light = " ".join(f"--{role}: {color};" for role, color in LIGHT.items())
    dark = " ".join(f"--{role}: {color};" for role, color in DARK.items())
    return f":root {{ {light} {FONTS} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


Point = tuple[float, float | None]
"""A position on both axes; None: the line is broken here."""
Points = Sequence[Point]

Kind = Literal["line", "spread", "stairs", "dots", "star"]
Unit = Literal["number", "share", "count"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one colour."""

    points: Points
    """Points, in ascending order of x."""
    color: Role
    label: str = ""
    """Name in the legend; empty: it is not in the legend."""
    kind: Kind = "line"
    """`line`; `spread`: a line between the lowest and the highest of stretches; `stairs`: each value holds until the
    next; `dots`: a line with a dot at each; `star`: no line."""
    width: float = 1.8
    """Width of the line, in pixels."""
    strength: float = 1.0
    """Opacity, 0 to 1."""
    filled: bool = False
    """Whether the area down to 0 is tinted."""
    dashed: bool = False
    """Whether the line is dashed, which tells it from another of the same colour."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of the x axis that is shaded, for instance a time without steps."""

    begin: float
    end: float
    words: tuple[str, ...] = ()
    """Lines of text above its end, if there is room."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    curves: tuple[Curve, ...]
    unit: Unit = "number"
    """Format of its y values: 0.0213; 98.6 %; only whole numbers."""
    from_zero: bool = False
    """Whether y begins at 0; otherwise it begins at the lowest value."""
    logarithmic_above: float | None = None
    """Ratio of the highest to the lowest value from which on y is logarithmic; None: never."""
    bands: tuple[Band, ...] = ()
    flags: tuple[float, ...] = ()
    """Positions on x at which something was wrong: crosses at the foot."""
    flag: str = ""
    """Meaning of the flags, for the legend."""
    note: str = ""
    """Short text at the right of the title, in the colour of checkpoints."""
    height: float = 1.0
    """Height relative to an ordinary panel."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The x axis of a chart."""

    low: float
    high: float
    label: str
    whole: bool = False
    """Whether it counts something, such as steps."""
    pauses: tuple[tuple[float, str], ...] = ()
    """Positions at which a time without activity was cut out, and its length, in words."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels above each other over one axis."""

    axis: Axis
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Viewport:
    """The space that a chart is drawn for."""

    width: float
    """Width in pixels."""
    narrow: bool = False
    """Whether it is for a phone: what is side by side elsewhere is placed below each other."""
    panel_height: float = field(default=150.0)
    """Height of an ordinary panel, in pixels."""


WIDE = Viewport(1072.0)
NARROW = Viewport(358.0, narrow=True, panel_height=130.0)
