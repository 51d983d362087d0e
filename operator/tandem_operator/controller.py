"""The controller: the shell around `reconcile`, which processes jobs one by one and carries out the decisions.

Watches only say which job to reconcile. For each, the controller takes what the cache holds of the job's objects, polls
its coordinator, decides, and writes. The answer to a write goes into the cache at once, so that the next reconcile does
not repeat the write because the watch is late.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tandem.formatting import parse_rfc3339, rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import token_digest
from tandem.wire.reasons import Reason
from tandem.wire.status import Status
from tandem_operator import job_objects, kinds, names, objects, pod_starts, pods, reporting, retry, tokens
from tandem_operator.api import ApiServer, RequestRefused, Unavailable
from tandem_operator.claimants import Claimants
from tandem_operator.coordinators import Coordinators, JobCoordinators
from tandem_operator.gang_deadlock import PATIENCE_SECONDS, Claimant, starved_for
from tandem_operator.informer import Cache, Key
from tandem_operator.job_memory import (
    BATCH_SIZE,
    JobMemory,
    delete_key,
    next_attempt,
    replica_key,
    terminate_key,
    write_key,
)
from tandem_operator.job_objects import InvalidSpec, Object
from tandem_operator.objects import Peers, Volumes
from tandem_operator.observed import Children, observe
from tandem_operator.operator_metrics import OperatorMetrics, holding
from tandem_operator.plan import ReconcileInputs, ReconcilePlan
from tandem_operator.pods import Images
from tandem_operator.queueing import QueueingReader, QueueUsageReader
from tandem_operator.reasons import name_taken
from tandem_operator.reconcile import DEFAULT_VOLUMES, TRANSITION_SECONDS, is_owned, reconcile, status_interval
from tandem_operator.reporting import JobProblem, KubeEvent
from tandem_operator.workloads import WorkloadChange, stamped
from tandem_operator.workqueue import WorkQueue

MAX_CONCURRENT = 96
"""Maximum number of jobs that are reconciled concurrently. Most of a reconcile is waiting for an answer, and where
nodes were lost, waiting in vain."""
MAX_CONCURRENT_SLOW = 48
"""Maximum number of them whose coordinator answers late or never: the others do not wait for them. One namespace has a
quarter of these at most."""
MAX_CONCURRENT_PER_NAMESPACE = 72
"""Maximum number of them in one namespace."""
MIN_INTERVAL_SECONDS = 0.2
"""Minimum interval between two reconciles of one job."""
OLD_SECRET_SECONDS = 10.0
"""Time for the garbage collection of the Secret of an earlier job of the same name: pods must not get its token."""
EVENT_INTERVAL_SECONDS = 600.0
"""Minimum interval between two identical Events."""
PERMANENT_CODES = (400, 422)
"""Status codes of requests that the API server will never accept as they are, whatever else changes."""
MAX_ERROR_LENGTH = 500
"""Characters of an exception that the job's status quotes."""

Note = Callable[[str, JobProblem | None, bool], None]
"""Records an attempt: its key, the refusal if it was refused, and whether it was carried out."""

log = logging.getLogger("tandem.operator")


class SecretRemains(Unavailable):
    """The Secret of an earlier job of the same name is still there. It may be about to be deleted."""


def soonest(requeue_after: float | None, writable_in: float) -> float:
    """Seconds until the next reconcile of a job whose status has yet to be written.

    Args:
        requeue_after: seconds until something else is due; None: nothing is.
        writable_in: seconds until the status may be written.
    """
    delay = max(MIN_INTERVAL_SECONDS, writable_in)
    return delay if requeue_after is None else min(requeue_after, delay)


class Controller:
    """Reconciles jobs as they become due.

    Args:
        images: the images of pods whose job names none.
        key: the key that the tokens of jobs are derived from.
        volumes: what claims ask for where their job does not specify it.
        patience: how long a job that holds some of its workers and cannot start keeps them, in seconds.
        peers: peers, besides the job's own pods, that may reach its pods; None: no NetworkPolicies are created.
    """

    def __init__(
        self,
        api: ApiServer,
        coordinators: Coordinators,
        cache: Cache,
        images: Images,
        metrics: OperatorMetrics,
        key: bytes,
        volumes: Volumes = DEFAULT_VOLUMES,
        patience: float = PATIENCE_SECONDS,
        template_fields: Sequence[str] = (),
        peers: Peers | None = None,
    ) -> None:
        self._api, self._cache, self._coordinators = api, cache, JobCoordinators(coordinators, key)
        self._images, self._metrics, self._key, self._volumes = images, metrics, key, volumes
        self._patience, self._template_fields, self._peers = patience, tuple(template_fields), peers
        self.workqueue: WorkQueue[Key] = WorkQueue(
            MIN_INTERVAL_SECONDS, MAX_CONCURRENT_SLOW, MAX_CONCURRENT_PER_NAMESPACE, lambda key: key[0]
        )
        self._memories: dict[Key, JobMemory] = {}
        self._claimants = Claimants(cache, self._memory)
        self.queueing = QueueingReader(api, lambda: cache.served.get(kinds.WORKLOAD, False))
        self.queue_usage = QueueUsageReader(api)

    async def run(self) -> None:
        """Reconcile jobs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(MAX_CONCURRENT):
                tasks.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            await self.process(await self.workqueue.take())

    async def process(self, key: Key) -> None:
        """Reconcile a job that is due. Never raises: an error is logged, and the job retried later."""
        started = time.monotonic()
        requeue_after, failed = None, True
        try:
            requeue_after = await self.sync(key)
            failed = False
        except (Unavailable, RequestRefused) as error:
            log.warning("event=look-failed job=%s/%s error=%r", *key, str(error))
        except Exception as error:
            # A defect, or a job that nobody thought of, must not stop the other jobs.
            log.exception("event=look-broken job=%s/%s", *key)
            await self._report_failure(key, error)
        finally:
            self._metrics.reconciled(time.monotonic() - started, failed)
            self.workqueue.done(key, requeue_after, failed, self._coordinators.is_slow(key))
        if self._cache.job(key) is None:
            self.workqueue.forget(key)

    async def sync(self, key: Key) -> float | None:
        """Reconcile one job; returns the delay until the next time in seconds.

        Raises:
            Unavailable, RequestRefused: the API server did not carry out a request. To be retried later.
        """
        body = self._cache.job(key)
        if body is None or "deletionTimestamp" in body["metadata"] or not self._api.acts(key[0]):
            # Owner references delete what is left of the job, or another operator reconciles it.
            self._memories.pop(key, None)
            self._coordinators.forget(key)
            self._metrics.forget(key)
            self.queue_usage.note(key, "")
            return None
        uid = body["metadata"]["uid"]
        memory = self._memory(key, uid)

        # A job that cannot be reconciled as it stands gets a condition, and waits for a change.
        try:
            job = memory.parsed(body)
        except InvalidSpec as error:
            await self._refuse(key, body, error.reason, str(error))
            return None
        if self._cache.is_overfull(key):
            # With some of its pods unknown, they would be created a second time.
            await self._stall(key, body, Reason.NO_ROOM, job_objects.no_room_for_pods(key[0]), permanent=False)
            return job_objects.ROOM_SECONDS
        has_ended = job.status is not None and job.status.phase in ("Succeeded", "Failed")
        if (problem := pods.complaint(job, self._template_fields)) is not None and not has_ended:
            await self._refuse(key, body, Reason.TEMPLATE_REFUSED, problem)
            return None
        problem = job_objects.immutable_change(job, uid, self._cache.children(key))
        if problem is not None and not has_ended:
            await self._stall(key, body, Reason.PROCESSES_CHANGED, problem)
            return None

        # The answers come first: what the cache holds after them is newer than what they were decided on.
        own = self._cache.children(key).pods(names.COORDINATOR, uid)
        snapshot = await self._coordinators.poll(key, job, uid, own)
        claimants = await self._rivals(key, uid, job)
        children = self._cache.children(key)
        retry_at = retry.requested_retry(body["metadata"])
        if job.status is not None and retry_at != job.status.retried_at:
            if retry_at is not None and job.status.phase == "Failed":
                return await self._retry(key, body, job.status, children, retry_at)
            # A value that comes while the job has not failed is recorded without effect.
            job = job.model_copy(update={"status": job.status.model_copy(update={"retried_at": retry_at})})
        inputs = ReconcileInputs(
            job=job,
            uid=uid,
            created=parse_rfc3339(body["metadata"].get("creationTimestamp")) or 0.0,
            claimants=claimants,
            patience=self._patience,
            generation=body["metadata"].get("generation", 1),
            children=children,
            snapshot=snapshot,
            idle=self._coordinators.idle(key),
            unresponsive_coordinator=self._coordinators.unresponsive(key),
            in_doubt=self._coordinators.in_doubt(key),
            answering=self._coordinators.answering,
            peers=self._peers,
            queueing=self.queueing.latest if self._cache.served.get(kinds.WORKLOAD) else None,
            queue_usage=self.queue_usage.latest,
            has_pod_groups=self._cache.served.get(kinds.WORKLOAD) is False or self.queueing.is_allowed is False,
            token_digest=token_digest(tokens.token(self._key, uid)),
            now=time.time(),
            entropy=secrets.token_hex(8),
            starts=await self._start_problems(key, children, uid, memory),
            attempts=memory.attempts,
            unanswered=memory.still_unanswered(children),
            memo=memory.memo,
        )
        plan = reconcile(inputs, self._images, self._volumes)

        # Workers get the address of the Service, so pods are planned again after it was created, in the same sync.
        creates_service = any(_kind(manifest) is kinds.SERVICE for manifest in plan.create)
        without_pods = replace(plan, create_pods=(), delete=(), target=None, create_workloads=(), write_workloads=())
        try:
            refused = await self._apply(key, without_pods if creates_service else plan, inputs, memory)
        except SecretRemains:
            # If the earlier job was deleted without its objects, its user reads that at once.
            await self._write_status(key, job, plan, memory)
            raise
        if creates_service and not refused:
            inputs = replace(inputs, children=self._cache.children(key), attempts=memory.attempts)
            second = reconcile(inputs, self._images, self._volumes)
            new_events = (event for event in second.events if event not in plan.events)
            plan = replace(second, events=(*plan.events, *new_events))
            refused = await self._apply(key, plan, inputs, memory)
        if refused:
            # The status has to report the refusals, and no Event may report a pod that was not created.
            happened = [event for event in plan.events if event.replica not in refused]
            third = reconcile(replace(inputs, attempts=memory.attempts), self._images, self._volumes)
            new_events = (event for event in third.events if not event.replica and event not in happened)
            plan = replace(third, events=(*happened, *new_events))

        wrote = await self._write_status(key, job, plan, memory)
        self._metrics.holds(key, holding(plan.status, job.spec))
        self.queue_usage.note(key, plan.waits_in)
        await self._coordinators.report_queue(key, snapshot, plan.status.queue)
        if plan.expired:
            log.info("event=expired job=%s/%s", *key)
            await self._api.delete(kinds.JOB, *key, uid)
        if wrote:
            return plan.requeue_after
        writable_in = memory.written + status_interval(inputs.answering) - time.monotonic()
        return soonest(plan.requeue_after, writable_in)

    async def _start_problems(self, key: Key, children: Children, uid: str, memory: JobMemory) -> dict[str, JobProblem]:
        """Reasons why no container of a pod has started, from the pods' Events, by UID."""
        pods = [pod for role in names.ROLES for pod in children.pods(role, uid)]
        now = time.time()
        for pod in pod_starts.unexplained(pods, memory.starts, now):
            try:
                problem = pod_starts.explained(await self._api.events(key[0], pod.uid))
            except (Unavailable, RequestRefused) as error:
                # The operator's role may be that of an older chart. A later reconcile tries again.
                log.warning("event=events-not-read job=%s/%s error=%r", *key, str(error))
                problem = pod_starts.UNREAD
            memory.starts[pod.uid] = pod_starts.PodStart(now, problem)
        waits = {pod.uid for pod in pods if pod_starts.waits(pod, now)}
        memory.starts = {uid: start for uid, start in memory.starts.items() if uid in waits}
        return {uid: start.problem for uid, start in memory.starts.items()}

    async def _rivals(self, key: Key, uid: str, job: DistributedTrainingJob) -> list[Claimant]:
        """Other jobs that are starved or have backed off, once this one has been starved for so long that it
        matters."""
        since = starved_for(job, self._cache.children(key).pods(names.WORKER, uid), time.time())
        return [] if since is None or since < self._patience else await self._claimants.excluding(key)

    def _memory(self, key: Key, uid: str) -> JobMemory:
        """The memory of a job, a fresh one if the last was that of an earlier job of the same name."""
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = JobMemory(uid)
        return memory

    async def _retry(self, key: Key, body: Object, old: Status, children: Children, retry_at: str) -> float | None:
        """Restart a job that has failed, once none of its pods is left."""
        remaining = [pod for role in names.ROLES for pod in children.pods(role, body["metadata"]["uid"])]
        for pod in remaining:
            if not pod.deleting:
                await self._api.delete(kinds.POD, key[0], pod.name, pod.uid)
        if any(not pod.silent for pod in remaining):
            return TRANSITION_SECONDS
        status = retry.restarted_status(old, retry_at, body["metadata"].get("generation", 1), time.time())
        if await self._patch_status(key, body, reporting.patch(body.get("status") or {}, status.dump())):
            log.info("event=retried job=%s/%s retries=%d", *key, status.retries)
            await self._post_events(key, body, [KubeEvent(Reason.RETRIED, status.message or "")])
        return MIN_INTERVAL_SECONDS

    # Writes of objects

    async def _apply(self, key: Key, plan: ReconcilePlan, inputs: ReconcileInputs, memory: JobMemory) -> set[str]:
        """Carry out a plan; returns the keys of attempts that failed (tandem_operator.job_memory). Their answers are in
        the memory then."""
        attempts = {
            attempt_key: attempt for attempt_key, attempt in inputs.attempts.items() if attempt_key not in plan.resolved
        }
        memory.attempts, failed = attempts, set[str]()

        def note(attempt_key: str, problem: JobProblem | None, done: bool = True) -> None:
            attempts[attempt_key] = next_attempt(attempts.get(attempt_key), inputs.now, problem)
            if not done:
                failed.add(attempt_key)
            if problem is not None:
                log.warning("event=refused job=%s/%s what=%r why=%r", *key, attempt_key, problem.message)

        if plan.needs_token:
            manifest = objects.secret(inputs.job, inputs.uid, tokens.token(self._key, inputs.uid))
            name = manifest["metadata"]["name"]
            created, problem = await self._create(kinds.SECRET, manifest)
            if not created and problem is None and _is_new(inputs):
                raise SecretRemains(f"the Secret {name} of an earlier job of the same name is still being deleted")
            note(write_key(kinds.SECRET, name), problem, problem is None)
            if problem is not None:
                # The existence of the other objects proves that of the Secret, so none may be created without it.
                return failed
        # These objects do not depend on each other.
        answers, unavailable = await self._create_all(plan.create)
        for manifest, (created, problem) in answers:
            note(write_key(_kind(manifest), manifest["metadata"]["name"]), problem, created or problem is None)
        if unavailable is not None:
            raise unavailable
        for manifest in plan.update:
            updated, problem = await self._update(key, manifest)
            note(write_key(_kind(manifest), manifest["metadata"]["name"]), problem, updated)
        if failed:
            # Pods read these objects as they start, and the next reconcile decides which pods can do without.
            self.workqueue.add(key)
            return failed
        # Pods depend on all of these objects, and not on each other.
        for batch in _batches(plan.create_pods):
            # Until an answer says otherwise, each may have been created, and is created again only under the same name.
            for manifest in batch:
                entropy = inputs.unanswered.get(_replica_key(manifest), inputs.entropy)
                memory.unanswered[_replica_key(manifest)] = (manifest["metadata"]["name"], entropy)
            answers, unavailable = await self._create_all(batch)
            for manifest, (created, problem) in answers:
                note(_replica_key(manifest), problem, created)
                # If the name is taken, it may be by the pod whose creation was not answered: then the watch reports it.
                if created or problem is not None or _replica_key(manifest) not in inputs.unanswered:
                    del memory.unanswered[_replica_key(manifest)]
            if unavailable is not None:
                raise unavailable
            if all(problem is not None for _, (_, problem) in answers):
                # A whole batch was refused, so the rest would be as well.
                break
        for obsolete in plan.delete:
            try:
                await self._api.delete(obsolete.kind, key[0], obsolete.name, obsolete.uid)
            except RequestRefused as error:
                note(delete_key(obsolete.name), _problem(obsolete.kind, obsolete.name, error), done=False)
            else:
                log.info("event=removed job=%s/%s kind=%s name=%s", *key, obsolete.kind.name, obsolete.name)
                if obsolete.kind is kinds.WORKLOAD:
                    # No worker may start on its quota before the watch reports its end.
                    self._cache.remove(obsolete.kind, key[0], obsolete.name, obsolete.uid)
        for pod in plan.terminate:
            try:
                start = inputs.starts.get(pod.uid)
                reason = (pod.message or pod.waiting) if pod.waiting or start is None else start.message
                # The annotation is how any operator knows later that this pod was a failed start.
                annotations = {} if pod.has_run else {names.NOT_BEGUN: reason}
                await self._api.terminate(kinds.POD, key[0], pod.name, pod.uid, annotations)
            except RequestRefused as error:
                note(terminate_key(pod.name), _problem(pod.kind, pod.name, error), done=False)
            else:
                note(terminate_key(pod.name), None)
                log.info("event=ended job=%s/%s kind=%s name=%s", *key, pod.kind.name, pod.name)
        if plan.target is not None:
            await self._coordinators.set_target(key, plan.target)
        # One after the other: what is admitted first must not have to make room for what is worth more.
        for manifest in plan.create_workloads:
            created, problem = await self._create(kinds.WORKLOAD, manifest)
            note(write_key(kinds.WORKLOAD, manifest["metadata"]["name"]), problem, created or problem is None)
        for change in plan.write_workloads:
            await self._write_workload(key, change, note)
        return failed

    async def _create_all(
        self, manifests: Sequence[Object]
    ) -> tuple[list[tuple[Object, tuple[bool, JobProblem | None]]], BaseException | None]:
        """Create objects concurrently, and wait for all of the answers: a write that is in flight when a reconcile ends
        would be repeated by the next one.

        Returns:
            The manifests that were answered, each with what `_create` returns, and the first of the errors.
        """
        results = await asyncio.gather(
            *(self._create(_kind(manifest), manifest) for manifest in manifests), return_exceptions=True
        )
        answers = [
            (manifest, result) for manifest, result in zip(manifests, results, strict=True) if isinstance(result, tuple)
        ]
        return answers, next((result for result in results if isinstance(result, BaseException)), None)

    async def _create(self, kind: kinds.Kind, manifest: Object) -> tuple[bool, JobProblem | None]:
        """Create an object; returns whether that succeeded, and the problem if it was refused."""
        metadata = manifest["metadata"]
        try:
            created = await self._api.create(kind, manifest)
        except RequestRefused as error:
            if error.code != 409:
                replica = _replica_key(manifest) if kind is kinds.POD else ""
                return False, _problem(kind, metadata["name"], error, replica)
            # A pod that exists already will be in the cache soon; else the next reconcile gives it another name. A
            # Secret is not read: the one that exists serves the job's own pods.
            # Any other conflict is that of two requests that a quota counted at once.
            if kind in (kinds.POD, kinds.SECRET) or error.reason != "AlreadyExists":
                return False, None
            # It is the job's own, and the watch has not reported it yet; or somebody else's.
            existing = await self._api.get(kind, metadata["namespace"], metadata["name"])
            if existing is None:
                return False, None
            facts = observe(kind, existing)
            if not is_owned(facts, manifest):
                return False, name_taken(facts, metadata["namespace"], metadata["labels"][names.JOB])
            return False, await self._adopt(kind, manifest, existing) if kind in kinds.WATCHED else None
        if kind in kinds.WATCHED:
            self._cache.upsert(kind, created)
        log.info("event=made job=%s/%s kind=%s name=%s", *_job(metadata), kind.name, metadata["name"])
        return True, None

    async def _update(self, key: Key, manifest: Object) -> tuple[bool, JobProblem | None]:
        """Update an object; returns whether that succeeded, and the problem if it was refused."""
        kind, metadata = _kind(manifest), manifest["metadata"]
        try:
            self._cache.upsert(kind, await self._api.apply(kind, manifest))
        except RequestRefused as error:
            if error.code != 409:
                return False, _problem(kind, metadata["name"], error)
            # It is no longer the object in the cache; the next reconcile finds out which one exists.
            self._cache.remove(kind, key[0], metadata["name"], metadata["uid"])
            return False, None
        return True, None

    async def _write_workload(self, key: Key, change: WorkloadChange, note: Note) -> None:
        """Write the conditions of a Workload, and give its quota back if that is due."""
        workload = change.workload
        content = {"conditions": stamped(change.conditions, time.time())} | (
            {"admission": None} if change.releases else {}
        )
        try:
            written = await self._api.patch_status(
                kinds.WORKLOAD, key[0], workload.name, content, str(workload.version)
            )
        except RequestRefused as error:
            # It has changed meanwhile, and the next reconcile compares it again.
            if error.code != 409:
                note(write_key(kinds.WORKLOAD, workload.name), _problem(kinds.WORKLOAD, workload.name, error), False)
            return
        if written is not None:
            self._cache.upsert(kinds.WORKLOAD, written)
        if change.releases:
            self._metrics.released(key[0])
            log.info("event=quota-released job=%s/%s name=%s", *key, workload.name)

    async def _adopt(self, kind: kinds.Kind, manifest: Object, existing: Object) -> JobProblem | None:
        """Take an object of the job into the cache. A claim that was created beforehand lacks the labels that are
        watched, so it gets them."""
        metadata = manifest["metadata"]
        if not metadata["labels"].items() <= _labels(existing).items():
            patch = {**manifest, "metadata": {**metadata, "uid": existing["metadata"]["uid"]}}
            patch.pop("spec", None)
            try:
                existing = await self._api.apply(kind, patch)
            except RequestRefused as error:
                return _problem(kind, metadata["name"], error)
        self._cache.upsert(kind, existing)
        return None

    # Status and Events

    async def _write_status(
        self, key: Key, job: DistributedTrainingJob, plan: ReconcilePlan, memory: JobMemory
    ) -> bool:
        """Write the status if something changed that matters; False if it has to be written later."""
        body = self._cache.job(key)
        if body is None or body["metadata"]["uid"] != memory.uid:
            return True
        desired, now = plan.status.dump(), time.monotonic()
        changes = reporting.patch(body.get("status") or {}, desired)
        if now - memory.written < EVENT_INTERVAL_SECONDS:
            # An older CRD does not accept every field, and writing it at each reconcile would change nothing.
            changes = {name: value for name, value in changes.items() if (name, value) not in memory.pruned}
        # Only a change of volatile fields waits, and only if they have a value: somebody waits for the first one.
        visible = body.get("status", {}).keys() & reporting.VOLATILE_FIELDS
        waits = (
            changes
            and changes.keys() <= visible
            and now - memory.written < status_interval(self._coordinators.answering)
        )
        # Events follow from the change of the status, so they have to be posted with it.
        if waits and not plan.events:
            return False
        if changes and not memory.writes.allows(now):
            # Events have a bound of their own, and those about pods created now are in no other plan.
            await self._post_events(key, body, [event for event in plan.events if event.replica])
            return False
        if changes:
            memory.written = now
            try:
                wrote = await self._patch_status(key, body, changes)
            except RequestRefused as error:
                log.warning("event=status-refused job=%s/%s error=%r", *key, str(error))
                return False
            if not wrote:
                memory.written = 0.0  # at the next reconcile, when the watch has reported the change
                return False
            current = self._cache.job(key)
            # What was written is in the cache, unless the answer was too large to be read.
            dropped = reporting.patch(current.get("status") or {}, desired) if current and current is not body else {}
            memory.pruned = list(dropped.items())
            before = job.status.phase if job.status else "none"
            if before != plan.status.phase:
                log.info("event=phase job=%s/%s from=%s to=%s", *key, before, plan.status.phase)
        await self._post_events(key, body, plan.events)
        return True

    async def _post_events(self, key: Key, body: Object, events: Iterable[KubeEvent]) -> None:
        clock, now = time.monotonic(), rfc3339(time.time())
        memory = self._memory(key, body["metadata"]["uid"])
        memory.posted_events = {
            text: posted_at
            for text, posted_at in memory.posted_events.items()
            if clock - posted_at < EVENT_INTERVAL_SECONDS
        }
        for event in events:
            if (event.reason, event.message) in memory.posted_events:
                continue
            if not memory.events.allows(clock):
                log.warning("event=not-told job=%s/%s reason=%s why=%r", *key, event.reason, "too many Events")
                continue
            memory.posted_events[event.reason, event.message] = clock
            manifest = objects.event(body, event, now, secrets.token_hex(8))
            try:
                await self._api.create(kinds.EVENT, manifest)
            except (RequestRefused, Unavailable) as error:
                # The status reports the same; an Event is only a convenience.
                log.warning("event=not-told job=%s/%s error=%r", *key, str(error))

    async def _report_failure(self, key: Key, error: Exception) -> None:
        """Report in the job's status that its reconcile has failed."""
        body = self._cache.job(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            return
        message = (
            f"the operator failed at this job and tries again: {type(error).__name__}: {str(error)[:MAX_ERROR_LENGTH]}"
        )
        try:
            await self._stall(key, body, Reason.INTERNAL_ERROR, message, permanent=False)
        except Exception as failure:
            log.warning("event=not-told job=%s/%s error=%r", *key, str(failure))

    async def _refuse(self, key: Key, body: Object, reason: str, message: str) -> None:
        """Stop reconciling a job as it stands, drop its spec from the cache, and report why."""
        self._cache.refuse(body, reason, message)
        self._memory(key, body["metadata"]["uid"]).forget_spec()
        await self._stall(key, body, reason, message, permanent=reason != Reason.NO_ROOM)

    async def _stall(self, key: Key, body: Object, reason: str, message: str, permanent: bool = True) -> None:
        """Report once that a job is not reconciled, unless it has ended.

        Args:
            permanent: it is not tried again before the job has changed.
        """
        old = job_objects.status_of(body) or Status()
        if old.phase in ("Succeeded", "Failed"):
            return
        generation = body["metadata"].get("generation", 1)
        status = reporting.stalled_status(old, generation, reason, message, time.time(), permanent)
        self._metrics.holds(key, holding(status))
        changes = reporting.patch(body.get("status") or {}, status.dump())
        if not changes:
            return
        log.error("event=stalled job=%s/%s reason=%s error=%r", *key, reason, message)
        if await self._patch_status(key, body, changes):
            await self._post_events(key, body, [KubeEvent(reason, message, warning=True)])

    async def _patch_status(self, key: Key, body: Object, changes: Object) -> bool:
        """Change fields of the status; False if the job has changed since, and the change has to be decided again: it
        may be another job of the same name, and conditions are written as a whole, those of other writers among
        them."""
        try:
            written = await self._api.patch_status(kinds.JOB, *key, changes, body["metadata"]["resourceVersion"])
        except RequestRefused as error:
            if error.code == 409:
                return False
            raise
        if written is not None:
            self._cache.upsert(kinds.JOB, written)
        return True


def _batches(manifests: Sequence[Object]) -> Iterator[Sequence[Object]]:
    """Pods that are created concurrently. The coordinator comes first and alone: otherwise other pods could take its
    share of a quota."""
    coordinators = [pod for pod in manifests if pod["metadata"]["labels"][names.ROLE] == names.COORDINATOR]
    other_pods = [pod for pod in manifests if pod["metadata"]["labels"][names.ROLE] != names.COORDINATOR]
    if coordinators:
        yield coordinators
    for start in range(0, len(other_pods), BATCH_SIZE):
        yield other_pods[start : start + BATCH_SIZE]


def _is_new(inputs: ReconcileInputs) -> bool:
    """Whether a job is so new that it cannot have objects yet, so that a Secret of its name is about to be deleted."""
    has_objects = any(child.owner == inputs.uid for child in inputs.children.objects.values())
    return not has_objects and inputs.now - inputs.created < OLD_SECRET_SECONDS


def _problem(kind: kinds.Kind, name: str, error: RequestRefused, display_name: str = "") -> JobProblem:
    """Describe a refused request.

    Args:
        display_name: stable name to report instead of that of a pod, which differs at each attempt.
    """
    is_quota = error.code == 403 and "exceeded quota" in str(error)
    reason = Reason.QUOTA_EXCEEDED if is_quota else Reason.REFUSED
    message = f"{kind.name} {name}: {error}".replace(name, display_name or name)
    return JobProblem(reason, message, error.code in PERMANENT_CODES)


def _kind(manifest: Object) -> kinds.Kind:
    return next(kind for kind in kinds.WATCHED if kind.name == manifest["kind"])


def _replica_key(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return replica_key(labels[names.ROLE], int(labels[names.INDEX]))


def _labels(body: Object) -> dict[str, str]:
    return dict(body["metadata"].get("labels") or {})


def _job(metadata: Object) -> Key:
    return metadata["namespace"], metadata["labels"][names.JOB]
