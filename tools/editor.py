"""The JSON Schema for editors: completion, hover texts and red lines while a manifest is written.

It says less than `tandem validate`, for JSON Schema cannot compare two fields; the rules across fields stand in the
descriptions. The comment `# yaml-language-server: $schema=…/job.schema.json` on top of a manifest makes editors use it.
"""

import json
from typing import Any

from tandem.job import GROUP, KIND, VERSION, DistributedTrainingJob
from tandem.manifest.fields import ABSENT, Node, tree

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
                "minItems": node.shortest,
                "maxItems": node.longest,
            }
        case "quantity":
            schema |= {"type": ["string", "integer"], "pattern": node.pattern, "minimum": 0}
        case "text":
            schema |= {"type": "string", "minLength": node.shortest, "maxLength": node.longest}
            schema["pattern"] = node.pattern or None
        case "integer" | "number" | "boolean":
            schema |= {"type": node.kind, "minimum": node.minimum, "exclusiveMinimum": node.above}
            schema |= {"maximum": node.maximum, "exclusiveMaximum": node.below}
    if node.choices:
        schema["enum"] = list(node.choices)
    if node.default not in (ABSENT, None) and node.kind != "object":
        schema["default"] = node.default
    return {key: value for key, value in schema.items() if value is not None}


def _text(node: Node) -> str:
    rules = [rule.message for rule in node.model.rules] if node.model else []
    return " ".join([node.description, *(f"Rule: {message}." for message in rules)]).strip()
