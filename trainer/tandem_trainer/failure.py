"""The failure of a rank, as reported to its agent: the error, its place, and the traceback of the script.

torchrun tells its rendezvous that a rank has failed, and not how. So a rank that ends by an error leaves a record in
the memory that it shares with its agent (tandem_trainer.pulse), and the agent sends the first one of its ranks to the
coordinator, which finds the first one of all. A rank that was killed leaves none; its exit status says what there is to
say.
"""

import json
import re
import time
import traceback
from types import TracebackType
from typing import Any

from tandem.exitcode import ExitCode
from tandem.formatting import number, one_line
from tandem.model import finite
from tandem.protocol import MAX_ERROR, MAX_TRACEBACK, MAX_WHERE, Failure
from tandem.rundir.durable import may_pass


class ConfigurationError(Exception):
    """The job cannot work as it is written; says what to change. Never retried."""

    reason = "ConfigurationError"
    """What the job's status calls it."""


class UnusableInput(ConfigurationError):  # noqa: N818 - it is what is the case
    """Data or weights that the job names are not there, may not be read, or are not what they should be.

    Once a generation has trained with them, only the process that finds them so is at fault, or its machine.
    """


class MicroBatchHalved(Exception):  # noqa: N818 - it says what happened
    """A micro-batch did not fit into memory, and the next generation takes a smaller one."""


class DoesNotFit(Exception):  # noqa: N818 - it says what is the case
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


GLOO = re.compile(r"^\[[^\]]*\bgloo/[^\]]*:\d+\]|^Gloo connectFullMesh failed")
"""How what gloo says begins, with the place in its source: it has no type of exception. Read off torch 2.15 with peers
that were killed, had ended or were late, in each kind of collective. NCCL and the store have one, `DistError`."""
DISTRIBUTED = "torch.distributed"
DEVICES = ("AcceleratorError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""Names of torch's errors that tell of a device or of a network."""
CONSEQUENCES = {ExitCode.SUPERSEDED, ExitCode.PREEMPTED, ExitCode.PEER_LOST}
"""Exit codes whose cause is elsewhere, where Tandem has announced them."""


def record(error: BaseException, frames: TracebackType | None, most_bytes: int) -> bytes:
    """What is left for the agent: JSON of at most `most_bytes` bytes.

    Args:
        frames: the traceback, from the first frame that is worth showing.
    """
    ours = _is_ours(error)
    text = "" if ours else "".join(traceback.format_exception(type(error), error, frames))
    stack = [] if ours else traceback.extract_tb(frames)
    last = stack[-1] if stack else None
    content: dict[str, Any] = {
        "at": time.monotonic(),
        "error": _sentence(error)[:MAX_ERROR],
        "where": f"{last.filename}:{last.lineno}, in {last.name}"[-MAX_WHERE:] if last else "",
        "consequence": is_of_peers(error),
        "passing": _may_pass(error),
        "traceback": text[-MAX_TRACEBACK:],
    }
    while len(encoded := json.dumps(content, ensure_ascii=False).encode(errors="replace")) > most_bytes:
        shown = content["traceback"]
        content["traceback"] = shown[len(shown) // 4 + 1 :]
    return encoded


def read(content: bytes | None, rank: int, code: int, ended_at: float, announced: bool = True) -> tuple[float, Failure]:
    """When a rank failed, on the monotonic clock, and how.

    Args:
        content: what it has left, if it has.
        code: its exit code, or minus the signal that killed it.
        ended_at: when its end was seen.
        announced: whether Tandem, in the rank, has announced the code, so that it means what Tandem's codes mean.
    """
    try:
        said = json.loads(content or b"{}")
    except ValueError:
        said = {}
    said = said if isinstance(said, dict) else {}
    at = finite(said.get("at"))
    failure = Failure(
        rank=rank,
        code=code,
        error=str(said.get("error", ""))[:MAX_ERROR],
        where=str(said.get("where", ""))[-MAX_WHERE:],
        traceback=str(said.get("traceback", ""))[-MAX_TRACEBACK:],
        announced=announced,
        consequence=(announced and code in CONSEQUENCES) or bool(said.get("consequence")),
        passing=bool(said.get("passing")),
    )
    return (ended_at if at is None else min(at, ended_at)), failure


def aged(failure: tuple[float, Failure] | None) -> Failure | None:
    """As it is sent: with how long ago it was, for no two machines have the same monotonic clock."""
    if failure is None:
        return None
    return failure[1].model_copy(update={"seconds_ago": max(0.0, time.monotonic() - failure[0])})


def is_of_peers(error: BaseException | None) -> bool:
    """Whether a collective or the store has failed, also if the script has made another error of it."""
    while error is not None:
        if (DISTRIBUTED, "DistError") in ((kind.__module__, kind.__name__) for kind in type(error).__mro__):
            return True
        if isinstance(error, RuntimeError) and GLOO.match(str(error)):
            return True
        error = error.__cause__
    return False


def _sentence(error: BaseException) -> str:
    words = one_line(next(iter(str(error).splitlines()), ""))
    if words and _is_ours(error):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _is_ours(error: BaseException) -> bool:
    """Whether it is a sentence of Tandem's, which needs neither place nor traceback."""
    return type(error).__module__.startswith("tandem_trainer.")


def _may_pass(error: BaseException) -> bool:
    if _is_ours(error):
        return not isinstance(error, ConfigurationError | DoesNotFit | StoppedEarly | EndedAlone)
    if type(error) is OSError and error.errno is None:
        # A library's word for a file that it cannot use, such as a broken picture, or for a network behind it.
        return error.__cause__ is not None and _may_pass(error.__cause__)
    if isinstance(error, OSError):
        return may_pass(error)
    return any(kind.__name__ in DEVICES for kind in _kinds(error)) or "CUDA error" in str(error)


def _kinds(error: BaseException) -> tuple[type, ...]:
    return type(error).__mro__
