"""The operator's cache of jobs and their objects, kept current by watches, its own writes, and a list every minute.

It is only a cache: all of it can be read from the API server again at any time. A version older than the known one is
ignored, because watches report the operator's own writes after their answers have arrived. The content of a list is
taken as true, unless something newer was seen since: after a restore of etcd objects have older versions than before.

Each object is handled on its own, and one that cannot be read is skipped (tandem_operator.bounded).

kopf watches the jobs. Their objects, mostly pods, change five times as often, and kopf's way of handling an event (a
queue and a task for each object, then causes, handlers, a logger) cost more processor time than everything that the
operator does with it. So they are watched here, from the version of the first list on.

A watch can lose the deletion of an object (it was interrupted, and the object was deleted meanwhile), and a watch that
has stalled looks like one in which nothing happens. So everything is listed now and then and compared. If a list finds
a change and the watch reports nothing until the next list, the watch has stalled, and the operator is not healthy.
Nothing is decided before the first list is complete, or existing workers would be created a second time.

Rejected: kopf's own indices as the cache. They cannot take in the answers to the operator's writes, and a deletion that
the watch loses stays in them until the operator restarts.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.wire.reasons import Reason
from tandem_operator import job_objects, kinds, names, observed
from tandem_operator.api import EXPIRED, ApiServer, RequestRefused, Unavailable
from tandem_operator.bounded import (
    MAX_PODS,
    MAX_SPEC_BYTES,
    MAX_STRAY_PODS,
    UNREAD,
    Shares,
    UnreadableObjects,
    size,
)
from tandem_operator.job_objects import Object
from tandem_operator.kinds import Kind
from tandem_operator.observed import Children, KubeObject, children, job_of, observe, version

Key = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class _Entry:
    key: Key
    child: KubeObject


class Cache:
    """The cache.

    Anybody can set labels. So of the objects with the label of a job only these are held: objects with the names that
    the job's own have, if that job exists; its pods; and some pods without an owner, because their job may be about to
    be seen.

    Args:
        max_spec_bytes: limit for the specs of all jobs.
        max_pods, max_stray_pods: limits for pods that jobs own, and for others (tandem_operator.bounded.Shares).
    """

    def __init__(
        self, max_spec_bytes: int = MAX_SPEC_BYTES, max_pods: int = MAX_PODS, max_stray_pods: int = MAX_STRAY_PODS
    ) -> None:
        self.unreadable = UnreadableObjects()
        """Objects that could not be read."""
        self.served: dict[Kind, bool] = {}
        """Whether the cluster has an optional kind, and lets the operator list it; absent until that is known."""
        self._jobs: dict[Key, Object] = {}
        self._entries: dict[tuple[Kind, str, str], _Entry] = {}
        self._by_job: dict[Key, dict[tuple[Kind, str], KubeObject]] = {}
        self._specs = Shares(max_spec_bytes)
        self._pods, self._stray_pods = Shares(max_pods), Shares(max_stray_pods)
        self._overfull: set[Key] = set()
        self._overfull_before: set[Key] = set()

    def job(self, key: Key) -> Object | None:
        """A job's object."""
        return self._jobs.get(key)

    def refuse(self, body: Object, reason: str, message: str) -> None:
        """Drop the spec of a job that is not reconciled, as long as the cache holds this very object.

        Args:
            body: the job, as `job` has returned it.
        """
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        if self._jobs.get(key) is body and job_objects.REFUSED not in body:
            self._jobs[key] = job_objects.refused(body, reason, message)
            self._specs.give(key)

    def is_overfull(self, key: Key) -> bool:
        """Whether there was no room for a pod of a job in the last list of all pods, or since: a job whose pods are not
        all known cannot be reconciled."""
        return key in self._overfull or key in self._overfull_before

    def job_keys(self) -> list[Key]:
        """Keys of all jobs."""
        return list(self._jobs)

    def children(self, key: Key) -> Children:
        """The objects of a job."""
        return children(self._by_job.get(key, {}).values())

    def upsert(self, kind: Kind, body: Any, list_version: int | None = None) -> list[Key]:
        """Insert or update an object; returns the jobs that it is a change for. Never raises: an unreadable object is
        skipped.

        Args:
            list_version: resource version of the list that it is from; None: it is not from a list.
        """
        try:
            return (
                self._upsert_job(body, list_version)
                if kind is kinds.JOB
                else self._upsert_child(kind, body, list_version)
            )
        except Exception as error:
            self.unreadable.note(kind, body, error)
            return []

    def newest_version(self, kind: Kind, namespace: str = "") -> int:
        """The highest known version of a kind, 0 if there is none.

        Args:
            namespace: empty for all.
        """
        return max(
            (
                known_object.version
                for known_object in self._known_objects(kind)
                if namespace in ("", known_object.namespace)
            ),
            default=0,
        )

    def remove(self, kind: Kind, namespace: str, name: str, uid: str) -> Key | None:
        """Remove an object that was deleted; returns the job that this is a change for."""
        if kind is kinds.JOB:
            job = self._jobs.get((namespace, name))
            if job is None or job["metadata"]["uid"] != uid:
                return None
            del self._jobs[namespace, name]
            self._specs.give((namespace, name))
            for child_kind, child_name in [
                place for place in self._by_job.get((namespace, name), {}) if place[0] is not kinds.POD
            ]:
                self._drop(child_kind, namespace, child_name)
            return namespace, name
        entry = self._entries.get((kind, namespace, name))
        if entry is None or entry.child.uid != uid:
            return None
        self._drop(kind, namespace, name)
        return entry.key

    def prune(self, kind: Kind, namespace: str, listed_uids: set[str], version: int) -> Iterator[Key]:
        """Remove the objects of a kind that a list of all does not contain: watches can lose deletions. Yields the jobs
        that this is a change for.

        Args:
            namespace: namespace of the list, empty for all.
            listed_uids: UIDs in the list.
            version: the list's resource version; objects that were seen later stay.
        """
        for known_object in list(self._known_objects(kind)):
            if (
                namespace in ("", known_object.namespace)
                and known_object.uid not in listed_uids
                and known_object.version <= version
            ):
                key = self.remove(kind, known_object.namespace, known_object.name, known_object.uid)
                assert key is not None
                yield key
        if kind is kinds.POD:
            in_scope = {key for key in self._overfull_before if namespace in ("", key[0])}
            self._overfull_before = (self._overfull_before - in_scope) | self._overfull
            self._overfull = set()

    def _known_objects(self, kind: Kind) -> Iterator["_KnownObject"]:
        if kind is kinds.JOB:
            for (namespace, name), job in self._jobs.items():
                yield _KnownObject(namespace, name, job["metadata"]["uid"], version(job["metadata"]))
            return
        for (child_kind, namespace, name), entry in self._entries.items():
            if child_kind is kind:
                yield _KnownObject(namespace, name, entry.child.uid, entry.child.version)

    def _upsert_child(self, kind: Kind, body: Object, list_version: int | None) -> list[Key]:
        if UNREAD in body:
            raise ValueError(body[UNREAD])
        metadata = body["metadata"]
        child = observe(kind, body)
        job_objects.valid_name(child.uid)
        key = (job_objects.valid_name(metadata["namespace"]), job_objects.valid_name(job_of(metadata)))
        place = (kind, key[0], job_objects.valid_name(child.name))
        before = self._entries.get(place)
        if before is not None and _is_older(child.version, before.child.version, list_version):
            return []
        if not self._has_room(key, child):
            if before is None:
                return []
            self._drop(kind, key[0], child.name)
            return [before.key]
        has_moved = before is not None and before.key != key
        if before is not None and has_moved:
            self._unlink(before.key, kind, child.name)
        self._entries[place] = _Entry(key, child)
        self._by_job.setdefault(key, {})[kind, child.name] = child
        news = [key] if before is None or has_moved or _differs(before.child, child) else []
        return [*news, before.key] if before is not None and has_moved else news

    def _has_room(self, key: Key, child: KubeObject) -> bool:
        """Whether an object may be held; if so, it takes its share."""
        job, share_key = self._jobs.get(key), (key[0], child.name)
        if not isinstance(child, observed.Pod):
            return job is not None and child.name in names.objects(key[1])
        is_owned = job is not None and job["metadata"]["uid"] == child.owner
        (self._stray_pods if is_owned else self._pods).give(share_key)
        if (self._pods if is_owned else self._stray_pods).take(share_key, 1):
            return True
        if is_owned:
            self._overfull.add(key)
        return False

    def _drop(self, kind: Kind, namespace: str, name: str) -> None:
        """Remove an object from the cache."""
        if kind is kinds.POD:
            for shares in (self._pods, self._stray_pods):
                shares.give((namespace, name))
        self._unlink(self._entries.pop((kind, namespace, name)).key, kind, name)

    def _unlink(self, key: Key, kind: Kind, name: str) -> None:
        """Detach an object from a job."""
        siblings = self._by_job[key]
        siblings.pop((kind, name), None)
        if not siblings:
            del self._by_job[key]

    def _upsert_job(self, raw: Object, list_version: int | None) -> list[Key]:
        body = job_objects.trimmed(raw)
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        previous = self._jobs.get(key)
        if UNREAD in raw:
            is_same_job = previous is not None and previous["metadata"]["uid"] == metadata["uid"]
            if previous is not None and is_same_job and "status" in previous:
                body["status"] = previous["status"]
            elif not is_same_job and metadata["generation"] > 1:
                # It may have a status, which must not be overwritten.
                raise ValueError(raw[UNREAD])
        if previous is not None and _is_older(version(metadata), version(previous["metadata"]), list_version):
            return []
        if job_objects.REFUSED in body:
            self.unreadable.note(kinds.JOB, body, body[job_objects.REFUSED])
        body = self._bounded(key, previous, body)
        self._jobs[key] = body
        if previous is None or previous["metadata"]["uid"] != metadata["uid"]:
            return [key]
        if previous["metadata"]["generation"] == metadata["generation"] and previous["spec"] == body["spec"]:
            # Keeping the same object saves parsing it again (tandem_operator.job_memory).
            body["spec"] = previous["spec"]
        if job_objects.REFUSED in previous and job_objects.REFUSED not in body:
            return [key]
        # A change of the status alone is the operator's own.
        relevant_fields = ("generation", "deletionTimestamp", "annotations")
        return [] if all(previous["metadata"].get(field) == metadata.get(field) for field in relevant_fields) else [key]

    def _bounded(self, key: Key, before: Object | None, body: Object) -> Object:
        """A job without its spec, if that was refused before or there is no room for it."""
        if job_objects.REFUSED not in body and before is not None and job_objects.is_refused(before, body):
            body = job_objects.refused(body, before[job_objects.REASON], before[job_objects.REFUSED])
        if job_objects.REFUSED in body:
            self._specs.give(key)
        elif not self._specs.take(key, size(body["spec"])):
            used = self._specs.used(key[0]) / 2**20
            body = job_objects.refused(body, Reason.NO_ROOM, job_objects.no_room(key[0], used))
        return body


@dataclass(frozen=True)
class _KnownObject:
    """Identity and version of an object."""

    namespace: str
    name: str
    uid: str
    version: int


def _is_older(new_version: int, known_version: int, list_version: int | None) -> bool:
    """Whether a version is older than the known one. The known one is newer than a list only if it arrived since."""
    return known_version > (new_version if list_version is None else max(new_version, list_version))


def _differs(before: KubeObject, after: KubeObject) -> bool:
    return {**vars(before), "version": 0} != {**vars(after), "version": 0}


SWEEP_SECONDS = 60.0
"""Interval between two lists of everything."""
RETRY_SECONDS = 2.0
LIST_ATTEMPTS = 5
"""Attempts at one list of a sweep, before the sweep begins anew."""
STALE_SECONDS = 4 * SWEEP_SECONDS
"""Time without a complete list after which the operator reports itself unhealthy, unless a first attempt still gets
pages: a tenant with very many objects must not have it restarted."""
PAGE_SECONDS = 60.0
"""Maximum time between two pages of such an attempt."""
BOOKMARK = "BOOKMARK"
"""Type of a watch event that carries only a version."""
FORBIDDEN, NOT_FOUND = 403, 404

log = logging.getLogger("tandem.operator")


class Informer:
    """Feeds the cache, and reports which jobs have changed.

    Args:
        news: called with each job that has changed.
        namespaces: the only namespaces to watch; none for all.
        isolates: NetworkPolicies are created. If not, existing ones are listed, as far as that is allowed, and not
            watched: roles that somebody maintains by hand need no right that is not used.
    """

    def __init__(
        self,
        api: ApiServer,
        cache: Cache,
        news: Callable[[Key], None],
        namespaces: Sequence[str],
        isolates: bool = False,
    ) -> None:
        self._api, self._cache, self._news = api, cache, news
        self._namespaces = tuple(namespaces)
        self._unwatched: frozenset[Kind] = frozenset() if isolates else frozenset({kinds.NETWORK_POLICY})
        self._listed_at: float | None = None
        self._started: float | None = None
        self._paged_at = float("-inf")
        """Time of the last page of any list."""
        self._has_failed = False
        """Whether the last attempt at listing everything has failed."""
        self._versions: dict[tuple[Kind, str], int] = {}
        """Resource version of the last list of each kind in each namespace."""
        self._last_event_at: dict[Kind, float] = {}
        self._owed_since: dict[Kind, float] = {}
        self._stalled: set[Kind] = set()
        self.synced = asyncio.Event()
        """Set once everything has been listed for the first time."""

    async def follow(self) -> None:
        """Watch the objects of jobs, until cancelled."""
        await self.synced.wait()
        async with asyncio.TaskGroup() as group:
            for kind in kinds.WATCHED:
                for namespace in () if kind in self._unwatched else self._namespaces or ("",):
                    group.create_task(self._follow(kind, namespace))

    async def _follow(self, kind: Kind, namespace: str) -> None:
        expired = False
        while True:
            if (kind, namespace) not in self._versions:
                # The cluster lacks this kind; each sweep lists it again.
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                if expired:
                    await self._list(kind, namespace)
                # After a failure, the watch resumes from the last list, which is right also where versions have gone
                # back.
                since = self._versions[kind, namespace]
                while True:
                    started_at = _now()
                    since = await self._read_watch(kind, namespace, since)
                    if _now() - started_at < RETRY_SECONDS:
                        await asyncio.sleep(RETRY_SECONDS)
            except (Unavailable, RequestRefused) as error:
                if isinstance(error, RequestRefused) and self._is_absent(kind, error):
                    del self._versions[kind, namespace]
                expired = isinstance(error, RequestRefused) and error.code == EXPIRED
                log.log(
                    logging.INFO if expired else logging.WARNING, "event=not-watched kind=%s error=%r", kind.name, error
                )
                await asyncio.sleep(RETRY_SECONDS)

    async def _read_watch(self, kind: Kind, namespace: str, since: int) -> int:
        """Handle all events of one watch request; returns the version at which the next one begins."""
        async for event_type, body in self._api.changes(kind, since, namespace, names.JOB):
            if isinstance(metadata := body.get("metadata"), Mapping):
                since = version(metadata) or since
            if event_type != BOOKMARK:
                self.handle(kind, event_type, body)
        return since

    async def sweep(self) -> None:
        """List everything, and again every minute, until cancelled."""
        self._started = _now()
        while True:
            try:
                await self._list_all()
            except (Unavailable, RequestRefused) as error:
                self._has_failed = True
                log.warning("event=not-listed error=%r", str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._listed_at, self._has_failed = _now(), False
                self.synced.set()
                await asyncio.sleep(SWEEP_SECONDS)

    @property
    def age(self) -> float:
        """Seconds since the last complete list."""
        since = self._listed_at if self._listed_at is not None else self._started
        return 0.0 if since is None else _now() - since

    @property
    def complaint(self) -> str:
        """The reason why the cache may be outdated, empty if it is current."""
        is_listing = not self._has_failed and _now() - self._paged_at < PAGE_SECONDS
        if self.age > STALE_SECONDS and not is_listing:
            return f"nothing could be listed for {self.age:.0f} s"
        stalled = sorted(kind.plural for kind in self._stalled)
        return f"the watch of {', '.join(stalled)} has stalled" if stalled else ""

    async def _list_all(self) -> None:
        for kind in (kinds.JOB, *kinds.WATCHED):
            if kind in kinds.OPTIONAL:
                await self._list_optional(kind)
                continue
            self._check_watch(kind)
            started_at, has_changes = _now(), False
            for namespace in self._namespaces or ("",):
                try:
                    has_changes |= await self._list_patiently(kind, namespace)
                except RequestRefused as error:
                    if error.code != FORBIDDEN or kind not in self._unwatched:
                        raise
                    log.info("event=not-listed kind=%s error=%r", kind.name, str(error))
            if has_changes and self.synced.is_set() and kind not in self._unwatched:
                self._owed_since[kind] = started_at

    async def _list_optional(self, kind: Kind) -> None:
        """List an optional kind. Its own servers may be away (a webhook that converts its versions), and then what is
        known of it stays: all other jobs depend on this sweep."""
        for namespace in self._namespaces or ("",):
            try:
                await self._list(kind, namespace)
            except RequestRefused as error:
                if not self._is_absent(kind, error):
                    log.warning("event=not-listed kind=%s error=%r", kind.name, str(error))
            except Unavailable as error:
                log.warning("event=not-listed kind=%s error=%r", kind.name, str(error))

    def _is_absent(self, kind: Kind, error: RequestRefused) -> bool:
        """Whether a list was refused because the cluster lacks an optional kind, or keeps it to itself."""
        is_absent = kind in kinds.OPTIONAL and error.code in (FORBIDDEN, NOT_FOUND)
        if is_absent:
            self._cache.served[kind] = False
        return is_absent

    async def _list_patiently(self, kind: Kind, namespace: str) -> bool:
        """List a kind, several times if the API server does not answer; returns whether something had changed.

        Without this an overloaded server that fails every second request would hardly ever let all lists of a sweep
        pass one after the other.
        """
        for _ in range(LIST_ATTEMPTS - 1):
            try:
                return await self._list(kind, namespace)
            except Unavailable as error:
                log.warning("event=not-listed error=%r", str(error))
                await asyncio.sleep(RETRY_SECONDS)
        return await self._list(kind, namespace)

    def _check_watch(self, kind: Kind) -> None:
        """Mark the watch of a kind as stalled if it has not reported what the last list found."""
        owed_since = self._owed_since.pop(kind, None)
        if owed_since is not None and self._last_event_at.get(kind, 0.0) < owed_since:
            log.error("event=watch-stalled kind=%s", kind.name)
            self._stalled.add(kind)

    async def _list(self, kind: Kind, namespace: str) -> bool:
        """List a kind; returns whether something had changed."""
        uids: set[str] = set()
        has_changes, list_version, judged_version, is_complete = False, 0, 0, True
        # A list that begins now cannot be older than the known objects, unless etcd was restored from a backup.
        newest_known = self._cache.newest_version(kind, namespace)
        async for page in self._api.pages(kind, namespace, "" if kind is kinds.JOB else names.JOB):
            if page.version < newest_known and judged_version == 0:
                log.error("event=versions-went-back kind=%s known=%d listed=%d", kind.name, newest_known, page.version)
            self._paged_at = _now()
            judged_version = max(page.version, newest_known)
            list_version = page.version
            if not page.is_complete:
                is_complete = False
                self._cache.unreadable.note(kind, {}, "it has more than is read, and so have its metadata")
            for body in page.items:
                if isinstance(uid := _uid(body), str):
                    uids.add(uid)
                for key in self._cache.upsert(kind, body, judged_version):
                    has_changes = True
                    self._news(key)
            # A page may hold hundreds of large objects, so other tasks get a turn.
            await asyncio.sleep(0)
        self._versions[kind, namespace] = list_version
        if kind in kinds.OPTIONAL:
            self._cache.served[kind] = True
        # An incomplete list cannot show which objects are gone; the watch reports those.
        for key in list(self._cache.prune(kind, namespace, uids, judged_version)) if is_complete else ():
            has_changes = True
            self._news(key)
        return has_changes

    def handle(self, kind: Kind, event_type: str | None, body: Mapping[str, Any]) -> None:
        """Handle a watch event: ADDED, MODIFIED, DELETED, or None for an object that existed when the watch started."""
        self._last_event_at[kind] = _now()
        self._stalled.discard(kind)
        metadata = body.get("metadata")
        if event_type != "DELETED" or not isinstance(metadata, Mapping):
            for key in self._cache.upsert(kind, {"apiVersion": kind.api, "kind": kind.name, **body}):
                self._news(key)
            return
        affected = self._cache.remove(kind, *(str(metadata.get(field)) for field in ("namespace", "name", "uid")))
        if affected is not None:
            self._news(affected)


def _uid(body: Any) -> Any:
    metadata = body.get("metadata") if isinstance(body, Mapping) else None
    return metadata.get("uid") if isinstance(metadata, Mapping) else None


def _now() -> float:
    return asyncio.get_running_loop().time()
