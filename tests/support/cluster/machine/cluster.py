"""The cluster as a whole: up, and down again without a trace."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cluster.machine import (
    ClusterError,
    certificates,
    cgroups,
    images,
    leftovers,
    network,
    prerequisites,
    processes,
    volumes,
)
from tests.support.cluster.machine.binaries import build, version
from tests.support.cluster.machine.control_plane import ControlPlane
from tests.support.cluster.machine.kubectl import Kubectl
from tests.support.cluster.machine.node import Node
from tests.support.cluster.machine.places import LOCK, STATE, node_names


@contextmanager
def held() -> Iterator[None]:
    """Nobody else changes the cluster meanwhile: there is one on a machine, wherever its files are.

    Raises:
        ClusterError: somebody does already, or this machine cannot run one.
    """
    prerequisites.require_machine()
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(f"another run uses the cluster; wait for it to end ({LOCK})") from None
        yield


def programs() -> Path:
    """The folder with kubectl and the other programs; what this machine lacks is installed and compiled first.

    Raises:
        ClusterError: something cannot be installed, or a program does not compile.
    """
    prerequisites.prepare()
    return build()


def up(binaries: Path, nodes: int = 2, gpus: int = 4) -> None:
    """Start a new cluster and wait until every node is Ready; what is there of an earlier one is removed first.

    Raises:
        ClusterError: a part of it does not come up.
        OSError: something that it needs cannot be made; the message says what and why.
    """
    down()
    print(f"starting Kubernetes {version()} with {nodes} nodes", flush=True)
    STATE.mkdir(parents=True)
    leftovers.remember()
    network.make()
    certificates.make()
    parts = [images.start_registry(), *ControlPlane(binaries).start()]
    images.load_pause(binaries)
    members = [Node(name) for name in node_names(nodes)]
    for node in members:
        node.start(binaries)
    kubectl = Kubectl(binaries)
    kubectl.apply(volumes.CLASS)
    parts.append(volumes.start_opening())
    for node in members:
        node.wait_until_ready(kubectl)
        if gpus:
            node.advertise_gpus(gpus, kubectl)
    processes.require_running(parts)
    print(kubectl("get", "nodes", "-o", "wide"), flush=True)


def down() -> None:
    """Remove the cluster and everything of it, as far as there is any. What is in the cache stays."""
    # At once: nothing of what they would still write is kept. The kubelets go before their pods, or new ones start.
    processes.kill()
    cgroups.kill(cgroups.group("*"))
    cgroups.remove()
    leftovers.remove()
    network.remove()
    if STATE.exists():
        shutil.rmtree(STATE)
