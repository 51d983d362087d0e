"""The packages that a job's requirements.txt lists: installed once, into the run directory, for all its processes.

The first process that needs them installs them under a lease, with pip, into a folder with a temporary name; a rename
makes it complete. All others wait for that name. The name says what the packages depend on: the file, the Python and
platform, and what is installed already. So a changed requirements.txt is another folder, and images of other
content do not share one.

**What is installed stays as it is.** Every installed package is a constraint for pip. So torch is not downloaded again
because a package needs it, ranks that were forked from a process that has imported torch or numpy find the same ones,
and a requirement that contradicts the image is refused by pip with a sentence instead of two versions in one process.
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

from tandem.code import REQUIREMENTS, Code, CodeError, Over, Say, unpacked, wait_for_pack
from tandem.formatting import one_line
from tandem.launch import UID, module_command
from tandem.rundir.durable import TEMPORARY, commit_folder
from tandem.rundir.layout import RunDir
from tandem.rundir.lease import Lease, acquire

RENEW_SECONDS = 4.0
"""Well within the time of a lease."""
LOOK_SECONDS = 0.3
SAY_SECONDS = 30.0
MAX_QUOTED = 600
"""Characters of pip's last words that a sentence quotes."""
NOT_PINNED = {"tandem-training", "pip", "setuptools", "wheel", "nvidia-ml-py"}
"""Tandem itself, what installs, and what the trainer's image alone has: the evaluator's shares the packages."""
_HELP = "ERROR: ResolutionImpossible"
"""The last line about a conflict; it names nothing."""
_FIXED = "The user requested (constraint) "
"""Begins a line that names one of our constraints as a part of a conflict."""
_SECRET = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password in an address."""
_BY_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~;(].*)?$")
"""A line that names a package of an index, and nothing of the folder."""


def code_of(run_dir: RunDir, digest: str, say: Say) -> Code:
    """The job's code with its packages, as soon as it is there: what a worker or an evaluator works in.

    Raises:
        CodeError, Over, OSError: as `unpacked` and `with_packages`.
    """
    pack = wait_for_pack(run_dir, digest, say)
    began = time.monotonic()
    folder = unpacked(pack, digest)
    say("code", digest=digest, folder=folder, seconds=round(time.monotonic() - began, 3))
    return with_packages(run_dir, folder, digest, say)


def with_packages(run_dir: RunDir, folder: Path, digest: str, say: Say) -> Code:
    """The code in a folder with the packages that it needs, which are installed first if nobody has done so.

    Args:
        digest: of the code.

    Raises:
        CodeError: they cannot be installed.
        Over: the job has failed meanwhile.
        OSError: the run directory cannot be written.
    """
    file = folder / REQUIREMENTS
    if not file.is_file():
        return Code(folder)
    requirements, pins = file.read_bytes(), _installed()
    final = run_dir.packages(_key(requirements, pins, digest))
    due = time.monotonic() + SAY_SECONDS
    while not final.exists():
        if run_dir.ended():
            raise Over
        with suppress(FileNotFoundError):
            if (lease := acquire(final.with_suffix(".lease"))) is not None:
                with lease:
                    if not final.exists():
                        _install(folder, pins, final, lease, say)
                continue
        if time.monotonic() >= due:
            due += SAY_SECONDS
            say("waits-for-packages", folder=final)
        time.sleep(LOOK_SECONDS)
    packages = [place for pattern in ("lib*", "local/lib*") for place in _libraries(final, pattern)]
    programs = [place for place in (final / "bin", final / "local" / "bin") if place.is_dir()]
    return Code(folder, tuple(packages), tuple(programs))


def _libraries(final: Path, pattern: str) -> list[Path]:
    return sorted(
        found for name in ("site-packages", "dist-packages") for found in final.glob(f"{pattern}/python*/{name}")
    )


def _installed() -> str:
    """What is installed, as constraints for pip."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name and name not in NOT_PINNED:
            # The first one is what an import finds.
            found.setdefault(name, one.version)
    return "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


def _key(requirements: bytes, pins: str, digest: str) -> str:
    lines = (line.split("#", 1)[0].strip() for line in requirements.decode(errors="replace").splitlines())
    # A line may name a wheel, or another file of requirements, in the folder: then its content counts, too.
    of_folder = any(line and not _BY_NAME.match(line) for line in lines)
    what = (sys.implementation.cache_tag or "", sysconfig.get_platform(), pins, digest if of_folder else "")
    return hashlib.sha256(requirements + "\0".join(["", *what]).encode()).hexdigest()[:32]


def _install(folder: Path, pins: str, final: Path, lease: Lease, say: Say) -> None:
    if importlib.util.find_spec("pip") is None:
        raise CodeError(
            f"{REQUIREMENTS} needs pip, and the Python of this image has none; add pip to the image, or install there "
            "what the file lists"
        )
    began = time.monotonic()
    say("install", file=REQUIREMENTS, folder=final)
    for leaving in final.parent.glob(f"{TEMPORARY}{final.name}-*"):
        # Of a process that died: we hold the lease.
        shutil.rmtree(leaving, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{final.name}-", dir=final.parent))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="tandem-installed-", suffix=".txt") as constraints:
            constraints.write(pins)
            constraints.flush()
            _run_pip(folder, Path(constraints.name), aside, lease)
        aside.chmod(0o755)
        with suppress(FileExistsError):  # a lease that ran out: another process has done the same
            commit_folder(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    say("installed", file=REQUIREMENTS, seconds=round(time.monotonic() - began, 1))


def _run_pip(folder: Path, constraints: Path, target: Path, lease: Lease) -> None:
    """Run pip and pass on what it says.

    Raises:
        CodeError: it fails; quotes its last error.
    """
    command = module_command("pip", "install", "--prefix", str(target), "-c", str(constraints))
    command += ["-r", REQUIREMENTS, "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--progress-bar=off", *(["--no-cache-dir"] if os.environ.get(UID) else [])]
    variables = {
        name: value for name, value in os.environ.items() if name not in ("PIP_TARGET", "PIP_USER", "PIP_ROOT")
    }
    last = error = ""
    fixed = []
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in _lines(pip.stdout, lease):
                print(f"pip: {line}", file=sys.stderr, flush=True)
                last = line
                if line.startswith("ERROR: ") and not line.startswith(_HELP):
                    error = line
                if line.startswith(_FIXED):
                    fixed.append(line.removeprefix(_FIXED))
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        said = (error or last or f"pip ended with exit code {pip.returncode}").removeprefix("ERROR: ")
        if fixed:
            said += f" What is installed here already stays as it is: {', '.join(fixed)}"
        raise CodeError(f"{REQUIREMENTS} cannot be installed: {one_line(said)[:MAX_QUOTED]}")


def _lines(output: IO[bytes], lease: Lease) -> Iterator[str]:
    """Lines as they come, without passwords, and a lease that is renewed meanwhile. No thread: ranks are forked from
    this process later."""
    rest, renewed = b"", time.monotonic()
    while True:
        ready, _, _ = select.select([output], [], [], RENEW_SECONDS)
        if time.monotonic() - renewed > RENEW_SECONDS:
            renewed = time.monotonic()
            with suppress(OSError):
                lease.renew()
        if not ready:
            continue
        content = os.read(output.fileno(), 2**16)
        *lines, rest = (rest + content).split(b"\n")
        for line in [*lines, *([rest] if not content and rest else [])]:
            if text := _SECRET.sub("****@", line.decode(errors="replace")).strip():
                yield text
        if not content:
            return
