"""Who may look at the page: whoever knows the job's token, or was invited by somebody who does.

The token itself never comes near a browser. `tandem open` shows it to the coordinator and gets an *invitation*, a word
that is good for once and for minutes. The browser trades it for a cookie, whose value is signed with a key that is
made of the token: a coordinator that has restarted knows it again, nothing has to be kept, and nobody can work back to
the token. The cookie opens the page and nothing else.
"""

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable

INVITATION_SECONDS = 600.0
"""How long an invitation is good for; time enough to carry it to another machine."""
SESSION_SECONDS = 7 * 86_400
"""How long a cookie is good for."""
MOST_INVITATIONS = 64
"""That are open at the same time; the oldest is forgotten for one more."""
LONGEST_COOKIE = 200


class Sessions:
    """The invitations and cookies of one job.

    Args:
        token: the job's secret.
        clock: seconds since the epoch.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(token.encode(), b"tandem live page", "sha256")
        self._clock = clock
        self._open: dict[str, float] = {}
        # Browsers send the cookies of all ports of a host to each of them: two jobs on a laptop need two names.
        self.cookie = f"tandem-{hmac.new(self._key, b'name', hashlib.sha256).hexdigest()[:12]}"
        """Name of this job's cookie."""

    def invite(self) -> str:
        """A new invitation."""
        while len(self._open) >= MOST_INVITATIONS:
            del self._open[next(iter(self._open))]
        word = secrets.token_urlsafe(24)
        self._open[_hashed(word)] = self._clock() + INVITATION_SECONDS
        return word

    def accept(self, word: str) -> str | None:
        """The value of a cookie for an invitation, None if it is unknown, used or too old."""
        # Looked up by its hash: how long that takes says nothing about the words there are.
        until = self._open.pop(_hashed(word), None)
        if until is None or until < self._clock():
            return None
        claim = f"{int(self._clock()) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{claim}.{self._signature(claim)}"

    def knows(self, value: str | None) -> bool:
        """Whether a cookie is one of ours, and still good."""
        if not value or len(value) > LONGEST_COOKIE:
            return False
        claim, _, signature = value.rpartition(".")
        if not hmac.compare_digest(signature.encode(errors="replace"), self._signature(claim).encode()):
            return False
        return int(claim.partition(".")[0]) > self._clock()

    def _signature(self, claim: str) -> str:
        return hmac.new(self._key, claim.encode(errors="replace"), hashlib.sha256).hexdigest()


def is_direct(host: str) -> bool:
    """Whether a Host header names this machine, or an address, and not a name that somebody else may have pointed here.

    A page elsewhere can have its own name lead to 127.0.0.1 (DNS rebinding), and its scripts would then be of the same
    origin as this page. They cannot do that with an address.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hashed(word: str) -> str:
    return hashlib.sha256(word.encode(errors="replace")).hexdigest()
