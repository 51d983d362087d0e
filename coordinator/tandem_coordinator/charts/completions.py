"""What a language model wrote for prompts under several checkpoints, side by side, as an HTML table.

It is text that nobody has vetted: what is not printable is shown as such, everything is escaped, and each text is cut.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape

from tandem.evaluation import Completions
from tandem.formatting import printable, shortened

MAX_COLUMNS = 4
"""Checkpoints that are shown beside each other."""

MAX_LINES = 12
"""Of a text."""
MAX_ENDS = 3
"""Ends of lines in a row that are shown one by one; more are counted."""
_ENDS = re.compile("\n+")

Columns = Sequence[tuple[str, Completions]]
"""What stands above a column, and what its checkpoint wrote."""


def heading(step: int, is_base: bool, is_best: bool) -> str:
    """What stands above what a checkpoint wrote."""
    return "Base model" if is_base else f"Step {step:,}{', the best' if is_best else ''}"


def draw(columns: Columns, most_prompts: int, most_characters: int) -> str:
    """The table; empty where there is nothing.

    Args:
        most_prompts: rows; of more prompts the first ones are shown.
        most_characters: of a prompt and of what was written for it.
    """
    written = [(title, {prompt: text for _, prompt, text in found.texts}) for title, found in columns if found.texts]
    shown = written[:MAX_COLUMNS]
    # The prompts of a job may be others by now: those of the newest checkpoint come first.
    prompts = list(dict.fromkeys(prompt for _, texts in reversed(shown) for prompt in texts))
    if not prompts:
        return ""
    heads = "".join(f"<th>{escape(title)}</th>" for title in ("Prompt", *(title for title, _ in shown)))
    rows = "".join(_row(prompt, [texts for _, texts in shown], most_characters) for prompt in prompts[:most_prompts])
    left = len(prompts) - most_prompts
    more = f'<p class="note">And {left:,} more prompts; they are in the evaluations.</p>' if left > 0 else ""
    return (
        f'<div class="scroll"><table class="written"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        + more
    )


def _row(prompt: str, columns: Sequence[Mapping[str, str]], most: int) -> str:
    cells = (_text(texts[prompt], most) if prompt in texts else "–" for texts in columns)
    return f"<tr><td>{_text(prompt, most)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _text(text: str, most: int) -> str:
    """In a page that is XML as well. Ends of lines are shown, since a model may write nothing else; several in a row
    take one line, and of many lines the first ones are shown."""
    lines = _ENDS.sub(_shown, printable(shortened(text, most))).split("\n")
    more = [f"… {len(lines) - MAX_LINES:,} more lines"] if len(lines) > MAX_LINES else []
    return escape("\n".join([*lines[:MAX_LINES], *more]))


def _shown(ends: re.Match[str]) -> str:
    count = len(ends[0])
    return ("⏎" * count if count <= MAX_ENDS else f"⏎ × {count:,}") + "\n"
