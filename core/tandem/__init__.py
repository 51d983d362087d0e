"""The shared code of all parts of Tandem. Imports neither torch nor kopf nor kubernetes.

Training scripts may call `tandem.log` and `tandem.pausing`. Other programs use `tandem.Client`, which is the command
line's, and is imported when it is first named: images of workers do not have it. Type checkers and editors read
`__init__.pyi`.
"""

from importlib import import_module
from typing import Any

from tandem.script import log, pausing

__all__ = ["__version__", "log", "pausing"]

__version__ = "0.1.0"
_LAZY = {
    "AsyncClient": "tandem_cli.client",
    "Client": "tandem_cli.client",
    "Job": "tandem_cli.client",
    "UserError": "tandem.errors",
    "frame": "tandem_cli.client",
}
"""Public names, and the module of each."""


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        from tandem.processes.distribution import install_command

        missing = (error.name or module).partition(".")[0]
        message = f"tandem.{name} needs {missing}; install it with: {install_command('cli')}"
        raise ImportError(message, name=missing) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
