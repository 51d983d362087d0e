"""Asks the coordinators of jobs how they are, and tells them how many replicas are wished for."""

import errno
import logging

import aiohttp
from pydantic import ValidationError

from tandem.messages import Target
from tandem.protocol import OURS
from tandem.snapshot import Snapshot

PATIENCE_SECONDS = 3.0
"""A coordinator that is there answers in milliseconds; one that restarts must not hold up other jobs."""

CONNECT_SECONDS = 1.1
"""A node that lives takes a connection or refuses it within milliseconds, however busy its coordinator is. After a
second the kernel asks once more, so that one lost packet does not count."""
MOST_BYTES = 32 * 2**20
"""Of an answer: 10,000 workers of eight ranks make 10 MB."""

log = logging.getLogger("tandem.operator")


class Coordinators:
    """One connection pool to all coordinators. Open it as an asynchronous context."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Coordinators":
        timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS, sock_connect=CONNECT_SECONDS)
        # Each question has a connection of its own: on one that was kept, a dead node looks like a slow answer.
        connector = aiohttp.TCPConnector(limit=256, force_close=True, use_dns_cache=False)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, endpoint: str, token: str) -> Snapshot | None:
        """What a coordinator says, None if it does not answer: that is normal while it starts or moves.

        Raises:
            Unreached: see there.
        """
        assert self._session is not None
        try:
            async with self._session.get(f"http://{endpoint}/status", headers=_headers(token)) as answer:
                if answer.status != 200:
                    log.warning("event=coordinator-refused endpoint=%s status=%d", endpoint, answer.status)
                    return None
                return Snapshot.read_json(await _read(answer))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("event=coordinator-silent endpoint=%s error=%r", endpoint, error)
            if _is_unreached(error):
                raise Unreached(endpoint) from error
            return None
        except (ValidationError, TooMuch) as error:
            log.warning("event=coordinator-unreadable endpoint=%s error=%r", endpoint, str(error).splitlines()[0])
            return None

    async def tell(self, endpoint: str, token: str, replicas: int) -> bool:
        """Tell it how many replicas are wished for; whether it took that."""
        assert self._session is not None
        body = Target(replicas=replicas).dump()
        try:
            async with self._session.post(f"http://{endpoint}/v1/target", json=body, headers=_headers(token)) as answer:
                if answer.status != 200:
                    log.warning("event=target-refused endpoint=%s why=%r", endpoint, await answer.text())
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("event=coordinator-silent endpoint=%s error=%r", endpoint, error)
            return False


class Unreached(Exception):  # noqa: N818 - it is a state of the network
    """Nobody took the connection, and nobody refused it: what a dead node looks like."""


class TooMuch(Exception):  # noqa: N818 - it is what is wrong with the answer
    """An answer is larger than any coordinator's."""


def _is_unreached(error: BaseException) -> bool:
    lost = isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return lost or isinstance(error, aiohttp.ConnectionTimeoutError)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The whole body.

    Raises:
        TooMuch: it has more than MOST_BYTES.
    """
    found = bytearray()
    async for piece in answer.content.iter_any():
        found += piece
        if len(found) > MOST_BYTES:
            raise TooMuch(f"more than {MOST_BYTES} bytes")
    return bytes(found)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", **OURS}
