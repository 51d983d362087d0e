"""Run a script, and end the process without taking the interpreter apart: `ends_at_once.py SCRIPT ARGUMENTS…`

What torch does at the end of an ordinary script is not what its tests are about: a thread of gloo lets go of the last
gradients only after the script has seen them, takes the interpreter's lock for it, and aborts the process ("terminate
called without an active exception") if the interpreter is ending by then. Seen in 1 of 40 runs on a busy machine, in 4
of 8 with that thread slowed down (torch 2.15). Ranks that start warm end in this way too (tandem_trainer.agent.warm).
"""

import os
import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
