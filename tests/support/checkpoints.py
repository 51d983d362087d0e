"""Generations and checkpoints in a run directory, without a trainer: recorded and committed as it does."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.rundir import checkpoint
from tandem.rundir.checkpoint import FILE, FileEntry, Manifest
from tandem.rundir.durable import commit_folder, encode, temporary_beside
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.status import CheckpointRef


def begin(rundir: RunDir, generation: int, parent: CheckpointRef | None = None, **facts: Any) -> None:
    """Record a generation, of one rank unless its facts say otherwise."""
    record = {"generation": generation, "resumed_from": parent, "world_size": 1, "started_at": time.time(), **facts}
    assert rundir.record_generation(GenerationRecord(**record))


def commit(rundir: RunDir, step: int, generation: int = 1, /, **facts: Any) -> CheckpointRef:
    """Commit a checkpoint.

    Args:
        facts: of its manifest; `files` maps paths to contents.
    """
    folder = rundir.checkpoint(checkpoint_name(step))
    aside = temporary_beside(folder)
    aside.mkdir()
    contents: Mapping[str, bytes] = facts.pop("files", {})
    for path, content in contents.items():
        (aside / path).parent.mkdir(exist_ok=True)
        (aside / path).write_bytes(content)
    files = [hash_file(aside / path, path) for path in contents]
    known = {"name": folder.name, "step": step, "generation": generation, "created_at": time.time(), "world_size": 1}
    manifest = Manifest(**{**known, "files": files, **facts})
    (aside / FILE).write_bytes(encode(manifest.sealed()))
    commit_folder(aside, folder)
    return manifest.reference


def hash_file(path: Path, name: str = "") -> FileEntry:
    """Size and checksums of a file as a manifest lists them, by its name in the checkpoint."""
    data, chunk = memoryview(path.read_bytes()), checkpoint.CHUNK_BYTES
    checksums = [checkpoint.checksum(data[at : at + chunk]) for at in range(0, len(data), chunk)]
    return FileEntry(path=name or path.name, size=len(data), xxh3=checksums)
