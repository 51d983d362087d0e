"""A job with its objects as the operator sees them, for tests of what it decides."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.job.resource import DistributedTrainingJob
from tandem.wire.status import Snapshot, Status
from tandem_operator import kinds, names, objects
from tandem_operator.lifecycle import IDLE_ANSWERS, IDLE_SECONDS, Idle
from tandem_operator.objects import Manifest
from tandem_operator.observed import Children, KubeObject, Pod, Service, VolumeClaim, children
from tandem_operator.plan import ReconcileInputs, ReconcilePlan
from tandem_operator.pods import Images
from tandem_operator.reconcile import reconcile
from tests.support import manifests
from tests.support.manifests import images

NOW = 1_000_000.0
UID = "uid-of-the-job"
IMAGES = Images(operator="operator:1", trainer="trainer:1", evaluator="evaluator:1")
ENDPOINT = "10.0.0.7:7070"
TASK = images({"data": {"name": "digits"}})
IDLE = Idle(0, NOW - 2 * IDLE_SECONDS, 2 * IDLE_ANSWERS)
"""The coordinator has said for a while that nobody trains."""
SCRIPT = {"command": ["python", "train.py"]}


def job(name: str = "digits", status: dict[str, Any] | None = None, **spec: Any) -> DistributedTrainingJob:
    """A job of two workers that trains the digits, unless its spec says something else."""
    whole = {"trainer": TASK, "workers": {"replicas": 2}} | spec
    return manifests.job(name, "default", status, **whole)


def heard(phase: str = "Running", **status: Any) -> Snapshot:
    workers = {"desired": 2, "ready": 2, "min": 1, "max": 2}
    whole = {"phase": phase, "workers": workers, "generation": 1, "worldSize": 2} | status
    return Snapshot(job="digits", time=NOW, status=Status.parse(whole))


def worker(index: int = 0, name: str = "", **facts: Any) -> Pod:
    """A worker pod that runs."""
    name = name or f"digits-worker-{index}-aaaaa"
    facts = {"phase": "Running", "ready": True, "created": NOW - 500, "started": NOW - 490} | facts
    facts = {"owner": UID, "endpoint": ENDPOINT, "has_run": facts["started"] is not None} | facts
    return Pod(name=name, uid=f"uid-of-{name}", role=names.WORKER, index=index, **facts)


def coordinator(of: DistributedTrainingJob | None = None, name: str = "", **facts: Any) -> Pod:
    """A coordinator's pod that runs, as the operator would have made it for such a job."""
    name = name or "digits-coordinator-0-aaaaa"
    template = objects.coordinator_template(of or job(), IMAGES).digest
    given = {"phase": "Running", "ready": True, "created": NOW - 500, "started": NOW - 490, "template": template}
    given |= {"address": "10.1.1.1", "uid": f"uid-of-{name}", "owner": UID}
    given |= {"has_run": facts.get("started", NOW) is not None}
    return Pod(name=name, role=names.COORDINATOR, **{**given, **facts})


def evaluator(of: DistributedTrainingJob | None = None, index: int = 0, name: str = "", **facts: Any) -> Pod:
    """An evaluator pod that runs, as the operator would have made it for such a job."""
    name = name or f"digits-evaluator-{index}-aaaaa"
    template = objects.evaluator_template(of or job(), UID, IMAGES).digest
    given = {"phase": "Running", "ready": True, "created": NOW - 500, "started": NOW - 490, "template": template}
    return Pod(name=name, uid=f"uid-of-{name}", role=names.EVALUATOR, index=index, **{"owner": UID, **given, **facts})


def ended(index: int = 0, name: str = "", code: int = 1, **facts: Any) -> Pod:
    """A worker pod that has ended just now, ten seconds after its start."""
    phase = "Succeeded" if code == 0 else "Failed"
    times = {"created": NOW - 12, "started": NOW - 10, "finished": NOW}
    return worker(index, name, **{"phase": phase, "ready": False, "code": code, **times, **facts})


def pod_status(container: str, phase: str, at: str, code: int | None = None, silent: bool = False) -> dict[str, Any]:
    """The status of a pod with one container, as its kubelet writes it.

    Args:
        at: when the container started, and ended.
        silent: its node does not answer any more.
    """
    running = phase == "Running"
    times = {"startedAt": at} if running else {"startedAt": at, "finishedAt": at, "exitCode": code}
    conditions = {"Ready": running and not silent, "ContainersReady": running}
    return {
        "phase": phase,
        "podIP": "10.1.1.1",
        "conditions": [{"type": kind, "status": str(holds)} for kind, holds in conditions.items()],
        "containerStatuses": [{"name": container, "state": {"running" if running else "terminated": times}}],
    }


def initialized(**status: Any) -> dict[str, Any]:
    """The status of a job whose coordinator has answered."""
    condition = {"type": "Initialized", "status": "True", "lastTransitionTime": "1970-01-12T13:00:00Z"}
    return {"phase": "Running", "conditions": [condition], **status}


def surroundings(of: DistributedTrainingJob, *more: KubeObject, evaluators: Sequence[Pod] | None = None) -> Children:
    """Everything but workers that such a job has while it trains, as the operator would have made it."""
    sitting = [evaluator(of, index) for index in range(of.spec.evaluation.replicas)]
    found: list[KubeObject] = [
        _thing(objects.job_file(of, UID), KubeObject(kind=kinds.CONFIG_MAP, name="")),
        _thing(objects.claim(of, UID), VolumeClaim(name="", phase="Bound")),
        _thing(objects.service(of, UID), Service(name="", address="10.0.0.7")),
        *(sitting if evaluators is None else evaluators),
        coordinator(of),
    ]
    return children([*found, *more])


def running(
    *more: KubeObject, status: dict[str, Any] | None = None, **spec: Any
) -> tuple[DistributedTrainingJob, Children]:
    """A job that trains with two workers."""
    of = job(status=initialized(**(status or {})), **spec)
    return of, surroundings(of, worker(0), worker(1), *more)


def situation(of: DistributedTrainingJob, there: Children | None = None, **facts: Any) -> ReconcileInputs:
    there = surroundings(of) if there is None else there
    whole: dict[str, Any] = {"uid": UID, "now": NOW, "entropy": "e", **facts}
    return ReconcileInputs(job=of, children=there, **whole)


def decided(of: DistributedTrainingJob, there: Children | None = None, **facts: Any) -> ReconcilePlan:
    return reconcile(situation(of, there, **facts), IMAGES)


def reason(plan: ReconcilePlan, kind: str = "Ready") -> str:
    """The reason of one of the job's conditions."""
    return next(condition.reason for condition in plan.status.conditions if condition.type == kind)


def made(plan: ReconcilePlan) -> list[str]:
    return [called(manifest) for manifest in (*plan.create, *plan.create_pods)]


def removed(plan: ReconcilePlan) -> list[str]:
    return [removal.name for removal in plan.delete]


def called(manifest: Manifest) -> str:
    """Kind and name of an object; of pods role and index, because their names are random."""
    labels = manifest["metadata"]["labels"]
    if names.INDEX in labels:
        return f"{labels[names.ROLE]} {labels[names.INDEX]}"
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _thing(manifest: Manifest, kind: KubeObject) -> KubeObject:
    owners = manifest["metadata"].get("ownerReferences", [])
    return replace(
        kind,
        name=manifest["metadata"]["name"],
        uid=f"uid-of-{manifest['metadata']['name']}",
        owner=owners[0]["uid"] if owners else "",
        applied=objects.applied(manifest),
    )
