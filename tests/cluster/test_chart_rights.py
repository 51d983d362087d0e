"""What the chart lets the operator and people do: roles, the Lease, the policy that confines the account."""

from typing import Any

import yaml

from tandem_operator.rbac import lease_rules, queue_rules, rules, wait_rules
from tests.support.cluster.helm import CHART, Helm, container, kinds, of
from tests.support.cluster.pods import Manifest


def test_confined_to_namespaces_it_has_a_role_in_each_and_no_right_beyond(helm: Helm) -> None:
    objects = helm.rendered(operator={"namespaces": ["vision", "speech"]}, metrics={"podMonitor": {"enabled": True}})
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds(objects)
    made = [one for one in objects if one["kind"] in ("Role", "RoleBinding")]
    roles = [one for one in made if not one["metadata"]["name"].endswith("-key")]
    assert {one["metadata"]["namespace"] for one in made if one not in roles} == {"tandem-system"}
    for suffix, allowed in {"": rules(), "-lease": lease_rules()}.items():
        here = [one for one in roles if one["metadata"]["name"] == f"tandem-operator{suffix}"]
        assert sorted((one["kind"], one["metadata"]["namespace"]) for one in here) == [
            ("Role", "speech"),
            ("Role", "vision"),
            ("RoleBinding", "speech"),
            ("RoleBinding", "vision"),
        ]
        assert all(one["rules"] == allowed for one in here if one["kind"] == "Role")
    assert {"--namespace=vision", "--namespace=speech"} <= set(container(objects)["args"])
    assert of(objects, "PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["vision", "speech"]}


def test_accounts_and_roles_can_be_somebody_elses(helm: Helm) -> None:
    objects = helm.rendered(serviceAccount={"create": False, "name": "mine"}, rbac={"create": False})
    assert not {"ServiceAccount", "ClusterRoleBinding", "RoleBinding"} & kinds(objects)
    assert of(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    named = helm.rendered(serviceAccount={"name": "mine", "annotations": {"a": "b"}}, rbac={"userRoles": False})
    assert of(named, "ServiceAccount")["metadata"]["annotations"] == {"a": "b"}
    bindings = [one for one in named if one["kind"] == "ClusterRoleBinding"]
    assert [one["subjects"][0]["name"] for one in bindings] == ["mine", "mine"]
    assert {one["metadata"]["name"] for one in bindings} == {"tandem-operator", "tandem-operator-queues"}
    assert {one["metadata"]["name"] for one in named if one["kind"] == "ClusterRole"} == {
        "tandem-operator",
        "tandem-operator-queues",
    }


def test_queues_are_a_role_apart(helm: Helm) -> None:
    assert of(helm.rendered(), "ClusterRole", "tandem-operator-queues")["rules"] == [*queue_rules(), *wait_rules()]
    assert of(helm.rendered(rbac={"waits": False}), "ClusterRole", "tandem-operator-queues")["rules"] == queue_rules()
    without = helm.rendered(rbac={"queues": False})
    assert not [one for one in without if one["metadata"]["name"] == "tandem-operator-queues"]


def test_whoever_may_edit_in_a_namespace_may_edit_its_jobs(helm: Helm) -> None:
    objects = helm.rendered()
    edit = of(objects, "ClusterRole", "tandem-jobs-edit")
    view = of(objects, "ClusterRole", "tandem-jobs-view")
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{prefix}edit", f"{prefix}admin"} <= set(edit["metadata"]["labels"])
    assert f"{prefix}view" in view["metadata"]["labels"]
    assert "delete" in edit["rules"][0]["verbs"]
    assert view["rules"][0]["verbs"] == ["get", "list", "watch"]


def test_the_lease_is_where_it_is_told_to_be_or_is_not_asked_for(helm: Helm) -> None:
    elsewhere = helm.rendered(operator={"lease": {"namespace": "platform"}})
    assert of(elsewhere, "Role", "tandem-operator-lease")["metadata"]["namespace"] == "platform"
    assert "--lease-namespace=platform" in container(elsewhere)["args"]
    without = helm.rendered(operator={"lease": {"enabled": False}})
    assert "--no-lease" in container(without)["args"]
    assert [one["metadata"]["name"] for one in without if one["kind"] == "Role"] == ["tandem-operator-key"]


def test_the_account_is_confined_where_the_cluster_can_do_that(helm: Helm) -> None:
    def policies(namespace: str, *options: str, **values: Any) -> list[Manifest]:
        text = helm("template", "tandem", CHART, f"--namespace={namespace}", *options, values=values)
        return [one for one in yaml.safe_load_all(text) if one and one["kind"] == "ValidatingAdmissionPolicy"]

    new = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
    (made,) = policies("tandem-system", new)
    closed = made["spec"]["validations"][0]["expression"]
    assert all(f"'{name}'" in closed for name in ("kube-system", "tandem-system"))
    (by_default,) = policies("default", new)
    assert "'default'" not in by_default["spec"]["validations"][0]["expression"]
    assert policies("tandem-system") == [], "Kubernetes 1.29 does not know the kind"
    assert policies("tandem-system", new, admissionPolicy={"enabled": False}) == []
    assert policies("tandem-system", new, operator={"namespaces": ["vision"]}) == []
