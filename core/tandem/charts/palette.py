"""The colours of all pictures, each with a role, for light and for dark.

The hues are those of Okabe and Ito, told apart under the common kinds of colour blindness, in luminances that keep at
least 3:1 against the page for everything that carries meaning. A drawing names roles, as CSS variables; the page around
it sets them.
"""

from typing import Literal

Role = Literal[
    "paper", "ink", "muted", "line", "grid", "trainer", "evaluator", "gpu", "checkpoint", "alert", "other"
]  # fmt: skip

LIGHT: dict[Role, str] = {
    "paper": "#fefefe",
    "ink": "#1a1f26",
    "muted": "#5d6875",
    "line": "#c9d0d8",
    "grid": "#eceff2",
    "trainer": "#0067b1",
    "evaluator": "#c96a00",
    "gpu": "#00855f",
    "checkpoint": "#b3488f",
    "alert": "#c8310f",
    "other": "#7d8894",
}
DARK: dict[Role, str] = {
    "paper": "#14181d",
    "ink": "#e7eaee",
    "muted": "#9aa5b1",
    "line": "#48525d",
    "grid": "#252b32",
    "trainer": "#4fb0f2",
    "evaluator": "#f0a030",
    "gpu": "#2fc795",
    "checkpoint": "#e58cc6",
    "alert": "#ff7a57",
    "other": "#8a95a1",
}

FONTS = (
    '--font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; '
    '--mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;'
)
"""The reader's own: nothing has to be loaded."""


def variables() -> str:
    """A style sheet that sets each role, and the fonts, as the reader's device wants it."""
    light = " ".join(f"--{role}: {color};" for role, color in LIGHT.items())
    dark = " ".join(f"--{role}: {color};" for role, color in DARK.items())
    return f":root {{ {light} {FONTS} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
