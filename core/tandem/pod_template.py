"""What the job says of pods: amounts of resources, GPUs among them, and templates that are laid over the pods.

Of a template only the rough form is checked here, and that it leaves alone what pods are found and queued by. The API
server looks at the rest.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tandem.model import Extent, excess

GROUP = "tandem.dev"

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


def cpus(asked: Asked) -> float | None:
    """How many are asked for, or allowed where none are asked for; None where nothing is said, or no amount."""
    amount = str(asked.get("requests", {}).get("cpu", asked.get("limits", {}).get("cpu", "")))
    number, milli = amount.removesuffix("m"), amount.endswith("m")
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", number):
        return None
    return float(number) / 1000 if milli else float(number)


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


def gpus_in_cel(job: str) -> str:
    """The number of GPUs in each replica that has `resources`, as far as the API server can see."""

    def amount(resource: str) -> str:
        place = f"{job}.resources.{{}}['{resource}']"
        parts = [
            f"has({job}.resources.{part}) && '{resource}' in {job}.resources.{part} ? int(string({place.format(part)}))"
            for part in ("requests", "limits")
        ]
        return f"({' : '.join(parts)} : 0)"

    return " + ".join([*map(amount, WHOLE), _own_in_cel(job)])


def processes_in_cel(job: str) -> str:
    """The number of ranks in each replica, as far as the API server can see."""
    return (
        f"(has({job}.processesPerReplica) ? {job}.processesPerReplica"
        f" : has({job}.resources) ? [1, {gpus_in_cel(job)}].max() : 1)"
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


QUANTITY = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"

Quantity = Annotated[str, Field(pattern=QUANTITY, max_length=64)] | Annotated[int, Field(ge=0)]
"""An amount as Kubernetes writes it: `2`, `500m`, `16Gi`."""
Resources = dict[Literal["limits", "requests"], dict[str, Quantity]]
KUEUE = "kueue.x-k8s.io/"
KUEUE_OPEN = (f"{KUEUE}priority-class", f"{KUEUE}podset-")
"""How Kueue's labels and annotations begin that anybody may set: how urgent pods are, and how near each other."""
_INSTEAD = "a queue is chosen with runPolicy.queueName"
MAX_TEMPLATE = Extent(depth=32, values=10_000, characters=2**18)
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
"""Of a pod template, what is read here and not by the API server alone: groups of fields and lists."""


def _sound(template: dict[str, Any]) -> dict[str, Any]:
    """A pod template as it is, if it has the rough form of one; the API server looks at the rest."""
    if why := excess(template, MAX_TEMPLATE):
        raise ValueError(f"a pod template {why}")
    if wrong := next(_misshapen(template, _FORM, ""), None):
        raise ValueError(wrong)
    if taken := next(filter(_is_reserved, _claimed(template)), None):
        raise ValueError(f"a pod template must not set {taken}, by which pods are found and queued; {_INSTEAD}")
    return template


def _misshapen(value: Any, form: Any, path: str) -> Iterator[str]:
    """What is no group of fields, or no list, where it should be one, in sentences. A null says nothing."""
    if value is None:
        return
    if not isinstance(value, type(form)):
        yield f"{path} of a pod template must be a {'list' if isinstance(form, list) else 'group of fields'}"
    elif isinstance(form, dict):
        for name, inner in form.items():
            yield from _misshapen(value.get(name), inner, f"{path}.{name}" if path else name)
    else:
        for inner in form:
            for number, one in enumerate(value):
                yield from _misshapen(one, inner, f"{path}[{number}]")


def _claimed(template: dict[str, Any]) -> Iterator[str]:
    """The names of labels, annotations and scheduling gates that a pod template sets."""
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for part in ("labels", "annotations"):
        yield from (str(key) for key in metadata.get(part) or {})
    gates = spec.get("schedulingGates")
    for gate in gates if isinstance(gates, list) else []:
        yield str(gate.get("name")) if isinstance(gate, dict) else ""


def _is_reserved(name: str) -> bool:
    """Whether pods are found by it, told apart or queued: the operator's own names, and those of Kueue's that say to
    which queue and group a pod belongs. With another value than the operator's, its pods would never be what it asked
    for."""
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
"""Fields of pods and of containers, of the newest Kubernetes there is, with spaces between them."""
_ROLES = ("containers", "initContainers")


def doubts(template: Mapping[str, Any], role: str) -> Iterator[tuple[str, str]]:
    """What a template says that has no effect or that the API server will refuse: where, and why.

    Args:
        role: the name of the container that is the operator's own.
    """
    spec = template.get("spec") or {}
    yield from _unknown(template, "metadata spec", "", "pod templates")
    yield from _unknown(spec, POD_FIELDS, "spec.", "pods")
    if "restartPolicy" in spec:
        yield "spec.restartPolicy", "it is the operator's, and this one has no effect"
    for part in _ROLES:
        given = spec.get(part)
        for number, one in enumerate(given if isinstance(given, list) else []):
            if not isinstance(one, dict):
                continue
            where = f"spec.{part}[{number}]"
            yield from _unknown(one, CONTAINER_FIELDS, f"{where}.", "containers")
            if not one.get("image") and (part, one.get("name")) != ("containers", role):
                yield where, f"the container {one.get('name')} has no image; the one that Tandem runs is called {role}"


def _unknown(given: Mapping[str, Any], known: str, path: str, of: str) -> Iterator[tuple[str, str]]:
    names = known.split()
    for name in given:
        if name not in names:
            near = get_close_matches(str(name), names, n=1)
            yield f"{path}{name}", f"{of} have no such field" + (f"; did you mean {near[0]}?" if near else "")


Template = Annotated[dict[str, Any], AfterValidator(_sound)]


def is_whole(amount: str | int) -> bool:
    return str(amount).isdecimal()
