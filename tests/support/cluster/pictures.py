"""Draws what a dashboard would show, from what Prometheus answered: for the documentation, and to be looked at.

Grafana itself is not needed, so this shows the content and not its looks.
"""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from tests.support.cluster.recording import Answer, Panel, Period, Recording

COLUMNS = 24
WIDTH, ROW = 17.0, 0.32
"""Inches: of the picture, and of one of Grafana's rows."""
DPI = 84
INK, FAINT, GRID = "#22272e", "#6e7781", "#e4e7eb"
COLORS = ["#2f6fb3", "#d9822b", "#3a9a5b", "#a4499e", "#c0413b", "#6b7f1f", "#4aa3a8", "#8a6d4b", "#7a7fd0"]
MAX_IN_A_LEGEND = 8


def draw(recording: Recording, period: Period, path: Path) -> Path:
    """Draw all panels where they stand in the dashboard."""
    rows = max(panel.place["y"] + panel.place["h"] for panel in recording.panels)
    height = (rows + 2) * ROW
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    figure.text(0.01, 1 - 0.9 * ROW / height, recording.title, fontsize=15, color=INK, weight="bold")
    for panel in recording.panels:
        _Drawing(figure, panel, height, period, recording.marks).draw()
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO()
    figure.savefig(whole, format="png")
    # A palette is enough for lines, and a fourth of the size.
    Image.open(whole).convert("RGB").quantize(128).save(path, optimize=True)
    return path


class _Drawing:
    def __init__(self, figure: Figure, panel: Panel, height: float, period: Period, marks: list[Answer]) -> None:
        self._figure, self._panel, self._height, self._period = figure, panel, height, period
        self._marks = marks

    def draw(self) -> None:
        panel, place = self._panel, self._panel.place
        left = place["x"] / COLUMNS
        top = 1 - (place["y"] + 1.5) * ROW / self._height
        if panel.kind == "row":
            self._figure.text(left + 0.005, top - 0.75 * ROW / self._height, panel.title, fontsize=11, color=FAINT)
            return
        self._figure.text(left + 0.008, top - 0.65 * ROW / self._height, panel.title, fontsize=9.5, color=INK)
        if all(one.is_empty for one in panel.answers):
            self._say(left, top, "no data")
            return
        kinds: dict[str, Callable[[], None]] = {
            "stat": self._stat,
            "bargauge": self._bars,
            "timeseries": self._lines,
            "xychart": self._scatter,
            "table": self._table,
        }
        kinds[panel.kind]()

    def _say(self, left: float, top: float, text: str) -> None:
        place = self._panel.place
        middle = top - place["h"] / 2 * ROW / self._height
        self._figure.text(left + place["w"] / COLUMNS / 2, middle, text, fontsize=10, color=FAINT, ha="center")

    def _axes(self) -> Axes:
        place = self._panel.place
        left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
        bottom = 1 - (place["y"] + 1.5 + place["h"] - 1.6) * ROW / self._height
        axes = self._figure.add_axes((left + 0.032, bottom, width - 0.068, (place["h"] - 2.9) * ROW / self._height))
        axes.grid(color=GRID, linewidth=0.8)
        axes.tick_params(labelsize=7, colors=FAINT, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def _stat(self) -> None:
        found = [(name, values[-1]) for _, name, _, values in self._series() if values]
        place = self._panel.place
        left, top = place["x"] / COLUMNS, 1 - (place["y"] + 1.5) * ROW / self._height
        if self._panel.title == "Phase":
            text = ", ".join(name for name, _ in found)
        else:
            text = "\n".join(f"{name}  {_told(value, self._panel.unit)}".strip() for name, value in found)
        size = 17 if len(found) == 1 else 11
        middle = top - 2.6 * ROW / self._height
        self._figure.text(
            left + place["w"] / COLUMNS / 2, middle, text, fontsize=size, color=COLORS[0], ha="center", va="center"
        )

    def _bars(self) -> None:
        axes = self._axes()
        found = sorted((name, values[-1]) for _, name, _, values in self._series() if values)
        axes.barh([name for name, _ in found], [value for _, value in found], color=COLORS[0])
        box = axes.get_position()
        axes.set_position((box.x0 + 0.045, box.y0, box.width - 0.045, box.height))
        for row, (_, value) in enumerate(found):
            axes.text(value, row, f" {_told(value, self._panel.unit)}", va="center", fontsize=7, color=INK)

    def _lines(self) -> None:
        axes = self._axes()
        panel = self._panel
        other = axes.twinx() if any(one.right for one in panel.answers) else None
        found = list(self._series())
        if panel.stacked:
            self._stack(axes, found)
        for place, (answer, name, times, values) in enumerate(() if panel.stacked else found):
            on = other if answer.right and other is not None else axes
            style = "--" if answer.right else "-"
            on.plot(times, values, style, color=COLORS[place % len(COLORS)], linewidth=1.3, label=name)
        for color, mark in zip(("#d9822b", "#a4499e"), self._marks, strict=False):
            for _, _, times, _ in _numbers(mark, self._period):
                for at in times[:1]:
                    axes.axvline(at, color=color, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, self._period.end - self._period.start)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _told(value, panel.unit)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
        handles, names = axes.get_legend_handles_labels()
        if other is not None:
            other.tick_params(labelsize=7, colors=FAINT, length=0)
            unit = next(one.unit for one in panel.answers if one.right)
            other.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _told(value, unit)))
            other.set_ylim(bottom=0)
            for spine in other.spines.values():
                spine.set_visible(False)
            more, words = other.get_legend_handles_labels()
            handles, names = handles + more, names + [f"{word} →" for word in words]
        self._legend(axes, handles[:MAX_IN_A_LEGEND], names[:MAX_IN_A_LEGEND])

    def _stack(self, axes: Axes, found: list[tuple[Answer, str, list[float], list[float]]]) -> None:
        moments = sorted({at for _, _, times, _ in found for at in times})
        rows = []
        for _, _, times, values in found:
            known = dict(zip(times, values, strict=True))
            rows.append([known.get(at, 0.0) for at in moments])
        colors = [COLORS[place % len(COLORS)] for place in range(len(found))]
        axes.stackplot(moments, rows, labels=[name for _, name, _, _ in found], colors=colors, alpha=0.8)

    def _scatter(self) -> None:
        axes = self._axes()
        answers = self._panel.answers
        for place, (x, y) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
            across = {
                at: value
                for _, _, times, values in _numbers(x, self._period)
                for at, value in zip(times, values, strict=True)
            }
            up = [
                (across[at], value)
                for _, _, times, values in _numbers(y, self._period)
                for at, value in zip(times, values, strict=True)
                if at in across
            ]
            on = axes if place == 0 else axes.twinx()
            on.scatter([one for one, _ in up], [two for _, two in up], s=5, color=COLORS[place], label=y.legend)
            on.tick_params(labelsize=7, colors=FAINT, length=0)
            for spine in on.spines.values():
                spine.set_visible(False)
            on.text(
                0.02 + 0.4 * place, -0.2, f"• {y.legend}", transform=axes.transAxes, fontsize=7, color=COLORS[place]
            )

    def _table(self) -> None:
        axes = self._axes()
        axes.axis("off")
        columns: dict[str, dict[str, str]] = {}
        for answer in self._panel.answers:
            match = re.search(r"tandem_(\w+)", answer.query)
            assert match is not None
            for one in answer.series:
                row = _plain(f"{one['metric'].get('namespace', '')}/{one['metric'].get('job', '')}")
                value = float(one["values"][-1][1])
                columns.setdefault(match[1], {})[row] = _told(value, "s" if match[1].endswith("seconds") else "short")
        rows = sorted({row for column in columns.values() for row in column})
        cells = [[row, *(column.get(row, "") for column in columns.values())] for row in rows]
        shown = axes.table(cells, colLabels=["job", *columns], loc="upper center", cellLoc="left", edges="horizontal")
        shown.auto_set_font_size(False)
        shown.set_fontsize(8)
        shown.scale(1, 1.5)

    def _legend(self, axes: Axes, handles: list[Any], names: list[str]) -> None:
        if any(names):
            axes.legend(
                handles, names, loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=4, fontsize=7, frameon=False,
                columnspacing=1.0, handlelength=1.2, labelcolor=INK, borderaxespad=0,
            )  # fmt: skip

    def _series(self) -> Iterator[tuple[Answer, str, list[float], list[float]]]:
        for answer in self._panel.answers:
            yield from _numbers(answer, self._period)


def _numbers(answer: Answer, period: Period) -> Iterator[tuple[Answer, str, list[float], list[float]]]:
    """Each series: its name, times in seconds from the start, and values that are numbers."""
    for one in answer.series:
        points = [(at - period.start, float(value)) for at, value in one["values"]]
        known = [(at, value) for at, value in points if value == value and abs(value) != float("inf")]
        if known:
            yield answer, _name(answer, one["metric"]), [at for at, _ in known], [value for _, value in known]


def _name(answer: Answer, labels: dict[str, str]) -> str:
    named = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), answer.legend)
    return _plain(named)


def _plain(name: str) -> str:
    """Names of test namespaces are long and say nothing."""
    return re.sub(r"tandem-test-\w+", "team", name)


def _told(value: float, unit: str) -> str:
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "s" if 0 < abs(value) < 1:
            return f"{1000 * value:.3g} ms"
        case "s":
            return f"{value:.4g} s"
        case "bytes":
            for scale, letter in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
                if abs(value) >= scale:
                    return f"{value / scale:.3g} {letter}"
            return f"{value:.0f} B"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
