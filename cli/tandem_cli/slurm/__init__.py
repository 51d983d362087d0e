"""One job on a SLURM cluster: `tandem submit --slurm`, `tandem render slurm`.

    platform    a run, for the commands that work on every platform
    profile     what a cluster wants of every job: partition, account, modules; from the user's configuration
    script      the sbatch scripts, made of a job and a profile
    scheduler   sbatch, squeue, scontrol and sacct, and their answers in words
    jobs        the jobs of SLURM that are a run's, as its run directory names them
    submission  gives a job to SLURM
    execution   commands on the nodes of a run: stacks of ranks, a debugger, a shell
    shell       what srun starts on a node for `tandem shell`
    extension   a job of one node that a running training has besides its own
    head        the process in the batch script: coordinator, one agent on each node, evaluators
    crew        what the head starts, as commands and processes
    refusals    steps that srun does not start
    step        what srun starts on a node: one process, which leaves when its head asks

Design and rejected alternatives: docs/decisions/0047-slurm.md.
"""
