"""The cluster's certificate authority, and the kubeconfig files that it makes possible."""

import json
import subprocess
from pathlib import Path

from tests.support.cluster.machine.places import API, API_SERVICE, DOMAIN, PKI, STATE

SERVICE = "kubernetes.default.svc"
COMPONENTS = {
    "admin": "/O=system:masters/CN=admin",
    "manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
}
"""Who speaks to the API server, and as whom."""
FRONT_PROXY = "front-proxy"
"""As whom the API server speaks to the servers of aggregated APIs."""


def make() -> None:
    """Make the authority, the API server's certificate, and keys and kubeconfig files for all components."""
    PKI.mkdir(parents=True)
    PKI.chmod(0o700)
    authority = ("-keyout", "ca.key", "-out", "ca.crt", "-days", "365", "-subj", "/CN=tandem-cluster")
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *authority)
    _openssl("genrsa", "-out", "sa.key", "2048")
    _openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    names = ["kubernetes", "kubernetes.default", SERVICE, f"{SERVICE}.{DOMAIN}", "localhost"]
    addresses = ["127.0.0.1", API, API_SERVICE]
    issue("apiserver", "/CN=kube-apiserver", [f"DNS:{name}" for name in names] + [f"IP:{one}" for one in addresses])
    issue(FRONT_PROXY, f"/CN={FRONT_PROXY}")
    for name, subject in COMPONENTS.items():
        issue(name, subject)
        kubeconfig(name)


def issue(name: str, subject: str, alternatives: list[str] | None = None) -> None:
    """Write NAME.crt and NAME.key, for a server as for a client."""
    request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
    _openssl("req", "-newkey", "rsa:2048", "-nodes", *request)
    lines = ["extendedKeyUsage=serverAuth,clientAuth"]
    if alternatives:
        lines.append(f"subjectAltName={','.join(alternatives)}")
    (PKI / f"{name}.ext").write_text("\n".join(lines) + "\n")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "365", "-extfile", f"{name}.ext")
    _openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.crt")


def kubeconfig(name: str) -> Path:
    """Write NAME.kubeconfig for somebody who has a certificate."""
    path = STATE / f"{name}.kubeconfig"
    server = {"server": f"https://{API}:6443", "certificate-authority": str(PKI / "ca.crt")}
    user = {"client-certificate": str(PKI / f"{name}.crt"), "client-key": str(PKI / f"{name}.key")}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "default",
        "clusters": [{"name": "default", "cluster": server}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "default", "context": {"cluster": "default", "user": name}}],
    }
    path.write_text(json.dumps(content))
    return path


def _openssl(*arguments: str) -> None:
    result = subprocess.run(["openssl", *arguments], cwd=PKI, capture_output=True, text=True)
    if result.returncode != 0:
        raise OSError(f"openssl {' '.join(arguments)}: {result.stderr.strip()}")
