"""Object stores on this machine, and a proxy that disturbs what is sent to them.

moto has an environment of its own: its dependencies do not fit with ours. It is made once, by the hash of its pins.
versitygw, which is independent of it and several times as fast, is compiled from a pinned Go module.
"""

import fcntl
import hashlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

import tandem.rundir.store
from tandem.rundir.bucket import claim
from tandem.rundir.download import Downloader, continue_run
from tandem.rundir.durable import encode
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.rundir.store import Location, Store
from tandem.rundir.sync import Synchronizer
from tandem.rundir.sync_client import SOCKET
from tandem.rundir.sync_service import SyncService, _Server
from tandem.rundir.upload import Uploader
from tandem.wire.status import CheckpointRef
from tests.support.checkpoints import begin, commit
from tests.support.cluster.pinned import Pinned
from tests.support.http_server import QuietHandler, serving
from tests.support.manifests import job, run_directory
from tests.support.ports import reserved_port
from tests.support.waiting import until

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"
PINS = Path(__file__).parent / "moto.txt"
VERSITYGW = Pinned(Path(__file__).parent / "versitygw", "github.com/versity/versitygw")
BUCKET = "bucket"
MEMORY = "memory:"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tandem", "AWS_SECRET_ACCESS_KEY": "tandem-secret", "AWS_REGION": "us-east-1"}
START_SECONDS = 60.0


@contextmanager
def moto(address: str = "127.0.0.1") -> Iterator[str]:
    """Run moto's S3 with one empty bucket; yields its URL."""
    port = reserved_port()
    command = [str(_moto_environment() / "bin" / "moto_server"), "-H", address, "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://{address}:{port}"
        make_bucket(url)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def versitygw(folder: Path) -> Iterator[str]:
    """Run versitygw over a folder, with one empty bucket; yields its URL."""
    port = reserved_port()
    (folder / BUCKET).mkdir(parents=True)
    keys = {
        "ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    program = VERSITYGW.program("versitygw", "cmd/versitygw")
    command = [str(program), "--port", f"127.0.0.1:{port}", "posix", str(folder)]
    process = subprocess.Popen(
        command, env={**os.environ, **keys}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: is_listening(port), "versitygw")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


NAMES = ("moto", "versitygw")
ALL_SERVERS = [pytest.param(name, marks=pytest.mark.full) for name in NAMES]
SERVERS = ["moto", ALL_SERVERS[1]]
"""Parameters of a fixture that yields a server's URL."""


@contextmanager
def memory() -> Iterator[str]:
    """Keep the objects of all stores of an endpoint in the memory of this process; yields the endpoint."""
    places: defaultdict[str, MemoryStore] = defaultdict(MemoryStore)
    real, put = tandem.rundir.store._open, Store.put

    def opened(store: Store) -> Any:
        return places[str(store.location)] if store.endpoint == MEMORY else real(store)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tandem.rundir.store, "_open", opened)
        # It would keep the pages of the file that it was given, and change with them.
        monkeypatch.setattr(Store, "put", lambda store, name, data: put(store, name, bytes(data)))
        yield MEMORY


@contextmanager
def server_named(name: str, folder: Path) -> Iterator[str]:
    """Run one of SERVERS; yields its URL."""
    with moto() if name == "moto" else versitygw(folder) as url:
        yield url


def is_listening(port: int) -> bool:
    """Whether a server of this machine answers at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_bucket(url: str) -> None:
    """Make the bucket, as soon as the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _moto_environment() -> Path:
    ready = CACHE / f"moto-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    # Workers of pytest come here at the same time.
    with (CACHE / "moto.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (ready / "complete").exists():
            shutil.rmtree(ready, ignore_errors=True)
            uv = str(Path(sys.executable).parent / "uv")
            subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(ready)], check=True)
            subprocess.run([uv, "pip", "install", "-q", "--python", str(ready), "-r", str(PINS)], check=True)
            (ready / "complete").touch()
    return ready


def place(url: str, prefix: str, patience: float = 5.0) -> Store:
    """The store below a prefix of the bucket."""
    return Store(Location("s3", BUCKET, prefix), url, patience=patience)


Fault = str
"""`refuse` answers 503; `lose` forwards, and drops the response; `cut` forwards, and sends half of the response."""


@dataclass
class Disturbance:
    """Which requests are disturbed, and how; counts them."""

    fault: Callable[[int, str, str], Fault | None]
    """Of the number of a request, its method and path."""
    requests: int = 0
    played: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def disturbed(url: str, disturbance: Disturbance, without_header: str = "") -> Iterator[str]:
    """Run a proxy before a server; yields its URL.

    Args:
        without_header: a header of requests that is not forwarded.
    """
    target = urllib.parse.urlsplit(url).netloc

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            with disturbance.lock:
                number, disturbance.requests = disturbance.requests, disturbance.requests + 1
            fault = disturbance.fault(number, self.command, self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            disturbance.played += fault is not None
            if fault == "refuse":
                self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            connection = http.client.HTTPConnection(target, timeout=30)
            forwarded = {name: value for name, value in self.headers.items() if name.lower() != without_header.lower()}
            connection.request(self.command, self.path, body, forwarded)
            response = connection.getresponse()
            content = response.read()
            connection.close()
            if fault == "lose":
                self.close_connection = True
                return
            headers = {name: value for name, value in response.getheaders() if name.lower() not in SKIPPED}
            self._answer(response.status, headers, content, half=fault == "cut")

        def _answer(self, status: int, headers: Mapping[str, str], content: bytes, half: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if half else content)
            self.close_connection = self.close_connection or half

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815 - names of http.server

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as proxy:
        yield f"http://127.0.0.1:{proxy.server_port}"


SKIPPED = ("content-length", "connection", "transfer-encoding", "date", "server")


@contextmanager
def answering(status: int, code: str) -> Iterator[str]:
    """Run a server that answers everything with an error of S3; yields its URL."""
    body = f"<Error><Code>{code}</Code><Message>played</Message></Error>".encode()

    class Handler(QuietHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - names of http.server

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def a_run(path: Path, steps: tuple[int, ...] = (10, 20), size: int = 3000) -> RunDir:
    """A run directory with records, logs and checkpoints of random bytes, as one generation writes them."""
    rundir = run_directory(path, job())
    begin(rundir, 1)
    for step in steps:
        add_checkpoint(rundir, step, size)
        folder = rundir.evaluations / checkpoint_name(step)
        folder.mkdir()
        (folder / "g000001.json").write_bytes(encode({"step": step}))
    for log in (rundir.training_log(1), rundir.coordinator_log):
        log.write_bytes(b"".join(f'{{"step": {step}}}\n'.encode() for step in range(30)))
    return rundir


def add_checkpoint(rundir: RunDir, step: int, size: int = 3000, generation: int = 1) -> CheckpointRef:
    """Commit a checkpoint of two files of random bytes."""
    files = {name: os.urandom(size) for name in ("weights.safetensors", "state/optimizer.safetensors")}
    return commit(rundir, step, generation, files=files)


def store(url: str, patience: float = 5.0) -> Store:
    server, _, prefix = url.partition(" ")
    return place(server, f"runs/{prefix}", patience)


def everything(rundir: RunDir) -> dict[str, bytes]:
    """The files of a run directory that a bucket has, too."""
    return {
        path.relative_to(rundir.path).as_posix(): path.read_bytes()
        for path in rundir.path.rglob("*")
        if path.is_file() and path.name != "buckets.json" and "attempt" not in path.parts
    }


def bring(url: str, rundir: RunDir) -> Uploader:
    """Upload a run directory completely, as its writer."""
    place = store(url)
    writer = claim(place, rundir, is_empty=False)
    uploader = Uploader(place, rundir, writer)
    uploader.survey()
    uploader.upload_checkpoints()
    uploader.upload_records()
    writer.end()
    return uploader


def get(url: str, folder: Path) -> RunDir:
    """Continue a run of a bucket in a new folder."""
    rundir = RunDir(folder)
    folder.mkdir()
    assert continue_run(store(url), rundir).downloaded is not None
    return rundir


def get_copy(url: str, folder: Path) -> RunDir:
    """Read a run of a bucket, as a copy that continues nothing."""
    rundir = RunDir(folder)
    downloader = Downloader(store(url))
    downloader.records(rundir)
    downloader.checkpoints(rundir, ["all"])
    return rundir


@contextmanager
def exchanging(synchronizer: Synchronizer, socket_path: Path) -> Iterator[None]:
    """Answer the processes of a pod as its exchange does, in a thread; they find it by the environment."""
    service = SyncService(synchronizer, lambda problem, blocks: None, threading.Event())
    with serving(_Server(str(socket_path), service.answer)), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(SOCKET, str(socket_path))
        yield


@contextmanager
def pod_of(url: str, rundir: RunDir, folder: Path) -> Iterator[Synchronizer]:
    """Make a run directory that of a pod of a job without a volume, with all its checkpoints in the bucket."""
    bucket = store(url)
    synchronizer = Synchronizer(bucket, rundir, claim(bucket, rundir, is_empty=True))
    synchronizer.upload()
    synchronizer.exchange()
    with exchanging(synchronizer, folder / "exchange.sock"):
        yield synchronizer
