"""Names of exported checkpoints, made from a pattern such as `digits_{step:06d}-{accuracy}`.

A pattern has the fields of str.format with their format, and nothing else of it: no attributes, no indices, no
conversions, which would let a pattern reach into the program.
"""

import re
from collections.abc import Mapping
from string import Formatter

from tandem.errors import UserError
from tandem.manifest.fields import nearest
from tandem.printable import printable

MOST_CHARACTERS = 200
"""A file's name may have 255 bytes, and ours gets a suffix and, while it is written, a prefix."""

Value = int | float | str
Fields = Mapping[str, Value | None]
"""None: a field that exists but has no value for this checkpoint."""


def filled(pattern: str, fields: Fields) -> str:
    """The name that a pattern gives.

    Raises:
        UserError: it names a field that is not known or has no value, or gives no name that a file can have.
    """
    try:
        parts = list(Formatter().parse(pattern))
    except ValueError as error:
        raise UserError(f"--name {pattern}: {error}. Write a field as {{step}}, and a brace itself as {{{{") from error
    name = ""
    for text, field, form, conversion in parts:
        name += text
        if field is not None:
            name += _value(pattern, field, form or "", conversion, fields)
    if not name or name.startswith((".", "-")) or "/" in name or printable(name) != name or "\n" in name:
        raise UserError(
            f"--name {pattern} gives {printable(name)!r}, which is no good name for a file: "
            "no slash, no control characters, and neither a dot nor a dash in front"
        )
    if len(name.encode()) > MOST_CHARACTERS:
        raise UserError(f"--name {pattern} gives a name of {len(name)} characters; {MOST_CHARACTERS} are the most")
    return name


def _value(pattern: str, field: str, form: str, conversion: str | None, fields: Fields) -> str:
    there = ", ".join(f"{{{name}}}" for name, value in fields.items() if value is not None)
    if conversion is not None or field not in fields:
        near = nearest(field, list(fields))
        hint = f" Did you mean {{{near}}}?" if near and near != field else ""
        raise UserError(f"--name {pattern}: there is no field {{{field}}}.{hint} Those there are: {there}")
    value = fields[field]
    if value is None:
        raise UserError(f"--name {pattern}: {{{field}}} is not known of this checkpoint. Those there are: {there}")
    if isinstance(value, float) and not form:
        form = ".4f"
    # Python would try: where the kernel promises memory that is not there, as on a Kubernetes node, until it is killed.
    if any(len(number) > 4 or int(number) > MOST_CHARACTERS for number in re.findall(r"[0-9]+", form)):
        raise UserError(
            f"--name {pattern}: {{{field}}} cannot be written as {form!r}: {MOST_CHARACTERS} characters are the most"
        )
    try:
        return format(value, form)
    except (ValueError, OverflowError) as error:
        raise UserError(f"--name {pattern}: {{{field}}} cannot be written as {form!r}: {error}") from error
