"""The code of a job: a packed folder in the run directory, and the working folder of its processes.

`tandem run --code DIR` and `tandem submit --code DIR` pack a folder (tandem_cli.packing). The job names the pack by the
SHA-256 of its bytes (`trainer.code`), so a pack never changes: other code has another digest, and another file. Every
worker and evaluator waits for the pack, verifies its bytes, unpacks it into a folder of its own and works there
(docs/code.md).

**Unpacking does not trust the content.** The author of the job's manifest chose the digest, but a mistake must not fill
a node or write outside the folder. The size of the stream is limited while it is unpacked. Anything but a file or a
link is refused. Links are created after all files, so that no file is written through one, and every link must point
inside the folder.
"""

import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tandem.formatting import number, one_line, size
from tandem.rundir.durable import commit_file, open_regular, temporary_beside
from tandem.rundir.layout import RunDir

MAX_PACKED_BYTES = 64 * 2**20
"""Maximum size of a pack: it is sent to the cluster through `kubectl port-forward`."""
MAX_BYTES = 256 * 2**20
"""Maximum size of all its files together."""
MAX_FILES = 20_000
"""Maximum number of files and links."""
REQUIREMENTS = "requirements.txt"
"""The file in the folder whose packages are installed for the job."""
LogEvent = Callable[..., None]
"""Logs one event, named by the first argument, as a line with key=value fields."""
POLL_SECONDS = 0.1
FIRST_MESSAGE_SECONDS, MESSAGE_SECONDS = 2.0, 60.0
"""Delay of the first message of `wait_for_pack`, and interval of the further ones."""
_HEADERS = MAX_FILES * 4096
"""Bytes of a tar besides the content of its files: a header, padding, and a long name for each."""
_CHUNK = 2**20
_FOLDER = "tandem-code-"
"""Prefix of the names of folders with unpacked code."""


class CodeError(Exception):
    """The code cannot be used; the message is a sentence without its full stop. A retry would not help."""


class JobEnded(Exception):  # noqa: N818 - a state of the job
    """The job has ended while this process waited for its code."""


@dataclass(frozen=True)
class Code:
    """The folders of a job's code on this machine."""

    folder: Path
    """The unpacked folder."""
    packages: tuple[Path, ...] = ()
    """Folders of the packages in its requirements.txt."""
    programs: tuple[Path, ...] = ()
    """Folders of these packages' commands."""

    @property
    def places(self) -> list[str]:
        """Folders that Python searches for modules before its own."""
        return [str(self.folder), *map(str, self.packages)]

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Changed environment variables for processes that run the code."""
        variables = {"PYTHONPATH": os.pathsep.join([*self.places, *filter(None, [environment.get("PYTHONPATH")])])}
        if self.programs:
            # Last: Tandem was tested with the commands of the image.
            variables["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), *map(str, self.programs)])
        return variables

    def enter(self) -> None:
        """Use it as the working folder of this process and of all processes it starts."""
        os.chdir(self.folder)
        os.environ.update(self.variables(os.environ))


def environment_without_code(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Tandem process that is started from within the code, without its folder: the user's files
    must not replace modules that the process imports. The packages stay."""
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    retained = [place for place in places if not Path(place).name.lstrip(".").startswith(_FOLDER)]
    return {**environment, "PYTHONPATH": os.pathsep.join(retained)}


def digest_of(file: BinaryIO) -> str:
    """The digest of a pack, read to its end."""
    digest = hashlib.sha256()
    while content := file.read(_CHUNK):
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def store_pack(run_dir: RunDir, digest: str, pack: Path) -> None:
    """Copy a pack into a run directory, unless it is there already.

    Raises:
        OSError: it cannot be written.
    """
    final = run_dir.pack(digest)
    if final.exists():
        return
    final.parent.mkdir(exist_ok=True)
    temporary = temporary_beside(final)
    try:
        shutil.copyfile(pack, temporary)
        commit_file(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def wait_for_pack(run_dir: RunDir, digest: str, log_event: LogEvent) -> Path:
    """Wait for the pack.

    Raises:
        JobEnded: the job has ended meanwhile.
    """
    pack, started = run_dir.pack(digest), time.monotonic()
    due = started + FIRST_MESSAGE_SECONDS
    while not pack.exists():
        if run_dir.ended():
            raise JobEnded
        if (now := time.monotonic()) >= due:
            due = now + MESSAGE_SECONDS
            log_event("waits-for-code", digest=digest, seconds=round(now - started))
        time.sleep(POLL_SECONDS)
    return pack


def unpacked(pack: Path, digest: str) -> Path:
    """The folder with a pack's content on this machine or pod, unpacked by the first process that calls this.

    Raises:
        CodeError: it is damaged, or contains a forbidden entry.
        OSError: it cannot be read or written.
    """
    name = f"{_FOLDER}{digest.removeprefix('sha256:')[:32]}"
    final = Path(tempfile.gettempdir(), name)
    if _is_private(final):
        return final
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-"))
    try:
        with open_regular(pack) as file:
            unpack(file, digest, temporary)
        try:
            temporary.rename(final)
        except OSError:
            if _is_private(final):  # another process of this pod was faster
                return final
            if final.exists() or final.is_symlink():  # another user's: never work in it
                return temporary
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    else:
        return final
    finally:
        if _is_private(final):
            shutil.rmtree(temporary, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user, and nobody else may write into it."""
    try:
        facts = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def unpack(file: BinaryIO, digest: str, folder: Path) -> int:
    """Unpack a pack into an empty folder. Returns its number of files and links.

    Raises:
        CodeError: its bytes do not match the digest, or it contains a forbidden entry.
        OSError: it cannot be read or written.
    """
    packed = os.fstat(file.fileno()).st_size
    if packed > MAX_PACKED_BYTES:
        raise CodeError(f"the code {digest} has {size(packed)} packed, and the maximum is {size(MAX_PACKED_BYTES)}")
    if (actual := digest_of(file)) != digest:
        raise CodeError(
            f"the code {digest} is damaged on the volume: its bytes have the digest {actual}; delete the pack in "
            "the folder code of the run directory, and send it again"
        )
    file.seek(0)
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            return _extract(_Bounded(stream, digest), digest, folder)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise CodeError(f"the code {digest} holds one name twice, in {one_line(Path(error.filename).name)}") from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CodeError(f"the code {digest} is not a pack: {one_line(str(error))}") from error


class _Bounded(io.RawIOBase):
    """A stream that raises an error when it becomes too long: a kilobyte may unpack to a gigabyte."""

    def __init__(self, stream: gzip.GzipFile, digest: str) -> None:
        self._stream, self._digest, self._remaining_bytes = stream, digest, MAX_BYTES + _HEADERS

    def read(self, count: int = -1) -> bytes:
        content = self._stream.read(self._remaining_bytes + 1 if count < 0 else min(count, self._remaining_bytes + 1))
        self._remaining_bytes -= len(content)
        if self._remaining_bytes < 0:
            raise _too_large(self._digest)
        return content


def _too_large(digest: str) -> CodeError:
    return CodeError(
        f"the code {digest} unpacks to more than {size(MAX_BYTES)} or {number(MAX_FILES)} files; pack less"
    )


def _extract(stream: io.RawIOBase, digest: str, folder: Path) -> int:
    count = total = 0
    links: dict[str, str] = {}
    names: set[str] = set()
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            count += 1
            total += max(0, member.size)
            if count > MAX_FILES or total > MAX_BYTES:
                raise _too_large(digest)
            if not _is_inside(member.name):
                raise CodeError(f"the code {digest} holds {one_line(member.name)}, which is outside of its folder")
            names.add(member.name)
            if member.issym():
                links[member.name] = member.linkname
            elif member.isreg() and not member.issparse():
                _write(tar, member, folder / member.name)
            else:
                raise CodeError(f"the code {digest} holds {one_line(member.name)}, which is neither a file nor a link")
    # No entry may be below a link: its target is not known to be inside.
    for name in names:
        if behind := next((str(parent) for parent in PurePosixPath(name).parents if str(parent) in links), ""):
            raise CodeError(f"the code {digest} holds {one_line(name)}, which is behind the link {one_line(behind)}")
    for name, target in links.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    top = folder.resolve()
    for name in links:
        try:
            is_inside = (folder / name).resolve().is_relative_to(top)
        except (OSError, RuntimeError):
            raise CodeError(f"the code {digest} holds the link {one_line(name)}, which leads to itself") from None
        if not is_inside:
            raise CodeError(f"the code {digest} holds the link {one_line(name)}, which leads out of its folder")
    return count


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write one file. tarfile's extraction filters came with Python 3.11.4, and images have older versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o755 if member.mode & 0o100 else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    content = tar.extractfile(member)
    assert content is not None
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, _CHUNK)


def _is_inside(name: str) -> bool:
    return bool(name) and not name.startswith("/") and os.path.normpath(name) == name and name.split("/")[0] != ".."
