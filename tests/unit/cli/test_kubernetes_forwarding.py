"""The way to a job's coordinator, made by a kubectl that a test plays."""

import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem_cli.kubernetes import forwarding
from tandem_cli.kubernetes.forwarding import Forward
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl
from tests.support.fake_kubectl import FakeKubectl
from tests.support.http_server import QuietHandler, serving


class Healthy(QuietHandler):
    """Answers as a coordinator does."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()


@pytest.fixture
def port() -> Iterator[int]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Healthy)) as server:
        yield server.server_port


@pytest.fixture
def fake(tmp_path: Path) -> FakeKubectl:
    return FakeKubectl(tmp_path)


def way(fake: FakeKubectl, port: int = 0) -> Forward:
    return Forward(Kubectl(namespace="team", program=str(fake.folder / "kubectl")), "digits", port)


def listens(port: int) -> str:
    return f"Forwarding from 127.0.0.1:{port} -> 7070\nForwarding from [::1]:{port} -> 7070\n"


def test_a_way_has_the_port_that_kubectl_took_and_leads_to_the_coordinator(fake: FakeKubectl, port: int) -> None:
    fake.answers("port-forward", says=listens(port), stays=True)
    with way(fake) as found:
        assert found.endpoint == f"127.0.0.1:{port}"
        assert found.check()
    assert fake.asked[0].words == [
        *("--namespace=team", "port-forward", "--address=127.0.0.1", "service/digits-coordinator", ":http")
    ]


def test_a_way_that_ended_is_made_anew_on_the_same_port(fake: FakeKubectl, port: int) -> None:
    fake.answers("port-forward", says=listens(port))
    with way(fake) as found:
        fake.answers("port-forward", says=listens(port), stays=True)
        deadline = time.monotonic() + 20
        while found.check() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found.check()
    assert [call.words[-1] for call in fake.asked] == [":http", f"{port}:http"]


def test_a_way_that_leads_nowhere_is_made_anew_after_a_second_miss(fake: FakeKubectl) -> None:
    fake.answers("port-forward", says=listens(9), stays=True)
    with way(fake) as found:
        assert [found.check(), len(fake.asked)] == [False, 1]
        assert [found.check(), len(fake.asked)] == [False, 2]


def test_a_kubectl_that_says_a_line_for_each_connection_is_listened_to(fake: FakeKubectl, port: int) -> None:
    fake.answers("port-forward", says=listens(port) + "Handling connection for 40001\n" * 20_000)
    with way(fake) as found:
        found._child.wait(20)


def test_what_kubectl_complains_of_is_told(fake: FakeKubectl) -> None:
    fake.answers("port-forward", complains="error: unable to listen on port 80: permission denied")
    with pytest.raises(ClusterError, match="unable to listen on port 80"):
        way(fake, 80)


def test_a_kubectl_that_waits_in_vain_is_not_waited_for(fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "START_SECONDS", 0.2)
    fake.answers("port-forward", stays=True)
    with pytest.raises(ClusterError, match=r"no running coordinator within 0\.2 s\. See: tandem status digits -n team"):
        way(fake)


@pytest.mark.parametrize("secret", [{}, {"data": {}}, {"data": {"token": "!!!"}}, {"data": {"token": 5}}])
def test_a_secret_without_a_token_says_what_to_do(fake: FakeKubectl, secret: dict[str, object]) -> None:
    fake.answers("get", "secret", "digits-token", says=secret)
    with pytest.raises(ClusterError, match="holds no token"):
        forwarding.token(Kubectl(program=str(fake.folder / "kubectl")), "digits")


def test_a_way_is_kept_until_the_job_ends_and_each_change_is_told_once(
    fake: FakeKubectl, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = iter([True, False, False, False, True, True, False, False])
    fake.answers("port-forward", says=listens(port), stays=True)
    told: list[str] = []
    asked = iter(["", "", "", "", "digits has ended"])
    with way(fake) as found:
        monkeypatch.setattr(found, "check", lambda: next(there))
        assert forwarding.keep_open(found, lambda: next(asked), told.append, seconds=0.0) == "digits has ended"
    away = "the coordinator does not answer; trying again"
    assert told == [away, "the coordinator answers again", away]
