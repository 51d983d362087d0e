"""The operator's account is confined by the chart's ValidatingAdmissionPolicy: held against a real API server, in the
name of that account and with all of its rights."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.cluster.helm import CHART, Helm
from tests.support.cluster.operated import CRD, Job, established, kubectl, manifest
from tests.support.cluster.pods import Manifest, Namespace, container, named, pod, restricted
from tests.support.waiting import until

VALUES = {"admissionPolicy": {"enabled": True}}
KIND = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Namespace]:
    """Where no job is."""
    with restricted() as found:
        yield found


class Account:
    """kubectl in the name of the operator."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, namespace: str, *arguments: str, stdin: str = "") -> tuple[bool, str]:
        command = ["kubectl", "-n", namespace, f"--as={self.name}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
        return done.returncode == 0, done.stdout + done.stderr

    def creates(self, namespace: str, *objects: Manifest) -> tuple[bool, str]:
        together = {"apiVersion": "v1", "kind": "List", "items": objects}
        return self(namespace, "create", "-f", "-", stdin=json.dumps(together))


@pytest.fixture(scope="module")
def account(helm: Helm, system: Namespace) -> Iterator[Account]:
    """The operator's account, with its rights in the whole cluster and the policy that confines it."""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    established("-f", str(CRD))
    text = helm("template", "tandem", CHART, f"--namespace={system.name}", f"--api-versions={KIND}", values=VALUES)
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    kinds |= {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    made = [one for one in yaml.safe_load_all(text) if one and one["kind"] in kinds]
    assert len([one for one in made if one["kind"].startswith("Validating")]) == 2
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))
    found = Account(f"system:serviceaccount:{system.name}:tandem-operator")
    # It takes the API server a moment to hold requests against a new policy.
    until(lambda: _is_confined(found), "the policy at work", 60.0)
    yield found
    kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(made))


def _is_confined(account: Account) -> bool:
    made, _ = account.creates("default", named("ConfigMap", "probe"))
    if made:
        account("default", "delete", "configmap", "probe")
        kubectl("delete", "configmap", "probe", "-n", "default", "--ignore-not-found")
    return not made


def owned(by: Job, one: Manifest) -> Manifest:
    """The same, as a job's."""
    uid = by.namespace.get("dtj", by.name)["metadata"]["uid"]
    owner = {"apiVersion": "tandem.dev/v1alpha1", "kind": "DistributedTrainingJob", "name": by.name, "uid": uid}
    metadata: dict[str, Any] = {**one["metadata"], "ownerReferences": [{**owner, "controller": True}]}
    return {**one, "metadata": {**metadata, "labels": {"tandem.dev/job": by.name}}}


def a_policy(name: str) -> Manifest:
    return named("NetworkPolicy", name, "networking.k8s.io/v1", spec={"podSelector": {"matchLabels": {"app": name}}})


def a_pod(name: str) -> Manifest:
    return named("Pod", name, spec=pod([container("c", "nothing:1", "true")]))


@pytest.fixture(scope="module")
def job(account: Account, namespace: Namespace) -> Job:
    found = Job(namespace, "digits")
    found.apply(manifest("digits"))
    return found


def test_what_a_job_owns_is_made_changed_and_deleted(account: Account, job: Job) -> None:
    for one in (a_pod("mine"), named("ConfigMap", "mine"), named("Secret", "mine"), a_policy("mine")):
        done, said = account.creates(job.namespace.name, owned(job, one))
        assert done, said
    for kind in ("pod", "networkpolicy"):
        done, said = account(job.namespace.name, "delete", kind, "mine", "--wait=false")
        assert done, said


def test_what_no_job_owns_is_refused(account: Account, job: Job) -> None:
    for one in (a_pod("theirs"), named("ConfigMap", "theirs"), named("Secret", "theirs"), a_policy("theirs")):
        done, said = account.creates(job.namespace.name, one)
        assert not done
        assert "the operator touches only what a DistributedTrainingJob owns" in said


def test_other_peoples_objects_are_neither_deleted_nor_changed(account: Account, job: Job) -> None:
    job.namespace.create(a_pod("stranger"), named("ConfigMap", "stranger"), a_policy("stranger"))
    refused = "the operator touches only what a DistributedTrainingJob owns"
    for kind in ("pod", "networkpolicy"):
        done, said = account(job.namespace.name, "delete", kind, "stranger", "--wait=false")
        assert (done, refused in said) == (False, True), said
    patch = json.dumps({"metadata": {"labels": {"tandem.dev/job": "digits"}}})
    done, said = account(job.namespace.name, "patch", "configmap", "stranger", "--type=merge", "-p", patch)
    assert (done, refused in said) == (False, True), said
    job.namespace("delete", "pod", "stranger", "--wait=false")


def test_claims_are_made_for_jobs_and_never_deleted(account: Account, job: Job) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = named("PersistentVolumeClaim", "claim", spec=spec)
    done, said = account.creates(job.namespace.name, claim)
    assert (done, "makes only claims of jobs" in said) == (False, True), said
    claim["metadata"]["labels"] = {"tandem.dev/job": "digits"}
    done, said = account.creates(job.namespace.name, claim)
    assert done, said


def test_a_job_is_deleted_only_after_its_end(account: Account, job: Job) -> None:
    done, said = account(job.namespace.name, "delete", "dtj", "digits", "--wait=false")
    assert (done, "deletes only jobs that have ended" in said) == (False, True), said


@pytest.mark.parametrize("where", ["kube-system", "its own"])
def test_there_are_no_jobs_in_namespaces_of_the_system_and_in_its_own(
    account: Account, job: Job, system: Namespace, where: str
) -> None:
    place = system.name if where == "its own" else where
    done, said = account.creates(place, owned(job, named("ConfigMap", "mine")))
    assert (done, "no jobs here" in said) == (False, True), said


def test_its_key_can_be_made_and_no_other_secret_of_its_namespace(account: Account, system: Namespace) -> None:
    done, said = account.creates(system.name, named("Secret", "tandem-operator-key"))
    assert done, said
    done, said = account.creates(system.name, named("Secret", "another"))
    assert (done, "no jobs here" in said) == (False, True), said


def test_everybody_else_is_left_alone(job: Job, elsewhere: Namespace) -> None:
    elsewhere.create(named("ConfigMap", "anything"))
    elsewhere("delete", "configmap", "anything")
