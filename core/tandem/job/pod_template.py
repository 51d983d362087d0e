"""Pod templates of a job: resource quantities, GPUs among them, and templates that are merged over the operator's pods.

Only the rough form of a template is validated here, and that it does not set the labels by which pods are selected and
queued. The API server validates the rest.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tandem.model import JsonLimits, exceeded_limit

GROUP = "tandem.dev"

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""Resource names of the device plugins of NVIDIA, AMD and Intel."""
_GPU = re.compile(rf"{'|'.join(map(re.escape, GPU_RESOURCES))}|nvidia\.com/(gpu\.shared|mig-.+)")

ResourceMap = Mapping[Any, Mapping[str, Any]]
"""Quantities by `limits` and `requests`, and by the name of the resource."""


def is_gpu(resource: str, own: str | None = None) -> bool:
    """Whether a resource is a GPU, or a share of one that looks like a whole one.

    Args:
        own: the name of a further GPU resource.
    """
    return resource == own or _GPU.fullmatch(resource) is not None


def gpus(resources: ResourceMap, own: str | None = None) -> dict[str, int]:
    """The number of requested GPUs by resource name. A quantity that is no whole number does not count."""
    amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {
        name: int(amount)
        for name, amount in amounts.items()
        if is_gpu(name, own) and str(amount).isdecimal() and len(str(amount)) < 10
    }


def cpus(resources: ResourceMap) -> float | None:
    """The number of requested CPUs, or the limit where none are requested; None if there is no valid quantity."""
    amount = str(resources.get("requests", {}).get("cpu", resources.get("limits", {}).get("cpu", "")))
    number, milli = amount.removesuffix("m"), amount.endswith("m")
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", number):
        return None
    return float(number) / 1000 if milli else float(number)


def container_resources(template: Mapping[str, Any], container: str) -> dict[str, dict[str, Any]]:
    """The resources of one container of a pod template, whatever else the template contains."""
    resources: dict[str, dict[str, Any]] = {}
    for name, amounts in resources_by_container(template):
        if name == container:
            resources |= amounts
    return resources


def overridden_resources(
    resources: ResourceMap, template: Mapping[str, Any], container: str
) -> dict[str, dict[str, Any]]:
    """Requests and limits of one container, overridden by those of a pod template."""
    in_template = container_resources(template, container)
    return {part: {**resources.get(part, {}), **in_template.get(part, {})} for part in ("limits", "requests")}


def resources_by_container(template: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, dict[str, Any]]]]:
    """The name and the resources of each container of a pod template."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for container in containers if isinstance(containers, list) else []:
        if isinstance(container, dict):
            yield container.get("name"), dict(_requests_and_limits(container.get("resources")))


def gpus_in_cel(job: str) -> str:
    """CEL expression: the number of GPUs in each replica, as far as the API server can evaluate it."""

    def amount(resource: str) -> str:
        place = f"{job}.resources.{{}}['{resource}']"
        parts = [
            f"has({job}.resources.{part}) && '{resource}' in {job}.resources.{part} ? int(string({place.format(part)}))"
            for part in ("requests", "limits")
        ]
        return f"({' : '.join(parts)} : 0)"

    return " + ".join([*map(amount, GPU_RESOURCES), _own_gpus_in_cel(job)])


def processes_in_cel(job: str) -> str:
    """CEL expression: the number of ranks in each replica, as far as the API server can evaluate it."""
    return (
        f"(has({job}.processesPerReplica) ? {job}.processesPerReplica"
        f" : has({job}.resources) ? [1, {gpus_in_cel(job)}].max() : 1)"
    )


def _own_gpus_in_cel(job: str) -> str:
    """CEL expression: the quantity of `gpuResource`, which no other rule requires to be a whole number."""
    own = f"{job}.gpuResource"
    parts = [
        f"has({job}.resources.{part}) && {own} in {job}.resources.{part}"
        f" && string({job}.resources.{part}[{own}]).matches('^[0-9]{{1,9}}$')"
        f" ? int(string({job}.resources.{part}[{own}]))"
        for part in ("requests", "limits")
    ]
    known_resources = ", ".join(f"'{resource}'" for resource in GPU_RESOURCES)
    return f"(has({own}) && !({own} in [{known_resources}]) ? ({' : '.join(parts)} : 0) : 0)"


def _requests_and_limits(resources: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in ("limits", "requests"):
        if isinstance(resources, dict) and isinstance(amounts := resources.get(part), dict):
            yield part, amounts


QUANTITY = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"

Quantity = Annotated[str, Field(pattern=QUANTITY, max_length=64)] | Annotated[int, Field(ge=0)]
"""A Kubernetes resource quantity: `2`, `500m`, `16Gi`."""
Resources = dict[Literal["limits", "requests"], dict[str, Quantity]]
KUEUE = "kueue.x-k8s.io/"
KUEUE_OPEN = (f"{KUEUE}priority-class", f"{KUEUE}podset-")
"""Prefixes of Kueue's labels and annotations that anybody may set: the priority and topology of pods."""
_QUEUE_HINT = "a queue is chosen with runPolicy.queueName"
MAX_TEMPLATE = JsonLimits(depth=32, values=10_000, characters=2**18)
"""The largest pod templates in use have some hundred entries, ten levels deep."""


_RESOURCES: dict[str, Any] = {"limits": {}, "requests": {}}
_NODES: dict[str, Any] = {"nodeSelectorTerms": [{"matchFields": []}]}
_FORM: dict[str, Any] = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        "containers": [{"resources": _RESOURCES}],
        "nodeSelector": {},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _NODES}},
        "tolerations": [],
        "volumes": [],
    },
}
"""The parts of a pod template that are read here, besides by the API server: groups of fields and lists."""


def _validated(template: dict[str, Any]) -> dict[str, Any]:
    """Validate the rough form of a pod template; the API server validates the rest."""
    if limit := exceeded_limit(template, MAX_TEMPLATE):
        raise ValueError(f"a pod template {limit}")
    if error := next(_shape_errors(template, _FORM, ""), None):
        raise ValueError(error)
    if reserved := next(filter(_is_reserved, _reserved_fields(template)), None):
        raise ValueError(
            f"a pod template must not set {reserved}, by which pods are selected and queued; {_QUEUE_HINT}"
        )
    return template


def _shape_errors(value: Any, form: Any, path: str) -> Iterator[str]:
    """Values that should be a group of fields, or a list, and are not, in sentences. A null is valid."""
    if value is None:
        return
    if not isinstance(value, type(form)):
        yield f"{path} of a pod template must be a {'list' if isinstance(form, list) else 'group of fields'}"
    elif isinstance(form, dict):
        for name, inner in form.items():
            yield from _shape_errors(value.get(name), inner, f"{path}.{name}" if path else name)
    else:
        for inner in form:
            for number, item in enumerate(value):
                yield from _shape_errors(item, inner, f"{path}[{number}]")


def _reserved_fields(template: dict[str, Any]) -> Iterator[str]:
    """The names of labels, annotations and scheduling gates that a pod template sets."""
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for part in ("labels", "annotations"):
        yield from (str(key) for key in metadata.get(part) or {})
    gates = spec.get("schedulingGates")
    for gate in gates if isinstance(gates, list) else []:
        yield str(gate.get("name")) if isinstance(gate, dict) else ""


def _is_reserved(name: str) -> bool:
    """Whether pods are selected or queued by this name: the operator's own names, and those of Kueue that assign a pod
    to a queue and a group. With another value than the operator's, its pods would never match what it created."""
    return name.startswith(f"{GROUP}/") or (name.startswith(KUEUE) and not name.startswith(KUEUE_OPEN))


POD_FIELDS = (
    "activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks "
    "ephemeralContainers evictionResponders hostAliases hostIPC hostNetwork hostPID hostUsers hostname "
    "hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead preemptionPolicy priority "
    "priorityClassName readinessGates resourceClaims resources restartPolicy runtimeClassName schedulerName "
    "schedulingGates schedulingGroup securityContext serviceAccount serviceAccountName setHostnameAsFQDN "
    "shareProcessNamespace subdomain terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes"
)
CONTAINER_FIELDS = (
    "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy "
    "resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath "
    "terminationMessagePolicy tty volumeDevices volumeMounts workingDir"
)
"""Fields of pods and of containers in the newest Kubernetes version, separated by spaces."""
_ROLES = ("containers", "initContainers")


def template_warnings(template: Mapping[str, Any], role: str) -> Iterator[tuple[str, str]]:
    """Fields of a template that have no effect or that the API server will refuse, each with its path and the reason.

    Args:
        role: the name of the operator's own container.
    """
    spec = template.get("spec") or {}
    yield from _unknown_fields(template, "metadata spec", "", "pod templates")
    yield from _unknown_fields(spec, POD_FIELDS, "spec.", "pods")
    if "restartPolicy" in spec:
        yield "spec.restartPolicy", "the operator sets it, and this one has no effect"
    for part in _ROLES:
        containers = spec.get(part)
        for number, container in enumerate(containers if isinstance(containers, list) else []):
            if not isinstance(container, dict):
                continue
            path = f"spec.{part}[{number}]"
            yield from _unknown_fields(container, CONTAINER_FIELDS, f"{path}.", "containers")
            if not container.get("image") and (part, container.get("name")) != ("containers", role):
                yield (
                    path,
                    f"the container {container.get('name')} has no image; the one that Tandem runs is called {role}",
                )


def _unknown_fields(value: Mapping[str, Any], fields: str, path: str, kind: str) -> Iterator[tuple[str, str]]:
    names = fields.split()
    for name in value:
        if name not in names:
            matches = get_close_matches(str(name), names, n=1)
            yield f"{path}{name}", f"{kind} have no such field" + (f"; did you mean {matches[0]}?" if matches else "")


Template = Annotated[dict[str, Any], AfterValidator(_validated)]


def is_whole_number(amount: str | int) -> bool:
    return str(amount).isdecimal()
