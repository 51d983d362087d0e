"""Slow steps for scripts of tests, so that a test can kill between two; until it lets the rest go on fast. And an error
after the loop, if a test asks for one."""

import os
import time


def pause(seconds: float) -> None:
    """Take so long, unless the file `fast` is in the run directory."""
    if not os.path.exists(f"{os.environ['TANDEM_RUN_DIR']}/fast"):  # noqa: PTH110 - as short as a script of a user's
        time.sleep(seconds)


def fail_once() -> None:
    """Raise an error on rank 0, if the file `fail` is in the run directory, and remove the file."""
    path = f"{os.environ['TANDEM_RUN_DIR']}/fail"
    if os.environ["RANK"] == "0" and os.path.exists(path):  # noqa: PTH110
        os.remove(path)  # noqa: PTH107
        raise RuntimeError("there is no room for the report")
