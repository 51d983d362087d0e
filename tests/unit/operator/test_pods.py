"""The pods that the operator makes: restricted, what a user lays over them, and what they are called."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tandem_operator import kinds, names
from tandem_operator.objects import Manifest
from tandem_operator.observed import Children, Pod, observe
from tandem_operator.plan import ReconcilePlan
from tandem_operator.reconcile import reconcile
from tests.support import ROOT
from tests.support.worlds.operator_job import (
    IMAGES,
    NOW,
    SCRIPT,
    UID,
    called,
    decided,
    ended,
    heard,
    initialized,
    job,
    situation,
    surroundings,
)


def pods_of(plan: ReconcilePlan) -> dict[str, Manifest]:
    """The pods that it creates."""
    return {called(one): one["spec"] for one in plan.create_pods if one["kind"] == "Pod"}


def test_every_pod_is_restricted_and_holds_no_service_account() -> None:
    specs = pods_of(decided(job(), Children())) | pods_of(decided(job(), snapshot=heard("Pending")))
    assert specs.keys() == {"coordinator 0", "evaluator 0", "worker 0", "worker 1"}
    for spec in specs.values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_every_pod_is_pulled_with_the_secrets_that_the_operator_was_told_of() -> None:
    images = replace(IMAGES, pull_secrets=("registry", "mirror"))
    of = job(workers={"replicas": 1, "template": {"spec": {"imagePullSecrets": [{"name": "own"}]}}})
    plans = [reconcile(situation(of, Children()), images), reconcile(situation(of, snapshot=heard("Pending")), images)]
    specs = {name: spec for plan in plans for name, spec in pods_of(plan).items()}
    pulled = {name: [secret["name"] for secret in spec["imagePullSecrets"]] for name, spec in specs.items()}
    both = ["registry", "mirror"]
    assert pulled == {
        "coordinator 0": both,
        "evaluator 0": both,
        "worker 0": [*both, "own"],
    }


def test_the_service_leads_to_no_coordinator_of_an_earlier_job_of_that_name() -> None:
    plan = decided(job(), Children())
    (service,) = (one for one in plan.create if one["kind"] == "Service")
    (ours,) = (one["metadata"]["labels"] for one in plan.create_pods if called(one) == "coordinator 0")
    selector = service["spec"]["selector"]
    assert selector.items() <= ours.items()
    (theirs,) = (
        one for one in decided(job(), Children(), uid="of-another").create_pods if called(one) == "coordinator 0"
    )
    assert not selector.items() <= theirs["metadata"]["labels"].items()


def test_a_template_of_the_users_is_laid_over_ours() -> None:
    template = {
        "metadata": {"labels": {"team": "vision", "app.kubernetes.io/name": "another"}},
        "spec": {
            "restartPolicy": "Always",
            "nodeSelector": {"disk": "fast"},
            "containers": [
                {"name": "worker", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                {"name": "beside", "image": "beside:1"},
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
    of = job(status=initialized(), workers={"replicas": 1, "template": template})
    pod = decided(of).create_pods[0]
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    assert (labels["team"], labels["app.kubernetes.io/name"], spec["restartPolicy"]) == ("vision", "tandem", "Never")
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "disk": "fast"}
    assert [one["name"] for one in spec["containers"]] == ["worker", "beside"]
    assert [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]] == [
        "/tandem",
        "/tmp",
        "/dev/shm",
        "/data",
    ]


GPU = {"resources": {"limits": {"nvidia.com/gpu": 2, "cpu": "2"}}, "priorityClassName": "spare"}


def test_an_evaluator_has_the_gpus_that_it_asks_for_and_an_image_that_can_use_them() -> None:
    pod = pods_of(decided(job(evaluators=GPU, runPolicy={"priorityClassName": "high"}), Children()))["evaluator 0"]
    container = pod["containers"][0]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (container["resources"], container["image"]) == (GPU["resources"], IMAGES.trainer)
    assert (values["TANDEM_EVALUATOR_GPUS"], "CUDA_VISIBLE_DEVICES" in values) == ("2", False)
    assert pod["priorityClassName"] == "spare"


def test_one_that_asks_for_none_sees_none() -> None:
    of = job(evaluators={"resources": {"limits": {"cpu": "2"}}}, runPolicy={"priorityClassName": "high"})
    pod = pods_of(decided(of, Children()))["evaluator 0"]
    container = pod["containers"][0]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (container["image"], pod["priorityClassName"]) == (IMAGES.evaluator, "high")
    assert (values["CUDA_VISIBLE_DEVICES"], values["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")


def test_a_coordinator_prefers_a_node_without_gpus_and_one_that_has_not_lost_its_forerunner() -> None:
    (pod,) = [one for one in decided(job(), Children()).create_pods if called(one) == "coordinator 0"]
    affinity = pod["spec"]["affinity"]
    (preferred,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    keys = [one["key"] for one in preferred["preference"]["matchExpressions"]]
    assert keys[:2] == ["nvidia.com/gpu.present", "nvidia.com/gpu.count"]
    apart, _ = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    wanted = apart["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()
    assert wanted[names.ROLE] == names.COORDINATOR


def test_a_coordinator_keeps_off_the_node_of_the_operator_if_it_can() -> None:
    affinity = pods_of(decided(job(), Children()))["coordinator 0"]["affinity"]["podAntiAffinity"]
    ((_, ours), (weight, its)) = [
        (one["weight"], one["podAffinityTerm"]) for one in affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    ]
    assert (weight, its["topologyKey"], its["namespaceSelector"]) == (50, ours["topologyKey"], {})
    label, role = next(iter(its["labelSelector"]["matchLabels"].items()))
    assert f"{label}: {role}" in (ROOT / "charts/tandem/templates/deployment.yaml").read_text()


def test_every_pod_is_of_linux_and_a_selector_of_the_users_is_laid_over_that() -> None:
    template = {"spec": {"nodeSelector": {"pool": "a"}}}
    of = job(status=initialized(), workers={"replicas": 1, "template": template})
    made = pods_of(decided(of, Children()))
    assert {pod["nodeSelector"]["kubernetes.io/os"] for pod in made.values()} == {"linux"}
    worker = pods_of(decided(of))["worker 0"]["nodeSelector"]
    assert worker == {"kubernetes.io/os": "linux", "pool": "a"}


def test_a_claim_among_an_evaluators_resources_stays() -> None:
    container = {"name": "evaluator", "resources": {"claims": [{"name": "nic"}], "limits": {"cpu": "1"}}}
    evaluators = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
    (evaluator,) = pods_of(decided(job(evaluators=evaluators), Children()))["evaluator 0"]["containers"]
    assert evaluator["resources"] == container["resources"]


def test_what_a_user_writes_into_a_command_is_not_replaced_by_kubernetes() -> None:
    environment = [{"name": "HOME", "value": "/home/$(X)"}, {"name": "MARK", "value": "a$$b"}]
    script = {"command": ["python", "train.py"], "args": ["$(HOME)", "a$$b", "$HOME"], "env": environment}
    pod = decided(job(status=initialized(), trainer=script)).create_pods[0]
    container = pod["spec"]["containers"][0]
    assert container["args"][-3:] == ["$$(HOME)", "a$$$$b", "$$HOME"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (values["HOME"], values["MARK"]) == ("/home/$$(X)", "a$$$$b")


def test_pods_of_a_job_with_a_queue_are_a_group_for_kueue() -> None:
    pod = decided(job(status=initialized(), runPolicy={"queueName": "gpus"})).create_pods[0]["metadata"]
    assert pod["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert pod["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    assert pod["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"


@pytest.mark.parametrize(
    ("workers", "threads"),
    [
        ({"replicas": 1}, "1"),
        ({"replicas": 1, "resources": {"requests": {"cpu": "8"}}, "processesPerReplica": 2}, "4"),
        ({"replicas": 1, "resources": {"requests": {"cpu": "8"}, "limits": {"cpu": "2500m"}}}, "2"),
        ({"replicas": 1, "resources": {"limits": {"cpu": "100m"}}}, "1"),
        (
            {
                "replicas": 1,
                "template": {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"cpu": True}}}]}},
            },
            "1",
        ),
    ],
)
def test_ranks_have_as_many_threads_as_the_pod_has_cores_for_them(workers: dict[str, object], threads: str) -> None:
    pod = decided(job(status=initialized(), workers=workers)).create_pods[0]
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("name", ["a", "9lives", "x" * 63, "x" * 43, "x" * 44, f"{'y' * 34}-{'z' * 26}"])
def test_names_are_valid_whatever_the_job_is_called(name: str) -> None:
    every = [
        names.token(name),
        names.job_file(name),
        names.checkpoints(name),
        names.coordinator(name),
        names.pod(name, names.WORKER, 9999, "e"),
        names.pod(name, names.EVALUATOR, 999, "e"),
    ]
    for one in every:
        assert len(one) <= 63
        assert one[0].isalpha()
        assert "--" not in one


def test_long_names_stay_different() -> None:
    assert names.coordinator("x" * 62 + "a") != names.coordinator("x" * 62 + "b")


@pytest.mark.parametrize(("grace", "seconds"), [(None, 30), (20, 30), (60, 30), (600, 570)])
def test_a_longer_grace_period_is_time_for_ranks_to_save(grace: int | None, seconds: int) -> None:
    template = {} if grace is None else {"spec": {"terminationGracePeriodSeconds": grace}}
    pod = decided(job(status=initialized(), workers={"replicas": 1, "template": template})).create_pods[0]
    assert f"--shutdown-timeout={seconds}" in pod["spec"]["containers"][0]["args"]


def coordinators(**spec: Any) -> dict[str, Any]:
    """The pod of a job's coordinator."""
    (pod,) = [one for one in decided(job(**spec), Children()).create_pods if called(one) == "coordinator 0"]
    return pod


def test_a_template_is_laid_over_the_coordinators_pod_and_its_resources_are_the_users() -> None:
    template = {
        "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {"restartPolicy": "Never", "tolerations": [{"key": "infra", "operator": "Exists"}]},
    }
    pod = coordinators(coordinator={"template": template, "resources": {"limits": {"memory": "1Gi"}}})
    assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert pod["metadata"]["labels"][names.ROLE] == names.COORDINATOR
    assert pod["spec"]["restartPolicy"] == "Always"
    assert template["spec"]["tolerations"][0] in pod["spec"]["tolerations"]
    assert pod["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "50m"}, "limits": {"memory": "1Gi"}}


@pytest.mark.parametrize(("replicas", "memory"), [(2, "512Mi"), (8000, "1012Mi")])
def test_a_coordinator_may_use_as_much_memory_as_its_ranks_need(replicas: int, memory: str) -> None:
    pod = coordinators(workers={"replicas": replicas})
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": memory}


@pytest.mark.parametrize("modes", [["ReadWriteOnce"], ["ReadWriteMany"]])
def test_a_volume_of_one_node_is_bound_where_workers_can_run(modes: list[str]) -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    template = {"spec": {"nodeSelector": {"gpu": "a100"}, "tolerations": [{"key": "spot"}], "affinity": affinity}}
    workers = {"replicas": 1, "template": template, "resources": {"limits": {"nvidia.com/gpu": 1}}}
    of = job(workers=workers, checkpoint={"storage": {"accessModes": modes}})
    made = {called(one): one["spec"] for one in decided(of, Children()).create_pods}
    for pod in (made["coordinator 0"], made["evaluator 0"]):
        keys = [one["key"] for one in pod["tolerations"]]
        selection = pod["nodeSelector"].get("gpu"), {"spot", "nvidia.com/gpu"} <= set(keys)
        assert selection == (("a100", True) if modes == ["ReadWriteOnce"] else (None, False))
        node = pod["affinity"]["nodeAffinity"]
        assert (node.get("requiredDuringSchedulingIgnoredDuringExecution") == required) == selection[1]


def test_pods_run_as_the_clusters_user_where_the_operator_is_told_so() -> None:
    plan = reconcile(situation(job(), Children()), replace(IMAGES, own_user=False))
    for pod in plan.create_pods:
        security = pod["spec"]["securityContext"]
        assert {"runAsUser", "runAsGroup", "fsGroup"}.isdisjoint(security)
        assert security["runAsNonRoot"] is True


@pytest.mark.parametrize("resources", [{}, {"limits": {"memory": "64Gi"}}])
def test_shared_memory_is_no_more_than_the_memory_of_the_pod(resources: dict[str, Any]) -> None:
    of = job(status=initialized(), workers={"replicas": 1, "resources": resources})
    (pod,) = [one for one in decided(of).create_pods if called(one) == "worker 0"]
    (shm,) = [one for one in pod["spec"]["volumes"] if one["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi" if resources else "16Gi"}


def test_variables_come_from_secrets_and_never_stand_in_the_jobs_file() -> None:
    source = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env = [{"name": "HF_TOKEN", "valueFrom": source}, {"name": "TANDEM_TOKEN", "valueFrom": source}]
    of = job(status=initialized(), trainer={**SCRIPT, "env": env})
    (pod,) = [one for one in decided(of).create_pods if called(one) == "worker 0"]
    found = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] in ("HF_TOKEN", "TANDEM_TOKEN")]
    assert {one["name"]: one["valueFrom"]["secretKeyRef"]["name"] for one in found} == {
        "HF_TOKEN": "hub",
        "TANDEM_TOKEN": "digits-token",
    }
    assert len(found) == 2


def test_every_pod_is_pulled_when_and_tolerates_what_the_operator_was_told() -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    images = replace(IMAGES, pull_policy="Always", tolerations=(toleration,))
    of = job(workers={"replicas": 1})
    plans = [reconcile(situation(of, Children()), images), reconcile(situation(of, snapshot=heard("Pending")), images)]
    specs = {name: spec for plan in plans for name, spec in pods_of(plan).items()}
    assert specs.keys() == {"coordinator 0", "evaluator 0", "worker 0"}
    for spec in specs.values():
        assert spec["containers"][0]["imagePullPolicy"] == "Always"
        assert toleration in spec["tolerations"]


CODE = {"command": ["train.py"], "code": f"sha256:{'0' * 64}"}
PRIVATE = {"name": "PIP_INDEX_URL", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "url"}}}


@pytest.mark.parametrize(
    ("trainer", "index"),
    [
        (CODE, ["https://index.example/simple"]),
        ({**CODE, "env": [PRIVATE]}, ["secret"]),
        (
            {**CODE, "env": [{"name": "PIP_INDEX_URL", "value": "https://own.example"}]},
            ["https://own.example"],
        ),
        (SCRIPT, []),
    ],
)
def test_pods_of_a_job_with_code_know_its_digest_and_the_package_index(
    trainer: dict[str, Any], index: list[str]
) -> None:
    images = replace(IMAGES, package_index="https://index.example/simple")
    evaluators = {"replicas": 1, "command": ["evaluate.py"], "metric": "loss"}
    of = job(trainer=trainer, workers={"replicas": 1}, evaluators=evaluators)
    plans = [reconcile(situation(of, Children()), images), reconcile(situation(of, snapshot=heard("Pending")), images)]
    specs = {name: spec for plan in plans for name, spec in pods_of(plan).items()}
    for name in ("evaluator 0", "worker 0"):
        env = specs[name]["containers"][0]["env"]
        found = [one for one in env if one["name"] == "PIP_INDEX_URL"]
        assert [
            one.get("value", one.get("valueFrom", {}).get("secretKeyRef", {}).get("name")) for one in found
        ] == index
        assert [one["value"] for one in env if one["name"] == "TANDEM_CODE"] == [
            code for code in [trainer.get("code")] if code
        ]


@pytest.mark.parametrize(
    ("mlflow", "uri"),
    [
        (None, []),
        ({}, ["http://mlflow:5000"]),
        (
            {"env": [{"name": "MLFLOW_TRACKING_URI", "valueFrom": {"secretKeyRef": {"name": "own", "key": "uri"}}}]},
            ["own"],
        ),
    ],
)
def test_the_coordinator_of_a_tracked_job_and_no_other_pod_knows_the_server_and_how_to_get_in(
    mlflow: dict[str, Any] | None, uri: list[str]
) -> None:
    token = {"name": "MLFLOW_TRACKING_TOKEN", "valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "token"}}}
    tracking = {} if mlflow is None else {"mlflow": {**mlflow, "env": [*mlflow.get("env", []), token]}}
    images = replace(IMAGES, mlflow_uri="http://mlflow:5000")
    of = job(tracking=tracking)
    plans = [reconcile(situation(of, Children()), images), reconcile(situation(of, snapshot=heard("Pending")), images)]
    specs = {name: spec for plan in plans for name, spec in pods_of(plan).items()}
    found = {
        name: [
            one.get("value") or one["valueFrom"]["secretKeyRef"]["name"]
            for one in spec["containers"][0]["env"]
            if one["name"].startswith("MLFLOW_")
        ]
        for name, spec in specs.items()
    }
    assert found.pop("coordinator 0") == [*uri, *(["mlflow"] if tracking else [])]
    assert {name: [] for name in found} == found
    coordinator = specs["coordinator 0"]
    assert coordinator["terminationGracePeriodSeconds"] == (120 if tracking else 10)
    memory = coordinator["containers"][0]["resources"]["limits"]["memory"]
    assert memory == ("768Mi" if tracking else "512Mi")


@pytest.mark.parametrize("secret", [None, "bucket"])
def test_the_coordinator_of_a_job_with_a_bucket_has_its_credentials_and_time_to_upload(secret: str | None) -> None:
    storage = {"bucket": "s3://bucket/runs/digits", **({"credentialsSecret": secret} if secret else {})}
    of = job(checkpoint={"storage": storage})
    plans = [reconcile(situation(of, Children()), IMAGES), reconcile(situation(of, snapshot=heard("Pending")), IMAGES)]
    specs = {name: spec for plan in plans for name, spec in pods_of(plan).items()}
    keys = {
        name: {
            one["name"]: one["valueFrom"]["secretKeyRef"]
            for one in spec["containers"][0]["env"]
            if one["name"].startswith(("AWS_", "AZURE_", "GOOGLE_"))
        }
        for name, spec in specs.items()
    }
    coordinator = specs["coordinator 0"]
    named = keys.pop("coordinator 0")
    assert (named.get("AWS_ACCESS_KEY_ID") or {}).get("name") == secret
    assert all(reference["optional"] and reference["key"] == name for name, reference in named.items())
    assert not any(keys.values())
    assert coordinator["terminationGracePeriodSeconds"] == 600
    assert coordinator["containers"][0]["startupProbe"]["failureThreshold"] >= 3600
    assert coordinator["containers"][0]["resources"]["limits"]["memory"] == "1024Mi"


def test_the_next_pod_of_a_place_that_was_left_out_keeps_off_its_node() -> None:
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    theirs = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}}
    workers = {"replicas": 1, "template": {"spec": {"affinity": theirs}}}
    out = ended(0, code=ExitCode.LEFT_OUT, node="node-3", owner=UID)
    wanted = job(workers=workers, status=initialized())
    plan = decided(wanted, surroundings(wanted, out), snapshot=heard())
    (made,) = [one for one in plan.create_pods if called(one) == "worker 0"]
    required = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = required["nodeSelectorTerms"]
    away = [{"key": "metadata.name", "operator": "NotIn", "values": ["node-3"]}]
    assert [term["matchFields"] for term in terms] == [away, away]
    assert [term["matchExpressions"] for term in terms] == [zone["matchExpressions"] for zone in zones]
    seen = observe(kinds.POD, made | {"status": {}})
    assert isinstance(seen, Pod)
    assert seen.avoids == ("node-3",)


def test_the_next_pod_of_a_place_that_failed_on_a_node_again_and_again_prefers_another_one() -> None:
    cheap = {"weight": 1, "preference": {"matchExpressions": [{"key": "spot", "operator": "Exists"}]}}
    theirs = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [cheap]}}
    workers = {"replicas": 1, "template": {"spec": {"affinity": theirs}}}
    failed = ended(0, node="node-3", failures=2, failed_on=("node-3", "node-3"), owner=UID)
    wanted = job(workers=workers, status=initialized())
    plan = decided(wanted, surroundings(wanted, failed), snapshot=heard(), now=NOW + 60)
    (made,) = [one for one in plan.create_pods if called(one) == "worker 0"]
    affinity = made["spec"]["affinity"]["nodeAffinity"]
    off = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-3"]}]}
    wish = {"weight": 100, "preference": off}
    assert affinity == {"preferredDuringSchedulingIgnoredDuringExecution": [cheap, wish]}
    seen = observe(kinds.POD, made | {"status": {}})
    assert isinstance(seen, Pod)
    assert seen.failed_on == ("node-3",) * 3


def test_an_evaluators_pod_has_its_own_image_and_variables_besides_those_of_the_trainer() -> None:
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    trainer = {
        "task": "image-classification",
        "env": [
            {"name": "BOTH", "value": "of the trainer"},
            {"name": "MOVED", "value": "literal"},
            {"name": "HUB", "valueFrom": secret},
            {"name": "TANDEM_RUN_DIR", "value": "/elsewhere"},
        ],
    }
    evaluators = {
        "command": ["python", "score.py"],
        "image": "team/scores:1",
        "env": [
            {"name": "BOTH", "value": "of the evaluators"},
            {"name": "MOVED", "valueFrom": secret},
            {"name": "OMP_NUM_THREADS", "value": "4"},
            {"name": "CUDA_VISIBLE_DEVICES", "value": "0"},
        ],
    }
    container = pods_of(decided(job(trainer=trainer, evaluators=evaluators), Children()))["evaluator 0"]["containers"][
        0
    ]
    assert container["image"] == "team/scores:1"
    values = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert len(values) == len(container["env"]), "each name once"
    assert values["BOTH"] == "of the evaluators"
    assert values["MOVED"] == values["HUB"] == {"secretKeyRef": {"name": "hub", "key": "token", "optional": False}}
    assert values["OMP_NUM_THREADS"] == "4"
    assert values["CUDA_VISIBLE_DEVICES"] == "", "it has none"
    assert values["TANDEM_RUN_DIR"] != "/elsewhere"


def test_only_coordinators_learn_the_collector_of_traces_and_have_memory_for_it() -> None:
    for endpoint in ("", "http://collector:4318"):
        images = replace(IMAGES, otlp_endpoint=endpoint)
        plans = [
            reconcile(situation(job(), Children()), images),
            reconcile(situation(job(), snapshot=heard("Pending")), images),
        ]
        containers = {name: spec["containers"][0] for plan in plans for name, spec in pods_of(plan).items()}
        variables = {name: [one["name"] for one in container["env"]] for name, container in containers.items()}
        known = {name for name, names in variables.items() if "OTEL_EXPORTER_OTLP_ENDPOINT" in names}
        assert known == ({"coordinator 0"} if endpoint else set())
        memory = containers["coordinator 0"]["resources"]["limits"]["memory"]
        assert memory == ("640Mi" if endpoint else "512Mi")
