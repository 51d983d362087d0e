"""What is asked of a hub through the clients of Hugging Face: once more where that may help, and why it failed.

Where the hub is, which token is used and where its files are kept are those clients' own settings: HF_ENDPOINT,
HF_TOKEN and HF_HOME. On a cluster they come from a Secret and the pod's template.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tandem.formatting import one_line

log = logging.getLogger(__name__)
T = TypeVar("T")

WAITS = (1.0, 4.0)
"""Seconds before a second and a third attempt."""
PASSING = {408, 429, 500, 502, 503, 504}
"""Answers that may be others later."""
MAX_WHY = 300
"""Characters of a library's error that a message quotes."""
REFUSED = {401, 403}
NETWORK = ("ConnectionError", "TimeoutError", "TransportError", "ConnectTimeout", "ReadTimeout")
"""Names of errors of transports, and of their bases."""
ABSENT = ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError", "DatasetNotFoundError")


def asked(what: str, ask: Callable[[], T]) -> T:
    """What a client returns. Asks again if the hub is busy: the clients do so by themselves for single files alone.

    Args:
        what: is asked for, for the log.
    """
    for wait in (*WAITS, None):
        try:
            return ask()
        except Exception as error:  # the clients have no common one
            if wait is None or not _may_pass(error):
                raise
            log.warning("hub=%s asked again in %.0f s: %s", what, wait, first_line(error))
            time.sleep(wait)
    raise AssertionError


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, and no branch or tag."""
    return re.fullmatch("[0-9a-f]{40}", revision or "") is not None


def why(error: BaseException) -> str:
    """What kept a hub from giving something, in words; empty if it is something else, such as what it gave."""
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    status = next((found for one in _chain(error) if (found := _status(one)) is not None), None)
    if not kinds.isdisjoint(ABSENT) or status in REFUSED:
        token = os.environ.get("HF_TOKEN")
        rights = "the token in HF_TOKEN may not read it" if token else "it needs a token, in HF_TOKEN"
        return f"the hub does not have it, not at this revision, or {rights}"
    if status in PASSING:
        return f"the hub answered {status}, again and again"
    return "the hub could not be asked for it" if _is_out_of_reach(error) else ""


def first_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    words = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return one_line(words)[:MAX_WHY]


def _may_pass(error: BaseException) -> bool:
    return any(_status(one) in PASSING for one in _chain(error))


def _is_out_of_reach(error: BaseException) -> bool:
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    words = any("couldn't connect" in str(one).lower() or "couldn't reach" in str(one).lower() for one in _chain(error))
    return words or "LocalEntryNotFoundError" in kinds or not kinds.isdisjoint(NETWORK) or _is_offline(error)


def _is_offline(error: BaseException) -> bool:
    """Whether offline mode is on (`HF_HUB_OFFLINE`)."""
    return any("Offline" in kind.__name__ for one in _chain(error) for kind in type(one).__mro__)


def _status(error: BaseException) -> int | None:
    found = getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error with all that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
