"""Learning rate and the norm of the gradient over steps, as a chart that the live page has too."""

import numpy as np

from tandem.charts import stories
from tandem.charts.chart import Chart
from tandem.charts.stories import GRADIENT_NORM, LEARNING_RATE
from tandem_cli.report.clock import envelope, smooth, thin
from tandem_cli.report.figures.canvas import steps_of
from tandem_cli.report.figures.training import SMOOTH_SHARE, points
from tandem_cli.report.run import Run

COLUMNS = 420
"""Stretches that a series is shown in."""
SMOOTH_FROM = 100
"""Fewer norms are drawn as they are."""


def charts(run: Run) -> tuple[Chart, ...]:
    """Learning rate and gradient norm. None where neither was logged."""
    steps = run.counted
    x = steps.step.astype(np.float64)
    rates, norms, mean = steps.measures.get(LEARNING_RATE), steps.measures.get(GRADIENT_NORM, np.empty(0)), None
    # A norm is measured now and then: no gap lies between two.
    measured = np.flatnonzero(np.isfinite(norms))
    at, norms = x[measured], norms[measured]
    if len(norms) >= SMOOTH_FROM:
        mean = smooth(norms, max(5, int(len(norms) * SMOOTH_SHARE)))
    story = stories.optimization(
        points(*envelope(x, rates, COLUMNS)) if rates is not None else [],
        points(*envelope(at, norms, COLUMNS)) if len(at) else [],
        points(*thin(at, mean, COLUMNS)) if mean is not None else [],
        steps_of(run),
    )
    return () if story is None else (story,)
