"""Exit codes of training processes and of `tandem run`: an interface, not an accident.

Values from 64 on follow sysexits.h where it has a word for them. What torchrun or a shell may return itself is avoided.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a training process or a run ended."""

    DONE = 0
    """Complete."""
    FAILED = 1
    """Ended with an error of its own; counted against the restart budget."""
    USAGE = 2
    """The command line or the manifest is wrong; nothing was started."""
    DIVERGED = 65
    """The loss stayed NaN or infinite; trying again would not help."""
    REWOUND = 66
    """The loss became useless; the next generation starts from an older checkpoint and leaves data out."""
    HUNG = 70
    """No step within the hang time."""
    LEFT_OUT = 71
    """Groups failed again and again because of this replica, and the others go on without it."""
    SUPERSEDED = 74
    """A newer generation exists; this process must not write any more. Counted against nothing."""
    PREEMPTED = 75
    """Saved and left because it was asked to; try again later."""
    PEER_LOST = 76
    """Another rank vanished and took the collective with it. Counted against nothing: the cause is counted there."""
    CONFIGURATION = 78
    """The job cannot work as it is written; never retried."""
    INTERRUPTED = 130
    """The user pressed Ctrl-C; what could be saved is saved."""
