"""How a command writes what it found: `-o` means the same everywhere, and the same as for kubectl."""

from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml

from tandem_cli.echo import echo, echo_json


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
