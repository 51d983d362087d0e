"""The packages of a job's requirements.txt: installed once, into the run directory, for all its processes.

The first process that needs them installs them under a lease, with pip, into a folder with a temporary name; a rename
makes it complete. All others wait for the final name. It is a digest of everything the packages depend on: the file,
the Python version and platform, and the installed packages. So a changed requirements.txt is another folder, and
different images do not share one.

**Installed packages do not change.** Each of them is a constraint for pip. So torch is not downloaded again because a
package needs it, ranks that are forked from a process that has imported torch or numpy find the same versions, and pip
refuses a requirement that contradicts the image with a message, instead of two versions in one process.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from tandem.formatting import one_line
from tandem.processes.launch import UID, module_command
from tandem.rundir.code import REQUIREMENTS, Code, CodeError, JobEnded, LogEvent, unpacked, wait_for_pack
from tandem.rundir.durable import TEMPORARY, commit_folder
from tandem.rundir.layout import RunDir
from tandem.rundir.lease import Lease, acquire

RENEW_SECONDS = 4.0
"""Interval at which the lease is renewed, well below its length."""
POLL_SECONDS = 0.3
MESSAGE_SECONDS = 30.0
MAX_PIP_ERROR_LENGTH = 600
"""Maximum length of pip's error in a message, in characters."""
NOT_PINNED = {"tandem-training", "pip", "setuptools", "wheel", "nvidia-ml-py"}
"""Packages without a constraint: Tandem itself, installers, and packages of the trainer's image alone, for the
evaluator's shares the installed ones."""
_CONFLICT_HELP = "ERROR: ResolutionImpossible"
"""The last line about a conflict; it names no package."""
_CONSTRAINT = "The user requested (constraint) "
"""Start of a line that names one of our constraints in a conflict."""
_SECRET = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password in an address."""
_INDEX_PACKAGE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~;(].*)?$")
"""A line that names a package on an index, and nothing in the folder."""


def prepare_code(run_dir: RunDir, digest: str, log_event: LogEvent) -> Code:
    """Wait for the job's code, unpack it and install its packages: the code that a worker or an evaluator runs.

    Raises:
        CodeError, JobEnded, OSError: as `unpacked` and `with_packages`.
    """
    pack = wait_for_pack(run_dir, digest, log_event)
    started = time.monotonic()
    folder = unpacked(pack, digest)
    log_event("code", digest=digest, folder=folder, seconds=round(time.monotonic() - started, 3))
    return with_packages(run_dir, folder, digest, log_event)


def with_packages(run_dir: RunDir, folder: Path, digest: str, log_event: LogEvent) -> Code:
    """The code in a folder with the packages that it needs, which are installed first if they are missing.

    Args:
        digest: digest of the code.

    Raises:
        CodeError: they cannot be installed.
        JobEnded: the job has ended meanwhile.
        OSError: the run directory cannot be written.
    """
    file = folder / REQUIREMENTS
    if not file.is_file():
        return Code(folder)
    requirements, pins = file.read_bytes(), _installed()
    final = run_dir.packages(_key(requirements, pins, digest))
    due = time.monotonic() + MESSAGE_SECONDS
    while not final.exists():
        if run_dir.ended():
            raise JobEnded
        with suppress(FileNotFoundError):
            if (lease := acquire(final.with_suffix(".lease"))) is not None:
                with lease:
                    if not final.exists():
                        _install(folder, pins, final, lease, log_event)
                continue
        if time.monotonic() >= due:
            due += MESSAGE_SECONDS
            log_event("waits-for-packages", folder=final)
        time.sleep(POLL_SECONDS)
    packages = [place for pattern in ("lib*", "local/lib*") for place in _libraries(final, pattern)]
    programs = [place for place in (final / "bin", final / "local" / "bin") if place.is_dir()]
    return Code(folder, tuple(packages), tuple(programs))


def _libraries(final: Path, pattern: str) -> list[Path]:
    names = ("site-packages", "dist-packages")
    return sorted(folder for name in names for folder in final.glob(f"{pattern}/python*/{name}"))


def _installed() -> str:
    """Installed packages as constraints for pip."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name not in NOT_PINNED:
            # An import finds the first one.
            versions.setdefault(name, distribution.version)
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _key(requirements: bytes, pins: str, digest: str) -> str:
    lines = (line.split("#", 1)[0].strip() for line in requirements.decode(errors="replace").splitlines())
    # A line may name a wheel, or another file of requirements, in the folder: then its content matters, too.
    uses_folder = any(line and not _INDEX_PACKAGE.match(line) for line in lines)
    inputs = (sys.implementation.cache_tag or "", sysconfig.get_platform(), pins, digest if uses_folder else "")
    return hashlib.sha256(requirements + "\0".join(["", *inputs]).encode()).hexdigest()[:32]


def _install(folder: Path, pins: str, final: Path, lease: Lease, log_event: LogEvent) -> None:
    if importlib.util.find_spec("pip") is None:
        raise CodeError(
            f"{REQUIREMENTS} needs pip, and the Python of this image has none; add pip to the image, or install there "
            "what the file lists"
        )
    started = time.monotonic()
    log_event("install", file=REQUIREMENTS, folder=final)
    for abandoned in final.parent.glob(f"{TEMPORARY}{final.name}-*"):
        # We hold the lease, so its process has died.
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{final.name}-", dir=final.parent))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tandem-installed-", suffix=".txt") as constraints:
            constraints.write(pins)
            constraints.flush()
            _run_pip(folder, Path(constraints.name), temporary, lease)
        temporary.chmod(0o755)
        with suppress(FileExistsError):  # a lease that ran out: another process has done the same
            commit_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log_event("installed", file=REQUIREMENTS, seconds=round(time.monotonic() - started, 1))


def _run_pip(folder: Path, constraints: Path, target: Path, lease: Lease) -> None:
    """Run pip and forward its output.

    Raises:
        CodeError: it fails; the message quotes its last error.
    """
    command = module_command("pip", "install", "--prefix", str(target), "-c", str(constraints))
    command += ["-r", REQUIREMENTS, "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--progress-bar=off", *(["--no-cache-dir"] if os.environ.get(UID) else [])]
    variables = {
        name: value for name, value in os.environ.items() if name not in ("PIP_TARGET", "PIP_USER", "PIP_ROOT")
    }
    last = error = ""
    constraints_in_conflict = []
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in _lines(pip.stdout, lease):
                print(f"pip: {line}", file=sys.stderr, flush=True)
                last = line
                if line.startswith("ERROR: ") and not line.startswith(_CONFLICT_HELP):
                    error = line
                if line.startswith(_CONSTRAINT):
                    constraints_in_conflict.append(line.removeprefix(_CONSTRAINT))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        message = (error or last or f"pip ended with exit code {pip.returncode}").removeprefix("ERROR: ")
        if constraints_in_conflict:
            message += f" Packages that are installed already cannot change: {', '.join(constraints_in_conflict)}"
        raise CodeError(f"{REQUIREMENTS} cannot be installed: {one_line(message)[:MAX_PIP_ERROR_LENGTH]}")


def _lines(output: IO[bytes], lease: Lease) -> Iterator[str]:
    """Output lines as they come, without passwords; renews the lease meanwhile. No thread, because ranks are forked
    from this process later."""
    incomplete, renewed = b"", time.monotonic()
    while True:
        ready, _, _ = select.select([output], [], [], RENEW_SECONDS)
        if time.monotonic() - renewed > RENEW_SECONDS:
            renewed = time.monotonic()
            with suppress(OSError):
                lease.renew()
        if not ready:
            continue
        content = os.read(output.fileno(), 2**16)
        *lines, incomplete = (incomplete + content).split(b"\n")
        for line in [*lines, *([incomplete] if not content and incomplete else [])]:
            if text := _SECRET.sub("****@", line.decode(errors="replace")).strip():
                yield text
        if not content:
            return
