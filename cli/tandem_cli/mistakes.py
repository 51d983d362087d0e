"""How a user's mistake looks in the terminal: place, sentence, the line with a mark under it, what may stand there."""

import sys

from rich.text import Text

from tandem.errors import ManifestError, Problem, UserError
from tandem.formatting import printable
from tandem_cli.terminal.canvas import PrintableConsole


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
