"""Runs one job on this machine: applies the decisions of tandem.processes.supervision, displays progress, and cleans
up.

All processes start on the main thread (see tandem_launcher.local.child); the only other thread polls the coordinator
for its snapshot.

The first seconds of a run must not be silent, so the display always tells what the run waits for.
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

from tandem.errors import UserError
from tandem.formatting import count_noun, number
from tandem.job.datasets import cache_folder, private_folder
from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.processes.limits import describe_kill, explain, oom_kills
from tandem.processes.supervision import (
    Action,
    Child,
    FailRun,
    Finish,
    KillChild,
    Role,
    RunFacts,
    StartChild,
    TerminateChild,
    decide,
    describe_exit,
    is_given_up,
    leaving_seconds,
    restart_delay,
)
from tandem.rundir.layout import RunDir
from tandem.wire.status import RESTART_DELAY_PREFIX, Event, Progress, Snapshot
from tandem_launcher.local.child import AGENT_LINE, Process, last_lines
from tandem_launcher.local.guardian import NO_PICTURE, PICTURE, SWEEP_SECONDS
from tandem_launcher.local.placement import Placement
from tandem_launcher.local.prepare import HeldFolder
from tandem_launcher.printed_log import describe_limit
from tandem_launcher.recorded_status import recorded_status, unseen_events
from tandem_launcher.terminal.display import Display, Watch
from tandem_launcher.terminal.screen import Scene, Trail, merged

HOST = "127.0.0.1"
COORDINATOR = "coordinator"
KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with torch's folder of compiled kernels. torch executes its content, so it must belong to this user."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class ProcessFactory:
    """Builds the child processes of a run.

    Attributes:
        token: the coordinator's secret; all children but the evaluators get it.
        mark: value that all processes of this run carry in their environment (see tandem_launcher.local.guardian).
        scratch: a private folder for temporary files, removed at the end.
        cores: number of cores that the run may use.
        gpus: CUDA_VISIBLE_DEVICES of each replica; None leaves the variable unchanged.
        evaluator_gpus: that of each replica of the evaluators; empty: they compute on CPUs.
        metrics_port: port on which the coordinator serves metrics without the token; None: no such port.
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
    evaluator_gpus: Sequence[str] = ()

    @property
    def port_file(self) -> Path:
        """File in which the coordinator writes its port."""
        return self.scratch / "port"

    def roles(self, trains: bool) -> dict[str, Role]:
        """Return the role of each child by name. A run whose training is complete gets evaluators, but no agents."""
        workers, evaluators = self.job.spec.workers, self.job.spec.evaluation
        names: dict[str, Role] = {COORDINATOR: "coordinator"}
        if trains:
            names |= {f"worker-{index}": "agent" for index in range(workers.replicas)}
        for replica in range(evaluators.replicas):
            names |= {f"evaluator-{replica}-{i}": "evaluator" for i in range(evaluators.processes_per_replica)}
        return names

    def coordinator(self, port: int) -> Process:
        """Build the coordinator, on a port that it keeps across restarts (0: the first life picks a free one)."""
        command = launch.coordinator_command(HOST, port, self.port_file, metrics_port=self.metrics_port)
        variables = self._variables(COORDINATOR, f"{HOST}:{port}")
        return self._process(COORDINATOR, command, variables, self.placement.shared)

    def agent(self, name: str, port: int) -> Process:
        """Build the agent of one replica."""
        index = int(name.rpartition("-")[2])
        endpoint = f"{HOST}:{port}"
        variables = self._variables(name, endpoint)
        variables.setdefault("OMP_NUM_THREADS", str(self.placement.threads))
        # All ranks are on this machine; the host's name may resolve to an interface that is down, or not at all.
        for library in ("GLOO", "NCCL"):
            variables.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
        if self.gpus is not None:
            variables[launch.VISIBLE_GPUS] = self.gpus[index]
        command = launch.agent_command(self.job, endpoint, HOST)
        return self._process(name, command, variables, self.placement.of_worker(index))

    def evaluator(self, name: str) -> Process:
        """Build an evaluator process: with one thread, and the GPUs of its replica."""
        replica, _, index = name.rpartition("-")
        own = launch.evaluator_environment(self.job, self.run_dir.path.resolve(), replica)
        gpus = self.evaluator_gpus[int(replica.rpartition("-")[2])] if self.evaluator_gpus else ""
        variables = inherited(os.environ, self.scratch) | {"OMP_NUM_THREADS": "1"} | own
        variables[launch.VISIBLE_GPUS] = gpus
        command = launch.evaluator_command(int(index))
        return self._process(name, command, variables, self.placement.shared)

    def log(self, name: str) -> Path:
        """Return the log file of a child's output."""
        return self.run_dir.log / f"{name}.txt"

    def _process(self, name: str, command: list[str], variables: dict[str, str], cores: tuple[int, ...]) -> Process:
        return Process(name, command, variables, self.log(name), self.mark, cores)

    def _variables(self, replica: str, endpoint: str) -> dict[str, str]:
        own = launch.environment(self.job, self.run_dir.path.resolve(), replica, self.token, endpoint)
        return inherited(os.environ, self.scratch) | own


def inherited(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Return the user's variables for a child. Temporary files go into `scratch`; compiled kernels outlive the run."""
    variables = {name: value for name, value in environment.items() if name != launch.TOKEN}
    if KERNELS not in variables:
        variables[KERNELS] = str(private_folder(cache_folder() / "kernels") or scratch / "kernels")
    return variables | {"TMPDIR": str(scratch)}


def describe_wait(children: Iterable[Child], snapshot: Snapshot | None, done: bool, own_command: bool = False) -> str:
    """Describe what the run waits for; empty while training makes steps, or a script runs.

    Args:
        snapshot: the coordinator's newest snapshot; None before the first.
        done: training is complete.
        own_command: a user's command trains, which need not report steps.
    """
    children = list(children)
    agents = [child for child in children if child.role == "agent"]
    evaluators = [child for child in children if child.role == "evaluator"]
    if done or not agents:
        running = sum(child.running for child in evaluators)
        return (
            f"training is complete; {count_noun(running, 'evaluator')} finishing" if running else "training is complete"
        )
    if snapshot is None:
        return f"starting: coordinator, {count_noun(len(agents), 'worker')}"
    _, separator, seconds = (snapshot.status.message or "").rpartition(RESTART_DELAY_PREFIX)
    if separator:
        return f"{separator}{seconds}"
    member_count = len(snapshot.members)
    if snapshot.status.phase == "Running" and snapshot.status.progress is None:
        # A user's script that does not report its steps.
        return ""
    if snapshot.status.progress is not None:
        if snapshot.status.phase != "Restarting":
            return ""
        return "restarting: " + (
            f"{member_count} of {len(agents)} workers joined" if member_count < len(agents) else "forming a group"
        )
    if member_count == 0:
        return f"starting: {count_noun(len(agents), 'worker')} importing torch"
    if member_count < len(agents):
        return f"starting: {member_count} of {count_noun(len(agents), 'worker')} joined"
    return "starting the script" if own_command else "starting: loading the data, building the model"


@dataclass(frozen=True)
class ProgressAtStop:
    """Progress of a run at the user's first request to stop."""

    saved: int | None
    """Step of the newest checkpoint; None if there was none."""
    step: int | None
    """Last reported step; None if no step was reported."""


def describe_stop(
    children: Iterable[Child], request: ProgressAtStop, saved: int | None, requests: int, silent: bool = False
) -> str:
    """Describe what a stopping run waits for, and what another Ctrl-C does.

    Args:
        request: the progress when the user asked to stop.
        saved: step of the newest checkpoint.
        requests: number of requests to stop so far.
        silent: a user's script trains that reports no steps and saves on its own.
    """
    if requests > 1:
        return "leaving at once"
    running = [child for child in children if child.running]
    agents = sum(child.role == "agent" for child in running)
    evaluators = sum(child.role == "evaluator" for child in running)
    if agents and silent:
        activity = f"ending the script: {count_noun(agents, 'worker')} leaving"
    elif agents and saved == request.saved:
        activity = "saving" if request.step is None else f"saving, at step {number(request.step)}"
    elif agents:
        return f"saved checkpoint {number(saved or 0)}; {count_noun(agents, 'worker')} leaving"
    elif evaluators:
        activity = f"giving up the work of {count_noun(evaluators, 'evaluator')}"
    else:
        return "leaving"
    return f"{activity}; Ctrl-C again leaves at once"


def with_end(snapshot: Snapshot, end: Progress | None) -> Snapshot:
    """Return the snapshot with the final progress, once training is complete.

    The ranks may have ended before they reported their last steps to the coordinator.

    Args:
        end: the final progress, read from the run directory; None if it is unknown.
    """
    reported = snapshot.status.progress
    if end is None or (reported is not None and reported.total_steps is not None and reported.step >= end.step):
        return snapshot
    return snapshot.model_copy(update={"status": snapshot.status.model_copy(update={"progress": end})})


def members_at_work(snapshot: Snapshot | None) -> list[str]:
    """Return the replicas whose ranks have made steps."""
    if snapshot is None:
        return []
    return [member.replica for member in snapshot.members if any(rank.step > 0 for rank in member.ranks)]


TICK_SECONDS = 0.1
"""Interval between polls of the children and the snapshot, in seconds."""
CALM_SECONDS = 1.0
"""Poll interval while all children run and no screen is drawn: a poll takes time of a core that a rank may need."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STALE_SECONDS = 3.0
"""Age of a life, in seconds, below which the snapshot may still describe the previous life."""
MAX_EVENTS = 50
OUTPUT_SECONDS = 0.5
"""Interval between reads of a script's output, in seconds."""


class Requests:
    """Counts the user's requests to stop, by signal, and wakes the main loop when a signal arrives."""

    def __init__(self) -> None:
        self.count = 0
        self._signals: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It takes no lock: the main thread, which it interrupts, may hold it."""
        self.count += number in STOP_SIGNALS

    @contextmanager
    def caught(self) -> Iterator[Self]:
        """Handle SIGCHLD and the signals that would end this process."""
        reads, writes = os.pipe()
        for end in (reads, writes):
            os.set_blocking(end, False)
        previous_handlers = {number: signal.signal(number, self) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        previous_fd = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._signals = reads
        try:
            yield self
        finally:
            self._signals = None
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            os.close(reads)
            os.close(writes)

    def wait(self, seconds: float) -> None:
        """Sleep until one of these signals arrives, at most `seconds`."""
        if self._signals is None:
            time.sleep(min(seconds, TICK_SECONDS))
        elif select.select([self._signals], [], [], seconds)[0]:
            os.read(self._signals, 4096)


NO_PROCESS = "no further process can be started here"


@contextmanager
def _limit_named(consequence: str) -> Iterator[None]:
    """Raise a UserError with this consequence for an error that a limit of this process has caused."""
    try:
        yield
    except OSError as error:
        if limit := explain(error):
            raise UserError(f"{consequence}: {error.strerror} ({limit})") from error
        raise


class LocalRun:
    """One local run, from the first process to the last.

    Args:
        trains: False when training is complete and only evaluation remains.
        display_path: the run directory as the user would type it.
    """

    def __init__(
        self,
        factory: ProcessFactory,
        claim: HeldFolder,
        display: Display,
        requests: Requests,
        port: int,
        trains: bool,
        display_path: str,
    ) -> None:
        self._factory, self._claim, self._display, self._requests = factory, claim, display, requests
        self._port = port
        self._is_port_known = False
        self._display_path = display_path
        self.failure: FailRun | None = None
        """The failure for which supervision gave up; None if it did not."""
        self.children = {
            name: Child(name=name, role=role, leaving_seconds=leaving_seconds(factory.job, role))
            for name, role in factory.roles(trains).items()
        }
        self._processes: dict[str, Process] = {}
        self._events: list[Event] = []
        self._trail = Trail()
        self._watch: Watch | None = None
        self._started = time.monotonic()
        self._done_since: float | None = None
        self._stop_request: ProgressAtStop | None = None
        self._last_output, self._output_at = "", 0.0
        self._is_training_prioritized = False
        self._guardian_pipe: int | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._reported_picture = False
        self._oom_kills = oom_kills()
        self._limited: set[str] = set()
        """Children whose logs have exceeded their bound, which is reported once."""

    def run(self) -> None:
        """Run until the job has ended. Leaves no process behind, even if it raises.

        Raises:
            UserError: this process has met a limit of its own.
        """
        try:
            with _limit_named("this run cannot continue"):
                # The guardian first: from here on every process that starts is cleaned up, however this one ends.
                self._guard()
                while not self._step(time.monotonic()):
                    # Child ends and requests to stop wake the wait below; only the display needs the short interval.
                    calm = self._is_calm
                    if self._watch is not None:
                        self._watch.calm(calm)
                    self._requests.wait(CALM_SECONDS if calm else TICK_SECONDS)
                self._display.end(self._final_scene())
        finally:
            self._close()

    def _step(self, now: float) -> bool:
        """Observe, decide and act once; return whether the run is over."""
        self._poll(now)
        # Supervision decides from these facts alone, so that its decisions can be tested without processes.
        actions = decide(list(self.children.values()), self._facts(now), now)
        for action in actions:
            self._apply(action, now)
        # Before the first frame: if this process died in between, nobody would restore the terminal.
        self._report_picture(self._display.draws)
        self._display.show(self._scene(now))
        return any(isinstance(action, Finish) for action in actions)

    # Observe

    @property
    def _is_calm(self) -> bool:
        """Whether a signal will announce everything urgent, so that the poll interval may be long."""
        if self._display.draws or self._requests.count or not all(child.running for child in self.children.values()):
            return False
        return not self._waiting(self._watch.newest if self._watch else None)

    def _poll(self, now: float) -> None:
        for name, child in self.children.items():
            # 1. Ends of children. The check also kills descendants that an ended child left behind.
            if child.running and (code := self._processes[name].ended()) is not None:
                self.children[name] = ended = child.ended(code, now)
                self._record_end(ended)
        # 2. The coordinator's port, once it has picked one: agents need it, and later lives must keep it.
        if not self._is_port_known and (ports := launch.read_ports(self._factory.port_file)):
            port = ports[0]
            self._port, self._is_port_known = port, True
            self._processes[COORDINATOR].command = self._factory.coordinator(port).command
            self._claim.publish(f"http://{HOST}:{port}", self._factory.token)
            self._watch = Watch(f"{HOST}:{port}", self._factory.token)
        snapshot = self._watch.newest if self._watch else None
        # 3. Children that make steps. A child proven at work is restarted without a growing delay.
        for name in members_at_work(snapshot):
            self._prioritize_training()
            if name in self.children and now - (self.children[name].started_at or now) > STALE_SECONDS:
                self.children[name] = self.children[name].at_work()
        # 4. The guardian. Without one, a SIGKILL of this process would leave children running.
        if self._guardian is not None and self._guardian.poll() is not None:
            self._record_event("warning", "the guardian of this run ended; starting another")
            self._guard()
        # 5. The kernel's kills for lack of memory, so that the next end of a child is told apart from others.
        self._oom_kills = oom_kills()
        # 6. The size of the logs. A script that prints without end must not fill the disk of its checkpoints.
        for name, process in self._processes.items():
            process.limiter.poll()
            if process.limiter.parts and name not in self._limited:
                self._limited.add(name)
                self._record_event("warning", describe_limit(process.log))

    def _facts(self, now: float) -> RunFacts:
        run_dir, snapshot = self._factory.run_dir, self._watch.newest if self._watch else None
        # The files of the run directory decide, not the snapshot: they outlive the coordinator.
        done = run_dir.done_file.exists()
        if done and self._done_since is None:
            self._done_since = now
            self._prioritize_evaluation()
        return RunFacts(
            requests=self._requests.count,
            done=done,
            done_since=self._done_since,
            failed=run_dir.failed_file.exists(),
            reachable=self._is_port_known,
            own_command=self._own_command,
            begins_again=snapshot is not None and snapshot.finished == 0,
        )

    # Act

    def _apply(self, action: Action, now: float) -> None:
        match action:
            case StartChild(name):
                if name not in self._processes:
                    self._processes[name] = self._build(name)
                with _limit_named(NO_PROCESS):
                    self._processes[name].start()
                self.children[name] = self.children[name].started(now)
            case TerminateChild(name):
                if self.children[name].role == "evaluator":
                    # An evaluator at idle priority could not use its short grace period.
                    self._processes[name].step_forward()
                self._processes[name].ask()
                self.children[name] = self.children[name].asked(now)
            case KillChild(name):
                self._processes[name].kill()
            case FailRun(reason, message, child, code):
                self.failure = action
                if last_line := "".join(last_lines(self._factory.log(child), 1, of_ranks=True)).strip():
                    # Children have the limits of this process.
                    limit = explain(RuntimeError(last_line))
                    message = f"{message}: {last_line}" + (f" ({limit})" if limit else "")
                self._factory.run_dir.mark_failed(reason, message, code)
            case Finish():
                pass

    def _build(self, name: str) -> Process:
        role = self.children[name].role
        if role == "coordinator":
            return self._factory.coordinator(self._port)
        if role == "agent":
            return self._factory.agent(name, self._port)
        return replace(self._factory.evaluator(name), background=self._is_training_prioritized)

    def _prioritize_training(self) -> None:
        """Lower the priority of evaluators to idle, from the first step on.

        Not earlier: the import of torch takes two seconds of a core, which would take minutes on idle time, and a
        short run would be over before its evaluators have started.
        """
        if not self._is_training_prioritized and self._done_since is None:
            self._is_training_prioritized = True
            for name, process in self._processes.items():
                if self.children[name].role == "evaluator":
                    process.step_back()

    def _prioritize_evaluation(self) -> None:
        """Restore the evaluators' priority, once training is complete.

        They disturb no rank any more, and other load on this machine must not delay the last evaluation.
        """
        self._is_training_prioritized = False
        for name, process in self._processes.items():
            if self.children[name].role == "evaluator":
                process.step_forward()

    def _guard(self) -> None:
        """Start the guardian; call it before the first child starts."""
        read, write = os.pipe()
        paths = [self._factory.scratch, self._claim.endpoint_file]
        terminal = os.dup(sys.stdout.fileno()) if sys.stdout is not None and sys.stdout.isatty() else None
        terminal_options = [] if terminal is None else ["--terminal", str(terminal)]
        with _limit_named(NO_PROCESS), self._factory.log("guardian").open("ab") as log:
            self._guardian = subprocess.Popen(
                launch.module_command(
                    "tandem_launcher.local.guardian", *terminal_options, self._factory.mark, *map(str, paths)
                ),
                stdin=read,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._claim.lock, *([] if terminal is None else [terminal])),
                start_new_session=True,
            )
        # The guardian alone keeps the read end. No child inherits the write end, so it closes when this process dies.
        os.close(read)
        if terminal is not None:
            os.close(terminal)
        if self._guardian_pipe is not None:
            os.close(self._guardian_pipe)
        self._guardian_pipe = write
        self._reported_picture = False

    def _report_picture(self, draws: bool) -> None:
        """Report to the guardian whether the display draws on the terminal, which it would have to restore."""
        if draws != self._reported_picture and self._guardian_pipe is not None:
            self._reported_picture = draws
            with suppress(OSError):
                os.write(self._guardian_pipe, PICTURE if draws else NO_PICTURE)

    def _close(self) -> None:
        with suppress(OSError):
            self._display.close()
        self._report_picture(False)
        # Children before the guardian: what they leave behind is still its work.
        for process in self._processes.values():
            process.close()
        if self._watch is not None:
            self._watch.close()
        if self._guardian_pipe is not None:
            # The end of its input makes the guardian sweep and exit.
            os.close(self._guardian_pipe)
            self._guardian_pipe = None
        if self._guardian is not None:
            self._guardian.wait(SWEEP_SECONDS + 10.0)

    # Display

    def _record_end(self, child: Child) -> None:
        # Expected ends need no event: the child was asked, it completed, or the whole run is ending.
        if child.asked_at is not None or child.code == 0 or self._requests.count or self._factory.run_dir.ended():
            return
        last_line = last_lines(self._factory.log(child.name), 1)
        detail = f" ({last_line[0].strip()})" if last_line and child.code is not None and child.code > 0 else ""
        how = describe_kill(child.code, self._oom_kills) or describe_exit(child.code)
        summary = f"{child.name} ended, {how}{detail}"
        if child.code == ExitCode.LEFT_OUT:
            # The coordinator has reported it, with the reason.
            return
        if is_given_up(child):
            self._record_event("error", f"{summary}; it is not started again, see {child.name}.txt")
            return
        delay = restart_delay(child.failures)
        self._record_event("warning", f"{summary}; starting it again" + (f" in {delay:g} s" if delay else ""))

    def _record_event(self, kind: str, text: str) -> None:
        event = Event.model_validate({"at": time.time(), "kind": kind, "text": text})
        self._events = [*self._events[-MAX_EVENTS:], event]

    def _leaving(self, snapshot: Snapshot | None) -> str:
        """Describe what the run waits for since the user asked to stop."""
        saved = next((manifest.step for manifest in self._factory.run_dir.committed()), None)
        if self._stop_request is None:
            self._stop_request = ProgressAtStop(
                saved, snapshot.status.progress.step if snapshot and snapshot.status.progress else None
            )
        silent = self._own_command and saved is None and self._stop_request.step is None
        return describe_stop(self.children.values(), self._stop_request, saved, self._requests.count, silent)

    def _output(self, now: float) -> str:
        """Return the last line that a user's script printed; the first worker stands for all."""
        if self._own_command and now - self._output_at > OUTPUT_SECONDS:
            self._output_at, lines = now, last_lines(self._factory.log("worker-0"), 1, of_ranks=True)
            self._last_output = next((line for line in lines if not AGENT_LINE.match(line)), self._last_output)
        return self._last_output

    def _waiting(self, snapshot: Snapshot | None) -> str:
        return describe_wait(self.children.values(), snapshot, self._done_since is not None, self._own_command)

    @property
    def _own_command(self) -> bool:
        return self._factory.job.spec.trainer.command is not None

    @cached_property
    def _end(self) -> Progress | None:
        """Final progress, read once, when training is complete."""
        return recorded_status(self._factory.run_dir.path, alive=False).progress

    def _final_scene(self) -> Scene:
        """Build the final scene from the run directory, once the run is over."""
        scene, status = self._scene(time.monotonic()), recorded_status(self._factory.run_dir.path, alive=False)
        last = scene.snapshot or Snapshot(job=scene.job, time=time.time(), status=status)
        snapshot = last.model_copy(update={"status": status})
        # The coordinator may have ended before the last poll, so its log can have events that no snapshot had.
        unseen = unseen_events(self._factory.run_dir.path, last.events, time.time() - scene.elapsed)
        events = merged(scene.events, unseen)
        return replace(scene, waiting="", notice="", leaving=False, draining=False, snapshot=snapshot, events=events)

    def _scene(self, now: float) -> Scene:
        snapshot = self._watch.newest if self._watch else None
        draining = self._done_since is not None and not self._requests.count
        if snapshot is not None and draining:
            # The coordinator stops updating when the ranks end; the files have the final step.
            snapshot = with_end(snapshot, self._end)
        if snapshot is not None:
            self._trail = self._trail.follow(snapshot)
        notice = self._leaving(snapshot) if self._requests.count else ""
        spec = self._factory.job.spec
        return Scene(
            job=self._factory.job.metadata.name,
            run_dir=self._display_path,
            endpoint=f"http://{HOST}:{self._port}" if self._is_port_known else "",
            elapsed=now - self._started,
            waiting="" if notice or self._factory.run_dir.failed_file.exists() else self._waiting(snapshot),
            notice=notice,
            leaving=bool(self._requests.count),
            own_command=self._own_command,
            output=self._output(now),
            draining=draining,
            cores=self._factory.cores,
            evaluates=spec.evaluation.processes > 0,
            snapshot=snapshot,
            trail=self._trail,
            events=merged(snapshot.events if snapshot else (), self._events),
        )
