"""The installed distribution: its name on a package index, its version, and how an extra of it is installed.

The modules and the command are called `tandem`. The distribution is not, because that name belongs to somebody else's
package on the index, whose code an install by that name would run.
"""

import importlib.metadata

NAME = "tandem-training"


def version() -> str:
    """Of what is installed."""
    return importlib.metadata.version(NAME)


def install(extra: str) -> str:
    """What to type to have what an extra brings."""
    return f"pip install '{NAME}[{extra}]'"
