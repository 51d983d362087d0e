"""What commands print without rich. Nothing that is printed steers the terminal, wherever it comes from."""

import json
from typing import Any

import typer

from tandem.printable import printable


def echo(text: str, *, mark: str = "", colour: str = "", err: bool = False) -> None:
    """Print a text.

    Args:
        mark: coloured, before it.
        colour: a name that `typer.style` knows; empty for none.
        err: to standard error.
    """
    typer.echo(typer.style(printable(mark), fg=colour or None) + printable(text), err=err)


def echo_json(value: Any) -> None:
    """Print JSON for programs."""
    typer.echo(json.dumps(value, indent=2))
