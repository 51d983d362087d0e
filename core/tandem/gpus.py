"""Which of the resources that a pod asks for are GPUs, and how many those are."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

WHOLE = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""What the device plugins of NVIDIA, AMD and Intel give out."""
_GPU = re.compile(rf"{'|'.join(map(re.escape, WHOLE))}|nvidia\.com/(gpu\.shared|mig-.+)")

Asked = Mapping[Any, Mapping[str, Any]]
"""Amounts by `limits` and `requests`, and by the name of the resource."""


def is_gpu(resource: str, own: str | None = None) -> bool:
    """Whether a resource is a GPU, or a part of one that looks like a whole one.

    Args:
        own: the name of another resource that is one, too.
    """
    return resource == own or _GPU.fullmatch(resource) is not None


def gpus(asked: Asked, own: str | None = None) -> dict[str, int]:
    """How many of each are asked for. An amount that is no whole number is none."""
    amounts = {**asked.get("limits", {}), **asked.get("requests", {})}
    return {
        name: int(amount)
        for name, amount in amounts.items()
        if is_gpu(name, own) and str(amount).isdecimal() and len(str(amount)) < 10
    }


def asked_in(template: Mapping[str, Any], container: str) -> dict[str, dict[str, Any]]:
    """What a container of a pod template asks for, whatever else the template holds."""
    found: dict[str, dict[str, Any]] = {}
    for name, amounts in asked_by_all(template):
        if name == container:
            found |= amounts
    return found


def asked_by_all(template: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, dict[str, Any]]]]:
    """The name of each container of a pod template, and what it asks for."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for one in containers if isinstance(containers, list) else []:
        if isinstance(one, dict):
            yield one.get("name"), dict(_parts(one.get("resources")))


def processes_in_cel(job: str) -> str:
    """The number of ranks in each replica, as far as the API server can see."""

    def amount(resource: str) -> str:
        place = f"{job}.resources.{{}}['{resource}']"
        parts = [
            f"has({job}.resources.{part}) && '{resource}' in {job}.resources.{part} ? int(string({place.format(part)}))"
            for part in ("requests", "limits")
        ]
        return f"({' : '.join(parts)} : 0)"

    asked = " + ".join([*map(amount, WHOLE), _own_in_cel(job)])
    return (
        f"(has({job}.processesPerReplica) ? {job}.processesPerReplica : has({job}.resources) ? [1, {asked}].max() : 1)"
    )


def _own_in_cel(job: str) -> str:
    """The amount of `gpuResource`, of which nobody else checks that it is a whole number."""
    own = f"{job}.gpuResource"
    parts = [
        f"has({job}.resources.{part}) && {own} in {job}.resources.{part}"
        f" && string({job}.resources.{part}[{own}]).matches('^[0-9]{{1,9}}$')"
        f" ? int(string({job}.resources.{part}[{own}]))"
        for part in ("requests", "limits")
    ]
    counted = ", ".join(f"'{resource}'" for resource in WHOLE)
    return f"(has({own}) && !({own} in [{counted}]) ? ({' : '.join(parts)} : 0) : 0)"


def _parts(resources: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in ("limits", "requests"):
        if isinstance(resources, dict) and isinstance(amounts := resources.get(part), dict):
            yield part, amounts
