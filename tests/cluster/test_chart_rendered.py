"""What helm makes of the chart: each switch, the words for wrong values, and that a real API server takes every object.

The kinds of the Prometheus operator are not on the test cluster. Stand-ins with the real group, version and names are
installed for the dry run: they show that the API server finds a place for the objects, not that their fields are right.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tandem_operator import names
from tandem_operator.objects import Peers, Volumes
from tandem_operator.options import parse
from tandem_operator.pods import Images, coordinator
from tandem_operator.rbac import key_rules, lease_rules, rules
from tests.support.cluster.helm import CHART, Helm, container, kinds, of
from tests.support.cluster.operated import established, kubectl
from tests.support.cluster.pods import Manifest, Namespace, restricted
from tests.support.worlds.operator_job import IMAGES, job
from tools.crd import crd

DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
ALERTS = CHART / "files/alerts.yaml"
MONITORING = {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}
DIGEST = "sha256:" + "0" * 64
MONITORS = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
MLFLOW: dict[str, Any] = {"mlflow": {"enabled": True}, "images": {"mlflow": {"registry": "images.example"}}}
EVERYTHING: dict[str, Any] = {
    "extraLabels": {"team": "ml"},
    "images": {"registry": "registry.example/team", "pullSecrets": ["registry"], "trainer": {"digest": DIGEST}},
    "operator": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "control-plane", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"checked": "yes"},
        "podLabels": {"tier": "control"},
        "pdb": {"enabled": True},
    },
    "serviceAccount": {"annotations": {"role": "operator"}},
    "jobs": {
        "packageIndex": "https://packages.example/simple",
        "storageClassName": "nfs",
        "accessModes": ["ReadWriteOnce"],
        "volumeSize": "50Gi",
        "clusterUser": True,
        "networkPolicy": {"enabled": True, "metricsFrom": [MONITORS]},
    },
    "priorityClasses": [{"name": "tandem-urgent", "value": 1000, "description": "d", "preemptionPolicy": "Never"}],
    "metrics": {
        "service": {"annotations": {"prometheus.io/scrape": "true"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "scrapeTimeout": "10s"},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "scrapeTimeout": "10s"},
        "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
    "networkPolicy": {"enabled": True, "metricsFrom": [MONITORS]},
}


def test_the_chart_has_nothing_that_lint_would_complain_of(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, values=EVERYTHING)


def test_by_default_there_is_an_operator_for_the_whole_cluster_and_nothing_that_needs_more(helm: Helm) -> None:
    objects = helm.rendered()
    assert sorted(f"{one['kind']} {one['metadata']['name']}" for one in objects) == [
        "ClusterRole tandem-jobs-edit",
        "ClusterRole tandem-jobs-view",
        "ClusterRole tandem-operator",
        "ClusterRole tandem-operator-queues",
        "ClusterRoleBinding tandem-operator",
        "ClusterRoleBinding tandem-operator-queues",
        "CustomResourceDefinition distributedtrainingjobs.tandem.dev",
        "Deployment tandem-operator",
        "Role tandem-operator-key",
        "Role tandem-operator-lease",
        "RoleBinding tandem-operator-key",
        "RoleBinding tandem-operator-lease",
        "Service tandem-operator-metrics",
        "ServiceAccount tandem-operator",
    ]
    assert not [one for one in objects if one["kind"].startswith("ClusterRole") and "namespace" in one["metadata"]]
    assert of(objects, "ClusterRole", "tandem-operator")["rules"] == rules()
    key, held = of(objects, "Role", "tandem-operator-key"), of(objects, "Role", "tandem-operator-lease")
    assert (key["metadata"]["namespace"], key["rules"]) == ("tandem-system", key_rules("tandem-operator-key"))
    assert (held["metadata"]["namespace"], held["rules"]) == ("kube-system", lease_rules())
    for name in ("tandem-operator-key", "tandem-operator-lease"):
        assert (
            of(objects, "RoleBinding", name)["subjects"]
            == of(objects, "ClusterRoleBinding", "tandem-operator")["subjects"]
        )
    subject = of(objects, "ClusterRoleBinding", "tandem-operator")["subjects"][0]
    assert subject == {"kind": "ServiceAccount", "name": "tandem-operator", "namespace": "tandem-system"}


def test_the_operator_is_one_restricted_pod_that_probes_look_at(helm: Helm) -> None:
    objects = helm.rendered()
    spec = of(objects, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert of(objects, "Service")["spec"]["selector"] == spec["selector"]["matchLabels"]
    ours = container(objects)
    assert [ours[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")] == ["/healthz", "/readyz"]
    assert ours["securityContext"]["readOnlyRootFilesystem"] is True
    assert ours["args"] == [
        "python",
        "-m",
        "tandem_operator",
        "--port=8080",
        "--key-secret=tandem-system/tandem-operator-key",
        "--identity=$(POD_NAMESPACE)/$(POD_NAME)",
        "--lease-namespace=kube-system",
        "--patience=600",
        "--access-mode=ReadWriteMany",
        "--volume-size=10Gi",
        "--no-job-metrics",
    ]
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert spec["template"]["metadata"]["labels"][names.ROLE] == names.OPERATOR


def test_jobs_are_named_where_prometheus_reads_the_operator_and_where_that_is_wished_for(helm: Helm) -> None:
    for metrics in ({"jobs": True}, {"serviceMonitor": {"enabled": True}}):
        assert "--no-job-metrics" not in container(helm.rendered(metrics=metrics))["args"]
    assert "--no-job-metrics" in container(helm.rendered())["args"]


def test_the_crd_is_the_models_and_stays_when_the_release_goes(helm: Helm) -> None:
    found = of(helm.rendered(), "CustomResourceDefinition")
    assert found["spec"] == json.loads(json.dumps(crd()["spec"]))
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in of(helm.rendered(crds={"keep": False}), "CustomResourceDefinition")["metadata"]
    assert "CustomResourceDefinition" not in kinds(helm.rendered(crds={"enabled": False}))


@pytest.mark.parametrize(
    ("images", "operator", "trainer", "evaluator"),
    [
        ({}, "tandem-operator:0.1.0", "tandem-trainer:0.1.0", "tandem-evaluator:0.1.0"),
        ({"registry": "r/x", "tag": "2"}, "r/x/tandem-operator:2", "r/x/tandem-trainer:2", "r/x/tandem-evaluator:2"),
        (
            {"registry": "r", "tag": "2", "operator": {"digest": DIGEST}, "trainer": {"registry": "gpu/", "tag": "3"}},
            f"r/tandem-operator@{DIGEST}",
            "gpu/tandem-trainer:3",
            "r/tandem-evaluator:2",
        ),
        ({"evaluator": {"repository": "a/b"}}, "tandem-operator:0.1.0", "tandem-trainer:0.1.0", "a/b:0.1.0"),
    ],
)
def test_images_are_named_by_registry_repository_and_tag_or_digest(
    helm: Helm, images: dict[str, Any], operator: str, trainer: str, evaluator: str
) -> None:
    ours = container(helm.rendered(images=images))
    assert ours["image"] == operator
    assert {one["name"]: one["value"] for one in ours["env"] if "value" in one} == {
        "TANDEM_OPERATOR_IMAGE": operator,
        "TANDEM_TRAINER_IMAGE": trainer,
        "TANDEM_EVALUATOR_IMAGE": evaluator,
    }


def test_everything_that_can_be_said_of_the_operators_pod_is_in_it(helm: Helm) -> None:
    objects = helm.rendered(**EVERYTHING)
    template = of(objects, "Deployment")["spec"]["template"]
    pod, asked = template["spec"], EVERYTHING["operator"]
    for field in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[field] == (
            {**asked[field], "kubernetes.io/os": "linux"} if field == "nodeSelector" else asked[field]
        )
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert template["metadata"]["annotations"] == {"checked": "yes"}
    assert {"tier": "control", "team": "ml"}.items() <= template["metadata"]["labels"].items()
    arguments = container(objects)["args"]
    assert {"--pull-secret=registry", "--storage-class=nfs", "--access-mode=ReadWriteOnce"} <= set(arguments)
    assert "--access-mode=ReadWriteMany" not in arguments
    assert container(helm.rendered(images={"pullPolicy": "Always"}))["imagePullPolicy"] == "Always"


def test_the_operator_understands_what_the_chart_tells_it(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**EVERYTHING, "operator": {"namespaces": ["vision", "speech"]}}
    ours = container(helm.rendered(**values))
    for one in ours["env"]:
        if "value" in one:
            monkeypatch.setenv(one["name"], one["value"])
    assert ours["args"][:3] == ["python", "-m", "tandem_operator"]
    told = parse(ours["args"][3:])
    assert told.images == Images(
        operator="registry.example/team/tandem-operator:0.1.0",
        trainer=f"registry.example/team/tandem-trainer@{DIGEST}",
        evaluator="registry.example/team/tandem-evaluator:0.1.0",
        pull_secrets=("registry",),
        own_user=False,
        package_index="https://packages.example/simple",
    )
    assert told.key_secret == ("tandem-system", "tandem-operator-key")
    assert told.volumes == Volumes("nfs", ("ReadWriteOnce",), "50Gi")
    assert (told.namespaces, told.port) == (("vision", "speech"), 8080)
    selector = of(helm.rendered(), "Deployment")["spec"]["selector"]
    home = {"matchLabels": {"kubernetes.io/metadata.name": "tandem-system"}}
    assert told.peers == Peers(({"namespaceSelector": home, "podSelector": selector},), (MONITORS,))
    elsewhere = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    other = helm.rendered(jobs={"networkPolicy": {"enabled": True, "operatorFrom": [elsewhere]}})
    assert parse(container(other)["args"][3:]).peers == Peers((elsewhere,))
    assert parse(container(helm.rendered())["args"][3:]).peers is None


def test_the_operators_pod_is_soon_elsewhere_and_can_be_given_what_a_cluster_asks_for(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = of(helm.rendered(), "Deployment")["spec"]["template"]["spec"]
    assert {(one["key"].rpartition("/")[2], one["tolerationSeconds"]) for one in plain["tolerations"]} == {
        ("not-ready", 10),
        ("unreachable", 10),
    }
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    operator = {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraArguments": ["--port=8080"],
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
        "podSecurityContext": {"runAsUser": 1000},
        "securityContext": {"readOnlyRootFilesystem": False},
        "livenessProbe": {"periodSeconds": 60},
        "readinessProbe": {"timeoutSeconds": 9},
        "topologySpreadConstraints": [spread],
        "annotations": {"owner": "ml"},
    }
    toleration = {"key": "gpu", "operator": "Exists"}
    jobs = {"pullPolicy": "Always", "tolerations": [toleration], "templateFields": ["spec.nodeSelector"]}
    objects = helm.rendered(operator=operator, jobs=jobs)
    deployment, ours = of(objects, "Deployment"), container(objects)
    pod = deployment["spec"]["template"]["spec"]
    assert deployment["metadata"]["annotations"] == {"owner": "ml"}
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (1000, True)
    assert pod["topologySpreadConstraints"] == [spread]
    assert ours["securityContext"]["readOnlyRootFilesystem"] is False
    assert (ours["livenessProbe"]["periodSeconds"], ours["livenessProbe"]["httpGet"]["path"]) == (60, "/healthz")
    assert ours["readinessProbe"]["timeoutSeconds"] == 9
    assert ours["env"][-1] == operator["env"][0]
    assert (ours["volumeMounts"][-1], pod["volumes"][-1]) == (operator["volumeMounts"][0], operator["volumes"][0])
    for one in ours["env"]:
        if "value" in one:
            monkeypatch.setenv(one["name"], one["value"])
    told = parse(ours["args"][3:])
    assert (told.images.pull_policy, told.images.tolerations) == ("Always", (toleration,))
    assert told.template_fields == ("spec.nodeSelector",)


def test_labels_of_ones_own_are_on_every_object_and_never_replace_ours(helm: Helm) -> None:
    values = {**EVERYTHING, "extraLabels": {"team": "ml", "app.kubernetes.io/name": "mine"}}
    for one in helm.rendered(**values):
        labels = one["metadata"]["labels"]
        assert (labels["team"], labels["app.kubernetes.io/name"]) == ("ml", "tandem"), one["metadata"]["name"]


@pytest.mark.parametrize(
    ("values", "prefix"),
    [({"nameOverride": "t2"}, "tandem-t2"), ({"fullnameOverride": "other"}, "other"), ({}, "tandem")],
)
def test_objects_are_called_after_the_release(helm: Helm, values: dict[str, str], prefix: str) -> None:
    assert of(helm.rendered(**values), "Deployment")["metadata"]["name"] == f"{prefix}-operator"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "ServiceMonitor"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "PodMonitor"),
        ({"metrics": {"alerts": {"enabled": True}}}, "PrometheusRule"),
        ({"metrics": {"dashboards": {"enabled": True}}}, "ConfigMap"),
        ({"networkPolicy": {"enabled": True}}, "NetworkPolicy"),
        ({"operator": {"pdb": {"enabled": True}}}, "PodDisruptionBudget"),
        ({"priorityClasses": [{"name": "urgent", "value": 10}]}, "PriorityClass"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_switch_adds_its_kind_and_nothing_else(helm: Helm, values: dict[str, Any], kind: str) -> None:
    assert kinds(helm.rendered(**values)) - kinds(helm.rendered()) == {kind}


def test_priority_classes_are_as_they_are_asked_for(helm: Helm) -> None:
    asked = {"name": "urgent", "value": 1_000_000, "description": "d", "preemptionPolicy": "Never"}
    made = of(helm.rendered(priorityClasses=[asked]), "PriorityClass")
    assert {**made, "name": made["metadata"]["name"]}.items() >= asked.items()


def test_the_service_can_go_but_not_while_its_monitor_stays(helm: Helm) -> None:
    assert "Service" not in kinds(helm.rendered(metrics={"service": {"enabled": False}}))
    values = {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}}
    said = helm.refusal("template", CHART, values=values)
    assert "metrics.serviceMonitor.enabled needs metrics.service.enabled" in said


def test_the_mlflow_server_needs_a_registry_that_has_its_image(helm: Helm) -> None:
    said = helm.refusal("template", CHART, values={"mlflow": {"enabled": True}})
    assert "mlflow.enabled needs images.mlflow.registry, or images.registry" in said


def test_monitors_take_our_numbers_alone_and_name_the_job_by_its_pod(helm: Helm) -> None:
    objects = helm.rendered(**EVERYTHING)
    operators, jobs = of(objects, "ServiceMonitor"), of(objects, "PodMonitor")
    port = {"port": "metrics", "path": "/metrics", "honorLabels": False, "scrapeTimeout": "10s"}
    for interval, endpoint in (
        ("30s", operators["spec"]["endpoints"][0]),
        ("15s", jobs["spec"]["podMetricsEndpoints"][0]),
    ):
        assert {**endpoint, **port, "interval": interval} == endpoint
        kept = {"sourceLabels": ["__name__"], "regex": "tandem_.*", "action": "keep"}
        assert endpoint["metricRelabelings"][0] == kept
    assert jobs["spec"]["jobLabel"] == names.JOB
    operators_own = {"sourceLabels": ["__name__"], "regex": "tandem_operator_.*", "action": "drop"}
    assert operators_own in jobs["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    assert operators_own not in operators["spec"]["endpoints"][0]["metricRelabelings"]
    assert (jobs["spec"]["sampleLimit"], jobs["spec"]["labelLimit"]) == (65000, 32)
    assert jobs["spec"]["selector"] == {"matchLabels": {"tandem.dev/role": "coordinator"}}
    assert jobs["spec"]["namespaceSelector"] == {"any": True}
    template = coordinator(job(), IMAGES, token_digest="", colocated=False)
    assert jobs["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert "metrics" in [one["name"] for one in template["spec"]["containers"][0]["ports"]]
    service = of(objects, "Service")
    assert operators["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [one["name"] for one in service["spec"]["ports"]] == ["metrics"]
    assert all(one["metadata"]["labels"]["release"] == "prometheus" for one in (operators, jobs))


def test_alerts_are_those_of_the_file_with_runbooks_and_labels_of_ones_own(helm: Helm) -> None:
    written = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    plain = of(helm.rendered(metrics={"alerts": {"enabled": True}}), "PrometheusRule")
    assert [rule for group in plain["spec"]["groups"] for rule in group["rules"]] == written
    names = [rule["alert"] for rule in written if "alert" in rule]
    settings = {
        "enabled": True,
        "alertLabels": {"team": "ml"},
        "runbookBase": "https://git.example/tandem/",
        "disabled": names[:1],
    }
    rule = of(helm.rendered(metrics={"alerts": settings}), "PrometheusRule")
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert [one["alert"] for one in alerts] == names[1:]
    assert all(one["labels"]["team"] == "ml" for one in alerts)
    assert all(
        one["annotations"]["runbook_url"].startswith("https://git.example/tandem/docs/alerts.md#") for one in alerts
    )
    said = helm.refusal("template", CHART, values={"metrics": {"alerts": {**settings, "disabled": ["Nonesuch"]}}})
    assert 'there is no alert "Nonesuch"; there are ' in said
    assert names[0] in said


def test_each_dashboard_is_a_config_map_that_the_sidecar_finds(helm: Helm) -> None:
    settings = {"enabled": True, "namespace": "monitoring", "label": "dash", "labelValue": "yes"}
    objects = helm.rendered(metrics={"dashboards": {**settings, "annotations": {"folder": "ML"}}})
    maps = [one for one in objects if one["kind"] == "ConfigMap"]
    assert DASHBOARDS
    assert [json.loads(text) for one in maps for text in one["data"].values()] == [
        json.loads(path.read_text()) for path in DASHBOARDS
    ]
    for one in maps:
        assert (one["metadata"]["namespace"], one["metadata"]["labels"]["dash"]) == ("monitoring", "yes")
        assert one["metadata"]["annotations"]["folder"] == "ML"


def test_a_network_policy_lets_through_what_the_operator_needs(helm: Helm) -> None:
    values = {"networkPolicy": {"enabled": True, "apiServerPorts": [16443]}}
    policy = of(helm.rendered(**values), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "from" not in policy["ingress"][0]
    ports = [one["port"] for rule in policy["egress"] for one in rule["ports"]]
    assert ports == [53, 53, 16443, 7070]


def test_the_mlflow_server_is_a_restricted_pod_that_coordinators_reach_and_the_operator_tells_them_of(
    helm: Helm,
) -> None:
    before, objects = helm.rendered(), helm.rendered(**MLFLOW)
    own = [one for one in objects if one["metadata"]["name"] == "tandem-mlflow"]
    assert sorted(one["kind"] for one in own) == ["Deployment", "NetworkPolicy", "PersistentVolumeClaim", "Service"]
    assert len(objects) == len(before) + len(own)
    server = next(one for one in own if one["kind"] == "Deployment")["spec"]
    pod, ours = server["template"]["spec"], server["template"]["spec"]["containers"][0]
    assert (pod["automountServiceAccountToken"], pod["securityContext"]["runAsNonRoot"]) == (False, True)
    assert ours["securityContext"]["readOnlyRootFilesystem"] is True
    policy = next(one for one in own if one["kind"] == "NetworkPolicy")["spec"]
    coordinators = {"namespaceSelector": {}, "podSelector": {"matchLabels": {names.ROLE: names.COORDINATOR}}}
    assert (policy["ingress"][0]["from"], policy["egress"]) == ([coordinators], [])
    labels = server["template"]["metadata"]["labels"]
    operators = of(before, "Deployment")["spec"]["selector"]["matchLabels"]
    for selector in (policy["podSelector"]["matchLabels"], of(own, "Service")["spec"]["selector"]):
        assert selector.items() <= labels.items()
        assert not selector.items() <= operators.items()
    uri = "http://tandem-mlflow.tandem-system.svc:5000"
    operator = next(
        one for one in objects if one["metadata"]["name"] == "tandem-operator" and one["kind"] == "Deployment"
    )
    arguments = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--mlflow-uri={uri}" in arguments
    (hosts,) = [one for one in ours["args"] if one.startswith("--allowed-hosts=")]
    assert uri.removeprefix("http://") in hosts.partition("=")[2].split(",")
    assert (
        "--mlflow-uri=https://mlflow.example"
        in container(helm.rendered(mlflow={"uri": "https://mlflow.example"}))["args"]
    )


def test_the_collector_of_traces_reaches_the_operator_and_is_off_by_default(helm: Helm) -> None:
    url = "http://collector.observability:4318"
    assert f"--otlp-endpoint={url}" in container(helm.rendered(tracing={"endpoint": url}))["args"]
    assert not [word for word in container(helm.rendered())["args"] if word.startswith("--otlp")]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"operater": {}}, "", "additional properties 'operater' not allowed"),
    ({"operator": {"replicas": 2}}, "/operator", "additional properties 'replicas' not allowed"),
    ({"operator": {"namespaces": "vision"}}, "/operator/namespaces", "got string, want array"),
    ({"operator": {"namespaces": ["Vision"]}}, "/operator/namespaces/0", "'Vision' does not match pattern '^[a-z0-9]"),
    ({"operator": {"namespaces": ["a", "a"]}}, "/operator/namespaces", "items at 0 and 1 are equal"),
    ({"crds": {"keep": "no"}}, "/crds/keep", "got string, want boolean"),
    (
        {"images": {"pullPolicy": "Often"}},
        "/images/pullPolicy",
        "value must be one of 'Always', 'IfNotPresent', 'Never'",
    ),
    ({"images": {"operator": {"digest": "abc"}}}, "/images/operator/digest", "'abc' does not match pattern '^(sha256:"),
    ({"images": {"trainer": {"repository": ""}}}, "/images/trainer/repository", "'' does not match pattern '^[a-z0-9"),
    (
        {"jobs": {"accessModes": ["RWX"]}},
        "/jobs/accessModes/0",
        "value must be one of 'ReadWriteMany', 'ReadWriteOnce'",
    ),
    (
        {"jobs": {"packageIndex": "https://me:secret@packages.example"}},
        "/jobs/packageIndex",
        "'https://me:secret@packages.example' does not match pattern",
    ),
    ({"jobs": {"accessModes": []}}, "/jobs/accessModes", "minItems: got 0, want 1"),
    ({"jobs": {"volumeSize": "10 GB"}}, "/jobs/volumeSize", "'10 GB' does not match pattern '^[0-9]+"),
    (
        {"jobs": {"networkPolicy": {"metricsFrom": [{}]}}},
        "/jobs/networkPolicy/metricsFrom/0",
        "minProperties: got 0, want 1",
    ),
    ({"metrics": {"podMonitor": {"interval": 15}}}, "/metrics/podMonitor/interval", "got number, want string"),
    ({"metrics": {"podMonitor": {"interval": "15"}}}, "/metrics/podMonitor/interval", "'15' does not match pattern"),
    ({"networkPolicy": {"apiServerPorts": [70000]}}, "/networkPolicy/apiServerPorts/0", "got 70,000, want 65,535"),
    ({"priorityClasses": [{"name": "urgent"}]}, "/priorityClasses/0", "missing property 'value'"),
    ({"mlflow": {"uri": "https://me:secret@mlflow.example"}}, "/mlflow/uri", "does not match pattern"),
    ({"tracing": {"endpoint": "collector:4317"}}, "/tracing/endpoint", "does not match pattern"),
    ({"extraLabels": {"team": 7}}, "/extraLabels/team", "got number, want string"),
]


@pytest.mark.parametrize(("wrong", "place", "words"), WRONG, ids=[f"{place}: {words}" for _, place, words in WRONG])
def test_wrong_values_are_refused_with_their_place_and_what_is_right(
    helm: Helm, wrong: dict[str, Any], place: str, words: str
) -> None:
    said = helm.refusal("template", "tandem", CHART, values=wrong)
    assert f"- at '{place}': " in said
    assert words in said
    assert len(said.splitlines()) <= 5, "it is one mistake"


def test_an_account_that_is_not_made_has_to_be_named(helm: Helm) -> None:
    said = helm.refusal("template", "tandem", CHART, values={"serviceAccount": {"create": False}})
    assert "serviceAccount.name: say which account the operator has, or set serviceAccount.create to true" in said


def test_a_chart_around_this_one_may_share_its_values(helm: Helm) -> None:
    assert helm.rendered(**{"global": {"anything": 1}}) == helm.rendered()


@pytest.fixture(scope="module")
def monitoring() -> Iterator[None]:
    """Stand-ins for the Prometheus operator's kinds; those that are there already are left alone."""
    there = kubectl("get", "crd", "-o", "name")
    made = [
        stand_in(kind, plural) for kind, plural in MONITORING.items() if f"{plural}.monitoring.coreos.com" not in there
    ]
    for one in made:
        kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(one))
    for one in made:
        established(f"crd/{one['metadata']['name']}")
    yield
    for one in made:
        kubectl("delete", "crd", one["metadata"]["name"], "--wait=false")


def stand_in(kind: str, plural: str) -> Manifest:
    group = "monitoring.coreos.com"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


@pytest.fixture(scope="module")
def place() -> Iterator[Namespace]:
    """A namespace in which pods have to be restricted."""
    with restricted() as found:
        yield found


@pytest.mark.parametrize(
    "values",
    [
        lambda name: {},
        lambda name: {**EVERYTHING, "mlflow": {"enabled": True}},
        lambda name: {**EVERYTHING, "operator": {**EVERYTHING["operator"], "namespaces": [name]}},
    ],
    ids=["by default", "with everything", "confined to a namespace"],
)
def test_a_real_api_server_takes_every_object(
    helm: Helm, monitoring: None, place: Namespace, values: Callable[[str], dict[str, Any]]
) -> None:
    objects = helm.rendered(place.name, **values(place.name))
    options = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--field-manager=test")
    # The Role of the Lease is in a namespace that helm names, and kubectl takes one namespace at a time.
    elsewhere = [one for one in objects if one["metadata"].get("namespace", place.name) != place.name]
    here = [one for one in objects if one not in elsewhere]
    for apply, some in ((place, here), (kubectl, elsewhere)):
        together = {"apiVersion": "v1", "kind": "List", "items": some}
        said = apply("apply", *options, "-f", "-", stdin=json.dumps(together)) if some else ""
        assert len(said.splitlines()) == len(some), said
