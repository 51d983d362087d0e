"""A job whose pods share no directory: no claim, a folder in each pod, and in each pod what it needs for the bucket."""

from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob, Storage
from tandem_operator import kinds
from tandem_operator.objects import Manifest, Peers, Volumes
from tandem_operator.observed import Children, VolumeClaim, children
from tandem_operator.pods import BUCKET_CREDENTIALS
from tandem_operator.reconcile import reconcile
from tests.support.worlds.operator_job import (
    IMAGES,
    SCRIPT,
    called,
    decided,
    heard,
    initialized,
    job,
    made,
    removed,
    situation,
    surroundings,
    worker,
)

STORAGE = {"bucket": "s3://bucket/runs/digits", "credentialsSecret": "bucket", "shared": False}


def unshared(**spec: Any) -> DistributedTrainingJob:
    return job(**{"checkpoint": {"storage": STORAGE}, **spec})


def specs_of(of: DistributedTrainingJob, volumes: Volumes | None = None) -> dict[str, Manifest]:
    """The pods of a new job, by role."""
    there = Children({key: one for key, one in surroundings(of).objects.items() if key[0] is not kinds.POD})
    plan = reconcile(situation(of, there), IMAGES, volumes or Volumes())
    return {called(one).split()[0]: one["spec"] for one in plan.create_pods}


def environment(spec: Manifest) -> dict[str, Any]:
    (container,) = spec["containers"]
    found = [(one["name"], one.get("value", one.get("valueFrom"))) for one in container["env"]]
    assert len(dict(found)) == len(found), "no variable is set twice"
    return dict(found)


def test_no_claim_is_made_and_each_pod_has_a_folder_of_its_own() -> None:
    of = unshared()
    assert not any("PersistentVolumeClaim" in name for name in made(decided(of, Children())))
    specs = specs_of(of)
    assert specs.keys() == {"coordinator", "worker", "evaluator"}
    for spec in specs.values():
        (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["mountPath"] == "/tandem"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == mount["name"]]
        assert volume["emptyDir"] == {}
        assert not any("persistentVolumeClaim" in one for one in spec["volumes"])


@pytest.mark.parametrize("owner", ["", "somebody-else"])
def test_a_claim_of_its_name_that_is_there_is_neither_used_nor_deleted_nor_in_the_way(owner: str) -> None:
    of = unshared(status=initialized())
    there = [one for one in surroundings(of, worker(0), worker(1)).objects.values() if one.kind is not kinds.CLAIM]
    claim = VolumeClaim(name="digits-checkpoints", uid="of-the-claim", owner=owner, phase="Bound", applied="old")
    plan = decided(of, children([*there, claim]), snapshot=heard())
    assert (made(plan), plan.update, removed(plan)) == ([], (), [])
    assert plan.status.phase == "Running"
    assert not [one for one in plan.status.conditions if one.reason == "NameTaken"]


def test_no_pod_is_tied_to_the_nodes_of_workers_whatever_volumes_the_operator_makes() -> None:
    template = {"spec": {"nodeSelector": {"gpu": "a100"}}}
    once = Volumes(access_modes=("ReadWriteOnce",))
    specs = specs_of(unshared(workers={"replicas": 1, "template": template}), once)
    assert "gpu" in specs["worker"]["nodeSelector"]
    for role in ("coordinator", "evaluator"):
        assert "gpu" not in specs[role]["nodeSelector"]


def test_every_pod_has_the_credentials_and_time_for_the_last_upload() -> None:
    for spec in specs_of(unshared()).values():
        variables = environment(spec)
        for name in BUCKET_CREDENTIALS:
            assert variables[name]["secretKeyRef"] == {"name": "bucket", "key": name, "optional": True}
        assert spec["terminationGracePeriodSeconds"] == 600


def test_workers_and_evaluators_find_the_bucket_by_a_variable_and_the_coordinator_by_the_job() -> None:
    storage = STORAGE | {"endpoint": "http://minio:9000", "region": "eu-1"}
    specs = specs_of(unshared(checkpoint={"storage": storage}))
    for role in ("worker", "evaluator"):
        assert Storage.read_json(environment(specs[role])["TANDEM_STORAGE"]) == Storage.parse(storage)
    # By its absence the process beside the coordinator knows that it is the one that writes.
    assert "TANDEM_STORAGE" not in environment(specs["coordinator"])


def test_a_shared_directory_needs_none_of_it_in_workers_and_evaluators() -> None:
    specs = specs_of(unshared(checkpoint={"storage": STORAGE | {"shared": True}}))
    for role, grace in {"worker": 60, "evaluator": 15}.items():
        assert environment(specs[role]).keys().isdisjoint({*BUCKET_CREDENTIALS, "TANDEM_STORAGE"})
        assert specs[role]["terminationGracePeriodSeconds"] == grace


def test_variables_and_templates_of_the_users_are_laid_over_that() -> None:
    own = {"name": "AWS_ACCESS_KEY_ID", "value": "of-the-data"}
    source = {"secretKeyRef": {"name": "data", "key": "secret"}}
    env = [own, {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": source}]
    template = {
        "spec": {
            "terminationGracePeriodSeconds": 120,
            "volumes": [{"name": "checkpoints", "emptyDir": {"sizeLimit": "5Gi"}}],
        }
    }
    specs = specs_of(
        unshared(
            trainer={**SCRIPT, "env": env},
            workers={"replicas": 1, "template": template},
            evaluators={"replicas": 1, "command": ["evaluate.py"], "metric": "loss", "template": template},
        )
    )
    for role in ("worker", "evaluator"):
        variables, spec = environment(specs[role]), specs[role]
        assert variables["AWS_ACCESS_KEY_ID"] == "of-the-data"
        assert variables["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"]["name"] == "data"
        assert spec["terminationGracePeriodSeconds"] == 120
        assert {"name": "checkpoints", "emptyDir": {"sizeLimit": "5Gi"}} in spec["volumes"]


@pytest.mark.parametrize(("grace", "seconds"), [(None, 30), (60, 30), (600, 30), (700, 130)])
def test_ranks_get_what_a_grace_period_is_longer_than_the_time_for_the_upload(grace: int | None, seconds: int) -> None:
    template = {} if grace is None else {"spec": {"terminationGracePeriodSeconds": grace}}
    spec = specs_of(unshared(workers={"replicas": 1, "template": template}))["worker"]
    assert f"--shutdown-timeout={seconds}" in spec["containers"][0]["args"]


def test_the_network_policy_leaves_the_way_to_the_bucket_open() -> None:
    of = unshared()
    plan = reconcile(situation(of, Children(), peers=Peers(({"podSelector": {}},))), IMAGES)
    (policy,) = [one for one in plan.create if one["kind"] == "NetworkPolicy"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
