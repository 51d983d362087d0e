"""The CustomResourceDefinition: a structural schema in the OpenAPI dialect of the API server.

The dialect differs from JSON Schema: there are no references, so everything is written out; there are no unions with
null, so an optional field is simply not required; exclusive bounds are booleans beside `minimum`; a quantity is
`x-kubernetes-int-or-string`; an object that keeps unknown fields is marked, and all others drop them (kubectl refuses
them before).

The default of a group of fields is written out, with the defaults of the fields inside: the API server would fill those
into `{}` too, but it refuses a CRD with a default that itself breaks a rule (1.35: "no such key: minReplicas"). A group
whose default is chosen by the operator (the evaluators) has none.

Rules across fields become CEL with the field that they report, so that `kubectl apply` reports the same mistakes as
`tandem validate`. The API server estimates the highest cost of each rule from the declared bounds and refuses the CRD
if it is too high, which is why texts and lists in `tandem.job.resource` have bounds at all.

The schema for editors finds fewer mistakes than `tandem validate`, for JSON Schema cannot compare two fields; the rules
across fields are in the descriptions. Editors use it if a manifest starts with the comment
`# yaml-language-server: $schema=…/job.schema.json`.
"""

import json
from typing import Any

import yaml

from tandem.job.manifest.fields import ABSENT, Node, describe, tree
from tandem.job.pod_template import GROUP
from tandem.job.resource import KIND, VERSION, DistributedTrainingJob
from tandem.model import Rule, Transition

PLURAL = "distributedtrainingjobs"
HEADER = "# Generated from core/tandem/job/resource.py by `make generate`; do not edit.\n"

COLUMNS = (
    ("Phase", "string", ".status.phase", "Phase of the job.", 0),
    ("Workers", "string", ".status.workers.summary", "Ready workers of the desired number.", 0),
    ("Step", "integer", ".status.progress.step", "Optimizer steps completed.", 0),
    ("Loss", "number", ".status.loss", "Training loss.", 0),
    ("Best", "number", ".status.bestCheckpoint.value", "The best score so far.", 0),
    ("Best-Checkpoint", "string", ".status.bestCheckpoint.name", "The checkpoint with the best score.", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Reason of the condition Ready.", 1),
    ("Evaluators", "string", ".status.evaluators.summary", "Ready evaluators of the desired number.", 1),
    ("Throughput", "number", ".status.throughput", "Samples a second.", 1),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was created.", 0),
)
"""Columns of `kubectl get`: name, type, JSONPath, description, priority (1: only with `-o wide`)."""


def crd_yaml() -> str:
    """The CRD as a file of the chart."""
    return HEADER + yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def crd() -> dict[str, Any]:
    """The CRD as data."""
    root = tree(DistributedTrainingJob)
    schema = openapi(root)
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": _metadata(root.fields["metadata"]),
    }
    schema["required"] = ["metadata", "spec"]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text, "priority": priority}
            for name, kind, path, text, priority in COLUMNS
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.replicas",
                "statusReplicasPath": ".status.workers.ready",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": schema},
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["dtj"],
        "categories": ["all"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def openapi(node: Node) -> dict[str, Any]:
    """The structural schema of one node."""
    schema: dict[str, Any] = {"description": node.description} if node.description else {}
    match node.kind:
        case "object":
            schema |= _object(node)
        case "map":
            schema |= _map(node)
        case "list":
            assert node.items is not None
            schema |= {"type": "array", "items": openapi(node.items)} | _lengths(node, "Items")
        case "quantity":
            schema |= {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
            schema |= {"pattern": node.pattern, "maxLength": node.max_length, "minimum": 0}
        case "text":
            schema |= {"type": "string"} | _lengths(node, "Length")
            schema |= {"pattern": node.pattern} if node.pattern else {}
        case "integer":
            schema |= {"type": "integer", "format": "int64"} | _bounds(node)
        case "number":
            schema |= {"type": "number"} | _bounds(node) | _fractional_bounds(node)
        case "boolean":
            schema |= {"type": "boolean"}
    if node.choices:
        schema["enum"] = list(node.choices)
    if node.default not in (ABSENT, None):
        schema["default"] = _default(node)
    return schema | node.extras


def _default(node: Node) -> Any:
    if node.kind != "object":
        return node.default
    return {name: _default(child) for name, child in node.fields.items() if child.default not in (ABSENT, None)}


def _object(node: Node) -> dict[str, Any]:
    assert node.model is not None
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: openapi(child) for name, child in node.fields.items()},
    }
    if required := [name for name, child in node.fields.items() if child.required]:
        schema["required"] = required
    if node.open:
        schema["x-kubernetes-preserve-unknown-fields"] = True
    stated: list[Rule | Transition] = [*node.model.rules, *node.model.transitions]
    rules = [
        {"rule": rule.cel, "message": rule.message} | ({"fieldPath": f".{rule.field}"} if rule.field else {})
        for rule in stated
    ]
    rules += [_unchanged(name, node.fields[name]) for name in node.model.immutable]
    return schema | ({"x-kubernetes-validations": rules} if rules else {})


def _unchanged(name: str, child: Node) -> dict[str, str]:
    """A transition rule: it refers to oldSelf, so it applies to updates only."""
    same = f"self.{name} == oldSelf.{name}"
    if not child.required:
        same = f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {same})"
    return {
        "rule": same,
        "message": f"{name} cannot be changed; create a new job with another name",
        "fieldPath": f".{name}",
    }


def _map(node: Node) -> dict[str, Any]:
    if node.items is None:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if node.keys:
        return {"type": "object", "properties": {key: openapi(node.items) for key in node.keys}}
    return {"type": "object", "additionalProperties": openapi(node.items)}


def _lengths(node: Node, unit: str) -> dict[str, int]:
    bounds = {f"min{unit}": node.min_length, f"max{unit}": node.max_length}
    return {key: value for key, value in bounds.items() if value is not None}


def _bounds(node: Node) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if node.minimum is not None:
        schema["minimum"] = node.minimum
    if node.exclusive_minimum is not None:
        schema |= {"minimum": node.exclusive_minimum, "exclusiveMinimum": True}
    if node.maximum is not None:
        schema["maximum"] = node.maximum
    if node.exclusive_maximum is not None:
        schema |= {"maximum": node.exclusive_maximum, "exclusiveMaximum": True}
    return schema


def _fractional_bounds(node: Node) -> dict[str, Any]:
    """Rules for bounds with a fraction. The API server (1.35) truncates the bound where the value is whole: it accepts
    0 for 0.1."""
    rules = [
        {"rule": f"self {relation} {bound}", "message": f"must be {describe(node)}"}
        for relation, bound in (
            (">=", node.minimum),
            (">", node.exclusive_minimum),
            ("<=", node.maximum),
            ("<", node.exclusive_maximum),
        )
        if bound is not None and not float(bound).is_integer()
    ]
    return {"x-kubernetes-validations": rules} if rules else {}


def _metadata(node: Node) -> dict[str, Any]:
    """The schema of metadata. The API server knows it itself; a CRD may only restrict the name, by pattern and
    length."""
    name = node.fields["name"]
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": name.pattern, "maxLength": name.max_length}},
    }


class _Dumper(yaml.SafeDumper):
    """Writes block style throughout, lists indented as people write them, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


IDENTIFIER = f"urn:{GROUP}:{VERSION}:{KIND}"


def editor_json() -> str:
    """The schema as a file."""
    return json.dumps(editor_schema(), indent=2, ensure_ascii=False) + "\n"


def editor_schema() -> dict[str, Any]:
    """The schema as data, JSON Schema 2020-12."""
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": IDENTIFIER, "title": KIND}
    return top | _schema(tree(DistributedTrainingJob))


def _schema(node: Node) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": _text(node)} if _text(node) else {}
    match node.kind:
        case "object":
            schema |= {"type": "object", "properties": {name: _schema(child) for name, child in node.fields.items()}}
            schema |= (
                {"required": needed} if (needed := [n for n, child in node.fields.items() if child.required]) else {}
            )
            schema["additionalProperties"] = node.open
        case "map" if node.keys:
            assert node.items is not None
            schema |= {"type": "object", "properties": {key: _schema(node.items) for key in node.keys}}
            schema["additionalProperties"] = False
        case "map":
            schema |= {"type": "object", "additionalProperties": _schema(node.items) if node.items else True}
        case "list":
            assert node.items is not None
            schema |= {
                "type": "array",
                "items": _schema(node.items),
                "minItems": node.min_length,
                "maxItems": node.max_length,
            }
        case "quantity":
            schema |= {"type": ["string", "integer"], "pattern": node.pattern, "minimum": 0}
        case "text":
            schema |= {"type": "string", "minLength": node.min_length, "maxLength": node.max_length}
            schema["pattern"] = node.pattern or None
        case "integer" | "number" | "boolean":
            schema |= {"type": node.kind, "minimum": node.minimum, "exclusiveMinimum": node.exclusive_minimum}
            schema |= {"maximum": node.maximum, "exclusiveMaximum": node.exclusive_maximum}
    if node.choices:
        schema["enum"] = list(node.choices)
    if node.default not in (ABSENT, None) and node.kind != "object":
        schema["default"] = node.default
    schema["deprecated"] = node.deprecated or None
    return {key: value for key, value in schema.items() if value is not None}


def _text(node: Node) -> str:
    rules = [rule.message for rule in node.model.rules] if node.model else []
    return " ".join([node.description, *(f"Rule: {message}." for message in rules)]).strip()
