"""A run as one page: what the files of a run directory say, drawn and written down.

    folder       whether there is a run directory at all
    reading      a run directory -> `run.Run`, the only part that touches the run's files
    logs         the three kinds of log of a run directory
    values       values of JSON files as they are found: damaged, missing
    generations  the memberships of a run, and which steps made the model
    checkpoints  the checkpoints of a run and their evaluations
    run          what a run was, as frozen values
    summary      the figures of merit that stand at the top of the page
    clock        wall-clock time without the hours in which nothing ran
    series       long series made short enough to draw, without losing a spike
    figures/     one module for each picture: values in, charts (tandem.charts) or a matplotlib figure out
    style        type of matplotlib's pictures, how they follow light and dark, and a figure as a piece of HTML
    page         the page
    writing      page and pictures as files

Needs matplotlib (`pip install 'tandem[report]'`), but for `words` and the style sheet, which others use as well.
"""
