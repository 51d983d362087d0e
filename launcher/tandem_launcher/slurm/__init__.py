"""One job on a SLURM cluster: `tandem submit --slurm`, `tandem render slurm`.

    profile          the user's options for the jobs on a cluster: partition, account, modules
    script           the sbatch scripts, built from a job and a profile
    scheduler        sbatch, squeue, scontrol and sacct, and the meaning of their output
    jobs             the SLURM jobs of a run, as recorded in its run directory
    preparation      the run directory before the job starts: prerequisites, the recorded job
    extension        a one-node job that adds a node to a running training
    head             the process in the batch script: coordinator, one agent on each node, evaluators
    process_factory  builds the child processes of the head
    refusals         steps that srun cannot start
    step             the process on a node that runs one command, and stops it when the head asks

Design and rejected alternatives: docs/decisions/0047-slurm.md.
"""
