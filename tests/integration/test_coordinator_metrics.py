"""The port on which a coordinator answers Prometheus without the job's token."""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.processes import launch
from tests.support import EXAMPLES
from tests.support.coordinator_process import Coordinator, CoordinatorProcess
from tests.support.ports import reserved_port
from tests.support.processes import tandem
from tests.support.waiting import SECONDS, until


def asked(port: int, method: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Coordinator, int]]:
    found, metrics_port = Coordinator(tmp_path), reserved_port()
    port_file = tmp_path / "port"
    command = launch.coordinator_command("127.0.0.1", 0, port_file, metrics_port=metrics_port)
    found.process = CoordinatorProcess(found.rundir, command)
    try:
        found.port, bound = until(lambda: launch.read_ports(port_file), "the coordinator's start")
        assert bound == metrics_port
        yield found, metrics_port
    finally:
        found.kill()


def test_it_answers_with_the_job_s_numbers_and_no_token(coordinator: tuple[Coordinator, int]) -> None:
    found, port = coordinator
    status, text = asked(port, "GET", "/metrics")
    assert status == 200
    assert 'tandem_phase{job="digits",namespace="lab",phase="Pending"} 1.0' in text
    assert text.splitlines()[0].startswith("# HELP tandem_phase")
    assert asked(port, "GET", "/healthz")[0] == 200
    assert asked(found.port, "GET", "/metrics")[0] == 401, "the other port keeps its token"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/status"), ("POST", "/v1/target"), ("POST", "/v1/sync"), ("GET", "/")]
)
def test_it_answers_nothing_else(coordinator: tuple[Coordinator, int], method: str, path: str) -> None:
    assert asked(coordinator[1], method, path)[0] == 404


def test_a_run_says_which_port_is_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tandem("run", EXAMPLES / "digits.yaml", "--run-dir", tmp_path / "run", "--metrics-port", str(port))
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr
    assert "--metrics-port" in done.stderr
