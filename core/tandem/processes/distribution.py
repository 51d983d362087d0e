"""The installed distribution: its name on a package index, its version, and the command that installs an extra.

The modules and the command are called `tandem`. The distribution is not, because that name belongs to another package
on the index, which an install by that name would run.
"""

import importlib.metadata

NAME = "tandem-training"


def version() -> str:
    """Version of the installed distribution."""
    return importlib.metadata.version(NAME)


def install_command(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{NAME}[{extra}]'"
