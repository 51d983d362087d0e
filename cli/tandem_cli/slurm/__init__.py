"""Runs on SLURM, for people: `tandem submit --slurm`. tandem_launcher.slurm starts their processes.

platform         a run, for the commands that work on every platform
submission       submits a job to SLURM
execution        commands on the nodes of a run: stacks of ranks, a debugger, a shell
shell            the process on a node for `tandem shell`
head             the name that sbatch scripts of the version before know; in tandem_launcher.slurm now
extension        the same
step             the same, known to running heads
"""
