"""Objects that somebody hostile makes in a namespace of his own: each is refused with a reason, or harms nobody."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.attacks import ATTACKS
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, install, kubeconfig, manifest
from tests.support.cluster.pods import Namespace, restricted
from tests.support.cluster.tenants import Tenant
from tests.support.waiting import until

OBJECTS = [attack for attack in ATTACKS if not attack.needs_pods]


@pytest.fixture
def tenant(namespace: Namespace, images: Images, tmp_path: Path) -> Iterator[Tenant]:
    """Somebody in a namespace that the operator of another one looks after, too."""
    install(namespace)
    operator = Operator(namespace, images, kubeconfig(namespace, tmp_path), tmp_path / "operator.log")
    with restricted() as his, operator:
        found = Tenant(his, images, operator, tmp_path)
        found.settles(namespace)
        operator.start(f"--namespace={his.name}")
        yield found


@pytest.mark.timeout(400)
def test_hostile_objects_harm_nobody(tenant: Tenant, namespace: Namespace) -> None:
    for attack in OBJECTS:
        attack.does(tenant)
    job = Job(namespace, "beside")
    said = {"command": ["python", "-c", "print('done')"]}
    job.apply(manifest("beside", trainer=said, workers={"replicas": 1}, evaluators={"replicas": 0}))
    for attack in OBJECTS:
        until(lambda attack=attack: attack.fails(tenant), attack.name, 60.0, otherwise=tenant.operator.log)  # type: ignore[misc]
    job.reaches("Succeeded", seconds=240)
    assert not tenant.operator.has_ended
    for words in ("event=look-broken", "Traceback"):
        assert words not in tenant.operator.log()
