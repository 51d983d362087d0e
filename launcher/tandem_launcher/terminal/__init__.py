"""The display of a job by `tandem run`: a calm screen on a terminal, plain lines elsewhere, a summary at the end.

    screen   a scene, and its rendering in at most 20 lines and 80 columns; a scene or an event as one line
    canvas   a full-screen display that is redrawn until it is closed
    display  the screen, or plain lines, and the poll of the coordinator that feeds them
    summary  the summary of a finished run, read from its run directory

`screen` and `summary` compute; tandem_launcher.local.local_run prints.
"""
