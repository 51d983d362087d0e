"""Every byte of a checkpoint against its checksums. Changes nothing: what is damaged is set aside by training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.rundir.checkpoint import CHUNK, Broken, FileEntry, Manifest
from tandem.rundir.layout import RunDir
from tandem_cli.checkpoints.chunks import ChunkedFile


@dataclass(frozen=True)
class Verification:
    """What became of one checkpoint."""

    name: str
    """Its name."""
    outcome: Literal["sound", "damaged", "unreadable", "vanished"]
    """`vanished`: it was deleted meanwhile, as retention does."""
    faults: tuple[str, ...] = ()
    """What is wrong, a sentence for each file."""
    files: int = 0
    """Files read."""
    size: int = 0
    """Bytes read."""

    @property
    def is_good(self) -> bool:
        """Whether nobody needs to worry."""
        return self.outcome in ("sound", "vanished")


def verify(rundir: RunDir, name: str, tick: Callable[[int], None] = lambda count: None) -> Verification:
    """Read a whole checkpoint, chunk by chunk.

    Args:
        tick: called with the bytes of each chunk that was read.
    """
    read, faults = 0, []
    try:
        manifest = rundir.manifest(name)
        for entry in manifest.files:
            size, fault = _check(rundir, manifest, entry, tick)
            read += size
            faults += [fault] if fault else []
    except FileNotFoundError:
        return Verification(name, "vanished", size=read)
    except Broken as error:
        return Verification(name, "damaged", (str(error),))
    except OSError as error:
        return Verification(name, "unreadable", (f"{name} cannot be read: {error.strerror or error}",), size=read)
    if not faults:
        return Verification(name, "sound", files=len(manifest.files), size=read)
    if not _is_still(rundir, manifest):
        return Verification(name, "vanished", size=read)
    return Verification(name, "damaged", tuple(faults), len(manifest.files), read)


def _check(rundir: RunDir, manifest: Manifest, entry: FileEntry, tick: Callable[[int], None]) -> tuple[int, str]:
    """Bytes read of one file, and what is wrong with it."""
    altered, read = [], 0
    try:
        with ChunkedFile(rundir.checkpoint(manifest.name), entry) as file:
            for number, (size, is_sound) in enumerate(file.soundness()):
                read += size
                tick(size)
                if not is_sound:
                    altered.append(number)
    except Broken as error:
        return read, str(error)
    if not altered:
        return read, ""
    of = f"{len(altered)} of {len(entry.xxh3)} chunks altered, the first" if len(entry.xxh3) > 1 else "altered"
    last = min(entry.size, (altered[0] + 1) * CHUNK)
    return read, f"{entry.path}: {of} in bytes {altered[0] * CHUNK:,} to {last - 1:,}"


def _is_still(rundir: RunDir, manifest: Manifest) -> bool:
    """Whether the name still belongs to what we read: retention deletes, and a newer generation may reuse a name."""
    try:
        return rundir.manifest(manifest.name).digest == manifest.digest
    except FileNotFoundError:
        return False
    except (Broken, OSError):
        return True
