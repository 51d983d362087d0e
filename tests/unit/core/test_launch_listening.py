"""Sockets that listen for everybody."""

import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tandem.processes import launch
from tandem.processes.launch import ALL_ADDRESSES, endpoint, listen

HAS_BOTH = socket.has_dualstack_ipv6()


@pytest.mark.skipif(not HAS_BOTH, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_families_reach_who_listens_everywhere(host: str) -> None:
    with listen(ALL_ADDRESSES, 0, 5) as server, socket.create_connection((host, server.getsockname()[1]), 5):
        pass


@pytest.mark.parametrize(
    "fails", [lambda *_, **__: _refuse(errno.EAFNOSUPPORT), lambda *_, **__: _refuse(errno.EADDRNOTAVAIL)]
)
def test_without_ipv6_it_is_all_of_ipv4(monkeypatch: pytest.MonkeyPatch, fails: Callable[..., Any]) -> None:
    true = socket.create_server

    def create(address: Any, **options: Any) -> socket.socket:
        return fails() if options.get("family") == socket.AF_INET6 else true(address, **options)

    monkeypatch.setattr(launch.socket, "create_server", create)
    with listen(ALL_ADDRESSES, 0, 5) as server:
        assert server.family == socket.AF_INET


def test_a_port_that_is_in_use_is_not_taken_on_the_other_family_alone() -> None:
    with listen(ALL_ADDRESSES, 0, 5) as server, pytest.raises(OSError, match="in use"):
        listen(ALL_ADDRESSES, server.getsockname()[1], 5)


def test_an_ipv6_address_has_brackets() -> None:
    assert [endpoint(host, 7070) for host in ("10.0.0.7", "name", "fd00::7")] == [
        "10.0.0.7:7070",
        "name:7070",
        "[fd00::7]:7070",
    ]


def _refuse(number: int) -> socket.socket:
    raise OSError(number, "no IPv6")
