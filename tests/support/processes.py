"""Processes that tests start, and what they ask of processes that are not their children."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from tandem_launcher.local.guardian import MARK
from tests.support import ROOT
from tests.support.zygote import Forked

TANDEM = str(Path(sys.executable).with_name("tandem"))
"""The command, as it was installed beside this Python."""
_NOT_HANDED_ON = ("FORCE_COLOR", "COLUMNS", MARK)
"""What a shell around the tests may have set, and what those of `tandem run` carry."""
_OF_THE_START = ("PYTHON", "LC_", "LANG")
"""Variables that Python reads when it starts."""
SECONDS = 120.0


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' own environment, without what changes how a command prints and what was run before, and with some more
    variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    return {**kept, "XDG_STATE_HOME": os.devnull, **(variables or {})}


def tandem(
    *words: str | Path,
    cwd: Path = ROOT,
    stdin: bytes = b"",
    variables: Mapping[str, str] | None = None,
    before: str = "",
    file_bytes: int | None = None,
    in_front: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """One call of the command line, to its end: forked where nothing has to be another way from its first moment on.

    Args:
        stdin: what it reads there.
        variables: more of its environment.
        before: Python that runs in its process before the command does.
        file_bytes: no file may become larger than this, as if the disk were full.
        in_front: a command that calls it, such as `tests.support.rights.AS_ANY_USER`.
    """
    all_variables = environment(variables)
    if before or file_bytes is not None or in_front or any(name.startswith(_OF_THE_START) for name in variables or {}):
        return _started(words, cwd, stdin, all_variables, before, file_bytes, in_front)
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        words_of_it = [str(word) for word in words]
        forked = Forked("tandem_cli.main", words_of_it, all_variables, output, errors=errors, stdin=given, cwd=cwd)
        try:
            code = forked.wait(SECONDS)
        except subprocess.TimeoutExpired:
            forked.kill()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, code, output.read().decode(), errors.read().decode())


def _started(
    words: Sequence[str | Path],
    cwd: Path,
    stdin: bytes,
    variables: Mapping[str, str],
    before: str,
    file_bytes: int | None,
    in_front: Sequence[str],
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    program = [sys.executable, "-c", f"{before}\nfrom tandem_cli.main import main; main()"] if before else [TANDEM]
    result = subprocess.run(
        [*in_front, *program, *words],
        cwd=cwd,
        env=variables,
        input=stdin,
        capture_output=True,
        timeout=SECONDS,
        preexec_fn=limit,
    )
    # Not `text=True`, which would hide a carriage return.
    return subprocess.CompletedProcess(words, result.returncode, result.stdout.decode(), result.stderr.decode())


def alive(pid: int) -> bool:
    """Whether it runs: a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
