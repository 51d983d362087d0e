"""What pydantic found wrong, in words for the person who wrote the manifest.

Pydantic's messages are written for programmers (`Input should be a valid integer`) and its locations contain the tags
of unions, so each error is looked up in the tree of fields and worded anew.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from tandem.errors import SETTING, Problem
from tandem.gpus import WHOLE
from tandem.job import DistributedTrainingJob
from tandem.manifest.fields import Node, Path, at, describe, dotted, nearest, suggestion, tree
from tandem.manifest.overrides import setting_of
from tandem.manifest.source import Place, Source, parse_value, shown
from tandem.model import RuleBroken
from tandem.naming import RULES


def problems(
    details: Sequence[ErrorDetails], source: Source, data: dict[str, Any], overrides: Sequence[str]
) -> list[Problem]:
    """The problems of pydantic's errors, in the order of the lines. `data` is what was validated: the source with the
    overrides applied."""
    set_by = {setting_of(setting)[0]: setting for setting in overrides}
    found: dict[tuple[str, str], Problem] = {}
    meant = {_meant(detail["loc"]) for detail in details if detail["type"] == "extra_forbidden"}
    for detail in details:
        if detail["type"] == "missing" and detail["loc"] in meant:
            continue
        for path, message, more in _worded(detail, data):
            problem = _placed(source, set_by, path, message, message.startswith("unknown field"), more)
            found.setdefault((problem.field, problem.message), problem)
    return sorted(found.values())


def _meant(unknown: Path) -> Path:
    """The field beside an unknown one that was probably meant by it: it is misspelt, not missing as well."""
    return (*unknown[:-1], suggestion(_root(), unknown[:-1], str(unknown[-1])))


def _worded(detail: ErrorDetails, data: dict[str, Any]) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Path, message, and what else is known of one error; several for a model that breaks several rules."""
    path, is_key = _real_path(detail["loc"], data)
    node = at(_root(), path)
    name = dotted(path)
    match detail["type"]:
        case "missing":
            wanted = describe(node) if node else ""
            meaning = f" ({_first_sentence(node.description)})" if node and node.description else ""
            yield path, f"{name} is missing{meaning}", {"given": "", "allowed": wanted}
        case "extra_forbidden":
            parent = at(_root(), path[:-1])
            near = suggestion(_root(), path[:-1], str(path[-1]))
            where = f" in {dotted(path[:-1])}" if path[:-1] else ""
            beside = ", ".join(parent.fields) if parent else ""
            yield (
                path,
                f"unknown field {path[-1]}{where}",
                {"given": str(path[-1]), "allowed": beside, "suggestion": near},
            )
        case "value_error" if isinstance(broken := detail.get("ctx", {}).get("error"), RuleBroken):
            for rule in broken.broken:
                inner = (*path, rule.field) if rule.field else path
                parts = list(_parts_of_devices(inner, data))
                yield from parts or [(inner, f"{name}: {rule.message}", {})]
        case "value_error" if isinstance(error := detail.get("ctx", {}).get("error"), ValueError):
            yield path, f"{name}: {error}", {}
        case _ if is_key:
            parent = at(_root(), path[:-1])
            keys = parent.keys if parent else ()
            near = nearest(str(path[-1]), keys)
            message = f"unknown field {path[-1]} in {dotted(path[:-1])}"
            yield path, message, {"given": str(path[-1]), "allowed": ", ".join(keys), "suggestion": near}
        case _ if node is None:
            yield path, f"{name}: {detail['msg']}", {}
        case _:
            yield path, *_mismatch(name, node, detail)


def _parts_of_devices(resources: Path, data: Any) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Amounts of GPUs that are no whole numbers, among the resources at a path."""
    for step in resources:
        data = data.get(step) if isinstance(data, dict) else None
    for part, amounts in data.items() if isinstance(data, dict) else ():
        for device, amount in amounts.items() if isinstance(amounts, dict) else ():
            if device in WHOLE and not str(amount).isdecimal():
                path = (*resources, part, device)
                yield path, _whole(dotted(path), _kind_of(amount)), {"allowed": "a whole number"}


def _whole(name: str, given: str) -> str:
    return f"{name} must be a whole number, not {given}: devices come whole"


def _mismatch(name: str, node: Node, detail: ErrorDetails) -> tuple[str, dict[str, str]]:
    """Wording for a value of the wrong kind or out of bounds."""
    allowed, given = describe(node), detail["input"]
    more = {"allowed": allowed}
    if detail["type"] == "string_pattern_mismatch" and (rule := RULES.get(node.pattern)):
        return f"{name} must be {rule}, not {_kind_of(given)}", more | {"allowed": ""}
    if detail["type"] == "string_pattern_mismatch" and node.kind == "text":
        more["allowed"] = node.description or f"text like {node.pattern}"
        return f"{name} cannot be {shown(given)} ({more['allowed'].rstrip('.')})", more
    message = f"{name} must be {allowed}, not {_kind_of(given)}"
    if node.choices and isinstance(given, str):
        more["suggestion"] = nearest(given, [str(choice) for choice in node.choices])
    elif isinstance(given, str) and node.kind in ("integer", "number", "boolean"):
        unquoted = _or_none(given)
        if isinstance(unquoted, int | float) and isinstance(unquoted, bool) == (node.kind == "boolean"):
            more["suggestion"] = f"{given} without quotes"
    elif node.kind == "text" and isinstance(given, bool | int | float):
        more["suggestion"] = "the same in quotes"
    elif node.kind == "quantity" and isinstance(given, float):
        if "/" in name:  # as the names of all devices have it
            return _whole(name, f"{given:g}"), {"allowed": "a whole number"}
        more["suggestion"] = f'"{given}"'
    elif node.kind == "list" and node.items is not None and not isinstance(given, list | dict):
        more["suggestion"] = f"[{words}]" if node.items.kind == "text" and (words := separated(given)) else ""
    return message, more


def separated(given: Any) -> str:
    """The words of a command line each by itself, as they stand in a list in brackets; empty if it is none."""
    try:
        words = shlex.split(given) if isinstance(given, str) else [str(given)]
    except ValueError:  # a quote that is not closed
        return ""
    return ", ".join(_in_yaml(word) for word in words)


def _in_yaml(word: str) -> str:
    """A text as it can stand in a list in brackets."""
    is_plain = re.fullmatch(r"[\w./=+-]+", word) and isinstance(_or_none(word), str)
    return word if is_plain else json.dumps(word, ensure_ascii=False)


def placed(source: Source, overrides: Sequence[str], path: Path, message: str, suggestion: str = "") -> Problem:
    """A problem that was found after the manifest had been read, at its place."""
    if not path:
        return Problem(0, 0, source.file, "", message)
    set_by = {setting_of(setting)[0]: setting for setting in overrides}
    return _placed(source, set_by, path, message, False, {"suggestion": suggestion})


def _placed(
    source: Source, set_by: dict[Path, str], path: Path, message: str, at_key: bool, more: dict[str, str]
) -> Problem:
    """The problem at the setting that caused it, else at the nearest place of the file that is there."""
    for length in range(len(path), 0, -1):
        if setting := set_by.get(path[:length]):
            start = setting.index("=") + 1
            place = Place(1, start + 1, max(1, len(setting) - start), setting[start:])
            return Source(SETTING, [setting]).problem(place, path, message, **more)
    if at_key and path in source.keys:
        return source.problem(source.keys[path], path, message, **more)
    if path in source.values:
        return source.problem(source.values[path], path, message, **more)
    more.setdefault("given", "")
    for length in range(len(path) - 1, -1, -1):
        above = path[:length]
        if found := source.keys.get(above) or source.values.get(above):
            return source.problem(found, path, message, **more)
    return source.problem(Place(1, 1, 1), path, message, **more)


def _root() -> Node:
    return tree(DistributedTrainingJob)


def _real_path(location: Sequence[str | int], data: Any) -> tuple[Path, bool]:
    """A location of pydantic without the tags of unions, and whether it speaks of a map's key."""
    path: list[str | int] = []
    node: Node | None = _root()
    for part in location:
        if part == "[key]":
            return tuple(path), True
        node = node.child(part) if node else None
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if node is None and not inside:
            break
        path.append(part)
        data = data[part] if inside else None
    return tuple(path), False


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return f"{value}"
        case str():
            return f"the text {shown(value)}" if value else "empty text"
        case list():
            return "a list" if value else "an empty list"
        case dict():
            return "a group of fields"
        case None:
            return "nothing"
        case _:
            return shown(value)


def _or_none(text: str) -> Any:
    try:
        return parse_value(text)
    except ValueError:
        return None


def _first_sentence(text: str) -> str:
    return re.split(r"[.;:] ", text.rstrip("."), maxsplit=1)[0]
