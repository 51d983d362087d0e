"""How a command writes what it found: `-o` means the same everywhere, and the same as for kubectl."""

import json
import re
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml

from tandem.formatting import printable


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


class Output(StrEnum):
    """The form of the output."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Whether it is for programs."""
        return self in (Output.JSON, Output.YAML)


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="json or yaml for programs; wide: all columns, however wide the terminal."),
]


def emit(value: Any, output: Output) -> None:
    """Print data for programs."""
    if output is Output.YAML:
        echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n"))
    else:
        echo_json(value)


HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|TOKEN(?:_|$)|(?:^|_|API|ACCESS|PRIVATE)KEY(?:_|$)", re.IGNORECASE
)


def looks_secret(name: str) -> bool:
    """Whether a variable of that name probably holds a secret."""
    return _SECRET.search(name) is not None


def hidden(manifest: Any) -> Any:
    """A copy of a job's manifest, as it was found, without the values of variables that are probably secrets."""
    if isinstance(manifest, list):
        return [hidden(one) for one in manifest]
    if not isinstance(manifest, dict):
        return manifest
    copy = {name: hidden(value) for name, value in manifest.items()}
    if copy.get("value") and isinstance(copy.get("name"), str) and looks_secret(copy["name"]):
        copy["value"] = HIDDEN
    return copy
