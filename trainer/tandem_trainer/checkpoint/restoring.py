"""Restores a generation from the newest checkpoint that counts, or starts from the beginning if there never was one.

Two phases, and an agreement between them. First rank 0 proposes, newest first; the ranks of each node read and check
every byte together (checkpoint.node_memory), and each compares what it read with what is to take it. Nothing
has been changed by then. Only when all have agreed is the state put in place; what fails there ends the process, so
that nothing goes on half loaded. After it all ranks compare a digest of what they hold
(tandem_trainer.checkpoint.restoring).

What is wrong decides what happens, because an older checkpoint cuts the newer ones off for good:

- Damaged, and rank 0 finds it damaged as well: set aside as `.bad` with the reason, and the one before is proposed.
- Damaged for one rank alone: that machine is at fault. Its rank fails, and nothing is set aside.
- Gone, because retention of an older generation deleted it: passed over.
- Sound, and it does not fit the script: the job has failed, with a sentence that says in what they differ.
- Not to be read now: the rank fails.
- None is left of those there were: the job has failed. To begin anew is for the user to say.

Then rank 0 records where the generation starts, before its first step, which is what fences the generations before it
(see tandem.rundir.lineage). Until then an older generation may still save, and let retention delete what was read here:
so rank 0 holds a lease.

Nothing in torch compares replicas. One that differs, because its memory is at fault or because something was loaded in
half, goes on with the others for ever, and what it saves is a part of every checkpoint. So the ranks compare a digest
whenever a group starts, from a checkpoint or from the beginning. It costs a pass over the state (docs/checkpoints.md
has the figures).

On a CPU it is XXH3 of the bytes. On other devices it is computed there, as a sum of words with odd weights by place,
modulo 2^64: every single word that differs changes it.
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

from tandem.rundir.checkpoint import Broken, Manifest, OtherFormat, is_damaged
from tandem.rundir.layout import RunDir
from tandem.rundir.lease import Lease, acquire, default_holder
from tandem.rundir.lineage import DatasetCommit, GenerationRecord, Origin
from tandem_trainer.checkpoint.node_memory import FileMemory, shared_memory_of
from tandem_trainer.checkpoint.reader import contents_in
from tandem_trainer.checkpoint.sharding import here, is_shared, place_of
from tandem_trainer.checkpoint.state import DoesNotFit
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group, PeerFault

LEASE_SECONDS = 3600.0
"""A large checkpoint may take long to read; a start that dies keeps retention from one checkpoint for so long."""

Verdict = dict[str, Any]
"""What a rank says of a checkpoint, as JSON: nothing, if it can be used."""


class NothingSound(ConfigurationError):  # noqa: N818 - it is what is the case
    """There are checkpoints, and none of them can be used."""

    reason = "CheckpointsDamaged"


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
    memory: FileMemory | None = None
    """Holds what was read."""

    def release(self) -> None:
        """Give lease and memory back; what was read is nobody's to use any more."""
        if self.lease is not None:
            with suppress(OSError):  # it runs out by itself
                self.lease.release()
        if self.memory is not None:
            self.memory.close()
        self.lease = self.memory = None


def restore(rundir: RunDir, group: Group, check: Callable[[Loaded], None]) -> Restored:
    """Find, read and check the checkpoint to start from; it is the caller's to put in place. Collective.

    Args:
        check: compares a checkpoint with what is to take it, and changes nothing; raises ConfigurationError if they do
            not belong together, Broken if the checkpoint does not fit together in itself.

    Raises:
        ConfigurationError: it does not fit, or is of another version of Tandem.
        NothingSound: there are checkpoints, and none can be used.
        OSError: the disk, or this machine, does not give what the disk holds. Not taken for a broken checkpoint: to
            start from an older one, or from the beginning, would cut the newer ones off for good.
        PeerFault: that is so for another rank.
    """
    result = Restored()
    while told := group.tell(_proposal(rundir, group, result)):
        if "problem" in told:
            raise (ConfigurationError if "format" in told else NothingSound)(told["problem"])
        manifest = Manifest.parse(told["manifest"])
        result.memory = shared_memory_of(group, manifest.files)
        # Only when all have filled their parts of the memory is there anything to look at in it.
        verdicts = group.gather(_filled(rundir, result.memory, manifest))
        loaded, fault = None, None
        if not any(verdicts):
            loaded, fault = _checked(check, result.memory, manifest)
            verdicts = group.gather(_verdict(fault))
        if not any(verdicts):
            result.loaded = loaded
            return result
        seen = group.tell(_seen_by_first(rundir, manifest, verdicts) if group.rank == 0 else {})
        if not seen:
            raise _error(group, verdicts, fault)
        result.release()
        result.passed_over[manifest.name] = why = str(seen.get("broken") or seen["vanished"])
        if "broken" in seen and group.rank == 0:
            rundir.set_aside(manifest.name, why=why)
    return result


def _proposal(rundir: RunDir, group: Group, result: Restored) -> dict[str, Any]:
    """The newest checkpoint that has not been passed over, as rank 0 sees it; nothing if there never was one."""
    if group.rank != 0:
        return {}
    found = rundir.manifests()
    wrong = [one for one in found.values() if isinstance(one, Broken)]
    if other := next((one for one in reversed(wrong) if isinstance(one, OtherFormat)), None):
        return {"problem": f"{other}; go on with the version that wrote it", "format": True}
    if wrong:
        # Read once more before anything is done about it.
        for name, why in rundir.damaged().items():
            result.passed_over[name] = why
            rundir.set_aside(name, why=why)
    for manifest in rundir.counting(found):
        if manifest.name not in result.passed_over:
            result.lease = _held(rundir, manifest.name)
            return {"manifest": manifest.sealed()}
    if bad := rundir.bad():
        return {
            "problem": f"every checkpoint that is left is damaged ({len(bad)} in all), the newest for this reason: "
            f"{next(iter(bad.values()))}. To begin anew, delete the run's folder {rundir.checkpoints.name}"
        }
    return {}


def _held(rundir: RunDir, name: str) -> Lease | None:
    # A disk that is full or read-only is no reason not to start from what it holds.
    with suppress(OSError):
        holder = default_holder()
        return acquire(rundir.leases / f"read-{name}-{holder}.json", holder, LEASE_SECONDS)
    return None


def _filled(rundir: RunDir, memory: FileMemory, manifest: Manifest) -> Verdict:
    """Read this rank's part of the files."""
    name = manifest.name
    try:
        damage = memory.fill(rundir.checkpoint(name))
    except Broken as error:
        return {"broken": str(error)}
    except FileNotFoundError as error:
        return {"vanished": f"{name} was deleted while it was read: {error}"}
    except OSError as error:
        return {"unreadable": f"{name} cannot be read: {error}"}
    return {"broken": f"{name}/{damage}", "path": damage.path, "chunk": damage.chunk} if damage else {}


def _checked(
    check: Callable[[Loaded], None], memory: FileMemory, manifest: Manifest
) -> tuple[Loaded | None, Exception | None]:
    """What all have read, or why it cannot be used."""
    try:
        loaded = Loaded(manifest, contents_in(memory, manifest))
    except Broken as error:
        return None, error
    try:
        check(loaded)
    except (ConfigurationError, Broken) as error:
        return None, DoesNotFit(
            f"{manifest.name} is sound, but {error}. Undo the change to go on, or begin a new run in another folder"
        )
    return loaded, None


def _verdict(fault: Exception | None) -> Verdict:
    return {} if fault is None else {"broken" if isinstance(fault, Broken) else "misfit": str(fault)}


def _seen_by_first(rundir: RunDir, manifest: Manifest, verdicts: list[Verdict]) -> Verdict:
    """Rank 0's own view of what some ranks call broken or gone; nothing if it sees nothing of that."""
    folder = rundir.checkpoint(manifest.name)
    for verdict in verdicts:
        if "broken" not in verdict and "vanished" not in verdict:
            continue
        try:
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
            continue  # then rank 0's own verdict is that it cannot be read
    return {}


def _error(group: Group, verdicts: list[Verdict], fault: Exception | None) -> Exception:
    """What to raise: its own fault by the rank that has one, a peer's by the others."""
    if verdicts[group.rank]:
        return fault if isinstance(fault, ConfigurationError) else OSError(_sentence(verdicts[group.rank]))
    rank = next(rank for rank, verdict in enumerate(verdicts) if verdict)
    return PeerFault(f"rank {rank}: {_sentence(verdicts[rank])}")


def _sentence(verdict: Verdict) -> str:
    return str(next(verdict[kind] for kind in ("misfit", "broken", "vanished", "unreadable") if kind in verdict))


def record_start(
    rundir: RunDir,
    group: Group,
    generation: int,
    members: list[str],
    parent: Manifest | None,
    origin: Origin | None = None,
    datasets: Sequence[DatasetCommit] = (),
) -> None:
    """Write this generation's record. Collective.

    Args:
        parent: the checkpoint that it resumes from.
        origin: where the weights come from that it begins with.
        datasets: those of a hub that this rank has read.

    Raises:
        ReplicasDiffer: ranks have read different commits, because one was pushed while they began.
        Superseded: another group has this number already, or a newer generation exists.
    """
    read = _same_commits(group, datasets)
    problem = ""
    if group.rank == 0:
        record = GenerationRecord(
            generation=generation,
            resumed_from=parent.reference if parent else None,
            origin=origin,
            datasets=read,
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


def _same_commits(group: Group, mine: Sequence[DatasetCommit]) -> list[DatasetCommit]:
    """The data sets of a hub that any rank has read, each once. Collective."""
    found: dict[tuple[str, str | None], DatasetCommit] = {}
    for told in group.gather({"datasets": [one.dump() for one in mine]}):
        for one in map(DatasetCommit.read, told["datasets"]):
            first = found.setdefault((one.id, one.revision), one)
            if one != first:
                raise ReplicasDiffer(f"ranks have read {one.id} at commit {first.commit} and at commit {one.commit}")
    return list(found.values())


WORDS_AT_ONCE = 2**22
"""Words of a tensor that are weighted at once: 32 MiB of memory on the device, and as much again."""
_ODD = -7046029254386353131
"""Of 64 bits, for weights that have nothing in common with what is weighted."""


class ReplicasDiffer(Exception):  # noqa: N818 - it is what is the case
    """Ranks that should hold the same do not; names the ranks, and a tensor."""


def digests(tensors: dict[str, Tensor]) -> dict[str, int]:
    """For each tensor a number of 64 bits that depends on all the bits that this rank holds of it."""
    return {name: _digest(here(tensor)) for name, tensor in tensors.items() if not is_lazy(tensor)}


def compare(group: Group, tensors: dict[str, Tensor]) -> None:
    """See that all ranks hold the same tensors, and of those that are split the same where they hold the same part.
    Weights that several stages of a pipeline share are the same on all ranks that hold them. Collective.

    Raises:
        ReplicasDiffer: they do not.
    """
    mine = digests(tensors)
    places = {name: place_of(tensors[name]) for name in mine}
    common = {name: number for name, number in mine.items() if not places[name]}
    view = {
        "common": _of_all(sorted(common.items())),
        "place": _of_all(sorted((name, place) for name, place in places.items() if place)),
        "parts": _of_all(sorted((name, number) for name, number in mine.items() if places[name])),
        # By the part, too: the ranks of one stage hold several.
        "shared": {
            f"{name} {places[name][1:]}": f"{number:x}" for name, number in mine.items() if is_shared(tensors[name])
        },
    }
    told = group.gather(view)
    same_parts = {one["place"]: one["parts"] for one in told}
    same_shared = {name: number for one in told for name, number in one["shared"].items()}
    if all(
        one["common"] == view["common"]
        and one["parts"] == same_parts[one["place"]]
        and one["shared"].items() <= same_shared.items()
        for one in told
    ):
        return
    each = group.gather({f"{name} {places[name] or ''}".strip(): f"{number:x}" for name, number in mine.items()})
    values = {name: {one[name] for one in each if name in one} for one in each for name in one}
    scattered = [name for name, place in places.items() if not place and any(name not in one for one in each)]
    differing = sorted({*scattered, *(name for name, found in values.items() if len(found) > 1)})
    names = f"{len(differing)} tensors, the first the {differing[0]}" if differing else "in the names of tensors"
    strange = [rank for rank, one in enumerate(told) if not _is_usual(one, told)]
    raise ReplicasDiffer(f"ranks {strange} hold another state than the others: {names}")


def _of_all(facts: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _is_usual(view: dict[str, Any], told: list[dict[str, Any]]) -> bool:
    """Whether a rank holds what most others hold: of what all have, of the part that it has, and of what it shares."""
    common = [one["common"] for one in told]
    parts = [one["parts"] for one in told if one["place"] == view["place"]]
    usual = max(common, key=common.count), max(parts, key=parts.count)
    if (view["common"], view["parts"]) != usual:
        return False
    for name, number in view["shared"].items():
        numbers = [one["shared"][name] for one in told if name in one["shared"]]
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
    """The digest of bytes, on whichever device they are.

    Args:
        content: [bytes], uint8.
    """
    width = next(width for width in (8, 4, 2, 1) if len(content) % width == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    words = content.view(kind)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    for first in range(0, len(words), WORDS_AT_ONCE):
        part = words[first : first + WORDS_AT_ONCE].to(torch.int64)
        place = torch.arange(first, first + len(part), dtype=torch.int64, device=content.device)
        total += (part * (place.mul_(_ODD).bitwise_or_(1))).sum()
    return int(total.item()) % 2**64
