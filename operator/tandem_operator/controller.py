"""The controller: the shell around `reconcile`, which handles jobs one by one and carries out the decisions.

Watches only say which job to look at. A look takes what is known of the job's objects, asks its coordinator, decides,
and writes. What a write answers is known at once, so that the next look does not do it again because the watch is late.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tandem.formatting import rfc3339, seconds
from tandem.job import DistributedTrainingJob
from tandem.launch import token_digest
from tandem.reasons import Reason
from tandem.status import Status
from tandem_operator import kinds, names, objects, observed, pod_starts, pods, reporting, retry, tokens
from tandem_operator.api import ApiServer, RequestRefused, Unavailable
from tandem_operator.claimants import Claimants
from tandem_operator.coordinators import Coordinators, Questions
from tandem_operator.gang_deadlock import PATIENCE_SECONDS, Claimant, starved_for
from tandem_operator.informer import Cache, Key
from tandem_operator.job_memory import MANY, JobMemory, ending, place, removing, tried, writing
from tandem_operator.objects import Peers, Volumes
from tandem_operator.observed import Children, InvalidSpec, Object, observe
from tandem_operator.operator_metrics import OperatorMetrics, holding
from tandem_operator.plan import Plan, Situation
from tandem_operator.pods import Images
from tandem_operator.reasons import name_taken
from tandem_operator.reconcile import ANY_VOLUMES, HASTY_SECONDS, is_ours, lively, reconcile
from tandem_operator.reporting import Notice, Want
from tandem_operator.workqueue import WorkQueue

AT_ONCE = 96
"""Jobs that are looked at side by side. Most of a look is waiting for an answer, and where nodes were lost, in vain."""
SLOW_AT_ONCE = 48
"""How many of those may be jobs whose coordinator answers late or never: the others do not wait for them. One namespace
has a quarter of these at most."""
OF_A_NAMESPACE = 72
"""How many of those may be of one namespace."""
MIN_SECONDS = 0.2
"""Between two looks at one job."""
LEFT_SECONDS = 10.0
"""For the Secret of an earlier job of that name to be collected: pods must not be given its token."""
AGAIN_SECONDS = 600.0
"""The same Event is not posted again sooner."""
FOR_GOOD = (400, 422)
"""What the API server answers to what it will never take as it stands, whatever else changes."""
MAX_WORDS = 500
"""Characters of what was raised that people are told."""

log = logging.getLogger("tandem.operator")


def soonest(again_in: float | None, written_in: float) -> float:
    """Seconds until a job is looked at again whose status has yet to be written.

    Args:
        again_in: until something else is due; None: nothing is.
        written_in: until the status may be written.
    """
    left = max(MIN_SECONDS, written_in)
    return left if again_in is None else min(again_in, left)


class Controller:
    """Looks at jobs as they become due.

    Args:
        images: what pods run, unless the job says something else.
        key: what the tokens of jobs follow from.
        volumes: what claims ask for, unless the job says something else.
        patience: how long a job that holds some of its workers and cannot begin keeps them, seconds.
        peers: who reaches pods of jobs besides those; None: no NetworkPolicies are made.
    """

    def __init__(
        self,
        api: ApiServer,
        coordinators: Coordinators,
        cache: Cache,
        images: Images,
        metrics: OperatorMetrics,
        key: bytes,
        volumes: Volumes = ANY_VOLUMES,
        patience: float = PATIENCE_SECONDS,
        template_fields: Sequence[str] = (),
        peers: Peers | None = None,
    ) -> None:
        self._api, self._cache, self._questions = api, cache, Questions(coordinators, key)
        self._images, self._metrics, self._key, self._volumes = images, metrics, key, volumes
        self._patience, self._template_fields, self._peers = patience, tuple(template_fields), peers
        self.workqueue: WorkQueue[Key] = WorkQueue(MIN_SECONDS, SLOW_AT_ONCE, OF_A_NAMESPACE, lambda key: key[0])
        self._memories: dict[Key, JobMemory] = {}
        self._claimants = Claimants(cache, self._memory)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            await self.attend(await self.workqueue.take())

    async def attend(self, key: Key) -> None:
        """Look at a job that is due; what goes wrong is told, and the job tried again later. Never raises."""
        began = time.monotonic()
        again_in, failed = None, True
        try:
            again_in = await self.look(key)
            failed = False
        except (Unavailable, RequestRefused) as error:
            log.warning("event=look-failed job=%s/%s error=%r", *key, str(error))
        except Exception as error:
            # A defect, or a job that nobody thought of, must not stop the other jobs.
            log.exception("event=look-broken job=%s/%s", *key)
            await self._admit(key, error)
        finally:
            self._metrics.looked(time.monotonic() - began, failed)
            self.workqueue.done(key, again_in, failed, self._questions.is_slow(key))
        if self._cache.job(key) is None:
            self.workqueue.forget(key)

    async def look(self, key: Key) -> float | None:
        """Do for one job what there is to do; returns in how many seconds to look again.

        Raises:
            Unavailable, Refused: the API server did not do what it was asked. To be tried again later.
        """
        body = self._cache.job(key)
        if body is None or "deletionTimestamp" in body["metadata"] or not self._api.acts(key[0]):
            # Owner references take care of what is left, or another operator of all of it.
            self._memories.pop(key, None)
            self._questions.forget(key)
            self._metrics.forget(key)
            return None
        uid = body["metadata"]["uid"]
        memory = self._memory(key, uid)
        try:
            job = memory.parsed(body)
        except InvalidSpec as error:
            await self._refuse(key, body, error.reason, str(error))
            return None
        if self._cache.is_overfull(key):
            await self._stall(key, body, Reason.NO_ROOM, observed.no_room_for_pods(key[0]), for_good=False)
            return observed.ROOM_SECONDS
        if (words := pods.complaint(job, self._template_fields)) is not None and not _has_ended(job):
            await self._refuse(key, body, Reason.TEMPLATE_REFUSED, words)
            return None
        if (words := observed.changed(job, uid, self._cache.children(key))) is not None and not _has_ended(job):
            await self._stall(key, body, Reason.PROCESSES_CHANGED, words)
            return None
        own = self._cache.children(key).pods(names.COORDINATOR, uid)
        heard = await self._questions.ask(key, job, uid, own)
        others = await self._rivals(key, uid, job)
        children = self._cache.children(key)
        again = retry.asked(body["metadata"])
        if job.status is not None and again != job.status.retried_at:
            if again is not None and job.status.phase == "Failed":
                return await self._retry(key, body, job.status, children, again)
            job = job.model_copy(update={"status": job.status.model_copy(update={"retried_at": again})})
        situation = Situation(
            job=job,
            uid=uid,
            created=seconds(body["metadata"].get("creationTimestamp")) or 0.0,
            others=others,
            patience=self._patience,
            generation=body["metadata"].get("generation", 1),
            children=children,
            heard=heard,
            idle=self._questions.idle(key),
            fallen=self._questions.fallen(key),
            in_doubt=self._questions.in_doubt(key),
            answering=self._questions.answering,
            peers=self._peers,
            token_digest=token_digest(tokens.token(self._key, uid)),
            now=time.time(),
            entropy=secrets.token_hex(8),
            starts=await self._starts(key, children, uid, memory),
            attempts=memory.attempts,
            unanswered=memory.still_unanswered(children),
            memo=memory.memo,
        )
        plan = reconcile(situation, self._images, self._volumes)
        # Workers are told the address that the Service is given: all pods are made in the same look, after it.
        first = any(_kind(manifest) is kinds.SERVICE for manifest in plan.create)
        objects_alone = replace(plan, make=(), remove=(), target=None)
        refused = await self._carry_out(key, objects_alone if first else plan, situation, memory)
        if first and not refused:
            situation = replace(situation, children=self._cache.children(key), attempts=memory.attempts)
            then = reconcile(situation, self._images, self._volumes)
            plan = replace(then, notices=(*plan.notices, *(one for one in then.notices if one not in plan.notices)))
            refused = await self._carry_out(key, plan, situation, memory)
        if refused:
            # What was not done is not told, and what was answered instead stands in the status.
            done = [one for one in plan.notices if one.place not in refused]
            then = reconcile(replace(situation, attempts=memory.attempts), self._images, self._volumes)
            plan = replace(then, notices=(*done, *(one for one in then.notices if not one.place and one not in done)))
        wrote = await self._report(key, job, plan, memory)
        self._metrics.holds(key, holding(plan.status, job.spec.workers))
        if plan.expired:
            log.info("event=expired job=%s/%s", *key)
            await self._api.delete(kinds.JOB, *key, uid)
        if wrote:
            return plan.again_in
        return soonest(plan.again_in, memory.written + lively(situation.answering) - time.monotonic())

    async def _starts(self, key: Key, children: Children, uid: str, memory: JobMemory) -> dict[str, Want]:
        """Why nothing of its pods has begun, as their Events say, by UID."""
        pods = [pod for role in names.ROLES for pod in children.pods(role, uid)]
        now = time.time()
        for pod in pod_starts.unexplained(pods, memory.starts, now):
            try:
                want = pod_starts.explained(await self._api.events(key[0], pod.uid))
            except (Unavailable, RequestRefused) as error:
                # A role of an older chart, say. The next look but a few asks again.
                log.warning("event=events-not-read job=%s/%s error=%r", *key, str(error))
                want = pod_starts.UNREAD
            memory.starts[pod.uid] = pod_starts.Start(now, want)
        waits = {pod.uid for pod in pods if pod_starts.waits(pod, now)}
        memory.starts = {of: start for of, start in memory.starts.items() if of in waits}
        return {of: start.want for of, start in memory.starts.items()}

    async def _rivals(self, key: Key, uid: str, job: DistributedTrainingJob) -> list[Claimant]:
        """Other jobs that are starved or have given way, once this one has been starved for so long that it matters."""
        since = starved_for(job, self._cache.children(key).pods(names.WORKER, uid), time.time())
        return [] if since is None or since < self._patience else await self._claimants.besides(key)

    def _memory(self, key: Key, uid: str) -> JobMemory:
        """What is kept of a job; of an earlier one of its name, nothing is."""
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = JobMemory(uid)
        return memory

    async def _retry(self, key: Key, body: Object, old: Status, children: Children, again: str) -> float | None:
        """Begin anew with a job that has failed, once nothing of it is left."""
        left = [pod for role in names.ROLES for pod in children.pods(role, body["metadata"]["uid"])]
        for pod in left:
            if not pod.deleting:
                await self._api.delete(kinds.POD, key[0], pod.name, pod.uid)
        if any(not pod.silent for pod in left):
            return HASTY_SECONDS
        status = retry.begun_anew(old, again, body["metadata"].get("generation", 1), time.time())
        if await self._write(key, body, reporting.patch(body.get("status") or {}, status.dump())):
            log.info("event=retried job=%s/%s retries=%d", *key, status.retries)
            await self._tell(key, body, [Notice(retry.REASON, status.message or "")])
        return MIN_SECONDS

    # Doing

    async def _carry_out(self, key: Key, plan: Plan, at: Situation, memory: JobMemory) -> set[str]:
        """Returns what was tried in vain (tandem_operator.job_memory); what was answered is in the memory then."""
        attempts = {what: one for what, one in at.attempts.items() if what not in plan.settled}
        memory.attempts, vain = attempts, set[str]()

        def note(what: str, trouble: Want | None, done: bool = True) -> None:
            attempts[what] = tried(attempts.get(what), at.now, trouble)
            if not done:
                vain.add(what)
            if trouble is not None:
                log.warning("event=refused job=%s/%s what=%r why=%r", *key, what, trouble.message)

        if plan.needs_token:
            manifest = objects.secret(at.job, at.uid, tokens.token(self._key, at.uid))
            name = manifest["metadata"]["name"]
            made, trouble = await self._create(kinds.SECRET, manifest)
            if not made and trouble is None and _is_new(at):
                raise Unavailable(f"the Secret {name} of an earlier job is there still; its end is waited for")
            note(writing(kinds.SECRET, name), trouble, trouble is None)
            if trouble is not None:
                # That it is there is seen from what is made after it.
                return vain
        # None of them needs another one.
        answers, unavailable = await self._create_all(plan.create)
        for manifest, (made, trouble) in answers:
            note(writing(_kind(manifest), manifest["metadata"]["name"]), trouble, made or trouble is None)
        if unavailable is not None:
            raise unavailable
        for manifest in plan.update:
            updated, trouble = await self._update(key, manifest)
            note(writing(_kind(manifest), manifest["metadata"]["name"]), trouble, updated)
        if vain:
            # Pods read these as they start, and the next look decides which can go without.
            self.workqueue.add(key)
            return vain
        # They need all of the former, and none of each other.
        for some in _batches(plan.make):
            # Until an answer says otherwise each may have been made, and is made again under the same name alone.
            for manifest in some:
                entropy = at.unanswered.get(_place(manifest), at.entropy)
                memory.unanswered[_place(manifest)] = (manifest["metadata"]["name"], entropy)
            answers, unavailable = await self._create_all(some)
            for manifest, (made, trouble) in answers:
                note(_place(manifest), trouble, made)
                # Where its name is taken it may be the one that was not answered before: then the watch tells of it.
                if made or trouble is not None or _place(manifest) not in at.unanswered:
                    del memory.unanswered[_place(manifest)]
            if unavailable is not None:
                raise unavailable
            if all(trouble is not None for _, (_, trouble) in answers):
                break
        for one in plan.remove:
            try:
                await self._api.delete(one.kind, key[0], one.name, one.uid)
            except RequestRefused as error:
                note(removing(one.name), _trouble(one.kind, one.name, error), done=False)
            else:
                log.info("event=removed job=%s/%s kind=%s name=%s", *key, one.kind.name, one.name)
        for pod in plan.end:
            try:
                start = at.starts.get(pod.uid)
                why = (pod.words or pod.waiting) if pod.waiting or start is None else start.message
                annotations = {} if pod.has_begun else {names.NOT_BEGUN: why}
                await self._api.terminate(kinds.POD, key[0], pod.name, pod.uid, annotations)
            except RequestRefused as error:
                note(ending(pod.name), _trouble(pod.kind, pod.name, error), done=False)
            else:
                note(ending(pod.name), None)
                log.info("event=ended job=%s/%s kind=%s name=%s", *key, pod.kind.name, pod.name)
        if plan.target is not None:
            await self._questions.tell(key, plan.target)
        return vain

    async def _create_all(
        self, manifests: Sequence[Object]
    ) -> tuple[list[tuple[Object, tuple[bool, Want | None]]], BaseException | None]:
        """Create objects side by side, and wait for all of the answers: a write that is in flight when a look ends
        would be done again by the next look.

        Returns:
            The manifests that were answered, each with what `_create` returns, and the first of the errors.
        """
        found = await asyncio.gather(
            *(self._create(_kind(manifest), manifest) for manifest in manifests), return_exceptions=True
        )
        answers = [(one, answer) for one, answer in zip(manifests, found, strict=True) if isinstance(answer, tuple)]
        return answers, next((one for one in found if isinstance(one, BaseException)), None)

    async def _create(self, kind: kinds.Kind, manifest: Object) -> tuple[bool, Want | None]:
        """Whether it was made, and if not what speaks against it."""
        metadata = manifest["metadata"]
        try:
            made = await self._api.create(kind, manifest)
        except RequestRefused as error:
            if error.code != 409:
                return False, _trouble(kind, metadata["name"], error, _place(manifest) if kind is kinds.POD else "")
            # A pod that is there already will be in the cache soon; else the next look gives it another name. A Secret
            # is not read: what is there serves the job's own pods.
            # Any other conflict is of two that a quota counted at once.
            if kind in (kinds.POD, kinds.SECRET) or error.reason != "AlreadyExists":
                return False, None
            # Ours, and the watch has not told of it yet; or somebody else's.
            there = await self._api.get(kind, metadata["namespace"], metadata["name"])
            if there is None:
                return False, None
            seen = observe(kind, there)
            if not is_ours(seen, manifest):
                return False, name_taken(kind, metadata["name"], seen.owner)
            return False, await self._take_in(kind, manifest, there) if kind in kinds.WATCHED else None
        if kind in kinds.WATCHED:
            self._cache.see(kind, made)
        log.info("event=made job=%s/%s kind=%s name=%s", *_job(metadata), kind.name, metadata["name"])
        return True, None

    async def _update(self, key: Key, manifest: Object) -> tuple[bool, Want | None]:
        """Whether it is now as it should be, and if not what speaks against it."""
        kind, metadata = _kind(manifest), manifest["metadata"]
        try:
            self._cache.see(kind, await self._api.apply(kind, manifest))
        except RequestRefused as error:
            if error.code != 409:
                return False, _trouble(kind, metadata["name"], error)
            # It is not the one that we know any more; the next look finds out what is there.
            self._cache.lose(kind, key[0], metadata["name"], metadata["uid"])
            return False, None
        return True, None

    async def _take_in(self, kind: kinds.Kind, manifest: Object, there: Object) -> Want | None:
        """Know an object of the job's. A claim that was made beforehand has none of the labels that we watch for."""
        metadata = manifest["metadata"]
        if not metadata["labels"].items() <= _labels(there).items():
            named = {**manifest, "metadata": {**metadata, "uid": there["metadata"]["uid"]}}
            named.pop("spec", None)
            try:
                there = await self._api.apply(kind, named)
            except RequestRefused as error:
                return _trouble(kind, metadata["name"], error)
        self._cache.see(kind, there)
        return None

    # Telling

    async def _report(self, key: Key, job: DistributedTrainingJob, plan: Plan, memory: JobMemory) -> bool:
        """Write the status if it is worth it; False if it will be later."""
        body = self._cache.job(key)
        if body is None or body["metadata"]["uid"] != memory.uid:
            return True
        wanted, now = plan.status.dump(), time.monotonic()
        changes = reporting.patch(body.get("status") or {}, wanted)
        if now - memory.written < AGAIN_SECONDS:
            # An older CRD does not take each field, and a write for it at every look would change nothing.
            changes = {name: value for name, value in changes.items() if (name, value) not in memory.pruned}
        # What is there for the first time is what somebody waits for.
        known = body.get("status", {}).keys() & reporting.LIVELY
        waits = changes and changes.keys() <= known and now - memory.written < lively(self._questions.answering)
        # What is noticed now is not noticed again.
        if waits and not plan.notices:
            return False
        if changes and not memory.writes.allows(now):
            # Events have a bound of their own, and what was done at this look is noticed at no other.
            await self._tell(key, body, [one for one in plan.notices if one.place])
            return False
        if changes:
            memory.written = now
            try:
                wrote = await self._write(key, body, changes)
            except RequestRefused as error:
                log.warning("event=status-refused job=%s/%s error=%r", *key, str(error))
                return False
            if not wrote:
                memory.written = 0.0  # at the next look, when the watch has told
                return False
            there = self._cache.job(key)
            # What was written is known, unless its answer was too large to be read.
            left = reporting.patch(there.get("status") or {}, wanted) if there and there is not body else {}
            memory.pruned = list(left.items())
            before = job.status.phase if job.status else "none"
            if before != plan.status.phase:
                log.info("event=phase job=%s/%s from=%s to=%s", *key, before, plan.status.phase)
        await self._tell(key, body, plan.notices)
        return True

    async def _tell(self, key: Key, body: Object, notices: Iterable[Notice]) -> None:
        clock, now = time.monotonic(), rfc3339(time.time())
        memory = self._memory(key, body["metadata"]["uid"])
        memory.told = {words: at for words, at in memory.told.items() if clock - at < AGAIN_SECONDS}
        for notice in notices:
            if (notice.reason, notice.message) in memory.told:
                continue
            if not memory.events.allows(clock):
                log.warning("event=not-told job=%s/%s reason=%s why=%r", *key, notice.reason, "too many Events")
                continue
            memory.told[notice.reason, notice.message] = clock
            event = objects.event(body, notice, now, secrets.token_hex(8))
            try:
                await self._api.create(kinds.EVENT, event)
            except (RequestRefused, Unavailable) as error:
                # The status says the same; an Event is a courtesy.
                log.warning("event=not-told job=%s/%s error=%r", *key, str(error))

    async def _admit(self, key: Key, error: Exception) -> None:
        """Say in the job's status that looking at it has failed."""
        body = self._cache.job(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            return
        words = f"the operator failed at this job and tries again: {type(error).__name__}: {str(error)[:MAX_WORDS]}"
        try:
            await self._stall(key, body, Reason.INTERNAL_ERROR, words, for_good=False)
        except Exception as refused:
            log.warning("event=not-told job=%s/%s error=%r", *key, str(refused))

    async def _refuse(self, key: Key, body: Object, reason: str, words: str) -> None:
        """Do nothing about a job as it stands, hold its spec no longer, and say so."""
        self._cache.refuse(body, reason, words)
        self._memory(key, body["metadata"]["uid"]).forget_spec()
        await self._stall(key, body, reason, words, for_good=reason != Reason.NO_ROOM)

    async def _stall(self, key: Key, body: Object, reason: str, message: str, for_good: bool = True) -> None:
        """Say of a job, once, that it is not looked after, unless it has ended.

        Args:
            for_good: as it stands; it is not tried again before it has changed.
        """
        old = observed.status_of(body) or Status()
        if old.phase in ("Succeeded", "Failed"):
            return
        status = reporting.refused(old, body["metadata"].get("generation", 1), reason, message, time.time(), for_good)
        self._metrics.holds(key, holding(status))
        changes = reporting.patch(body.get("status") or {}, status.dump())
        if not changes:
            return
        log.error("event=stalled job=%s/%s reason=%s error=%r", *key, reason, message)
        if await self._write(key, body, changes):
            await self._tell(key, body, [Notice(reason, message, warning=True)])

    async def _write(self, key: Key, body: Object, changes: Object) -> bool:
        """Change fields of the status; False if that has to be decided again, because the job has changed since: it may
        be another one of its name, and conditions are written as a whole, those of other writers among them."""
        try:
            written = await self._api.patch_status(kinds.JOB, *key, changes, body["metadata"]["resourceVersion"])
        except RequestRefused as error:
            if error.code == 409:
                return False
            raise
        if written is not None:
            self._cache.see(kinds.JOB, written)
        return True


def _batches(made: Sequence[Object]) -> Iterator[Sequence[Object]]:
    """Pods that are created side by side. The coordinator comes first and alone: of a quota, others would take its
    place."""
    first = [pod for pod in made if pod["metadata"]["labels"][names.ROLE] == names.COORDINATOR]
    others = [pod for pod in made if pod["metadata"]["labels"][names.ROLE] != names.COORDINATOR]
    if first:
        yield first
    for start in range(0, len(others), MANY):
        yield others[start : start + MANY]


def _has_ended(job: DistributedTrainingJob) -> bool:
    return job.status is not None and job.status.phase in ("Succeeded", "Failed")


def _is_new(at: Situation) -> bool:
    """Whether nothing of a job can be there yet, so that what has the name of its Secret is about to go."""
    theirs = any(thing.owner == at.uid for thing in at.children.things.values())
    return not theirs and at.now - at.created < LEFT_SECONDS


def _trouble(kind: kinds.Kind, name: str, error: RequestRefused, shown: str = "") -> Want:
    """What was refused, and why.

    Args:
        shown: what a pod is called instead, whose name is another one at each try.
    """
    is_quota = error.code == 403 and "exceeded quota" in str(error)
    reason = Reason.QUOTA_EXCEEDED if is_quota else Reason.REFUSED
    return Want(reason, f"{kind.name} {name}: {error}".replace(name, shown or name), error.code in FOR_GOOD)


def _kind(manifest: Object) -> kinds.Kind:
    return next(kind for kind in kinds.WATCHED if kind.name == manifest["kind"])


def _place(pod: Object) -> str:
    labels = pod["metadata"]["labels"]
    return place(labels[names.ROLE], int(labels[names.INDEX]))


def _labels(body: Object) -> dict[str, str]:
    return dict(body["metadata"].get("labels") or {})


def _job(metadata: Object) -> Key:
    return metadata["namespace"], metadata["labels"][names.JOB]
