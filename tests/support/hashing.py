"""Checksums of files that a test has written itself, as the manifest of a checkpoint lists them."""

from pathlib import Path

from tandem.rundir import checkpoint


def hash_file(path: Path) -> checkpoint.FileEntry:
    """Size and checksums of a file; the entry's path is the file's name."""
    checksums, size = [], 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(checkpoint.CHUNK):
            checksums.append(checkpoint.checksum(chunk))
            size += len(chunk)
    return checkpoint.FileEntry(path=path.name, size=size, xxh3=checksums)
