"""Restores a generation from the newest checkpoint that counts, or starts from the beginning if there never was one.

Restoring has two phases, with an agreement in between. First rank 0 proposes checkpoints, newest first; the ranks of
each node read and check every byte together (checkpoint.node_memory), and each rank compares what it read with its live
objects. Nothing has been changed by then. Only when all ranks agree is the state loaded; an error in loading ends the
process, so that nothing continues half loaded. Afterwards all ranks compare a digest of what they hold (`compare`).

The kind of problem decides what happens, because resuming from an older checkpoint discards the newer ones for good:

- Damaged, and rank 0 finds it damaged as well: it is set aside as `.bad` with the reason, and the one before is
  proposed.
- Damaged for one rank alone: that machine is at fault. Its rank fails, and nothing is set aside.
- DeletedCheckpoint, because retention of an older generation deleted it: the one before is proposed.
- Intact, but it does not match the script: the job fails, with a message that names the differences.
- Damaged on the disk of one pod, and whole in the bucket of a job without a shared directory: it is got again.
- Unreadable at the moment: the rank fails.
- None is left although there were some: the job fails. Only the user may decide to start over.

Then rank 0 records where the generation starts, before its first step, which fences the generations before it (see
tandem.rundir.lineage). Until then an older generation may still save, and its retention may delete what was read here;
so rank 0 holds a lease.

Nothing in torch compares replicas. A replica that differs, because its memory is faulty or because something was loaded
only in part, continues with the others, and its state becomes part of every checkpoint. So the ranks compare a digest
whenever a group starts, from a checkpoint or from the beginning. It costs a pass over the state (docs/checkpoints.md
has the figures).

On a CPU the digest is XXH3 of the bytes. On other devices it is computed there, as a sum of words with odd weights by
position, modulo 2^64: any single word that differs changes it.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.parameter import is_lazy

from tandem.rundir import sync_client
from tandem.rundir.checkpoint import Broken, Manifest, OtherFormat, is_damaged
from tandem.rundir.durable import unsupported_operation
from tandem.rundir.layout import RunDir
from tandem.rundir.lease import Lease, acquire, default_holder
from tandem.rundir.lineage import Continuation, DatasetCommit, GenerationRecord, Origin
from tandem.wire.reasons import Reason
from tandem.wire.status import RANKS_DIFFER, CheckpointRef
from tandem_trainer.checkpoint.node_memory import FileMemory, shared_memory_of
from tandem_trainer.checkpoint.reader import contents_in
from tandem_trainer.checkpoint.sharding import is_shared, place_of, to_local
from tandem_trainer.checkpoint.state import CheckpointMismatch
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.failure import ConfigurationError, Disagreement
from tandem_trainer.machine import describe_machine
from tandem_trainer.process_group import Group, PeerFault

LEASE_SECONDS = 3600.0
"""Lifetime of a lease, in seconds. A large checkpoint may take long to read; a start that dies protects its checkpoint
from retention for this long."""

Verdict = dict[str, Any]
"""A rank's verdict on a checkpoint, as JSON; empty if it can be used."""


class NoUsableCheckpoint(ConfigurationError):  # noqa: N818 - it is what is the case
    """There are checkpoints, but none of them can be used."""

    reason = Reason.CHECKPOINTS_DAMAGED


class UnreadableCheckpoint(OSError):  # noqa: N818 - a state of the disk
    """A checkpoint that cannot be read now; a later start may be able to."""


@dataclass(frozen=True)
class Loaded:
    """A complete checkpoint in memory."""

    manifest: Manifest
    """Manifest of the checkpoint."""
    contents: Contents
    """State that a run resumes from."""


@dataclass
class Restored:
    """Outcome of a restore."""

    loaded: Loaded | None = None
    """The checkpoint to resume from; None to start from the beginning."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """Reason for each checkpoint that could not be used, by name."""
    lease: Lease | None = None
    """Lease that protects the checkpoint from deletion; release it once the generation's record is written."""
    memory: FileMemory | None = None
    """Memory that holds what was read."""
    continues: Continuation | None = None
    """The state that a mirror has held; None if this is a checkpoint."""
    checkpoint: CheckpointRef | None = None
    """The newest checkpoint on disk; None if there is none."""
    saved_at: float | None = None
    """Time at which that was saved, in seconds since the epoch."""

    def release(self) -> None:
        """Release lease and memory; what was read must not be used afterwards."""
        if self.lease is not None:
            with suppress(OSError):  # the lease expires by itself
                self.lease.release()
        if self.memory is not None:
            self.memory.close()
        self.lease = self.memory = None


def restore(rundir: RunDir, group: Group, check: Callable[[Loaded], None]) -> Restored:
    """Find, read and check the checkpoint to start from, without loading it. Collective.

    Args:
        check: compares a checkpoint with the live objects, without changing them; raises ConfigurationError if they do
            not match, Broken if the checkpoint is inconsistent.

    Raises:
        ConfigurationError: the checkpoint does not match, or is of another version of Tandem.
        NoUsableCheckpoint: there are checkpoints, but none can be used.
        UnreadableCheckpoint, OSError: the disk, the bucket or this machine does not return the checkpoint. Not treated
            as a damaged one: starting from an older one, or from the beginning, would discard the newer ones for good.
        PeerFault: another rank has such an error.
    """
    result = Restored()
    while proposal := group.tell(_proposal(rundir, group, result)):
        if "problem" in proposal:
            raise (ConfigurationError if "format" in proposal else NoUsableCheckpoint)(proposal["problem"])
        manifest = Manifest.parse(proposal["manifest"])
        # Phase one: read and check. No live object is changed until all ranks agree.
        result.memory = shared_memory_of(group, manifest.files)
        # The memory is complete only after this collective: each rank fills its part.
        verdicts = group.gather(_fill(rundir, result.memory, manifest))
        loaded, fault = None, None
        if not any(verdicts):
            loaded, fault = _check(check, result.memory, manifest)
            # A second collective, because a checkpoint can only be compared once it was read completely.
            verdicts = group.gather(_verdict(fault))
        if not any(verdicts):
            result.loaded, result.checkpoint, result.saved_at = loaded, manifest.reference, manifest.created_at
            return result
        # Rank 0 alone decides whether the checkpoint is damaged or gone: an older one may only be taken if rank 0 sees
        # the problem, too.
        finding = group.tell(_recheck_on_first(rundir, manifest, verdicts) if group.rank == 0 else {})
        if not finding:
            # The script does not match, or single machines fail to read it: an older checkpoint would not help.
            raise _error(group, verdicts, fault)
        result.release()
        result.passed_over[manifest.name] = reason = str(finding.get("broken") or finding["vanished"])
        # A damaged checkpoint is set aside, so that later starts need not read it; a deleted one is just passed over.
        if "broken" in finding and group.rank == 0:
            rundir.set_aside(manifest.name, why=reason)
    return result


def _proposal(rundir: RunDir, group: Group, result: Restored) -> dict[str, Any]:
    """Return the newest checkpoint that has not been passed over, as rank 0 sees it; empty if there never was one."""
    if group.rank != 0:
        return {}
    rundir.refresh()
    manifests = rundir.manifests()
    wrong = [manifest for manifest in manifests.values() if isinstance(manifest, Broken)]
    if other := next((error for error in reversed(wrong) if isinstance(error, OtherFormat)), None):
        return {"problem": f"{other}; resume with the version that wrote it", "format": True}
    if wrong:
        # Read once more before anything is set aside: the first read may have failed for a passing reason.
        for name, reason in rundir.damaged().items():
            if not sync_client.repair(name, ()):
                result.passed_over[name] = reason
                rundir.set_aside(name, why=reason)
        manifests = rundir.manifests()
    # Newest first. The lease comes before the read, so that retention of an older generation spares the checkpoint.
    for manifest in rundir.counting(manifests):
        if manifest.name not in result.passed_over:
            result.lease = _acquire_lease(rundir, manifest.name)
            return {"manifest": manifest.sealed()}
    if bad := rundir.bad():
        return {
            "problem": f"all remaining checkpoints are damaged ({len(bad)} in total), the newest for this reason: "
            f"{next(iter(bad.values()))}. To start over, delete the run's folder {rundir.checkpoints.name}"
        }
    return {}


def _acquire_lease(rundir: RunDir, name: str) -> Lease | None:
    # A full or read-only disk cannot take a lease, but the run can start from what it holds.
    with suppress(OSError):
        holder = default_holder()
        return acquire(rundir.leases / f"read-{name}-{holder}.json", holder, LEASE_SECONDS)
    return None


def _fill(rundir: RunDir, memory: FileMemory, manifest: Manifest) -> Verdict:
    """Read this rank's part of the files into the memory."""
    name = manifest.name
    try:
        sync_client.fetch(name, manifest.digest)
        verdict = _read(rundir, memory, manifest)
        if "broken" in verdict and sync_client.repair(name):
            verdict = _read(rundir, memory, manifest)
            if "broken" in verdict:
                # What was received was verified: this machine is at fault, and not the checkpoint.
                return {"unreadable": f"{verdict['broken']}, although the bucket has it whole; it was received again"}
    except Broken as error:
        return {"broken": str(error)}
    except FileNotFoundError as error:
        return {"vanished": f"{name} was deleted while it was read: {error}"}
    except OSError as error:
        return {"unreadable": f"{name} cannot be read: {error}"}
    return verdict


def _read(rundir: RunDir, memory: FileMemory, manifest: Manifest) -> Verdict:
    """Read what is on this disk. Raises FileNotFoundError and OSError as FileMemory.fill."""
    name = manifest.name
    try:
        damage = memory.fill(rundir.checkpoint(name))
    except Broken as error:
        return {"broken": str(error)}
    return {"broken": f"{name}/{damage}", "path": damage.path, "chunk": damage.chunk} if damage else {}


def _check(
    check: Callable[[Loaded], None], memory: FileMemory, manifest: Manifest
) -> tuple[Loaded | None, Exception | None]:
    """Compare what all ranks have read with the live objects; returns the checkpoint, or the error."""
    try:
        loaded = Loaded(manifest, contents_in(memory, manifest))
    except Broken as error:
        return None, error
    try:
        check(loaded)
    except (ConfigurationError, Broken) as error:
        return None, CheckpointMismatch(
            f"{manifest.name} is intact, but {error}. Undo the change to resume, or start a new run in another folder"
        )
    return loaded, None


def _verdict(fault: Exception | None) -> Verdict:
    return {} if fault is None else {"broken" if isinstance(fault, Broken) else "misfit": str(fault)}


def _recheck_on_first(rundir: RunDir, manifest: Manifest, verdicts: list[Verdict]) -> Verdict:
    """Return rank 0's own view of what some ranks call broken or gone; empty if rank 0 finds no such problem."""
    folder = rundir.checkpoint(manifest.name)
    for verdict in verdicts:
        if "broken" not in verdict and "vanished" not in verdict:
            continue
        try:
            # A chunk with a wrong checksum: rank 0 reads this chunk from the disk. Otherwise it reads everything.
            if "path" in verdict:
                damaged = is_damaged(folder, manifest.entry(verdict["path"]), verdict["chunk"])
            else:
                memory = FileMemory.alone(manifest.files)
                damaged = memory.fill(folder) is not None
                contents_in(memory, manifest)
                memory.close()
            if damaged:
                return {"broken": verdict["broken"]}
        except Broken as error:
            return {"broken": str(error)}
        except FileNotFoundError as error:
            return {"vanished": f"{manifest.name} was deleted while it was read: {error}"}
        except OSError:
            continue  # then rank 0's own verdict is "unreadable"
    return {}


def _error(group: Group, verdicts: list[Verdict], fault: Exception | None) -> Exception:
    """Return the error to raise: its own by each rank that has one, a PeerFault by the others."""
    if verdict := verdicts[group.rank]:
        kind = UnreadableCheckpoint if "unreadable" in verdict else OSError
        return fault if isinstance(fault, ConfigurationError) else kind(_reason(verdict))
    rank = next(rank for rank, verdict in enumerate(verdicts) if verdict)
    return PeerFault(f"rank {rank}: {_reason(verdicts[rank])}")


def _reason(verdict: Verdict) -> str:
    return str(next(verdict[kind] for kind in ("misfit", "broken", "vanished", "unreadable") if kind in verdict))


def record_start(
    rundir: RunDir,
    group: Group,
    generation: int,
    members: list[str],
    parent: CheckpointRef | None,
    origin: Origin | None = None,
    datasets: Sequence[DatasetCommit] = (),
    continues: Continuation | None = None,
    standby: bool = False,
) -> None:
    """Write this generation's record. Collective.

    Args:
        parent: the checkpoint that it resumes from; the newest one, if it continues a generation.
        origin: source of the initial weights, if they come from elsewhere.
        datasets: data sets of a hub that this rank has read.
        continues: the generation whose state the ranks hold; None: the state came from the checkpoint.
        standby: new ranks of this script may prepare themselves before they join.

    Raises:
        ReplicasDiffer: ranks have read different commits, because one was pushed while they started.
        Superseded: another group has this number already, or a newer generation exists.
    """
    read = _same_commits(group, datasets)
    problem = ""
    if group.rank == 0:
        record = GenerationRecord(
            generation=generation,
            resumed_from=parent,
            continues=continues,
            origin=origin,
            datasets=read,
            world_size=group.world_size,
            members=members,
            standby=standby,
            machine=describe_machine(group.device),
            started_at=time.time(),
        )
        rundir.refresh()
        # Recording is what fences: it fails if the number is in use, so at most one group has it.
        if rundir.newest_generation() > generation:
            problem = f"generation {rundir.newest_generation()} is already running"
        elif not rundir.record_generation(record):
            problem = f"generation {generation} was already started by another group"
    problem = group.tell({"problem": problem})["problem"]
    if problem:
        raise Superseded(problem)


def _same_commits(group: Group, local: Sequence[DatasetCommit]) -> list[DatasetCommit]:
    """Return the data sets of a hub that any rank has read, each once. Collective."""
    commits: dict[tuple[str, str | None], DatasetCommit] = {}
    for view in group.gather({"datasets": [commit.dump() for commit in local]}):
        for commit in map(DatasetCommit.read, view["datasets"]):
            first = commits.setdefault((commit.id, commit.revision), commit)
            if commit != first:
                raise ReplicasDiffer(
                    f"ranks have read {commit.id} at commit {first.commit} and at commit {commit.commit}"
                )
    return list(commits.values())


WORDS_PER_BATCH = 2**22
"""Words of a tensor that are weighted at once: 32 MiB of memory on the device, and as much again for the weights."""
_MULTIPLIER = -7046029254386353131
"""Odd 64-bit multiplier that makes weights from positions; it is unrelated to typical values of tensors."""


class ReplicasDiffer(Disagreement):
    """Ranks that should hold the same state differ; the message names the ranks, and a tensor."""

    corruption = RANKS_DIFFER


def digests(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Compute a 64-bit digest of this rank's part of each tensor."""
    return {name: _digest(to_local(tensor)) for name, tensor in tensors.items() if not is_lazy(tensor)}


def compare(group: Group, tensors: dict[str, Tensor]) -> None:
    """Check that all ranks hold the same tensors, and, of tensors that are split, the same values where they hold the
    same part. Weights that several stages of a pipeline share must be equal on all ranks that hold them. Collective.

    Raises:
        ReplicasDiffer: ranks differ.
    """
    local = digests(tensors)
    places = {name: place_of(tensors[name]) for name in local}
    common = {name: number for name, number in local.items() if not places[name]}
    view = {
        "common": _digest_of(sorted(common.items())),
        "place": _digest_of(sorted((name, place) for name, place in places.items() if place)),
        "parts": _digest_of(sorted((name, number) for name, number in local.items() if places[name])),
        # Keyed by the part, too, because the ranks of one stage hold several parts.
        "shared": {
            f"{name} {places[name][1:]}": f"{number:x}" for name, number in local.items() if is_shared(tensors[name])
        },
    }
    # First only digests of everything, which are small; the digest of each tensor follows if they differ.
    views = group.gather(view)
    same_parts = {each_view["place"]: each_view["parts"] for each_view in views}
    same_shared = {name: number for each_view in views for name, number in each_view["shared"].items()}
    if all(
        each_view["common"] == view["common"]
        and each_view["parts"] == same_parts[each_view["place"]]
        and each_view["shared"].items() <= same_shared.items()
        for each_view in views
    ):
        return
    digests_by_rank = group.gather(
        {f"{name} {places[name] or ''}".strip(): f"{number:x}" for name, number in local.items()}
    )
    values = {
        name: {rank_digests[name] for rank_digests in digests_by_rank if name in rank_digests}
        for rank_digests in digests_by_rank
        for name in rank_digests
    }
    scattered = [
        name
        for name, place in places.items()
        if not place and any(name not in rank_digests for rank_digests in digests_by_rank)
    ]
    differing = sorted({*scattered, *(name for name, distinct in values.items() if len(distinct) > 1)})
    names = f"{len(differing)} tensors, the first the {differing[0]}" if differing else "in the names of tensors"
    strange = [rank for rank, rank_view in enumerate(views) if not _is_usual(rank_view, views)]
    raise ReplicasDiffer(f"ranks {strange} hold another state than the others: {names}", strange)


def _digest_of(facts: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _is_usual(view: dict[str, Any], views: list[dict[str, Any]]) -> bool:
    """Return whether a rank holds what most others hold: of common tensors, of the part that it has, and of shared
    weights."""
    common = [other["common"] for other in views]
    parts = [other["parts"] for other in views if other["place"] == view["place"]]
    usual = max(common, key=common.count), max(parts, key=parts.count)
    if (view["common"], view["parts"]) != usual:
        return False
    for name, number in view["shared"].items():
        numbers = [other["shared"][name] for other in views if name in other["shared"]]
        if number != max(numbers, key=numbers.count):
            return False
    return True


def _digest(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if tensor.device.type != "cpu":
        return weighted_sum(flat)
    # Not `numpy()`, after which torch cannot resize the tensor any more, as quantization-aware training does.
    return xxhash.xxh3_64_intdigest((ctypes.c_ubyte * len(flat)).from_address(flat.data_ptr()))


def weighted_sum(content: Tensor) -> int:
    """Compute the digest of bytes, on whichever device they are.

    Args:
        content: [bytes], uint8.
    """
    # The widest words that divide the bytes: fewer operations for the same content.
    width = next(width for width in (8, 4, 2, 1) if len(content) % width == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    integers = content.view(kind)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for first in range(0, len(integers), WORDS_PER_BATCH):
        part = integers[first : first + WORDS_PER_BATCH].to(torch.int64)
        place = torch.arange(first, first + len(part), dtype=torch.int64, device=content.device)
        total += (part * (place.mul_(_MULTIPLIER).bitwise_or_(1))).sum()
    return int(total.item()) % 2**64


def check_disk(rundir: RunDir, group: Group) -> None:
    """Check the file system, before the first generation. Collective.

    Raises:
        ConfigurationError: it lacks what checkpoints need, as rank 0 found.
    """
    is_first = group.rank == 0 and rundir.newest_generation() == 0
    problem = group.tell({"why": unsupported_operation(rundir.path) if is_first else ""})["why"]
    if problem:
        raise ConfigurationError(str(problem))
