"""One job on this machine: `tandem run`.

The same processes as on a cluster, as children of one parent: a coordinator, one agent per replica, the evaluators.

    prepare      the run directory: whose it is, whether it may be gone on with, who else is at work in it
    placement    which cores and GPUs each child gets, and how many threads
    supervision  which child to start, stop or give up on when: a pure function
    process      one child: its log, its niceness, and that it dies with its parent
    starter      what a child runs before it becomes its command
    guardian     a process that outlives the parent and leaves nothing running
    watch        asks the coordinator for its snapshot
    session      the shell around all of it

That nothing is left running holds by three means, because each has a gap. The parent stops its children when it ends
in any way it notices. Each child asks the kernel to be killed when the parent dies, which happens at once, but only to
direct children and only on Linux; torchrun's ranks are grandchildren in sessions of their own, and a user's script may
start whatever it likes. So the guardian waits for the end of a pipe that only the parent holds and then kills all that
carries this run's mark in its environment, which whatever a child starts inherits.

Rejected: process groups (torchrun and user scripts leave them), cgroups (need rights a laptop user lacks), a subreaper
(adopts orphans, but only while it lives, and it is the parent's own death that matters).
"""
