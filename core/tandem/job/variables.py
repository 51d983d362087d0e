"""Environment variables of a job's processes: a value, or a source of it."""

from typing import Annotated, ClassVar

from pydantic import Field

from tandem.model import WORD, Key, Model, ObjectName, Rule

Word = Annotated[str, Field(max_length=4096, pattern=WORD)]


class KeyRef(Model):
    """One key of an object in the job's namespace."""

    name: ObjectName
    """The object's name."""
    key: Key
    """Key of the object."""
    optional: bool = False
    """Whether a pod starts without it."""


class FieldRef(Model):
    """One field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    """Path of the field, such as `spec.nodeName`."""


class EnvSource(Model):
    """The source of a variable's value. `tandem run` takes the value from its own environment, by the variable's
    name."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """A field of the pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: sum(ref is not None for ref in (s.secret_key_ref, s.config_map_key_ref, s.field_ref)) == 1,
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
    """Its value, taken literally. It is stored in the run directory and in reports; use `valueFrom` for secrets."""
    value_from: EnvSource | None = None
    """Source of the value, instead of `value`. The value is never stored."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda v: not v.value or v.value_from is None,
            "!has(self.valueFrom) || !has(self.value) || self.value == ''",
            "give value or valueFrom, not both",
            "valueFrom",
        ),
    )
