"""The files of a run beside its chain: each record, manifest and result that is on the disk has the digest that its
entry says. What retention has deleted is no problem, and neither is what was written after the coordinator ended."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.rundir import evaluations
from tandem.rundir.checkpoint import Broken
from tandem.rundir.durable import list_folder
from tandem.rundir.layout import RunDir, step_of
from tandem.rundir.provenance import (
    CheckpointEntry,
    GenerationEntry,
    ProvenanceChain,
    RewindEntry,
    ScoreEntry,
    content_digest,
    file_digest,
)


@dataclass(frozen=True)
class FilesBesideChain:
    """Result of the comparison."""

    compared: int
    """Number of files that have the digest of their entry."""
    checkpoints: frozenset[str]
    """Names of the checkpoints among them."""
    unrecorded: Sequence[str]
    """Names of checkpoints and results that have no entry."""
    problems: Sequence[str]
    """Files that differ from their entry, sentences."""


def compare_files(rundir: RunDir, chain: ProvenanceChain) -> FilesBesideChain:
    """Compare all files that entries name; of checkpoints the manifests, which have the checksums of all other files.

    Raises:
        OSError: the run directory cannot be read.
    """
    problems: list[str] = []
    sound: set[str] = set()
    compared = 0
    for path, digest, label in _files(rundir, chain):
        try:
            is_same = file_digest(path) == digest
        except FileNotFoundError:
            continue
        except ValueError as error:
            problems.append(str(error))
            continue
        compared += is_same
        problems += [] if is_same else [f"{label} is not the one of the record"]
    newest = {entry.name: entry for entry in chain.entries if isinstance(entry, CheckpointEntry)}
    for name, entry in newest.items():
        try:
            manifest = rundir.manifest(name)
        except FileNotFoundError:
            continue
        except Broken as error:
            problems.append(str(error))
            continue
        if (manifest.digest, content_digest(manifest)) == (entry.digest, entry.content):
            sound.add(name)
        else:
            problems.append(f"the manifest of {name} is not the one of the record")
    known_results = {(entry.name, entry.generation) for entry in chain.entries if isinstance(entry, ScoreEntry)}
    unrecorded = [name for name in rundir.checkpoint_names() if name not in newest]
    unrecorded += [
        f"the result of {name}" for name, generation in _results(rundir) if (name, generation) not in known_results
    ]
    return FilesBesideChain(compared + len(sound), frozenset(sound), unrecorded, problems)


def _files(rundir: RunDir, chain: ProvenanceChain) -> Iterator[tuple[Path, str, str]]:
    """Path, expected SHA-256 and label of the files that are read as a whole."""
    for entry in chain.entries:
        if isinstance(entry, GenerationEntry):
            path = rundir.generations / f"{entry.generation:06d}.json"
            yield path, entry.digest, f"the record of generation {entry.generation}"
        elif isinstance(entry, RewindEntry):
            yield rundir.rewinds / f"{entry.rewind:06d}.json", entry.digest, f"the record of rewind {entry.rewind}"
        elif isinstance(entry, ScoreEntry):
            path = evaluations.merged_file(rundir, entry.reference)
            yield path, entry.digest, f"the result of {entry.name}"


def _results(rundir: RunDir) -> Iterator[tuple[str, int]]:
    for folder in list_folder(rundir.evaluations):
        for path in list_folder(folder) if step_of(folder.name) is not None else ():
            file = evaluations.parse_final_file(path)
            if file is not None and not file.is_note:
                yield folder.name, file.generation
