"""One job on this machine: `tandem run`.

The same processes as on a cluster, as children of one parent: a coordinator, one agent per replica, the evaluators.

    prepare     the run directory: whose it is, whether to resume from it, whether another run uses it
    placement   the cores and GPUs of each child, and its number of threads
    child       one child over all its restarts; which to start or stop is decided by tandem.supervision
    starter     what a child runs before it becomes its command
    guardian    a process that outlives the parent and leaves nothing running
    local_run   the shell around all of it
    run_output  the output of all children as one stream of lines
    display     the screen, or plain lines
    platform    the run, for the commands that work on every platform
    processes   the processes of a run: their variables, the stacks of its ranks
    known       the runs of this machine
    run_view    a run in the form of a cluster job, so that both are shown alike

That nothing is left running holds by three means, because each has a gap. The parent stops its children when it ends
in any way it notices. Each child asks the kernel to be killed when the parent dies, which happens at once, but only to
direct children and only on Linux; torchrun's ranks are grandchildren in sessions of their own, and a user's script may
start whatever it likes. So the guardian waits for the end of a pipe that only the parent holds and then kills all that
carries this run's mark in its environment, which whatever a child starts inherits.

Rejected: process groups (torchrun and user scripts leave them), cgroups (need rights a laptop user lacks), a subreaper
(adopts orphans, but only while it lives, and it is the parent's own death that matters).
"""
