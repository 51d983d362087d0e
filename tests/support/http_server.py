"""HTTP servers of this machine, whose handlers tests write."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer
from threading import Thread
from typing import TypeVar

Server = TypeVar("Server", bound=BaseServer)


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that prints nothing of its requests."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve in a thread until the block ends."""
    with server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
