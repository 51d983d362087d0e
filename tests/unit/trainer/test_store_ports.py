"""Where an agent's rendezvous store listens."""

import socket

import pytest

from tandem.job import Ports
from tandem_trainer.rendezvous import _listen
from tests.support.ports import reserved_port


def test_a_store_takes_any_free_port_of_its_own_address() -> None:
    with _listen("127.0.0.1", None) as store:
        assert store.getsockname()[0] == "127.0.0.1"
        assert store.getsockname()[1] > 0


def test_a_store_takes_the_first_free_port_of_a_range() -> None:
    busy = reserved_port()
    with socket.create_server(("127.0.0.1", busy)), _listen("127.0.0.1", Ports(first=busy, last=busy + 20)) as store:
        assert busy < store.getsockname()[1] <= busy + 20


def test_that_no_port_is_free_is_said() -> None:
    busy = reserved_port()
    with (
        socket.create_server(("127.0.0.1", busy)),
        pytest.raises(OSError, match=rf"no port from {busy} to {busy} \(workers.storePorts\) is free"),
    ):
        _listen("127.0.0.1", Ports(first=busy, last=busy))
