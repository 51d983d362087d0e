"""One job on this machine: `tandem run`.

The same processes as on a cluster, as children of one parent: a coordinator, one agent per replica, the evaluators.

    prepare     the run directory: its owner, whether to resume from it, its lock
    placement   the cores, GPUs and threads of each child
    child       one child across its restarts; tandem.processes.supervision decides which to start or stop
    starter     the code that a child runs before it executes its command
    guardian    a process that outlives the parent and leaves nothing running
    local_run   the main loop: starts, stops and watches the children
    processes   the processes of a run: their environment, the stacks of its ranks

Three mechanisms ensure that nothing is left running, because each has a gap. The parent stops its children when it ends
in any way that it notices. Each child asks the kernel to be killed when the parent dies, which is immediate, but works
only for direct children and only on Linux; torchrun's ranks are grandchildren in sessions of their own, and a user's
script may start any process. So the guardian waits for the end of a pipe that only the parent holds, and then kills
every process that carries the run's mark in its environment, which descendants inherit.

Rejected: process groups (torchrun and user scripts leave them), cgroups (need rights a laptop user lacks), a subreaper
(adopts orphans, but only while it lives, and it is the parent's own death that matters).
"""
