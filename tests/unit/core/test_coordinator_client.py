"""What a client makes of a coordinator that is not there yet, or of what answers in its place."""

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import HTTPServer

import pytest

from tandem.wire.coordinator_client import MAX_WORD_BYTES, CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.protocol import Answer, Member, Membership, Sync
from tests.support.http_server import QuietHandler, serving
from tests.support.ports import reserved_port


@contextmanager
def answering(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """The endpoint of something that answers everything with that."""
    told = {"Content-Length": str(len(body))} if headers is None else headers

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in told.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with serving(HTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("host", ["nowhere.invalid", "127.0.0.1", "[::1]"])
def test_a_name_that_nobody_knows_yet_and_a_port_that_refuses_are_worth_another_try(host: str) -> None:
    with CoordinatorClient(f"{host}:{reserved_port()}", "token") as client, pytest.raises(Unreachable):
        client.status()


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, b'{"error": "it starts"}'), (502, b"<html>no upstream</html>"), (200, b"<html>a portal</html>")],
)
def test_what_a_proxy_says_while_there_is_no_coordinator_is_worth_another_try(status: int, body: bytes) -> None:
    with (
        answering(status, body) as endpoint,
        CoordinatorClient(endpoint, "token") as client,
        pytest.raises(Unreachable),
    ):
        client.status()


def test_a_coordinator_that_refuses_is_not() -> None:
    with (
        answering(401, b'{"error": "wrong token"}') as endpoint,
        CoordinatorClient(endpoint, "token") as client,
        pytest.raises(CoordinatorRefused, match="wrong token"),
    ):
        client.status()


LONG = b'{"word": "' + b"a" * MAX_WORD_BYTES + b'"}'
GZIP = {"Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (LONG, None, "exceeds"),
        (LONG, {}, "exceeds"),
        (b"", {"Content-Length": "10000000000"}, "exceeds"),
        (gzip.compress(LONG), GZIP, "exceeds"),
        (gzip.compress(b'{"word": "a"}')[:-9], GZIP, "truncated"),
        (b'{"word": "a"}', GZIP, "incorrect header"),
    ],
    ids=["long", "long, unannounced", "announced as long", "long once unpacked", "broken off", "not packed"],
)
def test_what_no_coordinator_would_answer_is_not_read(body: bytes, headers: dict[str, str] | None, why: str) -> None:
    with (
        answering(200, body, headers) as endpoint,
        CoordinatorClient(endpoint, "token") as client,
        pytest.raises(Unreachable, match=f"is not a coordinator: .*{why}"),
    ):
        client.invitation()


def test_what_is_packed_is_unpacked() -> None:
    body = gzip.compress(b'{"word": "open"}')
    with (
        answering(200, body, GZIP | {"Content-Length": str(len(body))}) as endpoint,
        CoordinatorClient(endpoint, "token") as client,
    ):
        assert client.invitation() == "open"


def test_the_members_of_the_largest_job_are_few_enough_to_be_read() -> None:
    address = "2001:0db8:85a3:0000:0000:8a2e:0370:7334"
    members = [
        Member(replica=f"{'j' * 58}-{number}", incarnation="f" * 32, address=address, port=65_535, processes=64)
        for number in range(20_000)
    ]
    answer = Answer(order="run", membership=Membership(generation=1, members=members, reason="Started"))
    asked = Sync(replica="a", incarnation="b", address="10.0.0.1", port=1, state="joining", processes=1)
    with (
        answering(200, json.dumps(answer.dump()).encode()) as endpoint,
        CoordinatorClient(endpoint, "token") as client,
    ):
        assert client.sync(asked) == answer
