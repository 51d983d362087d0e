"""Charts: scales that can be read, series that stay small, drawings that are safe anywhere."""

import math
import random
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.evaluation import Completions, Histogram
from tandem_coordinator.charts import bars, chart, completions, drawing, gallery, rows
from tandem_coordinator.charts.chart import NARROW, WIDE, Axis, Band, Chart, Curve, Panel, Point, Viewport
from tandem_coordinator.charts.drawing import Scale
from tandem_coordinator.charts.gallery import Tile
from tandem_coordinator.charts.rows import Row, Rows
from tandem_coordinator.charts.series import Series, shorten
from tandem_coordinator.charts.stories import REDONE, Losses, Ranks, optimization, pace, ranks, training

STEPS = Axis(low=0.0, high=100.0, label="step", whole=True)
EVIL = '"><script>alert(1)</script>'


def drawn(*charts: Chart, look: Viewport = WIDE) -> str:
    return drawing.draw("a", "Title", "Description.", charts, look)


def one(*points: Point, **panel: object) -> Chart:
    return Chart(axis=STEPS, panels=(Panel(title="One", curves=(Curve(points=points, color="trainer"),), **panel),))  # type: ignore[arg-type]


def words(svg: str) -> set[str]:
    return {part.text or "" for part in ElementTree.fromstring(svg).iter("text")}


class TestTicks:
    @pytest.mark.parametrize(
        ("low", "high", "most", "expected"),
        [
            (0, 100, 5, [0, 25, 50, 75, 100]),
            (0, 7, 4, [0, 2, 4, 6]),
            (-1, 1, 5, [-1, -0.5, 0, 0.5, 1]),
            (0.9812, 0.9934, 4, [0.985, 0.99]),
        ],
    )
    def test_are_round_and_few(self, low: float, high: float, most: int, expected: list[float]) -> None:
        assert drawing.ticks(low, high, most) == pytest.approx(expected)

    def test_of_what_is_counted_are_whole(self) -> None:
        assert drawing.ticks(0, 2, 6, whole=True) == [0, 1, 2]
        assert drawing.ticks(0, 2, 6) == [0, 0.5, 1, 1.5, 2]

    @given(
        st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 12), st.booleans()
    )  # fmt: skip
    def test_lie_inside_ascend_and_are_never_too_many(self, low: float, length: float, most: int, whole: bool) -> None:
        found = drawing.ticks(low, low + length, most, whole)
        assert len(found) <= most
        assert found == sorted(found)
        assert (
            all(low - 1e-6 * length <= tick <= (low + length) + 1e-6 * length for tick in found)
            or abs(low) > 1e6 * length
        )

    def test_of_losses_over_decades_are_powers_of_ten(self) -> None:
        assert Scale(0.0008, 3.0, logarithmic=True).ticks(5) == pytest.approx([0.001, 0.01, 0.1, 1.0])


class TestScales:
    def test_are_logarithmic_only_where_that_is_allowed_and_worth_it(self) -> None:
        wide = Panel(title="", curves=(), logarithmic_above=30.0)
        assert drawing.of_values([0.01, 2.0], wide).logarithmic
        assert not drawing.of_values([0.5, 2.0], wide).logarithmic
        assert not drawing.of_values([0.0, 2.0], wide).logarithmic
        assert not drawing.of_values([0.01, 2.0], Panel(title="", curves=())).logarithmic

    @given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=20), st.booleans())
    def test_have_a_place_for_every_value(self, values: list[float], from_zero: bool) -> None:
        found = drawing.of_values(values, Panel(title="", curves=(), from_zero=from_zero, logarithmic_above=30.0))
        assert all(0.0 <= found.place(value) <= 1.0 for value in values if math.isfinite(value))


class TestASeries:
    def test_is_short_and_shows_a_single_spike_among_a_million_values(self) -> None:
        series, rng = Series(1000), random.Random(0)
        for step in range(1_000_000):
            series.add(step, 99.0 if step == 437_211 else rng.random())
        assert len(series) <= 1000
        peak = max(series.envelope(), key=lambda point: point[1] or 0.0)
        assert peak[1] == 99.0
        assert peak[0] == pytest.approx(437_211, abs=2100)

    def test_of_few_values_is_these_values(self) -> None:
        series = Series(10)
        for x in range(10):
            series.add(x, x * x)
        assert series.envelope() == series.means() == [(x, x * x) for x in range(10)]

    def test_keeps_a_gap_and_does_not_smooth_over_it(self) -> None:
        series = Series(100)
        for x in range(60):
            series.add(x, None if 20 <= x < 40 else 1.0 if x < 20 else 5.0)
        assert [x for x, mean in series.means() if mean is None] == [20]
        assert {mean for _, mean in series.smoothed()} == {1.0, None, 5.0}

    def test_forgets_what_was_taken_back(self) -> None:
        series = Series(100)
        for x in range(50):
            series.add(x, float(x))
        assert series.cut(39) == [(float(x), float(x)) for x in range(40, 50)]
        series.add(40, 7.0)
        assert series.means()[-2:] == [(39, 39.0), (40, 7.0)]

    @given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=400), st.integers(4, 40))
    def test_never_grows_and_never_loses_the_extremes(self, values: list[float | None], most: int) -> None:
        series = Series(most)
        for x, y in enumerate(values):
            series.add(x, y)
        assert len(series) <= most + 1
        known = [y for y in values if y is not None]
        gaps = sum(a is None and b is not None for a, b in zip([1.0, *values], values, strict=False))
        if known and gaps * 2 < most:
            found = [y for _, y in series.envelope() if y is not None]
            assert (min(found), max(found)) == (min(known), max(known))

    def test_is_shortened_without_losing_its_extremes(self) -> None:
        points: list[Point] = [(x, math.sin(x)) for x in range(10_000)]
        points[1234] = (1234, 50.0)
        found = shorten(points, 200)
        assert len(found) <= 201
        assert max(y for _, y in found if y is not None) == 50.0
        assert found == sorted(found)


class TestADrawing:
    def test_is_well_formed_and_says_what_it_is_to_those_who_do_not_see_it(self) -> None:
        tree = ElementTree.fromstring(drawn(one((0, 1.0), (100, 2.0))))
        assert tree.get("role") == "img"
        names = (tree.get("aria-labelledby") or "").split()
        assert [part.get("id") for part in tree if part.tag in ("title", "desc")] == names
        assert [tree.findtext("title"), tree.findtext("desc")] == ["Title", "Description."]

    def test_takes_all_colours_from_variables_that_the_palette_sets_for_light_and_dark(self) -> None:
        svg = drawn(one((0, 1.0), (50, None), (60, 3.0), flags=(70.0,), flag="bad"))
        assert not re.search(r"#[0-9a-fA-F]{3,}|rgb", svg)
        assert set(re.findall(r"var\(--([a-z]+)\)", svg)) <= chart.LIGHT.keys() == chart.DARK.keys()
        light, dark = chart.variables().split("@media (prefers-color-scheme: dark)")
        assert all(f"--{role}: {chart.LIGHT[role]};" in light for role in chart.LIGHT)
        assert all(f"--{role}: {chart.DARK[role]};" in dark for role in chart.DARK)

    def test_needs_no_style_and_no_script_of_its_own(self) -> None:
        svg = drawn(training(Losses(each=[(0, 1.0)], scored=[(50, 0.9)], best=(50, 0.9)), STEPS))
        assert not re.search(r"style=|<style|<script|\bon[a-z]+=|href", svg)

    @pytest.mark.parametrize(
        ("points", "logarithmic"),
        [
            (((0, 1.0), (37, 0.98612), (38, 0.98609), (100, 2.0)), False),
            (((0, 0.0021), (50, 3.0417), (100, 12_345.0)), True),
            (((0, -4.0), (99, 12_345.6)), False),
        ],
    )
    def test_is_written_in_the_values_that_it_shows_and_a_matrix_takes_them_to_their_places(
        self, points: tuple[Point, ...], logarithmic: bool
    ) -> None:
        tree = ElementTree.fromstring(drawn(one(*points, logarithmic_above=30.0)))
        chart, panel = (tree.find(f".//g[@class='{name}']") for name in ("chart", "panel"))
        curves = tree.find(".//g[@class='curves']")
        path = tree.find(".//path[@class='values']")
        assert chart is not None
        assert curves is not None
        assert path is not None
        assert panel.get("data-log") == str(int(logarithmic))
        written = [tuple(map(float, pair.split())) for pair in (path.get("d") or "")[1:].split("L")]
        a, b, c, d, e, f = map(float, (curves.get("transform") or "")[7:-1].split())
        left, width, _, _ = map(float, (chart.get("data-plot") or "").split())
        top, height = map(float, (panel.get("data-plot") or "").split())
        assert (b, c) == (0, 0)
        for (x, y), (shown_x, shown_y) in zip(points, written, strict=True):
            assert shown_x == pytest.approx(x, rel=1e-4)
            assert y is not None
            assert (10**shown_y if logarithmic else shown_y) == pytest.approx(y, rel=1e-4)
            assert a * shown_x + e == pytest.approx(left + x / 100 * width, abs=0.1)
            assert top - 0.1 <= d * shown_y + f <= top + height + 0.1

    def test_is_broken_where_the_line_is(self) -> None:
        paths = re.findall(
            r'd="([^"]*)" stroke="var\(--trainer\)"', drawn(one((0, 1.0), (9, 2.0), (10, None), (20, 1.0), (30, 2.0)))
        )
        assert [path.count("L") for path in paths] == [1, 1]

    def test_has_no_more_points_than_pixels_have_a_use_for(self) -> None:
        points = [(x / 1000, random.random()) for x in range(100_000)]
        assert len(drawn(one(*points))) < 40_000
        assert len(drawn(one(*points), look=NARROW)) < 15_000

    def test_has_titles_legends_and_units(self) -> None:
        told = Losses(each=[(0, 2.0), (100, 0.5)], scored=[(50, 0.975)], best=(50, 0.975), best_at="at step 50")
        found = words(drawn(training(told, STEPS)))
        assert {"Training loss", "Test accuracy", "best 97.50 % at step 50", "step"} <= found
        assert any("%" in word for word in found if word not in ("best 97.50 % at step 50",))

    def test_shows_what_was_done_again_and_where_the_loss_was_no_number(self) -> None:
        told = Losses(each=[(0, 2.0), (9, 1.0)], redone=[[(5, 1.5), (9, 1.2)]], not_finite=[3.0])
        assert {REDONE, "loss not finite"} <= words(drawn(training(told, STEPS)))

    def test_says_why_the_group_changed_where_there_is_room(self) -> None:
        bands = [Band(begin=x, end=x + 1, words=("member lost", "1 s without a step")) for x in (20, 21, 60)]
        story = pace([(0, 5.0), (99, 5.0)], [(0, 2.0), (99, 2.0)], STEPS, bands)
        texts = [part.text for part in ElementTree.fromstring(drawn(story)).iter("text")]
        assert texts.count("member lost") == 2

    def test_never_becomes_a_part_of_the_page_by_what_a_run_says(self) -> None:
        chart = Chart(
            axis=Axis(low=0, high=1, label=EVIL, pauses=((0.5, EVIL),)),
            panels=(
                Panel(
                    title=EVIL,
                    note=EVIL,
                    flag=EVIL,
                    flags=(0.5,),
                    bands=(Band(begin=0, end=1, words=(EVIL, EVIL)),),
                    curves=(Curve(points=((0, 1.0), (1, 2.0)), color="trainer", label=EVIL),),
                ),
            ),
        )
        row = Row(label=EVIL, color="trainer", points=((0, 1.0),), value_text=EVIL)
        bad = Row(label=EVIL, color="trainer", points=((0, 1.0),), value_text=EVIL, alert=EVIL)
        use = rows.draw("b", EVIL, EVIL, [Rows(caption=EVIL, rows=(row, bad))], [0.5], chart.axis, WIDE)
        for svg in (drawing.draw("a", EVIL, EVIL, [chart], WIDE), use):
            assert "<script" not in svg
            names = {name for part in ElementTree.fromstring(svg).iter() for name in part.attrib}
            assert not [name for name in names if name.startswith("on")]

    @pytest.mark.parametrize("points", [[], [(0, None)], [(5, 1.0)], [(5, 0.0), (6, 0.0)], [(0, 1e300), (1, -1e300)]])
    @pytest.mark.parametrize("look", [WIDE, NARROW])
    def test_copes_with_next_to_nothing(self, points: list[Point], look: Viewport) -> None:
        svg = drawn(one(*points), look=look)
        ElementTree.fromstring(svg)
        assert not re.search(r"\bnan\b|\binf\b", svg)

    def test_stands_side_by_side_on_a_desk_and_one_below_the_other_on_a_phone(self) -> None:
        charts = one((0, 1.0), (9, 2.0)), one((0, 1.0), (9, 2.0))
        sizes = [
            [float(part) for part in (ElementTree.fromstring(drawn(*charts, look=look)).get("viewBox") or "").split()]
            for look in (WIDE, NARROW)
        ]
        assert sizes[0][2] == WIDE.width
        assert sizes[1][2] == NARROW.width
        assert sizes[1][3] > 1.7 * sizes[0][3]


class TestRanks:
    def story(self, count: int) -> Panel:
        busy = {str(rank): [(0.0, 5.0), (9.0, 10.0 + rank)] for rank in range(count)}
        found = ranks(Ranks(busy=busy, memory={"0": [(0.0, None)]}), STEPS)
        (panel,) = found.panels
        return panel

    def test_have_lines_that_can_be_told_apart_by_colour_and_dashes(self) -> None:
        looks = {(curve.color, curve.dashed) for curve in self.story(8).curves}
        assert len(looks) == 8
        assert "stroke-dasharray" in drawn(Chart(axis=STEPS, panels=(self.story(8),)))

    def test_of_more_than_that_are_the_slowest(self) -> None:
        panel = self.story(1000)
        assert panel.title == "Own work in a step (ms), the 8 slowest of 1,000 ranks"
        assert [curve.label for curve in panel.curves] == [f"rank {rank}" for rank in range(992, 1000)]

    def test_of_which_nothing_is_known_have_no_chart(self) -> None:
        assert ranks(Ranks(throughput=[(0.0, None)]), STEPS) is None
        assert optimization((), (), (), STEPS) is None


def test_rows_are_filled_to_the_busy_cores_and_warn_of_a_straggler() -> None:
    busy = Row(label="rank 0", color="trainer", points=[(x, 1.0) for x in range(11)], value_text="100 %")
    idle = Row(
        label="rank 1", color="trainer", points=[(x, 0.25) for x in range(11)], value_text="25 %", alert="1.6× slow"
    )
    axis = Axis(low=0, high=10, label="time (s)")
    svg = rows.draw("b", "Use", "Use.", [Rows(caption="TRAINING", rows=(busy, idle))], [1.0, 1.0, 9.0], axis, WIDE)
    heights = [float(found[1]) - float(found[2]) for found in re.finditer(r'd="M[-0-9.]+ ([0-9.]+)V([0-9.]+)H', svg)]
    assert heights[1] == pytest.approx(heights[0] / 4, rel=0.05)
    assert {"rank 0", "100 %", "rank 1", "1.6× slow", "checkpoints"} <= words(svg)
    assert "25 %" not in words(svg)
    assert svg.count("l4 5l-4 5l-4 -5Z") == 2


def test_rows_have_a_hole_where_nothing_is_known_and_are_short_however_many_there_are() -> None:
    axis = Axis(low=0, high=100, label="time (s)")
    torn = Row(label="a", color="gpu", points=[(x, None if 40 <= x < 60 else 0.5) for x in range(100)], value_text="")
    svg = rows.draw("b", "Use", "Use.", [Rows(caption="", rows=(torn,))], [], axis, WIDE)
    (path,) = re.findall(r'd="(M[^"]+Z)" fill="var\(--gpu\)"', svg)
    assert path.count("M") == path.count("Z") == 2
    noise = random.Random(0)
    many = tuple(
        Row(label=str(rank), color="trainer", points=[(x / 3, noise.random()) for x in range(300)], value_text="")
        for rank in range(32)
    )
    assert len(rows.draw("b", "Use", "Use.", [Rows(caption="", rows=many)], [], axis, WIDE)) < 64_000


def test_a_gallery_has_a_picture_of_as_many_shades_as_can_be_told_apart_and_harmless_words() -> None:
    tile = Tile(bytes(range(0, 256, 4)), 8, EVIL, EVIL, EVIL)
    tree = ElementTree.fromstring(gallery.draw("g", EVIL, [tile] * 30, NARROW))
    assert len(tree.findall("g")) == 30
    shades = tree.findall("g")[0].findall(".//path")
    assert [float(path.get("fill-opacity") or 0) for path in shades] == sorted(
        {round(level / 7, 2) for level in range(1, 8)}
    )
    inked = sum(int(length) for path in shades for length in re.findall(r"h(\d+)v", path.get("d") or ""))
    assert inked == 64 * 7 / 8
    assert {part.tag for part in tree.iter()} <= {"svg", "title", "desc", "g", "rect", "path", "text"}
    words = {text.text for text in tree.iter("text")}
    assert words == {EVIL[:15] + "…"}


def test_charts_need_nothing_but_pythons_own_library() -> None:
    heavy = ("numpy", "matplotlib", "pydantic", "aiohttp", "rich")
    modules = ", ".join(f"tandem_coordinator.charts.{name}" for name in ("drawing", "rows", "stories", "gallery"))
    code = f"import sys, {modules}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"


class TestHistograms:
    def test_have_a_bar_for_each_bin_with_values_as_wide_as_the_bin(self) -> None:
        svg = bars.draw("a", "Title", "Description.", {"errors": Histogram([10, 0, 5], [0, 1, 2, 4])}, WIDE)
        assert svg is not None
        narrow, wide = (dict(part.items()) for part in ElementTree.fromstring(svg).iter("rect"))
        assert float(narrow["height"]) == pytest.approx(2 * float(wide["height"]), abs=0.2)
        assert float(wide["width"]) == pytest.approx(2 * float(narrow["width"]), rel=0.02)
        assert {"errors", "15 values from 0 to 4, median 0.75, 90 % below 3.4", "2"} <= words(svg)

    def test_quantiles_are_those_of_values_spread_over_their_bins(self) -> None:
        even = Histogram([10] * 10, range(11))
        assert [bars.quantile(even, share) for share in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0, 2.5, 5, 10])
        assert bars.quantile(Histogram([0, 4, 0], [0, 1, 2, 3]), 1.0) == 2

    def test_a_line_of_text_has_a_block_for_each_bin_and_of_many_for_neighbours(self) -> None:
        assert bars.sparkline(Histogram([0, 1, 4, 8], [0, 1, 2, 3, 4])) == " ▁▄█"
        assert bars.sparkline(Histogram([0, 1, 10**9], [0, 1, 2, 3])) == " ▁█"
        assert bars.sparkline(Histogram([1] * 256, range(257))) == "█" * 32

    def test_without_values_say_so(self) -> None:
        empty = Histogram([0, 0], [0, 1, 2])
        assert bars.describe(empty) == "no values from 0 to 2"
        assert bars.sparkline(empty) == "  "
        assert "<rect" not in (bars.draw("a", "", "", {"errors": empty}, WIDE) or "")

    @pytest.mark.parametrize("look", [WIDE, NARROW])
    def test_stay_inside_whatever_is_in_them_and_however_many_there_are(self, look: Viewport) -> None:
        huge = Histogram([2**63, 1], [-1.7e308, 0, 1.7e308])
        svg = bars.draw("a", EVIL, EVIL, {f"{EVIL}{n}": huge for n in range(64)}, look) or ""
        assert "<script" not in svg
        root = ElementTree.fromstring(svg)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert len(list(root.iter("rect"))) == 2 * bars.MAX_COUNT
        for part in root.iter("rect"):
            assert 0 <= float(part.attrib["x"]) <= float(part.attrib["x"]) + float(part.attrib["width"]) <= width + 0.5
            assert 0 <= float(part.attrib["y"]) + float(part.attrib["height"]) <= height

    def test_without_any_there_is_no_drawing(self) -> None:
        assert bars.draw("a", "", "", {}, WIDE) is None


class TestScoresBesideTheBaseModel:
    def test_are_far_from_it_on_a_scale_on_which_they_still_differ_and_no_line_leads_from_it(self) -> None:
        scored = [(100.0, 9.1), (200.0, 8.2), (300.0, 7.9)]
        (panel,) = training(Losses(scored=scored, base_scored=[(0.0, 400.0)], metric="perplexity"), STEPS).panels
        assert [(curve.kind, curve.width, list(curve.points)) for curve in panel.curves] == [
            ("dots", 1.3, scored),
            ("dots", 0.0, [(0.0, 400.0)]),
        ]
        scale = drawing.of_values([400.0, *(y for _, y in scored)], panel)
        assert scale.logarithmic
        assert scale.place(9.1) - scale.place(7.9) > 0.03

    @pytest.mark.parametrize(("base", "logarithmic"), [(1028.0, True), (300.0, False)])
    def test_are_on_a_plain_scale_while_it_is_near(self, base: float, logarithmic: bool) -> None:
        scored = [(100.0, 208.1), (200.0, 155.2), (300.0, 126.1)]
        (panel,) = training(Losses(scored=scored, base_scored=[(0.0, base)], metric="perplexity"), STEPS).panels
        assert drawing.of_values([base, *(y for _, y in scored)], panel).logarithmic == logarithmic
        (panel,) = training(Losses(scored=[(0.0, base), *scored], metric="perplexity"), STEPS).panels
        assert not drawing.of_values([base, *(y for _, y in scored)], panel).logarithmic

    def test_of_shares_stay_on_a_plain_scale(self) -> None:
        (panel,) = training(Losses(scored=[(1.0, 0.9)], base_scored=[(0.0, 0.01)]), STEPS).panels
        assert not drawing.of_values([0.01, 0.9], panel).logarithmic


def test_a_script_that_logs_nothing_has_no_axes_of_what_it_did_not_log() -> None:
    """Axes from 0 to 1 would look like a measurement."""
    assert [one.title for one in training(Losses(scored=[(1.0, 0.9)]), STEPS).panels] == ["Test accuracy"]
    (loss, _) = training(Losses(tested=[(1.0, 0.3)], scored=[(1.0, 0.9)]), STEPS).panels
    assert loss.title == "Test loss", "a loss of checkpoints is none of training"
    assert [one.title for one in pace([], [(0.0, 2.0)], STEPS).panels] == ["World size (ranks)"]


class TestWhatAModelWrote:
    @staticmethod
    def cell(text: str) -> str:
        table = completions.draw([("Base model", Completions(texts=[(0, "p", text)]))], 4, 2_000)
        return "".join(list(ElementTree.fromstring(f"<a>{table}</a>").iter("td"))[1].itertext())

    def test_shows_ends_of_lines_and_takes_no_screen_for_nothing_else(self) -> None:
        assert self.cell("one\n\ntwo\tthree") == "one⏎⏎\ntwo    three"
        assert self.cell("\n" * 900) == "⏎ × 900\n"
        assert self.cell("a\n" * 50).splitlines()[-1] == "… 39 more lines"
