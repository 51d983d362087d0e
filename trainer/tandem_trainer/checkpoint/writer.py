"""The writer process: commits what rank 0 has staged in shared memory, while training goes on.

Started once, before the first step, so that no save waits for a process to start; niced, and without torch, so that it
costs little memory and never competes with training for a core. Requests come as JSON lines on standard input, one at a
time; each is answered by one line on standard output. When its rank dies in the middle of a save the writer finishes
first: the state in memory is whole, and a checkpoint more is a loss less. Whether that checkpoint counts is for the
lineage to say.

Commit: write each file aside, checksum what is written, fsync, write the manifest, refuse if a newer generation exists,
rename. A folder of the same name can only be left by an older generation whose steps no longer count; it is set aside.
"""

import argparse
import hashlib
import json
import mmap
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem import lease
from tandem.durable import TEMPORARY, commit_folder, encode, read_json_or_none, temporary_beside
from tandem.job import DistributedTrainingJob
from tandem.lineage import counts
from tandem.manifest import CHUNK, FILE, Broken, FileEntry, Manifest
from tandem.retention import Keepers, expendable
from tandem.rundir import STALE, RunDir

NICENESS = 10
FORGOTTEN_SECONDS = 3600.0
"""Temporary names older than this belong to nobody any more."""


class Superseded(Exception):  # noqa: N818 - it is a state of this generation
    """A newer generation exists; nothing of this one may be committed any more."""


def write_file(folder: Path, path: str, content: memoryview) -> FileEntry:
    """Write one file of a checkpoint, synced, and return its entry for the manifest."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb", buffering=0) as file:
        for start in range(0, len(content), CHUNK):
            chunk = content[start : start + CHUNK]
            digest.update(chunk)
            written = 0
            while written < len(chunk):
                written += file.write(chunk[written:])
        os.fsync(file.fileno())
    return FileEntry(path=path, size=len(content), sha256=digest.hexdigest())


def commit(rundir: RunDir, facts: dict[str, Any], regions: list[dict[str, Any]], memory: memoryview) -> Manifest:
    """Write a checkpoint and give it its name.

    Args:
        facts: the manifest without its files.
        regions: `path`, `offset` and `size` of each file in the memory.

    Raises:
        Superseded: the generation is not the newest any more.
        OSError: the disk is full, gone or read-only; nothing is left behind.
    """
    final = rundir.checkpoint(str(facts["name"]))
    aside = temporary_beside(final)
    aside.mkdir(parents=True)
    try:
        entries = [
            write_file(aside, region["path"], memory[region["offset"] : region["offset"] + region["size"]])
            for region in regions
        ]
        manifest = Manifest.parse(facts | {"files": [entry.dump() for entry in entries]})
        write_file(aside, FILE, memoryview(encode(manifest.sealed())))
        if rundir.newest_generation() > manifest.generation:
            raise Superseded(f"generation {manifest.generation} was superseded while it saved {manifest.name}")
        try:
            commit_folder(aside, final)
        except FileExistsError:
            _set_stale_aside(rundir, manifest)
            commit_folder(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return manifest


def _set_stale_aside(rundir: RunDir, ours: Manifest) -> None:
    """Free our name from what an older generation left there.

    Raises:
        Superseded: the name belongs to a generation that is not older.
    """
    with suppress(Broken, FileNotFoundError):
        theirs = rundir.manifest(ours.name)
        if theirs.generation >= ours.generation or counts(rundir.chain(), theirs.reference):
            raise Superseded(f"{ours.name} was already committed by generation {theirs.generation}")
    rundir.set_aside(ours.name, STALE, f"superseded by generation {ours.generation}")


def clean(rundir: RunDir, job: DistributedTrainingJob, resumed_from: str | None) -> list[str]:
    """Delete what retention lets go, and what crashed writers left behind. Returns the names deleted."""
    manifests = rundir.committed()
    keepers = Keepers(_scores(rundir, job, manifests), resumed_from, _leased(rundir))
    names = expendable(
        [manifest.reference for manifest in manifests], job.spec.checkpoint, job.spec.evaluation, keepers
    )
    for name in names:
        doomed = rundir.checkpoint(name)
        aside = temporary_beside(doomed)
        # A reader that comes in the middle must see the checkpoint whole or not at all.
        with suppress(FileNotFoundError):
            doomed.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    now = time.time()
    for leftover in rundir.checkpoints.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):
            if now - leftover.stat().st_mtime > FORGOTTEN_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    return names


def _scores(rundir: RunDir, job: DistributedTrainingJob, manifests: list[Manifest]) -> dict[str, float]:
    scores = {}
    for manifest in manifests:
        result = read_json_or_none(rundir.evaluations / manifest.name / f"g{manifest.generation:06d}.json")
        metrics = result.get("metrics") if isinstance(result, dict) else None
        value = metrics.get(job.spec.evaluation.metric) if isinstance(metrics, dict) else None
        if isinstance(value, int | float):
            scores[manifest.name] = float(value)
    return scores


def _leased(rundir: RunDir) -> set[str]:
    """Checkpoints with a running lease: lease files are named `<verb>-<checkpoint>-…`."""
    names = set()
    for path in rundir.leases.glob("*-step-*"):
        parts = path.name.split("-")
        if len(parts) > 2 and lease.is_held(path):
            names.add(f"step-{parts[2]}")
    return names


def serve(run_dir: Path, descriptor: int) -> None:
    """Answer requests until standard input ends."""
    os.nice(NICENESS)
    rundir = RunDir(run_dir)
    job = rundir.read_job()
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as content:
                manifest = commit(rundir, request["facts"], request["regions"], content)
            with suppress(OSError):  # a hint that cannot be written does not undo the commit
                rundir.hint_latest(manifest.reference)
            answer = {"committed": manifest.name, "bytes": manifest.size, "seconds": time.monotonic() - started}
        except Superseded as error:
            answer = {"superseded": str(error)}
        except OSError as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)
        with suppress(OSError):  # what cannot be deleted now is deleted after the next save
            clean(rundir, job, request["facts"].get("parent"))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Commit staged checkpoints; started by rank 0 alone.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    arguments = parser.parse_args()
    # The rank decides when training ends; a terminal's or torchrun's signal must not cut a commit in two.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(arguments.run_dir, arguments.descriptor)


if __name__ == "__main__":
    main()
