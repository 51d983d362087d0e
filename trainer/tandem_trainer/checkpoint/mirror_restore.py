"""Restores a generation from a mirror, which the agents have kept in memory (checkpoint.mirror).

The ranks say which parts they have. The newest state of which all parts are there is proposed, if it counts: the newest
generation has taken its last step, or has itself started from it (tandem.rundir.lineage); no rewind takes it back; and
no checkpoint on disk is as new. Rank 0 decides that alone, for all.

Each part then travels to all nodes, from the lowest rank that has it. A part is only ever with ranks of one local rank,
because it is passed on to the same local rank of the next node. So the ranks of each ring send the parts that they
have, all rings at once, and every byte reaches each node once. All ranks of a node write into one memory
(checkpoint.node_memory), verify it together, and compare it with their objects, as they do with a checkpoint on disk.

A mirror that cannot be used is passed over, whatever the reason, and the newest checkpoint on disk decides: it has the
rules for what is damaged, and the words for what does not match.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem.rundir.checkpoint import Broken, Manifest
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.rundir.lineage import Continuation, Rewind, is_rewound
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint.mirror import MirrorMemory, MirrorPart, MirrorPoint, Mirrors, Ring, complete_points
from tandem_trainer.checkpoint.node_memory import FileMemory, shared_memory_of
from tandem_trainer.checkpoint.reader import contents_in
from tandem_trainer.checkpoint.restoring import Loaded, Restored
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.checkpoint.writer import file_entries
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group

log = logging.getLogger(__name__)


def restore_mirror(
    rundir: RunDir,
    group: Group,
    mirrors: Mirrors,
    rewinds: Sequence[Rewind],
    check: Callable[[Contents], None],
) -> Restored | None:
    """Read and check the newest mirror that counts, without loading it; None if there is none that can be used.
    Collective.

    Args:
        mirrors: those of this generation, which has not begun to take any.
        rewinds: rewinds of the run.
        check: compares contents with the live objects, without changing them; raises ConfigurationError or Broken.

    Raises:
        OSError: the run directory cannot be read.
    """
    ring, memory = mirrors.ring, mirrors.memory
    local_parts = [file.part for file in memory.files if file.part is not None] if memory is not None else []
    summaries = [
        {"generation": part.generation, "step": part.step, "number": part.number, "count": part.count}
        for part in local_parts
    ]
    views = group.gather({"parts": summaries})
    complete = complete_points([part for view in views for part in view["parts"]])
    if not complete:
        return None
    decision = group.tell(newest_that_counts(rundir, complete, rewinds) if group.rank == 0 else {})
    if not decision:
        return None
    point = MirrorPoint(*decision["point"])
    # A rank may hold a part twice: its own, and that of a neighbour that has another number now.
    own = {part.number: part for part in local_parts if part.point == point}
    answers = group.gather({"parts": [part.dump() for part in own.values()]})
    problem, restored = "", Restored()
    try:
        parts = [[MirrorPart.read(part) for part in answer["parts"]] for answer in answers]
        manifest = manifest_of([part for of_rank in parts for part in of_rank])
    except (Broken, ValueError) as error:
        # All ranks have the same descriptions, so all come here.
        log.warning("the mirror after step %d is passed over: %s", point.step, error)
        return None
    restored.memory = shared_memory_of(group, manifest.files)
    # Agents on one machine may share it, too: then several ranks write the same bytes.
    able = group.gather({"able": restored.memory.sharers % ring.ranks_per_node == 0})
    if all(view["able"] for view in able):
        _fill(restored.memory, ring, parts, memory, point)
        # The memory of a node is complete only after this collective.
        group.barrier()
        damage = restored.memory.verify()
        problem = "" if damage is None else str(damage)
        problem = _first_problem(group, problem)
    else:
        problem = "the ranks of a node cannot share memory"
    if not problem:
        try:
            restored.loaded = Loaded(manifest, contents_in(restored.memory, manifest))
            check(restored.loaded.contents)
        except (ConfigurationError, Broken) as error:
            problem = str(error)
        problem = _first_problem(group, problem)
    if problem:
        restored.loaded = None
        restored.release()
        log.warning("the mirror after step %d is passed over: %s", point.step, problem)
        return None
    checkpoint = decision["checkpoint"]
    restored.checkpoint = None if checkpoint is None else CheckpointRef.parse(checkpoint)
    restored.saved_at = decision["savedAt"]
    restored.continues = Continuation(generation=point.generation, step=point.step, mirrored=True)
    return restored


def newest_that_counts(rundir: RunDir, complete: Sequence[MirrorPoint], rewinds: Sequence[Rewind]) -> dict[str, Any]:
    """Choose the newest of these states that counts, as rank 0 sees it, as JSON; empty if none does.

    Args:
        complete: states of which all parts are in memory, newest first.
    """
    rundir.refresh()
    newest = next(iter(rundir.committed()), None)
    for point in complete:
        if newest is not None and newest.step >= point.step:
            continue
        reference = CheckpointRef(name=checkpoint_name(point.step), step=point.step, generation=point.generation)
        if is_newest(rundir, point) and not is_rewound(rewinds, reference):
            return {
                "point": point,
                "checkpoint": None if newest is None else newest.reference.dump(),
                "savedAt": None if newest is None else newest.created_at,
            }
    return {}


def is_newest(rundir: RunDir, point: MirrorPoint) -> bool:
    """Return whether no other state has been the start of a generation since."""
    generation = rundir.newest_generation()
    while generation > point.generation:
        record = rundir.generation_record(generation)
        # A generation that has started from this very state, or from one that had, has added nothing.
        if record is None or record.continues is None or record.continues.generation >= generation:
            return False
        if record.continues.step != point.step:
            return False
        generation = record.continues.generation
    return generation == point.generation


def manifest_of(parts: Sequence[MirrorPart]) -> Manifest:
    """Return the manifest of a mirror, from the descriptions of all its parts.

    Raises:
        Broken: a chunk is in no part.
        ValueError: they are not what a manifest needs.
    """
    first = next(part for part in parts if part.number == 0)
    try:
        entries = file_entries(first.files, [part.chunks for part in parts])
    except OSError as error:
        raise Broken(str(error)) from error
    return Manifest.parse(first.facts | {"files": [entry.dump() for entry in entries]})


def _fill(
    memory: FileMemory,
    ring: Ring,
    parts: Sequence[Sequence[MirrorPart]],
    own_memory: MirrorMemory | None,
    point: MirrorPoint,
) -> None:
    """Copy all parts of this rank's ring into the memory of its node. Collective."""
    sources: dict[int, tuple[int, MirrorPart]] = {}
    for rank, of_rank in enumerate(parts):
        for part in of_rank:
            sources.setdefault(part.number, (rank, part))
    for number, (rank, part) in sorted(sources.items()):
        index, place = divmod(rank, ring.ranks_per_node)
        if place != ring.place:
            continue
        content = None
        if index == ring.index and own_memory is not None:
            file = next(
                file
                for file in own_memory.files
                if file.part is not None and file.part.point == point and file.part.number == number
            )
            content = file.content()
        for region in part.regions:
            target = torch.frombuffer(memory.file(region.path), dtype=torch.uint8)[region.start :][: region.size]
            if content is not None:
                target.copy_(content[region.offset : region.offset + region.size])
            ring.copy_from(index, target)


def _first_problem(group: Group, problem: str) -> str:
    """Return the first rank's problem, with its number; empty if no rank has one. Collective."""
    problems = group.gather({"why": problem})
    return next((f"rank {rank}: {view['why']}" for rank, view in enumerate(problems) if view["why"]), "")
