"""One node: a kubelet and a containerd of its own, an address on the bridge, and a control group for its pods."""

import json
from pathlib import Path
from typing import Any

from tests.support.cluster.machine import cgroups, leftovers, network, prerequisites
from tests.support.cluster.machine.certificates import issue, kubeconfig
from tests.support.cluster.machine.images import PAUSE
from tests.support.cluster.machine.kubectl import Kubectl
from tests.support.cluster.machine.places import (
    API,
    DOMAIN,
    PKI,
    POD_CIDR,
    SERVICE_CIDR,
    STATE,
    node_address,
    node_index,
    pod_range,
)
from tests.support.cluster.machine.processes import Part, kill, start, wait_until

CONTAINERD = """\
version = 2
root = "{root}/containerd"
state = "{root}/run"
[grpc]
  address = "{root}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  stream_server_port = "0"
  sandbox_image = "{pause}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    discard_unpacked_layers = true
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{root}/runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{root}/cni"
"""
READY_SECONDS = 120


class Node:
    """A node, by its name. Its files are in a folder of that name, and stay there while it is off.

    Raises:
        ValueError: no node is called so.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = node_address(name)
        self._root = STATE / name
        self._kubelet: Part | None = None

    def start(self, binaries: Path) -> None:
        """Start it. It is Ready a few seconds later.

        Raises:
            ClusterError: its containerd does not come up.
        """
        for part in ("cni", "kubelet", "pods"):
            (self._root / part).mkdir(parents=True, exist_ok=True)
        network.add_address(self.address)
        if not (PKI / f"{self.name}.crt").exists():
            subject = f"/O=system:nodes/CN=system:node:{self.name}"
            issue(self.name, subject, [f"DNS:{self.name}", f"IP:{self.address}"])
            kubeconfig(self.name)
        cgroups.make(self.name)
        self._start_containerd()
        self._kubelet = self._start_kubelet(binaries)

    def kill(self) -> None:
        """Cut its pods off and end them, its kubelet and its containerd at once, as a power cut would: nobody says
        goodbye, and whoever asks for them gets no answer."""
        network.cut(self._root / "run" / "io.containerd.grpc.v1.cri" / "netns")
        for part in ("kubelet", "containerd"):
            kill(f"{self.name}-{part}")
        cgroups.kill(cgroups.group(self.name))
        leftovers.remove_sockets(self._root)
        (self._root / "containerd.sock").unlink(missing_ok=True)

    def wait_until_ready(self, kubectl: Kubectl) -> None:
        """Having started it, wait until pods can start here.

        Raises:
            ClusterError: that takes too long, or its kubelet ended.
        """
        assert self._kubelet, "start it first"
        ready = ("wait", f"node/{self.name}", "--for=condition=Ready", "--timeout=1s")
        wait_until(self.name, lambda: kubectl.succeeds(*ready), of=self._kubelet, seconds=READY_SECONDS)

    def advertise_gpus(self, count: int, kubectl: Kubectl) -> None:
        """Have the scheduler count so many GPUs here."""
        patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
        kubectl("patch", "node", self.name, "--subresource=status", "--type=json", "-p", json.dumps(patch))

    def _start_containerd(self) -> None:
        (self._root / "cni" / "10-pods.conflist").write_text(json.dumps(self._pod_network()))
        settings = CONTAINERD.format(root=self._root, pause=PAUSE, plugins=prerequisites.plugin_folder())
        (self._root / "containerd.toml").write_text(settings)
        command = ("containerd", "--config", self._root / "containerd.toml")
        part = start(f"{self.name}-containerd", *command, entering=network.INSIDE)
        up = (self._root / "containerd.sock").exists
        wait_until(f"{self.name}'s containerd", up, of=part)

    def _start_kubelet(self, binaries: Path) -> Part:
        (self._root / "resolv.conf").write_text("")
        (self._root / "kubelet.json").write_text(json.dumps(self._kubelet_settings()))
        return start(
            f"{self.name}-kubelet",
            binaries / "kubelet",
            f"--config={self._root}/kubelet.json",
            f"--kubeconfig={STATE}/{self.name}.kubeconfig",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--root-dir={self._root}/kubelet",
            entering=network.INSIDE,
        )

    def _pod_network(self) -> dict[str, Any]:
        first, last = pod_range(self.name)
        addresses = {
            "type": "host-local",
            "dataDir": str(self._root / "ipam"),
            "ranges": [[{"subnet": POD_CIDR, "rangeStart": first, "rangeEnd": last, "gateway": API}]],
            "routes": [{"dst": SERVICE_CIDR, "gw": API}],
        }
        bridge = {"type": "bridge", "bridge": network.BRIDGE, "isGateway": False, "ipMasq": False, "hairpinMode": True}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{**bridge, "ipam": addresses}]}

    def _kubelet_settings(self) -> dict[str, Any]:
        # Two nodes share the machine's ports in all but the address; health and API still get ports of their own.
        ports = 10 * node_index(self.name)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "port": 10250 + ports,
            "healthzPort": 10248 + ports,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(PKI / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(PKI / f"{self.name}.crt"),
            "tlsPrivateKeyFile": str(PKI / f"{self.name}.key"),
            "clusterDomain": DOMAIN,
            "clusterDNS": [API],
            "resolvConf": str(self._root / "resolv.conf"),
            "containerRuntimeEndpoint": f"unix://{self._root}/containerd.sock",
            "podLogsDir": str(self._root / "pods"),
            "volumePluginDir": str(self._root / "plugins"),
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroups.group(self.name)}",
            "oomScoreAdj": 0,
            "failSwapOn": False,
            "maxPods": 500,
            # A developer's disk may be nearly full, and the nodes share it: pods are not evicted for that.
            "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "3s",
            "registerWithTaints": [],
            "serializeImagePulls": False,
        }
