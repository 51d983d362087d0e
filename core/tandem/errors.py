"""A user's mistake: `tandem` reports it with one clear message and exit code 2, never with a stack trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.formatting import printable
from tandem.manifest.fields import Path

SETTING = "--set"
"""Stands for the file's name in problems of a setting from the command line."""


def enumerated(names: Sequence[str], most: int = 4) -> str:
    """Names for a sentence: the first ones, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class UserError(Exception):
    """Something the user wrote or set up cannot work. The message names it and says what to do."""


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a manifest."""

    line: int
    """Counted from 1; 0 where the mistake has no place, as in a missing file."""
    column: int
    """Counted from 1, in characters."""
    file: str
    """As the user named it; `<stdin>` or SETTING where it is not a file."""
    field: str
    """Dotted camelCase path, empty for the document as a whole."""
    message: str
    """What is wrong, in a sentence without its full stop."""
    given: str = ""
    """What was written, as it was written."""
    allowed: str = ""
    """What may stand there."""
    suggestion: str = ""
    """What was probably meant."""
    excerpt: str = ""
    """The line of the file."""
    width: int = 1
    """How many characters from `column` on are meant."""

    @property
    def place(self) -> str:
        """file:line:column, as editors and terminals make links of it."""
        return f"{self.file}:{self.line}:{self.column}" if self.line and self.file != SETTING else self.file

    def __str__(self) -> str:
        hint = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return printable(f"{self.place}: {self.message}{hint}")


class ManifestError(UserError):
    """A manifest with mistakes, all of them at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Unmet:
    """What was found, at the field of the manifest that it is about."""

    field: Path
    """Path of the field, from the top of the manifest; empty where it is about no field."""
    message: str
    """What is wrong and what to do, in a sentence without its full stop."""
    fails: bool = True
    """Whether the job cannot run. If not, it is a warning: the job runs, and perhaps not as it was meant."""
    suggestion: str = ""
    """What was probably meant."""
