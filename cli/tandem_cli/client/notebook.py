"""A run in a notebook, as HTML: phase, step, newest loss, best score, and the curves of the report as SVG.

Everything is escaped: names, messages and metrics may come from a log that anybody wrote.
"""

from html import escape
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.formatting import metric_name, number, printable, score
from tandem.wire.queue_view import queue_lines
from tandem.wire.status import Status
from tandem_coordinator.charts import drawing
from tandem_coordinator.charts.chart import LIGHT, Viewport

if TYPE_CHECKING:
    from tandem_cli.report.run import RunData

VIEWPORT = Viewport(640.0, panel_height=120.0)
TITLE = "Training loss and evaluation score"
_numbers = count()
"""Numbers of drawings: the ids in one must differ from those in every other output of the notebook."""


class LiveOutput:
    """An output of the running cell that is updated.

    Raises:
        UserError: no cell of a notebook is running.
    """

    def __init__(self) -> None:
        try:
            shell = import_module("IPython").get_ipython()
        except ModuleNotFoundError:
            shell = None
        # IPython in a terminal has no kernel; its displays are lines, and each update would be another one.
        if getattr(shell, "kernel", None) is None:
            raise UserError("only a notebook has displays to update; in a terminal: tandem status NAME --watch")
        self._show = import_module("IPython.display").display
        self._handle: Any = None

    def show(self, content: object) -> None:
        """Show an object, or replace what this has shown."""
        if self._handle is None:
            self._handle = self._show(content, display_id=True)
        else:
            self._handle.update(content)


def html(name: str, status: Status | None, data: "RunData | None", problem: str = "") -> str:
    """Describe a run.

    Args:
        status: None if it is unknown.
        data: numbers of the run; None: without curves.
        problem: reason for which something is unknown.
    """
    rows = [] if status is None else _rows(status)
    rows += [("problem", problem)] if problem else []
    cells = "".join(
        f'<tr><td style="color:{LIGHT["muted"]};text-align:left">{escape(label)}</td>'
        f'<td style="text-align:left">{escape(printable(text))}</td></tr>'
        for label, text in rows
    )
    # The colours of a light page also in a dark notebook: the drawing names its colours as variables.
    variables = "".join(f"--{role}:{color};" for role, color in LIGHT.items())
    return (
        f'<div style="{variables}background:{LIGHT["paper"]};color:{LIGHT["ink"]};font-family:sans-serif;'
        f'max-width:{VIEWPORT.width:g}px;padding:8px"><b>{escape(printable(name))}</b>'
        f"<table>{cells}</table>{'' if data is None else _curves(data)}</div>"
    )


def _rows(status: Status) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = [("phase", status.phase)]
    if status.message:
        rows.append(("message", status.message))
    rows += queue_lines(status.queue)
    if (progress := status.progress) is not None:
        total = f" of {number(progress.total_steps)}" if progress.total_steps is not None else ""
        rows.append(("step", f"{number(progress.step)}{total}"))
    if status.loss is not None:
        rows.append(("loss", number(status.loss)))
    if (best := status.best_checkpoint) is not None:
        value = score(best.metric, best.value)
        rows.append(("best", f"{metric_name(best.metric)} {value} at step {best.step:,}"))
    return rows


def _curves(data: "RunData") -> str:
    from tandem_cli.report.clock import make_clock
    from tandem_cli.report.figures.curves import training

    charts = training(data, make_clock(data.marks))[:1]
    return drawing.draw(f"tandem-run-{next(_numbers)}", TITLE, "", charts, VIEWPORT) if charts else ""
