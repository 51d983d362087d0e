"""The operator's RBAC rules: exactly what it does, by kind. The chart's roles are generated from this.

Secrets can be made and not read, but for one: the operator's own key, in its own namespace. Nothing is needed on nodes,
namespaces or CRDs, so that the operator can be confined to namespaces: then the same rules stand in a Role of each.

`python -m tandem_operator.rbac` prints the rules as YAML.
"""

import sys
from typing import Any

import yaml

from tandem_operator import kinds, leader
from tandem_operator.kinds import Kind

_SEEN = ("list", "watch")
_MADE = ("create", *_SEEN)
_OWNED = (*_MADE, "get")
"""`get`: what has the name that one of ours should have."""

VERBS: dict[tuple[Kind, str], tuple[str, ...]] = {
    (kinds.JOB, ""): (*_SEEN, "delete"),
    (kinds.JOB, "status"): ("patch",),
    (kinds.POD, ""): (*_MADE, "delete", "patch"),
    (kinds.SECRET, ""): ("create",),
    (kinds.CONFIG_MAP, ""): (*_OWNED, "patch"),
    (kinds.CLAIM, ""): (*_OWNED, "patch"),
    (kinds.SERVICE, ""): (*_OWNED, "patch"),
    (kinds.NETWORK_POLICY, ""): (*_OWNED, "patch", "delete"),
    (kinds.EVENT, ""): ("create", "list"),
}
"""By kind and subresource. Events are listed of one pod at a time (tandem_operator.pod_starts). Pods are patched to end
those whose sidecars do not, and those that do not begin. NetworkPolicies are deleted where the operator is told to make
none any more."""


def rules() -> list[dict[str, Any]]:
    """As a Role or ClusterRole has them."""
    return [
        {
            "apiGroups": [kind.group],
            "resources": [f"{kind.plural}/{subresource}" if subresource else kind.plural],
            "verbs": sorted(verbs),
        }
        for (kind, subresource), verbs in VERBS.items()
    ]


def lease_rules() -> list[dict[str, Any]]:
    """What it may do where its Lease is: make it, and hold that alone."""
    resource = {"apiGroups": [kinds.LEASE.group], "resources": [kinds.LEASE.plural]}
    return [
        {**resource, "verbs": ["create"]},
        {**resource, "resourceNames": [leader.NAME], "verbs": ["get", "update"]},
    ]


def key_rules(name: str) -> list[dict[str, Any]]:
    """What it may do in its own namespace: make its key, and read that alone."""
    resource = {"apiGroups": [kinds.SECRET.group], "resources": [kinds.SECRET.plural]}
    return [{**resource, "verbs": ["create"]}, {**resource, "resourceNames": [name], "verbs": ["get"]}]


if __name__ == "__main__":
    yaml.safe_dump(rules(), sys.stdout, sort_keys=False)
