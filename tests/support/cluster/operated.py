"""An operator for tests: a process of this machine with a service account's rights, in one namespace."""

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tandem_operator import names, rbac
from tandem_operator.options import KEY_SECRET
from tandem_operator.pods import VOLUME
from tests.support import ROOT, manifests
from tests.support.cluster.background import Background, answers
from tests.support.cluster.images import Images
from tests.support.cluster.pods import Manifest, Namespace, container, named, pod
from tests.support.ports import reserved_port
from tests.support.waiting import until

CRD = ROOT / "charts/tandem/files/crd.yaml"
KIND = "distributedtrainingjobs.tandem.dev"
ACCOUNT = "tandem-operator"
LONG: Manifest = {
    "task": "image-classification",
    "parameters": {"model": "cnn", "data": {"name": "digits"}},
    "loop": {"epochs": 100_000, "globalBatchSize": 64},
}
"""What a job trains that no test sees the end of."""
_WORKERS = {"labelSelector": {"matchLabels": {"tandem.dev/role": "worker"}}, "topologyKey": "kubernetes.io/hostname"}
_PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": _WORKERS}]}
APART = {"spec": {"affinity": {"podAntiAffinity": _PREFERRED}}}
"""A template of workers that go to different nodes if they can."""
LOOK_SECONDS = 0.3
"""Between two looks at a job: kubectl takes a tenth of a second of a core, which the job's pods need."""


class Operator(Background):
    """Starts it, kills it, starts it again."""

    def __init__(self, namespace: Namespace, images: Images, kubeconfig: Path, log: Path) -> None:
        super().__init__(log)
        self._namespace, self._images, self._kubeconfig = namespace, images, kubeconfig
        self.port = reserved_port()
        self.program: Sequence[str] = ("-m", "tandem_operator")
        """What Python runs."""
        self.identity = f"{namespace.name}/{log.stem}"

    def start(self, *options: str) -> None:
        """Start one, and wait until it is ready."""
        self.launch(*options)
        self.becomes(lambda: answers(f"http://127.0.0.1:{self.port}/readyz"), "a ready operator", 60.0)

    def launch(self, *options: str) -> None:
        environment = {
            **os.environ,
            "KUBECONFIG": str(self._kubeconfig),
            "TANDEM_OPERATOR_IMAGE": self._images.operator,
            "TANDEM_TRAINER_IMAGE": self._images.trainer,
            "TANDEM_EVALUATOR_IMAGE": self._images.evaluator,
        }
        command = [
            sys.executable,
            *self.program,
            f"--namespace={self._namespace.name}",
            f"--port={self.port}",
            # Killed and started again it is what a container is that its kubelet starts again.
            f"--identity={self.identity}",
        ]
        self.run([*command, *options], environment)

    def metrics(self) -> str:
        """What Prometheus would read."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text


@contextmanager
def operated(
    namespace: Namespace, images: Images, folder: Path, *options: str, program: Sequence[str] = ()
) -> Iterator[Operator]:
    """An operator in a namespace, for a while. It may do there what `tandem_operator.rbac` says of a namespace, and
    nothing else.

    Args:
        program: Python's arguments in place of those that run it.
    """
    install(namespace)
    with Operator(namespace, images, kubeconfig(namespace, folder), folder / "operator.log") as operator:
        operator.program = program or operator.program
        operator.start(*options)
        yield operator


def install(namespace: Namespace) -> None:
    """Make the kind of our jobs known, and an account for an operator in the namespace."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    established("-f", str(CRD))
    for manifest in account():
        namespace("apply", "-f", "-", stdin=json.dumps(manifest))


@contextmanager
def reads_queues(namespace: Namespace) -> Iterator[None]:
    """The operator of a namespace may also read what it needs of queues, for a while."""
    api, name = "rbac.authorization.k8s.io/v1", f"{namespace.name}-queues"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace.name}
    rules = [*rbac.queue_rules(), *rbac.wait_rules()]
    both: list[Manifest] = [
        {
            "apiVersion": api,
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": rules,
        },
        {
            "apiVersion": api,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [subject],
        },
    ]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(both))
    try:
        yield
    finally:
        kubectl("delete", f"clusterrole/{name}", f"clusterrolebinding/{name}")


def account() -> list[Manifest]:
    """A service account with the operator's rights in its namespace."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    api = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
        {
            "apiVersion": api,
            "kind": "Role",
            "metadata": {"name": ACCOUNT},
            "rules": [*rbac.rules(), *rbac.key_rules(KEY_SECRET), *rbac.lease_rules()],
        },
        {
            "apiVersion": api,
            "kind": "RoleBinding",
            "metadata": {"name": ACCOUNT},
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT}],
        },
    ]


def kubectl(*arguments: str, stdin: str = "") -> str:
    result = subprocess.run(["kubectl", *arguments], input=stdin, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"kubectl {' '.join(arguments)}: {result.stderr}"
    return result.stdout


def established(*kind: str) -> None:
    """Wait until the API server serves a kind.

    Args:
        kind: as kubectl names it: `-f FILE` or `crd/NAME`.
    """
    wait = ["kubectl", "wait", "--for=condition=Established", "--timeout=60s", *kind]
    said = ""

    def is_there() -> bool:
        # For a moment a new one has no conditions, which kubectl takes for an error (1.35).
        nonlocal said
        result = subprocess.run(wait, capture_output=True, text=True, timeout=120)
        said = result.stderr
        return result.returncode == 0

    until(is_there, " ".join(wait), otherwise=lambda: said)


def manifest(name: str, **spec: Any) -> Manifest:
    """A job of two workers and one evaluator that trains the digits."""
    task = {
        "task": "image-classification",
        "parameters": {"model": "cnn", "data": {"name": "digits"}},
        "loop": {"epochs": 60, "globalBatchSize": 64},
    }
    whole = {
        "trainer": task,
        "workers": {"replicas": 2},
        "evaluators": {"policy": "Latest"},
        "checkpoint": {"everySteps": 50, "storage": {"size": "1Gi"}},
        **spec,
    }
    return manifests.manifest(name, **whole)


def with_a_volume_that_does_not_mount(name: str) -> Manifest:
    """A job of one worker, which needs a ConfigMap that is not there."""
    mount = {"name": "worker", "volumeMounts": [{"name": "setup", "mountPath": "/setup"}]}
    volume = {"name": "setup", "configMap": {"name": "not-there"}}
    template = {"spec": {"containers": [mount], "volumes": [volume]}}
    return manifest(name, workers={"replicas": 1, "template": template})


def script_beside_a_sidecar(name: str, images: Images, code: str = "pass", **spec: Any) -> Manifest:
    """A job that runs Python code in one worker, beside a container that never exits."""
    sidecar = container("proxy", images.operator, "python3", "-c", "import signal; signal.pause()")
    workers = {"replicas": 1, "template": {"spec": {"containers": [sidecar]}}}
    script = {"command": ["python", "-c", code]}
    return manifest(name, **{"trainer": script, "evaluators": {"replicas": 0}, "workers": workers, **spec})


class Job:
    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace, self.name = namespace, name

    def apply(self, whole: Manifest) -> None:
        self.namespace("apply", "-f", "-", stdin=json.dumps(whole))

    @property
    def status(self) -> Manifest:
        found: Manifest = self.namespace.get("dtj", self.name).get("status", {})
        return found

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    @property
    def reasons(self) -> set[str]:
        return {one["reason"] for one in self.status.get("conditions", [])}

    @property
    def step(self) -> int:
        """Steps completed, 0 before the first."""
        return int(self.status.get("progress", {}).get("step", 0))

    def pods(self, role: str) -> list[Manifest]:
        selector = f"tandem.dev/job={self.name},tandem.dev/role={role}"
        found: list[Manifest] = json.loads(self.namespace("get", "pods", "-l", selector, "-o", "json"))["items"]
        return found

    def live(self, role: str) -> list[str]:
        """Names of those that run and are not about to go."""
        return sorted(
            pod["metadata"]["name"]
            for pod in self.pods(role)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        )

    def reaches(self, *phases: str, seconds: float = 180.0) -> str:
        return until(
            lambda: self.phase if self.phase in phases else None,
            f"{self.name} in {' or '.join(phases)}",
            seconds,
            otherwise=self.describe,
            pause=LOOK_SECONDS,
        )

    def trains(self, beyond: int = 0, seconds: float = 180.0) -> int:
        """Wait until it runs and has made more steps than that; returns its step."""
        return until(
            lambda: self.step if self.phase == "Running" and self.step > beyond else None,
            f"step {beyond} of {self.name}",
            seconds,
            otherwise=self.describe,
            pause=LOOK_SECONDS,
        )

    def becomes(self, look: Any, what: str, seconds: float = 120.0) -> Any:
        return until(look, f"{self.name}: {what}", seconds, otherwise=self.describe, pause=LOOK_SECONDS)

    def events(self) -> list[str]:
        """What was told of it, oldest first."""
        selector = f"involvedObject.kind=DistributedTrainingJob,involvedObject.name={self.name}"
        found = json.loads(self.namespace("get", "events", "--field-selector", selector, "-o", "json"))["items"]
        found.sort(key=lambda event: event["metadata"]["creationTimestamp"])
        return [f"{event['reason']}: {event['message']}" for event in found]

    def describe(self) -> str:
        """Everything that helps to see why something did not happen."""
        logs = [
            f"--- {name}\n" + self.namespace("logs", name, "--tail=15", check=False)
            for role in ("coordinator", "worker", "evaluator")
            for name in [pod["metadata"]["name"] for pod in self.pods(role)]
        ]
        events = self.namespace("get", "events", "--sort-by=.lastTimestamp", check=False).splitlines()[-25:]
        shown = self.namespace("get", "dtj,pods", "-o", "wide", check=False)
        return "\n".join([json.dumps(self.status, indent=1), shown, *events, *logs])


def kubeconfig(namespace: Namespace, folder: Path, server: str = "", account: str = ACCOUNT) -> Path:
    """Access as a service account, at another address than the API server's own if one is given."""
    admin = yaml.safe_load(kubectl("config", "view", "--raw", "--minify", "-o", "yaml"))
    if server:
        admin["clusters"][0]["cluster"] = {"server": server}
    token = namespace("create", "token", account, "--duration=4h").strip()
    context = {"cluster": admin["clusters"][0]["name"], "user": account, "namespace": namespace.name}
    whole = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": admin["clusters"],
        "users": [{"name": account, "user": {"token": token}}],
        "contexts": [{"name": account, "context": context}],
        "current-context": account,
    }
    path = folder / f"{account}.kubeconfig"
    path.write_text(yaml.safe_dump(whole))
    return path


READ_RECORDS = """
import json, pathlib, sys
for log in sorted(pathlib.Path(sys.argv[1]).glob("log/train-g*.jsonl")):
    for line in log.read_text().splitlines():
        if json.loads(line)["kind"] in sys.argv[2:]:
            print(line)
"""


def training_records(job: Job, images: Images, *kinds: str) -> list[Manifest]:
    """Lines of the training logs on a job's volume of some kinds, generation after generation."""
    read = container("read", images.operator, "python3", "-c", READ_RECORDS, f"{VOLUME}/{job.name}", *kinds)
    read["volumeMounts"].append({"name": "checkpoints", "mountPath": VOLUME, "readOnly": True})
    volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": names.checkpoints(job.name)}}
    name = f"{job.name}-records"
    job.namespace.create(named("Pod", name, spec=pod([read], [volume])))
    code, said = job.namespace.result(name)
    job.namespace("delete", "pod", name, "--wait=false")
    assert code == 0, said
    return [json.loads(line) for line in said.splitlines()]


def sample_digests(records: Sequence[Manifest]) -> dict[int, str]:
    """The digest of the samples of each step that counts: of one that was repeated, the last."""
    return {record["step"]: record["ids"] for record in records if record["kind"] == "step"}


def secret(namespace: Namespace, name: str) -> str:
    return base64.b64decode(namespace.get("secret", name)["data"]["token"]).decode()


def seen(job: Job, words: Sequence[str]) -> bool:
    """Whether all of these words were told as events."""
    told = " | ".join(job.events())
    return all(word in told for word in words)
