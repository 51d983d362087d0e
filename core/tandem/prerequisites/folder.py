"""Folders that are there or are still to be made."""

import os
from pathlib import Path

from tandem.rundir.durable import may_pass


def nearest_there(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    whole = path.absolute()
    return next((one for one in (whole, *whole.parents) if one.exists()), Path(whole.anchor))


def fault_of_folder(path: Path) -> str:
    """Why nothing can be written into a folder, made or still to be made; empty if something can be, as far as one can
    see without doing it.

    Raises:
        OSError: the disk fails, which says nothing about the folder.
    """
    try:
        there = nearest_there(path)
    except OSError as error:
        if may_pass(error):
            raise
        return str(error.strerror)
    if not there.is_dir():
        return f"{there} is a file, and a folder is wanted"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written"
    return ""
