"""A user's pod template laid over the operator's.

Objects are merged field by field. Of a list whose entries have a name (containers, volumes, env, …) those of the same
name are merged and new ones added; volume mounts go by their path, ports by their number, topology keys by theirs.
Tolerations and image pull secrets are added. Any other list replaces ours, and so does any single value. A null says
nothing, as a field that is left out.
"""

from collections.abc import Mapping
from typing import Any

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
