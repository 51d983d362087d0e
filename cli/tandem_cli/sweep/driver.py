"""The driver of a sweep: starts, prunes and finishes trials, until the budget is used.

One thread decides everything. What takes seconds (a submission, a stop, a change of workers) runs in a pool, one task a
trial at a time, so that a score that ends a trial is acted on while another trial is being submitted.

Everything that happens is written to the journal before it takes effect, so a driver that was killed at any point is
continued by the next one:

    killed                          the next driver
    after `ask`                     submits the trial with the values that were drawn
    during the submission           finds the job by its name, or submits it again: a job's name is its trial's number
    while trials run                follows their runs, which go on without a driver, from the last reported score
    between verdict and stop        stops the run
    between stop and end            ends the trial
    while trials are paused         continues those that are among the best
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.errors import UserError
from tandem.formatting import count_noun, metric_name, number, score
from tandem.rundir.layout import RunDir
from tandem.wire.reasons import Reason
from tandem.wire.status import Status
from tandem_cli.client.client import Client
from tandem_cli.client.run import RunHandle
from tandem_cli.platforms import PlatformError, RunNotFoundError
from tandem_cli.sweep.definition import LABEL, Definition, SweepFolder, Values, describe
from tandem_cli.sweep.promotion import Rungs
from tandem_cli.sweep.scores import Scores
from tandem_cli.sweep.study import COST, PAUSED, RUN, RUNG, VERDICT, Study, Trial, ascending, best_of

POLL_SECONDS = 0.25
"""Time between two looks at runs on this machine, in seconds."""
CLUSTER_POLL_SECONDS = 1.0
"""Time between two looks at jobs on a cluster, in seconds."""
STATUS_SECONDS = 1.0
"""Time between two questions about whether a run has ended, in seconds."""
MAX_FAILURES = 3
"""Trials that fail one after the other, without one that does not, before the sweep ends: the job itself is broken."""
RETRY_SECONDS = 10.0
"""Time until a submission that the platform did not answer is repeated, in seconds."""
MAX_RETRIES = 30
"""Repetitions after which the trial fails: the platform refuses."""
MAX_TASKS = 8
CLOCK_SECONDS = 30.0
"""Time between two records of the time that the sweep has taken, in seconds."""

Report = Callable[[str, Literal["", "good", "bad"]], None]
"""Receives a message: its text and its mood."""


class SweepFailedError(UserError):
    """The sweep cannot continue. Its folder has everything so far."""


@dataclass
class Active:
    """A trial that runs."""

    number: int
    name: str
    workers: int
    """Workers that it has, or is given by the task."""
    values: Values
    run: RunHandle | None = None
    scores: Scores | None = None
    reported: set[int] = field(default_factory=set)
    """Steps whose scores are in the journal."""
    last: tuple[int, float] | None = None
    """Newest evaluated step, and its score."""
    task: "Future[Any] | None" = None
    """A submission, a stop or a change of workers."""
    verdict: str = ""
    """Reason for which it is stopped."""
    cost: float | None = None
    is_pausing: bool = False
    """Whether it is stopped with a checkpoint, to continue once it is among the best."""
    polled_at: float = -math.inf
    retries: int = 0
    retry_at: float | None = None
    """Time of the next submission, after the platform did not answer."""


class Driver:
    """Drives one sweep. The caller holds the lock of its folder.

    Args:
        client: the place to which trials go.
        report: receives what happens.
    """

    def __init__(self, definition: Definition, folder: SweepFolder, client: Client, report: Report) -> None:
        self._definition, self._folder, self._client, self._report = definition, folder, client, report
        self._study = Study(definition, folder)
        self.metric, self.goal = self._study.metric, self._study.goal
        self._spec = definition.spec
        job = definition.parsed({}, definition.name)
        self._max_workers = job.spec.workers.replicas
        self._rungs: Rungs | None = None
        if self._spec.pruner.name == "promotion":
            first = self._spec.pruner.min_steps or job.spec.checkpoint.every_steps or 1
            self._rungs = Rungs(first, self._spec.pruner.factor, self.goal)
        can_grow = client.scales or self._rungs is not None
        self._first = min(job.spec.workers.min_replicas, self._max_workers) if can_grow else self._max_workers
        """Workers that a trial starts with."""
        self._limit = max(self._spec.workers or self._first, self._first)
        self._active: dict[int, Active] = {}
        self._failures = 0
        self._seconds_before = self._study.active_seconds
        self._started = self._recorded = time.monotonic()
        self._is_interrupted = False

    def run(self) -> bool:
        """Drive the sweep until its budget is used; returns whether it is, or else `interrupt` was called.

        Trials that run at the end of this call have saved and stopped, and continue with the next driver. Jobs on
        Kubernetes go on meanwhile.

        Raises:
            SweepFailedError: trials fail one after the other.
            UserError: the journal cannot be used any more.
        """
        pool = ThreadPoolExecutor(MAX_TASKS, thread_name_prefix="trial")
        try:
            self._adopt(pool)
            while not self._is_interrupted and self._tick(pool):
                time.sleep(CLUSTER_POLL_SECONDS if self._client.is_on_kubernetes else POLL_SECONDS)
            return not self._is_interrupted
        finally:
            self._pause(pool)
            with suppress(UserError):
                self._study.add_active_seconds(self._seconds)

    def interrupt(self) -> None:
        """Let `run` end soon."""
        self._is_interrupted = True

    @property
    def trials(self) -> list[Trial]:
        """All trials, by number."""
        return self._study.trials()

    @property
    def best(self) -> Trial | None:
        """The best trial; None while there is none."""
        return best_of(self.trials, self.goal)

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _tick(self, pool: ThreadPoolExecutor) -> bool:
        """Take one look at everything; returns whether the sweep goes on."""
        statuses = self._statuses()
        for active in list(self._active.values()):
            self._follow(active, statuses, pool)
        if time.monotonic() - self._recorded > CLOCK_SECONDS:
            self._recorded = time.monotonic()
            self._study.add_active_seconds(self._seconds)
        if self._failures >= MAX_FAILURES:
            raise SweepFailedError(self._failed())
        if reason := self._exceeded():
            for active in self._active.values():
                if not active.verdict:
                    self._condemn(active, reason, pool)
            if not self._active:
                self._end_paused()
            return bool(self._active)
        while (trial := self._next()) is not None:
            self._start(trial, pool, is_resumed=bool(trial.run))
        self._grow(pool)
        if not self._active:
            self._end_paused()
        return bool(self._active)

    # Starts

    def _adopt(self, pool: ThreadPoolExecutor) -> None:
        """Continue the trials of an earlier driver."""
        for trial in self.trials:
            if trial.is_paused:
                self._pause_again(trial)
            elif trial.state == "Running":
                self._start(trial, pool, is_resumed=True)

    def _pause_again(self, trial: Trial) -> None:
        """Stop a paused trial that runs: an earlier driver was killed before it had stopped it."""
        run = self._submitted(trial.run)
        with suppress(UserError):  # it is not running
            if run is not None and run.poll() is None:
                run.stop()

    def _next(self) -> Trial | None:
        """Begin the next trial, if the budget and the workers allow another one."""
        if self._free_workers < self._first:
            return None
        has_more = self._has_more()
        if self._rungs is not None:
            trials, is_last = self.trials, not has_more and not self._active
            if (trial := self._rungs.next(trials, set(self._active), is_last)) is not None:
                return self._promote(trial)
        return self._study.ask() if has_more else None

    @property
    def _free_workers(self) -> int:
        return self._limit - sum(active.workers for active in self._active.values())

    def _promote(self, trial: Trial) -> Trial:
        """Let a paused trial pass its rung."""
        self._study.note(trial.number, RUNG, trial.rung + 1)
        self._study.note(trial.number, PAUSED, "")
        return self.trials[trial.number]

    def _has_more(self) -> bool:
        """Whether the budget allows another trial."""
        trials = self.trials
        is_waiting = any(trial.state == "Waiting" for trial in trials)
        if self._spec.sampler == "grid":
            # What fails in a grid would fail again.
            return is_waiting
        return sum(trial.state not in ("Failed", "Waiting") for trial in trials) < self._spec.budget.trials

    def _start(self, trial: Trial, pool: ThreadPoolExecutor, is_resumed: bool = False) -> None:
        name = self._definition.trial_name(trial.number)
        # Nobody else will need what is free now.
        workers = min(self._max_workers, self._free_workers) if trial.rung and not self._has_more() else self._first
        active = Active(trial.number, name, max(self._first, workers), trial.values)
        active.reported, active.verdict = set(trial.scores), trial.reason
        if trial.last_step is not None:
            active.last = trial.last_step, trial.scores[trial.last_step]
        self._active[trial.number] = active
        if not trial.run:
            self._study.note(trial.number, RUN, name)
        effect = "continues" if is_resumed else "starts"
        self._report(f"trial {trial.number} {effect}: {describe(trial.values)}", "")
        active.task = pool.submit(self._submit, active, is_resumed)

    def _submit(self, active: Active, is_resumed: bool) -> RunHandle:
        """Submit the job of a trial, or find it, where an earlier driver has submitted it."""
        run_dir = None if self._client.is_on_kubernetes else self._folder.run_dir(active.name)
        if is_resumed and (run := self._submitted(active.name)) is not None:
            # A run here that was stopped continues from its checkpoint by being submitted again.
            if active.verdict or ((ended := run.poll()) is not None and ended.phase != "Suspended"):
                return run
            if run_dir is None and run.status().phase == "Suspended":
                run.resume()
            if run_dir is None or ended is None:
                return run
        data = self._definition.manifest(active.values, active.name)
        overrides = {"workers.replicas": active.workers} if active.workers != self._max_workers else {}
        code = self._definition.code or None
        return self._client.submit(data, overrides=overrides, code=code, run_dir=run_dir)

    def _submitted(self, name: str) -> RunHandle | None:
        """The run of a trial; None if it was not submitted.

        Raises:
            PlatformError: the platform does not answer.
        """
        try:
            return self._client.run(name if self._client.is_on_kubernetes else self._folder.run_dir(name))
        except UserError as error:
            if isinstance(error, PlatformError) and not isinstance(error, RunNotFoundError):
                raise
            return None

    # Running trials

    def _statuses(self) -> Mapping[str, Status] | None:
        """The status of all trials on Kubernetes; None if the cluster does not answer."""
        if not self._client.is_on_kubernetes:
            return {}
        try:
            return self._client.statuses(f"{LABEL}={self._definition.name}")
        except UserError:
            return None

    def _follow(self, active: Active, statuses: Mapping[str, Status] | None, pool: ThreadPoolExecutor) -> None:
        """Take one look at a trial.

        Args:
            statuses: status of each trial on Kubernetes, taken before; None: it does not answer.
        """
        if active.task is not None and not self._is_task_over(active):
            return
        if active.run is None and active.retry_at is not None and time.monotonic() > active.retry_at:
            active.retry_at, active.task = None, pool.submit(self._submit, active, True)
        if active.run is None or active.number not in self._active:
            return
        if active.verdict or active.is_pausing:
            if active.task is None:
                active.task = pool.submit(self._stop, active.run, active.is_pausing)
            return
        try:
            status, is_over = self._poll(active, statuses)
            self._score(active, status, pool)
        except RunNotFoundError:
            self._end(active, "Failed", "its run was deleted")
            return
        except (PlatformError, OSError, ValueError):
            # The platform does not answer, or a file is half visible: the next look tells.
            return
        if is_over and not active.verdict:
            self._finish(active, status)

    def _poll(self, active: Active, statuses: Mapping[str, Status] | None) -> tuple[Status, bool]:
        """The status of a trial, and whether it has ended; an empty status where scores are all that is wanted.

        Raises:
            RunNotFoundError: it was deleted.
            PlatformError: the platform does not answer.
        """
        assert active.run is not None, "the caller has checked it"
        if self._client.is_on_kubernetes:
            if statuses is None:
                raise PlatformError("the cluster does not answer")
            if active.name not in statuses:
                # It may have been submitted since.
                statuses = {active.name: active.run.status()}
            status = statuses[active.name]
            return status, status.phase in ("Succeeded", "Failed")
        if time.monotonic() - active.polled_at <= STATUS_SECONDS:
            return Status(), False
        active.polled_at = time.monotonic()
        if (ended := active.run.poll()) is not None:
            return ended, True
        return active.run.status() if self._spec.budget.cost is not None else Status(), False

    def _is_task_over(self, active: Active) -> bool:
        """Take the result of a trial's task, if it has one; a stop or a failed submission ends the trial."""
        assert active.task is not None, "the caller has checked it"
        if not active.task.done():
            return False
        task, active.task = active.task, None
        try:
            result = task.result()
        except UserError as error:
            if active.run is None and isinstance(error, PlatformError) and active.retries < MAX_RETRIES:
                if not active.retries:
                    self._report(f"trial {active.number} waits: {error}", "bad")
                active.retries += 1
                active.retry_at = time.monotonic() + RETRY_SECONDS
            elif active.run is None:
                self._end(active, "Failed", str(error))
            elif active.verdict:
                self._stopped(active)
            elif active.is_pausing:
                self._paused(active)
            return True
        if isinstance(result, RunHandle):
            active.run = result
            active.scores = Scores(result, self.metric)
        elif active.verdict:
            self._stopped(active)
        elif active.is_pausing:
            self._paused(active)
        return True

    def _score(self, active: Active, status: Status, pool: ThreadPoolExecutor) -> None:
        """Report new scores, and decide whether the trial goes on."""
        assert active.scores is not None, "it comes with the run"
        if status.ledger is not None:
            active.cost = status.ledger.cost.total if status.ledger.cost is not None else None
        for step, value in active.scores.new(status):
            if step in active.reported:
                continue
            active.reported.add(step)
            active.last = max(active.last or (-1, 0.0), (step, value))
            is_worse = self._study.report(active.number, step, value)
            if active.verdict or active.is_pausing:
                continue
            if self._rungs is not None:
                self._climb(active, step, value, pool)
            elif is_worse and not self._is_trained(active):
                text = score(self.metric, value)
                self._condemn(active, f"{metric_name(self.metric)} {text} at step {step:,}", pool)

    def _climb(self, active: Active, step: int, value: float, pool: ThreadPoolExecutor) -> None:
        """Pause a trial that has reached a rung, unless it is among the best there."""
        assert self._rungs is not None, "the caller has checked it"
        trials = self.trials
        trial = trials[active.number]
        while self._rungs.score(trial, trial.rung) is not None:
            if not self._rungs.passes(trial, trials):
                if not self._is_trained(active):
                    reason = f"{metric_name(self.metric)} {score(self.metric, value)} at step {step:,}"
                    self._study.note(active.number, PAUSED, reason)
                    active.is_pausing = True
                    assert active.run is not None, "it has scores"
                    active.task = pool.submit(self._stop, active.run, True)
                return
            trial = replace(trial, rung=trial.rung + 1)
            self._study.note(active.number, RUNG, trial.rung)

    def _paused(self, active: Active) -> None:
        """Free the workers of a trial that has paused, or end it if it has ended meanwhile."""
        assert active.run is not None, "it was stopped"
        try:
            ended = active.run.poll()
            if ended is None and active.run.status().phase != "Suspended":
                return
        except PlatformError:
            return  # the next look stops it again
        active.is_pausing = False
        if ended is not None and ended.phase in ("Succeeded", "Failed"):
            self._study.note(active.number, PAUSED, "")
            return  # the next look finishes it
        del self._active[active.number]
        self._report(f"trial {active.number} paused: {self.trials[active.number].reason}", "")

    def _end_paused(self) -> None:
        """End the trials that are paused when nothing else is left to do."""
        for trial in self.trials:
            if trial.is_paused:
                self._study.note(trial.number, VERDICT, trial.reason)
                self._study.end(trial.number, "Pruned")

    def _is_trained(self, active: Active) -> bool:
        """Whether only evaluations are left to do: a stop would save nothing, and cost the last scores."""
        assert active.run is not None, "it has scores"
        return active.run.phase in ("Draining", "Succeeded", "Failed")

    def _condemn(self, active: Active, reason: str, pool: ThreadPoolExecutor) -> None:
        """Stop a trial: first the verdict is recorded, then it takes effect."""
        self._study.note(active.number, VERDICT, reason)
        active.verdict = reason
        if active.run is not None and active.task is None:
            active.task = pool.submit(self._stop, active.run)

    def _stop(self, run: RunHandle, saves: bool = False) -> str:
        # Without a save: what was evaluated is saved, and the rest is not wanted. A cluster can only suspend.
        return run.stop(now=not saves and not self._client.is_on_kubernetes)

    def _stopped(self, active: Active) -> None:
        """End a trial whose run was stopped, or ended meanwhile."""
        assert active.run is not None, "it was stopped"
        assert active.scores is not None, "they come with the run"
        try:
            status = active.run.status()
            if active.run.poll() is None and status.phase != "Suspended":
                return
            for step, value in active.scores.new(status):
                if step not in active.reported:
                    self._study.report(active.number, step, value)
        except (PlatformError, OSError, ValueError):
            return  # the next look stops it again
        self._end(active, "Pruned", active.verdict)

    # Ends

    def _finish(self, active: Active, status: Status) -> None:
        """End a trial whose run has ended by itself, or by its user."""
        value = self.trials[active.number].score
        metrics = set() if active.scores is None else active.scores.metrics
        metric = self.metric
        if status.phase == "Suspended":
            self._end(active, "Pruned", "stopped by hand")
        elif status.phase == "Failed" and not self._has_diverged(active, status):
            self._end(active, "Failed", status.message or "its run has failed")
        elif value is not None:
            self._end(active, "Complete" if status.phase == "Succeeded" else "Pruned", "", value)
        elif metrics and metric not in metrics:
            reported = ", ".join(sorted(metrics))
            self._end(active, "Failed", f"no evaluator reports {metric}; they report {reported}")
        elif metrics or status.phase == "Failed":
            # It counts as the worst trial: another one with these values would diverge, too.
            self._end(active, "Pruned", f"no checkpoint has a finite {metric_name(metric)}")
        else:
            self._end(active, "Failed", "none of its checkpoints was evaluated")

    def _has_diverged(self, active: Active, status: Status) -> bool:
        failed = None
        if active.run is not None and (folder := active.run.folder) is not None:
            failed = (RunDir(folder).failed() or {}).get("reason")
        reasons = {condition.reason for condition in status.conditions if condition.type == "Failed"}
        return Reason.DIVERGED in {failed, *reasons}

    def _end(
        self, active: Active, state: Literal["Complete", "Pruned", "Failed"], reason: str, value: float | None = None
    ) -> None:
        number = active.number
        if active.cost is not None:
            self._study.note(number, COST, active.cost)
        if reason and reason != active.verdict:
            self._study.note(number, VERDICT, reason)
        self._study.end(number, state, value)
        del self._active[number]
        self._failures = self._failures + 1 if state == "Failed" else 0
        if state == "Failed":
            self._report(f"trial {number} failed: {reason}", "bad")
            return
        leader = best_of(self.trials, self.goal)
        if state == "Pruned":
            self._report(f"trial {number} pruned: {reason}", "")
            return
        assert value is not None, "a complete trial has a score"
        is_leader = leader is not None and leader.number == number
        note = ", the best so far" if is_leader else ""
        metric = self.metric
        self._report(f"trial {number} complete: {metric_name(metric)} {score(metric, value)}{note}", "good")

    def _failed(self) -> str:
        reasons = [trial.reason for trial in self.trials if trial.state == "Failed"]
        return (
            f"the last {MAX_FAILURES} trials of {self._definition.name} failed, the newest because: "
            f"{reasons[-1] if reasons else 'unknown'}. Mend the job, and start the sweep again"
        )

    def _exceeded(self) -> str:
        """The part of the budget that is used up, besides trials; empty if there is none."""
        budget = self._spec.budget
        if budget.hours is not None and self._seconds > budget.hours * 3600:
            return f"the budget of {number(budget.hours)} h is used"
        if budget.cost is not None:
            trials = self.trials
            cost = sum(trial.cost or 0.0 for trial in trials)
            cost += sum(active.cost or 0.0 for active in self._active.values())
            if cost > budget.cost:
                return f"the budget of {number(budget.cost)} is used"
        return ""

    # Workers

    def _grow(self, pool: ThreadPoolExecutor) -> None:
        """Give workers that no further trial will use to the leaders."""
        if not self._client.scales or self._has_more():
            return
        running = [a for a in self._active.values() if a.run is not None and a.task is None and not a.verdict]
        for active, workers in promoted(running, self._free_workers, self._max_workers, self.goal).items():
            chosen = self._active[active]
            chosen.workers = workers
            assert chosen.run is not None, "only running trials grow"
            chosen.task = pool.submit(chosen.run.scale, workers)
            self._report(f"trial {active} gets {count_noun(workers, 'worker')}", "")

    def _pause(self, pool: ThreadPoolExecutor) -> None:
        """Wait for tasks, then save and stop all running trials of this machine and of SLURM."""
        pool.shutdown(wait=True, cancel_futures=True)
        runs = []
        for active in self._active.values():
            if active.run is None and active.task is not None and not active.task.cancelled():
                with suppress(UserError):
                    active.run = active.task.result()
            if active.run is not None and not self._client.is_on_kubernetes:
                runs.append(active.run)
        if not runs:
            return
        self._report(f"saving and stopping {count_noun(len(runs), 'trial')}", "")
        with ThreadPoolExecutor(MAX_TASKS) as savers:
            for run in runs:
                savers.submit(_save, run)


def _save(run: RunHandle) -> None:
    # It may have ended meanwhile, or be starting: the next driver follows it.
    with suppress(UserError):
        run.stop()


def promoted(running: Sequence[Active], free: int, max_workers: int, goal: str) -> Mapping[int, int]:
    """Choose trials that get free workers, the best first: their numbers of workers, by trial.

    Args:
        free: workers that nobody uses.
        max_workers: maximum number of workers of a trial.
    """
    scored = [active for active in running if active.last is not None]
    sizes: dict[int, int] = {}
    for active in sorted(scored, key=lambda active: (ascending((active.last or (0, 0.0))[1], goal), active.number)):
        extra = min(free, max_workers - active.workers)
        if extra > 0:
            sizes[active.number] = active.workers + extra
            free -= extra
    return sizes
