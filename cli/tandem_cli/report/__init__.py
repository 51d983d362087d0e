"""A run as one page: what the files of a run directory say, drawn and written down.

    lines      JSON-lines logs as they are found: torn, growing, missing
    folder     whether there is a run directory at all
    reading    a run directory -> `run.Run`, the only part that touches the run's files
    run        what a run was, as frozen values
    summary    the figures of merit that stand at the top of the page
    clock      wall-clock time without the hours in which nothing ran
    series     long series made short enough to draw, without losing a spike
    figures/   one module for each picture: values in, charts (tandem.charts) or a matplotlib figure out
    style      type of matplotlib's pictures, and how they follow light and dark
    svg        a figure as a piece of HTML
    page       the page
    writing    page and pictures as files

Needs matplotlib (`pip install 'tandem[report]'`), but for `words` and the style sheet, which others use as well.
"""
