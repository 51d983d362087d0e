"""Settings that change a manifest from the command line: `tandem run job.yaml --set trainer.config.epochs=3`.

A setting goes through the same tree of fields as the file, so a typo gets the same answer, and the changed manifest is
checked as a whole. Rejected: options of their own (`--epochs`): there would soon be one for each field.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

from tandem.errors import SETTING, ManifestError, Problem
from tandem.job import DistributedTrainingJob
from tandem.manifest.fields import Path, at, dotted, suggestion, tree
from tandem.manifest.source import parse_value


def apply_overrides(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of a manifest's data with settings such as `spec.trainer.config.epochs=3` applied, in their order.

    `spec.` may be left out. Values are YAML; where a field holds text they are taken as they stand. `null` takes a
    field out. Lists are counted from 0 as in `trainer.env[0].value=x`, and a dot inside a name is written `\\.`.

    Raises:
        ManifestError: a setting is not path=value, or names a field that does not exist.
    """
    result = copy.deepcopy(data)
    problems: list[Problem] = []
    for setting in settings:
        try:
            path, value = setting_of(setting)
            _put(result, path, value, setting)
        except ManifestError as error:
            problems += error.problems
    if problems:
        raise ManifestError(problems)
    return result


def setting_of(setting: str) -> tuple[Path, Any]:
    """Path and value of `path=value`."""
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise _wrong(setting, 0, "", f"{SETTING} takes path=value, for instance trainer.config.epochs=3")
    path = _path(setting, name.strip())
    node = at(tree(DistributedTrainingJob), path)
    if node is not None and node.kind == "text" and text != "null":
        return path, text
    if not text.strip():
        raise _wrong(setting, len(name), dotted(path), f"{name}= lacks a value; null takes the field out")
    try:
        return path, parse_value(text)
    except ValueError as error:
        raise _wrong(setting, len(name) + 1, dotted(path), f"the value of {name} is {error}") from None


def _path(setting: str, name: str) -> Path:
    """The path that a setting names, with `spec.` in front where it was left out."""
    words = re.split(r"(?<!\\)\.", re.sub(r"\[(\d+)\]", r".\1", name))
    parts: list[str | int] = [int(word) if word.isdecimal() else word.replace("\\.", ".") for word in words]
    root = tree(DistributedTrainingJob)
    if parts[0] not in root.fields:
        parts.insert(0, "spec")
    node = root
    for index, part in enumerate(parts):
        inner = node.child(part)
        if (inner is None and node.open) or (node.kind == "map" and node.items is None):
            return tuple(parts)
        if node.kind == "map" and node.items is not None and node.items.kind in ("text", "quantity") and not node.keys:
            return (*parts[:index], ".".join(str(rest) for rest in parts[index:]))
        if inner is None:
            parent = tuple(parts[:index])
            near = suggestion(root, parent, str(part))
            full = near if "." in near or not near else dotted((*parent, near, *parts[index + 1 :]))
            message = f"unknown field {part} in {dotted(parent)}"
            start = name.rfind(str(part)) if str(part) in name else 0
            raise _wrong(setting, start, dotted(tuple(parts)), message, full, len(str(part)))
        node = inner
    return tuple(parts)


def _put(data: dict[str, Any], path: Path, value: Any, setting: str) -> None:
    target: Any = data
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(part, int):
            if not isinstance(target, list) or part > len(target):
                count = len(target) if isinstance(target, list) else 0
                raise _wrong(setting, 0, dotted(path), f"{dotted(path[:index])} has {count} entries, so no [{part}]")
            if part == len(target):
                target.append(None)
        elif not isinstance(target, dict):
            raise _wrong(setting, 0, dotted(path), f"{dotted(path[:index])} is not a group of fields in the manifest")
        if last and value is None and isinstance(target, dict):
            target.pop(part, None)
            return
        if last:
            target[part] = value
            return
        inner = target[part] if isinstance(part, int) else target.get(part)
        if inner is None:
            inner = target[part] = [] if isinstance(path[index + 1], int) else {}
        target = inner


def _wrong(setting: str, start: int, field: str, message: str, near: str = "", width: int = 0) -> ManifestError:
    excerpt_width = width or max(1, len(setting) - start)
    return ManifestError(
        [Problem(1, start + 1, SETTING, field, message, suggestion=near, excerpt=setting, width=excerpt_width)]
    )
