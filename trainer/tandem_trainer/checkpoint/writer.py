"""The writer process: commits what its rank has staged in shared memory, while training continues.

Started once, before the first save, so that no save waits for a process to start; niced, and without torch, so that it
costs little memory and never competes with training for a core. Requests come as JSON lines on standard input, one at a
time; each is answered by one line on standard output. When its rank dies in the middle of a save the writer finishes
first: the state in memory is whole, and a checkpoint more is a loss less. Whether that checkpoint counts is for the
lineage to say.

**Several ranks write one checkpoint.** All write into the same folder aside, whose name they all know without a word:
step, generation, and how many saves that generation has made. Each writes its pieces of the files, syncs them, and then
leaves a note with the checksums of its chunks, `part-0001.json`. The writer of part 0 waits for all notes, puts the
manifest together, and commits: refuse if a newer generation exists, rename. So a checkpoint needs no connection between
writers but the shared disk; a rank that dies is missing a note at worst; and nothing is committed in part. A folder of
the same name can only be left by an older generation whose steps no longer count; it is set aside.

**A full disk.** A save needs room for one checkpoint more than are kept. When it finds none, something goes that
nothing depends on, until there is room for two: what was set aside, what does not count, then of those that count the
oldest, but for two that a fall-back needs. The save that failed says what was let go; the next one finds the room.

Rejected: a collective that says when all have written (a writer outlives its rank, and the training group must not wait
for a disk), and a part 0 that reads the files to checksum them (it would read what it has never seen written).

The kernel's copy into the page cache costs more than everything else that a save does beside the steps: for 0.74 GB
0.2 s of a core, and 0.03 s more when the checkpoint is deleted; written past it (O_DIRECT), the same save took 0.06 s,
checksums and all. Nobody misses the copy: resuming and evaluating mostly happen on other machines, and the cache is
left to the training data. An error of the disk comes with the write that had it, too, and not some time later.

Where the file system does not know how (EINVAL), and for the last bytes of a file, which fill no block, writing goes
through the page cache.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tandem.errors import enumerated
from tandem.job import Checkpoint, DistributedTrainingJob
from tandem.rundir import evaluations
from tandem.rundir.checkpoint import CHUNK, FILE, Broken, FileEntry, Manifest, checksum, chunks
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
from tandem.rundir.evaluations import Rank, deciding, rank
from tandem.rundir.layout import STALE, RunDir
from tandem.rundir.lineage import counts, reach
from tandem.rundir.retention import Keepers, expendable
from tandem.status import CheckpointRef
from tandem_trainer.checkpoint.file_names import NAMES_OF_TREES, TREES

BLOCK = 4096
"""Bytes that go past the page cache as one; every piece begins at a multiple of it, in its file and in memory."""

Checksums = dict[str, dict[str, str]]
"""For each file the checksum of each chunk, by its number."""

_PAST_THE_CACHE: int = getattr(os, "O_DIRECT", 0)


def write_pieces(folder: Path, regions: list[dict[str, Any]], memory: memoryview) -> Checksums:
    """Write pieces of files, synced, and return the checksums of their chunks.

    Args:
        regions: `path`, `start`, `size` and `offset` in the memory of each piece; see staging.Region.
        memory: begins at the beginning of a page.

    Raises:
        OSError: the disk does not take them.
    """
    found: Checksums = {}
    for region in regions:
        content = memory[region["offset"] : region["offset"] + region["size"]]
        whole_blocks = len(content) - len(content) % BLOCK
        path, start = folder / region["path"], region["start"]
        with opened(path) as descriptor, _past_the_cache(path, descriptor) as direct:
            for first in range(0, len(content), CHUNK):
                chunk = content[first : first + CHUNK]
                found.setdefault(region["path"], {})[str((start + first) // CHUNK)] = checksum(chunk)
                direct = _write_blocks(
                    direct, descriptor, content[first : min(first + CHUNK, whole_blocks)], start + first
                )
            write(descriptor, content[whole_blocks:], start + whole_blocks)
            os.fsync(descriptor)
        # The name of a file must be as durable as its bytes, and nobody else syncs this folder.
        sync_folder(path.parent)
    return found


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file to write into, which another part may write into as well. Nothing of it may be there before."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(descriptor: int, content: memoryview, at: int) -> None:
    """Write all of it there."""
    written = 0
    while written < len(content):
        written += os.pwrite(descriptor, content[written:], at + written)


@contextmanager
def _past_the_cache(path: Path, otherwise: int) -> Iterator[int]:
    """The file opened once more, for whole blocks; the other descriptor where the file system has no such thing."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _PAST_THE_CACHE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        yield otherwise
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_blocks(direct: int, otherwise: int, blocks: memoryview, at: int) -> int:
    """Write them there, the second way if the first is refused. Returns which way took them."""
    try:
        write(direct, blocks, at)
    except OSError as error:
        if error.errno != errno.EINVAL or direct == otherwise:
            raise
        write(otherwise, blocks, at)
        return otherwise
    return direct


NICENESS = 10
FORGOTTEN_SECONDS = 3600.0
"""Temporary names older than this belong to nobody any more."""
PARTS_SECONDS = 600.0
"""How long part 0 waits for the notes of the others; a disk may be slow, but a save must end some day."""
ORPHAN_SECONDS = 5.0
"""How long it waits when its own rank is gone: what is missing by then will hardly come."""
SET_ASIDE_KEPT = 2
"""How many `.bad` and `.stale` folders are kept for inspection: those of the latest steps."""
LARGE_TREES = 2**18
"""Bytes of JSON that get a file of their own, instead of a place in the manifest, which every listing reads."""
ROOM_FOR = 2
"""Saves for which room is made on a full disk: the next one, and one that is written while that is still there."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOOK_SECONDS = 0.005
REFRESH_SECONDS = 0.5
"""How often an NFS client is made to ask the server what is new in a folder."""

_ASIDE = re.compile(rf"{re.escape(TEMPORARY)}step-\d+-g(\d+)-(\d+)")

Request = dict[str, Any]


class Superseded(Exception):  # noqa: N818 - it is a state of the generation
    """A newer generation exists: this one must stop, and nothing of it may be committed any more."""


def aside_folder(rundir: RunDir, name: str, generation: int, number: int) -> Path:
    """Where all parts of one save are written.

    Args:
        number: of the save, counted over its generation.
    """
    return rundir.checkpoints / f"{TEMPORARY}{name}-g{generation:06d}-{number:06d}"


def note_path(aside: Path, part: int) -> Path:
    """Where a part says that it is written, or why not."""
    return aside / f"part-{part:04d}.json"


def commit(rundir: RunDir, request: Request, memory: memoryview) -> dict[str, Any]:
    """Write our part of a checkpoint and leave the note; as part 0, give the whole its name.

    Returns:
        `committed`, the name, and `bytes` and `stallSeconds` of all parts; or, for other parts, `written`.

    Raises:
        Superseded: the generation is not the newest any more.
        OSError: the disk is full, gone or read-only, here or at another part; nothing is left behind.
    """
    aside = aside_folder(rundir, request["name"], request["generation"], request["number"])
    note: dict[str, Any] = {"stallSeconds": request["stallSeconds"]}
    try:
        aside.mkdir(parents=True, exist_ok=True)
        note["chunks"] = write_pieces(aside, request["regions"], memory)
        # Not synced: it goes before the commit, and part 0 may have renamed the folder by the time we would sync it.
        replace_json(note_path(aside, request["part"]), note, durable=False)
        if request["part"] != 0:
            return {"written": sum(region["size"] for region in request["regions"])}
        notes = _gather(rundir, aside, request)
        manifest = _manifest(request, notes, _write_trees(aside, request))
        _finish(rundir, aside, manifest, request["parts"])
    except OSError as error:
        if request["part"] != 0:
            say_why_not(aside, request["part"], str(error), error.errno)
        raise
    finally:
        if request["part"] == 0:
            shutil.rmtree(aside, ignore_errors=True)
    stall = max(note["stallSeconds"] for note in notes)
    return {"committed": manifest.name, "bytes": manifest.size, "stallSeconds": stall}


def say_why_not(aside: Path, part: int, why: str, code: int | None = None) -> None:
    """Leave a note that the part will not come, so that part 0 need not wait for it. It may not have begun itself."""
    with suppress(OSError):
        aside.mkdir(parents=True, exist_ok=True)
        replace_json(note_path(aside, part), {"failed": why, "errno": code}, durable=False)


def _gather(rundir: RunDir, aside: Path, request: Request) -> list[dict[str, Any]]:
    """The notes of all parts, in order."""
    started = refreshed = time.monotonic()
    patience = PARTS_SECONDS
    missing = set(range(request["parts"]))
    notes: dict[int, dict[str, Any]] = {}
    while missing:
        for part in sorted(missing):
            note = read_json_or_none(note_path(aside, part))
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
        if missing and now - refreshed > REFRESH_SECONDS:
            refreshed = now
            os.utime(aside)
            _refuse_if_superseded(rundir, request["name"], request["generation"])
            if _rank_is_gone():
                patience = min(patience, now - started + ORPHAN_SECONDS)
            if now - started > patience:
                raise OSError(f"parts {sorted(missing)} were not written within {patience:.0f} s")
        if missing:
            time.sleep(LOOK_SECONDS)
    return [notes[part] for part in sorted(notes)]


def _rank_is_gone() -> bool:
    """Whether standard input has ended."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _write_trees(aside: Path, request: Request) -> list[FileEntry]:
    """Give JSON that is too large for the manifest a file of its own; part 0 alone has it."""
    loop = request["facts"]["loop"]
    trees = {name: loop[name] for name in NAMES_OF_TREES if name in loop}
    content = json.dumps(trees).encode()
    if len(content) <= LARGE_TREES:
        return []
    request["facts"]["loop"] = {name: value for name, value in loop.items() if name not in trees}
    region = {"path": TREES, "start": 0, "size": len(content), "offset": 0}
    checksums = write_pieces(aside, [region], memoryview(content))[TREES]
    chosen = [checksums[str(number)] for number in range(chunks(len(content)))]
    return [FileEntry(path=TREES, size=len(content), xxh3=chosen)]


def _manifest(request: Request, notes: list[dict[str, Any]], more: list[FileEntry]) -> Manifest:
    found: Checksums = {}
    for note in notes:
        for path, checksums in note["chunks"].items():
            found.setdefault(path, {}).update(checksums)
    entries = []
    for path, size in request["files"].items():
        checksums = [found.get(path, {}).get(str(number)) for number in range(chunks(size))]
        if None in checksums:
            raise OSError(f"nobody wrote chunk {checksums.index(None)} of {path}")
        entries.append(FileEntry.model_validate({"path": path, "size": size, "xxh3": checksums}))
    return Manifest.parse(request["facts"] | {"files": [entry.dump() for entry in [*entries, *more]]})


def _finish(rundir: RunDir, aside: Path, manifest: Manifest, parts: int) -> None:
    for entry in manifest.files:
        # Opened, not looked at: an NFS client may know an old size of what others have written.
        with opened(aside / entry.path) as descriptor:
            written = os.fstat(descriptor).st_size
        if written != entry.size:
            raise OSError(f"{entry.path} has {written} bytes on the disk instead of {entry.size}")
    for part in range(parts):
        note_path(aside, part).unlink()
    content = encode(manifest.sealed())
    if len(content) > MAX_JSON_BYTES:
        raise OSError(errno.EFBIG, f"the manifest would have {len(content):,} bytes, and nobody reads so much")
    with opened(aside / FILE) as descriptor:
        write(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    _refuse_if_superseded(rundir, manifest.name, manifest.generation)
    final = rundir.checkpoint(manifest.name)
    try:
        commit_folder(aside, final)
    except FileExistsError:
        _set_stale_aside(rundir, manifest)
        commit_folder(aside, final)


def _refuse_if_superseded(rundir: RunDir, name: str, generation: int) -> None:
    if rundir.newest_generation() > generation:
        raise Superseded(f"generation {generation} was superseded while it saved {name}")


def _set_stale_aside(rundir: RunDir, ours: Manifest) -> None:
    """Free our name from what an older generation left there.

    Raises:
        Superseded: the name belongs to a generation that is not older.
    """
    with suppress(Broken, FileNotFoundError):
        _refuse_if_it_stays(rundir, ours, rundir.manifest(ours.name).generation)
    moved = rundir.set_aside(ours.name, STALE, f"superseded by generation {ours.generation}")
    if moved is None:
        return
    # Since we looked, somebody else may have freed the name and taken it: then it is theirs that we have moved.
    found = read_json_or_none(moved / FILE)
    generation = found.get("generation") if isinstance(found, dict) else None
    try:
        _refuse_if_it_stays(rundir, ours, generation if isinstance(generation, int) else 0)
    except Superseded:
        commit_folder(moved, rundir.checkpoint(ours.name))
        moved.with_name(f"{moved.name}.why.json").unlink(missing_ok=True)
        raise


def _refuse_if_it_stays(rundir: RunDir, ours: Manifest, generation: int) -> None:
    theirs = CheckpointRef(name=ours.name, step=ours.step, generation=generation)
    if generation >= ours.generation or counts(rundir.chain(), theirs):
        raise Superseded(f"{ours.name} was already committed by generation {generation}")


def clean(rundir: RunDir, job: DistributedTrainingJob, request: Request, in_need: bool = False) -> list[str]:
    """Delete what retention lets go, and what crashed writers left behind. Returns the names deleted.

    Args:
        request: the save after which it is done.
        in_need: the disk is full, so what nothing depends on goes, until there is room for two such saves.
    """
    manifests = rundir.committed()
    readers = set(rundir.readers())
    ranks = _ranks(rundir, job, manifests)
    far = 1 if in_need else reach(len(rundir.rewind_records()))
    fates = {manifest.name: evaluations.fate(rundir, manifest.reference) for manifest in manifests}
    begun = set() if in_need else {name for name, fate in fates.items() if fate == "begun"}
    keepers = Keepers(ranks, request["facts"].get("parent"), readers, far, begun)
    policy = job.spec.checkpoint
    if in_need:
        policy = Checkpoint(keep_last=1, keep_best=policy.keep_best, keep_every=policy.keep_every)
    names = _set_aside_long_ago(rundir, 0 if in_need else SET_ASIDE_KEPT)
    if in_need:
        counting = {manifest.name for manifest in manifests}
        names += [name for name in _uncounted(rundir, request["generation"], counting) if name not in readers]
    names += expendable([manifest.reference for manifest in manifests], policy, job.spec.evaluation, keepers)
    references = {manifest.name: manifest.reference for manifest in manifests}
    deleted, freed = [], 0
    for name in names:
        if rundir.newest_generation() > request["generation"]:
            break  # what must stay is for the newest generation to say: it may have resumed from this one
        if in_need and freed >= ROOM_FOR * sum(request["files"].values()):
            break
        doomed = rundir.checkpoint(name)
        if fates.get(name) in ("waits", "begun") and job.spec.evaluation.processes > 0:
            # Before it goes, so that no evaluator begins with it; a full disk does not take the note.
            with suppress(OSError):
                evaluations.skip(rundir, references[name], "it was deleted before it was evaluated")
        freed += _size(doomed)
        aside = temporary_beside(doomed)
        # A reader that comes in the middle must see the checkpoint whole or not at all.
        with suppress(FileNotFoundError):
            doomed.rename(aside)
            deleted.append(name)
            shutil.rmtree(aside, ignore_errors=True)
        doomed.with_name(f"{name}.why.json").unlink(missing_ok=True)
    hints = rundir.path.glob(f"{TEMPORARY}{rundir.latest_file.name}-*")
    _sweep([*rundir.checkpoints.glob(f"{TEMPORARY}*"), *hints], request)
    return deleted


def _sweep(leftovers: Iterable[Path], request: Request) -> None:
    """Delete the temporary names that nobody needs any more."""
    now = time.time()
    for leftover in leftovers:
        with suppress(FileNotFoundError):
            if _is_forgotten(leftover, request, now):
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, as far as they are there."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            size += path.lstat().st_size
    return size


def _set_aside_long_ago(rundir: RunDir, kept: int) -> list[str]:
    """What was set aside, without the `kept` latest steps; lowest step first."""
    names = sorted(rundir.set_aside_names())
    return names[: max(0, len(names) - kept)]


def _uncounted(rundir: RunDir, generation: int, counting: set[str]) -> list[str]:
    """Sound checkpoints of older generations that no run will ever come back to."""
    found = []
    for name in rundir.checkpoint_names():
        with suppress(Broken, FileNotFoundError):
            if name not in counting and rundir.manifest(name).generation < generation:
                found.append(name)
    return found


def _is_forgotten(leftover: Path, request: Request, now: float) -> bool:
    """Whether nobody needs a temporary name any more.

    The folder of an earlier save is waited for by nobody, because one save is in flight at a time; that of a later one
    may be in use already, whatever the clocks of this machine and of the disk say about its age.
    """
    if found := _ASIDE.fullmatch(leftover.name):
        return (int(found[1]), int(found[2])) < (request["generation"], request["number"])
    return now - leftover.stat().st_mtime > FORGOTTEN_SECONDS


def _ranks(rundir: RunDir, job: DistributedTrainingJob, manifests: list[Manifest]) -> dict[str, Rank | None]:
    metric, goal, ranks = job.spec.evaluation.metric, job.spec.evaluation.direction, {}
    for manifest in manifests:
        reference = manifest.reference
        result = read_json_or_none(evaluations.folder(rundir, reference) / evaluations.merged_name(reference))
        if isinstance(result, dict):
            ranks[manifest.name] = rank(deciding(result), metric, goal, manifest.step, manifest.generation)
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
            # A writer outlives its rank; nobody reads answers then, and what print has buffered must not be flushed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if request["part"] == 0:
            with suppress(OSError):  # what cannot be deleted now is deleted after the next save
                clean(rundir, job, request)
                if not swept:
                    # As many folders as there were checkpoints: once a generation is enough.
                    _sweep(rundir.evaluations.glob(f"step-*/{TEMPORARY}*"), request)
                    swept = True


def _answer(rundir: RunDir, job: DistributedTrainingJob, request: Request, content: memoryview) -> dict[str, Any]:
    # An error holds on to the frames it came through, and so to the memory: it must be gone before that is closed.
    try:
        return commit(rundir, request, content)
    except Superseded as error:
        return {"superseded": str(error)}
    except OSError as error:
        if error.errno not in NO_ROOM or request["part"] != 0:
            return {"failed": str(error)}
        return {"failed": f"{error}; {_made_room(rundir, job, request)}"}


def _made_room(rundir: RunDir, job: DistributedTrainingJob, request: Request) -> str:
    """Let go of what nothing depends on; says of what."""
    try:
        gone = clean(rundir, job, request, in_need=True)
    except OSError as error:
        return f"and nothing can be deleted: {error}"
    if not gone:
        return "and nothing is there that could be let go: give the disk more room, or let the job keep fewer"
    return f"let go to make room: {enumerated(gone)}"


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
