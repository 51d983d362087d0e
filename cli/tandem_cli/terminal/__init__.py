"""The display of a job by `tandem run`: a calm screen on a terminal, plain lines elsewhere, a summary at the end.

    screen     a scene, and its rendering in at most 20 lines and 80 columns; a scene or an event as one line
    canvas     a full-screen display that is redrawn until it is closed
    tables     a job or run at one moment as lines of text, for `tandem status` and `tandem events`
    waterfall  a trace as bars below each other, for `tandem trace`
    summary    the summary of a finished run, read from its run directory

All of it computes; `tandem_cli.local.local_run` prints.
"""
