"""Types of values in files that another process wrote, and that may be damaged, of another version, or somebody else's.

A value that is not of its type counts as not there, so that one wrong number does not take all that is beside it.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AllowInfNan, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from tandem.model import Whole

LATEST = 1e11
"""Seconds: the year 5138. A later time is damage."""


class _OrNone:
    """What is not of the type counts as not there."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_default_schema(handler(source), default=None, on_error="default")


Moment = Annotated[float, Field(gt=0, le=LATEST)]
"""Seconds since the epoch; a record without it is none."""
Number = Annotated[float | None, _OrNone()]
"""Finite, or not there."""
Amount = Annotated[Annotated[float, Field(ge=0)] | None, _OrNone()]
"""Finite and not negative, or not there."""
Seconds = Annotated[Annotated[float, Field(ge=0, le=LATEST)] | None, _OrNone()]
"""A length of time, or not there."""
Count = Annotated[Whole | None, _OrNone()]
"""A whole number that is not negative, or not there."""
Text = Annotated[str | None, _OrNone()]
"""Of any length and content; escape it before printing (tandem.printable)."""
Texts = Annotated[list[str] | None, _OrNone()]
Amounts = Annotated[Mapping[str, Amount] | None, _OrNone()]
"""By name."""
Anything = Annotated[Annotated[float, AllowInfNan(True)] | None, _OrNone()]
"""A number that may be NaN or infinite."""
