"""Files that nobody may read, root neither: Linux lets root read and enter whatever a mode of 000 says.

A command whose bounding set lacks two capabilities is refused as any user's is, and so is a thread that has given them
up. Who is not root has none of them, and nothing is to be done.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

READS_ALL, ENTERS_ALL = 1, 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of linux/capability.h."""
VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: two words for each set."""
IS_ROOT = os.geteuid() == 0
_LACKING = "-dac_override,-dac_read_search"
AS_ANY_USER = ("setpriv", "--bounding-set", _LACKING, "--inh-caps", _LACKING) if IS_ROOT else ()
"""In front of a command that may read and enter what modes allow, and no more."""


def as_any_user(call: Callable[[], Result]) -> Result:
    """What a call returns, or raises, that may read and enter what modes allow, and no more."""
    # A thread of its own: what is given up for good is given up by it alone, and os.access asks for what is for good.
    with ThreadPoolExecutor(1, initializer=_give_up if IS_ROOT else None) as thread:
        return thread.submit(call).result()


def _give_up() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capget(header, sets))
    for index in (0, 1, 2):  # effective, permitted and inheritable of the first 32; the rest follows
        sets[index] &= ~(1 << READS_ALL | 1 << ENTERS_ALL)
    _checked(libc.capset(header, sets))


def _checked(code: int) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
