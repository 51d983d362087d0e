"""The shell around one local run: carries out supervision's decisions, displays progress, and cleans up.

Everything that starts a process happens on the main thread (see tandem_cli.local.child); the only other thread asks
the coordinator for its snapshot.

The first seconds of a run must not be silent, so the latter is told in a few words.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Self

from tandem import launch
from tandem.datasets import cache_folder, private_folder
from tandem.exitcode import ExitCode
from tandem.formatting import number, several
from tandem.job import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.status import AGAIN, Event, Progress, Snapshot
from tandem.supervision import (
    Action,
    Ask,
    Child,
    Facts,
    FailRun,
    Finish,
    Kill,
    Role,
    StartChild,
    decide,
    ending,
    is_given_up,
    pause,
)
from tandem_cli.local.child import OF_AGENT, Process, last_lines
from tandem_cli.local.display import Display, Watch
from tandem_cli.local.guardian import NO_PICTURE, PICTURE, SWEEP_SECONDS
from tandem_cli.local.placement import Placement
from tandem_cli.local.prepare import HeldFolder
from tandem_cli.local.run_view import missed, over
from tandem_cli.terminal.screen import Scene, Trail, merged

HOST = "127.0.0.1"
COORDINATOR = "coordinator"
KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it has compiled. It runs whatever it finds there, so the folder has to be this user's own."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class Crew:
    """Builds the children of a run.

    Attributes:
        token: the secret that all but the evaluators know.
        mark: what all processes of this run carry in their environment.
        scratch: a private folder for temporary files, removed at the end.
        cores: how many the run may use.
        gpus: CUDA_VISIBLE_DEVICES of each replica; None leaves it alone.
        metrics_port: where the coordinator answers Prometheus without the token; None: nowhere.
    """

    job: DistributedTrainingJob
    run_dir: RunDir
    token: str
    mark: str
    scratch: Path
    placement: Placement
    cores: int
    gpus: Sequence[str] | None = None
    metrics_port: int | None = None

    @property
    def port_file(self) -> Path:
        """Where the coordinator writes the port it took."""
        return self.scratch / "port"

    def roles(self, trains: bool) -> dict[str, Role]:
        """Names of all children. A run that is complete needs no agents any more, only what evaluates the rest."""
        workers, evaluators = self.job.spec.workers, self.job.spec.evaluation
        names: dict[str, Role] = {COORDINATOR: "coordinator"}
        if trains:
            names |= {f"worker-{index}": "agent" for index in range(workers.replicas)}
        for replica in range(evaluators.replicas):
            names |= {f"evaluator-{replica}-{i}": "evaluator" for i in range(evaluators.processes_per_replica)}
        return names

    def coordinator(self, port: int) -> Process:
        """The coordinator, on a port that it keeps over all its lives (0: a free one, at first)."""
        command = launch.coordinator_command(HOST, port, self.port_file, metrics_port=self.metrics_port)
        variables = self._variables(COORDINATOR, f"{HOST}:{port}")
        return self._process(COORDINATOR, command, variables, self.placement.others)

    def agent(self, name: str, port: int) -> Process:
        """One replica."""
        index = int(name.rpartition("-")[2])
        endpoint = f"{HOST}:{port}"
        variables = self._variables(name, endpoint)
        variables.setdefault("OMP_NUM_THREADS", str(self.placement.threads))
        # All ranks are on this machine; the host's name may resolve to an interface that is down, or not at all.
        for library in ("GLOO", "NCCL"):
            variables.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus[index]
        command = launch.agent_command(self.job, endpoint, HOST)
        return self._process(name, command, variables, self.placement.of_worker(index))

    def evaluator(self, name: str) -> Process:
        """One evaluator process: on CPUs, with one thread."""
        replica, _, index = name.rpartition("-")
        own = launch.evaluator_environment(self.job, self.run_dir.path.resolve(), replica)
        variables = inherited(os.environ, self.scratch) | {"OMP_NUM_THREADS": "1"} | own | {"CUDA_VISIBLE_DEVICES": ""}
        command = launch.evaluator_command(int(index))
        return self._process(name, command, variables, self.placement.others)

    def log(self, name: str) -> Path:
        """What a child prints."""
        return self.run_dir.log / f"{name}.txt"

    def _process(self, name: str, command: list[str], variables: dict[str, str], cores: tuple[int, ...]) -> Process:
        return Process(name, command, variables, self.log(name), self.mark, cores)

    def _variables(self, replica: str, endpoint: str) -> dict[str, str]:
        own = launch.environment(self.job, self.run_dir.path.resolve(), replica, self.token, endpoint)
        return inherited(os.environ, self.scratch) | own


def inherited(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The user's variables for a child. Temporary files go where they are removed; compiled kernels are kept."""
    mine = {name: value for name, value in environment.items() if name != launch.TOKEN}
    if KERNELS not in mine:
        mine[KERNELS] = str(private_folder(cache_folder() / "kernels") or scratch / "kernels")
    return mine | {"TMPDIR": str(scratch)}


def waiting_for(children: Iterable[Child], snapshot: Snapshot | None, done: bool, own_command: bool = False) -> str:
    """Empty while training steps, or a script runs.

    Args:
        snapshot: the coordinator's newest, None before its first.
        done: training is complete.
        own_command: a command of the user's own trains, and what it begins with is its own business.
    """
    children = list(children)
    agents = [child for child in children if child.role == "agent"]
    evaluators = [child for child in children if child.role == "evaluator"]
    if done or not agents:
        left = sum(child.running for child in evaluators)
        return f"training is complete; {several(left, 'evaluator')} finishing" if left else "training is complete"
    if snapshot is None:
        return f"starting: coordinator, {several(len(agents), 'worker')}"
    _, again, seconds = (snapshot.status.message or "").rpartition(AGAIN)
    if again:
        return f"{again}{seconds}"
    there = len(snapshot.members)
    if snapshot.status.phase == "Running" and snapshot.status.progress is None:
        # A script of the user's own that says nothing of its steps.
        return ""
    if snapshot.status.progress is not None:
        if snapshot.status.phase != "Restarting":
            return ""
        return "restarting: " + (
            f"{there} of {len(agents)} workers are there" if there < len(agents) else "forming a group"
        )
    if there == 0:
        return f"starting: {several(len(agents), 'worker')} importing torch"
    if there < len(agents):
        return f"starting: {there} of {several(len(agents), 'worker')} are there"
    return "starting the script" if own_command else "starting: loading the data, building the model"


@dataclass(frozen=True)
class Asked:
    """How it stood when the user asked to stop."""

    saved: int | None
    """The step of the newest checkpoint, None if there was none."""
    step: int | None
    """Steps that were made, None if nobody had said."""


def leaving_for(children: Iterable[Child], asked: Asked, saved: int | None, requests: int, silent: bool = False) -> str:
    """What a run waits for that the user asked to stop, and what another Ctrl-C does.

    Args:
        saved: the step of the newest checkpoint.
        requests: how often the user asked.
        silent: a script of the user's own trains that says nothing of its steps, and saves on its own.
    """
    if requests > 1:
        return "leaving at once"
    running = [child for child in children if child.running]
    agents = sum(child.role == "agent" for child in running)
    evaluators = sum(child.role == "evaluator" for child in running)
    if agents and silent:
        what = f"ending the script: {several(agents, 'worker')} leaving"
    elif agents and saved == asked.saved:
        what = "saving" if asked.step is None else f"saving, at step {number(asked.step)}"
    elif agents:
        return f"saved checkpoint {number(saved or 0)}; {several(agents, 'worker')} leaving"
    elif evaluators:
        what = f"giving up the work of {several(evaluators, 'evaluator')}"
    else:
        return "leaving"
    return f"{what}; Ctrl-C again leaves at once"


def with_end(snapshot: Snapshot, end: Progress | None) -> Snapshot:
    """A snapshot of a run whose training is complete, with how far it came: the ranks may have ended before the
    coordinator heard of their steps, and it may not have seen yet that they are through.

    Args:
        end: how far training came, as its files tell it; None if that is not known.
    """
    known = snapshot.status.progress
    if end is None or (known is not None and known.total_steps is not None and known.step >= end.step):
        return snapshot
    return snapshot.model_copy(update={"status": snapshot.status.model_copy(update={"progress": end})})


def members_at_work(snapshot: Snapshot | None) -> list[str]:
    """Replicas whose ranks have made steps."""
    if snapshot is None:
        return []
    return [member.replica for member in snapshot.members if any(rank.step > 0 for rank in member.ranks)]


TICK_SECONDS = 0.1
"""Between two looks at the children, and at what is new."""
CALM_SECONDS = 1.0
"""The same while all run and nobody watches a picture: each look takes time of a core that a rank may want."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STALE_SECONDS = 3.0
"""So soon after a start, the coordinator may still speak of the life before."""
MAX_EVENTS = 50
OUTPUT_SECONDS = 0.5
"""Between two looks at what a script prints."""


class Requests:
    """How often the user asked to stop, by signal; and the signals that there is something to look at."""

    def __init__(self) -> None:
        self.count = 0
        self._signals: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It takes no lock: the main thread, which it interrupts, may hold it."""
        self.count += number in STOP_SIGNALS

    @contextmanager
    def caught(self) -> Iterator[Self]:
        """Take the signals that would end this process, and those that a child has ended."""
        reads, writes = os.pipe()
        for end in (reads, writes):
            os.set_blocking(end, False)
        before = {number: signal.signal(number, self) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        others = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._signals = reads
        try:
            yield self
        finally:
            self._signals = None
            signal.set_wakeup_fd(others)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reads)
            os.close(writes)

    def wait(self, seconds: float) -> None:
        """Until one of these signals comes, and no longer than that."""
        if self._signals is None:
            time.sleep(min(seconds, TICK_SECONDS))
        elif select.select([self._signals], [], [], seconds)[0]:
            os.read(self._signals, 4096)


class LocalRun:
    """One local run from the first process to the last.

    Args:
        trains: False when training is complete and only evaluation is left.
        shown: the run directory as the user would type it.
    """

    def __init__(
        self, crew: Crew, claim: HeldFolder, display: Display, requests: Requests, port: int, trains: bool, shown: str
    ) -> None:
        self._crew, self._claim, self._display, self._requests = crew, claim, display, requests
        self._port = port
        self._port_known = False
        self._shown = shown
        self.failure: FailRun | None = None
        """Why supervision gave up, if it did."""
        self.children = {name: Child(name=name, role=role) for name, role in crew.roles(trains).items()}
        self._processes: dict[str, Process] = {}
        self._events: list[Event] = []
        self._trail = Trail()
        self._watch: Watch | None = None
        self._started = time.monotonic()
        self._done_since: float | None = None
        self._asked: Asked | None = None
        self._last_output, self._output_at = "", 0.0
        self._training_first = False
        self._guardian_pipe: int | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._told_of_picture = False

    def run(self) -> None:
        """Until nothing is running and nothing will be. Leaves nothing behind, also when it raises."""
        try:
            self._guard()
            while not self._step(time.monotonic()):
                calm = self._is_calm
                if self._watch is not None:
                    self._watch.calm(calm)
                self._requests.wait(CALM_SECONDS if calm else TICK_SECONDS)
            self._display.end(self._last())
        finally:
            self._close()

    def _step(self, now: float) -> bool:
        self._look(now)
        actions = decide(list(self.children.values()), self._facts(now), now)
        for action in actions:
            self._do(action, now)
        self._tell_guardian(self._display.draws)
        self._display.show(self._scene(now))
        return any(isinstance(action, Finish) for action in actions)

    # What is so

    @property
    def _is_calm(self) -> bool:
        """Whether signals alone tell of whatever has to be done at once."""
        if self._display.draws or self._requests.count or not all(child.running for child in self.children.values()):
            return False
        return not self._waiting(self._watch.newest if self._watch else None)

    def _look(self, now: float) -> None:
        for name, child in self.children.items():
            if child.running and (code := self._processes[name].ended()) is not None:
                self.children[name] = ended = child.ended(code, now)
                self._report_end(ended)
        if not self._port_known and (ports := launch.ports(self._crew.port_file)):
            port = ports[0]
            self._port, self._port_known = port, True
            self._processes[COORDINATOR].command = self._crew.coordinator(port).command
            self._claim.publish(f"http://{HOST}:{port}", self._crew.token)
            self._watch = Watch(f"{HOST}:{port}", self._crew.token)
        snapshot = self._watch.newest if self._watch else None
        for name in members_at_work(snapshot):
            self._let_trainers_go_first()
            if name in self.children and now - (self.children[name].started_at or now) > STALE_SECONDS:
                self.children[name] = self.children[name].at_work()
        if self._guardian is not None and self._guardian.poll() is not None:
            self._say("warning", "the guardian of this run ended; starting another")
            self._guard()

    def _facts(self, now: float) -> Facts:
        run_dir, snapshot = self._crew.run_dir, self._watch.newest if self._watch else None
        done = run_dir.done_file.exists()
        if done and self._done_since is None:
            self._done_since = now
            self._let_evaluators_finish()
        return Facts(
            requests=self._requests.count,
            done=done,
            done_since=self._done_since,
            failed=run_dir.failed_file.exists(),
            reachable=self._port_known,
            own_command=self._own_command,
            begins_again=snapshot is not None and snapshot.finished == 0,
        )

    # What is done

    def _do(self, action: Action, now: float) -> None:
        match action:
            case StartChild(name):
                if name not in self._processes:
                    self._processes[name] = self._build(name)
                self._processes[name].start()
                self.children[name] = self.children[name].started(now)
            case Ask(name):
                if self.children[name].role == "evaluator":
                    # It has little to do any more, and nobody waits for it longer than needed.
                    self._processes[name].step_forward()
                self._processes[name].ask()
                self.children[name] = self.children[name].asked(now)
            case Kill(name):
                self._processes[name].kill()
            case FailRun(reason, message, _, code):
                self.failure = action
                self._crew.run_dir.mark_failed(reason, message, code)
            case Finish():
                pass

    def _build(self, name: str) -> Process:
        role = self.children[name].role
        if role == "coordinator":
            return self._crew.coordinator(self._port)
        if role == "agent":
            return self._crew.agent(name, self._port)
        return replace(self._crew.evaluator(name), background=self._training_first)

    def _let_trainers_go_first(self) -> None:
        """From the first step on, evaluators run on what is left free.

        Not before: torch takes two seconds of a core to import, which would take minutes on what ranks leave, and a
        short run would be over before its evaluators have begun.
        """
        if not self._training_first and self._done_since is None:
            self._training_first = True
            for name, process in self._processes.items():
                if self.children[name].role == "evaluator":
                    process.step_back()

    def _let_evaluators_finish(self) -> None:
        """Training is complete, and nobody is disturbed any more: what else is busy on this machine must not keep the
        user waiting for the last evaluation."""
        self._training_first = False
        for name, process in self._processes.items():
            if self.children[name].role == "evaluator":
                process.step_forward()

    def _guard(self) -> None:
        """Start the guardian, before anything that it is to guard."""
        read, write = os.pipe()
        paths = [self._crew.scratch, self._claim.endpoint_file]
        terminal = os.dup(sys.stdout.fileno()) if sys.stdout is not None and sys.stdout.isatty() else None
        drawn_on = [] if terminal is None else ["--terminal", str(terminal)]
        with self._crew.log("guardian").open("ab") as log:
            self._guardian = subprocess.Popen(
                launch.module_command("tandem_cli.local.guardian", *drawn_on, self._crew.mark, *map(str, paths)),
                stdin=read,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._claim.lock, *([] if terminal is None else [terminal])),
                start_new_session=True,
            )
        os.close(read)
        if terminal is not None:
            os.close(terminal)
        if self._guardian_pipe is not None:
            os.close(self._guardian_pipe)
        self._guardian_pipe = write
        self._told_of_picture = False

    def _tell_guardian(self, picture: bool) -> None:
        """Whether there is a picture on the terminal, which the guardian takes away if nobody else can."""
        if picture != self._told_of_picture and self._guardian_pipe is not None:
            self._told_of_picture = picture
            with suppress(OSError):
                os.write(self._guardian_pipe, PICTURE if picture else NO_PICTURE)

    def _close(self) -> None:
        with suppress(OSError):
            self._display.close()
        self._tell_guardian(False)
        for process in self._processes.values():
            process.close()
        if self._watch is not None:
            self._watch.close()
        if self._guardian_pipe is not None:
            os.close(self._guardian_pipe)
            self._guardian_pipe = None
        if self._guardian is not None:
            self._guardian.wait(SWEEP_SECONDS + 10.0)

    # What is said

    def _report_end(self, child: Child) -> None:
        if child.asked_at is not None or child.code == 0 or self._requests.count or self._crew.run_dir.ended():
            return
        word = last_lines(self._crew.log(child.name), 1)
        why = f" ({word[0].strip()})" if word and child.code is not None and child.code > 0 else ""
        what = f"{child.name} ended, {ending(child.code)}{why}"
        if child.code == ExitCode.LEFT_OUT:
            # The coordinator has said so, and why.
            return
        if is_given_up(child):
            self._say("error", f"{what}; it is not started again, see {child.name}.txt")
            return
        wait = pause(child.failures)
        self._say("warning", f"{what}; starting it again" + (f" in {wait:g} s" if wait else ""))

    def _say(self, kind: str, text: str) -> None:
        event = Event.model_validate({"at": time.time(), "kind": kind, "text": text})
        self._events = [*self._events[-MAX_EVENTS:], event]

    def _leaving(self, snapshot: Snapshot | None) -> str:
        """What is waited for since the user asked to stop."""
        saved = next((manifest.step for manifest in self._crew.run_dir.committed()), None)
        if self._asked is None:
            self._asked = Asked(saved, snapshot.status.progress.step if snapshot and snapshot.status.progress else None)
        silent = self._own_command and saved is None and self._asked.step is None
        return leaving_for(self.children.values(), self._asked, saved, self._requests.count, silent)

    def _output(self, now: float) -> str:
        """The last line that the script has printed, if it is the user's own: its first worker writes for all."""
        if self._own_command and now - self._output_at > OUTPUT_SECONDS:
            self._output_at, lines = now, last_lines(self._crew.log("worker-0"), 1, of_ranks=True)
            self._last_output = next((line for line in lines if not OF_AGENT.match(line)), self._last_output)
        return self._last_output

    def _waiting(self, snapshot: Snapshot | None) -> str:
        return waiting_for(self.children.values(), snapshot, self._done_since is not None, self._own_command)

    @property
    def _own_command(self) -> bool:
        return self._crew.job.spec.trainer.command is not None

    @cached_property
    def _end(self) -> Progress | None:
        """How far training came. Read once, when it is complete."""
        return over(self._crew.run_dir.path).progress

    def _last(self) -> Scene:
        """The run as its files tell it, now that it is over."""
        scene, status = self._scene(time.monotonic()), over(self._crew.run_dir.path)
        known = scene.snapshot or Snapshot(job=scene.job, time=time.time(), status=status)
        snapshot = known.model_copy(update={"status": status})
        late = missed(self._crew.run_dir.path, known.events, time.time() - scene.elapsed)
        events = merged(scene.events, late)
        return replace(scene, waiting="", notice="", leaving=False, draining=False, snapshot=snapshot, events=events)

    def _scene(self, now: float) -> Scene:
        snapshot = self._watch.newest if self._watch else None
        draining = self._done_since is not None and not self._requests.count
        if snapshot is not None and draining:
            snapshot = with_end(snapshot, self._end)
        if snapshot is not None:
            self._trail = self._trail.follow(snapshot)
        notice = self._leaving(snapshot) if self._requests.count else ""
        spec = self._crew.job.spec
        return Scene(
            job=self._crew.job.metadata.name,
            run_dir=self._shown,
            endpoint=f"http://{HOST}:{self._port}" if self._port_known else "",
            elapsed=now - self._started,
            waiting="" if notice or self._crew.run_dir.failed_file.exists() else self._waiting(snapshot),
            notice=notice,
            leaving=bool(self._requests.count),
            own_command=self._own_command,
            output=self._output(now),
            draining=draining,
            cores=self._crew.cores,
            evaluates=spec.evaluation.processes > 0,
            snapshot=snapshot,
            trail=self._trail,
            events=merged(snapshot.events if snapshot else (), self._events),
        )
