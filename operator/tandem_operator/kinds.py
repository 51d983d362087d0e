"""The kinds of objects that the operator handles, and their API paths."""

from dataclasses import dataclass

from tandem.job.resource import API_VERSION, KIND


@dataclass(frozen=True)
class Kind:
    """One kind of namespaced objects."""

    api: str
    """apiVersion, for instance `tandem.dev/v1alpha1`."""
    name: str
    """The name as in `kind:`."""
    plural: str
    """The name as in paths."""

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of one object, or of all in a namespace, or of all."""
        root = "/api" if "/" not in self.api else "/apis"
        parts = [root, self.api, *(["namespaces", namespace] if namespace else []), self.plural]
        return "/".join([*parts, *(part for part in (name, subresource) if part)])

    @property
    def group(self) -> str:
        """Its API group, empty for the core."""
        return self.api.rpartition("/")[0]

    @property
    def version(self) -> str:
        """The version within the group."""
        return self.api.rpartition("/")[2]


JOB = Kind(API_VERSION, KIND, "distributedtrainingjobs")
POD = Kind("v1", "Pod", "pods")
SECRET = Kind("v1", "Secret", "secrets")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SERVICE = Kind("v1", "Service", "services")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
WORKLOAD = Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
RESOURCE_FLAVOR = Kind("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors")
LOCAL_QUEUE = Kind("kueue.x-k8s.io/v1beta2", "LocalQueue", "localqueues")
CLUSTER_QUEUE = Kind("kueue.x-k8s.io/v1beta2", "ClusterQueue", "clusterqueues")
VISIBLE_QUEUE = Kind("visibility.kueue.x-k8s.io/v1beta2", "LocalQueue", "localqueues")
"""A LocalQueue in Kueue's visibility API, which a server of Kueue's own answers."""
PRIORITY_CLASS = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses")

WATCHED = (POD, CONFIG_MAP, CLAIM, SERVICE, NETWORK_POLICY, WORKLOAD)
"""Kinds of objects that belong to jobs and are watched. Secrets are not: the right to watch some is the right to read
all."""
METADATA_ONLY = (CONFIG_MAP, NETWORK_POLICY)
"""Kinds of them of which only the metadata are needed: a list of tenants' large ones would take long."""
OPTIONAL = (WORKLOAD,)
"""Kinds of them that a cluster may lack, or not let the operator use."""
VERSIONS = {WORKLOAD.group: ("v1beta2", "v1beta1"), VISIBLE_QUEUE.group: ("v1beta2", "v1beta1")}
"""Versions of such groups in which all that the operator reads and writes is the same, the preferred one first: Kueue
has the first since 0.15."""
