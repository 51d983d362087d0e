"""Which errors of files may pass: what a process that looks again, or on another machine, may not meet.

A path that is not there, or may not be read, is the user's to put right. All else, a mount that has gone stale, a disk
that fails, is of a machine and of a moment.
"""

import errno
import gzip

LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, gzip.BadGzipFile)
LASTING_NUMBERS = (errno.ELOOP, errno.ENAMETOOLONG)


def may_pass(error: BaseException) -> bool:
    """Whether it is of the disk, the network or the machine, and not of the file that was asked for."""
    return isinstance(error, OSError) and not isinstance(error, LASTING) and error.errno not in LASTING_NUMBERS
