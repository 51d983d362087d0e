"""Where the cluster keeps its files, and which addresses it uses."""

import os
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem" / "cluster"
"""What outlives a cluster: binaries by the hash of their sources, and the layers of images."""
STATE = CACHE / "state"
"""What belongs to the running cluster. Sockets are here, so the path has to stay short (107 bytes with theirs)."""
LOCK = Path("/run/tandem-cluster.lock")
LOGS = STATE / "log"
AUDIT = LOGS / "audit.jsonl"
"""Every request of a service account that is not one of the cluster's own."""
PKI = STATE / "pki"
KUBECONFIG = STATE / "admin.kubeconfig"
"""Of the repository."""
MODULES = Path(__file__).parent / "modules"

POD_CIDR, SERVICE_CIDR = "198.18.0.0/16", "198.19.0.0/16"
"""From the range for benchmarks of network devices (RFC 2544), which is routed nowhere."""
API = "198.18.0.1"
"""The API server, DNS, the first node and the gateway of all pods."""
API_SERVICE = "198.19.0.1"
"""The first service address: `kubernetes.default.svc`."""
OUTSIDE = "198.18.255.254"
"""The machine itself, as pods see it."""
DOMAIN = "cluster.local"
REGISTRY = "localhost:5000"
"""Images are named REGISTRY/NAME:TAG."""


def node_names(count: int) -> list[str]:
    return [f"node-{index}" for index in range(count)]


def node_index(name: str) -> int:
    """The number in a node's name.

    Raises:
        ValueError: no node is called so.
    """
    word, _, number = name.rpartition("-")
    if word != "node" or not number.isdecimal() or int(number) > 20:
        raise ValueError(f"{name!r} is no node: they are called node-0, node-1, …, node-20")
    return int(number)


def node_address(name: str) -> str:
    """Its address. The first node has that of the API server."""
    return f"198.18.0.{1 + node_index(name)}"


def pod_range(name: str) -> tuple[str, str]:
    """First and last address of a node's pods."""
    first = 16 + 8 * node_index(name)
    return f"198.18.{first}.0", f"198.18.{first + 7}.255"
