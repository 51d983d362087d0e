"""Kueue for the tests: a process of this machine, compiled from a pinned Go module and kept, that looks after the
namespaces with its label for a while.

It runs with the rights of the cluster's administrator, beside the cluster and not in it: no image has to be built. The
API server reaches its webhooks where this machine ends the pods' network.
"""

import base64
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster.background import Background
from tests.support.cluster.machine import certificates
from tests.support.cluster.machine.places import KUBECONFIG, OUTSIDE, PKI
from tests.support.cluster.operated import established, kubectl
from tests.support.cluster.pinned import Pinned
from tests.support.cluster.pods import Manifest, Namespace

OLDEST = Pinned(Path(__file__).parent / "module", "sigs.k8s.io/kueue")
NEWEST = Pinned(Path(__file__).parent / "newest", "sigs.k8s.io/kueue")
LABEL = {"kueue-managed": "true"}
"""Of namespaces that it looks after."""
API = "kueue.x-k8s.io/v1beta1"
FLAVOR = "any"
PORT = 9443
KINDS = ("Pod", "ClusterQueue", "ResourceFlavor", "Workload", "Cohort")
"""Whose webhooks are registered; the others are of kinds that are not there."""
SERVING = "Serving webhook server"
VISIBILITY = "v1beta2.visibility.kueue.x-k8s.io"
"""Name of the API that knows the places in queues."""
VISIBILITY_PORT = 9444
ITS_OWN_ROOT = """
root=$0 certificates=$1
shift
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    if [ -L "$entry" ]; then cp -P "$entry" "$root"
    elif [ -d "$entry" ] && [ "$entry" != /etc ]; then mkdir "$root$entry" && mount --rbind "$entry" "$root$entry"
    fi
done
mkdir -p "$root/etc/kueue/metrics"
cp -r "$certificates" "$root/etc/kueue/metrics/certs"
cp -r "$certificates" "$root/visibility"
exec chroot "$root" "$@"
"""
"""Where it looks for certificates for its metrics and its visibility API cannot be told, and this machine's root and
/etc are not touched."""


class Kueue(Background):
    """Starts it, kills it, starts it again."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        super().__init__(log)
        self._command, self._starts = command, 0

    def start(self) -> None:
        """Start it, and wait for its webhooks."""
        self._starts += 1
        self.run(self._command)
        self.becomes(lambda: self.log().count(SERVING) == self._starts, "Kueue's webhooks", 60.0)


@contextmanager
def running(kueue: Pinned, folder: Path) -> Iterator[Kueue]:
    """Kueue, ready, with its CRDs and webhooks; all are gone afterwards."""
    sources, binary = kueue.sources(), kueue.program("kueue", "cmd/kueue")
    crds = sorted((sources / "config/components/crd/bases").glob("*.yaml"))
    hooks = [_reachable(hook) for hook in _all(sources / "config/components/webhook/manifests.yaml")]
    for crd in crds:
        kubectl("apply", "--server-side", "-f", str(crd))
    for crd in crds:
        established("-f", str(crd))
    try:
        with _process(binary, folder, kueue is NEWEST) as process:
            registered = [*hooks, *(_visible() if kueue is NEWEST else ())]
            try:
                kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(registered))
                if kueue is NEWEST:
                    kubectl("wait", "--for=condition=Available", f"apiservice/{VISIBILITY}", "--timeout=60s")
                yield process
            finally:
                # A namespace cannot go while an API is registered that nobody serves.
                kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(registered))
                # As long as it runs, which lets go of them.
                for kind in ("workloads", "localqueues", "clusterqueues", "resourceflavors"):
                    kubectl("delete", f"{kind}.kueue.x-k8s.io", "--all", "--all-namespaces", "--timeout=60s")
    finally:
        for crd in crds:
            kubectl("delete", "--wait=false", "-f", str(crd))


def queue(namespace: Namespace, name: str, quota: Mapping[str, str]) -> None:
    """A queue of a namespace's own for so much of each resource."""
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quota.items()]
    whole = f"{namespace.name}-{name}"
    flavors = [{"coveredResources": list(quota), "flavors": [{"name": FLAVOR, "resources": resources}]}]
    objects: list[Manifest] = [
        {"kind": "ResourceFlavor", "metadata": {"name": FLAVOR}},
        {
            "kind": "ClusterQueue",
            "metadata": {"name": whole},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": flavors,
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        },
    ]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all({"apiVersion": API, **one} for one in objects))
    local_queue(namespace, name, whole)


def local_queue(namespace: Namespace, name: str, of: str) -> None:
    """A queue of a namespace in front of a ClusterQueue."""
    whole = {"kind": "LocalQueue", "metadata": {"name": name}, "spec": {"clusterQueue": of}}
    namespace("apply", "-f", "-", stdin=yaml.safe_dump({"apiVersion": API, **whole}))


def workload(name: str, queue: str, requests: Mapping[str, str], priority: int) -> Manifest:
    """A Workload of one pod that nobody makes, for its quota alone."""
    container = {"name": "main", "image": "none", "resources": {"requests": dict(requests), "limits": dict(requests)}}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    return {
        "apiVersion": API,
        "kind": "Workload",
        "metadata": {"name": name},
        "spec": {
            "queueName": queue,
            "priority": priority,
            "podSets": [{"name": "main", "count": 1, "template": template}],
        },
    }


def programs() -> list[Path]:
    """Both versions; compiled now if that has not happened yet.

    Raises:
        ClusterError: there is no Go, or one does not compile.
    """
    return [kueue.program("kueue", "cmd/kueue") for kueue in (OLDEST, NEWEST)]


def _visible() -> list[Manifest]:
    """The visibility API of a Kueue that is no Service. The oldest one serves it only from within a pod."""
    name = {"name": "kueue-visibility", "namespace": "default"}
    version, group = VISIBILITY.split(".", 1)
    spec: Manifest = {"group": group, "version": version, "groupPriorityMinimum": 100, "versionPriority": 100}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": name,
            "spec": {"type": "ExternalName", "externalName": OUTSIDE},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": VISIBILITY},
            "spec": {**spec, "insecureSkipTLSVerify": True, "service": {**name, "port": VISIBILITY_PORT}},
        },
    ]


@contextmanager
def _process(binary: Path, folder: Path, is_visible: bool) -> Iterator[Kueue]:
    certificates.issue("kueue", "/CN=kueue", [f"IP:{OUTSIDE}"])
    serving = folder / "certificates"
    serving.mkdir()
    for suffix in ("crt", "key"):
        shutil.copy(PKI / f"kueue.{suffix}", serving / f"tls.{suffix}")
    settings = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "127.0.0.1:0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": OUTSIDE, "port": PORT, "certDir": str(serving)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "managedJobsNamespaceSelector": {"matchLabels": LABEL},
        "integrations": {"frameworks": ["pod"]},
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    root = folder / "root"
    root.mkdir()
    command: list[str | Path] = ["unshare", "--mount", "sh", "-ec", ITS_OWN_ROOT, root, serving]
    command += [binary, f"--config={folder / 'settings.yaml'}"]
    if is_visible:
        command += [f"--kubeconfig={KUBECONFIG}", f"--visibility-server-port={VISIBILITY_PORT}"]
    else:
        command.append("--feature-gates=VisibilityOnDemand=false")
    with Kueue(command, folder / "kueue.log") as process:
        process.start()
        yield process


def _reachable(whole: Manifest) -> Manifest:
    """A webhook configuration as Kueue ships it, for a Kueue that is no Service."""
    kinds = [f"-{kind.lower()}" for kind in KINDS]
    hooks = [hook for hook in whole["webhooks"] if hook["clientConfig"]["service"]["path"].endswith(tuple(kinds))]
    for hook in hooks:
        where = f"https://{OUTSIDE}:{PORT}{hook['clientConfig']['service']['path']}"
        hook["clientConfig"] = {"url": where, "caBundle": _authority()}
        if "pods" in hook["rules"][0]["resources"]:
            hook["namespaceSelector"] = {"matchLabels": LABEL}
    name = f"kueue-{whole['metadata']['name']}"
    return {**whole, "metadata": {"name": name}, "webhooks": hooks}


def _authority() -> str:
    return base64.b64encode((PKI / "ca.crt").read_bytes()).decode()


def _all(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]
