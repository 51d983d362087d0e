"""Pushes an exported folder to a repository of a hub, through the client huggingface_hub.

Where the hub is, which token is used and how large files travel are that client's own settings: HF_ENDPOINT; HF_TOKEN,
or what `hf auth login` has stored; HF_HUB_DISABLE_XET. A token is never a word of a command, which other users see.

All files are one commit, so nobody finds half of them. The client retries single requests; what fails for longer is
begun anew, after waits that double. That repeats nothing: the hub keeps large files by their digest, and a commit that
arrived, though its answer did not, leaves nothing to commit.
"""

import importlib.util
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.distribution import install
from tandem.errors import UserError
from tandem.formatting import one_line

MAIN = "main"
ATTEMPTS = 5
FIRST_WAIT = 2.0
"""Seconds before the second attempt; each further wait is twice as long, and up to a quarter longer by chance."""
PASSING = {408, 429, 500, 502, 503, 504}
"""Status codes that another attempt may not get."""
TRANSPORTS = {"httpx2", "httpx", "httpcore2", "httpcore", "requests"}
"""Libraries whose errors are of the network: versions of the client use different ones."""
MAX_WHY = 300
T = TypeVar("T")


@dataclass(frozen=True)
class Destination:
    """Where a model goes."""

    repo: str
    """Its id on the hub: owner and name."""
    revision: str = MAIN
    """The branch, which is made if it is not there."""
    private: bool = False
    """Whether only its owner may see it."""


def files_of(folder: Path) -> list[tuple[str, int]]:
    """Name and bytes of each file to push."""
    return sorted((path.name, path.stat().st_size) for path in folder.iterdir())


def refuse_without_client() -> None:
    """
    Raises:
        UserError: the client is not installed.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(f"tandem checkpoints push needs huggingface_hub; install it with: {install('language')}")


def push(
    folder: Path, to: Destination, message: str, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> str:
    """Push all files of a folder as one commit.

    Args:
        message: of the commit.
        say: what happens, line by line.

    Returns:
        The commit's address.

    Raises:
        UserError: the hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(library_name="tandem")

    def attempt(what: Callable[[], T]) -> T:
        return _tried(what, to, say, sleep)

    attempt(lambda: api.create_repo(to.repo, private=to.private or None, exist_ok=True))
    if to.private and not attempt(lambda: api.model_info(to.repo)).private:
        raise UserError(f"{to.repo} is there already, and everybody can see it; nothing was pushed")
    if to.revision != MAIN:
        attempt(lambda: api.create_branch(to.repo, branch=to.revision, exist_ok=True))
    done = attempt(
        lambda: api.upload_folder(repo_id=to.repo, folder_path=folder, revision=to.revision, commit_message=message)
    )
    return str(done.commit_url)


def _tried(what: Callable[[], T], to: Destination, say: Callable[[str], None], sleep: Callable[[float], None]) -> T:
    from huggingface_hub.errors import HFValidationError

    wait = FIRST_WAIT
    for number in range(1, ATTEMPTS + 1):
        try:
            return what()
        except HFValidationError as error:
            raise UserError(f"{to.repo} is no id of a repository, such as me/model: {_first_line(error)}") from error
        except Exception as error:  # the client's errors have no common class, and those of its transports none at all
            cause = _cause(error)
            if number == ATTEMPTS or not _may_pass(cause):
                raise UserError(_refused(cause, to, number)) from error
            pause = max(_asked_to_wait(cause), wait * random.uniform(1, 1.25))  # noqa: S311 - spreads out clients
            say(f"attempt {number} of {ATTEMPTS} failed ({_first_line(cause)}); the next in {pause:.0f} s")
            sleep(pause)
            wait *= 2
    raise AssertionError


def _cause(error: BaseException) -> BaseException:
    """The hub's answer, or the failure of the network, that an error comes from; else its first cause."""
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
    found = getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    return _is_of_network(error) if status is None else status in PASSING


def _asked_to_wait(error: BaseException) -> float:
    """Seconds that the hub asks to wait for, at most five minutes."""
    text = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(300.0, float(text)) if text.isdecimal() else 0.0


def _refused(error: BaseException, to: Destination, attempts: int) -> str:
    why = _first_line(error)
    match _status(error):
        case 401:
            return (
                f"the hub knows no token that may write {to.repo} ({why}). Set HF_TOKEN, on a cluster from a Secret, "
                "or run `hf auth login`"
            )
        case 403:
            return f"the token may not write {to.repo} ({why}). It needs the right to write there"
        case 404:
            return f"the hub has no {to.repo} that this token can see ({why})"
        case None if _is_of_network(error):
            return f"the hub could not be reached, in {attempts} attempts: {why}"
        case None:
            return f"{to.repo} could not be pushed: {why}"
        case status:
            return f"the hub answered {status}{f', in {attempts} attempts' if attempts > 1 else ''}: {why}"


def _first_line(error: BaseException) -> str:
    return one_line(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))[:MAX_WHY]
