"""Requests to a hub through the clients of Hugging Face: retries, and reasons of failures.

The hub's address, the token and the cache are settings of these clients: HF_ENDPOINT, HF_TOKEN and HF_HOME. On a
cluster they come from a Secret and the pod's template.
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

RETRY_SECONDS = (1.0, 4.0)
"""Pauses before a second and a third attempt, in seconds."""
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
"""HTTP status codes after which a retry may succeed."""
MAX_ERROR_LENGTH = 300
"""Maximum length of a library's error in a message, in characters."""
FORBIDDEN = {401, 403}
NETWORK = ("ConnectionError", "TimeoutError", "TransportError", "ConnectTimeout", "ReadTimeout")
"""Names of transports' errors, and of their base classes."""
ABSENT = ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError", "DatasetNotFoundError")


def with_retries(description: str, ask: Callable[[], T]) -> T:
    """Call a client, and again if the hub is busy: the clients retry by themselves for single files only.

    Args:
        description: name of what is requested, for the log.
        ask: the call.
    """
    for wait in (*RETRY_SECONDS, None):
        try:
            return ask()
        except Exception as error:  # the clients have no common base class
            if wait is None or not any(_status(link) in TRANSIENT_STATUS for link in _chain(error)):
                raise
            log.warning("hub=%s asked again in %.0f s: %s", description, wait, first_line(error))
            time.sleep(wait)
    raise AssertionError


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, and no branch or tag."""
    return re.fullmatch("[0-9a-f]{40}", revision or "") is not None


def failure_reason(error: BaseException) -> str:
    """Return the reason why a hub did not provide something; empty if the error is another one, such as an error in the
    data."""
    kinds = {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}
    status = next((code for link in _chain(error) if (code := _status(link)) is not None), None)
    if not kinds.isdisjoint(ABSENT) or status in FORBIDDEN:
        token = os.environ.get("HF_TOKEN")
        rights = "the token in HF_TOKEN may not read it" if token else "it needs a token, in HF_TOKEN"
        return f"the hub does not have it, not at this revision, or {rights}"
    if status in TRANSIENT_STATUS:
        return f"the hub answered {status}, again and again"
    return "the hub could not be asked for it" if _is_out_of_reach(error) else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return one_line(text)[:MAX_ERROR_LENGTH]


def _is_out_of_reach(error: BaseException) -> bool:
    kinds = {kind.__name__ for link in _chain(error) for kind in type(link).__mro__}
    is_unreachable = any(
        "couldn't connect" in str(link).lower() or "couldn't reach" in str(link).lower() for link in _chain(error)
    )
    return is_unreachable or "LocalEntryNotFoundError" in kinds or not kinds.isdisjoint(NETWORK) or _is_offline(error)


def _is_offline(error: BaseException) -> bool:
    """Whether offline mode is on (`HF_HUB_OFFLINE`)."""
    return any("Offline" in kind.__name__ for link in _chain(error) for kind in type(link).__mro__)


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes."""
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
