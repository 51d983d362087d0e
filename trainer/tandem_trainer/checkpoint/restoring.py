"""Where a generation starts: the newest sound checkpoint that counts, verified by every rank, or the beginning.

Rank 0 proposes, newest first; every rank reads and checks every byte; only if all succeed is it taken. A broken one is
set aside as `.bad` with the reason, one that has vanished or cannot be read now is passed over. Then rank 0 records
where the generation starts, before its first step, which is what fences the generations before it (see tandem.lineage).
Until then an older generation may still save, and let retention delete what was read here: so rank 0 holds a lease.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tandem.lease import Lease, acquire, default_holder
from tandem.lineage import GenerationRecord
from tandem.manifest import Broken, Manifest
from tandem.rundir import RunDir
from tandem_trainer.checkpoint.contents import Contents
from tandem_trainer.checkpoint.reading import read_contents
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.group import Group

LEASE_SECONDS = 3600.0
"""A large checkpoint may take long to read; a start that dies keeps retention from one checkpoint for so long."""


@dataclass(frozen=True)
class Loaded:
    """A whole checkpoint in memory."""

    manifest: Manifest
    """What it is."""
    contents: Contents
    """What a run resumes."""


@dataclass
class Restored:
    """What was found."""

    loaded: Loaded | None = None
    """The checkpoint taken; None: start from the beginning."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Checkpoints that could not be used, each with a sentence that says why."""
    lease: Lease | None = None
    """Keeps the checkpoint taken from being deleted; to be released once the generation's record is written."""

    def release(self) -> None:
        """Give the lease back."""
        if self.lease is not None:
            with suppress(OSError):  # it runs out by itself
                self.lease.release()
            self.lease = None


def restore(rundir: RunDir, group: Group, apply: Callable[[Loaded], None]) -> Restored:
    """Find, load and apply the checkpoint to start from. Collective: every rank calls it.

    Args:
        apply: puts a loaded checkpoint into model and optimizer; raises Broken if it does not fit.

    Raises:
        OSError: the disk does not give what it holds. Not taken for a broken checkpoint: to start from an older one, or
            from the beginning, would cut the newer ones off for good.
    """
    result = Restored()
    while name := group.tell({"name": _newest(rundir, group, result)})["name"]:
        verdict: dict[str, str] = {}
        loaded = None
        if group.rank == 0:
            result.lease = _held(rundir, name)
        try:
            loaded = _load(rundir, name)
            apply(loaded)
        except Broken as error:
            verdict = {"broken": str(error)}
        except FileNotFoundError as error:
            verdict = {"vanished": f"{name} was deleted while it was read: {error}"}
        except OSError as error:
            verdict = {"unreadable": f"{name} cannot be read: {error}"}
        faults: dict[str, str] = {}
        for one in group.gather(verdict):
            faults = one | faults
        if not faults:
            result.loaded = loaded
            return result
        result.release()
        if "unreadable" in faults:
            raise OSError(faults["unreadable"])
        result.passed_over[name] = faults.get("broken") or faults["vanished"]
        if "broken" in faults and group.rank == 0:
            rundir.set_aside(name, why=faults["broken"])
    return result


def _newest(rundir: RunDir, group: Group, result: Restored) -> str | None:
    if group.rank != 0:
        return None
    for name, why in rundir.damaged().items():
        result.passed_over[name] = why
        rundir.set_aside(name, why=why)
    return next((found.name for found in rundir.committed() if found.name not in result.passed_over), None)


def _held(rundir: RunDir, name: str) -> Lease | None:
    # A disk that is full or read-only is no reason not to start from what it holds.
    with suppress(OSError):
        holder = default_holder()
        return acquire(rundir.leases / f"read-{name}-{holder}.json", holder, LEASE_SECONDS)
    return None


def _load(rundir: RunDir, name: str) -> Loaded:
    folder, manifest = rundir.checkpoint(name), rundir.manifest(name)
    return Loaded(manifest, read_contents(folder, manifest))


def record_start(rundir: RunDir, group: Group, generation: int, members: list[str], loaded: Loaded | None) -> None:
    """Write this generation's record. Collective.

    Raises:
        Superseded: another group has this number already, or a newer generation exists.
    """
    problem = ""
    if group.rank == 0:
        record = GenerationRecord(
            generation=generation,
            resumed_from=loaded.manifest.reference if loaded else None,
            world_size=group.world_size,
            members=members,
            started_at=time.time(),
        )
        if rundir.newest_generation() > generation:
            problem = f"generation {rundir.newest_generation()} is already running"
        elif not rundir.record_generation(record):
            problem = f"generation {generation} was already started by another group"
    problem = group.tell({"problem": problem})["problem"]
    if problem:
        raise Superseded(problem)
