"""The writer process: commits what its rank has staged in shared memory, while training continues.

It starts once, before the first save, so that no save waits for a process to start. It is niced, and runs without
torch, so that it costs little memory and never competes with training for a core. Requests are JSON lines on standard
input, one at a time; each is answered by one line on standard output. If its rank dies within a save, the writer
finishes first: the state in memory is complete, and one more checkpoint means less lost work. Whether that checkpoint
counts is decided by the lineage (tandem.rundir.lineage).

**Several ranks write one checkpoint.** All write into the same temporary folder, whose name each can compute: step,
generation, and the number of the save within the generation. Each writes its pieces of the files, syncs them, and then
leaves a note with the checksums of its chunks, `part-0001.json`. The writer of part 0 waits for all notes, builds the
manifest, and commits: it refuses if a newer generation exists, and renames the folder. So writers are connected by the
shared disk alone; a rank that dies leaves at worst a note missing; and nothing is committed in part. A folder of the
same final name can only come from an older generation whose steps no longer count; it is set aside.

**A full disk.** A save needs room for one checkpoint more than retention keeps. When there is none, the writer deletes
what nothing depends on, until there is room for two: first folders that were set aside, then checkpoints that do not
count, then the oldest that count, except for two that a fall-back needs. The error of the failed save lists what was
deleted; the next save finds the room.

Rejected: a collective that signals that all have written (a writer outlives its rank, and the training group must not
wait for a disk), and a part 0 that reads the files to checksum them (it would read bytes that it has never seen
written).

Copying into the page cache costs more than everything else that a save does beside the steps: for 0.74 GB 0.2 s of a
core, and 0.03 s more when the checkpoint is deleted; with direct I/O (O_DIRECT) the same save took 0.06 s, including
checksums. The cached copy is not needed: resuming and evaluating mostly happen on other machines, and the cache stays
free for the training data. A disk error also surfaces at the write that caused it, and not later.

Where the file system does not support direct I/O (EINVAL), and for the last bytes of a file, which fill no block,
writes go through the page cache.
"""

import argparse
import errno
import json
import mmap
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tandem.errors import join_names
from tandem.job.resource import CheckpointSpec, DistributedTrainingJob
from tandem.rundir import evaluations, sync_client
from tandem.rundir.checkpoint import CHUNK_BYTES, FILE, Broken, FileEntry, Manifest, checksum, chunks
from tandem.rundir.durable import (
    MAX_JSON_BYTES,
    TEMPORARY,
    commit_folder,
    encode,
    read_json_or_none,
    replace_json,
    sync_folder,
    temporary_beside,
)
from tandem.rundir.evaluations import Rank, deciding_scores, rank
from tandem.rundir.layout import STALE, RunDir
from tandem.rundir.lineage import counts, reach
from tandem.rundir.retention import RetentionInputs, checkpoints_to_delete
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint.file_names import NAMES_OF_TREES, TREES

BLOCK = 4096
"""Unit of direct I/O, in bytes; every piece begins at a multiple of it, in its file and in memory."""

Checksums = dict[str, dict[str, str]]
"""Checksum of each chunk, by file and the chunk's number."""

_DIRECT: int = getattr(os, "O_DIRECT", 0)


def write_pieces(folder: Path, regions: list[dict[str, Any]], memory: memoryview) -> Checksums:
    """Write pieces of files, sync them, and return the checksums of their chunks.

    Args:
        regions: `path`, `start`, `size` and `offset` in the memory of each piece; see staging.Region.
        memory: begins at the beginning of a page.

    Raises:
        OSError: the disk does not accept the bytes.
    """
    checksums: Checksums = {}
    for region in regions:
        content = memory[region["offset"] : region["offset"] + region["size"]]
        whole_blocks = len(content) - len(content) % BLOCK
        path, start = folder / region["path"], region["start"]
        with opened(path) as descriptor, _opened_directly(path, descriptor) as direct:
            for first in range(0, len(content), CHUNK_BYTES):
                # Checksums are of the bytes in memory, before they are written, so that a wrong write is found when it
                # is read.
                chunk = content[first : first + CHUNK_BYTES]
                checksums.setdefault(region["path"], {})[str((start + first) // CHUNK_BYTES)] = checksum(chunk)
                direct = _write_blocks(
                    direct, descriptor, content[first : min(first + CHUNK_BYTES, whole_blocks)], start + first
                )
            write(descriptor, content[whole_blocks:], start + whole_blocks)
            os.fsync(descriptor)
        # The name of a file must be as durable as its bytes, and this is the only place that syncs the folder.
        sync_folder(path.parent)
    return checksums


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for writing that another part may write into at the same time. It must not have old content."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(descriptor: int, content: memoryview, position: int) -> None:
    """Write all of the content at a position."""
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], position + written)


@contextmanager
def _opened_directly(path: Path, buffered: int) -> Iterator[int]:
    """Open the file again for direct I/O; yield the buffered descriptor where the file system does not support it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        yield buffered
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_blocks(direct: int, buffered: int, blocks: memoryview, position: int) -> int:
    """Write blocks at a position, buffered if direct I/O is refused. Returns the descriptor that accepted them."""
    try:
        write(direct, blocks, position)
    except OSError as error:
        if error.errno != errno.EINVAL or direct == buffered:
            raise
        write(buffered, blocks, position)
        return buffered
    return direct


NICENESS = 10
FORGOTTEN_SECONDS = 3600.0
"""Age at which temporary names are deleted."""
PARTS_SECONDS = 600.0
"""Timeout of part 0 for the notes of the other parts; a disk may be slow, but every save must end."""
ORPHAN_SECONDS = 5.0
"""Timeout for the notes once the writer's own rank is gone: parts that are missing by then will hardly come."""
MAX_SET_ASIDE = 2
"""Number of `.bad` and `.stale` folders that are retained for inspection: those of the latest steps."""
LARGE_TREES = 2**18
"""Size above which JSON gets a file of its own instead of a place in the manifest, which every listing reads, in
bytes."""
ROOM_FOR = 2
"""Number of saves for which room is made on a full disk: the next one, and one that is written while that still
exists."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
POLL_SECONDS = 0.005
REFRESH_SECONDS = 0.5
"""Interval at which an NFS client is made to refresh a folder's listing from the server."""

_TEMPORARY_FOLDER = re.compile(rf"{re.escape(TEMPORARY)}step-\d+-g(\d+)-(\d+)")

Request = dict[str, Any]


class Superseded(Exception):  # noqa: N818 - it is a state of the generation
    """A newer generation exists: this one must stop, and nothing of it may be committed any more."""


def temporary_folder(rundir: RunDir, name: str, generation: int, number: int) -> Path:
    """Return the folder into which all parts of one save are written.

    Args:
        number: number of the save within its generation.
    """
    return rundir.checkpoints / f"{TEMPORARY}{name}-g{generation:06d}-{number:06d}"


def note_path(folder: Path, part: int) -> Path:
    """Return the path of the note by which a part reports its checksums or its failure."""
    return folder / f"part-{part:04d}.json"


def commit(rundir: RunDir, request: Request, memory: memoryview) -> dict[str, Any]:
    """Write this rank's part of a checkpoint and leave its note; part 0 also commits the checkpoint.

    Returns:
        `committed`, the name, and `bytes` and `stallSeconds` of all parts; or, for other parts, `written`.

    Raises:
        Superseded: the generation is not the newest any more.
        OSError: the disk is full, gone or read-only, here or at another part; nothing is left behind.
    """
    folder = temporary_folder(rundir, request["name"], request["generation"], request["number"])
    note: dict[str, Any] = {"stallSeconds": request["stallSeconds"]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note["chunks"] = write_pieces(folder, request["regions"], memory)
        # Not synced: notes are deleted before the commit, and part 0 may have renamed the folder before a sync here.
        replace_json(note_path(folder, request["part"]), note, durable=False)
        if request["part"] != 0:
            return {"written": sum(region["size"] for region in request["regions"])}
        # Only part 0 gets here. It waits for every note: a manifest lists the checksums of all parts.
        notes = _gather(rundir, folder, request)
        manifest = _manifest(request, notes, _write_trees(folder, request))
        _finish(rundir, folder, manifest, request["parts"])
        _upload(manifest)
    except OSError as error:
        if request["part"] != 0:
            leave_failure_note(folder, request["part"], str(error), error.errno)
        raise
    finally:
        if request["part"] == 0:
            # After a commit the folder has its final name, and this deletes nothing.
            shutil.rmtree(folder, ignore_errors=True)
    stall = max(note["stallSeconds"] for note in notes)
    return {"committed": manifest.name, "bytes": manifest.size, "stallSeconds": stall}


def leave_failure_note(folder: Path, part: int, reason: str, code: int | None = None) -> None:
    """Leave a note that the part will not come, so that part 0 need not wait for it. The folder may not exist yet."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(note_path(folder, part), {"failed": reason, "errno": code}, durable=False)


def _gather(rundir: RunDir, folder: Path, request: Request) -> list[dict[str, Any]]:
    """Wait for the notes of all parts and return them in order."""
    started = refreshed = time.monotonic()
    patience = PARTS_SECONDS
    missing = set(range(request["parts"]))
    notes: dict[int, dict[str, Any]] = {}
    while missing:
        for part in sorted(missing):
            note = read_json_or_none(note_path(folder, part))
            if not isinstance(note, dict):
                continue
            if "failed" in note:
                code = note.get("errno")
                raise OSError(
                    code if isinstance(code, int) else errno.EIO, f"part {part} was not written: {note['failed']}"
                )
            notes[part] = note
        missing -= notes.keys()
        now = time.monotonic()
        # At intervals, not in each pass: each of these asks the file server.
        if missing and now - refreshed > REFRESH_SECONDS:
            refreshed = now
            # A change of the folder's own time makes an NFS client ask the server for its entries.
            os.utime(folder)
            _refuse_if_superseded(rundir, request["name"], request["generation"])
            # Without its rank nobody waits for this save, and the other ranks have probably ended, too.
            if _rank_is_gone():
                patience = min(patience, now - started + ORPHAN_SECONDS)
            if now - started > patience:
                raise OSError(f"parts {sorted(missing)} were not written within {patience:.0f} s")
        if missing:
            time.sleep(POLL_SECONDS)
    return [notes[part] for part in sorted(notes)]


def _rank_is_gone() -> bool:
    """Return whether standard input has ended."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _write_trees(folder: Path, request: Request) -> list[FileEntry]:
    """Write JSON that is too large for the manifest into a file of its own; only part 0 has it."""
    loop = request["facts"]["loop"]
    trees = {name: loop[name] for name in NAMES_OF_TREES if name in loop}
    content = json.dumps(trees).encode()
    if len(content) <= LARGE_TREES:
        return []
    request["facts"]["loop"] = {name: value for name, value in loop.items() if name not in trees}
    region = {"path": TREES, "start": 0, "size": len(content), "offset": 0}
    checksums = write_pieces(folder, [region], memoryview(content))[TREES]
    chosen = [checksums[str(number)] for number in range(chunks(len(content)))]
    return [FileEntry(path=TREES, size=len(content), xxh3=chosen)]


def file_entries(sizes: Mapping[str, int], parts: Iterable[Checksums]) -> list[FileEntry]:
    """Return the entries of files in a manifest.

    Args:
        sizes: size of each file, in bytes.
        parts: checksums of each part's chunks.

    Raises:
        OSError: a chunk is in no part.
    """
    by_file: Checksums = {}
    for part in parts:
        for path, numbered in part.items():
            by_file.setdefault(path, {}).update(numbered)
    entries = []
    for path, size in sizes.items():
        checksums = [by_file.get(path, {}).get(str(number)) for number in range(chunks(size))]
        if None in checksums:
            raise OSError(f"no part has chunk {checksums.index(None)} of {path}")
        entries.append(FileEntry.model_validate({"path": path, "size": size, "xxh3": checksums}))
    return entries


def _manifest(request: Request, notes: list[dict[str, Any]], more: list[FileEntry]) -> Manifest:
    entries = file_entries(request["files"], [note["chunks"] for note in notes])
    return Manifest.parse(request["facts"] | {"files": [entry.dump() for entry in [*entries, *more]]})


def _finish(rundir: RunDir, folder: Path, manifest: Manifest, parts: int) -> None:
    for entry in manifest.files:
        # Open the file instead of stat by path: an NFS client may cache an old size of what other parts have written.
        with opened(folder / entry.path) as descriptor:
            written = os.fstat(descriptor).st_size
        if written != entry.size:
            raise OSError(f"{entry.path} has {written} bytes on the disk instead of {entry.size}")
    for part in range(parts):
        note_path(folder, part).unlink()
    # The manifest comes last: a folder without one is not a checkpoint, whatever else it holds.
    content = encode(manifest.sealed())
    if len(content) > MAX_JSON_BYTES:
        raise OSError(errno.EFBIG, f"the manifest would have {len(content):,} bytes, more than readers accept")
    with opened(folder / FILE) as descriptor:
        write(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    # Checked again right before the rename: a newer generation fences this one (tandem.rundir.lineage).
    _refuse_if_superseded(rundir, manifest.name, manifest.generation)
    final = rundir.checkpoint(manifest.name)
    try:
        commit_folder(folder, final)
    except FileExistsError:
        _move_stale_checkpoint(rundir, manifest)
        commit_folder(folder, final)


def _upload(manifest: Manifest) -> None:
    """Bring the checkpoint into the bucket, where pods share no disk: it counts once it is there.

    Raises:
        Superseded: it does not count any more.
        OSError: the bucket does not answer, or refuses. It is sent later, if it still counts then.
    """
    try:
        sync_client.upload(manifest.name, str(manifest.sealed()["digest"]))
    except FileNotFoundError as error:
        raise Superseded(str(error)) from error
    except Broken as error:
        raise OSError(str(error)) from error


def _refuse_if_superseded(rundir: RunDir, name: str, generation: int) -> None:
    if rundir.newest_generation() > generation:
        raise Superseded(f"generation {generation} was superseded while it saved {name}")


def _move_stale_checkpoint(rundir: RunDir, manifest: Manifest) -> None:
    """Move an older generation's checkpoint out of the way of this one.

    Raises:
        Superseded: the name belongs to a generation that is not older.
    """
    with suppress(Broken, FileNotFoundError):
        _refuse_if_current(rundir, manifest, rundir.manifest(manifest.name).generation)
    stale = rundir.set_aside(manifest.name, STALE, f"superseded by generation {manifest.generation}")
    if stale is None:
        return
    # Between the check and the move another generation may have replaced the old checkpoint by its own: check what was
    # moved, and move it back if it is current.
    content = read_json_or_none(stale / FILE)
    generation = content.get("generation") if isinstance(content, dict) else None
    try:
        _refuse_if_current(rundir, manifest, generation if isinstance(generation, int) else 0)
    except Superseded:
        commit_folder(stale, rundir.checkpoint(manifest.name))
        stale.with_name(f"{stale.name}.why.json").unlink(missing_ok=True)
        raise


def _refuse_if_current(rundir: RunDir, manifest: Manifest, generation: int) -> None:
    existing = CheckpointRef(name=manifest.name, step=manifest.step, generation=generation)
    if generation >= manifest.generation or counts(rundir.chain(), existing):
        raise Superseded(f"{manifest.name} was already committed by generation {generation}")


def clean(rundir: RunDir, job: DistributedTrainingJob, request: Request, is_disk_full: bool = False) -> list[str]:
    """Delete the checkpoints that retention does not keep, and leftovers of crashed writers. Returns the deleted names.

    Args:
        request: the save after which this runs.
        is_disk_full: delete everything that nothing depends on, until there is room for two such saves.
    """
    # Everything that decides is read once, before anything is deleted.
    manifests = rundir.committed()
    readers = set(rundir.readers())
    ranks = _ranks(rundir, job, manifests)
    fallback_reach = 1 if is_disk_full else reach(len(rundir.rewind_records()))
    fates = {manifest.name: evaluations.evaluation_progress(rundir, manifest.reference) for manifest in manifests}
    in_evaluation = set() if is_disk_full else {name for name, fate in fates.items() if fate == "begun"}
    keepers = RetentionInputs(ranks, request["facts"].get("parent"), readers, fallback_reach, in_evaluation)
    policy = job.spec.checkpoint
    if is_disk_full:
        policy = CheckpointSpec(keep_last=1, keep_best=policy.keep_best, keep_every=policy.keep_every)
    names = _old_set_aside(rundir, 0 if is_disk_full else MAX_SET_ASIDE)
    # On a full disk the least valuable goes first: set-aside folders, then obsolete checkpoints, then those of the
    # chain.
    if is_disk_full:
        counting = {manifest.name for manifest in manifests}
        names += [name for name in _obsolete(rundir, request["generation"], counting) if name not in readers]
    names += checkpoints_to_delete([manifest.reference for manifest in manifests], policy, job.spec.evaluation, keepers)
    references = {manifest.name: manifest.reference for manifest in manifests}
    deleted, freed = [], 0
    for name in names:
        if rundir.newest_generation() > request["generation"]:
            break  # only the newest generation may delete: it may have resumed from this checkpoint
        if is_disk_full and freed >= ROOM_FOR * sum(request["files"].values()):
            break
        doomed = rundir.checkpoint(name)
        if fates.get(name) in ("waits", "begun") and job.spec.evaluation.processes > 0:
            # Before the deletion, so that no evaluator starts with it. On a full disk the note cannot be written.
            with suppress(OSError):
                evaluations.record_skipped_evaluation(
                    rundir, references[name], "it was deleted before it was evaluated"
                )
        freed += _size(doomed)
        temporary = temporary_beside(doomed)
        # Rename first: a concurrent reader must see the whole checkpoint or none.
        with suppress(FileNotFoundError):
            doomed.rename(temporary)
            deleted.append(name)
            shutil.rmtree(temporary, ignore_errors=True)
        doomed.with_name(f"{name}.why.json").unlink(missing_ok=True)
    hints = rundir.path.glob(f"{TEMPORARY}{rundir.latest_file.name}-*")
    _sweep([*rundir.checkpoints.glob(f"{TEMPORARY}*"), *hints], request)
    return deleted


def _sweep(leftovers: Iterable[Path], request: Request) -> None:
    """Delete temporary names that are not in use any more."""
    now = time.time()
    for leftover in leftovers:
        with suppress(FileNotFoundError):
            if _is_forgotten(leftover, request, now):
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()


def _size(folder: Path) -> int:
    """Return the size of the files in a folder, in bytes; files that vanish meanwhile count as 0."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size += path.lstat().st_size
    return size


def _old_set_aside(rundir: RunDir, retained: int) -> list[str]:
    """Return the set-aside folders without the `retained` latest steps, lowest step first."""
    names = sorted(rundir.set_aside_names())
    return names[: max(0, len(names) - retained)]


def _obsolete(rundir: RunDir, generation: int, current: set[str]) -> list[str]:
    """Return the intact checkpoints of older generations that no run will ever resume from."""
    obsolete = []
    for name in rundir.checkpoint_names():
        with suppress(Broken, FileNotFoundError):
            if name not in current and rundir.manifest(name).generation < generation:
                obsolete.append(name)
    return obsolete


def _is_forgotten(leftover: Path, request: Request, now: float) -> bool:
    """Return whether a temporary name is not in use any more.

    Nothing waits for the folder of an earlier save, because one save is in flight at a time. The folder of a later save
    may be in use already, whatever its age by the clocks of this machine and of the disk.
    """
    if match := _TEMPORARY_FOLDER.fullmatch(leftover.name):
        return (int(match[1]), int(match[2])) < (request["generation"], request["number"])
    return now - leftover.stat().st_mtime > FORGOTTEN_SECONDS


def _ranks(rundir: RunDir, job: DistributedTrainingJob, manifests: list[Manifest]) -> dict[str, Rank | None]:
    metric, goal, ranks = job.spec.evaluation.metric, job.spec.evaluation.direction, {}
    for manifest in manifests:
        reference = manifest.reference
        result = read_json_or_none(evaluations.folder(rundir, reference) / evaluations.merged_name(reference))
        if isinstance(result, dict):
            ranks[manifest.name] = rank(deciding_scores(result), metric, goal, manifest.step, manifest.generation)
    return ranks


def serve(run_dir: Path, descriptor: int) -> None:
    """Answer requests until standard input ends."""
    os.nice(NICENESS)
    rundir = RunDir(run_dir)
    job = rundir.read_job()
    swept = False
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as content:
            answer = _answer(rundir, job, request, content)
        answer["seconds"] = time.monotonic() - started
        if "committed" in answer:
            step, generation = request["facts"]["step"], request["generation"]
            with suppress(OSError):  # a hint that cannot be written does not undo the commit
                rundir.hint_latest(CheckpointRef(name=request["name"], step=step, generation=generation))
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:
            # A writer outlives its rank. Nobody reads answers then, and flushing print's buffer at exit would fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # After the answer, so that the rank does not wait for deletions.
        if request["part"] == 0:
            with suppress(OSError):  # what cannot be deleted now is deleted after the next save
                clean(rundir, job, request)
                if not swept:
                    # There is a folder for each checkpoint ever evaluated: once a generation is enough.
                    _sweep(rundir.evaluations.glob(f"step-*/{TEMPORARY}*"), request)
                    swept = True


def _answer(rundir: RunDir, job: DistributedTrainingJob, request: Request, content: memoryview) -> dict[str, Any]:
    # An exception references its frames, and so the memory: it must be gone before the memory is closed.
    try:
        return commit(rundir, request, content)
    except Superseded as error:
        return {"superseded": str(error)}
    except OSError as error:
        if error.errno not in DISK_FULL or request["part"] != 0:
            return {"failed": str(error)}
        return {"failed": f"{error}; {_make_room(rundir, job, request)}"}


def _make_room(rundir: RunDir, job: DistributedTrainingJob, request: Request) -> str:
    """Delete what nothing depends on, and return a sentence about it."""
    try:
        deleted = clean(rundir, job, request, is_disk_full=True)
    except OSError as error:
        return f"and nothing can be deleted: {error}"
    if not deleted:
        return "and nothing can be deleted to make room: enlarge the disk, or keep fewer checkpoints"
    return f"deleted to make room: {join_names(deleted)}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Commit staged checkpoints; started by ranks.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    arguments = parser.parse_args()
    # The rank decides when training ends; a terminal's or torchrun's signal must not cut a commit in two.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(arguments.run_dir, arguments.descriptor)


if __name__ == "__main__":
    main()
