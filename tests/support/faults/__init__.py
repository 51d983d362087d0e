"""Injected faults: a checkpoint writer is killed, loses its power, is refused or has to wait at every step it takes.

`points` numbers what a writer does to the disk and spoils one step of it; `power` says what a disk holds after a power
cut; `server` forks writers that are so disturbed; `scene` prepares a run directory and judges what is left.
"""
