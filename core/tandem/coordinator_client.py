"""Talks to a job's coordinator: one connection, kept open, used by one thread.

Plain `http.client`: an agent's heartbeat must depend on as little as possible, and the CLI starts faster. A request
that the coordinator holds back can be given up from outside through `until`, which is how an agent joins a new
generation without waiting for its last heartbeat to be answered.
"""

import http.client
import json
import select
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Self, TypeVar

from pydantic import ValidationError

from tandem.model import Model
from tandem.protocol import CODE, FIRST, OURS, Answer, Sync, Target, spoken, worded
from tandem.status import Snapshot

CONNECT_SECONDS = 1.0
"""A coordinator that is there answers a connection at once; one that is cut off must not hold a heartbeat for long. And
while it moves to another pod, the kernel would repeat a try to the old one: a new try is needed to find the new."""

REFUSALS = (400, 401, 413)
"""What a coordinator answers to a request that is wrong. Anything else comes from something in between."""
STALL_SECONDS = 1.5
"""A connection on which nothing is acknowledged for so long is given up for a new one: on the old one TCP would repeat
ever more slowly, and a network that heals would not be noticed for as long as it was interrupted."""

MAX_WORD_BYTES = 2**16
"""Of an answer of one word or number. `tandem open` asks coordinators that others may have made."""
MAX_ANSWER_BYTES = 2**24
"""Of what an agent is told: 20,000 members take 4.3 MiB."""
MAX_STATUS_BYTES = 2**28
"""Of everything about a job: 10,000 replicas of 64 ranks, and the names in 100 generations, take 166 MiB."""
CODE_SECONDS = 60.0
"""For each piece of a job's code, and for the coordinator's word that it is on the volume."""
CODE_PIECE_BYTES = 2**18
_GZIP = 16 + zlib.MAX_WBITS


class Unreachable(Exception):  # noqa: N818 - it is a state of the network, and normal
    """The coordinator did not answer: it restarts, or the network is interrupted. Worth trying again."""


class Refused(Exception):  # noqa: N818 - reads as the sentence it is
    """The coordinator answered that the request is wrong, and why. Trying again would not help."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Unreadable(Exception):  # noqa: N818 - reads as the sentence it is
    """No coordinator answers like that."""


class GivenUp(Exception):  # noqa: N818 - it was asked for
    """The request was given up before the answer came, because of something else that happened."""


M = TypeVar("M", bound=Model)

_SYNC = "/v1/sync"

Until = Callable[[socket.socket, float], bool]
"""Waits until the socket has something to read (True) or the request shall be given up (False); raises TimeoutError
after that number of seconds."""


class CoordinatorClient:
    """A connection to the coordinator at `host:port`.

    Args:
        endpoint: host:port, an IPv6 host in brackets.
        token: the job's secret.
        timeout: seconds to wait for an answer, including the time that the coordinator may hold it back.

    Raises:
        ValueError: the endpoint is not host:port.
    """

    def __init__(self, endpoint: str, token: str, timeout: float = 10.0) -> None:
        self.endpoint, self.timeout = endpoint, timeout
        self._host, self._port = parse_endpoint(endpoint)
        self._token = token
        self._connection: http.client.HTTPConnection | None = None
        # Of the coordinator, as its last answer has shown. After an error the next may be of another version.
        self._protocol: int | None = None

    @property
    def connected(self) -> bool:
        """Whether the next request goes over a connection that has already carried one."""
        return self._connection is not None

    @property
    def knows_protocol(self) -> bool:
        """Whether the coordinator has said what it reads. Before that, only fields of the first protocol are sent."""
        return self._protocol is not None

    def sync(self, message: Sync, until: Until | None = None) -> Answer:
        """Tell the coordinator about an agent, and learn what it wants.

        Raises:
            Unreachable, Refused, GivenUp: see there.
        """
        return _read(
            Answer, self._request("POST", _SYNC, MAX_ANSWER_BYTES, worded(message, self._protocol or FIRST), until)
        )

    def status(self) -> Snapshot:
        """Everything the coordinator knows of the job.

        Raises:
            Unreachable, Refused: see there.
        """
        return _read(Snapshot, self._request("GET", "/status", MAX_STATUS_BYTES))

    def wish(self, replicas: int) -> None:
        """Ask for another number of replicas, from now on.

        Raises:
            Unreachable: see there.
            Refused: see there; also if the job allows fewer or more only.
        """
        self._request("POST", "/v1/target", MAX_WORD_BYTES, Target(replicas=replicas).dump())

    def invitation(self) -> str:
        """A word that opens the job's live page in a browser, once.

        Raises:
            Unreachable, Refused: see there.
        """
        answer = self._request("POST", "/v1/invitation", MAX_WORD_BYTES)
        if not isinstance(answer, dict) or not isinstance(answer.get("word"), str):
            raise Unreachable(f"the coordinator at {self.endpoint} has no live page; it runs another version")
        return str(answer["word"])

    def has_code(self, digest: str) -> bool:
        """Whether the job's code is in its run directory.

        Raises:
            Unreachable: see there.
            Refused: see there; also if the job has no such code.
        """
        return _is_present(self._request("GET", f"{CODE}/{digest}", MAX_WORD_BYTES))

    def send_code(self, digest: str, pack: BinaryIO, length: int, sent: Callable[[int], object]) -> None:
        """Send the job's code.

        Args:
            pack: `length` bytes.
            sent: told how many bytes have been sent so far.

        Raises:
            Unreachable, Refused: see `has_code`.
        """

        def pieces() -> Iterator[bytes]:
            done = 0
            while piece := pack.read(CODE_PIECE_BYTES):
                yield piece
                sent(done := done + len(piece))

        # A connection of its own: on the agents', a slow way to a cluster would count as stalled.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CODE_SECONDS)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Length": str(length), **OURS}
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was sent: the answer says why
                connection.request("PUT", f"{CODE}/{digest}", pieces(), headers)
            response = connection.getresponse()
            status, content = response.status, _content(response, MAX_WORD_BYTES)
        except (OSError, http.client.HTTPException, _Unreadable) as error:
            raise Unreachable(f"the code did not reach the coordinator at {self.endpoint}: {error!r}") from error
        finally:
            connection.close()
        _is_present(self._answer(status, content, CODE))

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._hang_up()
        self._protocol = None

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, method: str, path: str, most: int, body: object = None, until: Until | None = None) -> Any:
        """The answer, which may have at most `most` bytes."""
        try:
            status, content = self._exchange(method, path, most, body, until)
        except _Unreadable as error:
            self.close()
            raise Unreachable(f"what answers at {self.endpoint} is not a coordinator: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"the coordinator at {self.endpoint} does not answer: {error or type(error)}") from error
        except BaseException:
            # Nothing is wrong with the other side, which is asked again at once.
            self._hang_up()
            raise
        return self._answer(status, content, path)

    def _answer(self, status: int, content: bytes, path: str) -> Any:
        try:
            answer = json.loads(content)
        except ValueError as error:
            self.close()
            raise Unreachable(f"what answers at {self.endpoint} is not a coordinator") from error
        if status >= 500:
            raise Unreachable(f"the coordinator at {self.endpoint} answered {status}: {_why(answer)}")
        if status not in REFUSALS and status != 200:
            raise Unreachable(f"something at {self.endpoint} answered {status} for the coordinator: {_why(answer)}")
        if status != 200:
            raise Refused(status, f"the coordinator at {self.endpoint} refused {path}: {_why(answer)}")
        return answer

    def _exchange(self, method: str, path: str, most: int, body: object, until: Until | None) -> tuple[int, bytes]:
        if self._connection is not None:
            try:
                return self._converse(self._connection, method, path, most, body, until)
            except (ConnectionError, http.client.BadStatusLine):
                # Closed by the other side since the last request. An agent must know, because a coordinator that has
                # restarted is told more; for everybody else a new connection is all it takes.
                self.close()
                if path == _SYNC:
                    raise
        return self._converse(self._connect(), method, path, most, body, until)

    def _converse(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        most: int,
        body: object,
        until: Until | None,
    ) -> tuple[int, bytes]:
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/json",
            "Accept-Encoding": "gzip",
            **OURS,
        }
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        if until is not None and not until(connection.sock, self.timeout):
            raise GivenUp
        response = connection.getresponse()
        self._protocol = spoken(response.headers)
        content = _content(response, most)
        if response.headers.get("Content-Encoding") == "gzip":
            content = _unpacked(content, most)
        return response.status, content

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(self.timeout)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _give_up_when_stalled(connection.sock)
        self._connection = connection
        return connection


def _content(response: http.client.HTTPResponse, most: int) -> bytes:
    """The body of an answer.

    Raises:
        _Unreadable: it has more than `most` bytes, which are not read.
        OSError, http.client.HTTPException: it breaks off.
    """
    known = response.length
    if known is not None and known <= most:
        return response.read()
    content = response.read(most + 1) if known is None else b""
    if known is not None or len(content) > most:
        raise _Unreadable(f"its answer exceeds {most} bytes")
    return content


def _unpacked(content: bytes, most: int) -> bytes:
    """What gzip has made smaller.

    Raises:
        _Unreadable: it is not that, or more than `most` bytes.
    """
    unpacking = zlib.decompressobj(_GZIP)
    try:
        found = unpacking.decompress(content, most + 1)
    except zlib.error as error:
        raise _Unreadable(str(error)) from error
    if len(found) > most:
        raise _Unreadable(f"its answer exceeds {most} bytes")
    if not unpacking.eof:
        raise _Unreadable("its compressed answer is truncated")
    return found


def _give_up_when_stalled(connection: socket.socket) -> None:
    """Linux alone can; elsewhere the time for an answer has to do."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    # An answer that the coordinator holds back leaves the connection idle: then the kernel asks for a sign of life.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))


def readable(connection: socket.socket, seconds: float, others: Sequence[int]) -> bool:
    """Wait until the connection is readable (True) or one of the other descriptors is (False).

    Raises:
        TimeoutError: neither happened in time.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    for descriptor in others:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    if not ready:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return ready.isdisjoint(others)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        ValueError: it is not that.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{endpoint!r} is not the address of a coordinator; write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _read(model: type[M], data: object) -> M:
    try:
        return model.read(data)
    except ValidationError as error:
        raise Unreachable(f"cannot parse the coordinator's answer: {error.errors()[0]['msg']}") from error


def _is_present(answer: object) -> bool:
    if not isinstance(answer, dict) or not isinstance(answer.get("present"), bool):
        raise Unreachable("the coordinator takes no code; it runs another version")
    return bool(answer["present"])


def _why(answer: object) -> str:
    return str(answer.get("error", answer)) if isinstance(answer, dict) else str(answer)
