"""The operator's RBAC rules: exactly the requests that it makes, by kind. The chart's roles are generated from this.

Secrets can be created and not read, except for one: the operator's own key, in its own namespace. The operator needs no
rights on nodes, namespaces or CRDs, so that it can be confined to namespaces: then the same rules stand in a Role of
each.

`python -m tandem_operator.rbac` prints the rules as YAML.
"""

import sys
from typing import Any

import yaml

from tandem_operator import kinds, leader
from tandem_operator.kinds import Kind

_READ = ("list", "watch")
_CREATE = ("create", *_READ)
_OWNED = (*_CREATE, "get")
"""Verbs with `get`, for an object that has the name of one of the job's."""

VERBS: dict[tuple[Kind, str], tuple[str, ...]] = {
    (kinds.JOB, ""): (*_READ, "delete"),
    (kinds.JOB, "status"): ("patch",),
    (kinds.POD, ""): (*_CREATE, "delete", "patch"),
    (kinds.SECRET, ""): ("create",),
    (kinds.CONFIG_MAP, ""): (*_OWNED, "patch"),
    (kinds.CLAIM, ""): (*_OWNED, "patch"),
    (kinds.SERVICE, ""): (*_OWNED, "patch"),
    (kinds.NETWORK_POLICY, ""): (*_OWNED, "patch", "delete"),
    (kinds.EVENT, ""): ("create", "list"),
}
"""Verbs by kind and subresource. Events are listed for one pod at a time (tandem_operator.pod_starts). Pods are patched
to terminate those whose sidecars do not end, and those that do not start. NetworkPolicies are deleted where the
operator is configured to create none any more."""


QUEUE_VERBS: dict[tuple[Kind, str], tuple[str, ...]] = {
    (kinds.WORKLOAD, ""): (*_OWNED, "delete"),
    (kinds.WORKLOAD, "status"): ("patch",),
    (kinds.RESOURCE_FLAVOR, ""): ("list",),
    (kinds.PRIORITY_CLASS, ""): ("list",),
}
"""Verbs for queues (tandem_operator.workloads). Flavors and priority classes belong to no namespace."""

WAIT_VERBS: dict[tuple[Kind, str], tuple[str, ...]] = {
    (kinds.LOCAL_QUEUE, ""): ("get",),
    (kinds.CLUSTER_QUEUE, ""): ("list",),
    (kinds.VISIBLE_QUEUE, "pendingworkloads"): ("get",),
}
"""Verbs to say why a job waits (tandem_operator.queue_usage), in addition."""


def rules() -> list[dict[str, Any]]:
    """The rules of a Role or ClusterRole."""
    return _rules(VERBS)


def _rules(by_kind: dict[tuple[Kind, str], tuple[str, ...]]) -> list[dict[str, Any]]:
    return [
        {
            "apiGroups": [kind.group],
            "resources": [f"{kind.plural}/{subresource}" if subresource else kind.plural],
            "verbs": sorted(verbs),
        }
        for (kind, subresource), verbs in by_kind.items()
    ]


def queue_rules() -> list[dict[str, Any]]:
    """The rules of a ClusterRole for jobs in queues. Without them, queued jobs are pod groups: who may grant only
    the rights of a namespace can install the operator all the same."""
    return _rules(QUEUE_VERBS)


def wait_rules() -> list[dict[str, Any]]:
    """The rules of the same ClusterRole for the place of a job in its queue, and for who has its quota. Without them,
    its status lacks both."""
    return _rules(WAIT_VERBS)


def lease_rules() -> list[dict[str, Any]]:
    """The rules in the namespace of its Lease: create it, and hold that one alone."""
    resource = {"apiGroups": [kinds.LEASE.group], "resources": [kinds.LEASE.plural]}
    return [
        {**resource, "verbs": ["create"]},
        {**resource, "resourceNames": [leader.NAME], "verbs": ["get", "update"]},
    ]


def key_rules(name: str) -> list[dict[str, Any]]:
    """The rules in the operator's own namespace: create its key, and read that Secret alone."""
    resource = {"apiGroups": [kinds.SECRET.group], "resources": [kinds.SECRET.plural]}
    return [{**resource, "verbs": ["create"]}, {**resource, "resourceNames": [name], "verbs": ["get"]}]


if __name__ == "__main__":
    yaml.safe_dump(rules(), sys.stdout, sort_keys=False)
