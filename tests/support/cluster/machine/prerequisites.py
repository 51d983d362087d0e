"""What the machine has to have before a cluster can start. What Debian's package manager can bring is installed."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.cluster.machine import ClusterError

PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "socat": "socat",
    "ethtool": "ethtool",
    "openssl": "openssl",
    "buildah": "buildah",
    "docker-registry": "docker-registry",
    "debootstrap": "debootstrap",
    "chromium": "chromium",
}
"""Each program that is needed, and the Debian package it comes in."""
PLUGINS = "containernetworking-plugins"
PLUGIN_FOLDERS = (Path("/usr/lib/cni"), Path("/") / "opt" / "cni" / "bin")


def prepare() -> None:
    """Install what is missing.

    Raises:
        ClusterError: something is missing that cannot be installed here.
    """
    packages = missing_packages()
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"install what Debian calls {', '.join(packages)}: there is no apt-get here that could")
    print(f"installing {', '.join(packages)}", flush=True)
    _apt("update", "-qq")
    _apt("install", "-y", "-qq", "--no-install-recommends", *packages)
    if still := missing_packages():
        raise ClusterError(f"apt-get installed {', '.join(still)}, but their programs are not in PATH")


def plugin_folder() -> Path | None:
    """Where the CNI plugins are."""
    return next((folder for folder in PLUGIN_FOLDERS if (folder / "bridge").exists()), None)


def missing_packages() -> list[str]:
    """The packages whose programs are not on this machine."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return missing if plugin_folder() else [*missing, PLUGINS]


def require_machine() -> None:
    """Make sure of what cannot be installed.

    Raises:
        ClusterError: not Linux, not root, or no Go.
    """
    if not Path("/sys/fs/cgroup").is_dir():
        raise ClusterError(
            "starting a cluster needs Linux with control groups; or set KUBECONFIG to a cluster that runs"
        )
    if os.geteuid() != 0:
        raise ClusterError("starting a cluster needs root; run this as root, or set KUBECONFIG to a cluster that runs")
    if shutil.which("go") is None:
        raise ClusterError("building Kubernetes needs Go in PATH; install it, or set KUBECONFIG to a cluster that runs")


def _apt(*arguments: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(f"apt-get {' '.join(arguments)} failed:\n{result.stderr.strip()}")
