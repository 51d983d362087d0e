"""A coordinator process, and agents that a test plays, speaking to it over HTTP."""

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tandem.processes import launch
from tandem.rundir.layout import RunDir
from tandem.wire.coordinator_client import CoordinatorClient, Unreachable
from tandem.wire.protocol import Answer, Membership, RankReport, Sync
from tandem.wire.status import Snapshot
from tests.support import manifests
from tests.support.elastic import TOKEN
from tests.support.ports import reserved_port
from tests.support.waiting import SECONDS, until
from tests.support.zygote import Forked


class CoordinatorProcess(Forked):
    """A process of a coordinator, forked from one that has imported what it imports."""

    def __init__(self, rundir: RunDir, command: list[str], **environment: str) -> None:
        """Start it.

        Args:
            command: as `launch.coordinator_command` makes it.
            environment: variables that differ from those of the tests.
        """
        folder = Path(mkdtemp(prefix="coordinator-", dir=rundir.path.parent))
        self._output, self._errors = folder / "output.txt", folder / "errors.txt"
        variables = os.environ | {"TANDEM_RUN_DIR": str(rundir.path), "TANDEM_TOKEN": TOKEN} | environment
        module, *words = command[command.index("-m") + 1 :]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            super().__init__(module, words, variables, output, errors=errors)

    def communicate(self) -> tuple[bytes, bytes]:
        """Wait for its end; returns its standard output and its errors."""
        self.wait(SECONDS)
        return self._output.read_bytes(), self._errors.read_bytes()


class Coordinator:
    def __init__(self, path: Path, **spec: Any) -> None:
        self.path, self.port = path, reserved_port()
        workers = {"replicas": 2, "maxReplicas": 4}
        elasticity = {"heartbeatSeconds": 0.5, "lostAfterSeconds": 20.0, "growCooldownSeconds": 0.2, "maxRestarts": 1}
        elasticity |= spec.pop("elasticity", {})
        whole = {"workers": workers, "elasticity": elasticity, **spec}
        self.rundir = manifests.run_directory(path / "run", manifests.job("digits", "lab", **whole))
        self.process: CoordinatorProcess | None = None

    def start(self, **environment: str) -> "Coordinator":
        port_file = self.path / "port"
        port_file.unlink(missing_ok=True)
        command = launch.coordinator_command("127.0.0.1", self.port, port_file)
        self.process = CoordinatorProcess(self.rundir, command, **environment)
        self.port = int(until(lambda: port_file.exists() and port_file.read_text(), "the coordinator's start"))
        return self

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def client(self, token: str = TOKEN) -> CoordinatorClient:
        return CoordinatorClient(f"127.0.0.1:{self.port}", token, timeout=SECONDS)

    def snapshot(self) -> Snapshot:
        with self.client() as client:
            return client.status()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> "Reply":
        """A request without the token, but for its headers; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            sent = body if isinstance(body, bytes) or body is None else json.dumps(body)
            connection.request(method, path, sent, headers)
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def raw(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request with the token."""
        reply = self.ask(method, path, body, **{"Authorization": f"Bearer {TOKEN}"} | headers)
        return reply.status, json.loads(reply.body) if reply.body.startswith("{") else {"text": reply.body}


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers = response.status, response.headers
        self.body = response.read().decode()

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])

    @property
    def cookie(self) -> str:
        return (self.headers["Set-Cookie"] or "").partition(";")[0]


class Agent(threading.Thread):
    """An agent that does what it is told, and would train if it had something to train."""

    def __init__(self, coordinator: Coordinator, replica: str, port: int = 4000) -> None:
        super().__init__(daemon=True)
        self.replica, self.port, self.coordinator = replica, port, coordinator
        self.generation: int | None = None
        self.membership: Membership | None = None
        self.ranks: list[RankReport] = []
        self.told: list[Answer] = []
        self.reason = ""
        self.must_go = False
        self.silent = threading.Event()
        self.start()

    def run(self) -> None:
        state, client = "joining", self.coordinator.client()
        while not self.silent.is_set():
            sync = self.sync(state, None if client.connected else self.membership)
            try:
                answer = client.sync(sync)
            except Unreachable:
                time.sleep(0.05)
                continue
            self.told.append(answer)
            if sync.reason == "WorkerFailed":
                self.reason = ""
            if answer.order == "run" and answer.membership is not None:
                state, self.generation, self.membership = "running", answer.membership.generation, answer.membership
            elif answer.order == "save" and self.must_go:
                client.sync(self.sync("leaving"))
                break
            elif answer.order in ("save", "rejoin"):
                state = "joining"
            elif answer.order == "end":
                break
        client.close()

    def sync(self, state: str, membership: Membership | None = None) -> Sync:
        return Sync(
            replica=self.replica,
            incarnation=f"{self.replica}-{id(self)}",
            address="127.0.0.1",
            port=self.port,
            processes=1,
            state=state,  # type: ignore[arg-type]
            reason=self.reason if state == "running" else "",  # type: ignore[arg-type]
            generation=self.generation,
            membership=membership if state == "running" else None,
            leaving=self.must_go and state == "running",
            ranks=self.ranks if state == "running" else [],
        )

    def vanish(self) -> None:
        self.silent.set()
        self.join(10)
