"""Charts of a run as values, and as SVG text: what the live page and `tandem report` both show.

    chart      a chart as a value: panels of curves over one axis; the colours of all pictures, light and dark
    series     a series that grows for weeks in bounded memory, without losing a spike
    stories    the curves of each chart of a run
    drawing    charts as SVG text, with their scales and ticks
    rows       processor use as rows over time, as SVG text
    bars       histograms as bars, as SVG text
    gallery    small grey-scale pictures in a grid, as SVG text
    completions  completions by a language model under several checkpoints, as an HTML table
    page.css   the style sheet of a page with charts
    charts.js  reads values off these drawings in a browser, and enlarges a part of them

Only Python's standard library is used: the coordinator's image has no numpy, and the page is drawn while heartbeats are
answered.
"""

from html import escape
from importlib import resources


def style() -> str:
    """The style sheet of a page with charts; its colours are `chart.variables`."""
    return resources.files(__package__).joinpath("page.css").read_text("utf-8")


def script() -> str:
    """The script of a page with charts; it draws into each element of the class `charted`."""
    return resources.files(__package__).joinpath("charts.js").read_text("utf-8")


def with_difference(value: str) -> str:
    """A value as HTML, with a difference in parentheses on a line of its own: several metrics fit beside each other."""
    value, opening, difference = value.partition(" (")
    return escape(value) + (f' <span class="difference">({escape(difference)}</span>' if opening else "")
