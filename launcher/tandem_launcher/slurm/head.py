"""The head: the process in a batch script of SLURM that starts the processes of a job, and restarts those that fail.

    python -m tandem_launcher.slurm.head train --run-dir DIR [--evaluators] -- srun OPTIONS…
    python -m tandem_launcher.slurm.head evaluate --run-dir DIR

The coordinator runs beside it, on the first node. On each node of the job, a step (tandem_launcher.slurm.step) runs one
agent; with `--evaluators` further steps run the evaluators on the same nodes. tandem.processes.supervision decides
which child to start, stop or give up, as on a laptop. The difference: nodes come and go. SLURM removes a failed node
from the job, together with its agent; the coordinator then forms a smaller group. A step that could not start, or was
lost with its node, is no failure of its agent, and is retried later. For a failed node, or for workers that `tandem
scale` adds, the head submits one-node jobs (tandem_launcher.slurm.extension).

SIGTERM arrives before the time limit and before a preemption: all processes save and exit, and the job is requeued
under the same ID. After SIGINT, which `tandem stop` sends, it ends instead. Both reach this process only
(`--signal=B:`, `scancel --batch`).
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Literal

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_job, raise_for_unmet, read_source
from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.processes.supervision import (
    SAVING_SECONDS,
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
    leaving_seconds,
)
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem.wire.status import Snapshot
from tandem_launcher.local.local_run import COORDINATOR, STALE_SECONDS, members_at_work
from tandem_launcher.local.prepare import need_space, publish
from tandem_launcher.local.processes import user_name
from tandem_launcher.printed_log import describe_limit
from tandem_launcher.slurm import jobs, preparation, scheduler
from tandem_launcher.slurm.extension import Extensions
from tandem_launcher.slurm.jobs import NodeAllocation, Submission
from tandem_launcher.slurm.process_factory import SlurmProcessFactory, SlurmStep
from tandem_launcher.slurm.refusals import Refusals
from tandem_launcher.slurm.scheduler import SlurmError, SlurmUnavailableError, Throttle
from tandem_launcher.slurm.step import PING_SECONDS
from tandem_launcher.terminal.display import Watch

TICK_SECONDS = 0.2
"""Poll interval of the children, in seconds."""
NODES_SECONDS = 10.0
"""Poll interval of the job's nodes, in seconds."""
TRAINING_SECONDS = 60.0
"""Interval at which evaluators check that their training is in the queue, in seconds."""
RETRY_SECONDS = 10.0
"""Delay after a step that could not start or was lost, in seconds."""
REQUEUE_SECONDS, REQUEUE_PAUSE = 300.0, 2.0
"""Timeout of a requeue while SLURM does not answer, and the pause between attempts, in seconds."""
JOB_ID, ARRAY_JOB_ID, ARRAY_TASK_ID = "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"

log = logging.getLogger("tandem.slurm")


class SlurmRunner:
    """Runs one life of a job on SLURM, or of one element of its evaluators' array.

    Args:
        processes: builds the child processes.
        array: index in the array of evaluators; None: this is the training.
        runs_evaluators: whether evaluators run as steps of the training.
        metrics_targets: folder in which Prometheus looks for targets; None: no target is written.
        replace_nodes: whether it submits jobs for missing nodes.
    """

    def __init__(
        self,
        processes: SlurmProcessFactory,
        array: int | None,
        runs_evaluators: bool,
        metrics_targets: Path | None = None,
        replace_nodes: bool = False,
    ) -> None:
        self.processes = processes
        self.leaving: Literal["", "requeue", "stop"] = ""
        """Whether the run is ending, and whether it is requeued afterwards."""
        self.steps: dict[str, SlurmStep] = {}
        self._allocations: dict[str, NodeAllocation] = {}
        """Node of each agent, of the job itself or of an extension."""
        self._extensions = Extensions(processes.run_dir.path, replace_nodes)
        self._refusals = Refusals(processes.run_dir.path)
        self._declined: int | None = None
        """Number of the manifest's nodes that the user took from the job; None: not known yet."""
        self._target_replicas: int | None = None
        """Target number of replicas at the last poll."""
        self._surplus: set[str] = set()
        """Agents whose nodes are released."""
        self.children: dict[str, Child] = {}
        self._not_before: dict[str, float] = {}
        self._address = ""
        self._port = 0
        self._metrics_port = None if metrics_targets is None else 0
        # A requeued job keeps its ID, and so the name of its file.
        self._target = None if metrics_targets is None else metrics_targets / f"tandem-{processes.job_id}.json"
        self._watch: Watch | None = None
        self._publish_at: float | None = 0.0
        """Time of the next attempt to publish the coordinator's address; None: it is published."""
        self.poll_nodes = Throttle(NODES_SECONDS)
        self._poll_training = Throttle(TRAINING_SECONDS)
        self._ping = Throttle(PING_SECONDS)
        self._done_since: float | None = None
        self._exists: dict[Path, bool] = {}
        """Whether files of the run directory existed at the last poll."""
        self._disk_warning = Throttle(RETRY_SECONDS)
        self._failure = ""
        """Reason of a failure that the run directory cannot record, because its disk is full."""
        if array is not None:
            self._add(f"evaluator-{array}", "evaluator")
            return
        self._add(COORDINATOR, "coordinator")
        for index in range(processes.job.spec.evaluation.replicas if runs_evaluators else 0):
            self._add(f"evaluator-{index}", "evaluator")

    def _add(self, name: str, role: Role) -> None:
        leaving = leaving_seconds(self.processes.job, role)
        child = Child(name=name, role=role, saving_seconds=self.processes.saving_seconds, leaving_seconds=leaving)
        self.children[name] = child

    def run(self) -> ExitCode:
        """Run until the job has ended; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            while not self.turn(time.monotonic()):
                time.sleep(TICK_SECONDS)
        finally:
            self.close()
        return self._finish()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.leaving != "stop":
            self.leaving = "stop" if number == signal.SIGINT else "requeue"

    @property
    def _trains(self) -> bool:
        return COORDINATOR in self.children

    def turn(self, now: float) -> bool:
        """Observe, decide and act once; return whether the job has ended."""
        self._poll(now)
        if self._ping.is_due():
            for step in self.steps.values():
                # A step without pings for a minute checks whether the head's node is lost.
                step.ping()
        # Agents whose node is released are not restarted.
        active = [child for child in self.children.values() if child.running or child.name not in self._surplus]
        facts = self._facts(now)
        actions = decide(active, facts, now)
        if not (self.leaving or facts.failed) and self._refusals.is_hopeless(self._allocations):
            reason = f"srun starts no agent of this job: {self._refusals.reason}"
            actions = [FailRun("StepsRefused", reason, next(iter(self._allocations)), ExitCode.FAILED)]
        for action in actions:
            # Supervision does not know of nodes, so the delay after a lost step is applied here.
            if not (isinstance(action, StartChild) and now < self._not_before.get(action.name, 0.0)):
                self._apply(action, now)
        if self._watch is not None:
            self._watch.calm(self._is_calm)
        return any(isinstance(action, Finish) for action in actions)

    @property
    def _is_calm(self) -> bool:
        """Whether nothing waits for the coordinator's next snapshot."""
        return not self.leaving and all(child.running for child in self.children.values())

    # Observe

    def _poll(self, now: float) -> None:
        # 1. Ends of children, and starts that srun had refused before.
        for name, child in list(self.children.items()):
            if child.running and (code := self.steps[name].ended()) is not None:
                self.children[name] = self._record_end(child, code, now)
            elif child.running and self._refusals.waits_for(name) and self.steps[name].preamble() is None:
                self._refusals.mark_started(name)
        for step in self.steps.values():
            if step.limit_log():
                log.warning("event=log-limited why=%r", describe_limit(step.log))
        # 2. The coordinator and the nodes; an array of evaluators has only its training to watch.
        if self._trains:
            self._poll_coordinator(now)
            if not self.leaving and self.poll_nodes.is_due():
                self._poll_nodes(now)
        elif not self.leaving and self._poll_training.is_due() and self._training_is_gone():
            log.info("event=no-training")
            self.leaving = "stop"

    def _record_end(self, child: Child, code: int, now: float) -> Child:
        step = self.steps[child.name]
        outcome, preamble = step.outcome(), step.preamble()
        if preamble is None:
            self._refusals.mark_started(child.name)
        if outcome is None:
            # The node or SLURM ended it, so this is no failure of the job.
            log.warning("event=lost name=%s node=%s srun=%d", child.name, step.node or "here", code)
            # Output before the step's start, from a node that is up: srun refused to start it.
            if preamble and step.node and not self.leaving and self._is_up(step.node):
                self._refusals.add(child.name, step.node, preamble)
            self._not_before[child.name] = now + RETRY_SECONDS
            self.poll_nodes.hurry()
            # Once training is complete, an evaluator that is lost repeatedly must not keep the job alive.
            is_last = child.role == "evaluator" and self._done_since is not None and not child.proven
            failures = child.failures + (1 if is_last else 0)
            return replace(child, running=False, ended_at=now, code=None, failures=failures)
        if child.name in self._surplus:
            self.poll_nodes.hurry()
        if child.role == "coordinator" and outcome == ExitCode.SUPERSEDED:
            # Another coordinator owns this run now.
            self.leaving = "stop"
        level = logging.INFO if outcome == 0 or self.leaving else logging.WARNING
        log.log(level, "event=ended name=%s node=%s how=%r", child.name, step.node or "here", describe_exit(outcome))
        return child.ended(outcome, now)

    def _training_is_gone(self) -> bool:
        """Whether the training of these evaluators has left the queue without being complete."""
        recorded = jobs.submission_of(self.processes.run_dir.path)
        try:
            left_queue = recorded is None or not scheduler.queue([recorded.training])
        except SlurmError:
            return False
        return left_queue and not self.processes.run_dir.ended()

    def _poll_coordinator(self, now: float) -> None:
        if self._watch is None and self._address and (ports := launch.read_ports(self.processes.port_file)):
            self._port = ports[0]
            self._watch = Watch(f"127.0.0.1:{self._port}", self.processes.token)
            log.info("event=coordinator endpoint=%s", self._endpoint)
            if self._target is not None:
                self._metrics_port = ports[1]
                self._publish_target(self._target, launch.endpoint(self._address, ports[1]))
        if self._watch is not None and self._publish_at is not None and now >= self._publish_at:
            self._publish_endpoint(now)
        for name in members_at_work(self._snapshot):
            child = self.children.get(name)
            if child is not None and now - (child.started_at or now) > STALE_SECONDS:
                self.children[name] = child.at_work()

    def _publish_endpoint(self, now: float) -> None:
        """Write the coordinator's address for the user's commands. Training continues if that fails."""
        try:
            publish(self.processes.run_dir.path / ENDPOINT, f"http://{self._endpoint}", self.processes.token)
            self._publish_at = None
        except OSError as error:
            self._publish_at = now + RETRY_SECONDS
            log.warning("event=endpoint-not-published why=%r", error.strerror)

    def _publish_target(self, file: Path, address: str) -> None:
        """Write the target file for Prometheus. Training continues if that fails."""
        run_dir = self.processes.run_dir.path
        labels = {"job": self.processes.job.metadata.name, "run": str(run_dir), "user": user_name(os.geteuid())}
        try:
            replace_json(file, [{"targets": [address], "labels": labels | {"slurm_job_id": self.processes.job_id}}])
        except OSError as error:
            log.warning("event=metrics-not-published file=%s why=%r", file, error.strerror)

    @property
    def _endpoint(self) -> str:
        return launch.endpoint(self._address, self._port)

    @property
    def _snapshot(self) -> Snapshot | None:
        return self._watch.newest if self._watch else None

    def _poll_nodes(self, now: float) -> None:
        try:
            own = [NodeAllocation(self.processes.job_id, node) for node in scheduler.nodes(self.processes.job_id)]
            current = [*own, *self._extensions.poll()]
            if not self._address:
                self._address = scheduler.node(os.environ.get("SLURMD_NODENAME") or own[0].node).address
        except (SlurmError, IndexError, OSError) as error:
            # Keep the last known nodes: a busy controller must not cost agents.
            log.warning("event=nodes-unknown why=%r", str(error))
            return
        own_node = os.environ.get("SLURMD_NODENAME")
        if own and own_node and own_node not in {allocation.node for allocation in own}:
            # SLURM has removed this very node: it cannot signal the head any more, so requeue now.
            log.warning("event=node-given-up node=%s", own_node)
            self.leaving = "requeue"
            return
        if self._declined is None:
            # Fewer nodes than replicas from the start: the user changed the script.
            self._declined = max(0, self.processes.job.spec.workers.replicas - len(own))
        # Nodes that are gone: drop their agents. Those of an ending extension stay until they have saved.
        for name, allocation in list(self._allocations.items()):
            if allocation not in current and allocation not in self._extensions.ending:
                log.warning("event=node-gone name=%s node=%s", name, allocation.node)
                if allocation.job == self.processes.job_id and self._is_up(allocation.node):
                    # The node is up, so it did not fail: the user shrank the job.
                    self._declined += 1
                self.children.pop(name)
                if step := self.steps.pop(name, None):
                    step.close()
                del self._allocations[name]
                self._refusals.drop(name)
        # New nodes: each gets an agent with the lowest free number.
        for allocation in current:
            if allocation not in self._allocations.values():
                name = next(f"worker-{i}" for i in range(len(current)) if f"worker-{i}" not in self._allocations)
                self._allocations[name] = allocation
                self._add(name, "agent")
                log.info("event=node name=%s node=%s job=%s", name, allocation.node, allocation.job)
        # The coordinator knows the target; the difference to the job's own nodes is covered by extensions.
        if self._snapshot is not None and self._snapshot.status.workers is not None:
            target = self._snapshot.status.workers.desired
            if self._target_replicas not in (None, target):
                # A new target replaces earlier changes of the job's size.
                self._declined = 0
            self._target_replicas = target
            self._adjust_extensions(max(0, target - self._declined - len(own)), now)

    def _is_up(self, node: str) -> bool:
        try:
            return scheduler.node(node).responds
        except SlurmError:
            return False

    def _adjust_extensions(self, count: int, now: float) -> None:
        """Submit missing extensions, and release surplus ones.

        Args:
            count: target number of extensions.
        """
        done = self._file_exists(self.processes.run_dir.done_file)
        if done:
            count = 0
        self._extensions.request(count)
        surplus = self._extensions.surplus(count)
        self._surplus = {name for name, allocation in self._allocations.items() if allocation.job in surplus}
        at_work = {name for name in self._surplus if self.children[name].running}
        for name in at_work:
            # An agent saves before its node is released; once training is complete, agents exit by themselves.
            if not done and self.children[name].asked_at is None:
                self._apply(TerminateChild(name), now)
        for job in surplus:
            if not any(self._allocations[name].job == job for name in at_work):
                self._extensions.release(job)

    def _facts(self, now: float) -> RunFacts:
        run_dir, snapshot = self.processes.run_dir, self._snapshot
        done = self._file_exists(run_dir.done_file)
        if done and self._done_since is None:
            self._done_since = now
        return RunFacts(
            requests=1 if self.leaving else 0,
            done=done,
            done_since=self._done_since,
            failed=bool(self._failure) or self._file_exists(run_dir.failed_file),
            reachable=self._watch is not None,
            own_command=self._trains and self.processes.job.spec.trainer.command is not None,
            begins_again=snapshot is not None and snapshot.finished == 0,
        )

    def _file_exists(self, file: Path) -> bool:
        """Whether a file of the run directory exists.

        If the disk does not answer, the last answer stays: the failover of a file server must not end the head.
        """
        try:
            self._exists[file] = file.exists()
        except OSError as error:
            if self._disk_warning.is_due():
                log.warning("event=disk-does-not-answer why=%r", error.strerror)
        return self._exists.get(file, False)

    # Act

    def _apply(self, action: Action, now: float) -> None:
        match action:
            case StartChild(name):
                self._start(name, now)
            case TerminateChild(name):
                self.steps[name].ask()
                self.children[name] = self.children[name].asked(now)
            case KillChild(name):
                self.steps[name].kill()
            case FailRun(reason, message, _, code):
                log.error("event=failed reason=%s message=%r", reason, message)
                try:
                    self.processes.run_dir.mark_failed(reason, message, code)
                except OSError as error:
                    log.error("event=failure-not-recorded why=%r", error.strerror)  # noqa: TRY400
                    self._failure = message
            case Finish():
                pass

    def _start(self, name: str, now: float) -> None:
        child = self.children[name]
        allocation = self._allocation_of(child)
        node = "" if allocation is None else allocation.node
        try:
            state = scheduler.node(node) if node else None
            # No step can start on a node that does not respond.
            if state is not None and not state.responds:
                raise SlurmError(f"{node} does not respond")
            if child.role == "coordinator":
                step = self.processes.coordinator(self._endpoint if self._port else "", self._port, self._metrics_port)
            elif child.role == "agent" and state is not None and allocation is not None:
                step = self.processes.agent(name, allocation, state.address, self._endpoint)
            else:
                step = self.processes.evaluators(name, allocation)
            step.start()
        except (SlurmError, OSError) as error:
            # Not a failure of the child: retry after a delay.
            log.warning("event=not-started name=%s node=%s why=%r", name, node or "here", str(error))
            self._not_before[name] = now + RETRY_SECONDS
            return
        self.steps[name] = step
        self.children[name] = child.started(now)
        log.info("event=start name=%s node=%s", name, node or "here")

    def _allocation_of(self, child: Child) -> NodeAllocation | None:
        """Return the node of a child; None: this node."""
        if child.role == "agent":
            return self._allocations[child.name]
        if child.role == "evaluator" and self._trains:
            own = sorted(
                allocation.node for allocation in self._allocations.values() if allocation.job == self.processes.job_id
            )
            return (
                NodeAllocation(self.processes.job_id, own[int(child.name.rpartition("-")[2]) % len(own)])
                if own
                else None
            )
        return None

    def close(self) -> None:
        """Kill all children, cancel the extensions, and delete the published files."""
        for step in self.steps.values():
            step.close()
        if self._watch is not None:
            self._watch.close()
        if self._trains:
            self._extensions.close()
            with suppress(OSError):
                (self.processes.run_dir.path / ENDPOINT).unlink(missing_ok=True)
        if self._target is not None:
            with suppress(OSError):
                self._target.unlink(missing_ok=True)

    def _finish(self) -> ExitCode:
        failed = None
        try:
            failed = self.processes.run_dir.failed()
        except OSError as error:
            log.warning("event=disk-does-not-answer why=%r", error.strerror)
        if failed:
            log.error("event=failed message=%r", str(failed.get("message") or failed.get("reason")))
        if failed or self._failure:
            return ExitCode.FAILED
        if self.leaving == "requeue":
            self._requeue()
            return ExitCode.PREEMPTED
        if self.leaving == "stop":
            log.info("event=stopped")
            return ExitCode.INTERRUPTED
        log.info("event=complete")
        return ExitCode.DONE

    def _requeue(self) -> None:
        """Requeue the job, unless SLURM is ending it, after a cancellation or with a requeue of its own.

        If many jobs reach their time limit together, a controller may answer late.
        """
        deadline = time.monotonic() + REQUEUE_SECONDS
        while True:
            try:
                state = next((job.state for job in scheduler.queue([self.processes.job_id])), "")
                # COMPLETING: a requeue would restart a job that the user has cancelled.
                if state != "RUNNING":
                    log.info("event=leaves state=%s", state or "unknown")
                    return
                log.info("event=requeue job=%s", self.processes.job_id)
                scheduler.run("scontrol", "requeue", self.processes.job_id)
                return
            except SlurmError as error:
                if not isinstance(error, SlurmUnavailableError) or time.monotonic() > deadline:
                    log.error("event=not-requeued why=%r", f"{error}; the same tandem submit continues it")  # noqa: TRY400
                    return
                log.warning("event=requeue-again why=%r", str(error))
                time.sleep(REQUEUE_PAUSE)


def main() -> int:
    """Entry point. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tandem_launcher.slurm.head", description="One job on SLURM.")
    parser.add_argument("what", choices=("train", "evaluate"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--manifest", help="manifest of the job, if the run directory does not record it")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="change a field of the manifest")
    parser.add_argument("--evaluators", action="store_true", help="start the evaluators on the training's nodes")
    parser.add_argument(
        "--replace-nodes", action="store_true", help="submit a job for a node in place of one that failed"
    )
    parser.add_argument(
        "--saving-seconds",
        type=float,
        default=SAVING_SECONDS,
        help="grace period of an agent between SIGTERM and SIGKILL",
    )
    parser.add_argument("--metrics-targets", type=Path, help="folder in which Prometheus looks for files with targets")
    parser.add_argument(
        "--container", action="append", default=[], help="a word of the command before Python; repeatable"
    )
    options, srun = _split(sys.argv[1:])
    args = parser.parse_args(options)
    job_id = own_job_id(args.what == "train", os.environ)
    if not job_id:
        print("tandem: this is a batch script of SLURM; submit it with sbatch", file=sys.stderr)
        return ExitCode.USAGE
    run_dir = RunDir(args.run_dir)
    try:
        python = [*args.container, "python" if args.container else sys.executable]
        job = _job(run_dir, args.manifest, args.overrides, job_id, args.what == "train", python)
    except (UserError, OSError, ValueError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return ExitCode.USAGE
    with tempfile.TemporaryDirectory(prefix=f"tandem-{job_id}-") as scratch:
        token = secrets.token_urlsafe(32)
        processes = SlurmProcessFactory(
            job, run_dir, srun, args.container, token, Path(scratch), job_id, args.saving_seconds
        )
        array = None if args.what == "train" else int(os.environ.get(ARRAY_TASK_ID, "0"))
        return SlurmRunner(processes, array, args.evaluators, args.metrics_targets, args.replace_nodes).run()


def own_job_id(trains: bool, variables: Mapping[str, str]) -> str:
    """Return the ID under which SLURM knows the job of this script; empty outside a job.

    The last element of an array has the ID of the array, which SLURM's commands take for all elements. So evaluators
    use ARRAY_INDEX. srun, which starts the steps of a training, accepts no such ID.
    """
    array, element = variables.get(ARRAY_JOB_ID, ""), variables.get(ARRAY_TASK_ID, "")
    return f"{array}_{element}" if array and element and not trains else variables.get(JOB_ID, "")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the head's own and the command after `--`, which starts a step."""
    position = argv.index("--") if "--" in argv else len(argv)
    return argv[:position], argv[position + 1 :]


def _job(
    run_dir: RunDir, manifest: str | None, overrides: Sequence[str], job_id: str, trains: bool, python: Sequence[str]
) -> DistributedTrainingJob:
    """Read the job from the run directory; record it there first if the script was submitted by hand.

    Args:
        python: command that starts Python on a node.

    Raises:
        UserError, OSError, ValueError: there is no job, or the run directory belongs to another SLURM job.
    """
    recorded = jobs.submission_of(run_dir.path)
    if trains and manifest is not None and (recorded is None or recorded.training != job_id):
        source = read_source(manifest)
        job = parse_job(source, tuple(overrides))
        raise_for_unmet(preparation.unmet_prerequisites(job, run_dir.path), source, tuple(overrides))
        for note in preparation.prepare(run_dir.path, job, False, "remove the folder"):
            log.info("event=note text=%r", note)
        jobs.record_submission(run_dir.path, Submission(job_id, python=python))
    elif trains and recorded is not None and recorded.training != job_id:
        raise UserError(f"{run_dir.path} belongs to job {recorded.training} now, and this is job {job_id}")
    if trains:
        need_space(run_dir.path)
    job = run_dir.read_job()
    run_dir.create()
    return job


if __name__ == "__main__":
    sys.exit(main())
