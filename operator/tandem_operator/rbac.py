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
    (kinds.WORKLOAD, ""): (*_OWNED, "delete"),
    (kinds.WORKLOAD, "status"): ("patch",),
}
"""Verbs by kind and subresource. Events are listed for one pod at a time (tandem_operator.pod_starts). Pods are patched
to terminate those whose sidecars do not end, and those that do not start. NetworkPolicies are deleted where the
operator is configured to create none any more."""


def rules() -> list[dict[str, Any]]:
    """The rules of a Role or ClusterRole."""
    return [
        {
            "apiGroups": [kind.group],
            "resources": [f"{kind.plural}/{subresource}" if subresource else kind.plural],
            "verbs": sorted(verbs),
        }
        for (kind, subresource), verbs in VERBS.items()
    ]


def queue_rules() -> list[dict[str, Any]]:
    """The rules for what a cluster says about queues, which belongs to no namespace (tandem_operator.queueing)."""
    kinds_read = (kinds.RESOURCE_FLAVOR, kinds.PRIORITY_CLASS)
    return [{"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["list"]} for kind in kinds_read]


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
