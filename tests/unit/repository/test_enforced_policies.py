"""The rules by which the test cluster enforces NetworkPolicies say what the policies say."""

from typing import Any

import pytest

from tandem_operator import names, objects
from tandem_operator.objects import Manifest, Peers
from tests.support.cluster.policies import CHAIN, NotEnforcedError, rules
from tests.support.worlds.operator_job import UID, job

SPACES = [
    {"kind": "Namespace", "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}}}
    for name in ("default", "system")
]
HOME = {"matchLabels": {"kubernetes.io/metadata.name": "system"}}
OPERATOR: Manifest = {"namespaceSelector": HOME, "podSelector": {"matchLabels": {"app": "operator"}}}
OWN = {names.JOB: "digits"}


def pod(address: str, labels: dict[str, str], namespace: str = "default", **more: Any) -> Manifest:
    metadata = {"name": address, "namespace": namespace, "labels": labels}
    status = {"podIP": address, "phase": more.pop("phase", "Running")}
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": [{}], **more}, "status": status}


PODS = [
    pod("198.18.16.1", OWN),
    pod("198.18.16.2", OWN),
    pod("198.18.16.3", {}),
    pod("198.18.16.4", OWN, "system"),
    pod("198.18.16.5", {"app": "operator"}, "system"),
    pod("198.18.16.6", {"app": "operator"}),
    pod("198.18.0.1", OWN, hostNetwork=True),
    pod("198.18.16.7", OWN, phase="Succeeded"),
]


def policy(**spec: Any) -> Manifest:
    return {"metadata": {"name": "p", "namespace": "default"}, "spec": {"podSelector": {}, **spec}}


def appended(*policies: Manifest) -> list[str]:
    """The rules, without what is before and behind them."""
    lines = rules(policies, PODS, SPACES).splitlines()
    assert lines[:2] == ["*filter", f":{CHAIN} - [0:0]"]
    assert lines[2] == f"-A {CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"
    assert lines[-1] == "COMMIT"
    return sorted(line.removeprefix(f"-A {CHAIN} ") for line in lines[3:-1])


def test_without_policies_nothing_is_kept_out() -> None:
    assert appended() == []


def test_the_policy_of_a_job_lets_in_its_pods_and_the_operator() -> None:
    made = objects.network_policy(job(), UID, Peers((OPERATOR,)))
    expected = []
    for one, other in (("198.18.16.1", "198.18.16.2"), ("198.18.16.2", "198.18.16.1")):
        expected += [
            f"-d {one}/32 -j DROP",
            f"-s {one}/32 -d {one}/32 -j RETURN",
            f"-s {one}/32 -d {one}/32 -j RETURN",
            f"-s {other}/32 -d {one}/32 -j RETURN",
            f"-s 198.18.16.5/32 -d {one}/32 -p tcp --dport 7070 -j RETURN",
        ]
    assert appended(made) == sorted(expected)
    lines = rules([made], PODS, SPACES).splitlines()
    drop = next(index for index, line in enumerate(lines) if line.endswith("-d 198.18.16.1/32 -j DROP"))
    assert not [line for line in lines[drop:] if "-d 198.18.16.1/32" in line and line.endswith("RETURN")]


def test_a_policy_without_rules_keeps_everybody_out_and_one_without_from_nobody() -> None:
    one = {"matchLabels": {"app": "operator"}}
    own = "-s 198.18.16.6/32 -d 198.18.16.6/32 -j RETURN"
    drop = "-d 198.18.16.6/32 -j DROP"
    assert appended(policy(podSelector=one)) == [drop, own]
    everybody = "-s 0.0.0.0/0 -d 198.18.16.6/32 -j RETURN"
    assert appended(policy(podSelector=one, ingress=[{}])) == sorted([drop, everybody, own])


@pytest.mark.parametrize(
    ("port", "words"),
    [
        ({"port": 80}, ["-p tcp --dport 80"]),
        ({"port": 80, "endPort": 90}, ["-p tcp --dport 80:90"]),
        ({"protocol": "UDP"}, ["-p udp"]),
        ({"port": "http"}, ["-p tcp --dport 8080"]),
        ({"port": "nobodys"}, []),
    ],
)
def test_ports_are_those_that_are_said(port: dict[str, Any], words: list[str]) -> None:
    there = pod("198.18.16.9", {"app": "x"}, containers=[{"ports": [{"name": "http", "containerPort": 8080}]}])
    block = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    text = rules([policy(ingress=[{"from": [block], "ports": [port]}])], [there], SPACES)
    found = [line for line in text.splitlines() if "10.0.0.0/8" in line]
    assert found == [f"-A {CHAIN} -s 10.0.0.0/8 -d 198.18.16.9/32 {word} -j RETURN" for word in words]


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"key": "app", "operator": "In", "values": ["operator"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["operator"]}, False),
        ({"key": "other", "operator": "NotIn", "values": ["operator"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "app", "operator": "DoesNotExist"}, False),
    ],
)
def test_labels_are_chosen_as_kubernetes_does(expression: dict[str, Any], selected: bool) -> None:
    text = rules([policy(podSelector={"matchExpressions": [expression]})], PODS, SPACES)
    assert ("-d 198.18.16.6/32 -j DROP" in text) == selected


@pytest.mark.parametrize(
    "spec",
    [
        {"policyTypes": ["Ingress", "Egress"]},
        {"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]}]},
    ],
    ids=str,
)
def test_what_is_not_enforced_is_an_error(spec: dict[str, Any]) -> None:
    with pytest.raises(NotEnforcedError):
        rules([policy(**spec)], PODS, SPACES)
