"""Everything of the cluster that is not a node: etcd, API server, controllers, scheduler, service proxy and DNS."""

import json
from pathlib import Path

from tests.support.cluster.machine.certificates import FRONT_PROXY
from tests.support.cluster.machine.kubectl import Kubectl
from tests.support.cluster.machine.network import INSIDE
from tests.support.cluster.machine.places import API, AUDIT, DOMAIN, PKI, POD_CIDR, SERVICE_CIDR, STATE
from tests.support.cluster.machine.processes import Part, start, wait_until

ETCD = "http://127.0.0.1:2379"

DNS = """\
.:53 {{
 bind {API}
 errors
 kubernetes {DOMAIN} in-addr.arpa ip6.arpa {{
  endpoint https://{API}:6443
  kubeconfig {STATE}/admin.kubeconfig
  pods insecure
  ttl 1
  fallthrough
 }}
 template ANY ANY . {{
  rcode NXDOMAIN
 }}
}}
"""
"""The template answers at once for every name that is not the cluster's."""


AUDITED = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
    ],
}
"""Which verbs the operator uses is read from this (test_operator_rights.py)."""


class ControlPlane:
    """Starts the parts, from the programs in a folder."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._kubectl = Kubectl(binaries)

    def start(self) -> list[Part]:
        """Start everything, and return the parts when the API server answers.

        Raises:
            ClusterError: it does not.
        """
        etcd = self._start_etcd()
        server = self._start_api_server()
        ready = ("get", "--raw", "/readyz")
        wait_until("the API server", lambda: self._kubectl.succeeds(*ready), of=server)
        return [
            etcd,
            server,
            self._start_controllers(),
            self._start_scheduler(),
            self._start_proxy(),
            self._start_dns(),
        ]

    def _start(self, name: str, program: str, *options: str) -> Part:
        return start(name, self._binaries / program, *options, entering=INSIDE)

    def _start_etcd(self) -> Part:
        peers = "http://127.0.0.1:2380"
        listen = (f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}", f"--listen-peer-urls={peers}")
        # Nothing in it has to survive a power cut.
        return self._start("etcd", "etcd", f"--data-dir={STATE}/etcd", *listen, "--unsafe-no-fsync", "--log-level=warn")

    def _start_api_server(self) -> Part:
        policy = STATE / "audit-policy.json"
        policy.write_text(json.dumps(AUDITED))
        return self._start(
            "apiserver",
            "kube-apiserver",
            f"--etcd-servers={ETCD}",
            f"--advertise-address={API}",
            f"--bind-address={API}",
            "--secure-port=6443",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            f"--client-ca-file={PKI}/ca.crt",
            f"--tls-cert-file={PKI}/apiserver.crt",
            f"--tls-private-key-file={PKI}/apiserver.key",
            f"--service-account-key-file={PKI}/sa.pub",
            f"--service-account-signing-key-file={PKI}/sa.key",
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            f"--kubelet-client-certificate={PKI}/admin.crt",
            f"--kubelet-client-key={PKI}/admin.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged",
            f"--requestheader-client-ca-file={PKI}/ca.crt",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={PKI}/{FRONT_PROXY}.crt",
            f"--proxy-client-key-file={PKI}/{FRONT_PROXY}.key",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={AUDIT}",
        )

    def _start_controllers(self) -> Part:
        # The times make a silent node NotReady after about 20 s, twice as fast as by default.
        return self._start(
            "manager",
            "kube-controller-manager",
            f"--kubeconfig={STATE}/manager.kubeconfig",
            f"--root-ca-file={PKI}/ca.crt",
            f"--service-account-private-key-file={PKI}/sa.key",
            f"--cluster-signing-cert-file={PKI}/ca.crt",
            f"--cluster-signing-key-file={PKI}/ca.key",
            "--use-service-account-credentials",
            "--enable-hostpath-provisioner",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--node-monitor-grace-period=16s",
            "--node-monitor-period=2s",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )

    def _start_scheduler(self) -> Part:
        speed = ("--kube-api-qps=200", "--kube-api-burst=400")
        alone = ("--bind-address=127.0.0.1", "--leader-elect=false")
        return self._start("scheduler", "kube-scheduler", f"--kubeconfig={STATE}/scheduler.kubeconfig", *alone, *speed)

    def _start_proxy(self) -> Part:
        configuration = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "bindAddress": API,
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": f"{STATE}/proxy.kubeconfig"},
            "clusterCIDR": POD_CIDR,
            # Zero leaves the machine's own limits alone.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "hostnameOverride": "node-0",
        }
        path = STATE / "proxy.json"
        path.write_text(json.dumps(configuration))
        return self._start("proxy", "kube-proxy", f"--config={path}")

    def _start_dns(self) -> Part:
        path = STATE / "Corefile"
        path.write_text(DNS.format(API=API, DOMAIN=DOMAIN, STATE=STATE))
        return self._start("coredns", "coredns", "-conf", str(path))
