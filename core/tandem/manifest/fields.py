"""The fields of a manifest, as one tree derived from the models of the job.

What pydantic knows of a model (types, bounds, defaults, docstrings) is turned once into plain nodes. Three readers
share them: messages about a mistake (`tandem.manifest.reading`), the nearest right name for a wrong one, and the
generated files (`tools/`). Rejected: walking pydantic's JSON schema in each reader, for its `$ref`, `anyOf` with null
and titles would have to be undone three times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from tandem.model import Model

Kind = Literal["object", "map", "list", "text", "integer", "number", "boolean", "quantity"]
Path = tuple[str | int, ...]

SYNONYMS = {
    "backoffLimit": "maxRestarts",
    "batch": "globalBatchSize",
    "dataset": "data",
    "environment": "env",
    "gpus": "resources",
    "lr": "learningRate",
    "nprocPerNode": "processesPerReplica",
    "optim": "optimizer",
    "parallelism": "replicas",
    "script": "command",
    "steps": "maxSteps",
    "volume": "storage",
    "wd": "weightDecay",
}
"""Words that users of other tools bring along; only asked when nothing closer is found."""

CONFIG, LOOP = ("spec", "trainer", "config"), ("spec", "trainer", "loop")
"""Have many fields in common: one belongs to a built-in task, the other to a task of the user's own."""

_KINDS: dict[str, Kind] = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "array": "list",
    "object": "map",
}
ABSENT = object()
"""The default of a field that has none."""


@dataclass(frozen=True)
class Node:
    """One place in a manifest and what it may hold."""

    kind: Kind
    description: str = ""
    required: bool = False
    default: Any = ABSENT
    open: bool = False
    """An object that keeps fields it does not know."""
    model: type[Model] | None = None
    fields: dict[str, "Node"] = field(default_factory=dict)
    items: "Node | None" = None
    """What a list holds, or the values of a map; None where a map may hold anything."""
    keys: tuple[str, ...] = ()
    """The only keys a map may have; empty: any."""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    above: float | None = None
    """Exclusive lower bound."""
    maximum: float | None = None
    below: float | None = None
    """Exclusive upper bound."""
    or_text: bool = False
    """Whether a number may be a text instead."""
    pattern: str = ""
    shortest: int | None = None
    longest: int | None = None
    """Bounds of a text's length or a list's."""
    extras: dict[str, Any] = field(default_factory=dict)
    """`x-…` keys for the API server."""

    def child(self, part: str | int) -> "Node | None":
        """The node below, None where there is none by that name."""
        if isinstance(part, int):
            return self.items if self.kind == "list" else None
        if self.kind == "map":
            return self.items if not self.keys or part in self.keys else None
        return self.fields.get(part)


@cache
def tree(model: type[Model]) -> Node:
    """The node of a whole model."""
    schema = model.model_json_schema(by_alias=True)
    definitions = schema.get("$defs", {})
    return _node(schema, definitions, {found.__name__: found for found in _models(model)} | {"": model})


def at(root: Node, path: Path) -> Node | None:
    """The node at a path, None where the models know no such place."""
    node: Node | None = root
    for part in path:
        node = node.child(part) if node else None
    return node


def dotted(path: Path) -> str:
    """A path as people write it: spec.trainer.env[0].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def named(root: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every field that has a name of its own, with its path, top down; the status is not the user's and left out."""
    for name, node in root.fields.items():
        path = (*prefix, name)
        if path == ("status",):
            continue
        yield path, node
        yield from named(node, path)
        if node.items is not None:
            yield from named(node.items, (*path, 0) if node.kind == "list" else path)


def suggestion(root: Node, parent: Path, wrong: str, has_own_task: bool = False) -> str:
    """What was probably meant by an unknown field `wrong` under `parent`; empty if nothing comes near.

    A field beside it is suggested by its name alone, one elsewhere by its whole path.

    Args:
        has_own_task: whether the job trains a task of the user's own.
    """
    unused = CONFIG if has_own_task else LOOP
    if parent[:3] != unused:
        trainer = root.fields["spec"].fields["trainer"]
        rest = {name: node for name, node in trainer.fields.items() if name != unused[2]}
        spec = replace(
            root.fields["spec"], fields={**root.fields["spec"].fields, "trainer": replace(trainer, fields=rest)}
        )
        root = replace(root, fields={**root.fields, "spec": spec})
    node = at(root, parent)
    if node is None:
        return ""
    beside = list(node.fields) or list(node.keys)
    spellings = {name.lower(): name for name in beside}
    plain = wrong.replace("_", "").replace("-", "").lower()
    if plain in spellings:
        return spellings[plain]
    wanted = to_camel(wrong)
    if elsewhere := _elsewhere(root, wanted, parent):
        return elsewhere
    if near := get_close_matches(wanted, beside, n=1, cutoff=0.6):
        return near[0]
    if other := SYNONYMS.get(wanted):
        return other if other in beside else _elsewhere(root, other, parent)
    every = {str(path[-1]) for path, _ in named(root)}
    near = get_close_matches(wanted, sorted(every), n=1, cutoff=0.8)
    return _elsewhere(root, near[0], parent) if near else ""


def nearest(given: str, allowed: Sequence[str]) -> str:
    """The allowed value that `given` is probably a misspelling of; empty if none comes near."""
    lower = {value.lower(): value for value in allowed}
    near = get_close_matches(given.lower().replace("_", "-"), list(lower), n=1, cutoff=0.6)
    return lower[near[0]] if near else ""


def describe(node: Node) -> str:
    """What a place may hold, in words that follow "must be"."""
    if node.choices:
        words = [str(choice) for choice in node.choices]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    match node.kind:
        case "integer":
            return _bounded("a whole number", node)
        case "number":
            return _bounded("a number", node) + (", or text" if node.or_text else "")
        case "boolean":
            return "true or false"
        case "quantity":
            return "an amount such as 2, 500m or 16Gi"
        case "list":
            inner = f" of {_plural(node.items)}" if node.items else ""
            return f"a list{inner}" + (f" with at least {node.shortest}" if node.shortest else "")
        case "object":
            return "a group of fields"
        case "map":
            return f"a group with {' and '.join(node.keys)}" if node.keys else "a group of names and values"
        case "text":
            least = " that is not empty" if node.shortest == 1 else ""
            return f"text of at most {node.longest} characters" + least if node.longest else "text"


def _elsewhere(root: Node, name: str, parent: Path) -> str:
    """Where a field of this name stands: below or near `parent` first, at most two places."""
    found = [path for path, _ in named(root) if path[-1] == name]

    def distance(path: Path) -> tuple[bool, int, int]:
        shared = 0
        for ours, theirs in zip(path, parent, strict=False):
            if ours != theirs:
                break
            shared += 1
        return path[:1] == ("metadata",) != parent[:1] and bool(parent), -shared, len(path)

    return " or ".join(dotted(path) for path in sorted(found, key=distance)[:2])


def _bounded(what: str, node: Node) -> str:
    low, high = node.minimum, node.maximum
    if low is not None and high is not None:
        return f"{what} from {low:g} to {_plain(high)}"
    parts = []
    if low is not None:
        parts.append(f"{low:g} or more")
    if node.above is not None:
        parts.append(f"greater than {node.above:g}")
    if high is not None:
        parts.append(f"at most {_plain(high)}")
    if node.below is not None:
        parts.append(f"less than {node.below:g}")
    return f"{what}, {' and '.join(parts)}" if parts else what


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _plural(node: Node) -> str:
    if node.choices:
        return " or ".join(str(choice) for choice in node.choices)
    return {"text": "words", "object": "groups of fields", "integer": "whole numbers"}.get(node.kind, "values")


def _models(model: type[Model]) -> Iterator[type[Model]]:
    seen: set[type[Model]] = set()

    def visit(annotation: Any) -> Iterator[type[Model]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if issubclass(annotation, Model) and annotation not in seen:
                seen.add(annotation)
                yield annotation
                for info in annotation.model_fields.values():
                    yield from visit(info.annotation)
        else:
            for inner in getattr(annotation, "__args__", ()):
                yield from visit(inner)

    return visit(model)


def _node(schema: dict[str, Any], definitions: dict[str, Any], models: dict[str, type[Model]], name: str = "") -> Node:
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        inner = _node(definitions[name], definitions, models, name)
        return replace(inner, description=_one_line(schema) or inner.description, default=schema.get("default", ABSENT))
    if union := schema.get("anyOf"):
        rest = [option for option in union if option.get("type") != "null"]
        outer = {key: value for key, value in schema.items() if key != "anyOf"}
        if len(rest) == 1:
            return _node(rest[0] | outer, definitions, models, name)
        if [option.get("type") for option in rest] == ["number", "string"]:
            return replace(_node(rest[0] | outer, definitions, models, name), or_text=True)
        assert [option.get("type") for option in rest] == ["string", "integer"], f"a union no reader knows: {rest}"
        return Node("quantity", _one_line(schema), pattern=rest[0]["pattern"], longest=rest[0]["maxLength"])
    if "properties" in schema:
        required = schema.get("required", [])
        fields = {
            key: replace(_node(value, definitions, models), required=key in required)
            for key, value in schema["properties"].items()
        }
        opened = schema.get("additionalProperties") is True
        return Node("object", _one_line(schema), open=opened, model=models[name], fields=fields)
    choices = (schema["const"],) if "const" in schema else tuple(schema.get("enum", ()))
    kind = _KINDS[schema["type"]]
    inside = schema.get("items") if kind == "list" else schema.get("additionalProperties")
    return Node(
        kind,
        _one_line(schema),
        default=schema.get("default", ABSENT),
        items=_node(inside, definitions, models) if isinstance(inside, dict) else None,
        keys=tuple(schema.get("propertyNames", {}).get("enum", ())),
        choices=choices,
        minimum=schema.get("minimum"),
        above=schema.get("exclusiveMinimum"),
        maximum=schema.get("maximum"),
        below=schema.get("exclusiveMaximum"),
        pattern=schema.get("pattern", ""),
        shortest=schema.get("minLength", schema.get("minItems")),
        longest=schema.get("maxLength", schema.get("maxItems")),
        extras={key: value for key, value in schema.items() if key.startswith("x-")},
    )


def _one_line(schema: dict[str, Any]) -> str:
    return " ".join(str(schema.get("description", "")).split())
