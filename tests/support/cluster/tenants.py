"""Somebody hostile with a namespace of his own, and somebody whose job must notice nothing of him."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_operator import kinds
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, account, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, named, pod

MAX_PODS = 80
"""What the quota of a tenant's namespace lets him have."""
QUOTA = {"count/pods": str(MAX_PODS)}


@dataclass(frozen=True)
class Victim:
    """Whose job must notice nothing."""

    job: str
    namespace: str
    uid: str
    coordinator: str
    """The IP of its coordinator."""
    service: str
    """The IP of its Service."""


@dataclass
class Tenant:
    """Somebody hostile, and what he may do: everything in his own namespace."""

    namespace: Namespace
    images: Images
    operator: Operator
    folder: Path
    victim: Victim | None = None

    @property
    def user(self) -> str:
        """Who he is to the API server."""
        return f"tenant-of-{self.namespace.name}"

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        """kubectl in his name. What is refused is what becomes of it, and no error."""
        command = ["kubectl", "-n", self.namespace.name, f"--as={self.user}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr

    def makes(self, *objects: Manifest) -> str:
        """Try to make objects; one that is refused keeps none of the others."""
        return self("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def settles(self, home: Namespace) -> None:
        """What a platform gives him: a namespace with a quota that the operator looks after, Kubernetes' role `admin`
        there, and all rights on its jobs; and what that role does not have, to write where a Service leads.

        Args:
            home: where the operator's account is.
        """
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": QUOTA}}
        self.namespace.create(quota)
        more = "distributedtrainingjobs.tandem.dev,endpointslices.discovery.k8s.io"
        self.namespace("create", "role", "jobs", "--verb=*", f"--resource={more}")
        self.namespace("create", "rolebinding", "jobs", "--role=jobs", f"--user={self.user}")
        self.namespace("create", "rolebinding", "admin", "--clusterrole=admin", f"--user={self.user}")
        for one in account():
            if one["kind"] != "ServiceAccount":
                for subject in one.get("subjects", []):
                    subject["namespace"] = home.name
                self.namespace("apply", "-f", "-", stdin=json.dumps(one))

    def sends(self, name: str, template: str) -> None:
        """Make a job with a template that kubectl itself does not read."""
        whole = json.dumps(manifest(name, workers={"replicas": 1, "template": "here"}))
        file = self.folder / f"{self.namespace.name}-{name}.json"
        file.write_text(whole.replace('"here"', template))
        self("create", "--raw", f"{kinds.JOB.path(self.namespace.name)}", "-f", str(file))

    def job(self, name: str) -> Job:
        return Job(self.namespace, name)

    def runs(self, name: str, code: str, *arguments: str, **metadata: Any) -> None:
        """A pod of his that runs some Python."""
        made = named("Pod", name, spec=pod([container("own", self.images.operator, "python3", "-c", code, *arguments)]))
        made["metadata"] |= metadata
        self.makes(made)
