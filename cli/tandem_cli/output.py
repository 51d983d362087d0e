"""Output of commands: results in the format of `-o`, and errors with their position, safe for any terminal."""

import json
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
import yaml
from rich.text import Text

from tandem.errors import CombinedError, ManifestError, Problem, UserError
from tandem.formatting import printable
from tandem_launcher.terminal.canvas import PrintableConsole

T = TypeVar("T")
Result = TypeVar("Result")


def echo(text: str, *, mark: str = "", colour: str = "", err: bool = False) -> None:
    """Print a text.

    Args:
        mark: coloured prefix.
        colour: colour of `typer.style`; empty: none.
        err: print to standard error.
    """
    typer.echo(typer.style(printable(mark), fg=colour or None) + printable(text), err=err)


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


class Output(StrEnum):
    """Output format."""

    TEXT = "text"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_data(self) -> bool:
        """Whether it is a data format for programs."""
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
    """Print a value as YAML or JSON."""
    if output is Output.YAML:
        echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n"))
    else:
        echo_json(value)


def print_error(error: UserError) -> None:
    """Print an error to standard error."""
    if isinstance(error, CombinedError):
        for part in error.errors:
            print_error(part)
        return
    console = PrintableConsole(stderr=True, soft_wrap=True, highlight=False)
    if sys.stdout is not None:  # None if the command was started without an output (`>&-`)
        sys.stdout.flush()
    if not isinstance(error, ManifestError):
        console.print(Text.assemble(("error: ", "bold red"), printable(str(error))))
        return
    for index, problem in enumerate(error.problems):
        if index:
            console.print()
        console.print(format_problem(problem))


def check_all(check: Callable[[T], Result], items: Iterable[T]) -> list[Result]:
    """Apply a check to each item and return the results.

    Raises:
        UserError: for some items; has the errors of all.
    """
    results: list[Result] = []
    errors: list[UserError] = []
    for item in items:
        try:
            results.append(check(item))
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else CombinedError(errors)
    return results


def format_problem(problem: Problem) -> Text:
    """Format a problem like a compiler's error."""
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
    """Split a line at the marked column; shorten long parts and remove control characters."""
    line = "".join(character if character.isprintable() else " " for character in problem.excerpt)
    before, marked = line[: problem.column - 1], line[problem.column - 1 :]
    if len(before) > 60:
        before = "…" + before[-50:]
    if len(marked) > 60:
        marked = marked[:59] + "…"
    return before, marked
