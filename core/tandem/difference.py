"""In what two jobs differ, so far as one must not go on with what the other has trained."""

import json
from collections.abc import Iterator
from typing import Any

from tandem.job import DistributedTrainingJob, Spec
from tandem.secrecy import looks_secret

_VARIABLES = "spec.trainer.env."


def differences(there: DistributedTrainingJob, given: DistributedTrainingJob) -> list[str]:
    """What keeps a run from being gone on with: its name and what is trained. The rest of the spec may change."""
    found = []
    if there.metadata.name != given.metadata.name:
        found.append(f"metadata.name: there {there.metadata.name}, now {given.metadata.name}")
    return found + list(_compare("spec.trainer", _trained(there.spec), _trained(given.spec)))


def _trained(spec: Spec) -> dict[str, Any]:
    whole = spec.trainer.dump()
    whole.pop("image", None)
    # By name: what one of them is may have to stay hidden.
    whole["env"] = {one.name: one.dump() | {"name": None} for one in spec.trainer.env}
    if spec.trainer.task is not None:
        whole["config"] = spec.trainer.settings.dump()
    return whole


def _compare(path: str, there: Any, given: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(given, dict):
        for key in sorted({*there, *given}):
            yield from _compare(f"{path}.{key}", there.get(key), given.get(key))
    elif there != given:
        variable = path.removeprefix(_VARIABLES).partition(".")[0] if path.startswith(_VARIABLES) else ""
        if looks_secret(variable):
            yield f"{_VARIABLES}{variable}: another value"
        else:
            yield f"{path}: there {_shown(there)}, now {_shown(given)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
