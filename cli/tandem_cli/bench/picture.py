"""A picture of speed, memory and efficiency over the number of workers, a line for each strategy: three panels side
by side."""

from collections.abc import Callable, Sequence

from tandem.formatting import SIZES
from tandem_cli.bench.results import BenchResults, VariantRow
from tandem_cli.report.figures.compared import COLORS
from tandem_cli.report.raster import standalone
from tandem_coordinator.charts.chart import WIDE, Axis, Chart, Curve, Panel, Viewport
from tandem_coordinator.charts.drawing import draw

STYLE = Viewport(WIDE.width, panel_height=240.0)
ROOM = 0.5
"""Margin beside the first and the last number of workers."""
TITLE = "Speed, memory and efficiency"


def draw_results(results: BenchResults) -> str:
    """Draw the results as an SVG file; empty if nothing was measured."""
    rows = [row for row in results.rows if row.runs]
    if not rows:
        return ""
    numbers = [row.workers for row in rows]
    axis = Axis(low=min(numbers) - ROOM, high=max(numbers) + ROOM, label="workers", whole=True)
    memories = [_memory(row) or 0.0 for row in rows]
    power = max(0, (len(f"{max(memories):.0f}") - 1) // 3)
    panels = [
        Panel(title="Samples a second", curves=_curves(rows, lambda row: row.samples_per_second), from_zero=True),
        Panel(
            title=f"Peak memory of a rank ({SIZES[power]})",
            curves=_curves(rows, lambda row: None if (size := _memory(row)) is None else size / 1000**power),
            from_zero=True,
        ),
        Panel(
            title="Efficiency: speed over that of as many single workers",
            curves=_curves(rows, lambda row: row.efficiency),
            unit="share",
            from_zero=True,
        ),
    ]
    charts = [Chart(axis=axis, panels=(panel,)) for panel in panels if panel.curves]
    title = f"{results.conditions.job}: {TITLE[0].lower()}{TITLE[1:]}"
    description = "; ".join(
        f"{row.strategy}, {row.workers} workers: {row.samples_per_second:.4g} samples/s" for row in rows
    )
    return standalone(draw("bench", title, description, charts, STYLE), title)


def _memory(row: VariantRow) -> float | None:
    """Peak memory of a row: the GPU's if there is one, as that is what runs out."""
    return row.peak_memory_bytes if row.peak_gpu_memory_bytes is None else row.peak_gpu_memory_bytes


def _curves(rows: Sequence[VariantRow], value: Callable[[VariantRow], float | None]) -> tuple[Curve, ...]:
    curves = []
    for index, strategy in enumerate(dict.fromkeys(row.strategy for row in rows)):
        pairs = [(float(row.workers), value(row)) for row in rows if row.strategy == strategy]
        points = sorted(point for point in pairs if point[1] is not None)
        if points:
            curves.append(
                Curve(
                    points=points,
                    color=COLORS[index % len(COLORS)],
                    label=strategy,
                    dashed=index >= len(COLORS),
                    kind="dots",
                )
            )
    return tuple(curves)
