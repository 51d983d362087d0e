"""Runs on SLURM, for people: `tandem submit --slurm`. tandem_launcher.slurm starts their processes.

platform         a run, for the commands that work on every platform
submission       submits a job to SLURM
execution        commands on the nodes of a run: stacks of ranks, a debugger, a shell
shell            the process on a node for `tandem shell`
"""
