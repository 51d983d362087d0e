"""What the operator has seen of jobs and their objects: fed by watches, by its own writes, and by lists.

Only a cache: all of it comes back from the API server at any time. A version that is older than what is known is passed
over, because watches tell of our own writes after we have their answers. What a list says is so, unless something newer
was seen since: after a restore of etcd objects have older versions than before.

Each object is taken in on its own, and one that cannot be read is passed over (tandem_operator.unreadable).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem_operator import jobs, kinds
from tandem_operator.bounded import UNREAD
from tandem_operator.jobs import Object
from tandem_operator.kinds import Kind
from tandem_operator.observed import Children, Thing, children, job_of, observe, version
from tandem_operator.unreadable import UnreadableObjects

Key = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True)
class _Entry:
    key: Key
    thing: Thing


class Cache:
    """The cache."""

    def __init__(self) -> None:
        self.unreadable = UnreadableObjects()
        """What could not be taken in."""
        self._jobs: dict[Key, Object] = {}
        self._entries: dict[tuple[Kind, str, str], _Entry] = {}
        self._by_job: dict[Key, dict[tuple[Kind, str], Thing]] = {}

    def job(self, key: Key) -> Object | None:
        """A job's object."""
        return self._jobs.get(key)

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
            return namespace, name
        place = (kind, namespace, name)
        entry = self._entries.get(place)
        if entry is None or entry.thing.uid != uid:
            return None
        del self._entries[place]
        self._leave(entry.key, kind, name)
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
        jobs.named(thing.uid)
        key = (jobs.named(metadata["namespace"]), jobs.named(job_of(metadata)))
        place = (kind, key[0], jobs.named(thing.name))
        before = self._entries.get(place)
        if before is not None and _is_older(thing.version, before.thing.version, listed):
            return []
        moved = before is not None and before.key != key
        if before is not None and moved:
            self._leave(before.key, kind, thing.name)
        self._entries[place] = _Entry(key, thing)
        self._by_job.setdefault(key, {})[kind, thing.name] = thing
        news = [key] if before is None or moved or _differs(before.thing, thing) else []
        return [*news, before.key] if before is not None and moved else news

    def _leave(self, key: Key, kind: Kind, name: str) -> None:
        """An object is not the job's any more."""
        siblings = self._by_job[key]
        siblings.pop((kind, name), None)
        if not siblings:
            del self._by_job[key]

    def _see_job(self, whole: Object, listed: int | None) -> list[Key]:
        body = jobs.kept(whole)
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
        if jobs.REFUSED in body:
            self.unreadable.note(kinds.JOB, body, body[jobs.REFUSED])
        self._jobs[key] = body
        if before is None or before["metadata"]["uid"] != metadata["uid"]:
            return [key]
        if before["metadata"]["generation"] == metadata["generation"] and before["spec"] == body["spec"]:
            # What was parsed once is not parsed again (tandem_operator.memory).
            body["spec"] = before["spec"]
        # A change of the status alone is our own.
        told = ("generation", "deletionTimestamp", "annotations")
        return [] if all(before["metadata"].get(field) == metadata.get(field) for field in told) else [key]


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
