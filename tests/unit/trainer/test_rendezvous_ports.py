"""Where an agent's rendezvous store and gloo listen."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from tandem.job.resource import Ports
from tandem_trainer.agent.rendezvous import _listen, gloo_interface
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


@pytest.mark.parametrize(
    ("leads_to", "address", "told"),
    [
        ([], "192.0.2.7", "eth1"),
        (["127.0.1.1"], "192.0.2.7", "eth1"),
        (["::1", "127.0.0.1"], "2001:db8::7", "eth1"),
        (["192.0.2.7"], "192.0.2.7", None),
        (["fe80::7%eth1"], "192.0.2.7", None),
        ([], "127.0.0.1", None),
        ([], "192.0.2.99", None),
    ],
    ids=["nowhere", "Debian's", "IPv6", "a name", "a name of the link", "one machine", "behind a translation"],
)
def test_gloo_is_told_an_interface_where_the_host_name_leads_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch, leads_to: list[str], address: str, told: str | None
) -> None:
    def found(name: str, port: None) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if not leads_to:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (one, 0)) for one in leads_to]

    own = {"lo": ["127.0.0.1", "::1"], "eth0": ["198.51.100.7"], "eth1": ["192.0.2.7", "2001:db8::7"]}
    addresses = {name: [SimpleNamespace(address=one) for one in those] for name, those in own.items()}
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert gloo_interface(address) == told
