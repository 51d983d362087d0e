"""A real Kubernetes on one Linux machine, without Docker.

Every part is the real one. etcd, the API server, controller manager, scheduler, kube-proxy, kubelet, kubectl and
CoreDNS are built once from the pinned Go modules in `modules/`; containerd, runc and the CNI plugins are the
distribution's. Each node has its own kubelet and its own containerd. `nvidia.com/gpu` is advertised as an extended
resource, so the scheduler counts GPUs that are not there: a pod that asks for one runs on the CPU.

The whole cluster lives in a network namespace of its own (`network.py`): its bridges, addresses, ports and iptables
rules never meet those of the machine, or of another Kubernetes on it, and go away with the namespace. One link leads
in, so that tests reach the API server, pods and services as they are. Pods reach nothing outside.

Files are under one folder (`places.py`), processes carry a mark in their environment (`processes.py`), and control
groups have one prefix (`cgroups.py`): what belongs to the cluster is found and removed at any time, also after a run
that was killed. Rejected: files with process ids, which name somebody else's process after a while; kind and minikube,
which need images and downloads from places that not every machine reaches.

Traps met, each of which cost hours:

- containerd must not lower the OOM score of sandboxes where CAP_SYS_RESOURCE is missing (`restrict_oom_score_adj`).
- DNS must answer NXDOMAIN at once for foreign names, or gloo and TCPStore wait 10 s on reverse look-ups.
- A bridge without an address of its own changes it as pods come and go, and then every pod loses the API server, DNS
  and its peers for seconds.
- A force-deleted pod still gets SIGTERM and its grace period from the kubelet. For a power cut use `kill-node`, or kill
  inside the pod.
- kubelet refuses cgroup v1 unless told otherwise (`failCgroupV1`), and sets machine-wide sysctls that nobody puts back.
"""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says why, and what to do."""
