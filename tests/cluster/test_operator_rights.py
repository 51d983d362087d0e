"""The operator uses every right that it has, and no other: seen in the API server's audit log."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tandem_operator import kinds, names, rbac
from tandem_operator.options import KEY_SECRET
from tests.support.cluster import ON_OUR_OWN
from tests.support.cluster.images import Images
from tests.support.cluster.machine.places import AUDIT
from tests.support.cluster.operated import (
    ACCOUNT,
    LONG,
    Job,
    Operator,
    manifest,
    script_beside_a_sidecar,
    with_a_volume_that_does_not_mount,
)
from tests.support.cluster.pods import Manifest, Namespace
from tests.support.waiting import until

pytestmark = [pytest.mark.full("operator", "charts"), ON_OUR_OWN]
Verbs = dict[tuple[str, str], set[str]]
"""By API group and resource."""
UPDATED = {
    "configmap": names.job_file,
    "persistentvolumeclaim": names.checkpoints,
    "service": names.coordinator,
    "networkpolicy": names.network_policy,
}
ISOLATING = '--operator-from=[{"ipBlock": {"cidr": "0.0.0.0/0"}}]'
"""Has the operator make NetworkPolicies."""


def granted() -> Verbs:
    """What the rules allow."""
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for rule in [*rbac.rules(), *rbac.key_rules(KEY_SECRET), *rbac.lease_rules()]:
        found[rule["apiGroups"][0], rule["resources"][0]] |= set(rule["verbs"])
    return dict(found)


def used(namespace: Namespace) -> tuple[Verbs, list[str]]:
    """What the operator of a namespace has asked for, and what of that was forbidden."""
    user = f"system:serviceaccount:{namespace.name}:{ACCOUNT}"
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    forbidden = []
    for line in AUDIT.read_text().splitlines():
        said: dict[str, Any] = json.loads(line)
        asked = said.get("objectRef", {})
        # Which kinds there are may be asked by everybody, and is of no object.
        if said["user"]["username"] != user or "resource" not in asked:
            continue
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        found[asked.get("apiGroup", ""), resource].add(said["verb"])
        if said.get("responseStatus", {}).get("code") == 403:
            forbidden.append(f"{said['verb']} {resource}")
    return dict(found), forbidden


def strangers(job: str) -> Iterator[tuple[str, Manifest]]:
    """Somebody else's objects under all the names that a job's objects have."""
    nobody = {"app": "nobody"}
    for kind, name, rest in (
        (kinds.CONFIG_MAP, names.job_file(job), {}),
        (kinds.SERVICE, names.coordinator(job), {"spec": {"ports": [{"port": 1}], "selector": nobody}}),
        (kinds.NETWORK_POLICY, names.network_policy(job), {"spec": {"podSelector": {"matchLabels": nobody}}}),
    ):
        yield kind.name, {"apiVersion": kind.api, "kind": kind.name, "metadata": {"name": name}, **rest}


@pytest.mark.timeout(500)
def test_rights_that_are_used_are_the_rights_that_are_given(
    namespace: Namespace, operator: Operator, images: Images
) -> None:
    operator.stop()
    operator.start(ISOLATING)
    job = Job(namespace, "whole")
    give_its_names_to_strangers(job)
    job.apply(manifest("whole", trainer=LONG, workers={"replicas": 2, "minReplicas": 1}))
    take_its_names_back(job)
    job.trains()
    for kind, name in UPDATED.items():
        is_made_as_this_version_wants_it(job, kind, name(job.name))
    namespace("scale", "dtj/whole", "--replicas=1")
    job.becomes(lambda: len(job.pods("worker")) == 1, "one worker")
    beside = Job(namespace, "beside")
    beside.apply(never_ready(script_beside_a_sidecar("beside", images, "import time; time.sleep(10)")))
    beside.reaches("Succeeded")
    assert not [event for event in beside.events() if event.startswith("WorkerReplaced")]
    # The kubelet's Events are read of pods that do not start.
    stuck = Job(namespace, "stuck")
    stuck.apply(with_a_volume_that_does_not_mount("stuck"))
    stuck.becomes(lambda: "not-there" in stuck.status.get("message", ""), "the words of the kubelet")
    namespace("delete", "dtj", "stuck", "--wait=false")
    before = job.live("evaluator")
    change(job, evaluators={"replicas": 1, "processesPerReplica": 2})
    job.becomes(lambda: job.live("evaluator") not in ([], before), "another evaluator")
    operator.stop()
    operator.start()
    policy = ("get", "networkpolicy", names.network_policy("whole"), "--ignore-not-found")
    until(lambda: not namespace(*policy), "no NetworkPolicy is left", 60.0, otherwise=job.describe)
    change(job, runPolicy={"activeDeadlineSeconds": 1})
    job.becomes(lambda: not job.pods("coordinator"), "no coordinator after the end")
    change(job, runPolicy={"ttlSecondsAfterFinished": 1})
    gone = ("get", "dtj", "whole", "--ignore-not-found")
    until(lambda: not namespace(*gone), "the job is deleted", 120.0, otherwise=job.describe)

    until(lambda: used(namespace)[0] == granted(), "all rights are used", 60.0, otherwise=lambda: difference(namespace))
    assert used(namespace)[1] == []


def never_ready(whole: Manifest) -> Manifest:
    """With a readiness gate that nobody meets."""
    template = whole["spec"]["workers"]["template"]
    template["spec"]["readinessGates"] = [{"conditionType": "example.org/never"}]
    return whole


def give_its_names_to_strangers(job: Job) -> None:
    """Make somebody else's objects, and a claim that the job may take."""
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": names.checkpoints(job.name), "annotations": {names.ADOPT: "true"}}
    left = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim}
    for one in [left, *(one for _, one in strangers(job.name))]:
        job.namespace("create", "-f", "-", stdin=json.dumps(one))


def take_its_names_back(job: Job) -> None:
    """Delete them one after the other, as the job complains."""
    left = [(kind, one["metadata"]["name"]) for kind, one in strangers(job.name)]
    while left:
        taken = job.becomes(
            lambda: [at for at in left if f"{at[0]} {at[1]} exists and is not" in job.status.get("message", "")],
            f"one of {left} is taken",
        )
        for kind, name in taken:
            job.namespace("delete", kind, name)
            left.remove((kind, name))


def is_made_as_this_version_wants_it(job: Job, kind: str, name: str) -> None:
    """Mark an object as an earlier version of the operator would have left it, and wait until it is not any more."""

    def applied() -> str:
        return str(job.namespace.get(kind, name)["metadata"]["annotations"][names.APPLIED])

    job.namespace("annotate", kind, name, f"{names.APPLIED}=of-another-version", "--overwrite")
    job.becomes(lambda: applied() != "of-another-version", f"{kind} {name} as it should be")


def change(job: Job, **spec: Manifest) -> None:
    """Change fields of its spec."""
    job.namespace("patch", f"dtj/{job.name}", "--type=merge", "-p", json.dumps({"spec": spec}))


def difference(namespace: Namespace) -> str:
    """What was not used, and what is not allowed."""
    found, given = used(namespace)[0], granted()
    return "\n".join(
        f"{group or 'core'} {resource}: given and not used {sorted(given.get(key, set()) - found.get(key, set()))}, "
        f"used and not given {sorted(found.get(key, set()) - given.get(key, set()))}"
        for key in sorted({*found, *given})
        if found.get(key) != given.get(key)
        for group, resource in [key]
    )
