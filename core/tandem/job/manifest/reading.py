"""Reads a manifest into a job, or into the list of all its errors.

`tandem validate` and `tandem run` read a file here. All mistakes are reported at once, each with its line, the value as
written, the allowed values, and a suggestion. It accepts exactly the manifests that the API server accepts: an empty
field (`config:`) counts as omitted, and names are camelCase only.

Pydantic validates, `tandem.job.manifest.source` has the positions, and this module writes the messages.

A setting of the command line is resolved in the same tree of fields as the file, so a typo gets the same message, and
the changed manifest is validated as a whole. Rejected: an option for each setting (`--epochs`): there would soon be one
for each field.

Pydantic's messages are written for programmers (`Input should be a valid integer`) and its locations contain the tags
of unions, so each error is looked up in the tree of fields and gets a new message.
"""

import copy
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tandem.errors import SETTING, ManifestError, Problem, UnmetRequirement, UserError
from tandem.job.causal_lm import PREFERENCES
from tandem.job.manifest.fields import (
    CONFIG,
    LOOP,
    PARAMETERS,
    Node,
    Path,
    closest_choice,
    describe,
    dotted,
    node_at,
    suggestion,
    tree,
    with_trainer,
)
from tandem.job.manifest.source import MAX_BYTES, Place, Source, parse, parse_value, short_json
from tandem.job.pod_template import GPU_RESOURCES
from tandem.job.resource import API_VERSION, KIND, DistributedTrainingJob
from tandem.job.sweep import SWEEP_KIND, Sweep
from tandem.job.tasks import BUILT_IN, TASKS, ImageParameters, parameters_type
from tandem.model import RULES, TASK, RuleBroken

ELSEWHERE = "; preference tuning is for the trainers of TRL, which run as a script of yours (docs/adapters.md)"


def apply_overrides(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of a manifest's data with settings such as `spec.trainer.loop.epochs=3` applied, in their order.

    `spec.` may be omitted. Values are YAML; where a field holds text they are taken literally. `null` removes a field.
    Lists are indexed from 0 as in `trainer.env[0].value=x`, and a dot inside a name is written `\\.`.

    Raises:
        ManifestError: a setting is not path=value, or names a field that does not exist.
    """
    result = copy.deepcopy(data)
    problems: list[Problem] = []
    for setting in settings:
        try:
            path, value = setting_of(setting)
            _put(result, _in_shape(path, result), value, setting)
        except ManifestError as error:
            problems += error.problems
    if problems:
        raise ManifestError(problems)
    return result


def setting_of(setting: str) -> tuple[Path, Any]:
    """Parse the path and the value of `path=value`."""
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise _setting_error(setting, 0, "", f"{SETTING} takes path=value, for instance trainer.loop.epochs=3")
    path = _path(setting, name.strip())
    node = node_at(tree(DistributedTrainingJob), path)
    if node is not None and node.kind == "text" and text != "null":
        return path, text
    if not text.strip():
        raise _setting_error(setting, len(name), dotted(path), f"{name}= lacks a value; null removes the field")
    try:
        return path, parse_value(text)
    except ValueError as error:
        raise _setting_error(setting, len(name) + 1, dotted(path), f"the value of {name} is {error}") from None


def node_of(name: str, data: dict[str, Any]) -> Node | None:
    """The field of a job that a setting names; None where the models do not describe it.

    Args:
        name: path, as in `path=value`.
        data: the job's manifest.

    Raises:
        ManifestError: there is no such field.
    """
    return node_at(_root(data), _in_shape(setting_of(f"{name}=0")[0], data))


def _in_shape(path: Path, data: Any) -> Path:
    """The place of a field of `loop` or `parameters` in a manifest that has `config` in place of both, and the other
    way round."""
    trainer = _trainer(data)
    if trainer.get("config") is not None:
        is_elsewhere = path[:3] in (LOOP, PARAMETERS) and len(path) > len(CONFIG)
        return (*CONFIG, *path[3:]) if is_elsewhere else path
    if path[:3] != CONFIG or len(path) == len(CONFIG) or trainer.get("task") != BUILT_IN:
        return path
    return (*(PARAMETERS if path[3] in ImageParameters.model_fields else LOOP), *path[3:])


def _trainer(data: Any) -> dict[str, Any]:
    """The trainer in a manifest; empty if it has none."""
    for part in ("spec", "trainer"):
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _path(setting: str, name: str) -> Path:
    """The path in a setting, with `spec.` in front where it was omitted."""
    segments = re.split(r"(?<!\\)\.", re.sub(r"\[(\d+)\]", r".\1", name))
    parts: list[str | int] = [
        int(segment) if segment.isdecimal() else segment.replace("\\.", ".") for segment in segments
    ]
    root = tree(DistributedTrainingJob)
    if parts[0] not in root.fields:
        parts.insert(0, "spec")
    node = root
    for index, part in enumerate(parts):
        inner = node.child(part)
        if (inner is None and node.open) or (node.kind == "map" and node.items is None):
            return tuple(parts)
        if node.kind == "map" and node.items is not None and node.items.kind in ("text", "quantity") and not node.keys:
            return (*parts[:index], ".".join(str(following) for following in parts[index:]))
        if inner is None:
            parent = tuple(parts[:index])
            match = suggestion(root, parent, str(part))
            full = match if "." in match or not match else dotted((*parent, match, *parts[index + 1 :]))
            message = f"unknown field {part} in {dotted(parent)}"
            start = name.rfind(str(part)) if str(part) in name else 0
            raise _setting_error(setting, start, dotted(tuple(parts)), message, full, len(str(part)))
        node = inner
    return tuple(parts)


def _put(data: dict[str, Any], path: Path, value: Any, setting: str) -> None:
    target: Any = data
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(part, int):
            if not isinstance(target, list) or part > len(target):
                count = len(target) if isinstance(target, list) else 0
                raise _setting_error(
                    setting, 0, dotted(path), f"{dotted(path[:index])} has {count} entries, so no [{part}]"
                )
            if part == len(target):
                target.append(None)
        elif not isinstance(target, dict):
            raise _setting_error(
                setting, 0, dotted(path), f"{dotted(path[:index])} is not a group of fields in the manifest"
            )
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


def _setting_error(
    setting: str, start: int, field: str, message: str, suggestion: str = "", width: int = 0
) -> ManifestError:
    excerpt_width = width or max(1, len(setting) - start)
    return ManifestError(
        [Problem(1, start + 1, SETTING, field, message, suggestion=suggestion, excerpt=setting, width=excerpt_width)]
    )


def problems(
    details: Sequence[ErrorDetails], source: Source, data: dict[str, Any], overrides: Sequence[str]
) -> list[Problem]:
    """The problems of pydantic's errors, in the order of the lines. `data` is the validated data: the source with the
    overrides applied."""
    set_by = {_in_shape(setting_of(setting)[0], data): setting for setting in overrides}
    unique: dict[tuple[str, str], Problem] = {}
    meant = {_intended_field(detail["loc"], data) for detail in details if detail["type"] == "extra_forbidden"}
    for detail in details:
        if detail["type"] == "missing" and detail["loc"] in meant:
            continue
        for path, message, more in _messages(detail, data):
            problem = _located(source, set_by, path, message, message.startswith("unknown field"), more)
            unique.setdefault((problem.field, problem.message), problem)
    return sorted(unique.values())


def _intended_field(unknown: Path, data: dict[str, Any]) -> Path:
    """The field of the same group that an unknown one was probably meant to be: it is misspelled, and not missing as
    well."""
    return (*unknown[:-1], suggestion(_root(data), unknown[:-1], str(unknown[-1])))


def _messages(detail: ErrorDetails, data: dict[str, Any]) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Path, message, and further texts of one error; several for a model that breaks several rules."""
    path, is_key = _field_path(detail["loc"], data)
    root = _root(data)
    node = node_at(root, path)
    name = dotted(path)
    match detail["type"]:
        case "missing":
            allowed = describe(node) if node else ""
            meaning = f" ({_first_sentence(node.description)})" if node and node.description else ""
            yield path, f"{name} is missing{meaning}", {"given": "", "allowed": allowed}
        case "extra_forbidden":
            parent = node_at(root, path[:-1])
            closest = suggestion(root, path[:-1], str(path[-1]))
            location = f" in {dotted(path[:-1])}" if path[:-1] else ""
            siblings = ", ".join(parent.fields) if parent else ""
            preferences = path[:-1] == PARAMETERS and str(path[-1]).lower() in PREFERENCES
            yield (
                path,
                f"unknown field {path[-1]}{location}" + (ELSEWHERE if preferences else ""),
                {"given": str(path[-1]), "allowed": siblings, "suggestion": closest},
            )
        case "value_error" if isinstance(broken := detail.get("ctx", {}).get("error"), RuleBroken):
            for rule in broken.broken:
                inner = (*path, *filter(None, rule.field.split(".")))
                parts = list(_parts_of_devices(inner, data))
                yield from parts or [(inner, f"{name}: {rule.message}", {})]
        case "value_error" if isinstance(error := detail.get("ctx", {}).get("error"), ValueError):
            yield path, f"{name}: {error}", {}
        case _ if is_key:
            parent = node_at(root, path[:-1])
            keys = parent.keys if parent else ()
            closest = closest_choice(str(path[-1]), keys)
            message = f"unknown field {path[-1]} in {dotted(path[:-1])}"
            yield path, message, {"given": str(path[-1]), "allowed": ", ".join(keys), "suggestion": closest}
        case _ if node is None:
            yield path, f"{name}: {detail['msg']}", {}
        case _:
            yield path, *_mismatch(name, node, detail)


def _parts_of_devices(resources: Path, data: Any) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Quantities of GPUs that are no whole numbers, among the resources at a path."""
    for step in resources:
        data = data.get(step) if isinstance(data, dict) else None
    for part, amounts in data.items() if isinstance(data, dict) else ():
        for device, amount in amounts.items() if isinstance(amounts, dict) else ():
            if device in GPU_RESOURCES and not str(amount).isdecimal():
                path = (*resources, part, device)
                yield path, _whole_device_error(dotted(path), _kind_of(amount)), {"allowed": "a whole number"}


def _whole_device_error(name: str, value: str) -> str:
    return f"{name} must be a whole number, not {value}: devices come whole"


def _mismatch(name: str, node: Node, detail: ErrorDetails) -> tuple[str, dict[str, str]]:
    """The message for a value of the wrong kind or out of bounds."""
    allowed, value = describe(node), detail["input"]
    more = {"allowed": allowed}
    if detail["type"] == "string_pattern_mismatch" and (rule := RULES.get(node.pattern)):
        match = closest_choice(str(value), TASKS) if node.pattern == TASK else ""
        return f"{name} must be {rule}, not {_kind_of(value)}", more | {"allowed": "", "suggestion": match}
    if detail["type"] == "string_pattern_mismatch" and node.kind == "text":
        more["allowed"] = node.description or f"text like {node.pattern}"
        return f"{name} cannot be {short_json(value)} ({more['allowed'].rstrip('.')})", more
    message = f"{name} must be {allowed}, not {_kind_of(value)}"
    if node.choices and isinstance(value, str):
        more["suggestion"] = closest_choice(value, [str(choice) for choice in node.choices])
    elif isinstance(value, str) and node.kind in ("integer", "number", "boolean"):
        unquoted = _or_none(value)
        if isinstance(unquoted, int | float) and isinstance(unquoted, bool) == (node.kind == "boolean"):
            more["suggestion"] = f"{value} without quotes"
    elif node.kind == "text" and isinstance(value, bool | int | float):
        more["suggestion"] = "the same in quotes"
    elif node.kind == "quantity" and isinstance(value, float):
        if "/" in name:  # as the names of all devices have it
            return _whole_device_error(name, f"{value:g}"), {"allowed": "a whole number"}
        more["suggestion"] = f'"{value}"'
    elif node.kind == "list" and node.items is not None and not isinstance(value, list | dict):
        more["suggestion"] = f"[{items}]" if node.items.kind == "text" and (items := split_as_yaml(value)) else ""
    return message, more


def split_as_yaml(value: Any) -> str:
    """The arguments of a command line as items of a YAML list in brackets; empty if it cannot be split."""
    try:
        args = shlex.split(value) if isinstance(value, str) else [str(value)]
    except ValueError:  # a quote that is not closed
        return ""
    return ", ".join(in_yaml(arg) for arg in args)


def in_yaml(word: str) -> str:
    """A text as YAML, as an item of a list in brackets, or as the value of a field."""
    if re.fullmatch(r"[\w./=+-]+", word) and isinstance(_or_none(word), str):
        return word
    quoted = json.dumps(word, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)


def located(source: Source, overrides: Sequence[str], path: Path, message: str, suggestion: str = "") -> Problem:
    """The problem at a field, found after the manifest was read."""
    if not path:
        return Problem(0, 0, source.file, "", message)
    set_by = {_in_shape(setting_of(setting)[0], source.data): setting for setting in overrides}
    return _located(source, set_by, _in_shape(path, source.data), message, False, {"suggestion": suggestion})


def _located(
    source: Source, set_by: dict[Path, str], path: Path, message: str, at_key: bool, more: dict[str, str]
) -> Problem:
    """The problem at the setting that caused it, or else at the nearest position in the file."""
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
        parent = path[:length]
        if position := source.keys.get(parent) or source.values.get(parent):
            return source.problem(position, path, message, **more)
    return source.problem(Place(1, 1, 1), path, message, **more)


def _root(data: Any) -> Node:
    """The tree of a manifest's fields; of a job with a built-in task, with those of its parameters."""
    if isinstance(data, dict) and closest_choice(str(data.get("kind")), [SWEEP_KIND]):
        return tree(Sweep)
    root, trainer = tree(DistributedTrainingJob), _trainer(data)
    kind = parameters_type(trainer.get("task"), trainer.get("parameters"))
    return root if kind is None else with_trainer(root, parameters=replace(tree(kind), required=False))


def _field_path(location: Sequence[str | int], data: Any) -> tuple[Path, bool]:
    """A location of pydantic without the tags of unions, and whether it is a map's key."""
    path: list[str | int] = []
    node: Node | None = _root(data)
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
            return f"the text {short_json(value)}" if value else "empty text"
        case list():
            return "a list" if value else "an empty list"
        case dict():
            return "a group of fields"
        case None:
            return "nothing"
        case _:
            return short_json(value)


def _or_none(text: str) -> Any:
    try:
        return parse_value(text)
    except ValueError:
        return None


def _first_sentence(text: str) -> str:
    return re.split(r"[.;:] ", text.rstrip("."), maxsplit=1)[0]


__all__ = ["STDIN", "apply_overrides", "node_of", "parse_job", "parse_sweep", "read_job", "read_source"]

STDIN = "-"
"""File name that denotes standard input."""
MAX_NAMES = 1_000
"""Maximum number of names in a folder that are compared with a misspelled one."""


def read_job(file: FilePath | str, overrides: Sequence[str] = ()) -> DistributedTrainingJob:
    """Read the job of a manifest file (`-`: standard input), with `path=value` overrides applied.

    Raises:
        UserError: the file cannot be read, or the manifest has mistakes (a ManifestError then, with all of them).
    """
    return parse_job(read_source(file), overrides)


def read_source(file: FilePath | str) -> Source:
    """Read the one YAML document of a file, without validating it.

    Raises:
        UserError: the file cannot be read, or is not one YAML document.
    """
    return parse(_content(file), "<stdin>" if str(file) == STDIN else str(file))


def parse_job(source: Source, overrides: Sequence[str] = ()) -> DistributedTrainingJob:
    """Validate a document that was read already.

    Raises:
        ManifestError: with every mistake, in the order of the lines.
    """
    _expect(source, KIND)
    data = apply_overrides(source.data, overrides)
    _drop_nulls(data, tree(DistributedTrainingJob))
    details = _parameter_errors(data)
    try:
        job = DistributedTrainingJob.parse(data)
        if not details:
            return job
    except ValidationError as error:
        details += error.errors(include_url=False)
    # Pydantic does not check the rules of a model with unknown fields: validate again without those fields.
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    known_data = copy.deepcopy(data)
    for path in unknown:
        _remove(known_data, path)
    try:
        details += _parameter_errors(known_data)
        DistributedTrainingJob.parse(known_data)
    except ValidationError as error:
        reported = {(detail["type"], detail["loc"]) for detail in details}
        details += [d for d in error.errors(include_url=False) if (d["type"], d["loc"]) not in reported]
    raise ManifestError(problems(details, source, data, overrides))


def parse_sweep(source: Source) -> Sweep:
    """Validate the file of a sweep.

    Raises:
        ManifestError: with every mistake, in the order of the lines.
    """
    _expect(source, SWEEP_KIND)
    data = copy.deepcopy(source.data)
    _drop_nulls(data, tree(Sweep))
    try:
        return Sweep.parse(data)
    except ValidationError as error:
        raise ManifestError(problems(error.errors(include_url=False), source, data, ())) from None


def _parameter_errors(data: dict[str, Any]) -> list[ErrorDetails]:
    """Errors in the parameters of a built-in task, which are an untyped object to the API server."""
    trainer = _trainer(data)
    parameters = trainer.get("parameters")
    kind = parameters_type(trainer.get("task"), parameters)
    if kind is None or not isinstance(parameters, dict):
        return []
    try:
        kind.parse(parameters)
    except ValidationError as error:
        return [{**detail, "loc": (*PARAMETERS, *detail["loc"])} for detail in error.errors(include_url=False)]
    return []


def raise_for_unmet(requirements: Iterable[UnmetRequirement], source: Source, overrides: Sequence[str] = ()) -> None:
    """Raise an error if a job cannot run.

    Raises:
        ManifestError: with every requirement that keeps it from running, each at its position in the document.
    """
    failing = [unmet for unmet in requirements if unmet.fails]
    if errors := [located(source, overrides, unmet.field, unmet.message, unmet.suggestion) for unmet in failing]:
        raise ManifestError(sorted(errors))


def _content(file: FilePath | str) -> bytes:
    if str(file) == STDIN:
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    path = FilePath(file)
    try:
        if path.is_dir():
            raise UserError(f"{file} is a folder; name a manifest file in it")
        with path.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        match = similar_file(path)
        raise UserError(f"{file} does not exist" + (f"; did you mean {match}?" if match else "")) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def similar_file(path: FilePath) -> str:
    """The path of the file that a missing one was probably meant to be; empty if none is close."""
    try:
        names = [entry.name for entry in itertools.islice(path.parent.iterdir(), MAX_NAMES)]
    except OSError:
        return ""
    name = closest_choice(path.name, names)
    return str(path.with_name(name)) if name else ""


def _expect(source: Source, expected: str) -> None:
    """Check that a document is a group of fields, and of a kind: further messages would only bury this mistake.

    Raises:
        ManifestError: it is not.
    """
    if not isinstance(source.data, dict):
        place = source.values[()]
        form = "a list" if isinstance(source.data, list) else "a single value"
        message = f"a manifest is a group of fields that begins with apiVersion: {API_VERSION}, not {form}"
        raise ManifestError([source.problem(place, (), message, given="")])
    kind = source.data.get("kind")
    if not isinstance(kind, str) or kind == expected or closest_choice(kind, [expected]):
        return
    message = f"this is a {kind}, not a {expected} of {API_VERSION}"
    place = source.values[("kind",)]
    raise ManifestError([source.problem(place, ("kind",), message, allowed=expected)])


def _drop_nulls(value: Any, node: Node | None) -> None:
    """Remove the fields that are null, as the API server does; the content of templates is not changed."""
    if node is None:
        return
    if isinstance(value, dict):
        for name in list(value):
            child = node.child(name)
            if value[name] is None and child is not None:
                del value[name]
            else:
                _drop_nulls(value[name], child)
    elif isinstance(value, list):
        for item in value:
            _drop_nulls(item, node.items)


def _remove(data: Any, path: Path) -> None:
    for part in path[:-1]:
        data = data[part]
    del data[path[-1]]
