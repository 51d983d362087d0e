"""The fields of a manifest, as one tree derived from the models of the job.

Pydantic's schema of a model (types, bounds, defaults, docstrings) is converted once into plain nodes. They have three
users: messages about a mistake (`tandem.job.manifest.reading`), suggestions for a misspelled name, and the generated
files (`tools/`). Rejected: walking pydantic's JSON schema in each of them, for its `$ref`, `anyOf` with null and titles
would have to be resolved three times.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
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
"""Names that users of other tools know; a suggestion only when nothing closer is found."""

CONFIG, LOOP = ("spec", "trainer", "config"), ("spec", "trainer", "loop")
"""Paths of two groups with common fields: the first is deprecated, and has those of the second and of parameters."""
PARAMETERS = ("spec", "trainer", "parameters")

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
    """A field or value in a manifest, and its allowed content."""

    kind: Kind
    description: str = ""
    required: bool = False
    default: Any = ABSENT
    open: bool = False
    """An object that keeps fields it does not know."""
    model: type[Model] | None = None
    fields: dict[str, "Node"] = field(default_factory=dict)
    items: "Node | None" = None
    """The items of a list, or the values of a map; None where a map may hold anything."""
    keys: tuple[str, ...] = ()
    """The allowed keys of a map; empty: any."""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    exclusive_minimum: float | None = None
    """Exclusive lower bound."""
    maximum: float | None = None
    exclusive_maximum: float | None = None
    """Exclusive upper bound."""
    or_text: bool = False
    """Whether a number may be a text instead."""
    pattern: str = ""
    min_length: int | None = None
    max_length: int | None = None
    """Bounds of the length of a text or a list."""
    deprecated: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    """`x-…` keys for the API server."""

    def child(self, part: str | int) -> "Node | None":
        """The node below, None if there is none by that name."""
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
    return _node(schema, definitions, {node_model.__name__: node_model for node_model in _models(model)} | {"": model})


def node_at(root: Node, path: Path) -> Node | None:
    """The node at a path; None if the models have no such field."""
    node: Node | None = root
    for part in path:
        node = node.child(part) if node else None
    return node


def dotted(path: Path) -> str:
    """Format a path as people write it: spec.trainer.env[0].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def named_fields(root: Node, prefix: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every field that has a name of its own, with its path, top down; without the status, which is not the user's."""
    for name, node in root.fields.items():
        path = (*prefix, name)
        if path == ("status",):
            continue
        yield path, node
        yield from named_fields(node, path)
        if node.items is not None:
            yield from named_fields(node.items, (*path, 0) if node.kind == "list" else path)


def suggestion(root: Node, parent: Path, wrong: str) -> str:
    """The field that an unknown field `wrong` under `parent` was probably meant to be; empty if none is close.

    A field in the same group is suggested by its name alone, one elsewhere by its whole path.
    """
    if node_at(root, CONFIG) is not None:
        root = with_trainer(root, **{(LOOP if parent[:3] == CONFIG else CONFIG)[2]: None})
    node = node_at(root, parent)
    if node is None:
        return ""
    siblings = list(node.fields) or list(node.keys)
    spellings = {name.lower(): name for name in siblings}
    plain = wrong.replace("_", "").replace("-", "").lower()
    if plain in spellings:
        return spellings[plain]
    camel_case = to_camel(wrong)
    if elsewhere := _elsewhere(root, camel_case, parent):
        return elsewhere
    if matches := get_close_matches(camel_case, siblings, n=1, cutoff=0.6):
        return matches[0]
    if other := SYNONYMS.get(camel_case):
        return other if other in siblings else _elsewhere(root, other, parent)
    every = {str(path[-1]) for path, _ in named_fields(root)}
    matches = get_close_matches(camel_case, sorted(every), n=1, cutoff=0.8)
    return _elsewhere(root, matches[0], parent) if matches else ""


def with_trainer(root: Node, **changed: Node | None) -> Node:
    """The tree of a job with other fields of `spec.trainer`; None removes one."""
    spec = root.fields["spec"]
    trainer = spec.fields["trainer"]
    fields = {name: node for name, node in {**trainer.fields, **changed}.items() if node is not None}
    spec = replace(spec, fields={**spec.fields, "trainer": replace(trainer, fields=fields)})
    return replace(root, fields={**root.fields, "spec": spec})


def closest_choice(value: str, allowed: Sequence[str]) -> str:
    """The allowed value that `value` is probably a misspelling of; empty if none is close."""
    lower = {choice.lower(): choice for choice in allowed}
    matches = get_close_matches(value.lower().replace("_", "-"), list(lower), n=1, cutoff=0.6)
    return lower[matches[0]] if matches else ""


def describe(node: Node) -> str:
    """The allowed content of a node, in words that follow "must be"."""
    if node.choices:
        choices = [str(choice) for choice in node.choices]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
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
            return f"a list{inner}" + (f" with at least {node.min_length}" if node.min_length else "")
        case "object":
            return "a group of fields"
        case "map":
            return f"a group with {' and '.join(node.keys)}" if node.keys else "a group of names and values"
        case "text":
            not_empty = " that is not empty" if node.min_length == 1 else ""
            return f"text of at most {node.max_length} characters" + not_empty if node.max_length else "text"


def _elsewhere(root: Node, name: str, parent: Path) -> str:
    """The paths of fields of this name: those below or near `parent` first, at most two."""
    paths = [path for path, _ in named_fields(root) if path[-1] == name]

    def distance(path: Path) -> tuple[bool, int, int]:
        shared = 0
        for part, parent_part in zip(path, parent, strict=False):
            if part != parent_part:
                break
            shared += 1
        return path[:1] == ("metadata",) != parent[:1] and bool(parent), -shared, len(path)

    return " or ".join(dotted(path) for path in sorted(paths, key=distance)[:2])


def _bounded(noun: str, node: Node) -> str:
    low, high = node.minimum, node.maximum
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {_plain(high)}"
    parts = []
    if low is not None:
        parts.append(f"{low:g} or more")
    if node.exclusive_minimum is not None:
        parts.append(f"greater than {node.exclusive_minimum:g}")
    if high is not None:
        parts.append(f"at most {_plain(high)}")
    if node.exclusive_maximum is not None:
        parts.append(f"less than {node.exclusive_maximum:g}")
    return f"{noun}, {' and '.join(parts)}" if parts else noun


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _plural(node: Node) -> str:
    if node.choices:
        return " or ".join(str(choice) for choice in node.choices)
    return {"text": "words", "object": "groups of fields", "integer": "whole numbers"}.get(node.kind, "values")


def _models(model: type[Model]) -> Iterator[type[Model]]:
    visited: set[type[Model]] = set()

    def visit(annotation: Any) -> Iterator[type[Model]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if issubclass(annotation, Model) and annotation not in visited:
                visited.add(annotation)
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
        return replace(
            inner,
            description=_one_line(schema) or inner.description,
            default=schema.get("default", ABSENT),
            deprecated="deprecated" in schema,
        )
    if union := schema.get("anyOf"):
        options = [option for option in union if option.get("type") != "null"]
        outer = {key: value for key, value in schema.items() if key != "anyOf"}
        if len(options) == 1:
            return _node(options[0] | outer, definitions, models, name)
        if [option.get("type") for option in options] == ["number", "string"]:
            return replace(_node(options[0] | outer, definitions, models, name), or_text=True)
        assert [option.get("type") for option in options] == ["string", "integer"], (
            f"a union no reader knows: {options}"
        )
        return Node("quantity", _one_line(schema), pattern=options[0]["pattern"], max_length=options[0]["maxLength"])
    if "properties" in schema:
        required, texts = schema.get("required", []), _docstrings(models[name])
        fields = {}
        for key, value in schema["properties"].items():
            node = _node(value, definitions, models)
            fields[key] = replace(node, required=key in required, description=texts.get(key, node.description))
        opened = schema.get("additionalProperties") is True
        return Node("object", _one_line(schema), open=opened, model=models[name], fields=fields)
    choices = (schema["const"],) if "const" in schema else tuple(schema.get("enum", ()))
    kind = _KINDS[schema["type"]]
    inside = schema.get("items") if kind == "list" else schema.get("additionalProperties")
    return Node(
        kind,
        _one_line(schema),
        default=schema.get("default", ABSENT),
        items=_node(inside, definitions, models) if isinstance(inside, dict) and inside else None,
        keys=tuple(schema.get("propertyNames", {}).get("enum", ())),
        choices=choices,
        minimum=schema.get("minimum"),
        exclusive_minimum=schema.get("exclusiveMinimum"),
        maximum=schema.get("maximum"),
        exclusive_maximum=schema.get("exclusiveMaximum"),
        pattern=schema.get("pattern", ""),
        min_length=schema.get("minLength", schema.get("minItems")),
        max_length=schema.get("maxLength", schema.get("maxItems")),
        extras={key: value for key, value in schema.items() if key.startswith("x-")},
    )


def _one_line(schema: dict[str, Any]) -> str:
    return " ".join(str(schema.get("description", "")).split())


def _docstrings(model: type[Model]) -> dict[str, str]:
    """The docstrings of a model's fields, by the field's name in a manifest."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        texts |= _docstrings_in(base.__module__).get(base.__name__, {}) if issubclass(base, Model) else {}
    return {info.alias or name: texts[name] for name, info in model.model_fields.items() if name in texts}


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """The docstrings of attributes in a module, each in one line, by class and name."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            of_class = texts[node.name] = {}
            for before, after in pairwise(node.body):
                match before, after:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        of_class[name] = " ".join(text.split())
    return texts
