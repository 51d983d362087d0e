"""Starts the processes of a job on this machine and on SLURM, watches them, and displays the job meanwhile.

local            this machine: `tandem run`
slurm            a SLURM cluster: scripts, the head, its steps
terminal         the display of a run: a screen or lines, and the summary at the end
printed_log      the log of what a child process prints, with a bound on its size
recorded_status  the status of a run, read from its files
bucket_access    buckets: errors, progress, and a run directory that continues a run
"""
