"""Jobs and runs as text on a terminal. tandem_launcher.terminal is the display of `tandem run`.

tables     a job or run at one moment as lines of text, for `tandem status` and `tandem events`
waterfall  a trace as bars below each other, for `tandem trace`
"""
