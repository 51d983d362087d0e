"""PNG files are painted from the SVG of the page."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tandem_cli.report import raster
from tandem_coordinator.charts.chart import LIGHT, WIDE, Axis, Chart, Curve, Panel
from tandem_coordinator.charts.drawing import draw, framed, text


def painted(svg: str, title: str = "") -> np.ndarray:
    with Image.open(io.BytesIO(raster.png(svg, title))) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def near(pixels: np.ndarray, color: str) -> np.ndarray:
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return np.abs(pixels - wanted).max(axis=2) < 40


def rows(mask: np.ndarray) -> list[int]:
    """The height of a mask in each of its columns that has any."""
    return [int(height) for height in mask.sum(axis=0) if height]


def test_a_line_keeps_its_width_whatever_its_axis_measures() -> None:
    for most in (1.0, 1e6):
        curve = Curve(points=[(0.0, most / 2), (most, most / 2)], color="trainer", width=3.0)
        chart = Chart(axis=Axis(low=0, high=most, label="step"), panels=(Panel(title="", curves=(curve,)),))
        drawn = near(painted(draw("a", "", "", [chart], WIDE)), LIGHT["trainer"])
        assert len(rows(drawn)) > 1500
        assert 4 <= np.median(rows(drawn)) <= 6


def test_dots_without_length_are_painted() -> None:
    curve = Curve(points=[(5.0, 1.0)], color="evaluator", kind="dots", width=0)
    chart = Chart(axis=Axis(low=0, high=10, label="step"), panels=(Panel(title="", curves=(curve,)),))
    assert near(painted(draw("a", "", "", [chart], WIDE)), LIGHT["evaluator"]).sum() > 40


@pytest.mark.parametrize("words", ["loss 1.5", "98.6 %", "3 s · 40 %", "é ü ß …"])
def test_words_are_painted_without_a_font_of_the_machine(words: str) -> None:
    svg = framed("a", "", "", [text(20, 30, words, "ink", size=20)], 300, 50)
    one = framed("a", "", "", [text(20, 30, words[0], "ink", size=20)], 300, 50)
    drawn, first = near(painted(svg), LIGHT["ink"]), near(painted(one), LIGHT["ink"])
    assert len(rows(drawn)) > 2 * len(rows(first)) > 0


def test_a_title_stands_above_and_what_is_no_xml_is_left_out() -> None:
    svg = framed("a", "", "", [text(20, 30, "a\x00\ud800b", "ink")], 300, 50)
    assert near(painted(svg, "Title \x07"), LIGHT["ink"])[: int(raster.HEAD * raster.SCALE)].any()


def test_what_is_no_drawing_is_refused() -> None:
    with pytest.raises(ElementTree.ParseError):
        raster.png("<svg", "")
