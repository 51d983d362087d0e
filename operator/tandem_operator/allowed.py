"""What pod templates of jobs may set, where a platform team has said so: an allow-list of fields. Pure.

An entry is the path of a field, with all that is below it, such as `spec.nodeSelector` or `spec.containers.env`; lists
are passed through. With `=` only that value: `spec.serviceAccountName=training`. The names of containers and volumes,
by which a template is laid over ours, are always allowed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.job import DistributedTrainingJob

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
