"""What the operator has seen of jobs and their objects: fed by watches, by its own writes, and by lists.

Only a cache: all of it comes back from the API server at any time. A version that is older than what is known is passed
over, because watches tell of our own writes after we have their answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem_operator import kinds
from tandem_operator.kinds import Kind
from tandem_operator.observed import Children, Thing, children, job_of, observe

Key = tuple[str, str]
"""Namespace and name of a job."""
Object = dict[str, Any]
KEPT = {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"}
"""Of a job's metadata. Annotations hold the whole job a second time, managed fields a third time."""


@dataclass(frozen=True)
class _Entry:
    key: Key
    thing: Thing


class Store:
    """The cache."""

    def __init__(self) -> None:
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

    def see(self, kind: Kind, body: Object) -> Key | None:
        """Take in an object; the job that this is news for, if it is."""
        metadata = body["metadata"]
        if kind is kinds.JOB:
            return self._see_job((metadata["namespace"], metadata["name"]), body)
        thing = observe(kind, body)
        key = (metadata["namespace"], job_of(metadata))
        place = (kind, metadata["namespace"], thing.name)
        before = self._entries.get(place)
        if before is not None and before.thing.version > thing.version:
            return None
        self._entries[place] = _Entry(key, thing)
        self._by_job.setdefault(key, {})[kind, thing.name] = thing
        return key if before is None or _differs(before.thing, thing) else None

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
        siblings = self._by_job[entry.key]
        siblings.pop((kind, name), None)
        if not siblings:
            del self._by_job[entry.key]
        return entry.key

    def compare(self, kind: Kind, namespace: str, listed: set[str], version: int) -> Iterator[Key]:
        """Drop what a list of all objects of a kind does not have any more: watches can lose the news of an end. Yields
        the jobs that this is news for.

        Args:
            namespace: where it was listed, empty for everywhere.
            listed: UIDs.
            version: the list's resource version; what was seen later is not judged by it.
        """
        if kind is kinds.JOB:
            metadata = [job["metadata"] for job in self._jobs.values()]
            known = [(one["namespace"], one["name"], one["uid"], int(one["resourceVersion"])) for one in metadata]
        else:
            entries = [(place, entry.thing) for place, entry in self._entries.items() if place[0] is kind]
            known = [(place[1], place[2], thing.uid, thing.version) for place, thing in entries]
        for where, name, uid, seen in known:
            if namespace in ("", where) and uid not in listed and seen <= version:
                key = self.lose(kind, where, name, uid)
                assert key is not None
                yield key

    def _see_job(self, key: Key, body: Object) -> Key | None:
        metadata = {field: value for field, value in body["metadata"].items() if field in KEPT}
        body = {**body, "metadata": metadata}
        before = self._jobs.get(key)
        if before is not None and int(before["metadata"]["resourceVersion"]) > int(metadata["resourceVersion"]):
            return None
        self._jobs[key] = body
        if before is None or before["metadata"]["uid"] != metadata["uid"]:
            return key
        # A change of the status alone is our own.
        told = ("generation", "deletionTimestamp")
        return None if all(before["metadata"].get(field) == metadata.get(field) for field in told) else key


def _differs(before: Thing, after: Thing) -> bool:
    return {**vars(before), "version": 0} != {**vars(after), "version": 0}
