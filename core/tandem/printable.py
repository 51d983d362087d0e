"""Texts from manifests, run directories and clusters, so that none of them can steer the terminal it is shown in.

An escape sequence can move the cursor, change what was printed before, or type for the user; a bidirectional override
shows letters in another order than they have. Each such character is shown as one that says that something is there.
"""

from unicodedata import category

SHOWN = "�"
"""In the place of a character that is not printable."""
SPACE = "Zs"
"""The category of spaces, whatever their width."""


def printable(text: str) -> str:
    """A text of any number of lines, without control characters, escapes and invisible marks."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" or category(one) == SPACE else SHOWN for one in text)


def one_line(text: str) -> str:
    """The same in one line: what stands among our own words must not begin a line that looks like ours."""
    return printable(text.replace("\n", " "))
