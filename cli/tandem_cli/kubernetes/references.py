"""The objects that a job refers to by name: its claim, queue, classes, Secrets and ConfigMaps.

The API server accepts a job that refers to missing objects, and its pods then wait. `tandem submit --check` looks for
them beforehand, with the user's permissions: objects that the user may not read, and kinds that the cluster does not
have, are skipped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.errors import UnmetRequirement
from tandem.job.manifest.fields import Path
from tandem.job.resource import DistributedTrainingJob
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl

KEYS = 'go-template={{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
"""Template that prints the keys of a Secret or ConfigMap, but no value."""


@dataclass(frozen=True)
class Reference:
    """An object that a job refers to."""

    field: Path
    """Field of the manifest that names the object."""
    kind: str
    """Resource as kubectl names it."""
    label: str
    """Kind for messages."""
    name: str
    key: str = ""
    """Key within the object; empty: none in particular."""


def references(job: DistributedTrainingJob) -> Iterator[Reference]:
    """Yield the objects that must exist before the job's pods can start."""
    storage, policy = job.spec.checkpoint.storage, job.spec.run_policy
    simple = (
        (("checkpoint", "storage", "claimName"), "persistentvolumeclaims", "claim", storage.claim_name),
        (("checkpoint", "storage", "storageClassName"), "storageclasses", "storage class", storage.storage_class_name),
        (("checkpoint", "storage", "credentialsSecret"), "secrets", "Secret", storage.credentials_secret),
        (("runPolicy", "queueName"), "localqueues.kueue.x-k8s.io", "LocalQueue", policy.queue_name),
        (("runPolicy", "priorityClassName"), "priorityclasses", "priority class", policy.priority_class_name),
    )
    for field, kind, label, name in simple:
        if name:
            yield Reference(("spec", *field), kind, label, name)
    for path, variable in job.spec.variables:
        source = variable.value_from
        if source is None or source.optional:
            continue
        place: Path = (*path, "valueFrom")
        if source.secret_key_ref is not None:
            secret = source.secret_key_ref
            yield Reference((*place, "secretKeyRef", "name"), "secrets", "Secret", secret.name, secret.key)
        elif source.config_map_key_ref is not None:
            config = source.config_map_key_ref
            yield Reference((*place, "configMapKeyRef", "name"), "configmaps", "ConfigMap", config.name, config.key)


def missing(job: DistributedTrainingJob, kubectl: Kubectl) -> list[UnmetRequirement]:
    """Return the missing objects, as far as this user may see."""
    namespace = f" in namespace {kubectl.namespace}" if kubectl.namespace else " in this namespace"
    problems = []
    for reference in references(job):
        try:
            get = ("get", reference.kind, reference.name, "--ignore-not-found", "-o")
            exists = bool(kubectl.run(*get, "name").text.strip())
            keys = kubectl.run(*get, KEYS).text.split() if exists and reference.key else []
        except ClusterError:
            continue
        if not exists:
            place = "" if reference.kind.endswith("classes") else namespace
            message = f"there is no {reference.label} {reference.name}{place}; the job's pods would wait for it"
            problems.append(UnmetRequirement(reference.field, message))
        elif reference.key and reference.key not in keys:
            message = (
                f"the {reference.label} {reference.name} has no key {reference.key}; the job's pods would wait for it"
            )
            problems.append(UnmetRequirement(reference.field, message))
    return problems
