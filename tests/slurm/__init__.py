"""Tests on a real SLURM: `make slurm` starts one on this machine, from Debian's packages."""
