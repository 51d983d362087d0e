"""The NetworkPolicy of each job, where the operator is told who else reaches its pods."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tandem_operator import kinds, names, objects
from tandem_operator.api import RequestRefused
from tandem_operator.job_memory import Attempt, delete_key
from tandem_operator.objects import Manifest, Peers
from tandem_operator.observed import Children, KubeObject
from tandem_operator.options import parse
from tandem_operator.reporting import JobProblem
from tests.support.worlds.operator_job import (
    NOW,
    UID,
    decided,
    heard,
    job,
    made,
    removed,
    running,
    surroundings,
)
from tests.support.worlds.operator_world import NAME, NAMESPACE, World, live

OPERATOR: Manifest = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tandem-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
}
PROMETHEUS: Manifest = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
PEERS = Peers((OPERATOR,), (PROMETHEUS,))
PLACE = (kinds.NETWORK_POLICY, NAMESPACE, names.network_policy(NAME))


def there_is(**facts: Any) -> KubeObject:
    """The NetworkPolicy of a job, as the operator has made it."""
    applied = objects.applied(objects.network_policy(job(), UID, PEERS))
    known = {"name": "digits-network", "uid": "uid-of-the-policy", "owner": UID, "applied": applied}
    return KubeObject(kind=kinds.NETWORK_POLICY, **{**known, **facts})


def test_pods_of_a_job_are_reached_by_each_other_and_few_others_reach_a_port() -> None:
    policy = objects.network_policy(job(), UID, PEERS)
    own = {"matchLabels": {names.JOB: "digits"}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            {"from": [OPERATOR], "ports": [{"port": 7070, "protocol": "TCP"}]},
            {"from": [PROMETHEUS], "ports": [{"port": 7071, "protocol": "TCP"}]},
        ],
    }
    (owner,) = policy["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert policy["metadata"]["labels"][names.JOB] == "digits"


def test_nobody_is_not_everybody() -> None:
    rules = objects.network_policy(job(), UID, Peers((OPERATOR,)))["spec"]["ingress"]
    assert [rule.get("ports", [{}])[0].get("port") for rule in rules] == [None, 7070]
    assert all(rule["from"] for rule in rules)


def test_it_is_about_every_pod_of_the_job() -> None:
    plans = [decided(job(), there, peers=PEERS) for there in (Children(), surroundings(job(), there_is()))]
    found = {name: pod["metadata"]["labels"] for plan in plans for pod in plan.create_pods for name in [made_as(pod)]}
    assert set(found) == set(names.ROLES)
    assert all(labels[names.JOB] == "digits" for labels in found.values())


def made_as(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][names.ROLE])


def test_a_job_that_runs_gets_one_when_it_is_switched_on_and_nothing_else() -> None:
    of, there = running()
    plan = decided(of, there, snapshot=heard(), peers=PEERS)
    assert (made(plan), plan.update, removed(plan)) == (["NetworkPolicy digits-network"], (), [])


def test_it_is_written_again_when_somebody_else_is_let_in() -> None:
    of, there = running(there_is())
    assert decided(of, there, snapshot=heard(), peers=PEERS).update == ()
    (update,) = decided(of, there, snapshot=heard(), peers=Peers((OPERATOR,))).update
    assert (update["kind"], update["metadata"]["uid"]) == ("NetworkPolicy", "uid-of-the-policy")


def test_it_goes_when_it_is_switched_off_and_nobody_elses_does() -> None:
    of, there = running(there_is())
    plan = decided(of, there, snapshot=heard())
    assert (made(plan), plan.update, removed(plan)) == ([], (), ["digits-network"])
    for other in (there_is(owner=""), there_is(owner="another"), there_is(name="mine"), there_is(deleting=True)):
        _, around = running(other)
        assert removed(decided(of, around, snapshot=heard())) == []


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_gets_none_keeps_its_own_and_loses_it(phase: str) -> None:
    of = job(status={"phase": phase, "completionTime": "1970-01-12T13:00:00Z"})
    alone = Children()
    assert made(decided(of, alone, peers=PEERS)) == []
    left = Children({(kinds.NETWORK_POLICY, "digits-network"): there_is()})
    assert removed(decided(of, left, peers=PEERS)) == []
    assert removed(decided(of, left)) == ["digits-network"]


def test_a_removal_that_is_refused_is_tried_again_after_a_pause() -> None:
    of, there = running(there_is())
    refused = Attempt(5, NOW, JobProblem("Refused", "a webhook says no"))
    waits = {delete_key("digits-network"): refused}
    plan = decided(of, there, snapshot=heard(), attempts=waits)
    assert removed(plan) == []
    assert delete_key("digits-network") not in plan.resolved
    due = {delete_key("digits-network"): replace(refused, last=NOW - 600)}
    assert removed(decided(of, there, snapshot=heard(), attempts=due)) == ["digits-network"]


def test_somebody_elses_of_that_name_is_left_alone_and_the_job_waits() -> None:
    plan = decided(job(), Children({(kinds.NETWORK_POLICY, "digits-network"): there_is(owner="")}), peers=PEERS)
    assert plan.create_pods == ()
    assert "NetworkPolicy digits-network exists and is not this job's" in (plan.status.message or "")


# A whole operator


@pytest.fixture
def isolated() -> World:
    """An operator that makes them."""
    world = World()
    world.options = {"peers": PEERS}
    world.start()
    return world


def test_no_pod_is_made_before_it(isolated: World) -> None:
    isolated.settle()
    created = [kind for verb, kind, _ in isolated.cluster.written if verb == "create"]
    assert created.index(kinds.NETWORK_POLICY) < created.index(kinds.POD)
    assert live(isolated, names.WORKER) == [0, 1]


def test_no_pod_is_made_without_it(isolated: World) -> None:
    said = RequestRefused(403, "Forbidden", "a webhook says no")
    isolated.cluster.refuses = lambda verb, place, _: said if place[0] is kinds.NETWORK_POLICY else None
    for _ in range(5):
        isolated.resync()
    assert isolated.cluster.pods() == []


def test_it_is_made_again_and_goes_with_the_switch(isolated: World) -> None:
    isolated.settle()
    before = [pod["metadata"]["uid"] for pod in isolated.cluster.pods()]
    isolated.cluster.end(PLACE)
    isolated.settle()
    assert PLACE in isolated.cluster.objects
    isolated.options = {}
    isolated.start()
    isolated.settle()
    assert PLACE not in isolated.cluster.objects
    assert [pod["metadata"]["uid"] for pod in isolated.cluster.pods()] == before, "nobody was restarted for it"


# The command line

GIVEN = ["--operator-image=o", "--trainer-image=t", "--evaluator-image=e"]


def test_the_operator_is_told_by_whom_pods_are_reached() -> None:
    assert parse(GIVEN).peers is None
    own, theirs = f"--operator-from={json.dumps([OPERATOR])}", f"--metrics-from={json.dumps([PROMETHEUS])}"
    assert parse([*GIVEN, own]).peers == Peers((OPERATOR,))
    assert parse([*GIVEN, own, theirs]).peers == PEERS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--operator-from={", "not JSON"),
        ("--operator-from={}", "not a list of objects"),
        ("--operator-from=[{}]", "{} is not a peer of a NetworkPolicy"),
        (
            '--operator-from=[{"podselector": {}}]',
            "is not a peer of a NetworkPolicy: ipBlock, namespaceSelector, podSelector",
        ),
        ('--metrics-from=[{"podSelector": {}}]', "--metrics-from needs --operator-from"),
    ],
)
def test_who_that_is_has_to_make_sense(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*GIVEN, words])
    assert said in capsys.readouterr().err
