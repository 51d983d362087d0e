"""Client of a job's coordinator: one persistent connection, used by one thread.

Plain `http.client`: an agent's heartbeat must depend on as little as possible, and the CLI starts faster. A request
whose response the coordinator delays can be cancelled from outside through `until`: so an agent joins a new generation
without waiting for the response to its last heartbeat.
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
from tandem.wire.protocol import (
    CODE_PATH,
    PROTOCOL_HEADERS,
    Answer,
    Sync,
    Target,
)
from tandem.wire.status import Snapshot

CONNECT_SECONDS = 1.0
"""Timeout of a connection: a coordinator that is reachable accepts it at once, and an unreachable one must not delay a
heartbeat for long. While the coordinator moves to another pod, the kernel would repeat a connection attempt to the old
one: only a new attempt finds the new one."""

REFUSALS = (400, 401, 413)
"""Status codes of a coordinator for a wrong request. All others come from something in between."""
STALL_SECONDS = 1.5
"""Time without an acknowledgement after which a connection is replaced: TCP would repeat ever more slowly on the old
one, and would notice a healed network only after as long as it was interrupted."""

MAX_WORD_BYTES = 2**16
"""Maximum size of a response of one word or number. `tandem open` calls coordinators that may not be ours."""
MAX_ANSWER_BYTES = 2**24
"""Maximum size of the response to a heartbeat: 20,000 members take 4.3 MiB."""
MAX_STATUS_BYTES = 2**28
"""Maximum size of a snapshot: 10,000 replicas of 64 ranks, and the names in 100 generations, take 166 MiB."""
CODE_SECONDS = 60.0
"""Timeout for each piece of a job's code, and for the coordinator's response that it is on the volume."""
CODE_PIECE_BYTES = 2**18
_GZIP = 16 + zlib.MAX_WBITS


class Unreachable(Exception):  # noqa: N818 - a state of the network, and normal
    """The coordinator did not respond: it restarts, or the network is interrupted. A retry may succeed."""


class CoordinatorRefused(Exception):  # noqa: N818 - the response of the coordinator
    """The coordinator responded that the request is wrong. A retry would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Unreadable(Exception):  # noqa: N818 - a state of the response
    """The response is not one of a coordinator."""


class RequestCancelled(Exception):  # noqa: N818 - requested by the caller
    """The request was cancelled before the response came, because of another event."""


M = TypeVar("M", bound=Model)

_SYNC = "/v1/sync"

Until = Callable[[socket.socket, float], bool]
"""Waits until the socket is readable (True) or the request is to be cancelled (False); raises TimeoutError after that
number of seconds."""


class CoordinatorClient:
    """A connection to the coordinator at `host:port`.

    Args:
        endpoint: host:port, an IPv6 host in brackets.
        token: the job's secret.
        timeout: seconds to wait for a response, including the time by which the coordinator may delay it.

    Raises:
        ValueError: the endpoint is not host:port.
    """

    def __init__(self, endpoint: str, token: str, timeout: float = 10.0) -> None:
        self.endpoint, self.timeout = endpoint, timeout
        self._host, self._port = parse_endpoint(endpoint)
        self._token = token
        self._connection: http.client.HTTPConnection | None = None
        self.has_answered = False
        """Whether the coordinator has responded since the last error. After one, another may have started."""

    @property
    def connected(self) -> bool:
        """Whether the next request uses a connection that has already carried one."""
        return self._connection is not None

    def sync(self, message: Sync, until: Until | None = None) -> Answer:
        """Send an agent's heartbeat, and return the coordinator's order.

        Raises:
            Unreachable, CoordinatorRefused, RequestCancelled: see there.
        """
        return _read(Answer, self._request("POST", _SYNC, MAX_ANSWER_BYTES, message.dump(), until))

    def status(self) -> Snapshot:
        """Fetch the complete state of the job.

        Raises:
            Unreachable, CoordinatorRefused: see there.
        """
        return _read(Snapshot, self._request("GET", "/status", MAX_STATUS_BYTES))

    def wish(self, replicas: int) -> None:
        """Set the desired number of replicas.

        Raises:
            Unreachable: see there.
            CoordinatorRefused: see there; also if the job does not allow this number.
        """
        self._request("POST", "/v1/target", MAX_WORD_BYTES, Target(replicas=replicas).dump())

    def invitation(self) -> str:
        """A one-time word that opens the job's live page in a browser.

        Raises:
            Unreachable, CoordinatorRefused: see there.
        """
        answer = self._request("POST", "/v1/invitation", MAX_WORD_BYTES)
        if not isinstance(answer, dict) or not isinstance(answer.get("word"), str):
            raise Unreachable(f"the coordinator at {self.endpoint} has no live page; it runs another version")
        return str(answer["word"])

    def has_code(self, digest: str) -> bool:
        """Whether the job's code is in its run directory.

        Raises:
            Unreachable: see there.
            CoordinatorRefused: see there; also if the job has no such code.
        """
        return _is_present(self._request("GET", f"{CODE_PATH}/{digest}", MAX_WORD_BYTES))

    def send_code(self, digest: str, pack: BinaryIO, length: int, sent: Callable[[int], object]) -> None:
        """Send the job's code.

        Args:
            pack: file of `length` bytes.
            sent: callback with the number of bytes sent so far.

        Raises:
            Unreachable, CoordinatorRefused: see `has_code`.
        """

        def pieces() -> Iterator[bytes]:
            done = 0
            while piece := pack.read(CODE_PIECE_BYTES):
                yield piece
                sent(done := done + len(piece))

        # A connection of its own: on the heartbeat's, a slow network to a cluster would count as stalled.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CODE_SECONDS)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Length": str(length), **PROTOCOL_HEADERS}
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused early: the response has the reason
                connection.request("PUT", f"{CODE_PATH}/{digest}", pieces(), headers)
            response = connection.getresponse()
            status, content = response.status, _content(response, MAX_WORD_BYTES)
        except (OSError, http.client.HTTPException, _Unreadable) as error:
            raise Unreachable(f"the code did not reach the coordinator at {self.endpoint}: {error!r}") from error
        finally:
            connection.close()
        _is_present(self._answer(status, content, CODE_PATH))

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._disconnect()
        self.has_answered = False

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, method: str, path: str, max_bytes: int, body: object = None, until: Until | None = None) -> Any:
        """Send a request and return its response, of at most `max_bytes` bytes."""
        try:
            status, content = self._exchange(method, path, max_bytes, body, until)
        except _Unreadable as error:
            self.close()
            raise Unreachable(f"what answers at {self.endpoint} is not a coordinator: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(f"the coordinator at {self.endpoint} does not answer: {error or type(error)}") from error
        except BaseException:
            # Cancelled by the caller: the coordinator is fine.
            self._disconnect()
            raise
        return self._answer(status, content, path)

    def _answer(self, status: int, content: bytes, path: str) -> Any:
        try:
            answer = json.loads(content)
        except ValueError as error:
            self.close()
            raise Unreachable(f"what answers at {self.endpoint} is not a coordinator") from error
        if status >= 500:
            raise Unreachable(f"the coordinator at {self.endpoint} answered {status}: {_error_of(answer)}")
        if status not in REFUSALS and status != 200:
            raise Unreachable(
                f"something at {self.endpoint} answered {status} for the coordinator: {_error_of(answer)}"
            )
        if status != 200:
            raise CoordinatorRefused(status, f"the coordinator at {self.endpoint} refused {path}: {_error_of(answer)}")
        return answer

    def _exchange(self, method: str, path: str, max_bytes: int, body: object, until: Until | None) -> tuple[int, bytes]:
        if self._connection is not None:
            try:
                return self._send(self._connection, method, path, max_bytes, body, until)
            except (ConnectionError, http.client.BadStatusLine):
                # The coordinator has closed it since the last request. An agent must know, because it sends more to a
                # coordinator that has restarted; all others only need a new connection.
                self.close()
                if path == _SYNC:
                    raise
        return self._send(self._connect(), method, path, max_bytes, body, until)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        max_bytes: int,
        body: object,
        until: Until | None,
    ) -> tuple[int, bytes]:
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/json",
            "Accept-Encoding": "gzip",
            **PROTOCOL_HEADERS,
        }
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        if until is not None and not until(connection.sock, self.timeout):
            raise RequestCancelled
        response = connection.getresponse()
        self.has_answered = True
        content = _content(response, max_bytes)
        if response.headers.get("Content-Encoding") == "gzip":
            content = _decompressed(content, max_bytes)
        return response.status, content

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(self.timeout)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _give_up_when_stalled(connection.sock)
        self._connection = connection
        return connection


def _content(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Read the body of a response.

    Raises:
        _Unreadable: it has more than `max_bytes` bytes, which are not read.
        OSError, http.client.HTTPException: it is truncated.
    """
    length = response.length
    if length is not None and length <= max_bytes:
        return response.read()
    content = response.read(max_bytes + 1) if length is None else b""
    if length is not None or len(content) > max_bytes:
        raise _Unreadable(f"its answer exceeds {max_bytes} bytes")
    return content


def _decompressed(content: bytes, max_bytes: int) -> bytes:
    """Decompress the body of a response.

    Raises:
        _Unreadable: it is not gzip data, or has more than `max_bytes` bytes.
    """
    decompressor = zlib.decompressobj(_GZIP)
    try:
        decompressed = decompressor.decompress(content, max_bytes + 1)
    except zlib.error as error:
        raise _Unreadable(str(error)) from error
    if len(decompressed) > max_bytes:
        raise _Unreadable(f"its answer exceeds {max_bytes} bytes")
    if not decompressor.eof:
        raise _Unreadable("its compressed answer is truncated")
    return decompressed


def _give_up_when_stalled(connection: socket.socket) -> None:
    """Make the kernel close a stalled connection. Works on Linux only; elsewhere the timeout of the response has to
    do."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    # A delayed response leaves the connection idle: then the kernel sends keepalive probes.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))


def readable(connection: socket.socket, seconds: float, descriptors: Sequence[int]) -> bool:
    """Wait until the connection is readable (True) or one of the descriptors is (False).

    Raises:
        TimeoutError: neither happened in time.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    if not ready:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return ready.isdisjoint(descriptors)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Parse host and port of `host:port`.

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


def _error_of(answer: object) -> str:
    return str(answer.get("error", answer)) if isinstance(answer, dict) else str(answer)
