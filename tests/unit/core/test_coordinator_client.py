"""What a client makes of a coordinator that is not there yet, or of what answers in its place."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tests.support.ports import reserved_port


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The endpoint of something that answers everything with that."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


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
        pytest.raises(Refused, match="wrong token"),
    ):
        client.status()
