"""Two tenants do in their own namespaces what they can, all of it at once, and a third one's job notices nothing.

The attacks, the weakness that each looks for, and what becomes of it: tests/support/cluster/attacks.py.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tandem_operator import names
from tests.support.cluster import ON_OUR_OWN
from tests.support.cluster.attacks import ATTACKS, Attack
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, install, kubeconfig, manifest
from tests.support.cluster.pods import restricted
from tests.support.cluster.tenants import Tenant, Victim
from tests.support.waiting import until

pytestmark = [pytest.mark.full("operator"), pytest.mark.alone, pytest.mark.timeout(580), ON_OUR_OWN]
SUMS = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
end, told, sums = os.path.join(os.environ["TANDEM_RUN_DIR"], "end"), torch.zeros(1), 0
while not told.item():
    told.fill_(os.path.exists(end))
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    sums += 1
    time.sleep(0.05)
print("sums", sums, flush=True)
"""
"""Two ranks that need each other twenty times a second, until they are told to end."""
END = "import os, pathlib; pathlib.Path(os.environ['TANDEM_RUN_DIR'], 'end').touch()"
GPU = {"limits": {"nvidia.com/gpu": 1}}


@dataclass(frozen=True)
class Scene:
    """What there is once every attack was tried and the third one's job has ended."""

    tenants: list[Tenant]
    job: Job
    operator: Operator
    workers: list[str]
    """Of the third one, as they were before the first attack."""


def tries(tenant: Tenant) -> None:
    """Every attack, one after the other."""
    for attack in ATTACKS:
        attack.does(tenant)


def victim(job: Job) -> Victim:
    """Where a job is, as whoever looks for it can find out."""
    (coordinator,) = job.pods("coordinator")
    service = job.namespace.get("service", names.coordinator(job.name))["spec"]["clusterIP"]
    uid = job.namespace.get("dtj", job.name)["metadata"]["uid"]
    return Victim(job.name, job.namespace.name, uid, coordinator["status"]["podIP"], service)


@pytest.fixture(scope="module")
def scene(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A job trains, all attacks are tried on it, the operator starts anew among them, and the job ends."""
    folder = tmp_path_factory.mktemp("tenants")
    with ExitStack() as stack:
        third, *others = (stack.enter_context(restricted()) for _ in range(3))
        install(third)
        operator = stack.enter_context(Operator(third, images, kubeconfig(third, folder), folder / "operator.log"))
        tenants = [Tenant(namespace, images, operator, folder) for namespace in others]
        for tenant in tenants:
            tenant.settles(third)
        everywhere = [f"--namespace={namespace.name}" for namespace in others]
        operator.start(*everywhere)
        job = Job(third, "digits")
        both = {"replicas": 2, "minReplicas": 2, "resources": GPU, "processesPerReplica": 1}
        script = {"command": ["python", "-c", SUMS]}
        job.apply(manifest("digits", trainer=script, workers=both, evaluators={"replicas": 0}))
        job.becomes(lambda: job.status.get("worldSize") == 2 and job.phase == "Running", "two in one group", 300.0)
        workers = job.live("worker")
        for tenant in tenants:
            tenant.victim = victim(job)
        with ThreadPoolExecutor(len(tenants)) as at_once:
            list(at_once.map(tries, tenants))
        # What it finds at its start, it finds all at once.
        operator.stop()
        operator.start(*everywhere)
        third("exec", workers[0], "-c", "worker", "--", "python", "-c", END)
        job.reaches("Succeeded", "Failed")
        yield Scene(tenants, job, operator, workers)


def test_the_third_ones_job_trains_to_its_end_undisturbed(scene: Scene) -> None:
    job, status = scene.job, scene.job.status
    assert (status["phase"], status["restarts"], status["generation"]) == ("Succeeded", 0, 1), job.describe()
    assert sorted(one["metadata"]["name"] for one in job.pods("worker")) == scene.workers
    for worker in scene.workers:
        assert "sums" in job.namespace("logs", worker, "-c", "worker")
    warnings = job.namespace("get", "events", "--field-selector", "type=Warning,involvedObject.name=digits")
    assert warnings == "", warnings


@pytest.mark.parametrize("who", [0, 1], ids=["one", "another"])
@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{one.finding}: {one.name}" for one in ATTACKS])
def test_what_becomes_of_an_attack(scene: Scene, attack: Attack, who: int) -> None:
    tenant = scene.tenants[who]
    until(lambda: attack.fails(tenant), attack.name, 30.0, otherwise=lambda: shown(scene, tenant))


def test_the_operator_has_broken_at_nothing(scene: Scene) -> None:
    assert not scene.operator.has_ended
    for words in ("event=look-broken", "Traceback", "event=watch-stalled"):
        assert words not in scene.operator.log()


def test_nobody_is_told_of_another_tenant(scene: Scene) -> None:
    for tenant in scene.tenants:
        told = tenant.namespace("get", "dtj,events", "-o", "jsonpath={.items[*].status}{.items[*].message}")
        assert "QuotaExceeded" in told
        assert scene.job.namespace.name not in told


def shown(scene: Scene, tenant: Tenant) -> str:
    """What helps to see why an attack has ended otherwise."""
    return tenant.namespace("get", "dtj,pods,events", "-o", "wide", check=False) + scene.operator.log()[-8_000:]
