"""The common ground of all models: camelCase, frozen, bounded, with rules in Python and in CEL.

A manifest, which a person writes, is parsed: an unknown field is a mistake there. A file or a message that another
process wrote is read: that process may be of a newer version, so unknown fields are passed over
(docs/decisions/0020-versions.md).

A rule that spans fields is declared once, with its Python predicate and its CEL expression side by side. `tandem
validate` evaluates the first, the API server the second; `tests/` feed both the same manifests.

A manifest with a name that no object can have is refused when it is read, with the rule, and not minutes later by
whatever is made of it. (https://kubernetes.io/docs/concepts/overview/working-with-objects/names/)
"""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from tandem.formatting import printable


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


# Values in files that another process wrote. One that is damaged, or of another version's type, counts as not there, so
# that it does not take all that is beside it.

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
"""Of any length and content; escape it before printing (tandem.formatting)."""
Texts = Annotated[list[str] | None, _OrNone()]
Amounts = Annotated[Mapping[str, Amount] | None, _OrNone()]
"""By name."""
Anything = Annotated[Annotated[float, AllowInfNan(True)] | None, _OrNone()]
"""A number that may be NaN or infinite."""
AnyNumbers = Annotated[Mapping[str, Anything] | None, _OrNone()]
"""By name."""


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


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL = f"^{_LABEL}$"
SUBDOMAIN = rf"^{_LABEL}(\.{_LABEL})*$"
SUBDOMAIN_OR_EMPTY = rf"^({_LABEL}(\.{_LABEL})*)?$"
KEY = r"^[-._a-zA-Z0-9]+$"
IMAGE = r"^[^\s\x00]+$"
PATH = r"^[^\x00]+$"
WORD = r"^[^\x00]*$"

_PARTS = "lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit"
METRIC = r"^[A-Za-z][A-Za-z0-9_.-]*$"
TASK = r"^(image-classification|causal-lm|[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*)$"
_NAMED = r"[A-Za-z0-9*?_=\[][A-Za-z0-9*?_=.,\[\]+-]*"
WATCH = rf"^{_NAMED}(/{_NAMED}){{0,3}}$"
RULES = {
    LABEL: "lower-case letters, digits and dashes, beginning and ending with a letter or digit",
    SUBDOMAIN: _PARTS,
    SUBDOMAIN_OR_EMPTY: f"{_PARTS}, or nothing",
    KEY: "letters, digits, dashes, underscores and dots",
    IMAGE: "a name such as registry/team/image:tag, without spaces",
    PATH: "a path without zero characters",
    WORD: "text without zero characters",
    TASK: "image-classification, causal-lm, or module and class of your own task, such as my_package.my_task:MyTask",
    METRIC: "a name of letters, digits, dots, dashes and underscores that begins with a letter",
    WATCH: "a pattern of at most four names in the run directory, such as out/*.pt, none of which begins with a dot",
}
"""What each pattern wants, in words that follow "must be"."""

Label = Annotated[str, Field(pattern=LABEL, max_length=63)]
"""The name of a namespace."""
ObjectName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=253)]
"""The name of most objects: an RFC 1123 subdomain."""
ShortName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=63)]
"""The name of an object that is written into a label, which has no more room."""
PerhapsName = Annotated[str, Field(pattern=SUBDOMAIN_OR_EMPTY, max_length=253)]
"""The name of an object, or nothing, where nothing has a meaning of its own."""
Key = Annotated[str, Field(pattern=KEY, max_length=253)]
"""A key of a Secret or a ConfigMap."""
MetricName = Annotated[str, Field(pattern=METRIC, max_length=63)]
"""A score that evaluators report."""
WatchPattern = Annotated[str, Field(pattern=WATCH, max_length=253)]
"""Files or folders of the run directory, with *, ? and […]."""
Image = Annotated[str, Field(pattern=IMAGE, max_length=1024)]
"""A container image."""
FilePath = Annotated[str, Field(pattern=PATH, max_length=4096)]
"""The path of a file or a folder."""


MAX_COUNT = 2**53
"""Above it a JSON number is not exact any more, and no count of ours comes near."""


def finite(value: object) -> float | None:
    """The number that a record holds, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of more digits than fit
        return None
    return number if isfinite(number) else None


def amount(value: object) -> float | None:
    """The number that is not negative, None for anything else."""
    found = finite(value)
    return found if found is not None and found >= 0 else None


def whole(value: object) -> int | None:
    """The count, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


class Extent(NamedTuple):
    """The most that a piece of JSON may be."""

    depth: int
    """Levels of objects and lists."""
    values: int
    """Entries of all objects and lists together."""
    characters: int
    """Of all texts, names of fields included."""


def excess(value: Any, most: Extent) -> str:
    """What is too much about it, in words that follow "it"; empty if nothing is.

    Without recursion, and it stops where the bound is broken: a hostile value costs no more than the bound.
    """
    values = characters = 0
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        found, depth = left.pop()
        if isinstance(found, str):
            characters += len(found)
        elif isinstance(found, int):
            characters += found.bit_length() // 3
        elif isinstance(found, dict | list):
            if depth > most.depth:
                return f"is nested more than {most.depth} levels deep"
            values += len(found)
            if values > most.values:
                return f"has more than {most.values} entries"
            if isinstance(found, dict):
                characters += sum(len(name) for name in found)
            left += [(inner, depth + 1) for inner in (found.values() if isinstance(found, dict) else found)]
        if characters > most.characters:
            return f"has more than {most.characters} characters"
    return ""
