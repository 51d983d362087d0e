"""Connections of a group, which another thread ends."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tandem_trainer.connections import Connections


class Server:
    """A listening socket, and both ends of connections to it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self.listener.getsockname()[1]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        mine = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        return mine, self.stack.enter_context(self.listener.accept()[0])


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with made.stack:
        yield made


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    pair[1].settimeout(5)
    try:
        pair[0].sendall(b"?")
        return pair[1].recv(1) == b"?"
    except OSError:
        return False


def test_a_thread_that_waits_for_a_peer_is_freed_and_what_is_not_the_groups_stays(server: Server) -> None:
    before = server.connect()
    connections = Connections()
    listener = server.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    own = server.connect()
    connections.settle(store_port=0)
    after = server.connect()
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(own[0].recv(1)))
    waiting.start()
    connections.shut_down()
    waiting.join(10)
    assert received == [b""]
    assert not is_open(own)
    assert is_open(before)
    assert is_open(after)
    with socket.create_connection(listener.getsockname()):
        pass


def test_a_connection_to_the_store_stays_unless_the_group_is_still_being_joined(server: Server) -> None:
    store = Server()
    with store.stack:
        connections = Connections()
        to_store, own = store.connect(), server.connect()
        connections.settle(store.port)
        connections.shut_down()
        assert is_open(to_store)
        assert not is_open(own)

        joining = Connections()
        to_store, own = store.connect(), server.connect()
        joining.shut_down()
        assert not is_open(to_store)
        assert not is_open(own)


def test_a_descriptor_that_stands_for_another_socket_by_now_is_left_alone(server: Server) -> None:
    connections = Connections()
    own = server.connect()
    connections.settle(store_port=0)
    numbers = {end.fileno() for end in own}
    for end in own:
        end.close()
    later = server.connect()
    assert {end.fileno() for end in later} & numbers, "the kernel gives the lowest free numbers"
    connections.shut_down()
    assert is_open(later)
