"""Charts of a run as values, and as SVG text: what the live page and `tandem report` both show.

    palette    the colours of all pictures, for light and for dark
    chart      a chart as a value: panels of curves over one axis
    scale      from numbers to places: ticks, logarithms, words beside an axis
    series     a series that grows for weeks in bounded memory, without losing a spike
    stories    which curves tell of loss and scores, of throughput and the group
    drawing    charts as SVG text
    rows       processor use as rows over time, as SVG text
    gallery    small grey pictures in a grid, as SVG text
    page.css   the look of a page with charts
    charts.js  reads values off these drawings in a browser, and enlarges a part of them

Python's standard library alone: the coordinator's image has no numpy, and the page is drawn beside heartbeats.
"""

from importlib import resources


def style() -> str:
    """The style sheet of a page with charts; its colours are `palette.variables`."""
    return resources.files(__package__).joinpath("page.css").read_text("utf-8")


def script() -> str:
    """What a page with charts runs; it takes each element of the class `charted` as a place of charts."""
    return resources.files(__package__).joinpath("charts.js").read_text("utf-8")
