"""Pod templates of users: laid over the operator's, and, where a platform team has said so, held to a list. Pure.

Objects are merged field by field. Of a list whose entries have a name (containers, volumes, env, …) those of the same
name are merged and new ones added; volume mounts go by their path, ports by their number, topology keys by theirs.
Tolerations and image pull secrets are added. Any other list replaces ours, and so does any single value. A null says
nothing, as a field that is left out.

An entry of the allow-list is the path of a field, with all that is below it, such as `spec.nodeSelector` or
`spec.containers.env`; lists are passed through. With `=` only that value: `spec.serviceAccountName=training`. The names
of containers and volumes, by which a template is laid over ours, are always allowed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.job import DistributedTrainingJob

KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "topologySpreadConstraints": "topologyKey"}
ADDED = {"tolerations"}


def overlay(ours: Any, theirs: Any, field: str = "") -> Any:
    """`theirs` laid over `ours`."""
    if theirs is None:
        return ours
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged = {key: overlay(ours[key], theirs[key], key) for key in ours if key in theirs}
        return {**ours, **{key: value for key, value in theirs.items() if value is not None}, **merged}
    if isinstance(ours, list) and isinstance(theirs, list):
        return _lists(ours, theirs, field)
    return theirs


def _lists(ours: list[Any], theirs: list[Any], field: str) -> list[Any]:
    if field in ADDED:
        return [*ours, *(one for one in theirs if one not in ours)]
    key = KEYS.get(field, "name")
    if not all(isinstance(one, Mapping) and isinstance(one.get(key), str | int) for one in [*ours, *theirs]):
        return theirs
    news = {one[key]: one for one in theirs}
    kept = [overlay(one, news.pop(one[key])) if one[key] in news else one for one in ours]
    return [*kept, *news.values()]


REASON = "TemplateRefused"
NAMES = {"spec.containers.name", "spec.initContainers.name", "spec.volumes.name"}


def complaint(job: DistributedTrainingJob, allowed: Sequence[str]) -> str | None:
    """What the first template sets that it may not, in a sentence.

    Args:
        allowed: entries as above; none: everything is allowed.
    """
    if not allowed:
        return None
    spec = job.spec
    templates = {
        "workers": spec.workers.template,
        "evaluators": spec.evaluation.template,
        "coordinator": spec.coordinator.template,
    }
    for part, template in templates.items():
        for path, value in _leaves(template, ""):
            if path not in NAMES and not any(_covers(entry, path, value) for entry in allowed):
                fields = ", ".join(allowed)
                return f"{part}.template sets {path}, and this operator lets templates set only {fields}"
    return None


def _covers(entry: str, path: str, value: Any) -> bool:
    field, is_bound, only = entry.partition("=")
    if is_bound:
        return path == field and value == only
    return path == field or path.startswith(f"{field}.")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The path and the value of everything that is set; an empty object or list is a value, too."""
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield path, value
