"""A user's mistake: `tandem` reports it with one clear message and exit code 2, never with a stack trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.formatting import printable
from tandem.job.manifest.fields import Path

SETTING = "--set"
"""File name in problems of a setting from the command line."""


def join_names(names: Sequence[str], limit: int = 4) -> str:
    """Join names for a sentence: the first ones, and the number of further ones."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


class UserError(Exception):
    """A mistake of the user: something written or set up cannot work. The message names it and says what to do."""


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a manifest."""

    line: int
    """Counted from 1; 0 where the mistake has no position, as in a missing file."""
    column: int
    """Counted from 1, in characters."""
    file: str
    """File name as specified by the user; `<stdin>` or SETTING where it is not a file."""
    field: str
    """Dotted camelCase path, empty for the document as a whole."""
    message: str
    """Description of the mistake, in a sentence without its full stop."""
    given: str = ""
    """The value as written."""
    allowed: str = ""
    """The allowed values."""
    suggestion: str = ""
    """The value that was probably meant."""
    excerpt: str = ""
    """The line of the file."""
    width: int = 1
    """Number of characters from `column` on."""

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


class CombinedError(UserError):
    """Mistakes in several things that the user named together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


@dataclass(frozen=True)
class UnmetRequirement:
    """A requirement that is not met, and the field of the manifest that it belongs to."""

    field: Path
    """Path of the field, from the top of the manifest; empty where it belongs to no field."""
    message: str
    """Description of the problem and its solution, in a sentence without its full stop."""
    fails: bool = True
    """Whether the job cannot run. Otherwise it is a warning: the job runs, but perhaps not as intended."""
    suggestion: str = ""
    """The value that was probably meant."""
