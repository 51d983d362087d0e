"""The process in a batch script of SLURM: it starts everything of a job, and starts again what fails.

    python -m tandem_cli.slurm.head train --run-dir DIR [--evaluators] -- srun OPTIONS…
    python -m tandem_cli.slurm.head evaluate --run-dir DIR

The coordinator runs beside it, on the first node. On every node of the job, a step (tandem_cli.slurm.step) runs one
agent; with `--evaluators` further steps run the evaluators on the same nodes. Which to start, stop or give up on is
decided by tandem.supervision, as on a laptop. What differs: nodes come and go. A node that fails is taken from the job
by SLURM, and its agent with it; the coordinator then forms a smaller group. A step that could not be started, or was
lost with its node, is no failure of its agent, and is tried again later. For a node that failed, or for workers that
`tandem scale` adds, it submits one-node jobs (tandem_cli.slurm.extension).

SIGTERM comes before the time limit and before a preemption: everything saves and leaves, and the job goes back into the
queue under the same number. At SIGINT, which `tandem stop` sends, it ends instead. Both reach this process alone
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

from tandem import launch
from tandem.errors import UserError
from tandem.exitcode import ExitCode
from tandem.job import DistributedTrainingJob
from tandem.manifest.reading import job_of, read_source, refuse
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT
from tandem.status import Snapshot
from tandem.supervision import (
    SAVING_SECONDS,
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
)
from tandem_cli.local.display import Watch
from tandem_cli.local.local_run import COORDINATOR, STALE_SECONDS, members_at_work
from tandem_cli.local.prepare import need_space, publish
from tandem_cli.local.processes import user_name
from tandem_cli.slurm import jobs, scheduler, submission
from tandem_cli.slurm.crew import Crew, Step
from tandem_cli.slurm.extension import Extensions
from tandem_cli.slurm.jobs import Place, Submission
from tandem_cli.slurm.refusals import Refusals
from tandem_cli.slurm.scheduler import SlurmAwayError, SlurmError, Throttle
from tandem_cli.slurm.step import HERE_SECONDS

TICK_SECONDS = 0.2
"""Between two looks at the children."""
NODES_SECONDS = 10.0
"""Between two questions to SLURM which nodes the job has."""
TRAINING_SECONDS = 60.0
"""Between two questions of the evaluators whether their training is in the queue still."""
AGAIN_SECONDS = 10.0
"""Before another try to start a step on a node that could not start one."""
REQUEUE_SECONDS, REQUEUE_PAUSE = 300.0, 2.0
"""How long SLURM is asked to requeue the job where it does not answer, and the pause between."""
JOB_ID, ARRAY_JOB_ID, ARRAY_TASK_ID = "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"

log = logging.getLogger("tandem.slurm")


class Head:
    """One life of a job on SLURM, or of one element of its evaluators' array.

    Args:
        array: the place in the array of evaluators; None: this is the training.
        beside: whether evaluators run as steps of the training.
        metrics_targets: the folder in which Prometheus looks for targets; None: it is not told.
        replace_nodes: whether it asks for nodes that it lacks.
    """

    def __init__(
        self,
        crew: Crew,
        array: int | None,
        beside: bool,
        metrics_targets: Path | None = None,
        replace_nodes: bool = False,
    ) -> None:
        self.crew = crew
        self.leaving: Literal["", "requeue", "stop"] = ""
        """Whether somebody asked to leave, and what for."""
        self.steps: dict[str, Step] = {}
        self._places: dict[str, Place] = {}
        """Of each agent: a node that the job, or an extension of it, has now."""
        self._extensions = Extensions(crew.run_dir.path, replace_nodes)
        self._refusals = Refusals(crew.run_dir.path)
        self._declined: int | None = None
        """Nodes that the user does not want of those that the manifest names; None: not known yet."""
        self._wished: int | None = None
        """Desired number of replicas at the last look."""
        self._leaves: set[str] = set()
        """Agents whose nodes are given back."""
        self.children: dict[str, Child] = {}
        self._not_before: dict[str, float] = {}
        self._address = ""
        self._port = 0
        self._metrics_port = None if metrics_targets is None else 0
        # Over a requeue the number of the job stays, and so does the name of its file.
        self._target = None if metrics_targets is None else metrics_targets / f"tandem-{crew.job_id}.json"
        self._watch: Watch | None = None
        self._publish_at: float | None = 0.0
        """When the coordinator's address is published, for the first time or again; None: it was."""
        self.ask_nodes = Throttle(NODES_SECONDS)
        self._ask_training = Throttle(TRAINING_SECONDS)
        self._greet = Throttle(HERE_SECONDS)
        self._done_since: float | None = None
        self._there: dict[Path, bool] = {}
        """Files of the run directory, and whether they were there at the last look."""
        self._say_silent = Throttle(AGAIN_SECONDS)
        self._failure = ""
        """Why the run has failed, where the run directory cannot say it: its disk is full."""
        if array is not None:
            self._add(f"evaluator-{array}", "evaluator")
            return
        self._add(COORDINATOR, "coordinator")
        for index in range(crew.job.spec.evaluation.replicas if beside else 0):
            self._add(f"evaluator-{index}", "evaluator")

    def _add(self, name: str, role: Role) -> None:
        self.children[name] = Child(name=name, role=role, saving_seconds=self.crew.saving_seconds)

    def run(self) -> ExitCode:
        """Until nothing runs and nothing will."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            while not self.turn(time.monotonic()):
                time.sleep(TICK_SECONDS)
        finally:
            self.close()
        return self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.leaving != "stop":
            self.leaving = "stop" if number == signal.SIGINT else "requeue"

    @property
    def _trains(self) -> bool:
        return COORDINATOR in self.children

    def turn(self, now: float) -> bool:
        """Look, and do what is due; whether nothing runs and nothing will."""
        self._look(now)
        if self._greet.is_due():
            for step in self.steps.values():
                step.greet()
        known = [child for child in self.children.values() if child.running or child.name not in self._leaves]
        facts = self._facts(now)
        actions = decide(known, facts, now)
        if not (self.leaving or facts.failed) and self._refusals.is_hopeless(self._places):
            why = f"srun starts no agent of this job: {self._refusals.why}"
            actions = [FailRun("StepsRefused", why, next(iter(self._places)), ExitCode.FAILED)]
        for action in actions:
            if not (isinstance(action, StartChild) and now < self._not_before.get(action.name, 0.0)):
                self._do(action, now)
        if self._watch is not None:
            self._watch.calm(self._is_calm)
        return any(isinstance(action, Finish) for action in actions)

    @property
    def _is_calm(self) -> bool:
        """Whether nothing waits for what the coordinator says next."""
        return not self.leaving and all(child.running for child in self.children.values())

    # What is so

    def _look(self, now: float) -> None:
        for name, child in list(self.children.items()):
            if child.running and (code := self.steps[name].ended()) is not None:
                self.children[name] = self._ended(child, code, now)
            elif child.running and self._refusals.waits_for(name) and self.steps[name].preamble() is None:
                self._refusals.begun(name)
        if self._trains:
            self._look_at_coordinator(now)
            if not self.leaving and self.ask_nodes.is_due():
                self._look_at_nodes(now)
        elif not self.leaving and self._ask_training.is_due() and self._has_no_training():
            log.info("event=no-training")
            self.leaving = "stop"

    def _ended(self, child: Child, code: int, now: float) -> Child:
        step = self.steps[child.name]
        outcome, said = step.outcome(), step.preamble()
        if said is None:
            self._refusals.begun(child.name)
        if outcome is None:
            # Its node, or what SLURM does there, and not the job.
            log.warning("event=lost name=%s node=%s srun=%d", child.name, step.node or "here", code)
            if said and step.node and not self.leaving and self._is_up(step.node):
                self._refusals.add(child.name, step.node, said)
            self._not_before[child.name] = now + AGAIN_SECONDS
            self.ask_nodes.hurry()
            # Where only evaluations are left, one that is lost again and again is given up.
            is_last = child.role == "evaluator" and self._done_since is not None and not child.proven
            failures = child.failures + (1 if is_last else 0)
            return replace(child, running=False, ended_at=now, code=None, failures=failures)
        if child.name in self._leaves:
            self.ask_nodes.hurry()
        if child.role == "coordinator" and outcome == ExitCode.SUPERSEDED:
            # Another coordinator has this run now.
            self.leaving = "stop"
        level = logging.INFO if outcome == 0 or self.leaving else logging.WARNING
        log.log(level, "event=ended name=%s node=%s how=%r", child.name, step.node or "here", ending(outcome))
        return child.ended(outcome, now)

    def _has_no_training(self) -> bool:
        """Whether the job that these evaluators are for has left the queue and is not complete."""
        recorded = jobs.of(self.crew.run_dir.path)
        try:
            gone = recorded is None or not scheduler.queue([recorded.training])
        except SlurmError:
            return False
        return gone and not self.crew.run_dir.ended()

    def _look_at_coordinator(self, now: float) -> None:
        if self._watch is None and self._address and (ports := launch.ports(self.crew.port_file)):
            self._port = ports[0]
            self._watch = Watch(f"127.0.0.1:{self._port}", self.crew.token)
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
        """Say in the run directory where the coordinator is, for the user's commands. Training goes on without."""
        try:
            publish(self.crew.run_dir.path / ENDPOINT, f"http://{self._endpoint}", self.crew.token)
            self._publish_at = None
        except OSError as error:
            self._publish_at = now + AGAIN_SECONDS
            log.warning("event=endpoint-not-published why=%r", error.strerror)

    def _publish_target(self, file: Path, address: str) -> None:
        """Tell Prometheus where the metrics are. Training goes on without."""
        run_dir = self.crew.run_dir.path
        labels = {"job": self.crew.job.metadata.name, "run": str(run_dir), "user": user_name(os.geteuid())}
        try:
            replace_json(file, [{"targets": [address], "labels": labels | {"slurm_job_id": self.crew.job_id}}])
        except OSError as error:
            log.warning("event=metrics-not-published file=%s why=%r", file, error.strerror)

    @property
    def _endpoint(self) -> str:
        return launch.endpoint(self._address, self._port)

    @property
    def _snapshot(self) -> Snapshot | None:
        return self._watch.newest if self._watch else None

    def _look_at_nodes(self, now: float) -> None:
        try:
            own = [Place(self.crew.job_id, node) for node in scheduler.nodes(self.crew.job_id)]
            there = [*own, *self._extensions.look()]
            if not self._address:
                self._address = scheduler.node(os.environ.get("SLURMD_NODENAME") or own[0].node).address
        except (SlurmError, IndexError, OSError) as error:
            log.warning("event=nodes-unknown why=%r", str(error))
            return
        mine = os.environ.get("SLURMD_NODENAME")
        if own and mine and mine not in {place.node for place in own}:
            # SLURM cannot reach it, so its warnings cannot reach the head.
            log.warning("event=node-given-up node=%s", mine)
            self.leaving = "requeue"
            return
        if self._declined is None:
            # Somebody has changed the script.
            self._declined = max(0, self.crew.job.spec.workers.replicas - len(own))
        for name, place in list(self._places.items()):
            if place not in there and place not in self._extensions.ending:
                log.warning("event=node-gone name=%s node=%s", name, place.node)
                if place.job == self.crew.job_id and self._is_up(place.node):
                    # It did not fail: somebody has made the job smaller.
                    self._declined += 1
                self.children.pop(name)
                if step := self.steps.pop(name, None):
                    step.close()
                del self._places[name]
                self._refusals.drop(name)
        for place in there:
            if place not in self._places.values():
                name = next(f"worker-{i}" for i in range(len(there)) if f"worker-{i}" not in self._places)
                self._places[name] = place
                self._add(name, "agent")
                log.info("event=node name=%s node=%s job=%s", name, place.node, place.job)
        if self._snapshot is not None and self._snapshot.status.workers is not None:
            wished = self._snapshot.status.workers.desired
            if self._wished not in (None, wished):
                # A number that was just given counts whole.
                self._declined = 0
            self._wished = wished
            self._extend(max(0, wished - self._declined - len(own)), now)

    def _is_up(self, node: str) -> bool:
        try:
            return scheduler.node(node).responds
        except SlurmError:
            return False

    def _extend(self, wanted: int, now: float) -> None:
        """Ask for the nodes that are lacking besides the job's own, and give back those that are too many."""
        done = self._is_there(self.crew.run_dir.done_file)
        if done:
            wanted = 0
        self._extensions.ask_for(wanted)
        surplus = self._extensions.surplus(wanted)
        self._leaves = {name for name, place in self._places.items() if place.job in surplus}
        at_work = {name for name in self._leaves if self.children[name].running}
        for name in at_work:
            # Once training is complete, agents leave by themselves.
            if not done and self.children[name].asked_at is None:
                self._do(Ask(name), now)
        for job in surplus:
            if not any(self._places[name].job == job for name in at_work):
                self._extensions.give_back(job)

    def _facts(self, now: float) -> Facts:
        run_dir, snapshot = self.crew.run_dir, self._snapshot
        done = self._is_there(run_dir.done_file)
        if done and self._done_since is None:
            self._done_since = now
        return Facts(
            requests=1 if self.leaving else 0,
            done=done,
            done_since=self._done_since,
            failed=bool(self._failure) or self._is_there(run_dir.failed_file),
            reachable=self._watch is not None,
            own_command=self._trains and self.crew.job.spec.trainer.command is not None,
            begins_again=snapshot is not None and snapshot.finished == 0,
        )

    def _is_there(self, file: Path) -> bool:
        """Whether a file of the run directory is there. Where the disk does not say, it is as it was: a server that
        changes over must not end the head."""
        try:
            self._there[file] = file.exists()
        except OSError as error:
            if self._say_silent.is_due():
                log.warning("event=disk-does-not-answer why=%r", error.strerror)
        return self._there.get(file, False)

    # What is done

    def _do(self, action: Action, now: float) -> None:
        match action:
            case StartChild(name):
                self._start(name, now)
            case Ask(name):
                self.steps[name].ask()
                self.children[name] = self.children[name].asked(now)
            case Kill(name):
                self.steps[name].kill()
            case FailRun(reason, message, _, code):
                log.error("event=failed reason=%s message=%r", reason, message)
                try:
                    self.crew.run_dir.mark_failed(reason, message, code)
                except OSError as error:
                    log.error("event=failure-not-recorded why=%r", error.strerror)  # noqa: TRY400
                    self._failure = message
            case Finish():
                pass

    def _start(self, name: str, now: float) -> None:
        child = self.children[name]
        place = self._place(child)
        node = "" if place is None else place.node
        try:
            state = scheduler.node(node) if node else None
            if state is not None and not state.responds:
                raise SlurmError(f"{node} does not respond")
            if child.role == "coordinator":
                step = self.crew.coordinator(self._endpoint if self._port else "", self._port, self._metrics_port)
            elif child.role == "agent" and state is not None and place is not None:
                step = self.crew.agent(name, place, state.address, self._endpoint)
            else:
                step = self.crew.evaluators(name, place)
            step.start()
        except (SlurmError, OSError) as error:
            log.warning("event=not-started name=%s node=%s why=%r", name, node or "here", str(error))
            self._not_before[name] = now + AGAIN_SECONDS
            return
        self.steps[name] = step
        self.children[name] = child.started(now)
        log.info("event=start name=%s node=%s", name, node or "here")

    def _place(self, child: Child) -> Place | None:
        """Where a child runs; None: here."""
        if child.role == "agent":
            return self._places[child.name]
        if child.role == "evaluator" and self._trains:
            own = sorted(place.node for place in self._places.values() if place.job == self.crew.job_id)
            return Place(self.crew.job_id, own[int(child.name.rpartition("-")[2]) % len(own)]) if own else None
        return None

    def close(self) -> None:
        """End everything that it has started."""
        for step in self.steps.values():
            step.close()
        if self._watch is not None:
            self._watch.close()
        if self._trains:
            self._extensions.close()
            with suppress(OSError):
                (self.crew.run_dir.path / ENDPOINT).unlink(missing_ok=True)
        if self._target is not None:
            with suppress(OSError):
                self._target.unlink(missing_ok=True)

    def _end(self) -> ExitCode:
        failed = None
        try:
            failed = self.crew.run_dir.failed()
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
        """Go back into the queue, unless SLURM is ending the job: it was cancelled, or SLURM requeues it.

        Where many jobs come to their time limit together, a controller may take its time to answer.
        """
        until = time.monotonic() + REQUEUE_SECONDS
        while True:
            try:
                state = next((job.state for job in scheduler.queue([self.crew.job_id])), "")
                if state != "RUNNING":
                    log.info("event=leaves state=%s", state or "unknown")
                    return
                log.info("event=requeue job=%s", self.crew.job_id)
                scheduler.ask("scontrol", "requeue", self.crew.job_id)
                return
            except SlurmError as error:
                if not isinstance(error, SlurmAwayError) or time.monotonic() > until:
                    log.error("event=not-requeued why=%r", f"{error}; the same tandem submit goes on")  # noqa: TRY400
                    return
                log.warning("event=requeue-again why=%r", str(error))
                time.sleep(REQUEUE_PAUSE)


def main() -> int:
    """Entry point. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tandem_cli.slurm.head", description="One job on SLURM.")
    parser.add_argument("what", choices=("train", "evaluate"))
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--manifest", help="the job, where it is not recorded in the run directory")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="change a field of the manifest")
    parser.add_argument("--evaluators", action="store_true", help="start the evaluators on the training's nodes")
    parser.add_argument("--replace-nodes", action="store_true", help="ask for a node in place of one that failed")
    parser.add_argument(
        "--saving-seconds", type=float, default=SAVING_SECONDS, help="what an agent gets between SIGTERM and SIGKILL"
    )
    parser.add_argument("--metrics-targets", type=Path, help="folder in which Prometheus looks for files with targets")
    parser.add_argument("--container", action="append", default=[], help="a word before Python; repeatable")
    own, srun = _split(sys.argv[1:])
    args = parser.parse_args(own)
    job_id = own_number(args.what == "train", os.environ)
    if not job_id:
        print("tandem: this is for a batch script of SLURM; submit it with sbatch", file=sys.stderr)
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
        crew = Crew(job, run_dir, srun, args.container, token, Path(scratch), job_id, args.saving_seconds)
        array = None if args.what == "train" else int(os.environ.get(ARRAY_TASK_ID, "0"))
        return Head(crew, array, args.evaluators, args.metrics_targets, args.replace_nodes).run()


def own_number(trains: bool, variables: Mapping[str, str]) -> str:
    """By which number SLURM knows the job of this script; empty outside of a job.

    The last element of an array has the number of the array, by which SLURM understands all elements. Evaluators ask by
    their place in it. srun, by which steps of a training start, takes no such number.
    """
    array, element = variables.get(ARRAY_JOB_ID, ""), variables.get(ARRAY_TASK_ID, "")
    return f"{array}_{element}" if array and element and not trains else variables.get(JOB_ID, "")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and the command after `--`, which starts a step."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _job(
    run_dir: RunDir, manifest: str | None, overrides: Sequence[str], job_id: str, trains: bool, python: Sequence[str]
) -> DistributedTrainingJob:
    """The job, which is recorded in the run directory afterwards.

    Args:
        python: words that start Python on a node.

    Raises:
        UserError, OSError, ValueError: there is none, or the run directory is another job's of SLURM.
    """
    recorded = jobs.of(run_dir.path)
    if trains and manifest is not None and (recorded is None or recorded.training != job_id):
        source = read_source(manifest)
        job = job_of(source, tuple(overrides))
        refuse(submission.lacking(job, run_dir.path), source, tuple(overrides))
        for note in submission.prepare(run_dir.path, job, False, "remove the folder"):
            log.info("event=note text=%r", note)
        jobs.record(run_dir.path, Submission(job_id, python=python))
    elif trains and recorded is not None and recorded.training != job_id:
        raise UserError(f"{run_dir.path} belongs to job {recorded.training} by now, and this is job {job_id}")
    if trains:
        need_space(run_dir.path)
    job = run_dir.read_job()
    run_dir.create()
    return job


if __name__ == "__main__":
    sys.exit(main())
