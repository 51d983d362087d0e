"""What a tenant may do in a namespace of his own: attack by attack, with the weakness that it looks for, and what
becomes of it. `ATTACKS` is the whole list; tests/cluster/test_hostile_objects.py tries those that are objects alone.

Everything is done in the tenant's own name, with the role `admin` of his namespace and all rights on its jobs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_operator import kinds, names
from tandem_operator.pods import PORT
from tests.support import ROOT
from tests.support.cluster.operated import manifest, secret
from tests.support.cluster.pods import Manifest, container, named, pod
from tests.support.cluster.tenants import Tenant

SCRIPTS = ROOT / "tests/support/scripts"
PAUSE = "import signal; signal.pause()"
MANY_DIGITS = "9" * 5_000
"""Python makes no number of so many by default."""
MAX_WORDS = 2_000
"""Of a message."""
DEEP = 5_000
"""Levels of a template. Python parses a thousand by default."""
MAX_REPLICAS = 10_000
"""Of a job, as the CRD has it."""
NOWHERE: Manifest = {"spec": {"nodeSelector": {"example.org/nowhere": "true"}}}
"""A template of pods that are never placed, and cost nothing."""


@dataclass(frozen=True)
class Attack:
    name: str
    finding: str
    """The weakness that it looks for, as issue 15's list of findings numbers it."""
    does: Callable[[Tenant], object]
    fails: Callable[[Tenant], object]
    """Whether what should become of it has: what he does himself harms nobody, or is refused with a reason."""
    needs_pods: bool = False
    """It is more than objects: pods of it run."""


def status(tenant: Tenant, job: str) -> Manifest:
    """The status alone: Python would not parse the whole of each job."""
    found: Manifest = json.loads(tenant.namespace("get", "dtj", job, "-o", "jsonpath={.status}") or "{}")
    return found


def reasons(tenant: Tenant, job: str) -> dict[str, str]:
    return {one["type"]: one["reason"] for one in status(tenant, job).get("conditions", [])}


def idle(name: str, **spec: Any) -> Manifest:
    """A job whose pods are never placed."""
    workers = {"replicas": 1, "template": NOWHERE, **spec.pop("workers", {})}
    whole = {"trainer": {"command": ["true"]}, "coordinator": {"template": NOWHERE}, "evaluators": {"replicas": 0}}
    return manifest(name, workers=workers, **whole, **spec)


def holding(tenant: Tenant, name: str, *beside: Manifest, **workers: Any) -> Manifest:
    """A job whose workers are placed, and do nothing.

    Args:
        beside: other containers of theirs.
    """
    containers = [{"name": "worker", "image": tenant.images.operator, "command": ["python3", "-c", PAUSE]}, *beside]
    return idle(name, workers={"replicas": 1, **workers, "template": {"spec": {"containers": containers}}})


def labels_of(job: str, role: str, index: str = "0") -> dict[str, str]:
    return {names.JOB: job, names.ROLE: role, names.INDEX: index}


def exists(tenant: Tenant, kind: str, name: str) -> bool:
    return bool(tenant.namespace("get", kind, name, "--ignore-not-found", "-o", "name"))


def is_untouched(tenant: Tenant, name: str) -> bool:
    """Whether a pod is there and nobody has told it to go."""
    return exists(tenant, "pod", name) and "deletionTimestamp" not in tenant.namespace.get("pod", name)["metadata"]


# Objects


def numbers(tenant: Tenant) -> None:
    """A pod and a ConfigMap whose numbers have 5,000 digits."""
    annotations = dict.fromkeys((names.FAILURES, names.GROUP_SIZE, names.ENDPOINT, names.TEMPLATE), MANY_DIGITS)
    labels = {**labels_of("digits", names.WORKER, "9" * 60), names.GROUP: "g", names.QUEUE: "q"}
    metadata = {"name": "numbers", "labels": labels, "annotations": annotations}
    nobodys = pod([container("own", "localhost:5000/nobody/has-this:1")], nodeSelector=NOWHERE["spec"]["nodeSelector"])
    tenant.makes(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": nobodys},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**metadata, "name": names.job_file("digits")}},
    )


def in_a_template(name: str, template: Manifest) -> Callable[[Tenant], object]:
    return lambda tenant: tenant.makes(idle(name, workers={"template": template}))


def names_taken(tenant: Tenant) -> None:
    """A claim, a Service and a ConfigMap under the names of a job's, and then that job."""
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    tenant.makes(
        named("PersistentVolumeClaim", names.checkpoints("taken"), spec=claim),
        named("ConfigMap", names.job_file("taken")),
        named("Service", names.coordinator("taken"), spec={"ports": [{"port": PORT}], "selector": {"app": "nobody"}}),
        idle("taken"),
    )


def is_left_alone(tenant: Tenant) -> bool:
    """Whether nobody has written to what was there before the job."""
    there = (("pvc", names.checkpoints), ("configmap", names.job_file), ("service", names.coordinator))
    mine = [tenant.namespace.get(kind, name("taken"))["metadata"] for kind, name in there]
    return reasons(tenant, "taken").get("Initialized") == "NameTaken" and not any(
        names.JOB in one["labels"] or "ownerReferences" in one for one in mine
    )


def colliding(tenant: Tenant) -> None:
    """Two jobs of long names that differ at the end alone, and one called as an object of another."""
    for name in ("a" * 62 + "b", "a" * 62 + "c", "taken-coordinator"):
        tenant.makes(idle(name))


def are_apart(tenant: Tenant) -> bool:
    """Whether each has a Service of its own."""
    services = json.loads(tenant.namespace("get", "services", "-o", "json"))["items"]
    owned = {one["metadata"]["labels"].get(names.JOB): one["metadata"]["name"] for one in services}
    return len({owned.get(name) for name in ("a" * 62 + "b", "a" * 62 + "c", "taken-coordinator")} - {None}) == 3


def another_owner(tenant: Tenant) -> None:
    """A worker and a coordinator that call the victim's job, of another namespace, their owner."""
    assert tenant.victim is not None
    for role in (names.WORKER, names.COORDINATOR):
        owner = {"apiVersion": kinds.JOB.api, "kind": kinds.JOB.name, "name": tenant.victim.job}
        metadata = {"ownerReferences": [{**owner, "uid": tenant.victim.uid, "controller": True}]}
        tenant.runs(f"child-{role}", PAUSE, labels=labels_of(tenant.victim.job, role), **metadata)


def absurd(tenant: Tenant) -> None:
    """The most of everything that the API server takes, under a quota that never gives way."""
    tenant.makes(
        idle(
            "absurd",
            workers={"replicas": MAX_REPLICAS, "minReplicas": MAX_REPLICAS, "processesPerReplica": 64},
            runPolicy={"activeDeadlineSeconds": 2**53 - 1},
            elasticity={"maxRestarts": 2**53 - 1},
        )
    )


def rival(tenant: Tenant) -> None:
    """A job that holds most of the GPUs and waits for more than there are."""
    many = {"replicas": 3, "minReplicas": 3, "resources": {"limits": {"nvidia.com/gpu": 3}}, "processesPerReplica": 1}
    tenant.makes(holding(tenant, "rival", **many))


# Pods


def strangers(tenant: Tenant) -> None:
    """Pods with the labels of a job's, which nobody owns, one of each role."""
    tenant.makes(idle("strange"))
    for role in names.ROLES:
        tenant.runs(f"strange-{role}", PAUSE, labels=labels_of("strange", role))


FORGED: Mapping[str, str] = {
    "redirects": "event=coordinator-unreadable endpoint={} error='HTTP status 307'",
    "floods": "event=coordinator-unreadable endpoint={} error='more than",
    "refuses": "event=coordinator-unreadable endpoint={} error='HTTP status 500'",
    "packs": "event=coordinator-unreadable endpoint={} error='it is packed",
    "stalls": "",
}
"""What the operator says of coordinators that are none: it neither follows, nor reads on, nor unpacks, nor waits."""


def forges(kind: str) -> Callable[[Tenant], object]:
    """A job whose coordinator is the tenant's own, with all the marks of the one that the operator has made. It is
    ready before it has them: of two coordinators the operator keeps the one that is, and removes its own."""

    def does(tenant: Tenant) -> None:
        assert tenant.victim is not None
        name = f"forged-{kind}"
        pod = f"{name}-coordinator"
        whose = f"{tenant.victim.namespace}/{tenant.victim.job}"
        tenant.runs(pod, (SCRIPTS / "forged_coordinator.py").read_text(), kind, whose)
        tenant("wait", "pod", pod, "--for=condition=Ready", "--timeout=60s")
        tenant.makes(idle(name))
        job = tenant.job(name)
        (real,) = job.becomes(lambda: job.pods(names.COORDINATOR), "its coordinator")
        marks = {key: real["metadata"][key] for key in ("labels", "annotations")}
        # To hold up the end of its owner he would need a right on that.
        owners = [{**one, "blockOwnerDeletion": False} for one in real["metadata"]["ownerReferences"]]
        tenant("patch", "pod", pod, "-p", json.dumps({"metadata": {"ownerReferences": owners, **marks}}))

    return does


def own_token(tenant: Tenant, job: str) -> str:
    return secret(tenant.namespace, names.token(job))


def is_given_his_own(kind: str) -> Callable[[Tenant], bool]:
    """Whether a forged coordinator was asked, with the token that the tenant has anyway, and to no avail."""

    def look(tenant: Tenant) -> bool:
        pod = f"forged-{kind}-coordinator"
        said = tenant.namespace("logs", pod).splitlines()
        given = {line.split()[-1] for line in said if line.startswith("was given Bearer")}
        endpoint = f"{tenant.namespace.get('pod', pod)['status']['podIP']}:{PORT}"
        told = FORGED[kind].format(endpoint) in tenant.operator.log()
        return told and given == {own_token(tenant, f"forged-{kind}")}

    return look


def lies_of_itself(tenant: Tenant) -> bool:
    """Whether the job of a coordinator that lies has failed, as it says, in words that are short and printable."""
    said = status(tenant, "forged-lies")
    message = str(said.get("message"))
    return said.get("phase") == "Failed" and len(message) <= MAX_WORDS and message.isprintable()


def tries_tokens(tenant: Tenant) -> None:
    """Every request to the victim's coordinator with another job's token, and without; also by way of a Service of his
    own whose endpoint is the victim's coordinator."""
    assert tenant.victim is not None
    tenant.makes(idle("keys"))
    tenant.job("keys").becomes(lambda: exists(tenant, "secret", names.token("keys")), "its token")
    port = {"name": "http", "port": PORT, "protocol": "TCP"}
    posing = named("EndpointSlice", "posing", "discovery.k8s.io/v1", addressType="IPv4", ports=[port])
    posing["metadata"]["labels"]["kubernetes.io/service-name"] = "posing"
    posing["endpoints"] = [{"addresses": [tenant.victim.coordinator], "conditions": {"ready": True}}]
    said = tenant.makes(named("Service", "posing", spec={"ports": [port]}), posing)
    assert "Error" not in said, said
    service = tenant.namespace.get("service", "posing")["spec"]["clusterIP"]
    places = [f"{place}:{PORT}" for place in (tenant.victim.coordinator, tenant.victim.service, service)]
    script = (SCRIPTS / "try_tokens.py").read_text()
    tenant.runs("keys-tries", script, own_token(tenant, "keys"), *places)


def opens_nothing(tenant: Tenant) -> bool:
    """Whether every request at every place was turned away for want of the token, or for its size."""
    said = [line for line in tenant.namespace("logs", "keys-tries").splitlines() if line.startswith("answered")]
    found = [set(answers) for answers in json.loads(said[0].partition(" ")[2]).values()] if said else []
    return len(found) == 3 and all("401" in answers and answers <= TURNED_AWAY for answers in found)


TURNED_AWAY = {"400", "401", "413", "URLError", "ConnectionResetError", "BrokenPipeError"}
"""No token, too large, and that the connection was closed while too much was sent."""


def again(tenant: Tenant) -> None:
    """A job that is made again at once under its name, again and again."""
    for _ in range(3):
        tenant.makes(idle("again"))
        tenant.job("again").becomes(lambda: tenant.job("again").pods(names.WORKER), "a worker")
        tenant("delete", "dtj", "again", "--wait=true", "--cascade=background")
    tenant.makes(idle("again"))
    tenant.job("again").becomes(lambda: has_its_own(tenant), "a worker of the last one's own")


def has_its_own(tenant: Tenant) -> bool:
    """Whether the last of them has a pod of its own in each place, and has not ended for what the others left."""
    job = tenant.job("again")
    uid = tenant.namespace.get("dtj", "again")["metadata"]["uid"]
    owners = [one["metadata"]["ownerReferences"][0]["uid"] for one in job.pods(names.WORKER)]
    return owners == [uid] and job.phase not in ("Failed", "Succeeded")


def sidecars(tenant: Tenant) -> None:
    """A job whose workers have one container that ends well at once and one that crashes."""
    beside = {"well": "pass", "badly": "1 / 0"}
    ends = [container(name, tenant.images.operator, "python3", "-c", code) for name, code in beside.items()]
    tenant.makes(holding(tenant, "sidecars", *ends))


def worker_runs_on(tenant: Tenant) -> bool:
    """Whether the worker beside them is the first one, and at work."""
    job = tenant.job("sidecars")
    states = [
        {one["name"]: next(iter(one["state"])) for one in found["status"].get("containerStatuses", [])}
        for found in job.pods(names.WORKER)
    ]
    return states == [{"worker": "running", "well": "terminated", "badly": "terminated"}]


def relabelled(tenant: Tenant) -> None:
    """A worker that is given to another job by its label, and deleted then."""
    tenant.makes(idle("from"), idle("to"))
    job = tenant.job("from")
    (worker,) = job.becomes(lambda: job.pods(names.WORKER), "its worker")
    tenant("label", "pod", worker["metadata"]["name"], f"{names.JOB}=to", "--overwrite")
    tenant("delete", "pod", worker["metadata"]["name"], "--wait=false")
    job.becomes(lambda: each_has_one(tenant), "a worker in each")


def each_has_one(tenant: Tenant) -> bool:
    """Whether both jobs have one worker, their own."""
    for name in ("from", "to"):
        uid = tenant.namespace.get("dtj", name)["metadata"]["uid"]
        owners = [one["metadata"]["ownerReferences"][0]["uid"] for one in tenant.job(name).pods(names.WORKER)]
        if owners != [uid]:
            return False
    return True


def has_a_phase(name: str) -> Callable[[Tenant], bool]:
    return lambda tenant: status(tenant, name).get("phase") in ("Pending", "Starting", "Running")


def is_refused(name: str, why: str = "InvalidSpec") -> Callable[[Tenant], bool]:
    return lambda tenant: reasons(tenant, name).get("Stalled") == why


QUEUED = {"metadata": {"labels": {names.GROUP: "theirs"}, "annotations": {names.GROUP_SIZE: MANY_DIGITS}}}
NULLS = {"metadata": {"labels": None}, "spec": {"containers": None, "tolerations": None, **NOWHERE["spec"]}}
HUGE = {"metadata": {"annotations": {f"a{number}": "x" * 1_000 for number in range(200)}}, **NOWHERE}

ATTACKS: Sequence[Attack] = (
    Attack("numbers of 5,000 digits", "A1", numbers, lambda tenant: is_untouched(tenant, "numbers")),
    Attack("a queue's count of 5,000 digits", "A1, A7", in_a_template("queued", QUEUED), is_refused("queued")),
    Attack(
        "a template 5,000 levels deep",
        "A2",
        lambda tenant: tenant.sends("deep", '{"a":' * DEEP + "1" + "}" * DEEP),
        is_refused("deep"),
    ),
    Attack(
        "a template of 200,000 parts",
        "A2",
        lambda tenant: tenant.sends("wide", '{"a": [' + "{}," * 200_000 + "{}]}"),
        is_refused("wide"),
    ),
    Attack("a template with 200 kB of annotations", "A2", in_a_template("huge", HUGE), has_a_phase("huge")),
    Attack("a template full of nulls", "A9", in_a_template("nulls", NULLS), has_a_phase("nulls")),
    Attack(
        "odd amounts",
        "A9",
        lambda tenant: tenant.makes(idle("odd", workers={"resources": {"requests": {"cpu": "1k", "memory": "1E"}}})),
        has_a_phase("odd"),
    ),
    Attack(
        "our labels in a template",
        "A7",
        in_a_template("labelled", {"metadata": {"labels": {names.JOB: "another"}}}),
        is_refused("labelled"),
    ),
    Attack("objects under the names of a job's", "A8", names_taken, is_left_alone),
    Attack("names that are cut to the same", "A8", colliding, are_apart),
    Attack(
        "pods that call another's job their owner",
        "A8",
        another_owner,
        lambda tenant: not any(exists(tenant, "pod", f"child-{role}") for role in (names.WORKER, names.COORDINATOR)),
        needs_pods=True,
    ),
    Attack("a rival that never begins", "A6", rival, has_a_phase("rival"), needs_pods=True),
    Attack(
        "pods with a job's labels",
        "A8",
        strangers,
        lambda tenant: all(is_untouched(tenant, f"strange-{role}") for role in names.ROLES),
        needs_pods=True,
    ),
    *(
        Attack(f"a coordinator that {kind}", "A3, A5", forges(kind), is_given_his_own(kind), needs_pods=True)
        for kind in FORGED
    ),
    Attack("a coordinator that lies", "A3", forges("lies"), lies_of_itself, needs_pods=True),
    Attack("another job's token, also through a Service", "A4, B9", tries_tokens, opens_nothing, needs_pods=True),
    Attack("a job that is made again at once", "B1", again, has_its_own),
    Attack("sidecars that end, well and badly", "C2", sidecars, worker_runs_on, needs_pods=True),
    Attack("a pod that changes its job", "A10", relabelled, each_has_one),
    Attack(
        "a job of 10,000 workers under a quota that never gives way",
        "C6",
        absurd,
        lambda tenant: "QuotaExceeded" in reasons(tenant, "absurd").values(),
    ),
)
"""They are tried in this order: the last one leaves no room for any other."""
