"""The network namespace that holds the cluster, and the one link that leads into it.

```
machine:    tandem0 (198.18.255.254) ─┐
namespace:                         machine ── pods (bridge; 198.18.0.1 and the nodes' addresses) ── a veth for each pod
                                              services (bridge without ports: gives service addresses a route)
```
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.cluster.machine.places import API, OUTSIDE, POD_CIDR, SERVICE_CIDR

NAMESPACE = "tandem-cluster"
BRIDGE = "pods"
LINK = "tandem0"
INSIDE = ("nsenter", f"--net=/var/run/netns/{NAMESPACE}", "--")
"""Words before a command that run it in the cluster's network; the command takes over the process. (`ip netns exec`
would also give it a /sys of its own, without control groups.)"""
PREFIX_LENGTH = POD_CIDR.partition("/")[2]


def make() -> None:
    """Make the namespace, its bridges and the link.

    Raises:
        OSError: a step failed; the message says which and why.
    """
    _ip("netns", "add", NAMESPACE)
    _inside("link", "set", "lo", "up")
    # A bridge without an address of its own takes its lowest port's, so it would change as pods come and go, and every
    # pod's ARP entry for the API server and DNS would go stale for seconds.
    for name, address in {BRIDGE: "02:c6:12:00:00:01", "services": "02:c6:13:00:00:01"}.items():
        _inside("link", "add", name, "address", address, "type", "bridge")
        _inside("link", "set", name, "up")
    add_address(API)
    _inside("route", "add", SERVICE_CIDR, "dev", "services")
    _ip("link", "add", LINK, "type", "veth", "peer", "name", "machine", "netns", NAMESPACE)
    _inside("link", "set", "machine", "master", BRIDGE, "up")
    _ip("address", "add", f"{OUTSIDE}/{PREFIX_LENGTH}", "dev", LINK)
    _ip("link", "set", LINK, "up")
    _ip("route", "add", SERVICE_CIDR, "via", API, "dev", LINK)
    # Without the module, a service's answer between two pods of one bridge would bypass the rules that translate it.
    # It may be built in, or loaded by somebody else: the setting below tells whether it is there.
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", "-q", "br_netfilter"], check=False)
    settings = ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")
    _run(*INSIDE, "sysctl", "-q", "-w", *settings)


def add_address(address: str) -> None:
    """Give the cluster's side of the bridge one more address: a node's."""
    _inside("address", "replace", f"{address}/{PREFIX_LENGTH}", "dev", BRIDGE)


def cut(namespaces: Path) -> None:
    """Cut off every pod whose network namespace is in this folder. Without that, the kernel would refuse connections
    in the name of processes that are gone.

    Raises:
        OSError: one cannot be cut off.
    """
    for namespace in namespaces.glob("*"):
        try:
            _run("nsenter", f"--net={namespace}", "--", "ip", "link", "set", "group", "default", "down")
        except OSError:
            # Another one may be gone by itself meanwhile.
            if namespace.exists():
                raise


def listens(port: int) -> bool:
    """Whether somebody listens on the loopback address inside."""
    attempt = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1).close()"
    return subprocess.run([*INSIDE, sys.executable, "-c", attempt], capture_output=True).returncode == 0


def remove() -> None:
    """Remove everything that `make` made, as far as it is there. The kernel takes what is in the namespace with it."""
    if Path("/sys/class/net", LINK).exists():
        _ip("link", "delete", LINK)
    if Path("/var/run/netns", NAMESPACE).exists():
        _ip("netns", "delete", NAMESPACE)


def _inside(*arguments: str) -> None:
    _ip("-n", NAMESPACE, *arguments)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")
