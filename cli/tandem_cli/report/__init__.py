"""The report of a run: one page made from the files of its run directory.

    folder       whether there is a run directory at all
    reading      a run directory -> `run.RunData`; the only module that reads the run's files
    logs         the three kinds of log of a run directory
    generations  the memberships of a run, and which steps the final model contains
    checkpoints  the checkpoints of a run and their evaluations
    run          a run as frozen values
    by_class     the accuracy of each class: the newest checkpoint beside the best
    clock        the time axis, without the hours in which nothing ran
    summary      the key figures at the top of the page
    figures/     one module for each picture: values in, SVG out, by tandem_coordinator.charts
    raster       a picture as PNG
    page         the page
    comparison   several runs side by side
    comparison_page  several runs as a page and a picture
    run_export   the numbers of a run as CSV, or for TensorBoard
    writing      page and pictures as files

Needs numpy and resvg (`pip install 'tandem-training[report]'`).
"""
