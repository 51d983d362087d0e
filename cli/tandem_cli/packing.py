"""Packs a folder for a job: `tandem run --code DIR`, `tandem submit --code DIR`.

The pack is a compressed tar that depends on names, contents, links and the right to execute alone: not on times, owners
or the order in which a disk lists files. So the same folder has the same digest, and is not sent twice.

What is left out: what `.gitignore` files name (also those above the folder, up to the one with `.git`), folders of
version control, bytecode, virtual environments, and run directories. What is in it is chosen by names and sizes before
a single file is read: a folder that is too large is refused in the time that a listing takes.
"""

import gzip
import heapq
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pathspec import GitIgnoreSpec

from tandem.code import MAX_BYTES, MAX_FILES, MAX_PACKED_BYTES, digest_of
from tandem.errors import Unmet, UserError
from tandem.formatting import number, several, size
from tandem.job import DistributedTrainingJob

CodeOption = Annotated[
    Path | None,
    typer.Option(
        "--code", metavar="DIR", help="Pack this folder; workers and evaluators get exactly that and work in it."
    ),
]
IGNORE = ".gitignore"
NEVER = {".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
MAX_SIZE = 5
"""Number of files that the refusal of a folder names."""
MORE_SECONDS = 2.0
"""How long the largest files are looked for in a folder that is known to be too large."""
MODIFIED_AT = 315_619_200
"""Of every file: 1980, before which zip archives, and so wheels, have no time."""
MAX_IGNORE_BYTES = 2**20


@dataclass(frozen=True)
class Pack:
    """A packed folder."""

    digest: str
    file: Path
    """The pack itself."""
    folder: Path
    """What was packed."""
    names: frozenset[str]
    """Files and links in it, relative to the folder."""
    unpacked: int
    """Bytes."""
    packed: int
    """Bytes."""

    def __str__(self) -> str:
        """For people."""
        return f"{self.digest}, {several(len(self.names), 'file')}, {size(self.unpacked)}, {size(self.packed)} packed"

    def left_out(self, job: DistributedTrainingJob) -> Iterator[Unmet]:
        """Scripts that the job starts and that are not in the pack, where the manifest shows that they have to be."""
        evaluators = job.spec.evaluation
        parts = {
            "trainer": [*(job.spec.trainer.command or []), *job.spec.trainer.args],
            "evaluators": [*(evaluators.command or []), *evaluators.args] if evaluators.processes else [],
        }
        for part, words in parts.items():
            place = 1 if words[:1] in (["python"], ["python3"]) else 0
            script = words[place] if len(words) > place else ""
            command = (job.spec.trainer if part == "trainer" else evaluators).command or []
            if not script.endswith(".py") or Path(script).is_absolute() or os.path.normpath(script) in self.names:
                continue
            there = (self.folder / script).exists()
            why = f"is left out by {IGNORE}, or lies outside" if there else "does not exist"
            inner = ("command", place) if place < len(command) else ("args", place - len(command))
            yield Unmet(
                ("spec", part, *inner),
                f"{script} {why}: the job gets the folder {self.folder} (--code), and works in it",
            )


@dataclass(frozen=True)
class _Entry:
    name: str
    path: Path
    size: int
    is_executable: bool
    target: str | None
    """Where a link leads; None: it is a file."""


def with_code(overrides: Sequence[str], pack: Pack | None) -> tuple[str, ...]:
    """Settings of a job that works in a pack."""
    return tuple(overrides) if pack is None else (*overrides, f"spec.trainer.code={pack.digest}")


@contextmanager
def packed_if_given(folder: Path | None) -> Iterator[Pack | None]:
    """See `packed`; None where no folder was given."""
    if folder is None:
        yield None
        return
    with packed(folder) as pack:
        yield pack


@contextmanager
def packed(folder: Path) -> Iterator[Pack]:
    """A folder's pack, until the end of the `with` block.

    Raises:
        UserError: it is too large, or holds what cannot be packed.
    """
    if not folder.is_dir():
        raise UserError(f"--code takes a folder, and {folder} is {'a file' if folder.exists() else 'not there'}")
    entries = sorted(_chosen(folder), key=lambda entry: entry.name)
    if not any(entry.target is None for entry in entries):
        raise UserError(f"{folder} holds no file that --code could pack: all are left out by {IGNORE}, or it is empty")
    with tempfile.TemporaryDirectory(prefix="tandem-pack-") as scratch:
        file = Path(scratch, "code.tar.gz")
        try:
            _write(entries, file)
        except OSError as error:
            raise UserError(f"{error.filename or folder} cannot be packed: {error.strerror or error}") from error
        if (length := file.stat().st_size) > MAX_PACKED_BYTES:
            raise _too_large(folder, f"{size(length)} packed", [(entry.size, entry.name) for entry in entries])
        with file.open("rb") as content:
            digest = digest_of(content)
        names = frozenset(entry.name for entry in entries)
        yield Pack(digest, file, folder, names, sum(entry.size for entry in entries), length)


def _chosen(folder: Path) -> list[_Entry]:
    """What is packed.

    Raises:
        UserError: see `packed`.
    """
    found: list[_Entry] = []
    sizes: list[tuple[int, str]] = []
    total, top, deadline = 0, folder.resolve(), None
    for entry in _walk(folder, "", _above(top), top):
        total += entry.size
        sizes.append((entry.size, entry.name))
        found.append(entry)
        if total > MAX_BYTES or len(found) > MAX_FILES:
            deadline = deadline or time.monotonic() + MORE_SECONDS
            if time.monotonic() > deadline:
                break
    if deadline is not None:
        raise _too_large(folder, f"{size(total)} in {several(len(found), 'file')} or more", sizes)
    return found


def _too_large(folder: Path, what: str, sizes: list[tuple[int, str]]) -> UserError:
    largest = ", ".join(f"{name} ({size(count)})" for count, name in heapq.nlargest(MAX_SIZE, sizes))
    return UserError(
        f"{folder} is too large for --code: {what}, and the most are {size(MAX_PACKED_BYTES)} packed, "
        f"{size(MAX_BYTES)} unpacked and {number(MAX_FILES)} files. The largest files: {largest}. List what the job "
        f"does not need in {IGNORE}; data belongs on a volume"
    )


Ignores = tuple[tuple[str, GitIgnoreSpec], ...]
"""The rules that hold in a folder, the nearest last; each with the folder that they are in, relative to the packed one
(for those above it: the packed folder relative to them, after `//`)."""


def _walk(folder: Path, prefix: str, ignores: Ignores, top: Path) -> Iterator[_Entry]:
    try:
        with os.scandir(folder) as listing:
            children = sorted(listing, key=lambda child: child.name)
        if (file := folder / IGNORE).is_file() and not file.is_symlink():
            ignores = (*ignores, (prefix, _rules(file)))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error
    names = {child.name for child in children}
    if "pyvenv.cfg" in names or {"job.json", "generations", "leases"} <= names:
        return
    for child in children:
        name = f"{prefix}{child.name}"
        is_folder = child.is_dir(follow_symlinks=False)
        if child.name in NEVER or child.name.endswith(".pyc") or _is_ignored(name + "/" * is_folder, ignores):
            continue
        if is_folder:
            yield from _walk(Path(child.path), f"{name}/", ignores, top)
        else:
            yield _entry(child, name, top)


def _entry(child: "os.DirEntry[str]", name: str, top: Path) -> _Entry:
    path = Path(child.path)
    if child.is_symlink():
        return _Entry(name, path, 0, False, _target(path, name, top))
    facts = child.stat(follow_symlinks=False)
    if not stat.S_ISREG(facts.st_mode):
        raise UserError(f"{name} is neither a file nor a folder, so --code cannot pack it; list it in {IGNORE}")
    return _Entry(name, path, facts.st_size, bool(facts.st_mode & 0o100), None)


def _target(path: Path, name: str, top: Path) -> str:
    """Where a link leads, relative to its own folder."""
    try:
        goal = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop
        raise UserError(f"the link {name} leads nowhere: {error}; list it in {IGNORE}") from error
    if not goal.is_relative_to(top):
        raise UserError(
            f"the link {name} leads out of the folder, to {goal}, which the job's pods do not have; copy what it leads "
            f"to, or list the link in {IGNORE}"
        )
    text = os.fspath(path.readlink())
    return os.path.relpath(goal, path.parent.resolve()) if text.startswith("/") else text


def _rules(file: Path) -> GitIgnoreSpec:
    with file.open("rb") as content:
        return GitIgnoreSpec.from_lines(content.read(MAX_IGNORE_BYTES).decode(errors="surrogateescape").splitlines())


def _above(top: Path) -> Ignores:
    """The rules of the folders above, where the folder is a part of a git repository."""
    repository = next((one for one in (top, *top.parents) if (one / ".git").exists()), None)
    if repository is None or repository == top:
        return ()
    between = [one for one in reversed(top.parents) if one.is_relative_to(repository)]
    return tuple(
        (f"//{top.relative_to(one).as_posix()}/", _rules(one / IGNORE)) for one in between if (one / IGNORE).is_file()
    )


def _is_ignored(name: str, ignores: Ignores) -> bool:
    """Of the rules that say something of a name, the nearest counts, as git has it."""
    for place, rules in reversed(ignores):
        seen = place[2:] + name if place.startswith("//") else name.removeprefix(place)
        if (said := rules.check_file(seen).include) is not None:
            return said
    return False


def _write(entries: list[_Entry], file: Path) -> None:
    with (
        file.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mtime, info.mode = MODIFIED_AT, 0o755 if entry.is_executable else 0o644
            if entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(info)
                continue
            # It may have become a link, or shorter, since it was listed.
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as content:
                info.size = entry.size
                try:
                    tar.addfile(info, content)
                except OSError as error:
                    if error.errno is not None:
                        raise
                    raise UserError(f"{entry.name} has changed while it was packed; try again") from error
