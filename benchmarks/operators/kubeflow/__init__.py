"""Kubeflow's training operator for the comparison: Go, with its kind PyTorchJob.

It is compiled from the pinned module beside this file and cached, and runs as a process of this machine with the rights
that its own manifests give its service account. Of its kinds only PyTorchJob is enabled. It starts its controllers once
its webhook has a certificate: the Secret that it fills is written where its pod would have it mounted. The webhook
itself is not registered (it would check jobs as they are created, in this very process), which saves it work.
"""

import base64
import json
import shutil
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.operators.proxy import TOKEN
from benchmarks.operators.subject import NOBODY, Object, Running, Subject
from tandem_operator.kinds import POD, SERVICE, Kind
from tests.support.cluster.background import Background, answers
from tests.support.cluster.operated import ACCOUNT, kubeconfig, kubectl
from tests.support.cluster.pinned import Pinned
from tests.support.cluster.pods import Namespace, named
from tests.support.ports import reserved_port
from tests.support.waiting import until

KUBEFLOW = Pinned(Path(__file__).parent / "module", "github.com/kubeflow/training-operator")
JOB = Kind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs")
CRD = f"{JOB.plural}.{JOB.group}"
JOB_LABEL, ROLE_LABEL = "training.kubeflow.org/job-name", "training.kubeflow.org/replica-type"
REPLICAS = {"Master": 1, "Worker": 3}
"""Replicas by role: as many pods as a job of Tandem has."""
CONTAINER = "pytorch"
CERTIFICATES = Path("/tmp/k8s-webhook-server/serving-certs")
"""Folder in which it looks for certificates; it has no flag."""
SECRET = "webhook-certificate"
START_SECONDS, OWNER_SECONDS = 90.0, 90.0


@dataclass(frozen=True)
class Pace:
    """Limits of its rate. The defaults are those of its flags."""

    requests: int = 20
    """Requests to the API server a second."""
    burst: int = 30
    threads: int = 1
    """Jobs that it reconciles at the same time."""

    def flags(self) -> list[str]:
        """Flags of its command line."""
        return [
            f"--kube-api-qps={self.requests}",
            f"--kube-api-burst={self.burst}",
            f"--controller-threads={self.threads}",
        ]


class _Process(Background):
    """Process of the operator."""

    def __init__(self, namespace: Namespace, binary: Path, config: Path, log: Path, pace: Pace) -> None:
        super().__init__(log)
        self._namespace, self._binary, self._config, self._pace = namespace, binary, config, pace

    @contextmanager
    def ready(self) -> Iterator[Running]:
        """Run it until it is ready.

        Raises:
            FileExistsError: the folder of its certificates already exists on this machine.
        """
        probe, webhook = reserved_port(), reserved_port()
        command = [
            str(self._binary),
            "--enable-scheme=pytorchjob",
            f"--namespace={self._namespace.name}",
            f"--webhook-secret-name={SECRET}",
            f"--webhook-server-port={webhook}",
            f"--health-probe-bind-address=127.0.0.1:{probe}",
            "--metrics-bind-address=0",
            *self._pace.flags(),
        ]
        CERTIFICATES.mkdir(parents=True)
        try:
            with self:
                self.run(command, {"KUBECONFIG": str(self._config), "MY_POD_NAMESPACE": self._namespace.name})
                self.becomes(lambda: "tls.crt" in self._filled(), "a certificate for its webhook", START_SECONDS)
                filled = self._filled()
                # The certificate last, because the operator waits for it.
                for name in sorted(filled, key="tls.crt".__eq__):
                    (CERTIFICATES / name).write_bytes(base64.b64decode(filled[name]))
                ready = f"http://127.0.0.1:{probe}/readyz"
                self.becomes(lambda: answers(ready), "a ready operator of Kubeflow's", START_SECONDS)
                yield self
        finally:
            shutil.rmtree(CERTIFICATES)

    def _filled(self) -> Mapping[str, str]:
        data: Mapping[str, str] = self._namespace.get("secret", SECRET).get("data", {})
        return data


def subject(title: str, pace: Pace) -> Subject:
    """The operator with these limits."""

    @contextmanager
    def running(namespace: Namespace, folder: Path, proxy: int) -> Iterator[Running]:
        binary = program()
        # The container that it adds to pods of workers (it waits for the master) is not `restricted`.
        kubectl("label", "namespace", namespace.name, "--overwrite", "pod-security.kubernetes.io/enforce=privileged")
        with _kind(), _account(namespace):
            until(lambda: _may_own(namespace), "what may belong to a PyTorchJob", OWNER_SECONDS)
            namespace("apply", "-f", "-", stdin=json.dumps(named("Secret", SECRET)))
            address = f"http://127.0.0.1:{proxy}"
            config = kubeconfig(namespace, folder, address)
            token = yaml.safe_load(config.read_text())["users"][0]["user"]["token"]
            # Without TLS, Go's client does not send it.
            token_request = urllib.request.Request(address + TOKEN, data=token.encode(), method="PUT")
            with urllib.request.urlopen(token_request, timeout=10):
                pass
            with _Process(namespace, binary, config, folder / "operator.log", pace).ready() as process:
                yield process

    return Subject(
        title=title,
        kind=JOB,
        running=running,
        manifest=manifest,
        pods=sum(REPLICAS.values()),
        job=JOB_LABEL,
        role=ROLE_LABEL,
        ending=frozenset(role.lower() for role in REPLICAS),
        container=lambda role: CONTAINER,
        phase=phase,
        right=right,
        step=lambda status: None,
        belongings=(POD, SERVICE),
        failed_look="Reconciler error",
    )


def manifest(index: int) -> Object:
    """Manifest of a job with a master and workers, as in its own examples."""
    container = {"name": CONTAINER, "image": "bench", "command": ["python", "-m", "train"]}
    template = {"spec": {"schedulerName": NOBODY, "containers": [container]}}
    replicas = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
        for role, count in REPLICAS.items()
    }
    return {
        "apiVersion": JOB.api,
        "kind": JOB.name,
        "metadata": {"name": f"job-{index:05d}"},
        "spec": {"pytorchReplicaSpecs": replicas},
    }


def phase(status: Object) -> str:
    """The last of its conditions that is true; it has no phase."""
    holding = [condition["type"] for condition in status.get("conditions") or [] if condition["status"] == "True"]
    return str(holding[-1]) if holding else ""


def right(status: Object) -> bool:
    """Whether the status reports that it runs, with all pods."""
    active = {role: counts.get("active") for role, counts in (status.get("replicaStatuses") or {}).items()}
    return phase(status) == "Running" and active == REPLICAS


def program() -> Path:
    """Path of the binary; compiles it if necessary (6 minutes on two busy cores).

    Raises:
        ClusterError: there is no Go, or it does not compile.
    """
    return KUBEFLOW.program("training-operator", "cmd/training-operator.v1")


@contextmanager
def _kind() -> Iterator[None]:
    """Define PyTorchJob on the cluster for a while; an existing definition stays, with all its jobs."""
    if CRD in kubectl("get", "crd", "-o", "name"):
        yield
        return
    definition = str(KUBEFLOW.sources() / "manifests/base/crds" / f"{JOB.group}_{JOB.plural}.yaml")
    kubectl("apply", "--server-side", "-f", definition)
    try:
        # `kubectl wait` fails on a definition so new that it has no conditions yet.
        until(_is_known, "the kind PyTorchJob", 60.0)
        yield
    finally:
        # The next run must find it deleted, or complete.
        kubectl("delete", "--timeout=100s", "-f", definition)


def _is_known() -> bool:
    status = json.loads(kubectl("get", "crd", CRD, "-o", "json"))["status"]
    return {"Established": "True"}.items() <= {
        state["type"]: state["status"] for state in status["conditions"] or []
    }.items()


def _may_own(namespace: Namespace) -> bool:
    """Whether the API server allows the operator to create objects that belong to jobs.

    The admission of owners looks for new kinds only every half minute, and refuses unknown ones.
    """
    owner = {"apiVersion": JOB.api, "kind": JOB.name, "name": "a", "uid": "a", "blockOwnerDeletion": True}
    owned = named("ConfigMap", "owned")
    owned["metadata"]["ownerReferences"] = [owner]
    impersonation = f"--as=system:serviceaccount:{namespace.name}:{ACCOUNT}"
    return bool(namespace("create", impersonation, "--dry-run=server", "-f", "-", stdin=json.dumps(owned), check=False))


@contextmanager
def _account(namespace: Namespace) -> Iterator[None]:
    """Create a service account with the rights of its manifests in the whole cluster, for a while."""
    api, name = "rbac.authorization.k8s.io", f"{namespace.name}-training-operator"
    role = yaml.safe_load((KUBEFLOW.sources() / "manifests/base/rbac/role.yaml").read_text())
    role["metadata"] = {"name": name}
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace.name}],
    }
    namespace("apply", "-f", "-", stdin=json.dumps(named("ServiceAccount", ACCOUNT)))
    both = yaml.safe_dump_all([role, binding])
    try:
        kubectl("apply", "-f", "-", stdin=both)
        yield
    finally:
        kubectl("delete", "--ignore-not-found", "-f", "-", stdin=both)


DEFAULT = subject("Kubeflow", Pace())
RAISED = subject("Kubeflow, raised", Pace(requests=200, burst=300, threads=10))
"""Ten times its defaults."""
