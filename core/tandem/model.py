"""The common ground of all models: camelCase, frozen, with rules in Python and in CEL.

A manifest, which a person writes, is parsed: an unknown field is a mistake there. A file or a message that another
process wrote is read: that process may be of a newer version, so unknown fields are passed over
(docs/decisions/0020-versions.md).

A rule that spans fields is declared once, with its Python predicate and its CEL expression side by side. `tandem
validate` evaluates the first, the API server the second; `tests/` feed both the same manifests.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tandem.printable import printable


def cut(most: int) -> BeforeValidator:
    """A text or a list that is longer loses its end: what people read may be of any length, and nobody keeps it all."""

    def shortened(value: Any) -> Any:
        return value[:most] if isinstance(value, str | list) else value

    return BeforeValidator(shortened)


Whole = Annotated[int, Field(ge=0, le=2**53)]
"""A count. Above, a JSON number is not exact any more."""
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=253)]
"""The name of a file or a folder, and no path."""
Words = Annotated[str, cut(2_000), AfterValidator(printable)]
"""A sentence or a few, without what would steer a terminal."""


class Rule(NamedTuple):
    """A condition across the fields of one model. `field` is the camelCase field to point at when it fails."""

    holds: Callable[[Any], bool]
    cel: str
    message: str
    field: str = ""


class Transition(NamedTuple):
    """A condition on how one model may change once the job exists. `field` is the camelCase field to point at."""

    allows: Callable[[Any, Any], bool]
    """Of the old one and the new one."""
    cel: str
    message: str
    field: str = ""


class RuleBroken(ValueError):  # noqa: N818 - reads as the sentence it is
    """Rules of one model that do not hold; each carries the field that an editor should underline."""

    def __init__(self, broken: Sequence[Rule]) -> None:
        super().__init__("; ".join(rule.message for rule in broken))
        self.broken = tuple(broken)


class Model(BaseModel):
    """A part of the job. Manifests use camelCase names; Python uses snake_case ones."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions across fields."""

    transitions: ClassVar[tuple[Transition, ...]] = ()
    """Conditions on changes."""

    immutable: ClassVar[tuple[str, ...]] = ()
    """camelCase fields that an update must not change once the job exists."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if broken := [rule for rule in self.rules if not rule.holds(self)]:
            raise RuleBroken(broken)
        return self

    @classmethod
    def parse(cls, data: object) -> Self:
        """Validate what a manifest says: camelCase names only, exactly as the API server would.

        Raises:
            pydantic.ValidationError: with one entry for each mistake.
        """
        return cls.model_validate(data, by_alias=True, by_name=False)

    @classmethod
    def read(cls, data: object) -> Self:
        """Validate what another process wrote, perhaps of another version: as `parse`, but for fields that are unknown.

        Raises:
            pydantic.ValidationError: as above.
        """
        return cls.model_validate(data, by_alias=True, by_name=False, extra="ignore")

    @classmethod
    def read_json(cls, text: str | bytes) -> Self:
        """The same for JSON.

        Raises:
            pydantic.ValidationError: as above.
        """
        return cls.model_validate_json(text, by_alias=True, by_name=False, extra="ignore")

    def dump(self) -> dict[str, Any]:
        """The JSON form, camelCase, without the fields that are unset."""
        return self.model_dump(mode="json", exclude_none=True)

    def dump_brief(self) -> dict[str, Any]:
        """The JSON form, also without the fields that have their default: a version that lacks a field can read what
        does not use it."""
        return self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
