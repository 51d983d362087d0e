"""The operator's cache of jobs and their objects, kept current by watches, its own writes, and a list every minute.

Only a cache: all of it comes back from the API server at any time. A version that is older than what is known is passed
over, because watches tell of our own writes after we have their answers. What a list says is so, unless something newer
was seen since: after a restore of etcd objects have older versions than before.

Each object is taken in on its own, and one that cannot be read is passed over (tandem_operator.bounded).

kopf watches the jobs. Of what belongs to them, mostly pods, five times as much happens, and kopf's way of handling an
event (a queue and a task for each object, then causes, handlers, a logger) cost more processor time than all that we do
with it. So those are followed here, from the version of the first list on.

A watch can lose the news that an object is gone (it was interrupted, and the object went meanwhile), and a watch that
has stalled looks like one in which nothing happens. So everything is listed now and then and compared. If a list finds
something new and the watch says nothing until the next list, it has stalled, and the operator is not healthy. Nothing
is decided before the first list is complete, or workers that are there would be made a second time.

Rejected: kopf's own indices as the cache. They cannot take in the answers to our writes, and what a watch loses stays
in them until the operator starts again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from tandem.reasons import Reason
from tandem_operator import kinds, names, observed
from tandem_operator.api import EXPIRED, ApiServer, RequestRefused, Unavailable
from tandem_operator.bounded import (
    MAX_PODS,
    MAX_SPEC_BYTES,
    MAX_STRAY_PODS,
    UNREAD,
    Login,
    Shares,
    UnreadableObjects,
    size,
)
from tandem_operator.kinds import Kind
from tandem_operator.observed import Children, Object, Thing, children, job_of, observe, version

Key = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class _Entry:
    key: Key
    thing: Thing


class Cache:
    """The cache.

    Labels are anybody's to write. So of what carries the label of a job only this is held: objects with the names that
    its own have, if there is that job; its pods; and some pods that are nobody's, because their job may be about to be
    seen.

    Args:
        max_spec_bytes: of the specs of all jobs.
        max_pods, max_stray_pods: that jobs own, and others (tandem_operator.bounded.Shares).
    """

    def __init__(
        self, max_spec_bytes: int = MAX_SPEC_BYTES, max_pods: int = MAX_PODS, max_stray_pods: int = MAX_STRAY_PODS
    ) -> None:
        self.unreadable = UnreadableObjects()
        """What could not be taken in."""
        self._jobs: dict[Key, Object] = {}
        self._entries: dict[tuple[Kind, str, str], _Entry] = {}
        self._by_job: dict[Key, dict[tuple[Kind, str], Thing]] = {}
        self._specs = Shares(max_spec_bytes)
        self._pods, self._stray_pods = Shares(max_pods), Shares(max_stray_pods)
        self._overfull: set[Key] = set()
        self._overfull_before: set[Key] = set()

    def job(self, key: Key) -> Object | None:
        """A job's object."""
        return self._jobs.get(key)

    def refuse(self, body: Object, reason: str, words: str) -> None:
        """Hold the spec of a job no longer, as long as it is this one: nothing is done about it.

        Args:
            body: the job, as `job` has returned it.
        """
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        if self._jobs.get(key) is body and observed.REFUSED not in body:
            self._jobs[key] = observed.refused(body, reason, words)
            self._specs.give(key)

    def is_overfull(self, key: Key) -> bool:
        """Whether there was no room for a pod of a job when all pods were listed last, or since: nothing can be decided
        about a job whose pods are not known."""
        return key in self._overfull or key in self._overfull_before

    def everyone(self) -> list[Key]:
        """All jobs."""
        return list(self._jobs)

    def children(self, key: Key) -> Children:
        """The objects of a job."""
        return children(self._by_job.get(key, {}).values())

    def see(self, kind: Kind, body: Any, listed: int | None = None) -> list[Key]:
        """Take in an object; the jobs that this is news for. Never raises: what cannot be read is passed over.

        Args:
            listed: the resource version of the list that it is from; None: it is not from one.
        """
        try:
            return self._see_job(body, listed) if kind is kinds.JOB else self._see_thing(kind, body, listed)
        except Exception as error:
            self.unreadable.note(kind, body, error)
            return []

    def newest(self, kind: Kind, namespace: str = "") -> int:
        """The highest version that is known of a kind, 0 if none is.

        Args:
            namespace: only there; empty for everywhere.
        """
        return max((one.version for one in self._known(kind) if namespace in ("", one.namespace)), default=0)

    def lose(self, kind: Kind, namespace: str, name: str, uid: str) -> Key | None:
        """Take in that an object is gone; the job that this is news for."""
        if kind is kinds.JOB:
            there = self._jobs.get((namespace, name))
            if there is None or there["metadata"]["uid"] != uid:
                return None
            del self._jobs[namespace, name]
            self._specs.give((namespace, name))
            for of, named in [place for place in self._by_job.get((namespace, name), {}) if place[0] is not kinds.POD]:
                self._drop(of, namespace, named)
            return namespace, name
        entry = self._entries.get((kind, namespace, name))
        if entry is None or entry.thing.uid != uid:
            return None
        self._drop(kind, namespace, name)
        return entry.key

    def compare(self, kind: Kind, namespace: str, listed: set[str], version: int) -> Iterator[Key]:
        """Drop what a list of all objects of a kind does not have any more: watches can lose the news of an end. Yields
        the jobs that this is news for.

        Args:
            namespace: where it was listed, empty for everywhere.
            listed: UIDs.
            version: the list's resource version; what was seen later is not judged by it.
        """
        for one in list(self._known(kind)):
            if namespace in ("", one.namespace) and one.uid not in listed and one.version <= version:
                key = self.lose(kind, one.namespace, one.name, one.uid)
                assert key is not None
                yield key
        if kind is kinds.POD:
            over = {key for key in self._overfull_before if namespace in ("", key[0])}
            self._overfull_before = (self._overfull_before - over) | self._overfull
            self._overfull = set()

    def _known(self, kind: Kind) -> Iterator["_Known"]:
        if kind is kinds.JOB:
            for (namespace, name), job in self._jobs.items():
                yield _Known(namespace, name, job["metadata"]["uid"], version(job["metadata"]))
            return
        for (of, namespace, name), entry in self._entries.items():
            if of is kind:
                yield _Known(namespace, name, entry.thing.uid, entry.thing.version)

    def _see_thing(self, kind: Kind, body: Object, listed: int | None) -> list[Key]:
        if UNREAD in body:
            raise ValueError(body[UNREAD])
        metadata = body["metadata"]
        thing = observe(kind, body)
        observed.named(thing.uid)
        key = (observed.named(metadata["namespace"]), observed.named(job_of(metadata)))
        place = (kind, key[0], observed.named(thing.name))
        before = self._entries.get(place)
        if before is not None and _is_older(thing.version, before.thing.version, listed):
            return []
        if not self._has_room(key, thing):
            if before is None:
                return []
            self._drop(kind, key[0], thing.name)
            return [before.key]
        moved = before is not None and before.key != key
        if before is not None and moved:
            self._leave(before.key, kind, thing.name)
        self._entries[place] = _Entry(key, thing)
        self._by_job.setdefault(key, {})[kind, thing.name] = thing
        news = [key] if before is None or moved or _differs(before.thing, thing) else []
        return [*news, before.key] if before is not None and moved else news

    def _has_room(self, key: Key, thing: Thing) -> bool:
        """Whether an object is held, which takes its share then."""
        job, place = self._jobs.get(key), (key[0], thing.name)
        if not isinstance(thing, observed.Pod):
            return job is not None and thing.name in names.objects(key[1])
        is_owned = job is not None and job["metadata"]["uid"] == thing.owner
        (self._stray_pods if is_owned else self._pods).give(place)
        if (self._pods if is_owned else self._stray_pods).take(place, 1):
            return True
        if is_owned:
            self._overfull.add(key)
        return False

    def _drop(self, kind: Kind, namespace: str, name: str) -> None:
        """Hold an object no longer."""
        if kind is kinds.POD:
            for shares in (self._pods, self._stray_pods):
                shares.give((namespace, name))
        self._leave(self._entries.pop((kind, namespace, name)).key, kind, name)

    def _leave(self, key: Key, kind: Kind, name: str) -> None:
        """An object is not the job's any more."""
        siblings = self._by_job[key]
        siblings.pop((kind, name), None)
        if not siblings:
            del self._by_job[key]

    def _see_job(self, whole: Object, listed: int | None) -> list[Key]:
        body = observed.kept(whole)
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        before = self._jobs.get(key)
        if UNREAD in whole:
            same = before is not None and before["metadata"]["uid"] == metadata["uid"]
            if before is not None and same and "status" in before:
                body["status"] = before["status"]
            elif not same and metadata["generation"] > 1:
                # It may have a status, which must not be written over.
                raise ValueError(whole[UNREAD])
        if before is not None and _is_older(version(metadata), version(before["metadata"]), listed):
            return []
        if observed.REFUSED in body:
            self.unreadable.note(kinds.JOB, body, body[observed.REFUSED])
        body = self._bounded(key, before, body)
        self._jobs[key] = body
        if before is None or before["metadata"]["uid"] != metadata["uid"]:
            return [key]
        if before["metadata"]["generation"] == metadata["generation"] and before["spec"] == body["spec"]:
            # What was parsed once is not parsed again (tandem_operator.job_memory).
            body["spec"] = before["spec"]
        if observed.REFUSED in before and observed.REFUSED not in body:
            return [key]
        # A change of the status alone is our own.
        told = ("generation", "deletionTimestamp", "annotations")
        return [] if all(before["metadata"].get(field) == metadata.get(field) for field in told) else [key]

    def _bounded(self, key: Key, before: Object | None, body: Object) -> Object:
        """A job without its spec, if that was refused before or there is no room for it."""
        if observed.REFUSED not in body and before is not None and observed.is_refused(before, body):
            body = observed.refused(body, before[observed.REASON], before[observed.REFUSED])
        if observed.REFUSED in body:
            self._specs.give(key)
        elif not self._specs.take(key, size(body["spec"])):
            there = self._specs.of(key[0]) / 2**20
            body = observed.refused(body, Reason.NO_ROOM, observed.no_room(key[0], there))
        return body


@dataclass(frozen=True)
class _Known:
    """Which object, and which version of it."""

    namespace: str
    name: str
    uid: str
    version: int


def _is_older(seen: int, known: int, listed: int | None) -> bool:
    """Whether what is seen is from before what is known. What is known is newer than a list only if it came since."""
    return known > (seen if listed is None else max(seen, listed))


def _differs(before: Thing, after: Thing) -> bool:
    return {**vars(before), "version": 0} != {**vars(after), "version": 0}


SWEEP_SECONDS = 60.0
"""Between two lists of everything."""
RETRY_SECONDS = 2.0
CHUNK = 25
"""Objects in one answer of a list of kopf's, where together they may cost as much as one (tandem_operator.bounded)."""
STALE_SECONDS = 4 * SWEEP_SECONDS
"""Without a complete list for so long, the operator does not know what is going on."""
BOOKMARK = "BOOKMARK"
"""What tells a version alone."""
FORBIDDEN = 403

log = logging.getLogger("tandem.operator")


class Watching:
    """Feeds the cache, and says which jobs there is news for.

    Args:
        news: called with each job that there is news for.
        namespaces: the only ones to look at; none for all.
        isolates: NetworkPolicies are made. If not, those that are left are listed, as far as that is allowed, and
            nobody watches them: roles that somebody keeps by himself need no right that is not used.
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
        self._versions: dict[tuple[Kind, str], int] = {}
        """Of the last list of each kind in each namespace."""
        self._told: dict[Kind, float] = {}
        self._owed: dict[Kind, float] = {}
        self._stalled: set[Kind] = set()
        self.listed = asyncio.Event()
        """Set once everything was listed for the first time."""

    async def watch(self, begun: asyncio.Event) -> None:
        """Have kopf watch jobs, until cancelled.

        Args:
            begun: set as soon as it does.
        """
        registry, job = kopf.OperatorRegistry(), kinds.JOB
        kopf.on.event(job.group, job.version, job.plural, id="see", registry=registry)(self._see_job)
        kopf.on.login(id="login", registry=registry)(Login().session)
        await kopf.operator(
            registry=registry,
            settings=_settings(),
            standalone=True,
            ready_flag=begun,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
        )

    async def follow(self) -> None:
        """Watch what belongs to jobs, until cancelled."""
        await self.listed.wait()
        async with asyncio.TaskGroup() as group:
            for kind in kinds.WATCHED:
                for namespace in () if kind in self._unwatched else self._namespaces or ("",):
                    group.create_task(self._follow(kind, namespace))

    async def _follow(self, kind: Kind, namespace: str) -> None:
        expired = False
        while True:
            try:
                if expired:
                    await self._list(kind, namespace)
                # After a failure from the last list on, which is right also where versions have gone back.
                since = self._versions[kind, namespace]
                while True:
                    began = _now()
                    since = await self._hear(kind, namespace, since)
                    if _now() - began < RETRY_SECONDS:
                        await asyncio.sleep(RETRY_SECONDS)
            except (Unavailable, RequestRefused) as error:
                expired = isinstance(error, RequestRefused) and error.code == EXPIRED
                log.log(
                    logging.INFO if expired else logging.WARNING, "event=not-watched kind=%s error=%r", kind.name, error
                )
                await asyncio.sleep(RETRY_SECONDS)

    async def _hear(self, kind: Kind, namespace: str, since: int) -> int:
        """Take in all that one answer tells; the version that the next one is to begin at."""
        async for what, found in self._api.changes(kind, since, namespace, names.JOB):
            if isinstance(metadata := found.get("metadata"), Mapping):
                since = version(metadata) or since
            if what != BOOKMARK:
                self.take(kind, what, found)
        return since

    async def sweep(self) -> None:
        """List everything, and again every minute, until cancelled."""
        self._started = _now()
        while True:
            try:
                await self._list_all()
            except (Unavailable, RequestRefused) as error:
                log.warning("event=not-listed error=%r", str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._listed_at = _now()
                self.listed.set()
                await asyncio.sleep(SWEEP_SECONDS)

    @property
    def age(self) -> float:
        """Seconds since everything was listed last."""
        since = self._listed_at if self._listed_at is not None else self._started
        return 0.0 if since is None else _now() - since

    @property
    def complaint(self) -> str:
        """Why what is known may be wrong, empty if it is right."""
        if self.age > STALE_SECONDS:
            return f"nothing could be listed for {self.age:.0f} s"
        stalled = sorted(kind.plural for kind in self._stalled)
        return f"the watch of {', '.join(stalled)} has stalled" if stalled else ""

    async def _list_all(self) -> None:
        for kind in (kinds.JOB, *kinds.WATCHED):
            self._judge(kind)
            began, found = _now(), False
            for namespace in self._namespaces or ("",):
                try:
                    found |= await self._list(kind, namespace)
                except RequestRefused as error:
                    if error.code != FORBIDDEN or kind not in self._unwatched:
                        raise
                    log.info("event=not-listed kind=%s error=%r", kind.name, str(error))
            if found and self.listed.is_set() and kind not in self._unwatched:
                self._owed[kind] = began

    def _judge(self, kind: Kind) -> None:
        """Whether the watch has told since what the last list found."""
        owed_since = self._owed.pop(kind, None)
        if owed_since is not None and self._told.get(kind, 0.0) < owed_since:
            log.error("event=watch-stalled kind=%s", kind.name)
            self._stalled.add(kind)

    async def _list(self, kind: Kind, namespace: str) -> bool:
        """Whether it found something new."""
        uids: set[str] = set()
        found, listed, judged, whole = False, 0, 0, True
        # A list that begins now cannot be older than what is known already, unless etcd was restored from a backup.
        known = self._cache.newest(kind, namespace)
        async for page in self._api.pages(kind, namespace, "" if kind is kinds.JOB else names.JOB):
            if page.version < known and judged == 0:
                log.error("event=versions-went-back kind=%s known=%d listed=%d", kind.name, known, page.version)
            judged = max(page.version, known)
            listed = page.version
            if not page.whole:
                whole = False
                self._cache.unreadable.note(kind, {}, "it has more than is read, and so have its metadata")
            for body in page.items:
                if isinstance(uid := _uid(body), str):
                    uids.add(uid)
                for key in self._cache.see(kind, body, judged):
                    found = True
                    self._news(key)
            # A page may hold hundreds of large objects, and others wait.
            await asyncio.sleep(0)
        self._versions[kind, namespace] = listed
        # Without the name of one, nobody knows which are gone; the watch tells of those.
        for key in list(self._cache.compare(kind, namespace, uids, judged)) if whole else ():
            found = True
            self._news(key)
        return found

    def take(self, kind: Kind, what: str | None, found: Mapping[str, Any]) -> None:
        """Take in what a watch tells: ADDED, MODIFIED, DELETED, or None for what it finds at its start."""
        self._told[kind] = _now()
        self._stalled.discard(kind)
        metadata = found.get("metadata")
        if what != "DELETED" or not isinstance(metadata, Mapping):
            for key in self._cache.see(kind, {"apiVersion": kind.api, "kind": kind.name, **found}):
                self._news(key)
            return
        lost = self._cache.lose(kind, *(str(metadata.get(field)) for field in ("namespace", "name", "uid")))
        if lost is not None:
            self._news(lost)

    async def _see_job(self, event: Any, **_: Any) -> None:
        self.take(kinds.JOB, event["type"], event["object"])


def _uid(body: Any) -> Any:
    metadata = body.get("metadata") if isinstance(body, Mapping) else None
    return metadata.get("uid") if isinstance(metadata, Mapping) else None


class _NoEssence(kopf.DiffBaseStorage):
    """What of an object kopf compares with what it was: nothing, for nobody asks. To keep it, kopf copies each object
    that its watch tells of, whole, twice. A megabyte of small lists took it four seconds, and it fails at deep ones."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


def _now() -> float:
    return asyncio.get_running_loop().time()


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = _NoEssence()
    # Neither asks for rights on CRDs and namespaces, and all our kinds exist before the operator starts.
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = CHUNK
    return settings
