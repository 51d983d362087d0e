"""The base class and types of all models: camelCase, frozen, bounded, with rules in Python and in CEL.

A manifest, which a person writes, is parsed: an unknown field is a mistake. A file or a message that another process
wrote is read: that process may be of a newer version, so unknown fields are ignored (docs/decisions/0020-versions.md).

A rule that spans fields is declared once, with its Python predicate and its CEL expression side by side. `tandem
validate` evaluates the first, the API server the second; `tests/` feed both the same manifests.

A manifest with an invalid object name is refused when it is read, with the rule, and not minutes later when the API
server refuses an object. (https://kubernetes.io/docs/concepts/overview/working-with-objects/names/)
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


def truncated_to(length: int) -> BeforeValidator:
    """Validator that truncates a text or a list: texts for people may have any length, and are not stored in full."""

    def truncated(value: Any) -> Any:
        return value[:length] if isinstance(value, str | list) else value

    return BeforeValidator(truncated)


WholeNumber = Annotated[int, Field(ge=0, le=2**53)]
"""Non-negative whole number. A larger one is not exact in JSON."""
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=253)]
"""The name of a file or a folder, not a path."""
MessageText = Annotated[str, truncated_to(2_000), AfterValidator(printable)]
"""One or a few sentences, without control characters."""


# Values in files that another process wrote. A damaged value, or one of another version's type, counts as absent, so
# that it does not invalidate the other values of its record.

MAX_TIMESTAMP = 1e11
"""Latest valid time in seconds since the epoch: the year 5138. A later time is damage."""


class _OrNone:
    """Annotation: an invalid value counts as absent."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_default_schema(handler(source), default=None, on_error="default")


Timestamp = Annotated[float, Field(gt=0, le=MAX_TIMESTAMP)]
"""Seconds since the epoch; a record without it is invalid."""
Number = Annotated[float | None, _OrNone()]
"""Finite number, or absent."""
Amount = Annotated[Annotated[float, Field(ge=0)] | None, _OrNone()]
"""Finite non-negative number, or absent."""
Seconds = Annotated[Annotated[float, Field(ge=0, le=MAX_TIMESTAMP)] | None, _OrNone()]
"""A duration in seconds, or absent."""
Count = Annotated[WholeNumber | None, _OrNone()]
"""Non-negative whole number, or absent."""
Text = Annotated[str | None, _OrNone()]
"""Text of any length and content; escape it before printing (tandem.formatting)."""
Texts = Annotated[list[str] | None, _OrNone()]
Amounts = Annotated[Mapping[str, Amount] | None, _OrNone()]
"""Amounts by name."""
Anything = Annotated[Annotated[float, AllowInfNan(True)] | None, _OrNone()]
"""A number that may be NaN or infinite."""
AnyNumbers = Annotated[Mapping[str, Anything] | None, _OrNone()]
"""Numbers by name, which may be NaN or infinite."""


class Rule(NamedTuple):
    """A condition across the fields of one model. `field` is the camelCase field to report when it fails."""

    holds: Callable[[Any], bool]
    cel: str
    message: str
    field: str = ""


class Transition(NamedTuple):
    """A condition on how a model may change once the job exists. `field` is the camelCase field to report."""

    allows: Callable[[Any, Any], bool]
    """Predicate of the old model and the new one."""
    cel: str
    message: str
    field: str = ""


class RuleBroken(ValueError):  # noqa: N818 - names the failed rules
    """Rules of one model that do not hold; each carries the field that an editor should underline."""

    def __init__(self, broken: Sequence[Rule]) -> None:
        super().__init__("; ".join(rule.message for rule in broken))
        self.broken = tuple(broken)


class Model(BaseModel):
    """A frozen model. Manifests and messages use camelCase names; Python uses snake_case ones."""

    # Docstrings of fields are read where they are shown (tandem.job.manifest.fields): with use_attribute_docstrings,
    # each process of a job would parse the sources of all models when it starts, 0.1 s.
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
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
        """Validate the content of a manifest: camelCase names only, exactly as the API server does.

        Raises:
            pydantic.ValidationError: with one entry for each mistake.
        """
        return cls.model_validate(data, by_alias=True, by_name=False)

    @classmethod
    def read(cls, data: object) -> Self:
        """Validate data of another process, perhaps of another version: as `parse`, but unknown fields are ignored.

        Raises:
            pydantic.ValidationError: as above.
        """
        return cls.model_validate(data, by_alias=True, by_name=False, extra="ignore")

    @classmethod
    def read_json(cls, text: str | bytes) -> Self:
        """Validate JSON of another process, as `read` does.

        Raises:
            pydantic.ValidationError: as above.
        """
        return cls.model_validate_json(text, by_alias=True, by_name=False, extra="ignore")

    def dump(self) -> dict[str, Any]:
        """The JSON form, camelCase, without unset fields."""
        return self.model_dump(mode="json", exclude_none=True)

    def dump_brief(self) -> dict[str, Any]:
        """The JSON form without unset fields and without fields that have their default: a version that lacks a field
        can read a document that does not use it."""
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
_SEGMENT = r"[A-Za-z0-9*?_=\[][A-Za-z0-9*?_=.,\[\]+-]*"
WATCH = rf"^{_SEGMENT}(/{_SEGMENT}){{0,3}}$"
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
"""Meaning of each pattern, in words that follow "must be"."""

Label = Annotated[str, Field(pattern=LABEL, max_length=63)]
"""The name of a namespace."""
ObjectName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=253)]
"""The name of most objects: an RFC 1123 subdomain."""
ShortName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=63)]
"""The name of an object that is written into a label, which has no more room."""
PerhapsName = Annotated[str, Field(pattern=SUBDOMAIN_OR_EMPTY, max_length=253)]
"""The name of an object, or an empty string, where that has a meaning of its own."""
Key = Annotated[str, Field(pattern=KEY, max_length=253)]
"""A key of a Secret or a ConfigMap."""
MetricName = Annotated[str, Field(pattern=METRIC, max_length=63)]
"""A score that evaluators report."""
WatchPattern = Annotated[str, Field(pattern=WATCH, max_length=253)]
"""Glob pattern of files or folders in the run directory, with *, ? and […]."""
Image = Annotated[str, Field(pattern=IMAGE, max_length=1024)]
"""A container image."""
FilePath = Annotated[str, Field(pattern=PATH, max_length=4096)]
"""The path of a file or a folder."""


MAX_COUNT = 2**53
"""Largest count: a larger number is not exact in JSON, and no count of ours comes near."""


def finite(value: object) -> float | None:
    """The finite number in a record; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of more digits than fit
        return None
    return number if isfinite(number) else None


def amount(value: object) -> float | None:
    """The non-negative finite number in a record; None for any other value."""
    number = finite(value)
    return number if number is not None and number >= 0 else None


def whole_number(value: object) -> int | None:
    """The non-negative whole number in a record; None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


class JsonLimits(NamedTuple):
    """Limits of a piece of JSON."""

    depth: int
    """Maximum levels of objects and lists."""
    values: int
    """Maximum number of entries of all objects and lists together."""
    characters: int
    """Maximum number of characters of all texts, names of fields included."""


def exceeded_limit(value: Any, limits: JsonLimits) -> str:
    """The limit that a value exceeds, in words that follow "it"; empty if it exceeds none.

    Iterative, and stops at the first exceeded limit: a hostile value costs no more than the limits allow.
    """
    values = characters = 0
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, int):
            characters += item.bit_length() // 3
        elif isinstance(item, dict | list):
            if depth > limits.depth:
                return f"is nested more than {limits.depth} levels deep"
            values += len(item)
            if values > limits.values:
                return f"has more than {limits.values} entries"
            if isinstance(item, dict):
                characters += sum(len(name) for name in item)
            pending += [(inner, depth + 1) for inner in (item.values() if isinstance(item, dict) else item)]
        if characters > limits.characters:
            return f"has more than {limits.characters} characters"
    return ""
