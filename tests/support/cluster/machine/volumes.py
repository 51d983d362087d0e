"""Volumes that pods of all nodes share, on this machine's disk."""

import sys
import time
from typing import Any

from tests.support import ROOT
from tests.support.cluster.machine.leftovers import VOLUMES
from tests.support.cluster.machine.processes import Part, start

CLASS: dict[str, Any] = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "provisioner": "kubernetes.io/host-path",
    "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
}


def start_opening() -> Part:
    """Have a process keep new volumes open to all, until the cluster is taken down."""
    return start("volumes", sys.executable, "-m", "tests.support.cluster.machine.volumes", folder=ROOT)


def open_new() -> None:
    """Let pods of any user write to volumes, as a shared disk would: the provisioner makes folders for root alone."""
    for path in VOLUMES.glob("*"):
        try:
            if path.stat().st_mode & 0o777 != 0o777:
                path.chmod(0o777)
        except FileNotFoundError:  # a volume was removed meanwhile
            pass


if __name__ == "__main__":
    while True:
        open_new()
        time.sleep(0.2)
