"""Folders that a user keeps from one run to the next: downloads, compiled kernels."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """The folder of Tandem in the user's cache; it need not be there."""
    return Path(variables.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"


def data_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """Where data sets are kept that were downloaded."""
    return cache_folder(variables) / "data"


def private_folder(path: Path) -> Path | None:
    """A folder that nobody else can write to, made where it is not there. None if there can be none.

    One that has become readable for others is closed to them; one that is another user's, or a link, is not taken.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            return None
        if stat.S_IMODE(facts.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError:
        return None
    return path
