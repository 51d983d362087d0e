"""The failure of a rank, as reported to its agent: the error, its location, and the traceback of the script.

torchrun tells its rendezvous that a rank has failed, and not how. So a rank that ends by an error leaves a record in
the memory that it shares with its agent (tandem_trainer.pulse). The agent sends the first record of its ranks to the
coordinator, which finds the first of all. A rank that was killed leaves none; its exit status is all that is known.
"""

import json
import re
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

from tandem import model
from tandem.formatting import number, one_line
from tandem.model import finite
from tandem.processes.exitcode import ExitCode
from tandem.processes.limits import explain
from tandem.rundir.durable import is_transient
from tandem.wire.protocol import MAX_ERROR_LENGTH, MAX_LOCATION_LENGTH, MAX_TRACEBACK_LENGTH, Failure
from tandem.wire.reasons import CONFIGURATION_ERROR
from tandem.wire.status import CorruptionKind


class ConfigurationError(Exception):
    """The job cannot work as it is written; the message says what to change. Never retried."""

    reason: str = CONFIGURATION_ERROR
    """Reason in the job's status."""


class Disagreement(Exception):  # noqa: N818 - it is what is the case
    """Ranks differ in what all of them should share. Raised on every rank.

    Args:
        message: a sentence.
        ranks: ranks that differ from most.
    """

    corruption: CorruptionKind
    """Kind of the comparison that failed."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class UnusableInput(ConfigurationError):  # noqa: N818 - names the input, not the error
    """Data or weights that the job names are not there, may not be read, or are not what they should be.

    Once a generation has trained with them, the fault lies with the process, or its machine.
    """


class MicroBatchHalved(Exception):  # noqa: N818 - it says what happened
    """A micro-batch did not fit into memory, and the next generation takes a smaller one."""


class SampleTooLarge(Exception):  # noqa: N818 - it says what is wrong
    """A single sample does not fit into memory."""


class StoppedEarly(Exception):  # noqa: N818 - it says what happened
    """A process ended with exit code 0 in the middle of its session."""

    def __init__(self, step: int, total_steps: int | None) -> None:
        steps = f"step {number(step)}" + ("" if total_steps is None else f" of {number(total_steps)}")
        super().__init__(
            f"it ended with exit code 0 after {steps}, before its session had ended; to end a run early, call"
            " session.stop(reason)"
        )


class EndedAlone(Exception):  # noqa: N818 - it says what happened
    """A script ended with exit code 0 while other ranks still needed it."""

    def __init__(self) -> None:
        super().__init__("it ended with exit code 0 while other ranks still worked")


GLOO_MESSAGE = re.compile(r"^\[[^\]]*\bgloo/[^\]]*:\d+\]|^Gloo connectFullMesh failed")
"""Beginning of gloo's error messages, with the location in its source: gloo has no exception type. Read off torch 2.15
with peers that were killed, had ended or were late, in each kind of collective. NCCL and the store have a type,
`DistError`."""
DISTRIBUTED_MODULE = "torch.distributed"
DEVICE_ERRORS = ("AcceleratorError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""Names of torch's errors of a device or a network."""
LIBRARY_FOLDERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parent), str(Path(model.__file__).parent))
"""Folders of Python's own modules and of Tandem's."""
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
"""Names of folders of installed packages."""
TYPED_CODE = ("<ipython-input-", "<stdin>")
"""Beginnings of the names of code that a user has typed. All other names in angle brackets, such as `<string>` and
`<eval_with_key>.1`, are of code that a library has generated."""
COMPILED_SUFFIXES = {".pyx", ".pxi", ".pxd"}
"""Suffixes of Cython's files, which are named relative to the folder in which a package was built."""
COMPILER_FOLDER = "torchinductor_"
"""Beginning of the name of the folder with the code that `torch.compile` generates."""
CONSEQUENCE_CODES = {ExitCode.SUPERSEDED, ExitCode.PREEMPTED, ExitCode.PEER_LOST}
"""Exit codes whose cause is another rank, if Tandem has announced them."""


def record(error: BaseException, frames: TracebackType | None, max_bytes: int) -> bytes:
    """Encode the record for the agent: JSON of at most `max_bytes` bytes.

    Args:
        error: error that ends the rank.
        frames: traceback, from the first frame of the script on.
        max_bytes: maximum size of the record.
    """
    is_own = _is_own_error(error)
    text = "" if is_own else "".join(traceback.format_exception(type(error), error, frames))
    stack = [] if is_own else traceback.extract_tb(frames)
    last = _location(stack)
    content: dict[str, Any] = {
        "at": time.monotonic(),
        "error": _sentence(error)[:MAX_ERROR_LENGTH],
        "where": f"{last.filename}:{last.lineno}, in {last.name}"[-MAX_LOCATION_LENGTH:] if last else "",
        "consequence": is_of_peers(error),
        "passing": _may_pass(error),
        "traceback": text[-MAX_TRACEBACK_LENGTH:],
    }
    # Shorten the traceback until the record fits. Its end matters most.
    while len(encoded := json.dumps(content, ensure_ascii=False).encode(errors="replace")) > max_bytes:
        traceback_text = content["traceback"]
        content["traceback"] = traceback_text[len(traceback_text) // 4 + 1 :]
    return encoded


def read(content: bytes | None, rank: int, code: int, ended_at: float, announced: bool = True) -> tuple[float, Failure]:
    """Decode the failure of a rank. Returns its time on the monotonic clock, and the failure.

    Args:
        content: record that the rank left; None if it left none.
        rank: global rank.
        code: exit code of the rank, or minus the signal that killed it.
        ended_at: time at which the agent saw the end, on the monotonic clock.
        announced: whether Tandem, in the rank, has announced the code, so that the code is one of Tandem's.
    """
    # A script may write to the shared memory, so nothing in the record is trusted.
    try:
        decoded = json.loads(content or b"{}")
    except ValueError:
        decoded = {}
    fields = decoded if isinstance(decoded, dict) else {}
    failed_at = finite(fields.get("at"))
    failure = Failure(
        rank=rank,
        code=code,
        error=str(fields.get("error", ""))[:MAX_ERROR_LENGTH],
        where=str(fields.get("where", ""))[-MAX_LOCATION_LENGTH:],
        traceback=str(fields.get("traceback", ""))[-MAX_TRACEBACK_LENGTH:],
        announced=announced,
        consequence=(announced and code in CONSEQUENCE_CODES) or bool(fields.get("consequence")),
        passing=bool(fields.get("passing")),
    )
    return (ended_at if failed_at is None else min(failed_at, ended_at)), failure


def aged(failure: tuple[float, Failure] | None) -> Failure | None:
    """Return the failure with its age, as it is sent: no two machines have the same monotonic clock."""
    if failure is None:
        return None
    return failure[1].model_copy(update={"seconds_ago": max(0.0, time.monotonic() - failure[0])})


def is_of_peers(error: BaseException | None) -> bool:
    """Whether a collective or the store has failed, including errors that the script has derived from that."""
    while error is not None:
        if (DISTRIBUTED_MODULE, "DistError") in ((kind.__module__, kind.__name__) for kind in type(error).__mro__):
            return True
        if isinstance(error, RuntimeError) and GLOO_MESSAGE.match(str(error)):
            return True
        error = error.__cause__
    return False


def _location(stack: list[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame in the user's own code; the innermost of all where none is."""
    return next((frame for frame in reversed(stack) if not _is_installed(frame.filename)), stack[-1] if stack else None)


def _is_installed(filename: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to Tandem, or was generated by one of them."""
    if filename.startswith("<"):
        return not filename.startswith(TYPED_CODE)
    path = PurePath(filename)
    # Python makes the names of files that it imports or runs absolute.
    is_generated = (
        not path.is_absolute()
        or path.suffix in COMPILED_SUFFIXES
        or any(part.startswith(COMPILER_FOLDER) for part in path.parts)
    )
    in_package = not PACKAGE_FOLDERS.isdisjoint(path.parts)
    return is_generated or in_package or any(path.is_relative_to(folder) for folder in LIBRARY_FOLDERS)


def _sentence(error: BaseException) -> str:
    message = one_line(next(iter(str(error).splitlines()), ""))
    if message and _is_own_error(error):
        return message
    limit = explain(error)
    sentence = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{sentence} ({limit})" if limit else sentence


def _is_own_error(error: BaseException) -> bool:
    """Whether the message is one of Tandem's, which needs neither location nor traceback."""
    return type(error).__module__.startswith("tandem_trainer.")


def _may_pass(error: BaseException) -> bool:
    if _is_own_error(error):
        return not isinstance(error, ConfigurationError | SampleTooLarge | StoppedEarly | EndedAlone)
    if type(error) is OSError and error.errno is None:
        # A library raises it for a file that it cannot use, such as a broken picture, or for a network error behind it.
        return error.__cause__ is not None and _may_pass(error.__cause__)
    if isinstance(error, OSError):
        return is_transient(error)
    return any(kind.__name__ in DEVICE_ERRORS for kind in type(error).__mro__) or "CUDA error" in str(error)
