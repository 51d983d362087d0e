"""A run directory as a tar archive on standard output: `python -m tandem.rundir.archive`.

`tandem copy` runs it where the volume of a job is mounted, and unpacks what comes (tandem_cli.kubernetes.copying):

    TOTAL                 JSON: bytes that follow, and the names of the checkpoints among them
    DONE, FAILED.json     first: where the end is in the archive, all that was written before it is, too
    job.json, records, evaluations, logs, …
    checkpoints/NAME/…    those that were asked for and that the other side does not have
    END                   empty: the archive was not cut off, which neither tar nor `kubectl exec` tells

Left out are leases, packed code and its packages, files of other programs and what was here before. A checkpoint is
held by a lease until it has been sent. A file that vanishes meanwhile is left out.

Rejected: `kubectl cp` and `tar` (an image need not have it, it would send checkpoints that retention is just deleting,
and the other side would have to guess their names).
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

from tandem.launch import RUN_DIR
from tandem.rundir import lease
from tandem.rundir.checkpoint import FILE, Broken, Manifest
from tandem.rundir.durable import listed, open_regular
from tandem.rundir.evaluations import best
from tandem.rundir.layout import RunDir

TOTAL, END = "TOTAL", "END"
ALL, NONE, LATEST, BEST = "all", "none", "latest", "best"
FILES = (
    *("DONE", "FAILED.json", "BROKEN-OFF", "job.json", "numbering.json", "coordinator.json", "coordinator.beside.json"),
    *("best.json", "latest.json", "wrong.json"),
)
FOLDERS = ("generations", "rewinds", "micro-batches", "evaluations", "stacks", "log")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""What files and folders of a run directory are called; others, such as `.nfs…`, are not Tandem's, or not complete."""
RENEWAL_SECONDS = lease.SECONDS / 3


def chosen(rundir: RunDir, words: Iterable[str]) -> list[Manifest]:
    """The checkpoints that words ask for, newest first.

    Args:
        words: `latest`, `best`, `all`, `none`, or names; what is not there is passed over.
    """
    counting = rundir.committed()
    found = best(rundir)
    special = {ALL: [one.name for one in counting], NONE: [], BEST: [found.name] if found else []}
    special[LATEST] = special[ALL][:1]
    wanted = {name for word in words for name in special.get(word, [word])}
    return [one for one in counting if one.name in wanted]


def write(rundir: RunDir, checkpoints: Sequence[Manifest], output: BinaryIO) -> None:
    """Write the archive.

    Raises:
        OSError: a file cannot be read, or nobody reads the archive any more.
    """
    with (
        tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        _held(rundir, [one.name for one in checkpoints]),
    ):
        files = list(_files(rundir))
        total = sum(_size(path) for path in files) + sum(one.size for one in checkpoints)
        _add(archive, TOTAL, json.dumps({"bytes": total, "checkpoints": [one.name for one in checkpoints]}).encode())
        for path in files:
            _add_file(archive, rundir, path)
        for one in checkpoints:
            for name in (*(entry.path for entry in one.files), FILE):
                _add_file(archive, rundir, rundir.checkpoint(one.name) / name)
        _add(archive, END, b"")


def _files(rundir: RunDir) -> Iterator[Path]:
    yield from (rundir.path / name for name in FILES)
    for name in FOLDERS:
        yield from _below(rundir.path / name)


def _below(folder: Path) -> Iterator[Path]:
    for path in listed(folder):
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
def _held(rundir: RunDir, names: Iterable[str]) -> Iterator[None]:
    """Hold a lease on each of these checkpoints. A disk that takes none may still be read."""
    held, over = [], threading.Event()
    for name in names:
        with suppress(OSError):
            path = rundir.leases / f"copy-{name}-{lease.default_holder()}.json"
            held.append(lease.acquire(path, seconds=lease.SECONDS))

    def renew() -> None:
        while not over.wait(RENEWAL_SECONDS):
            for one in held:
                with suppress(OSError):  # the next time, perhaps
                    if one is not None:
                        one.renew()

    renewal = threading.Thread(target=renew, daemon=True)
    renewal.start()
    try:
        yield
    finally:
        over.set()
        renewal.join()
        for one in held:
            with suppress(OSError):  # it ends by itself
                if one is not None:
                    one.release()


def _add_file(archive: tarfile.TarFile, rundir: RunDir, path: Path) -> None:
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    with file:
        info = tarfile.TarInfo(path.relative_to(rundir.path).as_posix())
        found = os.fstat(file.fileno())
        info.size, info.mtime = found.st_size, found.st_mtime
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
    parser.add_argument("--checkpoint", action="append", default=[], metavar="WORD", help=chosen.__doc__)
    parser.add_argument("--have", action="append", default=[], metavar="DIGEST", help="of a manifest not to be sent")
    options = parser.parse_args(arguments)
    rundir = RunDir(options.folder)
    try:
        rundir.read_job()
        checkpoints = [one for one in chosen(rundir, options.checkpoint) if one.digest not in options.have]
    except (OSError, ValueError, Broken) as error:
        print(f"{rundir.path} cannot be read as a run: {error}", file=sys.stderr)
        return 1
    write(rundir, checkpoints, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
