"""What `tandem run` shows of a job: a calm screen on a terminal, plain lines elsewhere, a summary at the end.

    scene    all that is shown at one moment, as a value
    screen   a scene as a rich renderable of at most 20 lines that fits 80 columns
    canvas   a picture that fills the terminal until it is closed
    lines    a scene, and an event, as one line of key=value fields
    summary  how a run ended, read from its run directory
    sparkline  a curve as a line of blocks
    console  a terminal that prints no control characters

All of it computes; `tandem_cli.local.local_run` prints.
"""
