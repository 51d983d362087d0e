"""Several queued jobs beside a played Kueue: what the operator decides about each is the real `reconcile`.

The API server has pods and Workloads. The operator knows of them what its own requests were answered and what its
watches have told. Kubelets start pods and end them, one at a time.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from tandem.formatting import rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.wire.status import Snapshot
from tandem_operator import kinds, names
from tandem_operator.job_memory import Memo
from tandem_operator.kinds import Kind
from tandem_operator.observed import KubeObject, Pod, children, observe
from tandem_operator.plan import ReconcileInputs, ReconcilePlan
from tandem_operator.reconcile import reconcile
from tandem_operator.workloads import NodePlacement, Queueing, stamped
from tests.support.worlds.operator_job import IMAGES, UID, heard, initialized, job, pod_status, surroundings
from tests.support.worlds.played_kueue import FLAVOR, Claim, Object, PlayedKueue

PRIORITIES = {"": 0, "near": 2, "urgent": 1000}
"""Priority classes; `near` is closer to the default one than a job has workers."""
EVENTUALLY = 400
"""Rounds after which nothing may be left to do."""


@dataclass
class QueuedJob:
    """A job, its pods as the API server has them, and what the operator knows."""

    job: DistributedTrainingJob
    pods: dict[str, Object] = field(default_factory=dict)
    known: dict[tuple[Kind, str], KubeObject] = field(default_factory=dict)
    complete: bool = False
    """Its training is."""
    memo: Memo = field(default_factory=Memo)
    around: list[KubeObject] = field(default_factory=list)
    """All that it has besides workers and Workloads."""
    admitted: int = 0
    """Number of its workers that may run, by the operator's last look."""

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def using(self) -> list[int]:
        """Indices of pods that use quota: those that have not ended, on nodes that answer."""
        seen = [observe(kinds.POD, body) for body in self.pods.values()]
        return sorted({pod.index for pod in seen if isinstance(pod, Pod) and not pod.ended and not pod.silent})

    @property
    def wants(self) -> bool:
        """It trains, or would."""
        return not self.complete and not self.job.spec.run_policy.suspend


class QueuedJobs:
    def __init__(self, nominal: int) -> None:
        self.kueue = PlayedKueue(nominal)
        self.jobs: dict[str, QueuedJob] = {}
        self.flavor = True
        """The ResourceFlavor exists."""
        self._looks = 0

    # What people do

    def submit(self, name: str, least: int, replicas: int, priority: str = "") -> None:
        policy = {"queueName": "gpus"} | ({"priorityClassName": priority} if priority else {})
        sizes = {"replicas": replicas, "minReplicas": least, "maxReplicas": 64}
        of = job(name, initialized(), workers=sizes, runPolicy=policy, evaluators={"replicas": 0})
        self.jobs[name] = QueuedJob(of)
        self._place(self.jobs[name])

    def edit(self, name: str, workers: dict[str, Any] | None = None, suspend: bool | None = None) -> None:
        """Change a job's sizes or requests, suspend it, or let it go on."""
        played = self.jobs[name]
        spec = played.job.spec.dump_brief()
        sizes: dict[str, Any] = {"replicas": 1, **spec["workers"], **(workers or {})}
        spec["workers"] = {**sizes, "minReplicas": min(sizes.get("minReplicas", 1), sizes["replicas"])}
        spec["runPolicy"] |= {} if suspend is None else {"suspend": suspend}
        played.job = job(name, **spec).model_copy(update={"status": played.job.status})
        self._place(played)

    @staticmethod
    def _place(played: QueuedJob) -> None:
        played.around = list(surroundings(played.job).objects.values())

    # The operator

    @property
    def queueing(self) -> Queueing | None:
        """What the operator reads of Kueue; None while its API is away."""
        return None if self.kueue.away else Queueing({FLAVOR: NodePlacement()} if self.flavor else {}, PRIORITIES)

    def look(self, name: str) -> ReconcilePlan | None:
        """The operator decides about a job by what it knows, and does it; None: it leaves it alone."""
        played, kueue = self.jobs[name], self.kueue
        queueing = self.queueing
        if queueing is None and not any(kind is kinds.WORKLOAD for kind, _ in played.known):
            # It would become a pod group, which this Kueue does not know.
            return None
        self._looks += 1
        plan = reconcile(
            ReconcileInputs(
                job=played.job,
                uid=UID,
                children=children([*played.around, *played.known.values()]),
                snapshot=self._snapshot(played),
                queueing=queueing,
                now=kueue.now,
                entropy=f"{name}-{self._looks}",
                memo=played.memo,
            ),
            IMAGES,
        )
        played.job = played.job.model_copy(update={"status": plan.status})
        played.admitted = plan.status.queue.admitted or 0 if plan.status.queue else 0
        for manifest in plan.create_pods:
            if manifest["metadata"]["labels"][names.ROLE] == names.WORKER:
                self._create_pod(played, manifest)
        for obsolete in plan.delete:
            self._delete(played, obsolete)
        for manifest in plan.create_workloads:
            if (created := kueue.create(manifest)) is not None:
                self._learn(played, kinds.WORKLOAD, created)
        for change in plan.write_workloads:
            content: Object = {"conditions": stamped(change.conditions, kueue.now)}
            content |= {"admission": None} if change.releases else {}
            known = change.workload
            if (written := kueue.patch_status(known.name, known.uid, known.version, content)) is not None:
                self._learn(played, kinds.WORKLOAD, written)
        return plan

    def tell(self, name: str, which: int = -1) -> None:
        """Watches tell the operator of a job's objects: of all, or of some, by the bits of a number."""
        played = self.jobs[name]
        facts = self._facts(played)
        for bit, place in enumerate(sorted({*facts, *played.known}, key=lambda place: (place[0].name, place[1]))):
            if which >> bit & 1:
                played.known.pop(place, None)
                played.known |= {place: facts[place]} if place in facts else {}

    def restart(self) -> None:
        """A new operator, which reads everything."""
        for played in self.jobs.values():
            played.known, played.memo = self._facts(played), Memo()

    def is_known(self, name: str) -> bool:
        """Whether the operator knows everything about a job."""
        return self.jobs[name].known == self._facts(self.jobs[name])

    def _facts(self, played: QueuedJob) -> dict[tuple[Kind, str], KubeObject]:
        bodies = [(kinds.POD, body) for body in played.pods.values()]
        bodies += [(kinds.WORKLOAD, body) for body in self.workloads(played.name)]
        return {(kind, body["metadata"]["name"]): observe(kind, body) for kind, body in bodies}

    @staticmethod
    def _learn(played: QueuedJob, kind: Kind, body: Object) -> None:
        played.known[kind, body["metadata"]["name"]] = observe(kind, body)

    def _snapshot(self, played: QueuedJob) -> Snapshot | None:
        return heard("Succeeded" if played.complete else "Running")

    def _create_pod(self, played: QueuedJob, manifest: Object) -> None:
        name, stamp = manifest["metadata"]["name"], rfc3339(self.kueue.now)
        assert name not in played.pods
        body = copy.deepcopy(manifest)
        body["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": stamp}
        played.pods[name] = body
        self._learn(played, kinds.POD, body)

    def _delete(self, played: QueuedJob, obsolete: KubeObject) -> None:
        body = played.pods.get(obsolete.name)
        if obsolete.kind is kinds.WORKLOAD:
            self.kueue.delete(obsolete.name, obsolete.uid)
            played.known.pop((kinds.WORKLOAD, obsolete.name), None)
        elif obsolete.kind is kinds.POD and body is not None:
            if body.get("status", {}).get("phase") == "Running":
                deleting = {**body["metadata"], "deletionTimestamp": rfc3339(self.kueue.now)}
                played.pods[obsolete.name] = {**body, "metadata": deleting}
            else:
                del played.pods[obsolete.name]

    # Kubelets

    def tick(self, name: str, index: int | None = None) -> bool:
        """Pods of a job do what is next, all or one of them; False if there is nothing."""
        played = self.jobs[name]
        chosen = sorted(played.pods)
        if index is not None and chosen:
            chosen = [chosen[index % len(chosen)]]
        return sum(self._tick(played, pod) for pod in chosen) > 0

    def _tick(self, played: QueuedJob, name: str) -> bool:
        body = played.pods[name]
        phase = body.get("status", {}).get("phase", "Pending")
        if "deletionTimestamp" in body["metadata"]:
            del played.pods[name]
        elif phase == "Pending":
            self._set_phase(played, name, "Running")
        elif phase == "Running" and played.complete:
            self._set_phase(played, name, "Succeeded", code=0)
        else:
            return False
        return True

    def disturb(self, name: str, index: int, how: str) -> None:
        """A pod is deleted by somebody, fails, or its node stops answering."""
        played = self.jobs[name]
        running = [pod for pod, body in sorted(played.pods.items()) if _is_running(body)]
        if not running:
            return
        pod = running[index % len(running)]
        if how == "lose":
            self._set_phase(played, pod, "Running", silent=True)
        elif how == "fail":
            self._set_phase(played, pod, "Failed", code=137)
        else:
            self._delete(played, observe(kinds.POD, played.pods[pod]))

    def _set_phase(self, played: QueuedJob, name: str, phase: str, code: int = 0, silent: bool = False) -> None:
        status = pod_status(names.WORKER, phase, rfc3339(self.kueue.now), code, silent)
        played.pods[name] = {**played.pods[name], "status": status}

    # What there is

    def workloads(self, name: str) -> list[Object]:
        bodies = self.kueue.workloads.values()
        return [body for body in bodies if body["metadata"]["labels"][names.JOB] == name]

    def claims(self, name: str) -> dict[int, Claim]:
        """Claims of a job, by their first workers."""
        claims = self.kueue.claims
        return {first_of(body): claims[body["metadata"]["name"]] for body in self.workloads(name)}

    def reserved(self, name: str) -> set[int]:
        """Indices of workers for which a job has quota."""
        claims = self.claims(name).items()
        held = [range(first, first + claim.size) for first, claim in claims if claim.admitted_at is not None]
        return {index for indices in held for index in indices}

    def settle(self) -> None:
        """Nothing is lost any more, until nobody has anything to do."""
        for _ in range(EVENTUALLY):
            before = self._state()
            for name in self.jobs:
                self.tell(name)
                self.look(name)
                self.tick(name)
            for name in list(self.kueue.workloads):
                self.kueue.requeue(name)
            self.kueue.cycle()
            if self._state() == before and all(map(self.is_known, self.jobs)):
                return
            # Replacements of pods that have failed wait.
            self.kueue.now += 5.0
        raise AssertionError("it never comes to rest")

    def _state(self) -> Any:
        versions = [(name, body["metadata"]["resourceVersion"]) for name, body in sorted(self.kueue.workloads.items())]
        pods = [
            (name, body["metadata"].get("deletionTimestamp"), body.get("status"))
            for played in self.jobs.values()
            for name, body in sorted(played.pods.items())
        ]
        return versions, pods


def first_of(body: Object) -> int:
    """Index of the first worker of a Workload."""
    return int(body["metadata"]["annotations"][names.FIRST])


def _is_running(body: Object) -> bool:
    return body.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in body["metadata"]
