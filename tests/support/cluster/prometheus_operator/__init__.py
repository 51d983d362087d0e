"""The Prometheus operator for the tests: a process of this machine, compiled from a pinned Go module and kept, that
turns monitors and rules into a Prometheus' configuration for a while.

It runs with the rights of the cluster's administrator, beside the cluster and not in it: no image has to be built. Its
StatefulSets have no pods for the same reason; what it wrote for them is handed to a Prometheus of this machine, whose
rights are those that its users are told to give a Prometheus.
"""

import base64
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support.cluster.background import Background
from tests.support.cluster.operated import established, kubectl
from tests.support.cluster.pinned import Pinned
from tests.support.cluster.pods import Manifest, Namespace

MODULES = Path(__file__).parent / "modules"
OPERATOR = Pinned(MODULES / "operator", "github.com/prometheus-operator/prometheus-operator")
PROMETHEUS = Pinned(MODULES / "prometheus", "github.com/prometheus/prometheus")
ONLY_KUBERNETES = "remove_all_sd,enable_kubernetes_sd"
"""Of the ways of Prometheus to find targets: the others are of clouds, and would take minutes to compile."""
GROUP = "monitoring.coreos.com"
KINDS = ("prometheuses", "servicemonitors", "podmonitors", "prometheusrules", "probes")
"""Whose CRDs are installed: all that it waits for before it looks at a Prometheus."""
LABEL = {"release": "kube-prometheus-stack"}
"""What its Prometheus chooses monitors and rules by, as docs/install.md has it."""
NAME = "k8s"
ACCOUNT = "prometheus"
RULES = "/etc/prometheus/rules"
"""Where the operator mounts the ConfigMaps with rules."""
IN_A_POD = {"$(POD_NAME)": f"prometheus-{NAME}-0", "$(SHARD)": "0"}
"""What is filled into a configuration where it is used, by a container beside Prometheus."""
SYNCED = "successfully synced all caches"


@contextmanager
def running(binary: Path, folder: Path) -> Iterator[Path]:
    """A Prometheus operator, ready, with its CRDs; all are gone afterwards. Its log is what it gives."""
    crds = [OPERATOR.sources() / f"example/prometheus-operator-crd/{GROUP}_{kind}.yaml" for kind in KINDS]
    try:
        for crd in crds:
            kubectl("apply", "--server-side", "-f", str(crd))
        for crd in crds:
            established("-f", str(crd))
        with _process(binary, folder) as log:
            yield log
    finally:
        for crd in crds:
            kubectl("delete", "--ignore-not-found", "--timeout=100s", "-f", str(crd))


@dataclass(frozen=True)
class Programs:
    """Where they are."""

    operator: Path
    prometheus: Path
    """One that finds targets in a cluster: Debian's does not."""
    promtool: Path


def programs() -> Programs:
    """All three; compiled now if that has not happened yet.

    Raises:
        ClusterError: there is no Go, or one does not compile.
    """
    operator = OPERATOR.program("prometheus-operator", "cmd/operator", _flags(OPERATOR.version))
    prometheus, promtool = (
        PROMETHEUS.program(name, f"cmd/{name}", _flags(prometheus_version()), ONLY_KUBERNETES)
        for name in ("prometheus", "promtool")
    )
    return Programs(operator, prometheus, promtool)


def prometheus_version() -> str:
    """As Prometheus calls itself: its module v0.310.0 is 3.10.0."""
    _, together, patch = PROMETHEUS.version.split(".")
    return f"{together[:-2]}.{int(together[-2:])}.{patch}"


def _flags(version: str) -> str:
    return f"-s -w -X github.com/prometheus/common/version.Version={version}"


@dataclass(frozen=True)
class PrometheusObject:
    """A Prometheus in a namespace of its own, which chooses monitors and rules by LABEL from all namespaces."""

    namespace: Namespace

    def create(self, watched: Sequence[Namespace], access: Path) -> None:
        """Make it.

        Args:
            watched: namespaces that it may look for targets in.
            access: an empty folder of this machine; its token and the API server's certificate are put there.
        """
        self.namespace("create", "serviceaccount", ACCOUNT)
        for one in watched:
            for kind in self._rights():
                one("apply", "-f", "-", stdin=json.dumps(kind))
        token, authority = access / "token", access / "ca.crt"
        token.write_text(self.namespace("create", "token", ACCOUNT, "--duration=4h").strip())
        token.chmod(0o600)
        known = yaml.safe_load(kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "yaml"))
        cluster = known["clusters"][0]["cluster"]
        authority.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
        server = {
            "host": cluster["server"],
            "authorization": {"credentialsFile": str(token)},
            "tlsConfig": {"caFile": str(authority)},
        }
        selectors = {
            f"{kind}{what}": wanted
            for kind in ("serviceMonitor", "podMonitor", "rule")
            for what, wanted in {"Selector": {"matchLabels": LABEL}, "NamespaceSelector": {}}.items()
        }
        spec = {
            "version": f"v{prometheus_version()}",
            "replicas": 0,
            "evaluationInterval": "5s",
            "serviceAccountName": ACCOUNT,
            "apiserverConfig": server,
            **selectors,
        }
        self.namespace.create(
            {"apiVersion": f"{GROUP}/v1", "kind": "Prometheus", "metadata": {"name": NAME}, "spec": spec}
        )

    def delete(self) -> None:
        """Take it away, and with it what the operator made of it."""
        self.namespace("delete", "prometheus", NAME, "--timeout=60s")

    def made(self) -> list[str]:
        """Names of what the operator made of it: all that there is in a namespace of its own."""
        kinds = "statefulsets,pods,secrets,configmaps,services"
        return sorted({*self.namespace("get", kinds, "-o", "name").split()} - {"configmap/kube-root-ca.crt"})

    def text(self) -> str:
        """The configuration that the operator wrote last; empty before the first."""
        whole = self.namespace("get", "secret", f"prometheus-{NAME}", "--ignore-not-found", "-o", "json")
        packed = json.loads(whole or "{}").get("data", {}).get("prometheus.yaml.gz", "")
        return gzip.decompress(base64.b64decode(packed)).decode() if packed else ""

    def scrapes(self) -> dict[str, Manifest]:
        return {one["job_name"]: one for one in (yaml.safe_load(self.text()) or {}).get("scrape_configs") or []}

    def rules(self) -> dict[str, str]:
        """Name and text of each file with rules."""
        maps = [json.loads(self.namespace("get", one, "-o", "json")) for one in self._rules()]
        return {f"{one['metadata']['name']}/{name}": text for one in maps for name, text in one["data"].items()}

    def written(self, folder: Path) -> Path:
        """Configuration and rules as files, where a pod would find them; the path of the configuration."""
        for name, text in self.rules().items():
            path = folder / "rules" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        text = self.text()
        for what, value in {**IN_A_POD, RULES: str(folder / "rules")}.items():
            text = text.replace(what, value)
        configuration = folder / "prometheus.yaml"
        configuration.write_text(text)
        return configuration

    def _rules(self) -> list[str]:
        return self.namespace("get", "configmaps", "-l", f"prometheus-name={NAME}", "-o", "name").split()

    def _rights(self) -> list[Manifest]:
        """To find targets in a namespace, and nothing else."""
        api = "rbac.authorization.k8s.io"
        verbs = ["get", "list", "watch"]
        rules = [
            {"apiGroups": [""], "resources": ["services", "endpoints", "pods"], "verbs": verbs},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs},
        ]
        subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": self.namespace.name}
        named = {"apiVersion": f"{api}/v1", "metadata": {"name": ACCOUNT}}
        role = {"apiGroup": api, "kind": "Role", "name": ACCOUNT}
        return [
            {**named, "kind": "Role", "rules": rules},
            {**named, "kind": "RoleBinding", "roleRef": role, "subjects": [subject]},
        ]


@contextmanager
def _process(binary: Path, folder: Path) -> Iterator[Path]:
    log = folder / "prometheus-operator.log"
    with Background(log) as process:
        process.run([binary, "--web.listen-address=127.0.0.1:0"], {**os.environ, "GOMAXPROCS": "1"})
        process.becomes(lambda: SYNCED in process.log(), "a ready Prometheus operator", 120.0)
        yield log
