"""Output of commands: results in the format of `-o`, and errors with their position; safe for any terminal."""

import json
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
import yaml
from rich.text import Text

from tandem.errors import ManifestError, Problem, UserError
from tandem.formatting import printable
from tandem_cli.terminal.canvas import PrintableConsole

T = TypeVar("T")
Found = TypeVar("Found")


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


OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field, e.g. workers.replicas=4. Repeatable."),
]
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


def tell(error: UserError) -> None:
    """Write a mistake to standard error."""
    console = PrintableConsole(stderr=True, soft_wrap=True, highlight=False)
    if sys.stdout is not None:  # None if the command was started without an output (`>&-`)
        sys.stdout.flush()
    if not isinstance(error, ManifestError):
        console.print(Text.assemble(("error: ", "bold red"), printable(str(error))))
        return
    for index, problem in enumerate(error.problems):
        if index:
            console.print()
        console.print(drawn(problem))


def each_checked(check: Callable[[T], Found], things: Iterable[T]) -> list[Found]:
    """What a check finds in each. Where some are wrong, the end of the command, with everything that is wrong.

    Raises:
        Exit: with the exit code 2.
    """
    found: list[Found] = []
    wrong: list[UserError] = []
    for thing in things:
        try:
            found.append(check(thing))
        except UserError as error:
            wrong.append(error)
    for mistake in wrong:
        tell(mistake)
    if wrong:
        raise typer.Exit(2)
    return found


def drawn(problem: Problem) -> Text:
    """One problem in the manner of a compiler."""
    message = printable(problem.message)
    text = Text.assemble((printable(problem.place), "bold"), ": ", ("error: ", "bold red"), (message, "bold"))
    gutter = " " * len(str(problem.line))
    if problem.excerpt.strip():
        before, marked = _cut(problem)
        number = gutter if problem.place == problem.file else str(problem.line)
        text.append(f"\n {gutter} │\n {number} │ ", "blue").append(before + marked)
        text.append(f"\n {gutter} │ ", "blue").append(" " * Text(before).cell_len)
        text.append("^" * max(1, Text(marked[: problem.width]).cell_len), "bold red")
    if problem.suggestion:
        text.append(f"\n {gutter} = ", "blue").append(f"did you mean {printable(problem.suggestion)}?", "green")
    if problem.allowed and problem.allowed.rstrip(".") not in problem.message:
        text.append(f"\n {gutter} = ", "blue").append(f"allowed: {printable(problem.allowed)}")
    return text


def _cut(problem: Problem) -> tuple[str, str]:
    """The line before the mark and from the mark on, shortened where it is long, without control characters."""
    line = "".join(character if character.isprintable() else " " for character in problem.excerpt)
    before, marked = line[: problem.column - 1], line[problem.column - 1 :]
    if len(before) > 60:
        before = "…" + before[-50:]
    if len(marked) > 60:
        marked = marked[:59] + "…"
    return before, marked
