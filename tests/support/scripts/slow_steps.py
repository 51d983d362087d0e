"""Slow steps for scripts of tests, so that a test can kill between two; until it lets the rest go on fast."""

import os
import time


def pause(seconds: float) -> None:
    """Take so long, unless the file `fast` is in the run directory."""
    if not os.path.exists(f"{os.environ['TANDEM_RUN_DIR']}/fast"):  # noqa: PTH110 - as short as a script of a user's
        time.sleep(seconds)
