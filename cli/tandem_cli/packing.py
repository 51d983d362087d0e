"""Packs a folder for a job: `tandem run --code DIR`, `tandem submit --code DIR`.

The pack is a compressed tar that depends only on names, contents, links and execute permissions, not on times, owners
or the order of a directory listing. So the same folder has the same digest, and is not sent twice.

Excluded: files that `.gitignore` files match (including those above the folder, up to the one with `.git`), folders of
version control, bytecode, virtual environments, and run directories. Files are selected by name and size before the
first one is read, so a folder that is too large is refused in the time of a listing.
"""

import gzip
import heapq
import os
import shutil
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

from tandem.errors import UnmetRequirement, UserError
from tandem.formatting import count_noun, number, size
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.code import MAX_BYTES, MAX_FILES, MAX_PACKED_BYTES, digest_of

CodeOption = Annotated[
    Path | None,
    typer.Option(
        "--code", metavar="DIR", help="Pack this folder; workers and evaluators get exactly that and work in it."
    ),
]
IGNORE = ".gitignore"
NEVER = {".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
MAX_LISTED = 5
"""Number of files that the refusal of a folder lists."""
MORE_SECONDS = 2.0
"""Time limit of the search for the largest files in a folder that is too large, in seconds."""
MODIFIED_AT = 315_619_200
"""Modification time of every file: 1980, the earliest time in zip archives, and so in wheels."""
MAX_IGNORE_BYTES = 2**20


@dataclass(frozen=True)
class Pack:
    """A packed folder."""

    digest: str
    file: Path
    """The archive."""
    folder: Path
    """The packed folder."""
    names: frozenset[str]
    """Packed files and links, relative to the folder."""
    unpacked: int
    """Size of the content, in bytes."""
    packed: int
    """Size of the archive, in bytes."""

    def __str__(self) -> str:
        """Describe the pack for users."""
        return (
            f"{self.digest}, {count_noun(len(self.names), 'file')}, {size(self.unpacked)}, {size(self.packed)} packed"
        )

    def missing_scripts(self, job: DistributedTrainingJob) -> Iterator[UnmetRequirement]:
        """Yield scripts that the job starts and the pack lacks, as far as the manifest names them."""
        evaluators = job.spec.evaluation
        parts = {
            "trainer": [*(job.spec.trainer.command or []), *job.spec.trainer.args],
            "evaluators": [*(evaluators.command or []), *evaluators.args] if evaluators.processes else [],
        }
        for part, argv in parts.items():
            index = 1 if argv[:1] in (["python"], ["python3"]) else 0
            script = argv[index] if len(argv) > index else ""
            command = (job.spec.trainer if part == "trainer" else evaluators).command or []
            if not script.endswith(".py") or Path(script).is_absolute() or os.path.normpath(script) in self.names:
                continue
            exists = (self.folder / script).exists()
            reason = f"is excluded by {IGNORE}, or lies outside" if exists else "does not exist"
            inner = ("command", index) if index < len(command) else ("args", index - len(command))
            yield UnmetRequirement(
                ("spec", part, *inner),
                f"{script} {reason}: the job gets only the folder {self.folder} (--code)",
            )


@dataclass(frozen=True)
class _Entry:
    name: str
    path: Path
    size: int
    is_executable: bool
    target: str | None
    """Target of a link; None: it is a file."""


def with_code(overrides: Sequence[str], pack: Pack | None) -> tuple[str, ...]:
    """Return the overrides of a job that runs in a pack."""
    return tuple(overrides) if pack is None else (*overrides, f"spec.trainer.code={pack.digest}")


@contextmanager
def packed_if_given(folder: Path | None) -> Iterator[Pack | None]:
    """Pack a folder (see `packed`); yield None without a folder."""
    if folder is None:
        yield None
        return
    with packed(folder) as pack:
        yield pack


@contextmanager
def packed(folder: Path) -> Iterator[Pack]:
    """Pack a folder; the pack exists until the end of the `with` block.

    Raises:
        UserError: it is too large, or contains something that cannot be packed.
    """
    _need_folder(folder)
    entries = sorted(_select(folder), key=lambda entry: entry.name)
    if not any(entry.target is None for entry in entries):
        raise UserError(f"{folder} has no files for --code: {IGNORE} excludes all, or it is empty")
    with tempfile.TemporaryDirectory(prefix="tandem-pack-") as scratch:
        file = Path(scratch, "code.tar.gz")
        try:
            _write(entries, file)
        except OSError as error:
            raise _unreadable(error, folder) from error
        if (length := file.stat().st_size) > MAX_PACKED_BYTES:
            raise _too_large(folder, f"{size(length)} packed", [(entry.size, entry.name) for entry in entries])
        with file.open("rb") as content:
            digest = digest_of(content)
        names = frozenset(entry.name for entry in entries)
        yield Pack(digest, file, folder, names, sum(entry.size for entry in entries), length)


def _need_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"--code takes a folder, and {folder} is {'a file' if folder.exists() else 'not there'}")


def _unreadable(error: OSError, folder: Path) -> UserError:
    return UserError(f"{error.filename or folder} cannot be packed: {error.strerror or error}")


def copy_packed(folder: Path, target: Path) -> None:
    """Copy the files and links of a folder that a pack would contain into an empty folder.

    Raises:
        UserError: see `packed`.
    """
    _need_folder(folder)
    for entry in _select(folder):
        copy = target / entry.name
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            if entry.target is None:
                shutil.copy(entry.path, copy)
            else:
                copy.symlink_to(entry.target)
        except OSError as error:
            raise _unreadable(error, folder) from error


def _select(folder: Path) -> list[_Entry]:
    """Select the files to pack.

    Raises:
        UserError: see `packed`.
    """
    entries: list[_Entry] = []
    sizes: list[tuple[int, str]] = []
    total, top, deadline = 0, folder.resolve(), None
    for entry in _walk(folder, "", _above(top), top):
        total += entry.size
        sizes.append((entry.size, entry.name))
        entries.append(entry)
        if total > MAX_BYTES or len(entries) > MAX_FILES:
            deadline = deadline or time.monotonic() + MORE_SECONDS
            if time.monotonic() > deadline:
                break
    if deadline is not None:
        raise _too_large(folder, f"{size(total)} in {count_noun(len(entries), 'file')} or more", sizes)
    return entries


def _too_large(folder: Path, measured: str, sizes: list[tuple[int, str]]) -> UserError:
    largest = ", ".join(f"{name} ({size(count)})" for count, name in heapq.nlargest(MAX_LISTED, sizes))
    return UserError(
        f"{folder} is too large for --code: {measured}, and the limits are {size(MAX_PACKED_BYTES)} packed, "
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
    """Return the target of a link, relative to the link's folder."""
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
    """Return the ignore rules of the folders above, if the folder is part of a git repository."""
    repository = next((folder for folder in (top, *top.parents) if (folder / ".git").exists()), None)
    if repository is None or repository == top:
        return ()
    between = [folder for folder in reversed(top.parents) if folder.is_relative_to(repository)]
    return tuple(
        (f"//{top.relative_to(folder).as_posix()}/", _rules(folder / IGNORE))
        for folder in between
        if (folder / IGNORE).is_file()
    )


def _is_ignored(name: str, ignores: Ignores) -> bool:
    """Whether the nearest rules that match a name exclude it, as in git."""
    for place, rules in reversed(ignores):
        relative = place[2:] + name if place.startswith("//") else name.removeprefix(place)
        if (decision := rules.check_file(relative).include) is not None:
            return decision
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
            # Since the listing the file may have become a link, or shorter.
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as content:
                info.size = entry.size
                try:
                    tar.addfile(info, content)
                except OSError as error:
                    if error.errno is not None:
                        raise
                    raise UserError(f"{entry.name} has changed while it was packed; try again") from error
