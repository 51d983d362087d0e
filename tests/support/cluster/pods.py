"""A namespace whose pods have to be `restricted`, and manifests of pods that are."""

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from tests.support.waiting import until

Manifest = dict[str, Any]
Found = TypeVar("Found")

LEVEL = {"pod-security.kubernetes.io/enforce": "restricted"}
"""Pods that ask for more than they need are refused by the API server."""


class Namespace:
    """kubectl within one namespace."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: str, stdin: str = "", check: bool = True, seconds: float = 120.0) -> str:
        """What a command prints."""
        result = subprocess.run(
            ["kubectl", "-n", self.name, *arguments], input=stdin, capture_output=True, text=True, timeout=seconds
        )
        assert result.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {result.stderr}"
        return result.stdout

    def create(self, *objects: Manifest) -> None:
        """Make objects. What the admission refuses, or only warns of, fails the test."""
        together = {"apiVersion": "v1", "kind": "List", "items": objects}
        self("create", "--warnings-as-errors", "-f", "-", stdin=json.dumps(together))

    def get(self, kind: str, name: str) -> Manifest:
        found: Manifest = json.loads(self("get", kind, name, "-o", "json"))
        return found

    def result(self, name: str, seconds: float = 120.0, otherwise: Callable[[], str] | None = None) -> tuple[int, str]:
        """Exit code and output of a pod's only container, once it has ended."""

        def end() -> Manifest | None:
            for status in self.get("pod", name)["status"].get("containerStatuses", []):
                terminated: Manifest | None = status["state"].get("terminated")
                return terminated
            return None

        ended = until(
            end, f"the end of {name}", seconds, otherwise=otherwise or (lambda: self("describe", "pod", name))
        )
        return ended["exitCode"], self("logs", name)


@contextmanager
def restricted() -> Iterator[Namespace]:
    if "KUBECONFIG" not in os.environ:
        pytest.fail("these tests need a cluster: run them with `make e2e`, or set KUBECONFIG")
    namespace = Namespace(f"tandem-test-{secrets.token_hex(4)}")
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace.name, "labels": LEVEL}}
    namespace("create", "-f", "-", stdin=json.dumps(manifest))
    try:
        # A pod cannot be made before the controller has made its service account.
        until(lambda: namespace("get", "serviceaccount", "default", check=False), "the service account", 60.0)
        yield namespace
    finally:
        namespace("delete", "namespace", namespace.name, "--wait=false")


def container(name: str, image: str, *arguments: str, **more: Any) -> Manifest:
    """A container that may do nothing but compute, and write to /tmp and to the checkpoints."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {
        "name": name,
        "image": image,
        # Not `command`, which would replace tini.
        "args": list(arguments),
        "securityContext": security,
        "volumeMounts": mounts + more.pop("volumeMounts", []),
        **more,
    }


def pod(containers: Sequence[Manifest], volumes: Sequence[Manifest] = (), **more: Any) -> Manifest:
    """A pod's spec. The user is the image's own: only a number can be seen not to be root."""
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": 65532,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            *volumes,
        ],
        **more,
    }


def named(kind: str, name: str, version: str = "v1", **rest: Any) -> Manifest:
    """An object that carries its own name as a label."""
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}
