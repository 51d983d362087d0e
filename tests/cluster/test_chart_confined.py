"""The chart confined to a namespace: its operator works there alone, and who installs it needs no right elsewhere."""

import json
from collections.abc import Iterator

import pytest

from tandem_operator.rbac import lease_rules, rules
from tests.support.cluster.helm import CHART, Helm, image_values
from tests.support.cluster.images import Images
from tests.support.cluster.operated import CRD, KIND, Job, kubectl, manifest
from tests.support.cluster.pods import Namespace, restricted

INSTALLER = "platform"


@pytest.fixture
def team() -> Iterator[Namespace]:
    """The only namespace that an operator looks after, and that its installer has rights in."""
    with restricted() as found:
        yield found


def grant(user: str, namespace: Namespace) -> None:
    """Make somebody the admin of a namespace, who may hand on what the operator needs there."""
    namespace("create", "role", "handed-on", "--verb=get", "--resource=pods")
    patch = json.dumps({"rules": [*rules(), *lease_rules()]})
    namespace("patch", "role", "handed-on", "--type=merge", "-p", patch)
    namespace("create", "rolebinding", "handed-on", "--role=handed-on", f"--user={user}")
    namespace("create", "rolebinding", "admin", "--clusterrole=admin", f"--user={user}")


@pytest.mark.timeout(600)
@pytest.mark.full("charts", "operator")
def test_confined_to_a_namespace_nobody_needs_rights_in_the_whole_cluster(
    helm: Helm, images: Images, system: Namespace, namespace: Namespace, team: Namespace, released: None
) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    for one in (system, team):
        grant(INSTALLER, one)
    modes = ["ReadWriteMany", "ReadWriteOnce"]
    values = {
        **image_values(images),
        "crds": {"enabled": False},
        "operator": {"namespaces": [team.name]},
        "jobs": {"accessModes": modes},
    }
    at = ("tandem", CHART, f"--namespace={system.name}")
    notes = helm("install", *at, "--wait", "--timeout=150s", f"--kube-as-user={INSTALLER}", values=values)
    assert f"kubectl -n {team.name} apply -f examples/digits.yaml" in notes

    account = f"system:serviceaccount:{system.name}:tandem-operator"

    def may(verb: str, what: str, *where: str) -> str:
        return team("auth", "can-i", verb, what, *where, f"--as={account}", check=False).strip()

    everywhere = ("--all-namespaces",)
    assert [may("create", "pods"), may("list", KIND), may("create", "secrets")] == ["yes"] * 3
    assert [may(verb, "secrets") for verb in ("get", "list", "delete")] == ["no"] * 3
    assert may("create", "roles") == "no"
    assert [may("list", KIND, *everywhere), may("list", "pods", *everywhere), may("get", "nodes")] == ["no"] * 3
    bound = json.loads(kubectl("get", "clusterrolebindings", "-o", "json"))["items"]
    subjects = [one for binding in bound for one in binding.get("subjects", []) if one["kind"] == "ServiceAccount"]
    assert (system.name, "tandem-operator") not in [(one.get("namespace"), one["name"]) for one in subjects]

    job, elsewhere = Job(team, "short"), Job(namespace, "elsewhere")
    elsewhere.apply(manifest("elsewhere"))
    job.apply(manifest("short"))
    job.reaches("Succeeded", seconds=300)
    assert team.get("pvc", "short-checkpoints")["spec"]["accessModes"] == modes
    assert elsewhere.phase == "", "it is nobody's"
    assert "event=look-broken" not in system("logs", "deployment/tandem-operator")
    namespace("delete", "dtj", "elsewhere", "--wait=false")
