"""`tandem run` as a user starts it, and eyes to watch it with."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tandem.processes.launch import PULSE
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.status import Snapshot
from tandem_launcher.local.guardian import MARK, marked
from tests.support import ROOT
from tests.support.lines import read_lines
from tests.support.processes import TANDEM, environment, tandem
from tests.support.waiting import until
from tests.support.warm_run import warm_run_environment
from tests.support.zygote import Forked

if TYPE_CHECKING:
    # It needs an emulator of terminals, and machines with a GPU may have none.
    from tests.support.terminal import Terminal

DIGITS = ROOT / "examples" / "digits.yaml"
SECONDS = 120.0
"""For what takes seconds on a machine that has nothing else to do."""


class LocalRun:
    """One `tandem run`, in a session of its own, its output in a file, or on a terminal if there is one.

    It and its processes are forked from ones that have imported torch (`zygote`, `warm_starter`), which saves 4 s of a
    processor for each, or else start as a user's do: where their start is what a test is about, and on a terminal.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        manifest: Path = DIGITS,
        cwd: Path = ROOT,
        terminal: "Terminal | None" = None,
        variables: Mapping[str, str] | None = None,
        warm: bool = True,
    ) -> None:
        self.path = folder / "run"
        self.run_dir = RunDir(self.path)
        self.pulses: set[str] = set()
        self.output_file = folder / f"output-{time.monotonic_ns()}.txt"
        arguments = ["run", str(manifest), "--run-dir", str(self.path), *words]
        self._warm = warm = warm and terminal is None
        own = {"PYTHONWARNINGS": "ignore", "COLUMNS": "200", **(variables or {})}
        self.process: subprocess.Popen[bytes] | Forked
        if terminal is not None:
            self.process = terminal.start([TANDEM, *arguments], cwd)
            return
        with self.output_file.open("wb") as output:
            if warm:
                whole = environment(own | warm_run_environment())
                self.process = Forked("tests.support.warm_run", arguments, whole, output, cwd=cwd, own_session=True)
                return
            self.process = subprocess.Popen(
                [TANDEM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                env=environment(own),
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    @property
    def mark(self) -> str:
        lock = read_json_or_none(self.path / "local.lock") or {}
        return str(lock.get("mark", ""))

    def processes(self) -> list[psutil.Process]:
        """All living processes of this run but `tandem run` and its guardian."""
        found = marked(self.mark) if self.mark else []
        for process in found:
            try:
                self.pulses.add(process.environ().get(PULSE, ""))
            except (psutil.Error, OSError):
                continue
        return found

    def of(self, name: str) -> psutil.Process | None:
        """The process of one child, once it has become its command; not the stub of one that was forked."""
        own = self._named(name)
        parents = {process.pid for process, _ in own}
        starters = {parent for _, parent in own} - parents - {self.process.pid} if self._warm else {self.process.pid}
        return next((process for process, parent in own if parent in starters), None)

    def _named(self, name: str) -> list[tuple[psutil.Process, int]]:
        """The living processes of one child, each with its parent."""
        found = []
        for process in self.processes():
            try:
                if process.environ().get(MARK, "").split("/")[1:2] == [name]:
                    found.append((process, process.ppid()))
            except psutil.Error:
                continue
        return found

    def rank_of(self, worker: str) -> psutil.Process | None:
        """A training process of one worker, which its fork server has made."""
        for process, _ in self._named(worker):
            try:
                if process.name() == "tandem-rank":
                    return process
            except psutil.Error:
                continue
        return None

    def status(self) -> Snapshot | None:
        """What the coordinator says; None while it does not."""
        endpoint = read_json_or_none(self.path / "endpoint.json")
        if not endpoint:
            return None
        try:
            with CoordinatorClient(endpoint["url"].removeprefix("http://"), endpoint["token"], timeout=5.0) as client:
                return client.status()
        except (Unreachable, CoordinatorRefused):
            return None

    def step(self) -> int:
        """Steps, as the coordinator knows them."""
        snapshot = self.status()
        progress = snapshot.status.progress if snapshot else None
        return progress.step if progress else 0

    def reaches(self, step: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.output
            return self.step() >= step

        until(there, f"step {step}")

    def called(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """One call of the command line, from a folder that has nothing to do with the run, without a cluster."""
        state = self.path.parent / "state"
        return tandem(*words, cwd=Path("/usr"), variables={"XDG_STATE_HOME": str(state), "PATH": "/usr/bin:/bin"})

    def interrupt(self) -> None:
        """Press Ctrl-C: the terminal's signal to the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self, seconds: float = SECONDS) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(seconds)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """Lines of the training logs, in the order of the generations."""
        lines = []
        for file in sorted(self.run_dir.log.glob("train-g*.jsonl")):
            lines += [line for line in read_lines(file)[0] if line.get("kind") == kind]
        return lines

    def final_step(self) -> int:
        """The step of DONE."""
        return int((self.run_dir.done() or {})["final"]["step"])

    def leavings(self) -> dict[str, list[str]]:
        """What should not be there after the end: processes, a listening port, temporary and shared files."""
        scratch = [str(path) for path in Path("/tmp").glob(f"tandem-{self.mark[:8]}-*")]
        shared = [path for path in self.pulses if path and Path(path).exists()]
        endpoint = [str(path) for path in [self.path / "endpoint.json"] if path.exists()]
        names = [str(process) for process in self.processes() + self.guardians()]
        found = {"processes": names, "scratch": scratch, "endpoint": endpoint, "shared": shared}
        return {kind: list_ for kind, list_ in found.items() if list_}

    def guardians(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self.mark and self.mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def __enter__(self) -> "LocalRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it whatever it does; its guardian sees to the rest."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        until(lambda: not self.guardians(), "the guardian is through")


class Lifetimes(threading.Thread):
    """Watches for how long the workers and evaluators of a run exist. Leaving the `with` block ends it."""

    def __init__(self, run: LocalRun) -> None:
        super().__init__(daemon=True)
        self._run, self._over = run, threading.Event()
        self._seen: dict[int, tuple[str, float, float]] = {}

    def run(self) -> None:
        while not self._over.wait(0.05):
            try:
                children = psutil.Process(self._run.process.pid).children()
            except psutil.Error:
                break
            for child in children:
                try:
                    role = "".join(child.environ().get(MARK, "").split("/")[1:2]).partition("-")[0]
                    alive = child.status() != psutil.STATUS_ZOMBIE
                except psutil.Error:
                    continue
                if alive and role in ("worker", "evaluator"):
                    now = time.monotonic()
                    self._seen[child.pid] = role, self._seen.get(child.pid, (role, now, now))[1], now

    def seconds(self, role: str) -> float:
        """Of all of this role together: `worker` or `evaluator`."""
        return sum(end - begin for one, begin, end in self._seen.values() if one == role)

    def __enter__(self) -> "Lifetimes":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def evaluations(path: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(path.glob("evaluations/step-*/g??????.json"))]
