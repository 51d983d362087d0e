"""Pushes an exported folder to a repository of a hub, through the client huggingface_hub.

The hub's address, the token and the upload method are the client's own settings: HF_ENDPOINT; HF_TOKEN, or the token
stored by `hf auth login`; HF_HUB_DISABLE_XET. A token is never an argument of a command, which other users can see.

All files are one commit, so nobody sees a part of them. The client retries single requests; an operation that fails for
longer is started again, after waits that double. That uploads nothing twice: the hub stores large files by their
digest, and a commit that arrived although its response did not leaves nothing to commit.
"""

import importlib.util
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.processes.distribution import install_command

MAIN = "main"
ATTEMPTS = 5
"""Attempts of an operation before it fails."""
FIRST_WAIT = 2.0
"""Seconds before the second attempt; each further wait is twice as long, plus up to a quarter at random."""
PASSING = {408, 429, 500, 502, 503, 504}
"""Status codes that another attempt may not get."""
TRANSPORTS = {"httpx2", "httpx", "httpcore2", "httpcore", "requests"}
"""Modules whose errors are network errors: versions of the client use different ones."""
MAX_REASON_LENGTH = 300
"""Length of an error's text, in characters."""
T = TypeVar("T")


@dataclass(frozen=True)
class Destination:
    """Repository and branch to push to."""

    repo: str
    """Id of the repository: owner and name."""
    revision: str = MAIN
    """The branch; it is created if missing."""
    private: bool = False
    """Whether only its owner can see it."""


def files_of(folder: Path) -> list[tuple[str, int]]:
    """List the files to push: name and size in bytes."""
    return sorted((path.name, path.stat().st_size) for path in folder.iterdir())


def refuse_without_client() -> None:
    """Check that the client is installed.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(
            f"tandem checkpoints push needs huggingface_hub; install it with: {install_command('language')}"
        )


def push(
    folder: Path,
    destination: Destination,
    message: str,
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Push all files of a folder as one commit.

    Args:
        message: commit message.
        report: receives progress, line by line.

    Returns:
        URL of the commit.

    Raises:
        UserError: the hub refuses the push, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="tandem")

    def attempt(operation: Callable[[], T]) -> T:
        return _with_retries(operation, destination, report, sleep)

    attempt(lambda: api.create_repo(destination.repo, private=destination.private or None, exist_ok=True))
    # An existing repository keeps its visibility, and the push would publish the weights.
    if destination.private and not attempt(lambda: api.model_info(destination.repo)).private:
        raise UserError(f"{destination.repo} already exists and is public; nothing was pushed")
    if destination.revision != MAIN:
        attempt(lambda: api.create_branch(destination.repo, branch=destination.revision, exist_ok=True))
    done = attempt(
        lambda: api.upload_folder(
            repo_id=destination.repo, folder_path=folder, revision=destination.revision, commit_message=message
        )
    )
    return str(done.commit_url)


def _with_retries(
    operation: Callable[[], T], destination: Destination, report: Callable[[str], None], sleep: Callable[[float], None]
) -> T:
    """Run an operation, and retry it after errors that may pass."""
    from huggingface_hub.errors import HFValidationError

    wait = FIRST_WAIT
    for number in range(1, ATTEMPTS + 1):
        try:
            return operation()
        except HFValidationError as error:
            raise UserError(
                f"{destination.repo} is no id of a repository, such as me/model: {_first_line(error)}"
            ) from error
        except Exception as error:  # the client's errors have no common class, and those of its transports none at all
            cause = _cause(error)
            if number == ATTEMPTS or not _may_pass(cause):
                raise UserError(_refused(cause, destination, number)) from error
            pause = max(_retry_after(cause), wait * random.uniform(1, 1.25))  # noqa: S311 - spreads out clients
            report(f"attempt {number} of {ATTEMPTS} failed ({_first_line(cause)}); the next in {pause:.0f} s")
            sleep(pause)
            wait *= 2
    raise AssertionError


def _cause(error: BaseException) -> BaseException:
    """Find the hub's response, or the network error, that caused an error; else its first cause."""
    while _status(error) is None and not _is_of_network(error) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_of_network(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return not isinstance(error, OfflineModeIsEnabled) and (
        isinstance(error, ConnectionError | TimeoutError) or not modules.isdisjoint(TRANSPORTS)
    )


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    return _is_of_network(error) if status is None else status in PASSING


def _retry_after(error: BaseException) -> float:
    """Seconds that the hub's Retry-After header asks for, at most five minutes."""
    text = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(300.0, float(text)) if text.isdecimal() else 0.0


def _refused(error: BaseException, destination: Destination, attempts: int) -> str:
    message = _first_line(error)
    match _status(error):
        case 401:
            return (
                f"the hub has no token with write access to {destination.repo} ({message}). Set HF_TOKEN, on a cluster "
                "from a Secret, or run `hf auth login`"
            )
        case 403:
            return f"the token may not write {destination.repo} ({message}). It needs the right to write there"
        case 404:
            return f"the hub has no {destination.repo} that this token can see ({message})"
        case None if _is_of_network(error):
            return f"the hub could not be reached, in {attempts} attempts: {message}"
        case None:
            return f"{destination.repo} could not be pushed: {message}"
        case status:
            return f"the hub answered {status}{f', in {attempts} attempts' if attempts > 1 else ''}: {message}"


def _first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return one_line(line)[:MAX_REASON_LENGTH]
