"""The NetworkPolicy of a job, enforced: it trains, the operator and Prometheus reach what they need, and nobody else
reaches its stores, its coordinator or its numbers."""

import json
from collections.abc import Iterator, Sequence

import pytest

from tandem_operator import names
from tandem_operator.pods import METRICS_PORT, PORT
from tests.support.cluster import ON_OUR_OWN
from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images
from tests.support.cluster.operated import CRD, LONG, Job, kubectl, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, pod, restricted
from tests.support.cluster.policies import Enforcer
from tests.support.waiting import until

pytestmark = [pytest.mark.full("operator", "charts"), ON_OUR_OWN]
STORES = range(29400, 29410)
WAITS = ("python3", "-c", "import signal; signal.pause()")
REACH = """
import concurrent.futures, socket, sys
def reach(place):
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 3).close()
    except TimeoutError:
        return "silent"
    except OSError:
        return "refused"
    return "open"
with concurrent.futures.ThreadPoolExecutor(64) as all_at_once:
    print(*all_at_once.map(reach, sys.argv[1:]))
"""
PROMETHEUS = {"app": "prometheus"}


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Namespace]:
    """Another tenant's namespace."""
    with restricted() as found:
        yield found


def bystander(name: str, images: Images, labels: dict[str, str]) -> Manifest:
    """A pod that does nothing until it is told whom to reach."""
    spec = pod([container("own", images.operator, *WAITS)])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def reached(namespace: Namespace, by: str, places: Sequence[str]) -> dict[str, str]:
    """What each place says to somebody who connects: `open`, `refused`, or `silent`."""
    said = namespace("exec", by, "--", "python3", "-c", REACH, *places).split()
    return dict(zip(places, said, strict=True))


def opened(found: dict[str, str]) -> set[str]:
    return {place for place, said in found.items() if said == "open"}


def address(pod: Manifest) -> str:
    return str(pod["status"]["podIP"])


def alive(job: Job, *roles: str) -> list[Manifest]:
    """Its pods of some roles that run and are not about to go."""
    return [one for role in roles for one in job.pods(role) if one["metadata"]["name"] in job.live(role)]


def stores(job: Job) -> list[str]:
    """Where stores of its workers may listen."""
    return [f"{address(one)}:{port}" for one in alive(job, "worker") for port in STORES]


def is_whole_without(job: Job, lost: set[str]) -> bool:
    """Whether both workers and the coordinator run, and none of those that were deleted is there."""
    counts = len(job.live("worker")), len(job.live("coordinator"))
    return counts == (2, 1) and not lost & {one["metadata"]["name"] for role in names.ROLES for one in job.pods(role)}


def uids(job: Job) -> set[str]:
    return {one["metadata"]["uid"] for role in names.ROLES for one in job.pods(role)}


@pytest.mark.timeout(900)
def test_a_job_trains_and_is_reached_by_its_own_the_operator_and_prometheus_alone(
    helm: Helm, images: Images, system: Namespace, namespace: Namespace, elsewhere: Namespace, released: None
) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    home = {"matchLabels": {"kubernetes.io/metadata.name": system.name}}
    peer = {"namespaceSelector": home, "podSelector": {"matchLabels": PROMETHEUS}}
    switched = {"enabled": True, "metricsFrom": [peer]}
    values = {
        **image_values(images),
        "crds": {"enabled": False},
        "operator": {"namespaces": [namespace.name]},
        "jobs": {"networkPolicy": switched},
    }
    at = ("tandem", CHART, f"--namespace={system.name}", "--wait", "--timeout=150s")
    helm("install", *at, values=values)

    job = Job(namespace, "digits")
    asked = {"replicas": 2, "storePorts": {"first": STORES[0], "last": STORES[-1]}}
    job.apply(manifest("digits", trainer=LONG, workers=asked))
    whom = {
        "elsewhere": (elsewhere, {names.JOB: job.name}),
        "neighbour": (namespace, {names.JOB: "another"}),
        "prometheus": (system, PROMETHEUS),
    }
    for name, (where, labels) in whom.items():
        where.create(bystander(name, images, labels))
    for name, (where, _) in whom.items():
        where("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=120s", seconds=130)
    job.trains()

    (coordinator,) = alive(job, "coordinator")
    service = namespace.get("service", names.coordinator(job.name))["spec"]["clusterIP"]
    requests = [f"{address(coordinator)}:{PORT}", f"{service}:{PORT}"]
    numbers = [f"{address(coordinator)}:{METRICS_PORT}"]
    before = opened(reached(elsewhere, "elsewhere", [*requests, *numbers, *stores(job)]))
    assert {*requests, *numbers} < before, "nobody enforces the policy yet, and a store listens"

    policy = names.network_policy(job.name)
    with Enforcer(namespace.name) as enforcer:
        # Its pods have to find each other anew: another worker, and another coordinator.
        lost = {job.live("worker")[0], coordinator["metadata"]["name"]}
        namespace("delete", "pod", *lost, "--wait=false")
        job.becomes(lambda: is_whole_without(job, lost), "others in their places")
        job.trains(beyond=job.step, seconds=240)
        inside = [address(one) for one in alive(job, *names.ROLES)]
        until(lambda: all(enforcer.keeps(one) for one in inside), "rules for every pod", 30.0)
        (coordinator,) = alive(job, "coordinator")
        requests[0], numbers = f"{address(coordinator)}:{PORT}", [f"{address(coordinator)}:{METRICS_PORT}"]
        everything = [*requests, *numbers, *stores(job)]
        for stranger in ("elsewhere", "neighbour"):
            found = reached(whom[stranger][0], stranger, everything)
            assert set(found.values()) == {"silent"}, (stranger, found)
        assert opened(reached(system, "prometheus", everything)) == set(numbers)
        assert opened(reached(system, "deployment/tandem-operator", everything)) == set(requests)
        worker = job.live("worker")[0]
        assert opened(reached(namespace, worker, everything)) > {*requests, *numbers}, "a store, too"
        # What the operator writes, it has heard from the coordinator.
        job.trains(beyond=job.step)

        there = uids(job)
        values["jobs"] = {"networkPolicy": {**switched, "enabled": False}}
        helm("upgrade", *at, values=values)
        gone = ("get", "networkpolicy", policy, "--ignore-not-found", "-o", "name")
        until(lambda: not namespace(*gone), "no policy where none is wanted", 60.0, otherwise=job.describe)
        until(lambda: not enforcer.keeps(address(coordinator)), "no rules without a policy", 30.0)
        assert opened(reached(elsewhere, "elsewhere", requests)) == set(requests)
        assert uids(job) == there, "nobody was restarted for it"

        values["jobs"] = {"networkPolicy": switched}
        helm("upgrade", *at, values=values)
        until(lambda: enforcer.keeps(address(coordinator)), "a policy for a job that trains", 60.0)
        owner = json.loads(namespace("get", "networkpolicy", policy, "-o", "json"))["metadata"]["ownerReferences"][0]
        assert owner["uid"] == namespace.get("dtj", job.name)["metadata"]["uid"]
        namespace("delete", "dtj", job.name, "--wait=false")
        until(lambda: not namespace(*gone), "it goes with its job", 60.0)
    assert "event=look-broken" not in system("logs", "deployment/tandem-operator")
