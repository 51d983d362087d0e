"""Completions of prompts that a language model wrote under several checkpoints, side by side, as an HTML table.

Nobody has vetted this text: what is not printable is made visible, everything is escaped, and each text is cut.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape

from tandem.evaluation import Completions
from tandem.formatting import printable, truncate_end

MAX_COLUMNS = 4
"""Maximum number of checkpoints that are shown side by side."""

MAX_LINES = 12
"""Maximum number of lines of a text."""
MAX_NEWLINES = 3
"""Maximum number of line ends in a row that are shown one by one; more are counted."""
_NEWLINES = re.compile("\n+")

Columns = Sequence[tuple[str, Completions]]
"""Headings of the columns, with the completions of their checkpoints."""


def heading(step: int, is_base: bool, is_best: bool) -> str:
    """The heading of a checkpoint's column."""
    return "Base model" if is_base else f"Step {step:,}{', the best' if is_best else ''}"


def draw(columns: Columns, max_prompts: int, max_characters: int) -> str:
    """Draw the table; empty if there are no completions.

    Args:
        max_prompts: rows; of more prompts the first ones are shown.
        max_characters: of a prompt and of what was written for it.
    """
    written = [
        (title, {prompt: text for _, prompt, text in completions.texts})
        for title, completions in columns
        if completions.texts
    ]
    drawn_columns = written[:MAX_COLUMNS]
    # The prompts of a job may be others by now: those of the newest checkpoint come first.
    prompts = list(dict.fromkeys(prompt for _, texts in reversed(drawn_columns) for prompt in texts))
    if not prompts:
        return ""
    heads = "".join(f"<th>{escape(title)}</th>" for title in ("Prompt", *(title for title, _ in drawn_columns)))
    rows = "".join(
        _row(prompt, [texts for _, texts in drawn_columns], max_characters) for prompt in prompts[:max_prompts]
    )
    remaining = len(prompts) - max_prompts
    more = f'<p class="note">And {remaining:,} more prompts; they are in the evaluations.</p>' if remaining > 0 else ""
    return (
        f'<div class="scroll"><table class="written"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        + more
    )


def _row(prompt: str, columns: Sequence[Mapping[str, str]], max_characters: int) -> str:
    cells = (_text(texts[prompt], max_characters) if prompt in texts else "–" for texts in columns)
    return f"<tr><td>{_text(prompt, max_characters)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _text(text: str, max_characters: int) -> str:
    """Escape a text for HTML and XML. Ends of lines are made visible, since a model may write nothing else; several in
    a row take one line, and of many lines the first ones are shown."""
    lines = _NEWLINES.sub(_visible_newlines, printable(truncate_end(text, max_characters))).split("\n")
    more = [f"… {len(lines) - MAX_LINES:,} more lines"] if len(lines) > MAX_LINES else []
    return escape("\n".join([*lines[:MAX_LINES], *more]))


def _visible_newlines(ends: re.Match[str]) -> str:
    count = len(ends[0])
    return ("⏎" * count if count <= MAX_NEWLINES else f"⏎ × {count:,}") + "\n"
