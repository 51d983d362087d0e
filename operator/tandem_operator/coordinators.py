"""The client of the coordinators: reads the status of jobs, and sets their desired number of replicas.

A coordinator is asked where the job's own pod is, and by that pod's owner alone it is known to be the job's: whoever
makes a pod with the labels of somebody's coordinator is not asked, and is not given the token.
"""

import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
from pydantic import FailFast, Field, ValidationError

from tandem.job import DistributedTrainingJob
from tandem.launch import endpoint
from tandem.model import Model, Whole
from tandem.protocol import BRIEF, MAX_BRIEF_BYTES, OURS, Target
from tandem.status import GenerationView, Snapshot, Status
from tandem_operator import pods, tokens
from tandem_operator.bounded import cost
from tandem_operator.informer import Key
from tandem_operator.lifecycle import Idle, idle
from tandem_operator.liveness import Liveness
from tandem_operator.observed import Pod

PATIENCE_SECONDS = 3.0
"""A coordinator that is there answers in milliseconds; one that restarts must not hold up other jobs."""

CONNECT_SECONDS = 1.1
"""A node that lives takes a connection or refuses it within milliseconds, however busy its coordinator is. After a
second the kernel asks once more, so that one lost packet does not count."""
MAX_REFUSAL_BYTES = 4_096
"""Of what an error says, and of any other answer."""
MAX_WORDS = 200
MAX_COST = 3_000_000
"""Of an answer, by the estimate of tandem_operator.bounded. That of the largest job is a tenth of it."""
MIN_PATIENCE = 0.5
"""Whoever takes longer to answer is asked apart from the others (tandem_operator.workqueue)."""

log = logging.getLogger("tandem.operator")


class _Heard(Model):
    """What is read of an answer; the rest is passed over."""

    job: Annotated[str, Field(max_length=316)]
    time: float
    status: Status
    finished: Whole | None = None
    reason: Annotated[str, Field(max_length=64)] | None = None
    generations: Annotated[list[GenerationView], Field(max_length=100), FailFast()] = []


class Coordinators:
    """One connection pool to all coordinators. Open it as an asynchronous context."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Coordinators":
        timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS, sock_connect=CONNECT_SECONDS)
        # Each question has a connection of its own: on one that was kept, a dead node looks like a slow answer.
        connector = aiohttp.TCPConnector(limit=256, force_close=True, use_dns_cache=False)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, endpoint: str, token: str) -> Snapshot | None:
        """What a coordinator says, None if it does not answer: that is normal while it starts or moves.

        Raises:
            Unreached, Unreadable: see there.
        """
        try:
            return understood(await self._get(f"http://{endpoint}{BRIEF}", token))
        except UnreadableAnswer as error:
            log.warning("event=coordinator-unreadable endpoint=%s error=%r", endpoint, str(error))
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("event=coordinator-silent endpoint=%s error=%r", endpoint, error)
            if _is_unreached(error):
                raise Unreached(endpoint) from error
            return None

    async def tell(self, endpoint: str, token: str, replicas: int) -> bool:
        """Tell it how many replicas are wished for; whether it took that."""
        assert self._session is not None
        body, headers = Target(replicas=replicas).dump(), _headers(token)
        where = f"http://{endpoint}/v1/target"
        try:
            async with self._session.post(where, json=body, headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    why = (await _read(answer, MAX_REFUSAL_BYTES)).decode(errors="replace")[:MAX_WORDS]
                    log.warning("event=target-refused endpoint=%s why=%r", endpoint, why)
                return answer.status == 200
        except UnreadableAnswer as error:
            log.warning("event=target-refused endpoint=%s why=%r", endpoint, str(error))
            return False
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("event=coordinator-silent endpoint=%s error=%r", endpoint, error)
            return False

    async def _get(self, where: str, token: str) -> bytes:
        """A whole body.

        Raises:
            Unreadable, aiohttp.ClientError, OSError, TimeoutError: see there.
        """
        assert self._session is not None
        async with self._session.get(where, headers=_headers(token), allow_redirects=False) as answer:
            if answer.status != 200:
                raise UnreadableAnswer(f"HTTP status {answer.status}")
            return await _read(answer, MAX_BRIEF_BYTES)


def understood(body: bytes) -> Snapshot:
    """What an answer says.

    Raises:
        Unreadable: it says nothing.
    """
    if cost(body) > MAX_COST:
        raise UnreadableAnswer("it takes more to parse than any coordinator's")
    try:
        heard = _Heard.read_json(body)
    except ValidationError as error:
        raise UnreadableAnswer(f"{error.error_count()} mistakes") from None
    return Snapshot(
        job=heard.job,
        time=heard.time,
        status=heard.status,
        finished=heard.finished,
        reason=heard.reason,
        generations=heard.generations,
    )


class Unreached(Exception):  # noqa: N818 - it is a state of the network
    """Nobody took the connection, and nobody refused it: what a dead node looks like."""


class UnreadableAnswer(Exception):  # noqa: N818 - it is the answer
    """An answer that no coordinator gives. It is larger, means nothing, or is packed, which nobody has asked for. Or it
    is an error, or a redirection, which is not followed."""


def _is_unreached(error: BaseException) -> bool:
    lost = isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return lost or isinstance(error, aiohttp.ConnectionTimeoutError)


async def _read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body.

    Raises:
        Unreadable: it is longer than `most` bytes, or compressed.
    """
    if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise UnreadableAnswer(f"it is packed: {packed[:MAX_WORDS]}")
    found = bytearray()
    async for piece in answer.content.iter_any():
        found += piece
        if len(found) > most:
            raise UnreadableAnswer(f"more than {most} bytes")
    return bytes(found)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity", **OURS}


@dataclass
class _Partner:
    """The coordinator of one job. All of it can be lost."""

    uid: str
    """Of the job."""
    endpoint: str = ""
    waited: float = 0.0
    """Seconds for the last answer."""
    is_unreadable: bool = False
    """So was the last answer."""
    idle: Idle | None = None


class Questions:
    """Asks and tells them.

    Args:
        key: what the tokens of jobs follow from.
    """

    def __init__(self, coordinators: Coordinators, key: bytes) -> None:
        self._coordinators, self._key = coordinators, key
        self._partners: dict[Key, _Partner] = {}
        self._liveness: Liveness[Key] = Liveness(lambda key: key[0])

    async def ask(self, key: Key, job: DistributedTrainingJob, uid: str, own: Sequence[Pod]) -> Snapshot | None:
        """What the job's coordinator says, None if it says nothing or there is none.

        Args:
            uid: the job's.
            own: the pods of its coordinators, oldest first; those that are its own alone.
        """
        partner = self._partners.get(key)
        if partner is None or partner.uid != uid:
            partner = self._partners[key] = _Partner(uid)
        heard = await self._ask(key, job, partner, [pod for pod in own if pod.live and pod.address])
        partner.idle = idle(partner.idle, heard, time.time())
        return heard

    async def _ask(
        self, key: Key, job: DistributedTrainingJob, partner: _Partner, own: Sequence[Pod]
    ) -> Snapshot | None:
        over = job.status is not None and job.status.phase in ("Succeeded", "Failed")
        partner.waited, partner.is_unreadable = 0.0, False
        if over or not own:
            self._liveness.forget(key)
            return None
        pod = own[-1]
        partner.endpoint = endpoint(pod.address, pods.PORT)
        asked = time.monotonic()
        heard, reached = None, True
        try:
            heard = await self._coordinators.ask(partner.endpoint, tokens.token(self._key, partner.uid))
        except Unreached:
            reached = False
        except UnreadableAnswer:
            partner.is_unreadable = True
        partner.waited = time.monotonic() - asked
        self._liveness.note(key, pod.uid, asked, heard is not None, reached)
        return heard

    async def tell(self, key: Key, replicas: int) -> None:
        """Tell the coordinator that was asked last how many replicas are wished for."""
        if (partner := self._partners.get(key)) is not None:
            await self._coordinators.tell(partner.endpoint, tokens.token(self._key, partner.uid), replicas)

    def idle(self, key: Key) -> Idle | None:
        """Since when the job's coordinator has said that nobody trains."""
        partner = self._partners.get(key)
        return None if partner is None else partner.idle

    def is_slow(self, key: Key) -> bool:
        """Whether it took long to answer, or did not."""
        partner = self._partners.get(key)
        return partner is not None and partner.waited >= MIN_PATIENCE

    def fallen(self, key: Key) -> str | None:
        """The UID of the coordinator's pod if that has stopped answering (tandem_operator.liveness)."""
        return self._liveness.fallen(key, time.monotonic())

    def in_doubt(self, key: Key) -> bool:
        """Whether to ask its coordinator again at once: it answered before, and says nothing now. One that says what
        nobody can read is there."""
        partner = self._partners.get(key)
        unreadable = partner is not None and partner.is_unreadable
        return not unreadable and self._liveness.in_doubt(key, time.monotonic())

    @property
    def answering(self) -> int:
        """How many coordinators have answered, whether they still do or not."""
        return len(self._liveness)

    def forget(self, key: Key) -> None:
        """There is no such job any more."""
        self._partners.pop(key, None)
        self._liveness.forget(key)
