"""Environment variables of a job's processes: a value, or where it comes from."""

from typing import Annotated, ClassVar

from pydantic import Field

from tandem.model import WORD, Key, Model, ObjectName, Rule

Word = Annotated[str, Field(max_length=4096, pattern=WORD)]


class KeyRef(Model):
    """One key of an object in the job's namespace."""

    name: ObjectName
    """The object's name."""
    key: Key
    """Which of its keys."""
    optional: bool = False
    """Whether a pod starts without it."""


class FieldRef(Model):
    """One field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    """Which one, such as `spec.nodeName`."""


class EnvSource(Model):
    """Where the value of a variable comes from. `tandem run` takes it from its own environment, by the variable's
    name."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: sum(one is not None for one in (s.secret_key_ref, s.config_map_key_ref, s.field_ref)) == 1,
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(one, one).size() == 1",
            "give exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            "secretKeyRef",
        ),
    )

    @property
    def optional(self) -> bool:
        """Whether processes start without it."""
        reference = self.secret_key_ref or self.config_map_key_ref
        return reference is not None and reference.optional


class EnvVar(Model):
    """An environment variable of the training processes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
    """The variable's name: letters, digits and underscores, not beginning with a digit."""
    value: Word = ""
    """Its value, taken literally. It stands in the run directory and in reports; use `valueFrom` for secrets."""
    value_from: EnvSource | None = None
    """Where the value comes from, instead. It is never written down."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda v: not v.value or v.value_from is None,
            "!has(self.valueFrom) || !has(self.value) || self.value == ''",
            "give value or valueFrom, not both",
            "valueFrom",
        ),
    )
