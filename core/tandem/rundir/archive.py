"""A run directory as a tar archive on standard output: `python -m tandem.rundir.archive`.

`tandem copy` runs it where the volume of a job is mounted, and unpacks the stream (tandem_cli.kubernetes.copying):

    TOTAL                 JSON: bytes that follow, and the names of the checkpoints among them
    DONE, FAILED.json     first: an archive with the end of the run has everything that was written before it, too
    job.json, records, evaluations, logs, …
    checkpoints/NAME/…    the requested checkpoints that the receiver does not have; with --manifests, the manifests of
                          all others
    END                   empty: the archive was not truncated, which neither tar nor `kubectl exec` reports

Not included are leases, packed code and its packages, files of other programs and earlier runs. A checkpoint is held by
a lease until it has been sent. A file that vanishes meanwhile is skipped.

Rejected: `kubectl cp` and `tar` (an image need not have it, it would send checkpoints that retention is just deleting,
and the receiver would have to guess their names).
"""

import argparse
import io
import json
import os
import re
import sys
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tandem.processes.launch import RUN_DIR
from tandem.rundir import lease
from tandem.rundir.checkpoint import FILE, Broken, Manifest
from tandem.rundir.durable import list_folder, open_regular
from tandem.rundir.evaluations import best
from tandem.rundir.layout import RunDir

TOTAL, END = "TOTAL", "END"
ALL, NONE, LATEST, BEST = "all", "none", "latest", "best"
FILES = (
    *("DONE", "FAILED.json", "BROKEN-OFF", "job.json", "numbering.json", "coordinator.json", "coordinator.beside.json"),
    *("best.json", "latest.json", "wrong.json"),
)
FOLDERS = ("generations", "rewinds", "micro-batches", "finished-members", "evaluations", "stacks", "log")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names of files and folders of a run directory. Others, such as `.nfs…`, are not Tandem's, or not complete."""
RENEWAL_SECONDS = lease.LEASE_LENGTH_SECONDS / 3


def select(rundir: RunDir, selectors: Iterable[str]) -> list[Manifest]:
    """The checkpoints that selectors name, newest first.

    Args:
        selectors: `latest`, `best`, `all`, `none`, or names; missing checkpoints are skipped.
    """
    committed = rundir.committed()
    best_checkpoint = best(rundir)
    special = {
        ALL: [manifest.name for manifest in committed],
        NONE: [],
        BEST: [best_checkpoint.name] if best_checkpoint else [],
    }
    special[LATEST] = special[ALL][:1]
    names = {name for selector in selectors for name in special.get(selector, [selector])}
    return [manifest for manifest in committed if manifest.name in names]


def write(rundir: RunDir, checkpoints: Sequence[Manifest], output: BinaryIO, manifests: bool = False) -> None:
    """Write the archive.

    Args:
        manifests: send the manifests of the other checkpoints, too, with which they can be listed.

    Raises:
        OSError: a file cannot be read, or the receiver has closed the stream.
    """
    with (
        tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        leases(rundir, [manifest.name for manifest in checkpoints]),
    ):
        files = list(run_files(rundir))
        if manifests:
            names = set(rundir.checkpoint_names()) - {manifest.name for manifest in checkpoints}
            files += [rundir.checkpoint(name) / FILE for name in sorted(names)]
        total = sum(_size(path) for path in files) + sum(manifest.size for manifest in checkpoints)
        _add(
            archive,
            TOTAL,
            json.dumps({"bytes": total, "checkpoints": [manifest.name for manifest in checkpoints]}).encode(),
        )
        for path in files:
            _add_file(archive, rundir, path)
        for manifest in checkpoints:
            for name in (*(entry.path for entry in manifest.files), FILE):
                _add_file(archive, rundir, rundir.checkpoint(manifest.name) / name)
        _add(archive, END, b"")


def run_files(rundir: RunDir) -> Iterator[Path]:
    """The paths of all records and logs of a run; some of FILES may be missing."""
    yield from (rundir.path / name for name in FILES)
    for name in FOLDERS:
        yield from _below(rundir.path / name)


def _below(folder: Path) -> Iterator[Path]:
    for path in list_folder(folder):
        if path.is_symlink() or not NAME.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from _below(path)
        else:
            yield path


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


@contextmanager
def leases(rundir: RunDir, names: Iterable[str]) -> Iterator[None]:
    """Hold a lease on each of these checkpoints. A read-only disk takes none, and may still be copied."""
    leases, done = [], threading.Event()
    for name in names:
        with suppress(OSError):
            path = rundir.leases / f"copy-{name}-{lease.default_holder()}.json"
            leases.append(lease.acquire(path, seconds=lease.LEASE_LENGTH_SECONDS))

    def renew() -> None:
        while not done.wait(RENEWAL_SECONDS):
            for held_lease in leases:
                with suppress(OSError):  # the next time, perhaps
                    if held_lease is not None:
                        held_lease.renew()

    renewal = threading.Thread(target=renew, daemon=True)
    renewal.start()
    try:
        yield
    finally:
        done.set()
        renewal.join()
        for held_lease in leases:
            with suppress(OSError):  # it ends by itself
                if held_lease is not None:
                    held_lease.release()


def _add_file(archive: tarfile.TarFile, rundir: RunDir, path: Path) -> None:
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    with file:
        info = tarfile.TarInfo(path.relative_to(rundir.path).as_posix())
        status = os.fstat(file.fileno())
        info.size, info.mtime = status.st_size, status.st_mtime
        archive.addfile(info, file)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def main(arguments: Sequence[str]) -> int:
    """Write a run directory to standard output.

    Returns:
        1 if there is none.
    """
    parser = argparse.ArgumentParser(prog="python -m tandem.rundir.archive")
    parser.add_argument("folder", nargs="?", default=os.environ.get(RUN_DIR, "."), help=f"default: ${RUN_DIR}")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="WORD", help=select.__doc__)
    parser.add_argument("--have", action="append", default=[], metavar="DIGEST", help="do not send this manifest")
    parser.add_argument("--manifests", action="store_true", help="send the manifests of the other checkpoints, too")
    options = parser.parse_args(arguments)
    rundir = RunDir(options.folder)
    try:
        rundir.read_job()
        selected = select(rundir, options.checkpoint)
        checkpoints = [manifest for manifest in selected if manifest.digest not in options.have]
    except (OSError, ValueError, Broken) as error:
        print(f"{rundir.path} cannot be read as a run: {error}", file=sys.stderr)
        return 1
    write(rundir, checkpoints, sys.stdout.buffer, options.manifests)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
