"""Runs of this machine, for people. tandem_launcher.local starts their processes.

platform    the run, for the commands that work on every platform
submission  this machine as a place to submit to: starts `tandem run --detach`
run_output  the output of all children as one stream of lines
known       the runs of this machine
run_view    a run in the form of a cluster job, so that both are displayed alike
"""
