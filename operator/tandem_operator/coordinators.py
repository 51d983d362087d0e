"""The client of the coordinators: reads the status of jobs, sets their replica targets, and tells them of the queue.

The operator polls the coordinator at the address of the job's own pod, and only the pod's owner reference makes it the
job's: a pod that somebody creates with the labels of another job's coordinator is not polled, and does not get the
token.
"""

import errno
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
from pydantic import FailFast, Field, ValidationError

from tandem.formatting import parse_rfc3339, rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.model import Model, WholeNumber
from tandem.processes.launch import endpoint
from tandem.wire.protocol import BRIEF_PATH, MAX_BRIEF_BYTES, PROTOCOL_HEADERS, QUEUE_PATH, Target
from tandem.wire.queue_view import QueueView
from tandem.wire.status import GenerationView, Snapshot, Status
from tandem_operator import pods, tokens
from tandem_operator.bounded import cost
from tandem_operator.informer import Key
from tandem_operator.lifecycle import Idle, idle
from tandem_operator.liveness import Liveness
from tandem_operator.observed import Pod

TIMEOUT_SECONDS = 3.0
"""Timeout of a poll. A coordinator that runs answers in milliseconds; one that restarts must not delay other jobs."""

CONNECT_SECONDS = 1.1
"""Timeout of a connection. A live node accepts or refuses one within milliseconds, however busy its coordinator is.
After a second the kernel tries once more, so a single lost packet does not count."""
MAX_REFUSAL_BYTES = 4_096
"""Maximum size of an error's text, and of any answer but a snapshot."""
MAX_ERROR_LENGTH = 200
MAX_COST = 3_000_000
"""Maximum cost of an answer, as tandem_operator.bounded estimates it. That of the largest job is a tenth of it."""
CLOCK_TOLERANCE_SECONDS = 10.0
"""Difference between two clocks that is not looked at. An answer takes a part of it."""
SLOW_SECONDS = 0.5
"""Time to answer from which a coordinator counts as slow, and is polled apart from the others
(tandem_operator.workqueue)."""

log = logging.getLogger("tandem.operator")


class _Brief(Model):
    """The fields that are read of a coordinator's answer; the rest is ignored."""

    job: Annotated[str, Field(max_length=316)]
    time: float
    status: Status
    finished: WholeNumber | None = None
    reason: Annotated[str, Field(max_length=64)] | None = None
    generations: Annotated[list[GenerationView], Field(max_length=100), FailFast()] = []


class Coordinators:
    """A connection pool to all coordinators. Open it as an asynchronous context."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Coordinators":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS, sock_connect=CONNECT_SECONDS)
        # Each poll has a connection of its own: on a kept one, a dead node looks like a slow answer.
        connector = aiohttp.TCPConnector(limit=256, force_close=True, use_dns_cache=False)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def poll(self, endpoint: str, token: str) -> Snapshot | None:
        """Poll a coordinator; None if it does not answer, which is normal while it starts or moves.

        Raises:
            NodeUnreachable: there is no connection.
            UnreadableAnswer: it is no coordinator's answer.
        """
        try:
            return parse_snapshot(await self._get(f"http://{endpoint}{BRIEF_PATH}", token))
        except UnreadableAnswer as error:
            log.warning("event=coordinator-unreadable endpoint=%s error=%r", endpoint, str(error))
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("event=coordinator-silent endpoint=%s error=%r", endpoint, error)
            if _is_unreached(error):
                raise NodeUnreachable(endpoint) from error
            return None

    async def set_target(self, endpoint: str, token: str, replicas: int) -> bool:
        """Set the replica target; returns whether the coordinator accepted it."""
        return await self._post(endpoint, "/v1/target", token, Target(replicas=replicas)) == 200

    async def report_queue(self, endpoint: str, token: str, view: QueueView) -> bool:
        """Send the queue of the job; returns whether the coordinator knows such reports: one of the version before does
        not."""
        return await self._post(endpoint, QUEUE_PATH, token, view) != 404

    async def _post(self, endpoint: str, path: str, token: str, body: Model) -> int | None:
        """Send something; returns the status code of the answer, None if there is no readable one."""
        assert self._session is not None
        url = f"http://{endpoint}{path}"
        try:
            async with self._session.post(
                url, json=body.dump(), headers=_headers(token), allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    reason = (await _read(answer, MAX_REFUSAL_BYTES)).decode(errors="replace")[:MAX_ERROR_LENGTH]
                    log.warning("event=report-refused endpoint=%s path=%s why=%r", endpoint, path, reason)
                return answer.status
        except UnreadableAnswer as error:
            log.warning("event=report-refused endpoint=%s path=%s why=%r", endpoint, path, str(error))
            return None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("event=coordinator-silent endpoint=%s error=%r", endpoint, error)
            return None

    async def _get(self, url: str, token: str) -> bytes:
        """The whole body of an answer.

        Raises:
            UnreadableAnswer, aiohttp.ClientError, OSError, TimeoutError: it cannot be read.
        """
        assert self._session is not None
        async with self._session.get(url, headers=_headers(token), allow_redirects=False) as answer:
            if answer.status != 200:
                raise UnreadableAnswer(f"HTTP status {answer.status}")
            return await _read(answer, MAX_BRIEF_BYTES)


def clock_difference(last: float, measured: float) -> float:
    """Return by how much a coordinator's clock is ahead, in seconds; 0 where that is within what an answer takes.

    It stays as it was while it is measured almost alike: a time that moved a little at each look would be written into
    the status each time.
    """
    if not math.isfinite(measured):
        return 0.0
    if abs(measured - last) <= CLOCK_TOLERANCE_SECONDS:
        return last
    return measured if abs(measured) > CLOCK_TOLERANCE_SECONDS else 0.0


def in_own_clock(snapshot: Snapshot, ahead: float, now: float) -> Snapshot:
    """Return an answer with the times that the operator compares with its own clock in that clock.

    Args:
        ahead: by how much the coordinator's clock is ahead, in seconds.
    """
    if ahead == 0.0:
        return snapshot
    times = {
        name: rfc3339(max(0.0, min(time - ahead, now)))
        for name in ("start_time", "completion_time", "evaluated_at")
        if (time := parse_rfc3339(getattr(snapshot.status, name))) is not None
    }
    return snapshot.model_copy(update={"status": snapshot.status.model_copy(update=times)})


def parse_snapshot(body: bytes) -> Snapshot:
    """Parse a coordinator's answer.

    Raises:
        UnreadableAnswer: it is not a coordinator's.
    """
    if cost(body) > MAX_COST:
        raise UnreadableAnswer("it takes more to parse than any coordinator's")
    try:
        brief = _Brief.read_json(body)
    except ValidationError as error:
        raise UnreadableAnswer(f"{error.error_count()} mistakes") from None
    return Snapshot(
        job=brief.job,
        time=brief.time,
        status=brief.status,
        finished=brief.finished,
        reason=brief.reason,
        generations=brief.generations,
    )


class NodeUnreachable(Exception):  # noqa: N818 - it is a state of the network
    """A connection that was neither accepted nor refused: the sign of a dead node."""


class UnreadableAnswer(Exception):  # noqa: N818 - it is the answer
    """An answer that no coordinator gives: too large, invalid, or compressed although that was not requested. Or an
    error, or a redirection, which is not followed."""


def _is_unreached(error: BaseException) -> bool:
    lost = isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return lost or isinstance(error, aiohttp.ConnectionTimeoutError)


async def _read(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        UnreadableAnswer: it is longer than `max_bytes`, or compressed.
    """
    if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
        raise UnreadableAnswer(f"it is packed: {encoding[:MAX_ERROR_LENGTH]}")
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > max_bytes:
            raise UnreadableAnswer(f"more than {max_bytes} bytes")
    return bytes(content)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity", **PROTOCOL_HEADERS}


@dataclass
class _JobCoordinator:
    """State of one job's coordinator. Losing it is safe."""

    uid: str
    """UID of the job."""
    endpoint: str = ""
    waited: float = 0.0
    """Time of the last poll, in seconds."""
    is_unreadable: bool = False
    """Whether the last answer could not be read."""
    idle: Idle | None = None
    ignores_queue: str = ""
    """Endpoint of a coordinator that does not know reports of the queue."""
    clock: float = 0.0
    """Seconds by which the coordinator's clock is ahead of the operator's."""


class JobCoordinators:
    """Polls the coordinator of each job, and keeps track of its answers.

    Args:
        key: the key that the tokens of jobs are derived from.
    """

    def __init__(self, coordinators: Coordinators, key: bytes) -> None:
        self._coordinators, self._key = coordinators, key
        self._coordinators_by_job: dict[Key, _JobCoordinator] = {}
        self._liveness: Liveness[Key] = Liveness(lambda key: key[0])

    async def poll(self, key: Key, job: DistributedTrainingJob, uid: str, own: Sequence[Pod]) -> Snapshot | None:
        """Poll the job's coordinator; None if it does not answer, or does not exist.

        Args:
            own: the coordinator's pods that the job owns, oldest first.
        """
        coordinator = self._coordinators_by_job.get(key)
        if coordinator is None or coordinator.uid != uid:
            coordinator = self._coordinators_by_job[key] = _JobCoordinator(uid)
        snapshot = await self._poll(key, job, coordinator, [pod for pod in own if pod.live and pod.address])
        coordinator.idle = idle(coordinator.idle, snapshot, time.time())
        return snapshot

    async def _poll(
        self, key: Key, job: DistributedTrainingJob, coordinator: _JobCoordinator, own: Sequence[Pod]
    ) -> Snapshot | None:
        has_ended = job.status is not None and job.status.phase in ("Succeeded", "Failed")
        coordinator.waited, coordinator.is_unreadable = 0.0, False
        if has_ended or not own:
            self._liveness.forget(key)
            return None
        pod = own[-1]
        coordinator.endpoint = endpoint(pod.address, pods.PORT)
        polled_at = time.monotonic()
        snapshot, reached = None, True
        try:
            snapshot = await self._coordinators.poll(coordinator.endpoint, tokens.token(self._key, coordinator.uid))
        except NodeUnreachable:
            reached = False
        except UnreadableAnswer:
            coordinator.is_unreadable = True
        coordinator.waited = time.monotonic() - polled_at
        if snapshot is not None:
            now = time.time()
            coordinator.clock = clock_difference(coordinator.clock, snapshot.time - now)
            snapshot = in_own_clock(snapshot, coordinator.clock, now)
        self._liveness.note(key, pod.uid, polled_at, snapshot is not None, reached)
        return snapshot

    async def set_target(self, key: Key, replicas: int) -> None:
        """Set the replica target of the coordinator that was polled last."""
        if (coordinator := self._coordinators_by_job.get(key)) is not None:
            await self._coordinators.set_target(
                coordinator.endpoint, tokens.token(self._key, coordinator.uid), replicas
            )

    async def report_queue(self, key: Key, snapshot: Snapshot | None, view: QueueView | None) -> None:
        """Send the queue of the job to the coordinator that was polled last, if its answer has another one."""
        coordinator = self._coordinators_by_job.get(key)
        if coordinator is None or snapshot is None or view is None or view == snapshot.status.queue:
            return
        if coordinator.ignores_queue != coordinator.endpoint:
            token = tokens.token(self._key, coordinator.uid)
            if not await self._coordinators.report_queue(coordinator.endpoint, token, view):
                coordinator.ignores_queue = coordinator.endpoint

    def idle(self, key: Key) -> Idle | None:
        """The period for which the job's coordinator has reported that nobody trains."""
        coordinator = self._coordinators_by_job.get(key)
        return None if coordinator is None else coordinator.idle

    def is_slow(self, key: Key) -> bool:
        """Whether the last poll took long, or got no answer."""
        coordinator = self._coordinators_by_job.get(key)
        return coordinator is not None and coordinator.waited >= SLOW_SECONDS

    def unresponsive(self, key: Key) -> str | None:
        """UID of the coordinator's pod if it has stopped answering (tandem_operator.liveness)."""
        return self._liveness.unresponsive(key, time.monotonic())

    def in_doubt(self, key: Key) -> bool:
        """Whether to poll the coordinator again at once: it answered before, and does not answer now. An unreadable
        answer counts as one."""
        coordinator = self._coordinators_by_job.get(key)
        unreadable = coordinator is not None and coordinator.is_unreadable
        return not unreadable and self._liveness.in_doubt(key, time.monotonic())

    @property
    def answering(self) -> int:
        """Number of coordinators that have answered, whether they still do or not."""
        return len(self._liveness)

    def forget(self, key: Key) -> None:
        """Forget a job."""
        self._coordinators_by_job.pop(key, None)
        self._liveness.forget(key)
