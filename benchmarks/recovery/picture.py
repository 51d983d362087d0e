"""Results as a picture: every shot a dot, failures a cross at the right edge."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery.table import SINGLE_STAGE, cell, rows

COLOURS = ["#0072b2", "#56b4e9", "#000000", "#009e73", "#cc79a7", "#d55e00", "#e69f00"]
"""Okabe and Ito's colours, which colour-blind readers can distinguish."""
MIN_SECONDS = 0.05
"""Position of a group that was not disturbed at all, on the logarithmic scale, in seconds."""


def draw(records: Sequence[dict[str, Any]], sides: Sequence[str], path: Path) -> None:
    """Draw a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    present = [side for side in sides if any(record.get("side") == side for record in records)]
    row_keys = rows(records)
    limit = max((record.get("limit", 0) for record in records if record["kind"] == "run"), default=90.0)
    results = {row: {side: result for side in present if (result := cell(records, row, side))} for row in row_keys}
    height = sum(len(of_row) + 1 for of_row in results.values())
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.17 * height), layout="constrained")
    places, names = [], []
    y = 0.0
    for row, of_row in results.items():
        places.append(y + (len(of_row) - 1) / 2)
        names.append(row[0] if row[1] == SINGLE_STAGE else f"{row[0]}:\n{row[1]}")
        for side, result in of_row.items():
            colour = COLOURS[list(sides).index(side) % len(COLOURS)]
            times = [max(MIN_SECONDS, seconds) for seconds in result.seconds]
            axes.scatter(times, [y] * len(times), s=14, color=colour, alpha=0.6, linewidths=0)
            if result.median is not None:
                axes.plot([max(MIN_SECONDS, result.median)] * 2, [y - 0.4, y + 0.4], color=colour, linewidth=2)
            if result.failures:
                axes.scatter([limit], [y], marker="x", s=30, color=colour)
                text = f"{result.failures} of {result.shots} failed"
                axes.annotate(text, (limit, y), (6, 0), textcoords="offset points", va="center", fontsize=7)
            y += 1
        axes.axhline(y, color="#dddddd", linewidth=0.8)
        y += 1
    axes.set_ylim(y - 1, -1)
    for side in present:
        axes.scatter([], [], color=COLOURS[list(sides).index(side) % len(COLOURS)], s=20, label=side)
    axes.set(xscale="log", xlim=(MIN_SECONDS * 0.8, limit * 2.4), xlabel="seconds until the group trains again")
    axes.set_xticks(
        [MIN_SECONDS, 0.5, 1, 2, 5, 10, 30, limit], ["not\ndisturbed", "0.5", "1", "2", "5", "10", "30", "never"]
    )
    axes.minorticks_off()
    axes.set_yticks(places, names)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=len(present), frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
