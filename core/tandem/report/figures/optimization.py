"""Learning rate and the norm of the gradient over steps, as a chart that the live page has too."""

import numpy as np

from tandem.charts import stories
from tandem.charts.chart import Chart
from tandem.charts.stories import GRADIENT_NORM, LEARNING_RATE
from tandem.report.figures.canvas import steps_of
from tandem.report.figures.training import SMOOTH_SHARE, points
from tandem.report.run import Run
from tandem.report.series import envelope, smooth, thin

COLUMNS = 420
"""Stretches that a series is shown in."""
SMOOTH_FROM = 100
"""Fewer norms are drawn as they are."""


def charts(run: Run) -> tuple[Chart, ...]:
    """Learning rate and gradient norm. None where neither was logged."""
    steps = run.counted
    x = steps.step.astype(np.float64)
    rates, norms, mean = steps.measures.get(LEARNING_RATE), steps.measures.get(GRADIENT_NORM), None
    if norms is not None and len(norms) >= SMOOTH_FROM:
        mean = smooth(norms, max(5, int(len(norms) * SMOOTH_SHARE)))
    story = stories.optimization(
        points(*envelope(x, rates, COLUMNS)) if rates is not None else [],
        points(*envelope(x, norms, COLUMNS)) if norms is not None else [],
        points(*thin(x, mean, COLUMNS)) if mean is not None else [],
        steps_of(run),
    )
    return () if story is None else (story,)
